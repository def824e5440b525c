"""The shape of a check's result, and what a list of results means for an exit status."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List

PASS = "pass"  # noqa: S105 - a status, not a password
WARN = "warn"
FAIL = "fail"
UNKNOWN = "unknown"  #: could not be checked; never shown as a pass

STATUSES = (PASS, WARN, FAIL, UNKNOWN)

Result = Dict[str, str]


def result(check: str, status: str, reason: str, message: str, fix: str = "") -> Result:
    """Return one check result: ``{check, status, reason, message, fix}``.

    :raises ValueError: for a status that is not one of :data:`STATUSES`.
    """
    if status not in STATUSES:
        raise ValueError(f"unknown status {status!r}")
    return {"check": check, "status": status, "reason": reason, "message": message, "fix": fix}


def failed(results: Iterable[Result]) -> List[Result]:
    """Return the results that forbid a start."""
    return [item for item in results if item["status"] == FAIL]


def exit_code(results: Iterable[Result]) -> int:
    """Return 1 when at least one result is a fail, else 0 (warn and unknown are shown, and do not stop a start)."""
    return 1 if failed(results) else 0


def lines(results: Iterable[Result]) -> List[str]:
    """Return the results as lines for a terminal: status, reason and message, then the fix where there is one."""
    text = []
    for item in results:
        text.append(f"{item['status']:7} {item['reason']}: {item['message']}")
        if item["fix"]:
            text.append(f"        fix: {item['fix']}")
    return text


def sentence(results: Iterable[Result]) -> str:
    """Return the results as one text for the message of a failed task."""
    return " ".join(f"{item['reason']}: {item['message']}. Fix: {item['fix']}." for item in results)


def summary(results: Iterable[Result]) -> Dict[str, Any]:
    """Count the results by status: ``{"pass": n, "warn": n, "fail": n, "unknown": n}``."""
    counts = dict.fromkeys(STATUSES, 0)
    for item in results:
        counts[item["status"]] += 1
    return counts


def overall(results: Iterable[Result]) -> str:
    """Return the worst status: ``fail``, then ``unknown``, then ``warn``, then ``pass``."""
    found = {item["status"] for item in results}
    return next((status for status in (FAIL, UNKNOWN, WARN) if status in found), PASS)
