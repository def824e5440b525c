"""Which GPU gets which power limit. Pure: the file's content and the cards in, what to set out."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

from ..errors import UsageError


class Change(NamedTuple):
    """A limit that is to be set, in milliwatts."""

    gpu: int
    uuid: str
    before: int
    after: int


def changes(limits: Mapping[str, Any], cards: Sequence[Dict[str, Any]]) -> List[Change]:
    """Return the limits that differ from what is set.

    :param limits: watts by ``all``, an index, or the beginning of a UUID; the more exact name wins.
    :raises UsageError: ``bad_power_limits``, ``unknown_gpu`` or ``power_out_of_range``, before anything is set.
    """
    for name, watts in limits.items():
        if isinstance(watts, bool) or not isinstance(watts, int) or watts < 1:
            raise UsageError("bad_power_limits", f"the limit of {name} is {watts!r}, not a whole number of watts")
        if name != "all" and not any(_names(name, card) for card in cards):
            raise UsageError("unknown_gpu", f"no GPU of this box is called {name!r}", "use an index or a UUID")
    found = []
    for card in cards:
        exact = [watts for name, watts in limits.items() if name != "all" and _names(name, card)]
        watts = exact[0] if exact else limits.get("all")
        if watts is None:
            continue
        wanted, low, high = watts * 1000, card["min_mw"], card["max_mw"]
        if (low is not None and wanted < low) or (high is not None and wanted > high):
            raise UsageError(
                "power_out_of_range",
                f"GPU {card['index']} can't be limited to {watts} W; it takes {_watts(low)} to {_watts(high)}",
                "correct nvidia_driver_power_limits",
            )
        if card["limit_mw"] != wanted:
            found.append(Change(card["index"], card["uuid"], card["limit_mw"], wanted))
    return found


def _names(name: str, card: Dict[str, Any]) -> bool:
    if name.isdigit():
        return bool(int(name) == card["index"])
    return name.startswith("GPU-") and str(card["uuid"]).startswith(name)


def _watts(milliwatts: Any) -> str:
    return "?" if milliwatts is None else f"{milliwatts / 1000:g} W"
