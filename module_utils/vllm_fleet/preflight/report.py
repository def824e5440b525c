"""What is told of a preflight: a JSON object, the stored copy for monitoring, the journal, a table for a person."""

from __future__ import annotations

import json
import os
import time
from typing import Any, Dict, List

from .. import checks, journal
from ..checks import overall
from ..facts.host import under
from ..files import write_atomic

STORE = "/var/lib/vllm-fleet/preflight"

_COLOURS = {checks.PASS: "32", checks.WARN: "33", checks.FAIL: "31", checks.UNKNOWN: "35"}
_LEVELS = {checks.WARN: "warning", checks.FAIL: "error", checks.UNKNOWN: "warning"}


def as_object(lane: str, results: List[checks.Result]) -> Dict[str, Any]:
    """Return ``{"lane", "results", "summary", "status"}``, what ``--json`` prints."""
    return {"lane": lane, "results": results, "summary": checks.summary(results), "status": overall(results)}


def publish(lane: str, results: List[checks.Result], root: str = "/") -> None:
    """Store the results in ``/var/lib/vllm-fleet/preflight/<lane>.json`` and write one journal line per non-pass.

    The stored object is that of :func:`as_object` with ``time`` (seconds since 1970). A state directory that can't be
    written is said in the journal and changes nothing of the verdict.
    """
    path = under(root, os.path.join(STORE, f"{lane}.json"))
    document = dict(as_object(lane, results), time=int(time.time()))
    for item in results:
        if item["status"] != checks.PASS:
            journal.say(line(lane, item), _LEVELS[item["status"]])
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        write_atomic(path, (json.dumps(document, indent=1, sort_keys=True) + "\n").encode("utf-8"), mode=0o644)
    except OSError as error:
        journal.say(f"preflight {lane}: result not stored in {path}: {error.strerror}", "warning")


def line(lane: str, item: checks.Result) -> str:
    """Return a result as one line for the journal."""
    text = f"preflight {lane}: {item['status']} {item['check']} {item['reason']}: {item['message']}"
    return f"{text} Fix: {item['fix']}" if item["fix"] else text


def table(lane: str, results: List[checks.Result], colour: bool = False) -> str:
    """Return the results as a table, worst first, with the fix below each that did not pass."""
    width = max((len(item["check"]) for item in results), default=0)
    order = (checks.FAIL, checks.UNKNOWN, checks.WARN, checks.PASS)
    lines = []
    for status in order:
        for item in results:
            if item["status"] != status:
                continue
            shown = f"{status:<7}"
            if colour:
                shown = f"\x1b[{_COLOURS[status]}m{shown}\x1b[0m"
            lines.append(f"{shown} {item['check']:<{width}}  {item['message']}" + _code(item))
            if item["fix"] and status != checks.PASS:
                lines.append(f"{'':7} {'':<{width}}  fix: {item['fix']}")
    counts = checks.summary(results)
    total = ", ".join(f"{counts[status]} {status}" for status in (*reversed(order),) if counts[status])
    return "\n".join([f"lane {lane}: {overall(results)}", *lines, total])


def _code(item: checks.Result) -> str:
    return "" if item["status"] == checks.PASS else f" [{item['reason']}]"
