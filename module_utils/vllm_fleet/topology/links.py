"""What the link between two GPUs is worth: its class, whether P2P is granted, proven, failed and so usable."""

from __future__ import annotations

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

    Pair = Tuple[int, int]


NVLINK = 6.0
#: ancestor -> (class with usable P2P, class without)
PCIE_CLASSES: Dict[str, Tuple[float, float]] = {
    "internal": (5.0, 2.5),
    "single": (5.0, 2.5),
    "multiple": (5.0, 2.5),
    "hostbridge": (4.0, 2.25),
    "node": (3.0, 2.0),
    "system": (1.0, 1.0),
}
#: ancestor -> what ``nvidia-smi topo -m`` prints
ANCESTOR_LABELS = {
    "internal": "PIX",
    "single": "PIX",
    "multiple": "PXB",
    "hostbridge": "PHB",
    "node": "NODE",
    "system": "SYS",
    "unknown": "?",
}


class Links:
    """The links of one box under one P2P policy.

    :param facts: validated facts.
    :param p2p: ``trusted`` takes NVML's grant for proof; ``proven`` and ``required`` want a pass for the pair.
    """

    def __init__(self, facts: Dict[str, Any], p2p: str) -> None:
        self.pairs: Dict[Pair, Dict[str, Any]] = facts["pairs"]
        self.verdict: Optional[Dict[str, Any]] = facts["verdict"]
        self.trusted = p2p == "trusted"
        # A failed verdict that names no failed pair is held against every pair that it doesn't name as passed.
        self.all_failed = bool(
            self.verdict and self.verdict["status"] == "fail" and "fail" not in self.verdict["pairs"].values()
        )

    def pair(self, one: int, other: int) -> Optional[Dict[str, Any]]:
        """Return the facts of a pair, or None when they are missing."""
        return self.pairs.get((one, other) if one < other else (other, one))

    def verdict_of(self, one: int, other: int) -> Optional[str]:
        """Return ``pass``, ``fail``, ``inconclusive`` or None for a pair that was never checked."""
        if self.verdict is None:
            return None
        status: Optional[str] = self.verdict["pairs"].get((one, other) if one < other else (other, one))
        if self.all_failed and status != "pass":
            return "fail"
        return status

    def failed(self, one: int, other: int) -> bool:
        """Return whether a real transfer between the two was wrong or hung."""
        return self.verdict_of(one, other) == "fail"

    def passed(self, one: int, other: int) -> bool:
        """Return whether a real transfer between the two was right."""
        return self.verdict_of(one, other) == "pass"

    def granted(self, one: int, other: int) -> bool:
        """Return whether NVML grants P2P in both directions, which is not yet proof that it works."""
        pair = self.pair(one, other)
        return pair is not None and pair["p2p_read"] == "ok" and pair["p2p_write"] == "ok"

    def usable(self, one: int, other: int) -> bool:
        """Return whether P2P is granted and the policy trusts it."""
        if not self.granted(one, other) or self.failed(one, other):
            return False
        return self.trusted or self.passed(one, other)

    def nvlink(self, one: int, other: int) -> bool:
        """Return whether NVLink lanes join the two and no check failed on them."""
        pair = self.pair(one, other)
        return pair is not None and bool(pair["nvlink_lanes"]) and not self.failed(one, other)

    def link_class(self, one: int, other: int) -> Optional[float]:
        """Return the link class (6 best, 1 worst), or None when a needed part of the facts is unknown."""
        pair = self.pair(one, other)
        if pair is None:
            return None
        failed = self.failed(one, other)
        if not failed:
            if pair["nvlink_lanes"] is None:
                return None
            if pair["nvlink_lanes"] > 0:
                return NVLINK
        ancestor = pair["ancestor"]
        if ancestor not in PCIE_CLASSES:
            return None
        if ancestor != "system" and not failed and "unknown" in (pair["p2p_read"], pair["p2p_write"]):
            return None
        with_p2p, without = PCIE_CLASSES[ancestor]
        return with_p2p if self.usable(one, other) else without


def group_pairs(order: Sequence[int], tensor_parallel: int) -> Iterator[Pair]:
    """Yield the pairs inside the tensor-parallel groups of a rank order."""
    for start in range(0, len(order), tensor_parallel):
        group = order[start : start + tensor_parallel]
        for place, one in enumerate(group):
            for other in group[place + 1 :]:
                yield one, other


def pipeline_edges(order: Sequence[int], tensor_parallel: int) -> Iterator[Pair]:
    """Yield the pairs of equal ranks in neighbouring pipeline stages."""
    yield from zip(order, order[tensor_parallel:])


def all_pairs(order: Sequence[int]) -> List[Pair]:
    """Return every pair of GPUs of a lane."""
    return list(group_pairs(order, max(1, len(order))))
