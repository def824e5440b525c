"""Where a box stands in a rollout: the record on its disk that lets an interrupted rollout resume. Pure."""

from __future__ import annotations

import re
from typing import Any, Dict, List, Mapping, Optional, Sequence

from .errors import UsageError
from .schema import MapOf, Nullable, Record, Text, Where
from .wide import has_api, together

PATH = "/var/lib/vllm-fleet/rollout.json"

#: Phases after which a box needs nothing more. In every other one it may be out of rotation, and a rerun goes on.
FINISHED = ("done", "rolled_back")

_PHASE = re.compile(r"[a-z][a-z0-9_]{0,39}", re.ASCII)
_LANE = Record({"from": Nullable(Text()), "to": Nullable(Text())}, defaults={"from": None, "to": None})
_LANES = MapOf(_LANE, r"[a-z0-9][a-z0-9-]{0,31}", "a lane's name")


def unfinished(state: Optional[Mapping[str, Any]]) -> bool:
    """Return whether a rollout was begun on the box and not ended."""
    return state is not None and state.get("phase") not in FINISHED


def advance(
    state: Optional[Mapping[str, Any]], phase: str, reason: str, by: str, now: str, lanes: Optional[Mapping[str, Any]]
) -> Dict[str, Any]:
    """Return the record of a box that enters ``phase``; entering the phase that it is in keeps its time.

    :param now: the time in ISO 8601, UTC.
    :param lanes: lane name to ``{"from": release, "to": release}``; None keeps what is recorded.
    :raises UsageError: ``bad_phase`` or ``bad_schema``.
    """
    if not _PHASE.fullmatch(phase):
        raise UsageError("bad_phase", f"{phase!r} is no phase: lower-case letters, digits and _ are allowed.")
    old: Mapping[str, Any] = state or {}
    kept = old.get("lanes", {}) if lanes is None else _LANES.check(dict(lanes), Where("lanes"))
    same = old.get("phase") == phase and old.get("by") == by and kept == old.get("lanes", {})
    return {
        "schema": 1,
        "phase": phase,
        "since": old["since"] if same and old.get("reason") == reason else now,
        "reason": reason,
        "by": by,
        "lanes": kept,
    }


def plan(stand: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Dict[str, Any]:
    """Return what a box has to do: ``{"moving": lane names, "record": lane to from and to, "reason": code}``.

    A lane moves when it would be restarted, or when an earlier rollout left it on its way. Where that one began is
    where a failure goes back to: the release that is current now may never have answered.

    :param stand: result of ``rollout_state``.
    :param rows: the lanes of ``lane_activate`` in check mode.
    """
    begun = stand["after"].get("lanes", {}) if stand["unfinished"] else {}
    open_lanes = set(begun) or {row["lane"] for row in rows} if stand["unfinished"] else set()
    moving = [row for row in rows if row["restarted"] or row["lane"] in open_lanes]
    record = {
        row["lane"]: {"from": begun.get(row["lane"], {}).get("from") or row["before"], "to": row["after"]}
        for row in moving
    }
    reasons = [row["reason"] for row in moving if row["restarted"]] + ["interrupted"]
    return {
        "moving": [row["lane"] for row in moving],
        "record": record,
        "reason": reasons[0] if moving else "as_wanted",
    }


def way_back(record: Mapping[str, Mapping[str, Any]]) -> List[Dict[str, str]]:
    """Return the lanes that have a release to go back to, as ``lane_activate`` takes them."""
    return [{"lane": lane, "back_to": str(ends["from"])} for lane, ends in sorted(record.items()) if ends["from"]]


def alone(moving: Mapping[str, Sequence[str]], fleet: Mapping[str, Sequence[Mapping[str, Any]]]) -> List[str]:
    """Return the lanes (``box:lane``) that nobody else can stand in for while they are down.

    :param moving: box to the names of the lanes that move.
    :param fleet: every box to its resolved lanes, those outside the play's limit too.
    """
    served: Dict[str, int] = {}
    for lanes in fleet.values():
        for lane in filter(has_api, lanes):
            served[lane["served_names"][0]] = served.get(lane["served_names"][0], 0) + 1
    return [
        f"{box}:{lane['lane']}"
        for box in sorted(moving)
        for lane in filter(has_api, fleet.get(box, []))
        if lane["lane"] in moving[box] and served[lane["served_names"][0]] == 1
    ]


def batches(
    boxes: Sequence[str], lanes: Mapping[str, Sequence[Mapping[str, Any]]], ramp: Sequence[Any]
) -> List[List[str]]:
    """Return the boxes in the batches in which they change; boxes that share a lane change together.

    :param boxes: those that have something to do, in order.
    :param lanes: their resolved lanes.
    :param ramp: how many at a time, a number or a share of all (``"25%"``, at least one); the last entry repeats.
    :raises UsageError: ``bad_ramp``.
    """
    sizes = []
    for entry in ramp:
        text = str(entry)
        share = text.endswith("%")
        digits = text[:-1] if share else text
        if isinstance(entry, bool) or not digits.isdigit() or int(digits) < 1 or (share and int(digits) > 100):
            raise UsageError("bad_ramp", f"{entry!r} is neither a number of boxes nor a share such as '25%'.")
        sizes.append(max(1, len(boxes) * int(digits) // 100) if share else int(digits))
    if not sizes:
        raise UsageError("bad_ramp", "the ramp is empty; [1] takes one box at a time.")
    made: List[List[str]] = []
    for group in together(boxes, lanes):
        size = sizes[min(len(made), len(sizes)) - 1] if made else 0
        if made and len(made[-1]) + len(group) <= size:
            made[-1] += group
        else:
            made.append(list(group))
    return made


#: what became of a box -> how it counts
STATES = {
    "unchanged": "good",
    "changed": "good",
    "ready": "open",  # prepared, its turn has not come
    "preparing": "bad",  # was lost on the way
    "changing": "bad",
    "refused": "bad",
    "unreachable": "bad",
    "rolled_back": "bad",
    "failed": "bad",
}


def spent(outcomes: Mapping[str, Mapping[str, Any]]) -> List[str]:
    """Return the boxes that count against the failure budget."""
    return sorted(box for box, outcome in outcomes.items() if STATES[outcome["state"]] == "bad")


_MEANING = {
    "ready": "untouched",
    "preparing": "lost while it was prepared; it serves what it served",
    "changing": "lost on its way; a rerun goes on there",
}


def table(outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return where each box stands, as text with aligned columns."""
    rows = [("box", "state", "out of rotation", "lanes", "message")]
    for box in sorted(outcomes):
        outcome = outcomes[box]
        lanes = ", ".join(
            f"{lane} {ends['from'] or 'none'} -> {ends['to']}"
            for lane, ends in sorted(outcome.get("record", {}).items())
        )
        out = f"{outcome['out_s']} s" if outcome.get("out_s") is not None else "-"
        message = str(outcome.get("message") or _MEANING.get(outcome["state"], "")).strip().split("\n")[0]
        state = "untouched" if outcome["state"] == "ready" else outcome["state"]
        rows.append((box, state, out, lanes or "-", message or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]]).rstrip() for row in rows
    )
