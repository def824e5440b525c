"""Action: build an engine as a job of the builder and keep its archive here. Options: library/engine_build.py."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from pathlib import Path, PurePosixPath
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

_PACKAGE = str(Path(__file__).resolve().parent.parent / "module_utils")
if _PACKAGE not in sys.path:
    sys.path.insert(0, _PACKAGE)

from vllm_fleet import engine_signature, files, locks, source_files  # noqa: E402
from vllm_fleet.errors import FleetError  # noqa: E402

POLL_S = 5
#: Seconds between two progress lines of a step that stays the same.
REPEAT_S = 30


class ActionModule(ActionBase):
    """Start the module as a job of the builder, which no dropped connection ends; wait, and fetch the archive."""

    TRANSFERS_FILES = True

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        """Run the action; the result is the module's. Two plays of one controller do this one after the other."""
        result = super().run(tmp, task_vars)
        args = self._task.args
        if self._task.check_mode:
            return {**result, **self._execute_module(module_args=args, task_vars=task_vars)}
        keep, limit, name = Path(args["keep"]).expanduser(), int(args.get("timeout_s", 3600)), args["engine"]["id"]
        keep.parent.mkdir(parents=True, exist_ok=True)
        try:
            with locks.hold(f"{keep}.lock", f"building {name}", limit):
                if keep.exists() and Path(f"{keep}.json").exists():
                    sidecar = files.read_json(f"{keep}.json", "archive")
                    about = {"path": str(keep), "bytes": sidecar["bytes"], "sha256": sidecar["sha256"]}
                    kept = {"changed": False, "reason": "present", "archive": about, "manifest": sidecar["manifest"]}
                    return {**result, **kept}
                if self._signing_key():
                    engine_signature.sign(b"", self._signing_key())  # a key that cannot sign costs no build
                done = self._build(time.monotonic() + limit, limit, task_vars)
                if not done.get("failed"):
                    self._keep(done, keep)
                return {**result, **done}
        except FleetError as error:
            text = f"engine {name}: {error.one_line()}"
            return {**result, "failed": True, "changed": False, "reason": error.reason, "msg": text}

    def _build(self, deadline: float, limit: int, task_vars: Any) -> dict[str, Any]:
        self._task.async_val = limit  # what _execute_module hands to the job; the executor itself must not poll
        try:
            job = self._execute_module(module_args=self._task.args, task_vars=task_vars, wrap_async=True)
        finally:
            self._task.async_val = 0
        if job.get("failed") or "ansible_job_id" not in job:
            return dict(job)
        done = self._wait(job, deadline, task_vars)
        for name in ("ansible_job_id", "results_file", "started", "finished", "stdout", "stderr", "stdout_lines"):
            done.pop(name, None)
        return done

    def _wait(self, job: dict[str, Any], deadline: float, task_vars: Any) -> dict[str, Any]:
        where = str(PurePosixPath(job["results_file"]).parent)
        status = {"jid": job["ansible_job_id"], "_async_dir": where, "mode": "status"}
        seen, said, lost = "", 0.0, ""
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            try:
                polled = self._execute_module("ansible.legacy.async_status", status, task_vars=task_vars)
                if polled.get("finished") or polled.get("failed"):
                    clean = {**status, "mode": "cleanup"}
                    with contextlib.suppress(AnsibleError):
                        self._execute_module("ansible.legacy.async_status", clean, task_vars=task_vars)
                    return dict(polled)
                text, lost = self._progress(), ""
            except AnsibleConnectionFailure as error:
                text = lost = f"the builder cannot be reached, and goes on by itself: {error}"
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

    def _keep(self, done: dict[str, Any], keep: Path) -> None:
        """Fetch the archive, compare it with what the builder says, and let it appear with its description.

        As the login user: with become the whole archive would travel as base64 through memory. What an interrupted run
        has fetched of the same bytes is kept and continued.

        :raises FleetError: ``archive_gone``, ``archive_damaged`` or ``signing_failed``.
        """
        part = Path(f"{keep}.{done['archive']['sha256'][:16]}.part")
        if self._connection.transport == "ssh":
            more = self._connection.get_option("sftp_extra_args") or ""
            self._connection.set_option("sftp_extra_args", f"{more} -a".strip())
        try:
            self._connection.fetch_file(done["archive"]["path"], str(part))
        except AnsibleError as error:
            text = f"the archive cannot be fetched from the builder: {error}"
            raise FleetError("archive_gone", text, "run again: another play may have installed it just now") from None
        source_files.verified(str(part), done["archive"]["sha256"], "archive_damaged", own=True)
        about = {"sha256": done["archive"]["sha256"], "bytes": done["archive"]["bytes"], "manifest": done["manifest"]}
        data = (json.dumps(about, indent=1) + "\n").encode()
        Path(f"{keep}.json.sig").unlink(missing_ok=True)
        if self._signing_key():
            files.write_atomic(f"{keep}.json.sig", engine_signature.sign(data, self._signing_key()), 0o644)
        part.replace(keep)
        for other in keep.parent.glob(f"{keep.name}.*.part"):
            other.unlink()
        # last: the archive counts as kept when its description is there
        files.write_atomic(f"{keep}.json", data, 0o644)

    def _signing_key(self) -> str:
        key = self._task.args.get("signing_key")
        return str(Path(key).expanduser()) if key else ""
