"""Sysfs and procfs: NUMA, allowed CPUs, IOMMU, ACS, virtualization, kernel modules, PCI links, the board.

``root`` is a prefix for tests; ``/`` on a box. Nothing here fails: what can't be read is ``None`` or ``unknown``.
"""

from __future__ import annotations

import os
import re
import struct
from typing import Any, Dict, Iterable, List, Optional, Sequence

from .host import read_text, under
from .nvml import bus_order

NVIDIA, ILUVATAR = "0x10de", "0x1e3e"
_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x1200")  # VGA, 3D controller, processing accelerator

_PCI_DEVICES = "/sys/bus/pci/devices"
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")

#: PCI Express: extended capabilities start at 0x100; ACS has id 0x000D, its control register is at offset 6,
#: bits 2 and 3 redirect peer requests and completions to the root complex (PCIe base specification, 7.7.11)
_EXTENDED_AT, _ACS_ID, _ACS_CONTROL_AT, _ACS_REDIRECT = 0x100, 0x000D, 6, 0x0C


def _word(path: str, root: str) -> Optional[str]:
    content = read_text(under(root, path))
    return None if content is None else content.strip()


def _integer(path: str, root: str) -> Optional[int]:
    found = re.match(r"-?\d+", _word(path, root) or "")
    return int(found.group()) if found else None


def _list(path: str, root: str) -> List[str]:
    try:
        return sorted(os.listdir(under(root, path)))
    except OSError:
        return []


# ---- NUMA and CPUs ---------------------------------------------------------------------------------------------------


def numa_nodes(root: str = "/") -> Dict[str, Dict[str, Any]]:
    """Return ``{"0": {"cpus": "0-31", "memory_total_kib", "memory_available_kib"}}``; empty when sysfs shows none.

    A node has no MemAvailable line, so page cache and reclaimable slabs count as available: a node whose memory is
    full of cached weights is not short of memory.
    """
    nodes: Dict[str, Dict[str, Any]] = {}
    for name in _list("/sys/devices/system/node", root):
        found = re.match(r"node(\d+)\Z", name)
        if not found:
            continue
        directory = f"/sys/devices/system/node/{name}"
        memory = dict(
            re.findall(r"^Node \d+ ([\w()]+):\s*(\d+)", read_text(under(root, f"{directory}/meminfo")) or "", re.M)
        )
        available = None
        if "MemFree" in memory:
            available = sum(
                int(memory.get(key, 0)) for key in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
            )
        nodes[found.group(1)] = {
            "cpus": _word(f"{directory}/cpulist", root),
            "memory_total_kib": int(memory["MemTotal"]) if "MemTotal" in memory else None,
            "memory_available_kib": available,
        }
    return nodes


def numa_node(bus_id: str, nodes: Sequence[str], root: str = "/") -> Optional[int]:
    """Return the node of a PCI device. Firmware that tells nothing shows as -1: the only node, if there is just one."""
    node = _integer(f"{_PCI_DEVICES}/{bus_id}/numa_node", root)
    if node is not None and node >= 0:
        return node
    if node == -1 and len(nodes) == 1:
        return int(nodes[0])
    return None


def allowed(root: str = "/") -> Dict[str, Optional[str]]:
    """Return ``{"cpus", "mems"}`` that a service may use, as lists like ``0-31``.

    Those of process 1: this process may itself run under the affinity of an earlier decision.
    """
    for pid in ("1", "self"):
        status = read_text(under(root, f"/proc/{pid}/status")) or ""
        found = dict(re.findall(r"^(Cpus|Mems)_allowed_list:\s*(\S+)", status, re.M))
        if found:
            return {"cpus": found.get("Cpus"), "mems": found.get("Mems")}
    return {"cpus": None, "mems": None}


# ---- PCI -------------------------------------------------------------------------------------------------------------


def pci_gpus(vendor: str, root: str = "/") -> List[Dict[str, Any]]:
    """Return ``[{"bus_id", "device", "driver"}]`` of a vendor's display and compute devices, in bus order.

    ``driver`` names the kernel driver that owns it (``nvidia``, ``nouveau``, ``vfio-pci``); ``None`` without one.
    """
    found = []
    for bus_id in _list(_PCI_DEVICES, root):
        directory = f"{_PCI_DEVICES}/{bus_id}"
        if _word(f"{directory}/vendor", root) != vendor or not _BUS_ID.match(bus_id):
            continue
        if (_word(f"{directory}/class", root) or "")[:6] not in _DISPLAY_CLASSES:
            continue
        link = under(root, f"{directory}/driver")
        driver = os.path.basename(os.path.realpath(link)) if os.path.islink(link) else None
        found.append({"bus_id": bus_id, "device": _word(f"{directory}/device", root), "driver": driver})
    return sorted(found, key=lambda item: bus_order(item["bus_id"]))


def pcie(bus_id: str, root: str = "/") -> Dict[str, Optional[int]]:
    """Return ``{"width_max", "width_current", "gen_max", "gen_current", "slot_width_max"}`` of a device's link.

    ``slot_width_max`` is that of the port above it, which is what the slot is wired for.
    """
    directory = f"{_PCI_DEVICES}/{bus_id}"
    above = bridges(bus_id, root)
    return {
        "width_max": _integer(f"{directory}/max_link_width", root),
        "width_current": _integer(f"{directory}/current_link_width", root),
        "gen_max": _generation(_word(f"{directory}/max_link_speed", root)),
        "gen_current": _generation(_word(f"{directory}/current_link_speed", root)),
        "slot_width_max": _integer(f"{_PCI_DEVICES}/{above[-1]}/max_link_width", root) if above else None,
    }


def _generation(speed: Optional[str]) -> Optional[int]:
    """Return the PCIe generation of a speed such as ``16.0 GT/s PCIe``."""
    generations = {
        "2.5": 1,
        "5.0": 2,
        "5": 2,
        "8.0": 3,
        "8": 3,
        "16.0": 4,
        "16": 4,
        "32.0": 5,
        "32": 5,
        "64.0": 6,
        "64": 6,
    }
    return generations.get((speed or "").split(" ", 1)[0])


def bridges(bus_id: str, root: str = "/") -> Optional[List[str]]:
    """Return the bus ids of the bridges above a device, root port first; ``None`` when sysfs does not show it."""
    link = under(root, f"{_PCI_DEVICES}/{bus_id}")
    if not os.path.exists(link):
        return None
    parts = os.path.realpath(link).split(os.sep)
    return [part for part in parts[:-1] if _BUS_ID.match(part)]


def acs_redirects(bridge: str, root: str = "/") -> Optional[bool]:
    """Return whether a bridge sends peer traffic up to the root complex; ``None`` when its config is not readable.

    Only root reads beyond the first 64 bytes.
    """
    try:
        with open(under(root, f"{_PCI_DEVICES}/{bridge}/config"), "rb") as handle:
            config = handle.read(4096)
    except OSError:
        return None
    if len(config) <= _EXTENDED_AT:
        # 256 bytes is a device without extended space, 64 is a reader without the right
        return False if len(config) == _EXTENDED_AT else None
    offset = _EXTENDED_AT
    seen = set()
    while _EXTENDED_AT <= offset <= len(config) - 8 and offset not in seen:
        seen.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == _ACS_ID:
            (control,) = struct.unpack_from("<H", config, offset + _ACS_CONTROL_AT)
            return bool(control & _ACS_REDIRECT)
        offset = header >> 20
    return False


def acs(one: str, other: str, root: str = "/") -> Optional[bool]:
    """Return whether ACS redirects traffic between two devices: a bridge on the way does, below a common one."""
    above_one, above_other = bridges(one, root), bridges(other, root)
    if above_one is None or above_other is None:
        return None
    answers = [acs_redirects(bridge, root) for bridge in sorted(set(above_one) ^ set(above_other))]
    if True in answers:
        return True
    return None if None in answers else False


# ---- the machine -----------------------------------------------------------------------------------------------------


def iommu(bus_ids: Iterable[str], root: str = "/") -> str:
    """Return ``off``, ``passthrough``, ``translated`` or ``unknown`` for the given devices, worst one first."""
    if not os.path.isdir(under(root, "/sys/kernel")):
        return "unknown"
    kinds = set()
    for bus_id in bus_ids:
        kind = _word(f"{_PCI_DEVICES}/{bus_id}/iommu_group/type", root)
        if kind is not None:
            kinds.add("passthrough" if kind == "identity" else "translated")
    for kind in ("translated", "passthrough"):
        if kind in kinds:
            return kind
    if not _list("/sys/class/iommu", root) and not _list("/sys/kernel/iommu_groups", root):
        return "off"
    words = (_word("/proc/cmdline", root) or "").split()
    return "passthrough" if "iommu=pt" in words or "iommu.passthrough=1" in words else "unknown"


def virtualization(nvml_modes: Iterable[Optional[int]] = (), root: str = "/") -> str:
    """Return ``none``, ``passthrough``, ``wsl``, ``container`` or ``unknown``.

    What NVML says of the cards (0 bare metal, 1 pass-through, 2 vGPU) goes before the CPU's hypervisor flag, which
    a host that is itself a hypervisor's first guest shows too.
    """
    if "microsoft" in (_word("/proc/sys/kernel/osrelease", root) or "").lower():
        return "wsl"
    modes = [mode for mode in nvml_modes if mode is not None]
    if any(mode in (1, 2) for mode in modes):
        return "passthrough"
    cpu = read_text(under(root, "/proc/cpuinfo"))
    if not modes and cpu and re.search(r"^flags\s*:.*\bhypervisor\b", cpu, re.M):
        return "passthrough"
    if in_container(root):
        return "container"
    return "none" if modes or cpu else "unknown"


def in_container(root: str = "/") -> bool:
    """Return whether this box is a container, whose kernel belongs to another machine."""
    if any(
        os.path.exists(under(root, path)) for path in ("/run/systemd/container", "/run/.containerenv", "/.dockerenv")
    ):
        return True
    return "container=" in (read_text(under(root, "/proc/1/environ")) or "")


def nvidia_module(root: str = "/") -> Dict[str, Any]:
    """Return ``{"version", "flavour", "nouveau_loaded", "parameters"}`` of the loaded NVIDIA kernel module.

    ``flavour`` is ``open`` or ``proprietary``. ``parameters`` are those the driver runs with, from
    /proc/driver/nvidia/params: the sysfs parameter file of the registry settings reads empty even when they are set.
    """
    line = _word("/proc/driver/nvidia/version", root) or ""
    found = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", line)
    version = found.group(1) if found else _word("/sys/module/nvidia/version", root)
    flavour = None
    if found:
        flavour = "open" if "Open Kernel Module" in line else "proprietary"
    parameters = re.findall(r"^(\w+):\s*(.*?)\s*$", read_text(under(root, "/proc/driver/nvidia/params")) or "", re.M)
    return {
        "version": version or None,
        "flavour": flavour,
        "nouveau_loaded": os.path.isdir(under(root, "/sys/module/nouveau")),
        "parameters": {name: value.strip('"') for name, value in parameters},
    }


def nvidia_cards(root: str = "/") -> Dict[str, Dict[str, Optional[str]]]:
    """Return ``{bus_id: {"name", "uuid"}}`` of the cards that the module has claimed, lost ones included."""
    cards = {}
    for bus_id in _list("/proc/driver/nvidia/gpus", root):
        if _BUS_ID.match(bus_id):
            content = read_text(under(root, f"/proc/driver/nvidia/gpus/{bus_id}/information")) or ""
            lines = dict(re.findall(r"^([\w ]+):\s*(.*?)\s*$", content, re.M))
            uuid = lines.get("GPU UUID", "")
            cards[bus_id] = {
                "name": lines.get("Model") or None,
                "uuid": uuid if uuid.startswith("GPU-") and "?" not in uuid else None,
            }
    return cards


def board(root: str = "/") -> Dict[str, Optional[str]]:
    """Return mainboard and BIOS as the firmware names them: what a verdict is bound to besides the driver."""
    names = ("bios_vendor", "bios_version", "bios_date", "board_vendor", "board_name", "product_name")
    return {name: _word(f"/sys/class/dmi/id/{name}", root) or None for name in names}


def process_uid(pid: int, root: str = "/") -> Optional[int]:
    """Return the user id that a process runs as; ``None`` when it is gone or in another PID namespace."""
    try:
        return os.stat(under(root, f"/proc/{pid}")).st_uid
    except OSError:
        return None
