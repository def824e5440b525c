"""The tables of nvidia-smi: the fallback where pynvml is not there yet, such as before the first installation.

NVML is always asked first. A layout changes with the driver and with what stdout is: escape codes, tabs or spaces, no
NUMA columns, rows of network cards. What is no NVIDIA table (ROCm prints the same column names over weights) is not
read at all.
"""

from __future__ import annotations

import csv
import re
from typing import Any, Dict, List, Optional, Tuple

from .. import versions
from . import nvml
from .host import run

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"GPU(\d+)\Z")
_NVLINK = re.compile(r"NV(\d+)\Z")
#: cells of ``topo -m``; SOC is what SYS was called before 2018
_ANCESTORS = {"PIX": "single", "PXB": "multiple", "PHB": "hostbridge", "NODE": "node", "SYS": "system", "SOC": "system"}
#: cells of ``topo -p2p``
_P2P = {
    "OK": "ok",
    "CNS": "chipset_not_supported",
    "GNS": "gpu_not_supported",
    "TNS": "topology_not_supported",
    "DR": "disabled_by_regkey",
    "NS": "not_supported",
    "U": "unknown",
}
_FIELDS = (
    "pci.bus_id,uuid,name,memory.total,memory.used,pcie.link.gen.max,pcie.link.gen.current,pcie.link.width.max,"
    "pcie.link.width.current,mig.mode.current,display_active,persistence_mode,vbios_version"
)
_TIMEOUT_S = 15.0

Matrix = Dict[Tuple[int, int], str]


def parse_matrix(text: str) -> Optional[Matrix]:
    """Return the cells between GPUs of ``nvidia-smi topo -m`` or ``-p2p``, as ``{(row, column): cell}``.

    ``None`` when it is no such table: a cell that neither table can hold makes it another program's.
    """
    columns: List[str] = []
    matrix: Matrix = {}
    for line in _ESCAPE.sub("", text).splitlines():
        words = line.split()
        if not columns:
            if words and _GPU.match(words[0]) and (len(words) == 1 or words[1] != "X"):
                # names of one word each, up to "CPU Affinity"
                columns = words[: words.index("CPU")] if "CPU" in words else words
            continue
        row = _GPU.match(words[0]) if words else None
        if not row:
            continue
        for column, cell in zip(columns, words[1:]):
            number = _GPU.match(column)
            if number is None:
                continue
            if cell != "X" and cell not in _ANCESTORS and cell not in _P2P and not _NVLINK.match(cell):
                return None
            matrix[int(row.group(1)), int(number.group(1))] = cell
    return matrix or None


def pairs(
    count: int, topology: Optional[Matrix], reads: Optional[Matrix], writes: Optional[Matrix]
) -> List[Dict[str, Any]]:
    """Return the pairs of the facts. A cell ``NV4`` hides the common ancestor, so that is then unknown."""
    found = []
    for i in range(count):
        for j in range(i + 1, count):
            cell = (topology or {}).get((i, j), "")
            lanes = _NVLINK.match(cell)
            known = cell in _ANCESTORS or lanes is not None
            found.append(
                {
                    "gpus": [i, j],
                    "ancestor": _ANCESTORS.get(cell, "unknown"),
                    "p2p_read": _both(reads, i, j),
                    "p2p_write": _both(writes, i, j),
                    "nvlink_lanes": int(lanes.group(1)) if lanes else 0 if known else None,
                    "acs": None,
                }
            )
    return found


def _both(matrix: Optional[Matrix], i: int, j: int) -> str:
    answers = [_P2P.get((matrix or {}).get(key, ""), "unknown") for key in ((i, j), (j, i))]
    refused = [answer for answer in answers if answer not in ("ok", "unknown")]
    return refused[0] if refused else "ok" if answers == ["ok", "ok"] else "unknown"


def _number(cell: str) -> Optional[int]:
    found = re.match(r"\d+", cell)
    return int(found.group()) if found else None


def _switch(cell: str) -> Optional[bool]:
    return {"enabled": True, "disabled": False, "yes": True, "no": False}.get(cell.lower())


def parse_gpus(listing: str, processes: Optional[str]) -> List[Dict[str, Any]]:
    """Return the cards of ``--query-gpu`` (:data:`_FIELDS` in CSV) with the processes of ``--query-compute-apps``."""
    gpus = []
    for row in csv.reader(listing.splitlines(), skipinitialspace=True):
        if len(row) != len(_FIELDS.split(",")):
            continue
        cells = [cell.strip() for cell in row]
        mig = _switch(cells[9])
        gpu: Dict[str, Any] = {
            "index": None,
            "bus_id": nvml.normalise_bus_id(cells[0]),
            "uuid": cells[1] if cells[1].startswith("GPU-") else None,
            "name": cells[2] or None,
            "numa_node": None,
            "health": "ok" if cells[1].startswith("GPU-") else "unknown",
            "memory_total_mib": _number(cells[3]),
            "memory_used_mib": _number(cells[4]),
            "bar1_total_mib": None,
            "compute_capability": None,
            "pcie": dict(zip(("gen_max", "gen_current", "width_max", "width_current"), map(_number, cells[5:9]))),
            "mig": False if mig is None and "N/A" in cells[9] else mig,
            "display": _switch(cells[10]),
            "processes": _processes(processes, cells[1]),
            "_card": {"persistence": _switch(cells[11]), "vbios": cells[12] or None},
        }
        gpus.append(gpu)
    gpus.sort(key=lambda gpu: nvml.bus_order(gpu["bus_id"]) if gpu["bus_id"] else ())
    for index, gpu in enumerate(gpus):
        gpu["index"] = index
    return gpus


def _processes(listing: Optional[str], uuid: str) -> Optional[List[Dict[str, Any]]]:
    if listing is None:
        return None
    found = []
    for row in csv.reader(listing.splitlines(), skipinitialspace=True):
        if len(row) == 4 and row[0] == uuid and row[1].isdigit():
            found.append({"pid": int(row[1]), "name": row[2] or None, "memory_mib": _number(row[3])})
    return found


def read() -> Dict[str, Any]:
    """Return what nvidia-smi tells, in the shape of :func:`.nvml.read`; the status is ``smi_missing`` without it."""

    def ask(*arguments: str) -> Optional[str]:
        status, output = run(["nvidia-smi", *arguments], timeout=_TIMEOUT_S)
        return output if status == 0 else None

    csv_format = "--format=csv,noheader,nounits"
    listing = ask(f"--query-gpu={_FIELDS}", csv_format)
    header = versions.parse_smi_header(ask() or "")
    driver = {"userland": header.driver, "cuda": list(header.cuda) if header.cuda else None}
    outcome: Dict[str, Any] = {"status": "ok", "message": "", "driver": driver, "gpus": None, "pairs": [], "cards": []}
    if listing is None:
        return {**outcome, "status": "smi_missing", "message": "nvidia-smi is missing or gives no answer"}
    gpus = parse_gpus(listing, ask("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", csv_format))
    capabilities = (ask("--query-gpu=uuid,compute_cap", csv_format) or "").splitlines()
    known = dict(line.split(", ", 1) for line in capabilities if ", " in line)
    for gpu in gpus:
        version = re.match(r"(\d+)\.(\d+)", known.get(gpu["uuid"], ""))
        gpu["compute_capability"] = [int(part) for part in version.groups()] if version else None
    cards = [{"index": gpu["index"], "virtualization": None, **gpu.pop("_card")} for gpu in gpus]
    matrices = [parse_matrix(ask("topo", *words) or "") for words in (("-m",), ("-p2p", "r"), ("-p2p", "w"))]
    return {**outcome, "gpus": gpus, "pairs": pairs(len(gpus), *matrices), "cards": cards}
