"""Action: wait for lanes to answer, and say meanwhile what they are doing. Options: library/lane_ready.py."""

from __future__ import annotations

import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

#: Seconds between two progress lines of a lane whose phase stays the same.
REPEAT_S = 10


class ActionModule(ActionBase):
    """Call ``lane_probe`` until every lane is ready, one has failed, or the deadline has passed."""

    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        """Run the action; the result carries the lanes' last rows."""
        result = super().run(tmp, task_vars)
        args = self._task.args
        if self._task.check_mode:
            return {**result, "changed": False, "lanes": [], "reason": "check_mode"}
        box = (task_vars or {}).get("inventory_hostname", "?")
        hold_s = int(args.get("hold_s", 0))
        deadline = time.monotonic() + int(args.get("deadline_s", 1860))
        seen: dict[str, str] = {}
        said: dict[str, float] = {}
        while True:
            probe = self._execute_module(
                module_name="lane_probe",
                module_args={
                    "lanes": args["lanes"],
                    "restarted": args.get("restarted", []),
                    "wait_s": 8,
                    "seen": seen,
                    "concurrent": args.get("concurrent", 1),
                },
                task_vars=task_vars,
            )
            if probe.get("failed"):
                return {**result, **probe}
            rows = probe["lanes"]
            now = time.monotonic()
            for row in rows:
                if row["state"] == "starting" and (
                    seen.get(row["lane"]) != row["phase"] or now - said.get(row["lane"], 0.0) >= REPEAT_S
                ):
                    Display().display(f"  {box} {row['lane']}: {row['phase']}, {row['elapsed_s']} s")
                    said[row["lane"]] = now
                seen[row["lane"]] = row["phase"]
            failed = [row for row in rows if row["state"] == "failed"]
            if failed:
                text = "\n".join(self._explain(box, row) for row in failed)
                return {**result, "failed": True, "changed": False, "lanes": rows, "reason": "lane_failed", "msg": text}
            if all(row["state"] == "ready" for row in rows):
                return (
                    {**result, "changed": False, "lanes": rows, "reason": "ready"}
                    if not hold_s
                    else self._hold(result, task_vars, rows, hold_s)
                )
            if now >= deadline:
                late = ", ".join(f"{row['lane']} at '{row['phase']}'" for row in rows if row["state"] == "starting")
                text = f"{box}: not ready within {args.get('deadline_s', 1860)} s: {late}"
                return {**result, "failed": True, "changed": False, "lanes": rows, "reason": "deadline", "msg": text}

    def _hold(self, result: dict[str, Any], task_vars: Any, rows: list[dict[str, Any]], hold_s: int) -> dict[str, Any]:
        """Ask again until ``hold_s`` have passed; a lane that stops answering or restarts meanwhile has failed."""
        box, began = task_vars.get("inventory_hostname", "?"), time.monotonic()
        pids = {row["lane"]: row["pid"] for row in rows}
        while True:
            left = hold_s - (time.monotonic() - began)
            time.sleep(max(0.0, min(5.0, left)))
            probe = self._execute_module(
                module_name="lane_probe", module_args={"lanes": self._task.args["lanes"]}, task_vars=task_vars
            )
            if probe.get("failed"):
                return {**result, **probe}
            end = {**result, "changed": False, "lanes": probe["lanes"]}
            bad = [row for row in probe["lanes"] if row["state"] != "ready" or row["pid"] != pids[row["lane"]]]
            if bad:
                text = "\n".join(self._explain(box, row) for row in bad)
                return {**end, "failed": True, "reason": "did_not_last", "msg": text}
            elapsed_s = time.monotonic() - began
            if elapsed_s >= hold_s:
                return {**end, "reason": "ready"}
            Display().display(f"  {box}: watching it serve, {elapsed_s:.0f} s of {hold_s}")

    @staticmethod
    def _explain(box: str, row: dict[str, Any]) -> str:
        lines = [f"{box} lane {row['lane']} failed at '{row['phase']}' after {row['elapsed_s']} s: {row['message']}"]
        lines += [f"  engine: {line}" for line in row.get("errors", [])]
        lines += [f"  journal: {line}" for line in row.get("journal", [])]
        lines.append(f"  more: journalctl -u vllm@{row['lane']} on {box}, and vllm-fleet doctor {row['lane']}")
        return "\n".join(lines)
