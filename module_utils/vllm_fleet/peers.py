"""One lane on several boxes lives and dies as one: what each box does about what the others say. Pure.

Every box of the lane has a watchdog that tells the others how its own part stands, and asks them: the head asks every
member, a member asks the head. A part is joined to the very processes (systemd's invocations) that it started with.
When one of them is gone, what is left cannot go on: vLLM's ranks do not take a newcomer in. So it is ended too, systemd
starts it again, and the new processes join. Nothing here needs the controller.

The head leads: members stop when it was stopped, and start when it starts.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

#: seconds that a partner may be gone before this part is ended: a play restarts all, though not in the same instant
GRACE_S = 5.0
#: seconds without any answer from a box, or of waiting for a head that is down
SILENT_S = 20.0

#: what an asked box gave: its record, a closed door (the box is up, nobody can say more), or nothing
ANSWERED, REFUSED, SILENT = "answered", "refused", "silent"

Record = Mapping[str, Any]
Memory = Dict[str, Any]


#: what a record holds; anything else is another program's, or another version's
RECORD_KEYS = ("schema", "lane", "box", "state", "alive", "enabled", "invocation", "restarts", "partners")


class Action(NamedTuple):
    """What to do with this box's own part: ``verb`` is ``kill`` (systemd starts it again), ``stop`` or ``start``."""

    verb: str
    reason: str
    message: str


def record(lane: str, box: str, state: Mapping[str, Any], partners: Mapping[str, str]) -> Dict[str, Any]:
    """Return what a box says about its part.

    ``alive`` means that there is an engine process, also one that still answers its last requests; ``state`` ``active``
    that the unit has passed its readiness, which at the head is an answered completion.
    """
    return {
        "schema": 1,
        "lane": lane,
        "box": box,
        "state": state["ActiveState"],
        "alive": bool(state["MainPID"]) and state["ActiveState"] not in ("inactive", "failed"),
        "enabled": state["UnitFileState"] == "enabled",
        "invocation": state["InvocationID"],
        "restarts": state["NRestarts"],
        "partners": dict(partners),
    }


def watched(place: Mapping[str, Any]) -> List[str]:
    """Return the boxes that a part asks: the head its members, a member the head."""
    boxes: List[str] = list(place["boxes"])
    return boxes[:1] if place["rank"] else boxes[1:]


def empty_memory() -> Memory:
    """Return the memory of a watchdog that has seen nothing: plain data, kept until the box goes down."""
    return {"invocation": "", "partners": {}, "since": {}, "followed": "", "absent": []}


def judge(
    memory: Memory, own: Record, seen: Mapping[str, Mapping[str, Any]], now: float, leads: bool
) -> Tuple[Memory, Optional[Action]]:
    """Return the new memory, and what to do about one's own part, if anything.

    :param own: this box's record; its ``partners`` are not read.
    :param seen: by box ``{"status", "record"}``.
    :param now: seconds of a clock that never goes back.
    :param leads: this is the head.
    """
    kept: Memory = {**memory, "partners": dict(memory["partners"]), "since": dict(memory["since"])}
    if own["invocation"] != kept["invocation"]:
        kept.update(invocation=own["invocation"], partners={})
    action: Optional[Action] = None
    waits: Dict[str, float] = {}
    for box, answer in seen.items():
        told: Record = answer.get("record") or {}
        if own["state"] == "deactivating":
            break  # it is on its way out
        if own["alive"]:
            found = _joined(kept, own, box, answer["status"], told, leads)
        else:
            found = None if leads else _follow(kept, own, box, told)
        if found is None:
            continue
        limit, wanted = found
        key = f"{box} {wanted.verb} {wanted.reason}"
        waits[key] = kept["since"].get(key, now)
        if now - waits[key] >= limit and action is None:
            action = wanted
    kept["since"] = waits
    if leads:
        action = _returned(kept, own, seen) or action
    if action is not None and action.verb == "start" and not leads:
        kept["followed"] = next(answer["record"]["invocation"] for answer in seen.values())
    return kept, action


def _joined(
    kept: Memory, own: Record, box: str, status: str, told: Record, leads: bool
) -> Optional[Tuple[float, Action]]:
    """Join a live part with the other one, or tell what the loss of the one that it was joined to asks for."""
    partner = kept["partners"].get(box)
    if status == SILENT:
        if partner is None:
            return None
        return SILENT_S, Action("kill", "peer_silent", f"{box} has not answered for {SILENT_S:.0f} s")
    if status != ANSWERED:
        return None
    if not leads and not told["alive"] and told["state"] in ("inactive", "failed"):
        # it will not come by itself, so there is nothing to wait for
        limit = SILENT_S if partner is None else GRACE_S
        return limit, Action("stop", "head_stopped", f"the head on {box} is {told['state']}")
    if partner is None:
        # One that still holds on to a former part of ours will be ended by its own watchdog first.
        free = told["partners"].get(own["box"]) in (None, own["invocation"])
        if told["alive"] and free and told["state"] != "deactivating":
            kept["partners"][box] = told["invocation"]
        return None
    if told["alive"] and told["invocation"] == partner:
        return None
    if told["alive"]:
        return GRACE_S, Action("kill", "peer_restarted", f"the part on {box} is another process than the one joined")
    return GRACE_S, Action("kill", "peer_down", f"the part on {box} is down ({told['state']})")


def _follow(kept: Memory, own: Record, box: str, told: Record) -> Optional[Tuple[float, Action]]:
    """Tell whether a member that is down should start because its head waits for it; once for a start of the head."""
    if not told or not told["alive"] or told["state"] == "deactivating":
        return None
    if not own["enabled"] or own["state"] not in ("inactive", "failed"):
        return None
    if told["partners"].get(own["box"]) is not None or kept["followed"] == told["invocation"]:
        return None
    return GRACE_S, Action("start", "head_started", f"the head on {box} waits for this part")


def _returned(kept: Memory, own: Record, seen: Mapping[str, Mapping[str, Any]]) -> Optional[Action]:
    """Tell whether a head that failed for want of a box should start because all boxes are back; once a return."""
    if own["state"] == "active":
        kept["absent"] = []
        return None
    gone = [box for box, answer in seen.items() if answer["status"] == SILENT]
    kept["absent"] = sorted({*kept["absent"], *gone})
    if own["state"] != "failed" or not own["enabled"] or not kept["absent"]:
        return None
    if any(answer["status"] != ANSWERED for answer in seen.values()):
        return None
    names = ", ".join(kept["absent"])
    kept["absent"] = []
    return Action("start", "peers_returned", f"{names} answered again")
