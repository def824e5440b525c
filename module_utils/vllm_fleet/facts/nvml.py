"""NVML through pynvml: cards, pairs and driver version as plain data. It never creates a CUDA context.

Each value is read on its own: what a card or a driver does not answer is ``None`` and costs nothing else. The caller
(:mod:`.collect`) puts a time limit around the whole.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

MIB = 1 << 20

#: the on-box program, which carries pynvml.py
PROGRAM = "/opt/vllm-fleet/bin/vllm-fleet"

#: nvmlReturn_t values that mean something here (NVML API reference, "Return values")
INVALID_ARGUMENT, NOT_SUPPORTED = 2, 3
DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND = 9, 12, 13
GPU_IS_LOST, RESET_REQUIRED, LIB_RM_VERSION_MISMATCH = 15, 16, 18
_ABSENT = (INVALID_ARGUMENT, NOT_SUPPORTED, FUNCTION_NOT_FOUND)

#: why NVML could not be read at all, by error number; what else happens is ``nvml_error``
STATUSES = {
    DRIVER_NOT_LOADED: "driver_not_loaded",
    LIBRARY_NOT_FOUND: "library_missing",
    LIB_RM_VERSION_MISMATCH: "driver_mismatch",
}

ANCESTORS = {0: "internal", 10: "single", 20: "multiple", 30: "hostbridge", 40: "node", 50: "system"}
P2P_STATUSES = {
    0: "ok",
    1: "chipset_not_supported",
    2: "gpu_not_supported",
    3: "topology_not_supported",
    4: "disabled_by_regkey",
    5: "not_supported",
}
_P2P_READ, _P2P_WRITE, _P2P_NVLINK = 0, 1, 2
_REMOTE_SWITCH = 2
_MOST_LINKS = 36
_AFFINITY_SCOPE_NODE = 0

_BUS_ID = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])\Z")


def text(value: Any) -> Optional[str]:
    """Return a string that a C library gave as bytes or text, without NUL and outer blanks; ``None`` when empty."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if not isinstance(value, str):
        return None
    return value.split("\0", 1)[0].strip() or None


def number(value: Any) -> Optional[int]:
    """Return an integer; a 1-tuple is unwrapped (some pynvml releases end a constant with a comma)."""
    if isinstance(value, tuple) and len(value) == 1:
        value = value[0]
    return int(value) if isinstance(value, int) else None


def normalise_bus_id(value: Any) -> Optional[str]:
    """Return a PCI address as sysfs writes it, ``0000:01:00.0``; ``None`` for what is none, all F included."""
    found = _BUS_ID.match(text(value) or "")
    if not found:
        return None
    domain, bus, device, function = found.groups()
    if int(domain, 16) == 0xFFFFFFFF:
        return None
    return f"{int(domain, 16):04x}:{bus.lower()}:{device.lower()}.{function}"


class _Card:
    """One handle; remembers which errors its calls met."""

    def __init__(self, nvml: Any, place: int) -> None:
        self.nvml = nvml
        self.errors: List[int] = []
        self.handle: Any = None
        self.handle = self.ask("nvmlDeviceGetHandleByIndex", index=place)

    def ask(self, name: str, *args: Any, index: Optional[int] = None) -> Any:
        """Call NVML for this card; ``None`` when it fails in any way."""
        if index is None and self.handle is None:
            return None
        try:
            return getattr(self.nvml, name)(*((index,) if index is not None else (self.handle, *args)))
        except Exception as error:  # pynvml raises NVMLError; an old one lacks the function or the argument
            self.errors.append(_code(error))
            return None

    def refused(self) -> bool:
        """Whether the last call that failed did so because the card has no such thing."""
        return bool(self.errors) and self.errors[-1] in _ABSENT

    def health(self, uuid: Optional[str]) -> str:
        """Lost when NVML says so; unknown when the card asks for a reset or can't even say who it is."""
        if GPU_IS_LOST in self.errors:
            return "lost"
        return "unknown" if uuid is None or RESET_REQUIRED in self.errors else "ok"


def _code(error: Exception) -> int:
    """Return NVML's error number of an exception; a missing Python function counts as a missing library one."""
    value = number(getattr(error, "value", None))
    if value is not None:
        return value
    return FUNCTION_NOT_FOUND if isinstance(error, (AttributeError, TypeError)) else -1


def load_error(error: Exception) -> Dict[str, Any]:
    """Return ``{"status", "message"}`` for an exception of ``nvmlInit``."""
    return {"status": STATUSES.get(_code(error), "nvml_error"), "message": str(error)}


def library_version() -> Optional[str]:
    """Return the version in the file name of the installed libnvidia-ml.so.1, without loading it as NVML.

    The only way to see the userland's version when module and library differ: NVML then refuses to start.
    """
    for path in _library_paths():
        found = re.search(r"\.so\.(\d+\.\d+(?:\.\d+)?)\Z", os.path.realpath(path))
        if found:
            return found.group(1)
    return None


def _library_paths() -> List[str]:
    """Return where the loader has found the library in this process, then where it usually lies."""
    paths: List[str] = []
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as handle:
            paths = [line.split(None, 5)[5].strip() for line in handle if "libnvidia-ml.so" in line]
    except OSError:
        pass
    for pattern in ("lib/*/libnvidia-ml.so.1", "lib64/libnvidia-ml.so.1", "lib/libnvidia-ml.so.1"):
        paths.extend(str(path) for path in sorted(Path("/usr").glob(pattern)))
    return paths


def bindings() -> Any:
    """Import pynvml: from the program itself, or, inside an Ansible module, from the program installed on the box."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        sys.path.append(PROGRAM)  # a zipapp; behind everything else, so that it shadows nothing
        return importlib.import_module("pynvml")


def read(nvml: Any = None) -> Dict[str, Any]:
    """Read all that NVML tells.

    :param nvml: a module like pynvml; default the installed one.
    :returns: ``{"status": "ok" | reason, "message", "driver": {"userland", "cuda"}, "gpus": [...] | None,
        "pairs": [...], "cards": [...]}``. ``gpus`` and ``pairs`` are as in the topology facts, in PCI bus order;
        ``cards`` holds, in the same order, what only the preflight wants. Never raises.
    """
    driver: Dict[str, Any] = {"userland": None, "cuda": None}
    outcome: Dict[str, Any] = {"status": "ok", "message": "", "driver": driver, "gpus": None, "pairs": [], "cards": []}
    if nvml is None:
        try:
            nvml = bindings()
        except ImportError as error:
            outcome.update(status="pynvml_missing", message=str(error))
            driver["userland"] = library_version()
            return outcome
    try:
        nvml.nvmlInit()
    except Exception as error:  # whatever it is, the answer is that there are no facts
        outcome.update(load_error(error))
        driver["userland"] = library_version()
        return outcome
    try:
        driver["userland"] = text(_guard(nvml, "nvmlSystemGetDriverVersion"))
        driver["cuda"] = _cuda(nvml)
        count = number(_guard(nvml, "nvmlDeviceGetCount"))
        if count is None:
            outcome.update(status="nvml_error", message="nvmlDeviceGetCount failed")
            return outcome
        _read_cards(nvml, count, outcome)
    finally:
        _guard(nvml, "nvmlShutdown")
    return outcome


def _guard(nvml: Any, name: str, *args: Any) -> Any:
    try:
        return getattr(nvml, name)(*args)
    except Exception:  # one value that can't be read is not the end of the rest
        return None


def _cuda(nvml: Any) -> Optional[List[int]]:
    """Return the CUDA version that the driver supports as ``[13, 3]``; NVML says 13030."""
    value = number(_guard(nvml, "nvmlSystemGetCudaDriverVersion_v2"))
    if value is None:
        value = number(_guard(nvml, "nvmlSystemGetCudaDriverVersion"))
    return None if value is None else [value // 1000, value % 1000 // 10]


def _read_cards(nvml: Any, count: int, outcome: Dict[str, Any]) -> None:
    cards = [_Card(nvml, place) for place in range(count)]
    read_cards = [(card, _gpu(card), _card_extra(card)) for card in cards]
    # NVML lists in bus order already; a card without an address keeps its place
    ordered = sorted(range(count), key=lambda place: _sort_key(place, [gpu for _, gpu, _ in read_cards]))
    cards = [read_cards[place][0] for place in ordered]
    gpus = [read_cards[place][1] for place in ordered]
    outcome["cards"] = [read_cards[place][2] for place in ordered]
    for index, (gpu, extra) in enumerate(zip(gpus, outcome["cards"])):
        gpu["index"] = extra["index"] = index
    outcome["pairs"] = _pairs(cards, gpus)
    for card, gpu in zip(cards, gpus):  # last: a card can be lost while its links are read
        gpu["health"] = card.health(gpu["uuid"])
    outcome["gpus"] = gpus


def bus_order(bus_id: str) -> Tuple[int, ...]:
    """Return the sort key of a PCI address."""
    return tuple(int(part, 16) for part in re.split("[:.]", bus_id))


def _sort_key(place: int, gpus: Sequence[Dict[str, Any]]) -> Tuple[Tuple[int, ...], int]:
    for back in range(place, -1, -1):
        if gpus[back]["bus_id"]:
            return bus_order(gpus[back]["bus_id"]), place
    return (), place


def _mib(value: Any) -> Optional[int]:
    return None if value is None else int(value) // MIB


def _gpu(card: _Card) -> Dict[str, Any]:
    pci = card.ask("nvmlDeviceGetPciInfo")
    memory = _memory(card)
    bar1 = card.ask("nvmlDeviceGetBAR1MemoryInfo")
    capability = card.ask("nvmlDeviceGetCudaComputeCapability")
    bus_id = normalise_bus_id(getattr(pci, "busId", None)) or normalise_bus_id(getattr(pci, "busIdLegacy", None))
    return {
        "index": None,
        "bus_id": bus_id,
        "uuid": text(card.ask("nvmlDeviceGetUUID")),
        "name": text(card.ask("nvmlDeviceGetName")),
        "numa_node": _numa_node(card),
        "health": "unknown",
        "memory_total_mib": _mib(getattr(memory, "total", None)),
        "memory_used_mib": _mib(getattr(memory, "used", None)),
        "bar1_total_mib": _mib(getattr(bar1, "bar1Total", None)),
        "compute_capability": None if capability is None else [int(part) for part in capability],
        "pcie": {
            "gen_max": number(card.ask("nvmlDeviceGetMaxPcieLinkGeneration")),
            "gen_current": number(card.ask("nvmlDeviceGetCurrPcieLinkGeneration")),
            "width_max": number(card.ask("nvmlDeviceGetMaxPcieLinkWidth")),
            "width_current": number(card.ask("nvmlDeviceGetCurrPcieLinkWidth")),
        },
        "mig": _mig(card),
        "display": _flag(card.ask("nvmlDeviceGetDisplayActive")),
        "processes": _processes(card),
    }


def _memory(card: _Card) -> Any:
    """Prefer the second version: the first counts what the driver reserves as used (629 MB on an idle H200)."""
    version = number(getattr(card.nvml, "nvmlMemory_v2", None))
    memory = card.ask("nvmlDeviceGetMemoryInfo", version) if version is not None else None
    return memory if memory is not None else card.ask("nvmlDeviceGetMemoryInfo")


def _numa_node(card: _Card) -> Optional[int]:
    """Return the host node next to the card, when NVML names exactly one. Sysfs has the last word, where it has one."""
    answer = card.ask("nvmlDeviceGetMemoryAffinity", 4, _AFFINITY_SCOPE_NODE)
    if answer is None:
        return None
    nodes = [64 * place + bit for place, word in enumerate(answer) for bit in range(64) if word >> bit & 1]
    return nodes[0] if len(nodes) == 1 else None


def _flag(value: Any) -> Optional[bool]:
    return None if value is None else bool(value)


def _mig(card: _Card) -> Optional[bool]:
    mode = card.ask("nvmlDeviceGetMigMode")
    if mode is None:
        return False if card.handle is not None and card.refused() else None
    return bool(mode[0])


def _processes(card: _Card) -> Optional[List[Dict[str, Any]]]:
    found = card.ask("nvmlDeviceGetComputeRunningProcesses")
    if found is None:
        return None
    processes = []
    for item in found:
        pid = int(item.pid)
        name = _process_name(pid) or text(_guard(card.nvml, "nvmlSystemGetProcessName", pid))
        processes.append({"pid": pid, "name": name, "memory_mib": _mib(item.usedGpuMemory)})
    return processes


def _process_name(pid: int) -> Optional[str]:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as handle:
            return handle.read().strip() or None
    except OSError:
        return None


def _card_extra(card: _Card) -> Dict[str, Any]:
    limits = card.ask("nvmlDeviceGetPowerManagementLimitConstraints") or (None, None)
    return {
        "index": None,
        "minor": number(card.ask("nvmlDeviceGetMinorNumber")),
        "persistence": _flag(card.ask("nvmlDeviceGetPersistenceMode")),
        "compute_mode": number(card.ask("nvmlDeviceGetComputeMode")),
        "virtualization": number(card.ask("nvmlDeviceGetVirtualizationMode")),
        "power_limit_mw": number(card.ask("nvmlDeviceGetPowerManagementLimit")),
        "power_min_mw": number(limits[0]),
        "power_max_mw": number(limits[1]),
        "pcie_replays": number(card.ask("nvmlDeviceGetPcieReplayCounter")),
        "vbios": text(card.ask("nvmlDeviceGetVbiosVersion")),
    }


class _Links:
    """The active NVLinks of one card: how many reach each known card, and how many reach a switch or can't be told."""

    def __init__(self, card: _Card, known: Dict[str, int]) -> None:
        self.to: Dict[int, int] = {}
        self.untold = 0
        self.readable = card.handle is not None
        for link in range(_MOST_LINKS):
            state = number(card.ask("nvmlDeviceGetNvLinkState", link))
            if state is None:
                self.readable = self.readable and card.refused()
                break
            if not state:
                continue
            remote = normalise_bus_id(getattr(card.ask("nvmlDeviceGetNvLinkRemotePciInfo", link), "busId", None))
            if remote in known:
                self.to[known[remote]] = self.to.get(known[remote], 0) + 1
            elif remote is None or number(card.ask("nvmlDeviceGetNvLinkRemoteDeviceType", link)) == _REMOTE_SWITCH:
                self.untold += 1


def _pairs(cards: Sequence[_Card], gpus: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    known = {gpu["bus_id"]: gpu["index"] for gpu in gpus if gpu["bus_id"]}
    links = [_Links(card, known) for card in cards]
    pairs = []
    for i in range(len(cards)):
        for j in range(i + 1, len(cards)):
            one, other = cards[i], cards[j]
            level = number(_ask_pair(one, other, "nvmlDeviceGetTopologyCommonAncestor"))
            pairs.append(
                {
                    "gpus": [i, j],
                    "ancestor": "unknown" if level is None else ANCESTORS.get(level, "unknown"),
                    "p2p_read": _p2p(one, other, _P2P_READ),
                    "p2p_write": _p2p(one, other, _P2P_WRITE),
                    "nvlink_lanes": _lanes(one, other, i, j, links),
                    "acs": None,
                }
            )
    return pairs


def _ask_pair(one: _Card, other: _Card, name: str, *args: Any) -> Any:
    """Call NVML for a pair. Its errors are nobody's: GPU_IS_LOST does not say which of the two is lost."""
    if one.handle is None or other.handle is None:
        return None
    return _guard(one.nvml, name, one.handle, other.handle, *args)


def _p2p(one: _Card, other: _Card, what: int) -> str:
    """Return the status of both directions together: ok only when both are, else what the first refusal says."""
    answers: List[str] = []
    for a, b in ((one, other), (other, one)):
        code = number(_ask_pair(a, b, "nvmlDeviceGetP2PStatus", what))
        answers.append("unknown" if code is None else P2P_STATUSES.get(code, "unknown"))
    for answer in answers:
        if answer not in ("ok", "unknown"):
            return answer
    return "ok" if answers == ["ok", "ok"] else "unknown"


def _lanes(one: _Card, other: _Card, i: int, j: int, links: Sequence[_Links]) -> Optional[int]:
    """Return how many NVLinks join two cards.

    The peer's address on the link decides (active links of a card say nothing about which peer they reach). Links
    whose end is a switch, or hidden from a guest, count for each pair that NVML grants P2P over NVLink.
    """
    if not (links[i].readable and links[j].readable):
        return None
    direct = min(links[i].to.get(j, 0), links[j].to.get(i, 0))
    untold = min(links[i].untold, links[j].untold)
    if untold and _p2p(one, other, _P2P_NVLINK) == "ok":
        return direct + untold
    return direct
