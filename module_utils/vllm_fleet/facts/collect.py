"""Live topology facts (schema 1), read in a child process under a time limit: a hung driver can't hang a boot.

The child is a fork, not a new interpreter, so it works from a zipapp and inside an Ansible module alike.

Besides the contract's keys the facts hold ``extra``, which decisions ignore and the preflight reads::

    {"status": "ok | pynvml_missing | library_missing | driver_not_loaded | driver_mismatch | nvml_error | timeout",
     "message": "…",
     "cards": [{"index", "minor", "persistence", "compute_mode", "virtualization", "power_limit_mw", "power_min_mw",
                "power_max_mw", "pcie_replays", "vbios", "slot_width_max", "processes": [{"pid", "uid"}]}],
     "module": {"version", "flavour": "open | proprietary", "nouveau_loaded", "parameters": {…}},
     "pci": [{"bus_id", "device", "driver"}],      cards as the PCI bus shows them, with the driver that owns each
     "board": {"bios_vendor", "bios_version", "bios_date", "board_vendor", "board_name", "product_name"},
     "nodes": ["/dev/nvidia0", …]}                 device nodes
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import Any, Callable, Dict, List, Optional

from .. import verdict, verdict_store
from . import corex, nvml, smi, sysfs
from .host import under

#: how long a killed child may take to go away; one that hangs inside the kernel never does, and is left to init
_REAP_S = 1.0


def read(timeout: float = 20.0, root: str = "/") -> Dict[str, Any]:
    """Return the facts of this box. Never raises; ``"gpus": null`` when the driver does not answer in time.

    :param timeout: seconds for everything that asks the driver.
    :param root: prefix of /sys, /proc and /dev, for tests. NVML itself is always the installed one.
    """
    vendor = find_vendor(root)
    started = time.monotonic()
    answer = in_child(lambda: _ask_driver(vendor, root), timeout)
    if answer is None:
        status, message = "timeout", f"the {vendor} driver did not answer within {timeout:g} s"
        if time.monotonic() - started < timeout:
            status, message = "nvml_error", f"the process that asked the {vendor} driver died"
        answer = {"status": status, "message": message, "driver": {}, "gpus": None, "pairs": [], "cards": []}
    facts = assemble(vendor, answer, root)
    facts["p2p_verdict"] = verdict.for_facts(verdict_store.load(root), facts)
    return facts


def find_vendor(root: str = "/") -> str:
    """Return ``corex`` for a box with Iluvatar cards and no NVIDIA one, else ``nvidia``."""
    if sysfs.pci_gpus(sysfs.NVIDIA, root):
        return "nvidia"
    return "corex" if corex.device_nodes(root) or sysfs.pci_gpus(sysfs.ILUVATAR, root) else "nvidia"


def _ask_driver(vendor: str, root: str) -> Dict[str, Any]:
    if vendor == "corex":
        return corex.read(root)
    answer = nvml.read()
    if answer["status"] != "pynvml_missing":
        return answer
    tables = smi.read()
    return answer if tables["gpus"] is None else tables


def in_child(work: Callable[[], Any], timeout: float) -> Optional[Any]:
    """Run ``work`` in a forked child with its own process group and return its JSON answer.

    ``None`` when it took longer than ``timeout`` seconds, died, or answered nothing; the whole group is then killed.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.setsid()
            with os.fdopen(writer, "wb") as out:
                out.write(json.dumps(work()).encode())
            status = 0
        except Exception:  # the parent sees an empty answer
            status = 1
        finally:
            os._exit(status)
    os.close(writer)
    try:
        raw = _read_all(reader, time.monotonic() + timeout)
    finally:
        os.close(reader)
        _end(child)
    try:
        return json.loads(raw) if raw else None
    except ValueError:
        return None


def _read_all(descriptor: int, deadline: float) -> Optional[bytes]:
    chunks: List[bytes] = []
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return None
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)


def _end(child: int) -> None:
    """Kill what is left of the child's group and reap it, without waiting for one that the kernel holds."""
    deadline = time.monotonic() + _REAP_S
    killed = False
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return
        if not killed:
            for kill in (os.killpg, os.kill):  # the group exists only after the child's setsid
                try:
                    kill(child, signal.SIGKILL)
                except OSError:
                    continue
            killed = True
        time.sleep(0.005)


def assemble(vendor: str, answer: Dict[str, Any], root: str = "/") -> Dict[str, Any]:
    """Join what the driver answered (see :func:`.nvml.read`) with sysfs to the facts of the contract."""
    nodes = sysfs.numa_nodes(root)
    module = sysfs.nvidia_module(root) if vendor == "nvidia" else corex.module(root)
    gpus: Optional[List[Dict[str, Any]]] = answer["gpus"]
    pairs, cards = answer["pairs"], answer["cards"]
    if gpus is not None:
        if vendor == "nvidia":
            _name_lost(gpus, root)
        for gpu, card in zip(gpus, cards):
            _complete(gpu, card, list(nodes), root)
        for pair in pairs:
            one, other = (gpus[index]["bus_id"] for index in pair["gpus"])
            pair["acs"] = sysfs.acs(one, other, root) if one and other else None
    driver = answer["driver"]
    allowed = sysfs.allowed(root)
    # CoreX's module carries a build id, which is no version to compare with the libraries'
    loaded = module["version"] if vendor == "nvidia" else None
    if loaded is None and answer["status"] == "ok":
        # a container without the module's files: NVML answers only when library and module are of one version
        loaded = driver.get("userland")
    bus_ids = [gpu["bus_id"] for gpu in gpus or [] if gpu["bus_id"]]
    pci = sysfs.pci_gpus(sysfs.NVIDIA if vendor == "nvidia" else sysfs.ILUVATAR, root)
    return {
        "schema": 1,
        "vendor": vendor,
        "driver": {"loaded": loaded, "userland": driver.get("userland"), "cuda": driver.get("cuda")},
        "host": {
            "numa_nodes": nodes,
            "allowed_cpus": allowed["cpus"],
            "allowed_mems": allowed["mems"],
            "iommu": sysfs.iommu(bus_ids or [item["bus_id"] for item in pci], root),
            "virtualization": sysfs.virtualization([card.get("virtualization") for card in cards], root),
        },
        "gpus": gpus,
        "pairs": pairs,
        "p2p_verdict": None,
        "extra": {
            "status": answer["status"],
            "message": answer["message"],
            "cards": cards,
            "module": module,
            "pci": pci,
            "board": sysfs.board(root),
            "nodes": corex.device_nodes(root) if vendor == "corex" else nvidia_nodes(root),
        },
    }


def _name_lost(gpus: List[Dict[str, Any]], root: str) -> None:
    """Give cards whose handle NVML refuses the address and UUID that the kernel module still knows them by."""
    nameless = [gpu for gpu in gpus if gpu["bus_id"] is None]
    known = {gpu["bus_id"] for gpu in gpus}
    claimed = sysfs.nvidia_cards(root)
    missing = sorted((bus_id for bus_id in claimed if bus_id not in known), key=nvml.bus_order)
    if len(missing) != len(nameless):
        return
    for gpu, bus_id in zip(nameless, missing):
        gpu.update(bus_id=bus_id, uuid=claimed[bus_id]["uuid"], name=claimed[bus_id]["name"])


def _complete(gpu: Dict[str, Any], card: Dict[str, Any], nodes: List[str], root: str) -> None:
    """Fill from sysfs what NVML left open; for the NUMA node sysfs goes first where it shows the device."""
    card["processes"] = [
        {"pid": process["pid"], "uid": sysfs.process_uid(process["pid"], root)} for process in gpu["processes"] or []
    ]
    card["slot_width_max"] = None
    if gpu["bus_id"] is None:
        return
    link = sysfs.pcie(gpu["bus_id"], root)
    card["slot_width_max"] = link["slot_width_max"]
    for key, value in gpu["pcie"].items():
        if value is None:
            gpu["pcie"][key] = link[key]
    node = sysfs.numa_node(gpu["bus_id"], nodes, root)
    if node is not None or sysfs.bridges(gpu["bus_id"], root) is not None:
        gpu["numa_node"] = node


def nvidia_nodes(root: str = "/") -> List[str]:
    """Return the NVIDIA device nodes below /dev."""
    try:
        names = os.listdir(under(root, "/dev"))
    except OSError:
        return []
    return sorted(f"/dev/{name}" for name in names if name.startswith("nvidia") and name != "nvidia-caps")
