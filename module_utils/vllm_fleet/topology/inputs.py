"""Validation of topology facts (schema 1) and of the topology policy: wrong types and hostile strings stop here."""

from __future__ import annotations

from ..errors import UsageError
from ..runtime_env import DECISION_NAMES, is_bare

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Dict, List, Mapping, Optional, Sequence


ANCESTORS = ("internal", "single", "multiple", "hostbridge", "node", "system", "unknown")
P2P_STATES = (
    "ok",
    "chipset_not_supported",
    "gpu_not_supported",
    "topology_not_supported",
    "disabled_by_regkey",
    "not_supported",
    "unknown",
)
IOMMU_MODES = ("off", "passthrough", "translated", "unknown")
VIRTUALIZATIONS = ("none", "passthrough", "wsl", "container", "unknown")
HEALTHS = ("ok", "lost", "unknown")
VERDICTS = ("pass", "fail", "inconclusive")

#: characters of a UUID, a bus id and a GPU name
IDENTIFIER = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 ._:()/+-")
DIGITS = frozenset("0123456789")

#: policy key -> default; what is left out takes it
POLICY_DEFAULTS: Dict[str, Any] = {
    "mode": "auto",
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "gpus": None,
    "lane_gpus": None,
    "exclude": [],
    "min_memory_mib": 0,
    "identical": True,
    "allow_busy": False,
    "p2p": "proven",
    "nccl_proto": "LL",
    "layer_partition": None,
    "bind": False,
    "cpus": None,
    "host_resident_kib": 0,
    "caller_env": {},
}
#: the largest lane that is worth an answer; bounds the work on a hostile policy
MAX_LANE = 1024
_MAX_INT = 2**53


class _Reader:
    """Typed access to the keys of one JSON object; the errors say where it is."""

    def __init__(self, reason: str, where: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise UsageError(reason, f"{where} is {_found(value)}, expected an object")
        self.reason, self.where, self.value = reason, where, value

    def fail(self, key: str, found: Any, expected: str) -> UsageError:
        return UsageError(self.reason, f"{self.where}.{key} is {_found(found)}, expected {expected}")

    def number(self, key: str, least: int = 0, most: int = _MAX_INT) -> Optional[int]:
        found = self.value.get(key)
        if found is None:
            return None
        if not is_int(found) or not least <= found <= most:
            raise self.fail(key, found, f"a whole number from {least} to {most}, or null")
        return int(found)

    def boolean(self, key: str) -> Optional[bool]:
        found = self.value.get(key)
        if found is not None and not isinstance(found, bool):
            raise self.fail(key, found, "true, false or null")
        return found

    def text(self, key: str) -> Optional[str]:
        found = self.value.get(key)
        if found is not None and not isinstance(found, str):
            raise self.fail(key, found, "a string or null")
        return found

    def identifier(self, key: str) -> Optional[str]:
        found = self.text(key)
        if found is not None and (not found or not IDENTIFIER.issuperset(found)):
            raise self.fail(key, found, "letters, digits, blanks and ._:()/+- only")
        return found

    def word(self, key: str, allowed: Sequence[str], default: Optional[str] = None) -> str:
        found = self.value.get(key, default)
        if found is None and default is not None:
            return default
        if not isinstance(found, str) or found not in allowed:
            raise self.fail(key, found, "one of " + ", ".join(allowed))
        return found

    def items(self, key: str) -> List[Any]:
        found = self.value.get(key)
        if found is None:
            return []
        if not isinstance(found, list):
            raise self.fail(key, found, "a list")
        return found

    def child(self, key: str) -> Optional[_Reader]:
        found = self.value.get(key)
        return None if found is None else _Reader(self.reason, f"{self.where}.{key}", found)


def is_int(value: Any) -> bool:
    """Return whether a JSON value is a whole number (``true`` is not)."""
    return isinstance(value, int) and not isinstance(value, bool)


def _found(value: Any) -> str:
    if value is None:
        return "null or missing"
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    if isinstance(value, bool):
        return "true" if value else "false"
    shown = ascii(value) if not is_int(value) or abs(value) <= _MAX_INT else "a huge number"
    return shown if len(shown) <= 80 else shown[:77] + "..."


def validate_facts(facts: Any) -> Dict[str, Any]:
    """Return schema-1 topology facts in normal form: every key present, null where unknown, bus ids normalised.

    ``pairs`` becomes a dictionary ``(lower index, higher index) -> pair``, so nothing can depend on the listing order.

    :raises UsageError: ``bad_facts``.
    """
    top = _Reader("bad_facts", "facts", facts)
    if not is_int(top.value.get("schema")) or top.value["schema"] != 1:
        raise top.fail("schema", top.value.get("schema"), "1")
    if "gpus" not in top.value:
        raise top.fail("gpus", None, "a list of GPUs (or an explicit null when they could not be read)")
    gpus: Optional[List[Dict[str, Any]]] = None
    if top.value["gpus"] is not None:
        gpus = [_gpu(top.reason, number, item) for number, item in enumerate(top.items("gpus"))]
        indices = [gpu["index"] for gpu in gpus]
        if any(later <= earlier for earlier, later in zip(indices, indices[1:])):
            raise UsageError("bad_facts", f"facts.gpus is not sorted by index: {indices}")
    driver = top.child("driver") or _Reader("bad_facts", "facts.driver", {})
    return {
        "vendor": top.text("vendor"),
        "driver": {"loaded": driver.text("loaded"), "userland": driver.text("userland")},
        "host": _host(top.child("host") or _Reader("bad_facts", "facts.host", {})),
        "gpus": gpus,
        "pairs": _pairs(top, None if gpus is None else {gpu["index"] for gpu in gpus}),
        "verdict": _verdict(top.child("p2p_verdict")),
    }


def _gpu(reason: str, number: int, value: Any) -> Dict[str, Any]:
    gpu = _Reader(reason, f"facts.gpus[{number}]", value)
    index = gpu.number("index", most=9999)
    if index is None:
        raise gpu.fail("index", None, "a whole number")
    node = gpu.number("numa_node", least=-1)
    capability = gpu.value.get("compute_capability")
    if capability is not None and not (
        isinstance(capability, list) and len(capability) == 2 and all(is_int(part) for part in capability)
    ):
        raise gpu.fail("compute_capability", capability, "[major, minor] or null")
    processes: Optional[List[Dict[str, Any]]] = None
    if gpu.value.get("processes") is not None:
        processes = []
        for place, item in enumerate(gpu.items("processes")):
            process = _Reader(reason, f"{gpu.where}.processes[{place}]", item)
            process.number("memory_mib")
            processes.append({"pid": process.number("pid"), "name": process.text("name")})
    pcie = gpu.child("pcie") or _Reader(reason, f"{gpu.where}.pcie", {})
    return {
        "index": index,
        "bus_id": normalise_bus_id(gpu.identifier("bus_id")),
        "uuid": gpu.identifier("uuid"),
        "name": gpu.identifier("name"),
        "numa_node": None if node == -1 else node,
        "health": gpu.word("health", HEALTHS, "unknown"),
        "memory_total_mib": gpu.number("memory_total_mib"),
        "memory_used_mib": gpu.number("memory_used_mib"),
        "bar1_total_mib": gpu.number("bar1_total_mib"),
        "pcie": {key: pcie.number(key) for key in ("gen_max", "gen_current", "width_max", "width_current")},
        "mig": gpu.boolean("mig"),
        "display": gpu.boolean("display"),
        "processes": processes,
    }


def normalise_bus_id(bus_id: Optional[str]) -> Optional[str]:
    """Return a PCI bus id as ``0000:01:00.0`` in lower case; NVML writes the domain with eight digits."""
    if bus_id is None:
        return None
    bus_id = bus_id.strip().lower()
    domain, separator, rest = bus_id.partition(":")
    if separator and len(domain) == 8 and domain.startswith("0000"):
        return domain[4:] + separator + rest
    return bus_id


def _host(host: _Reader) -> Dict[str, Any]:
    nodes: Optional[Dict[int, Dict[str, Any]]] = None
    listed = host.child("numa_nodes")
    if listed is not None:
        nodes = {}
        for key in listed.value:
            if not is_ordinal(key):
                raise UsageError("bad_facts", f"{listed.where} has the key {key!a}, expected node numbers")
            node = listed.child(key) or _Reader(host.reason, f"{listed.where}.{key}", {})
            node.number("memory_total_kib")
            nodes[int(key)] = {
                "cpus": node.text("cpus"),
                "memory_available_kib": node.number("memory_available_kib"),
            }
    return {
        "numa_nodes": nodes,
        "allowed_cpus": host.text("allowed_cpus"),
        "allowed_mems": host.text("allowed_mems"),
        "iommu": host.word("iommu", IOMMU_MODES, "unknown"),
        "virtualization": host.word("virtualization", VIRTUALIZATIONS, "unknown"),
    }


def _pairs(top: _Reader, indices: Optional[Any]) -> Dict[Any, Dict[str, Any]]:
    pairs: Dict[Any, Dict[str, Any]] = {}
    for number, item in enumerate(top.items("pairs")):
        pair = _Reader(top.reason, f"facts.pairs[{number}]", item)
        ends = pair.value.get("gpus")
        if not (isinstance(ends, list) and len(ends) == 2 and all(is_int(end) for end in ends) and ends[0] != ends[1]):
            raise pair.fail("gpus", ends, "two different GPU indices")
        if indices is not None and not indices.issuperset(ends):
            raise UsageError("bad_facts", f"{pair.where}.gpus is {ends}, which is not a pair of listed GPUs")
        entry = {
            "ancestor": pair.word("ancestor", ANCESTORS, "unknown"),
            "p2p_read": pair.word("p2p_read", P2P_STATES, "unknown"),
            "p2p_write": pair.word("p2p_write", P2P_STATES, "unknown"),
            "nvlink_lanes": pair.number("nvlink_lanes"),
            "acs": pair.boolean("acs"),
        }
        key = (min(ends), max(ends))
        if pairs.setdefault(key, entry) != entry:
            raise UsageError("bad_facts", f"facts.pairs lists GPUs {key[0]} and {key[1]} twice with different values")
    return pairs


def _verdict(verdict: Optional[_Reader]) -> Optional[Dict[str, Any]]:
    if verdict is None:
        return None
    listed = verdict.child("pairs") or _Reader(verdict.reason, f"{verdict.where}.pairs", {})
    pairs: Dict[Any, str] = {}
    for key in listed.value:
        ends = key.split("-")
        if len(ends) != 2 or not all(is_ordinal(end) for end in ends) or int(ends[0]) == int(ends[1]):
            raise UsageError("bad_facts", f'{listed.where} has the key {key!a}, expected pairs like "0-1"')
        pair = (min(int(ends[0]), int(ends[1])), max(int(ends[0]), int(ends[1])))
        status = listed.word(key, VERDICTS)
        if pairs.setdefault(pair, status) != status:
            raise UsageError("bad_facts", f"{listed.where} has GPUs {pair[0]} and {pair[1]} twice and differently")
    return {"status": verdict.word("status", VERDICTS), "pairs": pairs}


def is_ordinal(text: str) -> bool:
    """Return whether ``text`` is a short decimal number in ASCII digits."""
    return 0 < len(text) <= 4 and DIGITS.issuperset(text)


def validate_policy(policy: Any) -> Dict[str, Any]:
    """Return the topology policy with every default filled in.

    :raises UsageError: ``unknown_policy_key`` (with the nearest known key), ``unknown_variable`` (in ``caller_env``) or
        ``bad_policy``.
    """
    given = _Reader("bad_policy", "policy", policy)
    for key in given.value:
        if key not in POLICY_DEFAULTS:
            raise UsageError("unknown_policy_key", f"policy.{_found(key)} is unknown{_nearest(key, POLICY_DEFAULTS)}")
    full = dict(POLICY_DEFAULTS)
    full.update(given.value)
    read = _Reader("bad_policy", "policy", full)
    for key in ("tensor_parallel", "pipeline_parallel", "min_memory_mib", "host_resident_kib"):
        if read.number(key, 1 if key.endswith("parallel") else 0) is None:
            raise read.fail(key, None, "a whole number")
    if full["tensor_parallel"] * full["pipeline_parallel"] > MAX_LANE:
        raise read.fail("tensor_parallel", full["tensor_parallel"], f"at most {MAX_LANE} GPUs with pipeline_parallel")
    for key in ("identical", "allow_busy", "bind"):
        if read.boolean(key) is None:
            raise read.fail(key, None, "true or false")
    for key, allowed in _WORDS.items():
        read.word(key, allowed)
    if full["lane_gpus"] not in (None, "auto"):
        raise read.fail("lane_gpus", full["lane_gpus"], 'null or "auto"')
    for key in ("gpus", "exclude"):
        if key == "exclude" and full[key] is None:
            raise read.fail(key, None, "a list of GPU names")
        for name in read.items(key):
            if not isinstance(name, str) or not IDENTIFIER.issuperset(name):
                raise read.fail(key, name, 'GPU names as strings: "0", "GPU-..." or a unique prefix of it')
    _layer_partition(read, full)
    read.text("cpus")
    full["caller_env"] = _caller_env(read)
    return full


_WORDS: Dict[str, Sequence[str]] = {
    "mode": ("auto", "fixed", "strict"),
    "p2p": ("proven", "required", "trusted"),
    "nccl_proto": ("LL", "default"),
}


def _layer_partition(read: _Reader, full: Mapping[str, Any]) -> None:
    partition = full["layer_partition"]
    if partition is None:
        return
    stages = full["pipeline_parallel"]
    if not isinstance(partition, list) or not all(is_int(part) and 1 <= part <= _MAX_INT for part in partition):
        raise read.fail("layer_partition", partition, "a list of layer counts, or null")
    if len(partition) != stages:
        raise read.fail("layer_partition", partition, f"one layer count for each of the {stages} pipeline stages")


def _caller_env(read: _Reader) -> Dict[str, str]:
    caller = read.child("caller_env")
    if caller is None:
        raise read.fail("caller_env", None, "an object")
    for name, value in caller.value.items():
        if not isinstance(value, str):
            raise caller.fail(ascii(name), value, "a string")
        # The list of devices is read token by token and never passed on, so blanks are harmless there.
        bare = value.replace(" ", "") if name == "CUDA_VISIBLE_DEVICES" else value
        if not is_bare(bare):
            raise caller.fail(ascii(name), value, "letters, digits and _@%+=:,./- only")
        if name not in DECISION_NAMES:
            raise UsageError(
                "unknown_variable",
                f"policy.caller_env has {_found(name)}, which the decision does not set"
                f"{_nearest(name, DECISION_NAMES)}; other variables belong to the lane's own environment",
            )
    return dict(caller.value)


def _nearest(word: str, known: Any) -> str:
    import difflib  # only on the way to an error

    close = difflib.get_close_matches(word, list(known), 1)
    return f", did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
