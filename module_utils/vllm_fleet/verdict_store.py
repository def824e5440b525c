"""Verdicts on disk, and the engine's own P2P result files, which are older than nobody knows."""

from __future__ import annotations

import json
import os
import re
import stat
from typing import Any, Dict, Iterable, List, Mapping, Optional

from . import verdict
from .errors import UsageError
from .facts.host import under
from .files import read_json, write_atomic

DIRECTORY = "/var/lib/vllm-fleet/verdicts"

#: vLLM keeps what its P2P test found under this name, keyed by the list of visible devices alone: a new driver, BIOS
#: or slot does not change the name (vllm/distributed/device_communicators/custom_all_reduce_utils.py)
_VLLM_CACHE = re.compile(r"gpu_p2p_access_cache_for_[\w,.-]*\.json\Z")


def path(root: str = "/") -> str:
    return under(root, f"{DIRECTORY}/p2p.json")


def load(root: str = "/") -> Optional[Dict[str, Any]]:
    """Return the stored verdict; ``None`` without one. A damaged file is no verdict, so the links count as unproven."""
    if not os.path.exists(path(root)):
        return None
    try:
        document = read_json(path(root), "verdict")
    except UsageError:
        return None
    return document if well_formed(document) else None


def well_formed(document: Any) -> bool:
    """Return whether a parsed document has the shape that :mod:`.verdict` relies on."""
    if not isinstance(document, dict) or not isinstance(document.get("pairs"), list):
        return False
    return all(
        isinstance(pair, dict)
        and pair.get("status") in verdict.STATUSES
        and isinstance(pair.get("gpus"), list)
        and len(pair["gpus"]) == 2
        and all(isinstance(gpu, dict) for gpu in pair["gpus"])
        for pair in document["pairs"]
    )


def save(document: Mapping[str, Any], root: str = "/") -> bool:
    """Store a verdict; return whether the file changed."""
    os.makedirs(os.path.dirname(path(root)), mode=0o755, exist_ok=True)
    return write_atomic(path(root), (json.dumps(document, indent=1, sort_keys=True) + "\n").encode(), mode=0o644)


def machine_changed(facts: Mapping[str, Any], root: str = "/") -> bool:
    """Return whether cards, slots, driver, board or BIOS differ from the last call's, and remember them.

    ``False`` when the facts do not tell (no driver, unreadable cards); ``True`` on the first call.
    """
    bound = verdict.bound(facts)
    if bound is None or not facts.get("gpus"):
        return False
    cards = [[gpu["uuid"], gpu["bus_id"]] for gpu in facts["gpus"]]
    text = json.dumps({"schema": 1, "bound": bound, "cards": cards}, indent=1, sort_keys=True) + "\n"
    where = under(root, f"{DIRECTORY}/machine.json")
    os.makedirs(os.path.dirname(where), mode=0o755, exist_ok=True)
    return write_atomic(where, text.encode(), mode=0o644)


def remove_vllm_caches(directories: Iterable[str]) -> List[str]:
    """Remove vLLM's stored P2P results from cache directories (not from those below); return what was removed."""
    removed = []
    for directory in directories:
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            continue
        for name in names:
            file = os.path.join(directory, name)
            if _VLLM_CACHE.match(name) and stat.S_ISREG(os.lstat(file).st_mode):
                os.unlink(file)
                removed.append(file)
    return removed
