"""NUMA binding of a lane, as systemd applies it (``CPUAffinity=``, ``NUMAPolicy=preferred``, ``NUMAMask=``)."""

from __future__ import annotations

from .inputs import DIGITS

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Dict, Optional, Sequence, Set


#: fewer CPUs than this are worse than no binding
LEAST_CPUS = 8
_MOST_CPUS = 65536


def parse_cpulist(text: Optional[str]) -> Optional[Set[int]]:
    """Return the numbers of a kernel list such as ``0-3,8``; None when it is missing or malformed."""
    if text is None:
        return None
    numbers: Set[int] = set()
    if not text.strip():
        return numbers
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        ends = (first, last) if dash else (first, first)
        if not all(0 < len(end) <= 5 and DIGITS.issuperset(end) for end in ends):
            return None
        low, high = int(ends[0]), int(ends[1])
        if low > high or high >= _MOST_CPUS:
            return None
        numbers.update(range(low, high + 1))
    return numbers


def format_cpulist(numbers: Set[int]) -> str:
    """Return numbers as a kernel list such as ``0-3,8``."""
    parts = []
    ordered = sorted(numbers)
    start = 0
    for place, number in enumerate(ordered):
        if place + 1 == len(ordered) or ordered[place + 1] != number + 1:
            parts.append(str(number) if start == place else f"{ordered[start]}-{number}")
            start = place + 1
    return ",".join(parts)


def bind(host: Dict[str, Any], nodes: Sequence[Optional[int]], policy: Dict[str, Any]) -> Dict[str, Any]:
    """Return ``{"cpus": list, "node": n}`` or ``{"skipped": code}`` with the first rule that applies.

    :param nodes: the NUMA node of each GPU of the lane.
    """
    if not policy["bind"]:
        return {"skipped": "not_requested"}
    known = host["numa_nodes"]
    if known is None or len(known) < 2:
        return {"skipped": "single_node"}
    if any(node is None or node not in known for node in nodes):
        return {"skipped": "numa_unknown"}
    node = nodes[0]
    if any(other != node for other in nodes):
        return {"skipped": "lane_spans_nodes"}
    wanted = parse_cpulist(policy["cpus"])
    if policy["cpus"] is not None and wanted is None:
        return {"skipped": "cpus_invalid"}
    allowed, local = parse_cpulist(host["allowed_cpus"]), parse_cpulist(known[node]["cpus"])
    cpus = (allowed or set()) & (local or set())
    if wanted is not None:
        cpus &= wanted
    if len(cpus) < LEAST_CPUS:
        return {"skipped": "too_few_cpus"}
    if node not in (parse_cpulist(host["allowed_mems"]) or set()):
        return {"skipped": "node_not_allowed"}
    available, resident = known[node]["memory_available_kib"], policy["host_resident_kib"]
    # 1.2 times as an integer comparison: 5 * available < 6 * resident
    if resident and (available is None or 5 * available < 6 * resident):
        return {"skipped": "memory_low"}
    if host["virtualization"] not in ("none", "container"):
        return {"skipped": "virtual_numa"}
    return {"cpus": format_cpulist(cpus), "node": node}
