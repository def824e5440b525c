"""Action: reboot a box, wait with progress, and have it proven. Options: library/box_reboot.py."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

_PACKAGE = str(Path(__file__).resolve().parent.parent / "module_utils")
if _PACKAGE not in sys.path:
    sys.path.insert(0, _PACKAGE)

from vllm_fleet import reboot  # noqa: E402
from vllm_fleet.facts import boot  # noqa: E402

#: seconds between two progress lines of a box whose state stays the same, and between two looks at it
REPEAT_S, LOOK_S = 15, 3
#: seconds for one attempt to connect; shorter than a play's, because most attempts are meant to fail
CONNECT_S = 10


class ActionModule(ActionBase):
    """Plan, request, wait, prove."""

    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        """Run the action."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        args = self._task.args
        self._vars, self._box = task_vars, (task_vars or {}).get("inventory_hostname", "?")
        shared = {name: args[name] for name in ("reasons", "module", "by") if name in args}
        decided = {
            name: args[name] for name in ("allowed", "required", "blocked", "again") if args.get(name) is not None
        }
        if decided.get("required") and decided.get("allowed") and self._connection.transport == "local":
            message = "reached by a local connection: this would reboot the controller under the play"
            return self._failed(result, {"action": reboot.REFUSE}, "local_connection", message)
        answer = self._boot("plan", **shared, **decided)
        if answer.get("failed"):
            return {**result, **answer}
        planned = answer["action"]
        if planned == reboot.REFUSE:
            return self._failed(result, answer, answer["reason"], answer["message"])
        if planned == reboot.REBOOT and answer["after"]["boot_id"] in (None, boot.boot_id()):
            message = "runs on the controller's own kernel: this would reboot the controller"
            return self._failed(result, answer, "controller_itself", message)
        if args.get("plan_only") or self._task.check_mode or planned in (reboot.NONE, reboot.REPORT):
            changed = planned == reboot.REBOOT and not args.get("plan_only")
            return {**result, **_told(answer), "changed": changed, "action": planned}
        if planned == reboot.REBOOT:
            answer = self._boot("request", **shared)
            if answer.get("failed"):
                return {**result, **answer}
            began = time.monotonic()
            bad = self._wait(answer["after"]["boot_id"], began, int(args.get("deadline_s", 1200)))
            if bad:
                return self._failed(result, answer, *bad)
            result["elapsed_s"] = int(time.monotonic() - began)
            Display().display(f"  {self._box}: back after {result['elapsed_s']} s")
        answer = self._prove(shared, int(args.get("settle_s", 120)))
        if answer.get("failed") or answer["reason"] != "proven":
            return self._failed(result, answer, answer["reason"], answer.get("message") or answer["msg"])
        return {**result, **_told(answer), "changed": planned == reboot.REBOOT, "action": planned}

    def _boot(self, phase: str, **args: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._execute_module(
            module_name="box_boot", module_args={"phase": phase, **args}, task_vars=self._vars
        )
        return answer

    def _failed(self, result: dict[str, Any], answer: dict[str, Any], reason: str, message: str) -> dict[str, Any]:
        told = _told(answer)
        return {**result, **told, "failed": True, "changed": False, "reason": reason, "msg": f"{self._box}: {message}"}

    def _look(self) -> tuple[str | None, str]:
        """Return the box's boot id, or None and the connection's error; over a new connection."""
        try:
            self._connection.reset()
            done = self._low_level_execute_command("cat /proc/sys/kernel/random/boot_id", sudoable=False)
        except (AnsibleConnectionFailure, AnsibleError) as error:
            return None, str(error)
        found = str(done.get("stdout", "")).strip().splitlines()
        return (found[-1] if found else None), str(done.get("stderr", ""))

    def _wait(self, old: str, began: float, deadline_s: int) -> tuple[str, str] | None:
        """Wait for another boot; return the reason and message of what went wrong."""
        timeout = self._connection.get_option("timeout")
        self._connection.set_option("timeout", CONNECT_S)
        went_down, state, said = False, "", 0.0
        try:
            while True:
                found, error = self._look()
                if found and found != old:
                    return None
                was, away = state, reboot.why_away(error)
                state = "shutting down" if found else str(away["message"])
                went_down = went_down or found is None
                now = time.monotonic()
                if state != was or now - said >= REPEAT_S:
                    Display().display(f"  {self._box}: {state}, {now - began:.0f} s")
                    said = now
                if found is None and away["fatal"]:
                    fix = "Fix: see that it is the same machine, put its key into known_hosts, run the same play again"
                    return str(away["reason"]), f"{away['message']}. {fix}"
                if now - began > deadline_s:
                    return self._late(went_down, state, deadline_s)
                time.sleep(LOOK_S)
        finally:
            self._connection.set_option("timeout", timeout)

    @staticmethod
    def _late(went_down: bool, state: str, deadline_s: int) -> tuple[str, str]:
        again = "The request is recorded: once it is up, run the same play again and it goes on with the proof."
        if not went_down:
            return "did_not_go_down", (
                f"still up {deadline_s} s after the reboot was asked for. Look for what holds the shutdown: "
                f"systemctl list-jobs. {again}"
            )
        return "not_back", (
            f"not back within {deadline_s} s ({state}). Look at its console (BMC): firmware with many GPUs and much "
            f"memory takes minutes, and reboot_deadline can be longer. {again}"
        )

    def _prove(self, shared: dict[str, Any], settle_s: int) -> dict[str, Any]:
        """Have the proof made, again while the driver is still coming up; the last one counts."""
        end = time.monotonic() + settle_s
        while time.monotonic() < end:
            answer = self._boot("prove", **shared, final=False)
            if answer.get("failed") or answer["reason"] == "proven":
                return answer
            Display().display(f"  {self._box}: {answer['message']}")
            time.sleep(LOOK_S)
        return self._boot("prove", **shared)


def _told(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what of the module's answer the task returns."""
    kept = ("action", "reason", "message", "lanes", "results", "before", "after")
    return {name: answer[name] for name in kept if name in answer}
