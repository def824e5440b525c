"""Where the boxes of a rollout stand, as a table with the age of what is stuck. Pure."""

from __future__ import annotations

import calendar
import time
from typing import Any, List, Mapping, Optional, Sequence

from . import rollout
from .fleet_report import columns


def age(since: Optional[str], now: float) -> str:
    """Return how long ago a time (ISO 8601, UTC) was, such as ``3 h 12 min``; ``?`` when it can't be read.

    :param now: seconds since the epoch.
    """
    try:
        seconds = int(now - calendar.timegm(time.strptime(str(since), "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return "?"
    if seconds < 0:
        return "?"
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {seconds % 60} s"


def text(records: Mapping[str, Optional[Mapping[str, Any]]], now: float) -> str:
    """Return the table: what is stuck first, the longest on top; then what could not be asked; then the rest.

    :param records: box name to what ``rollout_state`` keeps there; empty without one, ``None`` when it was not reached.
    :param now: seconds since the epoch.
    """
    stuck: List[List[str]] = []
    unknown: List[List[str]] = []
    rest: List[List[str]] = []
    for box in sorted(records):
        record = records[box]
        if record is None:
            unknown.append([box, "unknown", "-", "-", "unreachable", "not reached"])
        elif not record:
            rest.append([box, "untouched", "-", "-", "-", ""])
        else:
            row = [box, record["phase"], record["by"], record["since"], record["reason"] or "-"]
            if rollout.unfinished(record):
                stuck.append([*row, f"unfinished for {age(record['since'], now)}"])
            else:
                rest.append([*row, ""])
    stuck.sort(key=_since)
    return columns([["box", "phase", "by", "since", "reason", "note"], *stuck, *unknown, *rest])


def _since(row: Sequence[str]) -> str:
    return row[3]
