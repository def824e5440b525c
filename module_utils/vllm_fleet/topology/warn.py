"""Warnings about the hardware that a lane runs on; none of them changes the decision."""

from __future__ import annotations

from .lane import describe
from .links import Links, all_pairs

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Dict, List, Sequence


#: every warning code, in the order in which they are listed in a decision
CODES = (
    "gpu_skipped",
    "p2p_unproven",
    "link_width_degraded",
    "more_gpus_than_needed",
    "unlike_gpus_skipped",
    "facts_unknown",
    "display_attached",
    "acs_enabled",
    "iommu_translated",
    "small_bar1",
    "virtualized",
)


def hardware(facts: Dict[str, Any], links: Links, gpus: Sequence[Dict[str, Any]]) -> List[Dict[str, str]]:
    """Return the warnings about the GPUs of a lane (of the whole box, when the lane was refused) and their host."""
    found: List[Dict[str, str]] = []

    def warn(code: str, items: List[str], hint: str) -> None:
        if items:
            found.append({"code": code, "message": f"{'; '.join(items)}. {hint}"})

    narrow = [
        f"{describe(gpu)} runs at x{gpu['pcie']['width_current']} of x{gpu['pcie']['width_max']}"
        for gpu in gpus
        if (gpu["pcie"].get("width_current") or 0) < (gpu["pcie"].get("width_max") or 0)
        and gpu["pcie"].get("width_current") is not None
    ]
    warn(
        "link_width_degraded",
        narrow,
        "Check the slot, riser and bifurcation; width does not drop at idle (the generation does, and is not judged)",
    )
    warn(
        "display_attached",
        [describe(gpu) for gpu in gpus if gpu["display"]],
        "A display takes memory that the engine counts on",
    )
    pairs = all_pairs([gpu["index"] for gpu in gpus])
    warn(
        "acs_enabled",
        [f"GPUs {one} and {other}" for one, other in pairs if (links.pair(one, other) or {}).get("acs")],
        "ACS on a bridge between them sends peer transfers through the root complex, which can hang P2P",
    )
    warn(
        "iommu_translated",
        ["the IOMMU translates"] if facts["host"]["iommu"] == "translated" else [],
        "Peer writes can be lost without an error; trust P2P only after a transfer check, or boot with iommu=pt",
    )
    direct = {
        index
        for pair in pairs
        if links.granted(*pair) and not (links.pair(*pair) or {}).get("nvlink_lanes")
        for index in pair
    }
    warn(
        "small_bar1",
        [
            f"{describe(gpu)} has {gpu['bar1_total_mib']} MiB of BAR1 for {gpu['memory_total_mib']} MiB of memory"
            for gpu in gpus
            if gpu["index"] in direct
            and gpu["bar1_total_mib"] is not None
            and gpu["memory_total_mib"] is not None
            and gpu["bar1_total_mib"] < gpu["memory_total_mib"]
        ],
        "P2P is granted but BAR1 does not cover the memory; turn on Above 4G decoding and Resizable BAR",
    )
    kind = facts["host"]["virtualization"]
    warn(
        "virtualized",
        [f"the box is a virtual machine ({kind})"] if kind in ("passthrough", "wsl") else [],
        "Its link matrix, NUMA nodes and BAR sizes are the hypervisor's, not the hardware's; orders of equal score mean"
        " nothing here and P2P over an emulated chipset is usually refused",
    )
    return found


def ordered(warnings: List[Dict[str, str]]) -> List[Dict[str, str]]:
    """Return warnings in the order of :data:`CODES`."""
    return sorted(warnings, key=lambda warning: CODES.index(warning["code"]))
