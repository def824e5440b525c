"""Checks of an installed NVIDIA driver: what ``vllm-fleet driver``, the daily drift check and the roles assert.

Pure functions over :func:`..facts.driver.read` and the topology facts. Every outcome is a row of :data:`.codes.CODES`.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, List, Optional, Sequence

from .. import checks
from . import state
from .codes import CODES, say
from .names import family

Facts = Dict[str, Any]


#: "Xid (PCI:0000:01:00): 79, pid=…" of the driver, and both wordings of a card that is gone
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_OFF_BUS = re.compile(r"(?:GPU has fallen off the bus|NVRM: .*(?:fallen off|no longer on) the bus)", re.I)
#: errors of the program on the card, not of the card (NVIDIA's Xid table: application errors)
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 69})


def evaluate(
    facts: Facts,
    topology: Optional[Facts],
    *,
    version: Optional[str] = None,
    gpus: Optional[int] = None,
    p2p_module: bool = False,
) -> List[checks.Result]:
    """Return every result.

    :param facts: :func:`..facts.driver.read` with ``packages`` and ``fabric_manager`` (state of its unit).
    :param topology: topology facts (schema 1) of an NVIDIA box; ``None`` when they were not read.
    :param version: the version that the box should have.
    :param gpus: how many cards the box should have; without it what the PCI bus shows counts.
    :param p2p_module: the box is meant to run the P2P-patched module.
    """
    found = state.assess(facts)
    results = versions(found, version)
    results += kernels(facts)
    results.append(nouveau(facts))
    results += packages(facts)
    results += cards(facts, topology, gpus)
    results.append(fabric(facts, found))
    if p2p_module:
        results += p2p(found, topology)
    return results


def versions(found: Facts, wanted: Optional[str]) -> List[checks.Result]:
    """Judge the three versions of :func:`.state.assess`."""
    text = f"loaded {found['loaded'] or 'none'}, installed {found['installed'] or 'none'}"
    results = []
    first = next((code for code in found["reasons"] if CODES[code].check == "driver_versions"), "versions_match")
    results.append(say(first, f"{text}, {found['flavour'] or 'unknown'} module"))
    if wanted:
        right = found["installed"] == wanted
        results.append(say("version_wanted" if right else "version_differs", f"{text}; wanted {wanted}"))
    blocked = next(iter(found["reboot_blocked"]), None)
    which = f"the next boot starts {found['next_kernel'] or 'an unknown kernel'}"
    if blocked:
        results.append(say(blocked, f"{which}, whose module is {found['next_boot'] or 'not there'}"))
    elif found["next_boot"]:
        results.append(say("next_boot_ready", f"{which} with module {found['next_boot']}"))
    return results


def kernels(facts: Facts) -> List[checks.Result]:
    """Name each installed kernel that has no module; the one that boots next is :func:`versions`' to judge."""
    if not facts["kernels"]:
        return [say("kernels_unknown", "no kernel in /boot")]
    bare = [item["release"] for item in facts["kernels"] if not item["module"]]
    if bare:
        return [say("kernel_without_module", f"no module for {', '.join(bare)}")]
    return [say("every_kernel_has_module", f"{len(facts['kernels'])} kernels")]


def nouveau(facts: Facts) -> checks.Result:
    """Judge whether nouveau is kept out at the next boot."""
    if facts["nouveau_blocked"]:
        return say("nouveau_blocked", "modprobe keeps nouveau out")
    if not facts["kernels"]:
        return say("nouveau_unknown", "no kernel is installed here, so the host decides what it loads")
    return say("nouveau_not_blocked", "nothing keeps nouveau out at the next boot")


def packages(facts: Facts) -> List[checks.Result]:
    """Judge whether every package of the family is whole and held."""
    found = family(facts["packages"] or [])
    if not found:
        return [say("no_packages", "no package of the driver is installed")]
    broken = [item["name"] for item in found if item["state"] != "ok"]
    if broken:
        return [say("packages_half_installed", f"half installed: {', '.join(broken)}")]
    loose = [item["name"] for item in found if not item["held"]]
    if loose:
        more = f" and {len(loose) - 6} more" if len(loose) > 6 else ""
        return [say("packages_not_held", f"an upgrade would move {', '.join(loose[:6])}{more}")]
    return [say("packages_held", f"{len(found)} packages")]


def cards(facts: Facts, topology: Optional[Facts], wanted: Optional[int]) -> List[checks.Result]:
    """Judge the count of the cards, their persistence mode and the width of their links."""
    gpus = (topology or {}).get("gpus")
    if gpus is None:
        reason = str(((topology or {}).get("extra") or {}).get("message") or "the driver was not asked")
        return [say(f"{name}_unknown", reason) for name in ("gpu_count", "persistence", "link_width")]
    # a container sees all cards of the host on the bus, and has those that were given to it
    given = facts["claimed"] if topology and topology["host"]["virtualization"] == "container" else facts["pci"]
    expected = wanted if wanted is not None else len(given) or len(gpus)
    lost = [gpu["bus_id"] or f"GPU {gpu['index']}" for gpu in gpus if gpu["health"] == "lost"]
    text = f"{len(gpus)} GPUs answer, {expected} expected"
    results = [
        say("gpu_missing", text + (f"; lost: {', '.join(lost)}" if lost else ""))
        if len(gpus) < expected or lost
        else say("gpu_count_ok", text)
    ]
    modes = [card.get("persistence") for card in topology["extra"]["cards"]] if topology else []
    reason = (
        "persistence_off"
        if False in modes
        else "persistence_unknown"
        if None in modes or not modes
        else "persistence_on"
    )
    off = [str(index) for index, mode in enumerate(modes) if mode is False]
    results.append(say(reason, f"persistence mode is off on GPU {', '.join(off)}" if off else f"{len(modes)} GPUs"))
    results.append(_widths(gpus, topology["extra"]["cards"] if topology else []))
    return results


def _widths(gpus: Sequence[Facts], extras: Sequence[Facts]) -> checks.Result:
    narrow, unknown = [], 0
    for gpu, extra in zip(gpus, extras):
        width, limits = gpu["pcie"]["width_current"], [gpu["pcie"]["width_max"], extra.get("slot_width_max")]
        known = [limit for limit in limits if limit]
        if width is None or not known:
            unknown += 1
        elif width < min(known):
            narrow.append(f"GPU {gpu['index']} x{width} of x{min(known)}")
    if narrow:
        return say("link_width_degraded", "; ".join(narrow))
    if unknown or not gpus:
        return say("link_width_unknown", f"the link of {unknown} GPUs could not be read")
    return say("link_width_full", f"{len(gpus)} GPUs")


def fabric(facts: Facts, found: Facts) -> checks.Result:
    """Judge the fabric manager, which only a box with its own NVSwitch needs."""
    if not facts["nvswitch"]:
        return say("fabric_not_needed", "no NVSwitch on the PCI bus")
    items = [item for item in facts["packages"] or [] if re.match(r"nvidia-fabricmanager(-\d+)?\Z", item["name"])]
    unit = facts.get("fabric_manager")
    if not items and unit != "active":
        return say("fabric_manager_missing", "an NVSwitch and no fabric manager")
    version = re.sub(r"-.*", "", items[0]["version"]) if items else None
    if version and found["installed"] and version != found["installed"]:
        return say("fabric_manager_differs", f"fabric manager {version}, driver {found['installed']}")
    if unit != "active":
        return say("fabric_manager_down", f"nvidia-fabricmanager is {unit or 'unknown'}")
    return say("fabric_manager_ok", f"fabric manager {version or 'of unknown version'}, active")


def p2p(found: Facts, topology: Optional[Facts]) -> List[checks.Result]:
    """Report what a P2P-patched module depends on. Nothing here is ever set by the project."""
    gpus = (topology or {}).get("gpus")
    if found["flavour"] is None or topology is None or not gpus:
        return [say("p2p_module_unknown", "the module's flavour or the cards could not be read")]
    results = []
    if found["flavour"] != "open":
        results.append(say("p2p_module_not_open", f"the module is {found['flavour']}"))
    if topology["host"]["iommu"] not in ("off", "passthrough"):
        results.append(say("p2p_iommu", f"the IOMMU is {topology['host']['iommu']}"))
    small = [gpu["index"] for gpu in gpus if (gpu["bar1_total_mib"] or 0) < (gpu["memory_total_mib"] or 0)]
    if small:
        results.append(say("p2p_small_bar", f"BAR1 is smaller than the memory on GPU {', '.join(map(str, small))}"))
    if any(pair["acs"] for pair in topology["pairs"]):
        results.append(say("p2p_acs", "ACS redirects peer traffic between some cards"))
    return results or [say("p2p_module_ok", f"open module {found['loaded']}, IOMMU and BAR1 as it needs them")]


def kernel_log(lines: Optional[Iterable[str]]) -> List[checks.Result]:
    """Judge the kernel log since the boot: cards that are gone, with or without an Xid, and errors of the hardware."""
    if lines is None:
        return [say("kernel_log_unknown", "the kernel log could not be read")]
    gone: List[str] = []
    counts: Dict[str, int] = {}
    for line in lines:
        match = _XID.search(line)
        if match and int(match.group(2)) not in APPLICATION_XIDS:
            key = f"Xid {match.group(2)} on {match.group(1)}"
            counts[key] = counts.get(key, 0) + 1
        if _OFF_BUS.search(line) or (match and match.group(2) == "79"):
            gone.append(line.strip()[-160:])
    results = [say("gpu_fell_off_bus", gone[0])] if gone else []
    if counts:
        shown = ", ".join(f"{name} ({number} times)" for name, number in sorted(counts.items())[:6])
        results.append(say("xid", shown))
    return results or [say("kernel_log_clean", "no Xid and no lost card since the boot")]
