"""Action: build an engine as a job of the builder and say meanwhile what it does. Options: library/engine_build.py."""

from __future__ import annotations

import contextlib
import shlex
import time
from pathlib import PurePosixPath
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

POLL_S = 5
#: Seconds between two progress lines of a step that stays the same.
REPEAT_S = 30


class ActionModule(ActionBase):
    """Start the module as a job of the builder, which a dropped connection does not end, and wait for it."""

    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        """Run the action; the result is the module's."""
        result = super().run(tmp, task_vars)
        args = self._task.args
        if self._task.check_mode:
            return {**result, **self._execute_module(module_args=args, task_vars=task_vars)}
        limit = int(args.get("timeout_s", 3600))
        self._task.async_val = limit  # what _execute_module hands to the job; the executor itself must not poll
        try:
            job = self._execute_module(module_args=args, task_vars=task_vars, wrap_async=True)
        finally:
            self._task.async_val = 0
        if job.get("failed") or "ansible_job_id" not in job:
            return {**result, **job}
        done = self._wait(job, time.monotonic() + limit, task_vars)
        for name in ("ansible_job_id", "results_file", "started", "finished", "stdout", "stderr", "stdout_lines"):
            done.pop(name, None)
        return {**result, **done}

    def _wait(self, job: dict[str, Any], deadline: float, task_vars: Any) -> dict[str, Any]:
        status = {
            "jid": job["ansible_job_id"],
            "_async_dir": str(PurePosixPath(job["results_file"]).parent),
            "mode": "status",
        }
        seen, said, lost = "", 0.0, ""
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            try:
                polled = self._execute_module("ansible.legacy.async_status", status, task_vars=task_vars)
                if polled.get("finished") or polled.get("failed"):
                    with contextlib.suppress(AnsibleError):
                        self._execute_module(
                            "ansible.legacy.async_status", {**status, "mode": "cleanup"}, task_vars=task_vars
                        )
                    return polled
                text, lost = self._progress(), ""
            except AnsibleConnectionFailure as error:
                lost = f"the builder cannot be reached, and goes on by itself: {error}"
                text = lost
                with contextlib.suppress(AnsibleError, AttributeError):
                    self._connection.reset()
            now = time.monotonic()
            if text and (text != seen or now - said >= REPEAT_S):
                Display().display(f"  {self._task.args['engine']['id']}: {text}")
                seen, said = text, now
        name, limit = self._task.args["engine"]["id"], self._task.args.get("timeout_s", 3600)
        text = (
            f"engine {name} is not built within {limit} s; {lost or 'it was at: ' + seen}. A rerun goes on from there; "
        )
        return {"failed": True, "reason": "deadline", "msg": text + "engine_build_timeout gives it longer."}

    def _progress(self) -> str:
        """Return what the builder has noted, such as ``step 2 of 11: install``."""
        path = shlex.quote(str(PurePosixPath(self._task.args["workdir"]) / "progress"))
        noted = self._low_level_execute_command(f"cat {path} 2>/dev/null || true", sudoable=True)
        return str(noted.get("stdout", "")).strip().partition(" ")[2]
