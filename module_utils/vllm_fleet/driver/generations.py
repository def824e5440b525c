"""NVIDIA GPU generations by PCI device id, and which kernel module serves them.

Device ids are handed out in blocks, one for each chip. The blocks follow the PCI ID repository (pci-ids.ucw.cz, vendor
10de; read in its version of 2023-04-11) up to Hopper, and the table of NVIDIA/open-gpu-kernel-modules (README,
"Compatible GPUs") from Turing on. An id outside every block is ``None``: a card newer than the table is no guess.

Which module serves which generation is NVIDIA's driver installation guide, "Kernel Modules", and its announcement
"NVIDIA Transitions Fully Towards Open-Source GPU Kernel Modules": the open one starts with Turing (it needs the GPU
system processor), Grace Hopper and Blackwell have no other; 580 is the last branch for Maxwell, Pascal and Volta.
"""

from __future__ import annotations

from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

OPEN, PROPRIETARY = "open", "proprietary"

#: from this branch on NVIDIA's installers choose the open module; before it, it was beta for GeForce and workstations
OPEN_BY_DEFAULT_FROM = 560


class Generation(NamedTuple):
    """One generation: the modules that serve it, and the first and last driver branch that know it."""

    name: str
    modules: Tuple[str, ...]
    first_branch: int
    last_branch: Optional[int]


_EITHER = (OPEN, PROPRIETARY)
GENERATIONS: Dict[str, Generation] = {
    item.name: item
    for item in (
        Generation("kepler", (PROPRIETARY,), 304, 470),
        Generation("maxwell", (PROPRIETARY,), 340, 580),
        Generation("pascal", (PROPRIETARY,), 367, 580),
        Generation("volta", (PROPRIETARY,), 384, 580),
        Generation("turing", _EITHER, 410, None),
        Generation("ampere", _EITHER, 450, None),
        Generation("ada", _EITHER, 520, None),
        Generation("hopper", _EITHER, 515, None),
        Generation("grace_hopper", (OPEN,), 535, None),
        Generation("blackwell", (OPEN,), 570, None),
    )
}

#: (first id, last id, generation); a block inside another one stands before it
_BLOCKS: Tuple[Tuple[int, int, str], ...] = (
    (0x0FC0, 0x0FFF, "kepler"),
    (0x1001, 0x103F, "kepler"),
    (0x1180, 0x11FF, "kepler"),
    (0x1280, 0x12BF, "kepler"),
    (0x15F0, 0x15FF, "pascal"),
    (0x1720, 0x172F, "pascal"),
    (0x1340, 0x17FF, "maxwell"),
    (0x1B00, 0x1D7F, "pascal"),
    (0x1D80, 0x1DFF, "volta"),
    (0x1E00, 0x1FFF, "turing"),
    (0x2080, 0x20FF, "ampere"),
    (0x2180, 0x21FF, "turing"),
    (0x2200, 0x227F, "ampere"),
    (0x2340, 0x234F, "grace_hopper"),
    (0x2300, 0x233F, "hopper"),
    (0x2400, 0x25FF, "ampere"),
    (0x2680, 0x28FF, "ada"),
    (0x2900, 0x2FFF, "blackwell"),
    (0x3180, 0x31FF, "blackwell"),
)


def generation(device: Optional[str]) -> Optional[Generation]:
    """Return the generation of a PCI device id such as ``0x2204``; ``None`` for one that the table does not know."""
    try:
        number = int(device or "", 16)
    except ValueError:
        return None
    for first, last, name in _BLOCKS:
        if first <= number <= last:
            return GENERATIONS[name]
    return None


def branch(version: Optional[str]) -> Optional[int]:
    """Return the branch of a driver version: 580 of ``580.159.04``."""
    head = (version or "").split(".", 1)[0]
    return int(head) if head.isdigit() else None


def common_modules(found: Iterable[Generation]) -> List[str]:
    """Return the modules that serve every one of the generations, the open one first."""
    generations = list(found)
    return [module for module in _EITHER if all(module in item.modules for item in generations)]


def default_module(found: Iterable[Generation], version: Optional[str]) -> Optional[str]:
    """Return the module that NVIDIA's own installers would choose for these cards; ``None`` when none serves them all.

    Where both do: the open one from branch 560 on, the proprietary one before. An unknown version takes the newer rule.
    """
    possible = common_modules(found)
    if len(possible) == 2:
        number = branch(version)
        return PROPRIETARY if number is not None and number < OPEN_BY_DEFAULT_FROM else OPEN
    return possible[0] if possible else None
