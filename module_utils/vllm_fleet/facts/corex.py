"""CoreX (Iluvatar): the same facts through libixml, an NVML work-alike under its own name; else the table of ixsmi.

libixml exports both ``nvml*`` and ``ixml*`` symbols, so pynvml can speak to it once it is given that library. The
caller (:mod:`.collect`) puts a time limit around the whole.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from typing import Any, Dict, List, Optional

from . import nvml
from .host import read_text, under

DEFAULT_HOME = "/usr/local/corex"
_IXSMI_TIMEOUT_S = 10

#: bits of ixmlDeviceGetHealth (go-ixml, pkg/ixml); 0 is healthy
HEALTH_BITS = {
    0x01: "syshub",
    0x02: "memory_controller",
    0x04: "over_temperature",
    0x08: "over_voltage",
    0x10: "ecc",
    0x20: "memory",
    0x40: "pcie",
}


def home() -> str:
    """Return the CoreX installation: $COREX_HOME or /usr/local/corex (units rarely have the variable)."""
    return os.environ.get("COREX_HOME") or DEFAULT_HOME


def device_nodes(root: str = "/") -> List[str]:
    """Return the CoreX device nodes; ``/dev/itrctl`` exists with drivers from 4.4.0 on."""
    try:
        names = os.listdir(under(root, "/dev"))
    except OSError:
        return []
    return sorted(f"/dev/{name}" for name in names if re.match(r"(iluvatar\d+|itrctl)\Z", name))


def module(root: str = "/") -> Dict[str, Any]:
    """Return ``{"version", "flavour", "nouveau_loaded", "parameters"}`` of the kernel module ``iluvatar``."""
    version = (read_text(under(root, "/sys/module/iluvatar/version")) or "").strip() or None
    return {"version": version, "flavour": None, "nouveau_loaded": False, "parameters": {}}


class _Library:
    """libixml as pynvml wants its library: a name that it lacks is looked up as its ``ixml`` twin."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        names = [name, name.replace("nvml", "ixml", 1)]
        if name == "nvmlInitWithFlags":
            names += ["nvmlInit_v2", "nvmlInit", "ixmlInit"]
        for candidate in names:
            try:
                return getattr(self._library, candidate)
            except AttributeError:
                continue
        raise AttributeError(name)


def load(corex_home: Optional[str] = None) -> Optional[Any]:
    """Return libixml, by its bare name or below the CoreX home; ``None`` when it can't be loaded."""
    base = corex_home or home()
    for path in ("libixml.so", os.path.join(base, "lib64/libixml.so"), os.path.join(base, "lib/libixml.so")):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def read(root: str = "/") -> Dict[str, Any]:
    """Read the cards; the result is that of :func:`.nvml.read`, ``cards`` with ``health_faults`` besides."""
    library = load()
    if library is not None:
        outcome = _through_library(library)
        if outcome["status"] == "ok":
            return outcome
        reason = outcome["status"], outcome["message"]
    else:
        reason = "library_missing", f"libixml.so is neither on the loader's path nor below {home()}"
    table = _ixsmi()
    if table is None:
        empty: Dict[str, Any] = {"driver": {"userland": None, "cuda": None}, "gpus": None, "pairs": [], "cards": []}
        return {"status": reason[0], "message": reason[1], **empty}
    return parse_table(table, _ixsmi("-L") or "")


def _through_library(library: Any) -> Dict[str, Any]:
    try:
        pynvml = nvml.bindings()
    except ImportError as error:
        driver = {"userland": None, "cuda": None}
        return {
            "status": "pynvml_missing",
            "message": str(error),
            "driver": driver,
            "gpus": None,
            "pairs": [],
            "cards": [],
        }
    pynvml.nvmlLib = _Library(library)  # what pynvml would load itself, under NVIDIA's name
    outcome = nvml.read(pynvml)
    if outcome["gpus"]:
        try:
            pynvml.nvmlInit()
            _read_health(pynvml, library, outcome)
            pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            outcome.update(status="nvml_error", message=str(error))
    return outcome


def _read_health(pynvml: Any, library: Any, outcome: Dict[str, Any]) -> None:
    ask = getattr(library, "ixmlDeviceGetHealth", None)
    for gpu, card in zip(outcome["gpus"], outcome["cards"]):
        card["health_faults"] = []
        if ask is None or gpu["health"] != "ok":
            continue
        bits = ctypes.c_ulonglong(0)
        code = ask(pynvml.nvmlDeviceGetHandleByIndex(gpu["index"]), ctypes.byref(bits))
        if code == nvml.NOT_SUPPORTED:
            continue
        card["health_faults"] = [name for bit, name in HEALTH_BITS.items() if bits.value & bit]
        if code or bits.value:
            gpu["health"] = "unknown"


def _ixsmi(*arguments: str) -> Optional[str]:
    """Return what ixsmi prints; ``None`` when it is missing, fails or hangs."""
    base = home()
    environment = dict(os.environ)
    paths = [os.path.join(base, "lib64"), os.path.join(base, "lib"), environment.get("LD_LIBRARY_PATH", "")]
    environment["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
    program = os.path.join(base, "bin/ixsmi")
    try:
        done = subprocess.run(
            [program if os.path.exists(program) else "ixsmi", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_IXSMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


_CARD_ROW = re.compile(r"\|\s*(\d+)\s+(\S.*?)\s*\|\s*([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s")
_MEMORY = re.compile(r"(\d+)\s*MiB\s*/\s*(\d+)\s*MiB")
_PROCESS_ROW = re.compile(r"\|\s*(\d+)\s+(\d+)\s+(\S.*?)\s+(\d+)(?:\s*MiB)?\s*\|\s*\Z")
_UUID_LINE = re.compile(r"GPU (\d+):.*\(UUID: (GPU-[0-9A-Fa-f-]+)\)")


def parse_table(table: str, listing: str = "") -> Dict[str, Any]:
    """Read ixsmi's default table, and ``ixsmi -L`` for the UUIDs, into the result of :func:`.nvml.read`.

    Rows: index, name and bus id; then fan, temperature, power and memory; at the end the processes. ``N/A`` is legal.
    """
    uuids = {int(index): uuid for index, uuid in _UUID_LINE.findall(listing)}
    gpus: List[Dict[str, Any]] = []
    by_number: Dict[int, Dict[str, Any]] = {}
    in_processes = False
    for line in table.splitlines():
        if "Processes:" in line:
            in_processes = True
            for gpu in gpus:
                gpu["processes"] = []
        row = None if in_processes else _CARD_ROW.match(line)
        if row:
            gpus.append(_empty_gpu(row.group(2), nvml.normalise_bus_id(row.group(3)), uuids.get(int(row.group(1)))))
            by_number[int(row.group(1))] = gpus[-1]
            continue
        memory = None if in_processes else _MEMORY.search(line)
        if memory and gpus:
            gpus[-1]["memory_used_mib"], gpus[-1]["memory_total_mib"] = int(memory.group(1)), int(memory.group(2))
        process = _PROCESS_ROW.match(line) if in_processes else None
        if process and int(process.group(1)) in by_number:
            entry = {"pid": int(process.group(2)), "name": process.group(3), "memory_mib": int(process.group(4))}
            by_number[int(process.group(1))]["processes"].append(entry)
    gpus.sort(key=lambda gpu: nvml.bus_order(gpu["bus_id"]))
    for index, gpu in enumerate(gpus):
        gpu["index"] = index
    return {
        "status": "ok" if gpus else "nvml_error",
        "message": "" if gpus else "ixsmi printed no card",
        "driver": {"userland": _label(table, "Driver Version"), "cuda": _cuda(table)},
        "gpus": gpus or None,
        "pairs": [
            {
                "gpus": [i, j],
                "ancestor": "unknown",
                "p2p_read": "unknown",
                "p2p_write": "unknown",
                "nvlink_lanes": None,
                "acs": None,
            }
            for i in range(len(gpus))
            for j in range(i + 1, len(gpus))
        ],
        "cards": [_empty_card(index) for index in range(len(gpus))],
    }


def _label(table: str, label: str) -> Optional[str]:
    found = re.search(rf"{label}:\s*([0-9][0-9A-Za-z.+-]*)", table)
    return found.group(1) if found else None


def _cuda(table: str) -> Optional[List[int]]:
    found = re.match(r"(\d+)\.(\d+)", _label(table, "CUDA Version") or "")
    return [int(found.group(1)), int(found.group(2))] if found else None


def _empty_gpu(name: str, bus_id: Optional[str], uuid: Optional[str]) -> Dict[str, Any]:
    return {
        "index": None,
        "bus_id": bus_id,
        "uuid": uuid,
        "name": name,
        "numa_node": None,
        "health": "ok",
        "memory_total_mib": None,
        "memory_used_mib": None,
        "bar1_total_mib": None,
        "compute_capability": None,
        "pcie": {"gen_max": None, "gen_current": None, "width_max": None, "width_current": None},
        "mig": False,
        "display": None,
        "processes": None,
    }


def _empty_card(index: int) -> Dict[str, Any]:
    keys = ("minor", "persistence", "compute_mode", "virtualization", "power_limit_mw", "power_min_mw", "power_max_mw")
    return {"index": index, **dict.fromkeys((*keys, "pcie_replays", "vbios")), "health_faults": []}
