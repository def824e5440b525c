"""Where a box stands in a rollout: the record on its disk that lets an interrupted rollout resume. Pure."""

from __future__ import annotations

import re
from typing import Any, Dict, Mapping, Optional

from .errors import UsageError
from .schema import MapOf, Nullable, Record, Text, Where

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
