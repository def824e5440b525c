"""Action: wait until nothing is in flight, and say meanwhile what is. Options: library/drain_wait.py."""

from __future__ import annotations

import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

#: Seconds that one call waits on the box before it answers.
CALL_S = 5


class ActionModule(ActionBase):
    """Call the counting module until it counts nothing or the deadline has passed."""

    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        """Run the action; the result says what was in flight at the end."""
        result = super().run(tmp, task_vars)
        args = self._task.args
        box = (task_vars or {}).get("inventory_hostname", "?")
        began = time.monotonic()
        deadline_s = int(args.get("deadline_s", 600))
        while True:
            left_s = max(0, int(deadline_s - (time.monotonic() - began)))
            wait_s = 0 if self._task.check_mode else min(CALL_S, left_s)
            answer = self._execute_module(
                module_name=args["probe"], module_args={**args["options"], "wait_s": wait_s}, task_vars=task_vars
            )
            if answer.get("failed"):
                return {**result, **answer}
            count, elapsed_s = answer.get("in_flight"), int(time.monotonic() - began)
            end = {**result, "changed": False, "in_flight": count, "drained": count == 0, "elapsed_s": elapsed_s}
            if count == 0:
                return {**end, "reason": "drained"}
            if self._task.check_mode:
                return {**end, "reason": "check_mode"}
            if elapsed_s >= deadline_s:
                return {**end, "reason": "unknown" if count is None else "deadline"}
            said = "an unknown number" if count is None else count
            Display().display(
                f"  {box}: draining, {said} in flight at the {args.get('at', 'engine')}, {elapsed_s} s of {deadline_s}"
            )
