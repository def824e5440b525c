"""Which GPUs a lane may use: naming, exclusion, skipping, likeness; every refusal that needs no link."""

from __future__ import annotations

from ..errors import RefusedError
from .inputs import is_ordinal, normalise_bus_id

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

    Gpu = Dict[str, Any]


#: a GPU with more memory in use than this many MiB is busy even without a process
IDLE_MEMORY_MIB = 1024
#: vendors whose GPUs this program knows
VENDORS = ("nvidia", "corex")


class Lane:
    """What the selection of GPUs found.

    :ivar pool: the GPUs to choose from, in bus order; exactly ``size`` of them unless ``choose``.
    :ivar considered: the GPUs that could serve as far as each one by itself is concerned, also unlike ones.
    :ivar given: the order that was asked for, as indices, or None when no GPU was named.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.pool: List[Gpu] = []
        self.given: Optional[List[int]] = None
        self.considered: List[Gpu] = []
        self.choose = False
        self.named = False
        self.by_index = True
        self.from_caller = False
        self.warnings: List[Dict[str, str]] = []
        self.doubts: List[str] = []

    def warn(self, code: str, message: str) -> None:
        """Add a warning."""
        self.warnings.append({"code": code, "message": message})

    def first(self) -> List[int]:
        """Return the order without any choice: the given one, else bus order; ``size`` indices."""
        members = [gpu["index"] for gpu in self.pool[: self.size]]
        if self.given is None:
            return members
        return [index for index in self.given if index in members]


def describe(gpu: Gpu) -> str:
    """Return a GPU for a message: index, bus id and name."""
    return f"GPU {gpu['index']} ({gpu['bus_id'] or 'bus id unknown'}, {gpu['name'] or 'name unknown'})"


def busy(gpu: Gpu) -> Optional[str]:
    """Return why a GPU is busy, or None when it is known to be idle."""
    processes, used = gpu["processes"], gpu["memory_used_mib"]
    if processes is None or used is None:
        return "its processes or its memory in use could not be read, and unknown is not idle"
    if processes:
        shown = ", ".join(f"{process['pid']} {process['name']!a}" for process in processes[:3])
        return f"{len(processes)} process(es) run on it: {shown}"
    if used > IDLE_MEMORY_MIB:
        return f"{used} MiB are in use, more than {IDLE_MEMORY_MIB}"
    return None


def resolve(name: str, gpus: Sequence[Gpu]) -> List[Gpu]:
    """Return the GPUs that a name means: an index, a UUID, a prefix of one (``GPU-`` and more) or a bus id."""
    name = name.strip()
    if is_ordinal(name):
        return [gpu for gpu in gpus if gpu["index"] == int(name)]
    if name.startswith("GPU-"):
        wanted = name.lower()
        known = [gpu for gpu in gpus if gpu["uuid"] and gpu["uuid"].startswith("GPU-")]
        exact = [gpu for gpu in known if gpu["uuid"].lower() == wanted]
        return exact or [gpu for gpu in known if gpu["uuid"].lower().startswith(wanted)]
    if ":" in name:
        return [gpu for gpu in gpus if gpu["bus_id"] == normalise_bus_id(name)]
    return []


def pick(facts: Dict[str, Any], policy: Dict[str, Any]) -> Lane:
    """Return the GPUs for a lane under a policy.

    :raises RefusedError: with the reason of the first rule that forbids the lane.
    """
    lane = Lane(policy["tensor_parallel"] * policy["pipeline_parallel"])
    gpus = facts["gpus"]
    if facts["vendor"] is not None and facts["vendor"] not in VENDORS:
        gpus = []
    names = _names(gpus, policy, lane)
    blind = gpus is None
    if gpus is None:
        _driver(facts)  # the likeliest cause; any other reason would mislead
        lane.doubts.append("the GPUs could not be read")
        gpus = _blind_gpus(names, policy, lane.size)
    chosen = _named(names, gpus, policy, lane, blind) if names is not None else _unnamed(gpus, policy, lane, blind)
    if not blind:
        for key, word in (("bus_id", "bus id"), ("uuid", "UUID")):
            values = [gpu[key].lower() for gpu in gpus if gpu[key]]
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                lane.doubts.append(f"the {word} {twice[0]} is listed twice")
        chosen = _enough_memory(chosen, policy, lane)
        lane.considered = chosen
        chosen = _alike(chosen, policy, lane)
        chosen = _more_than_needed(chosen, policy, lane)
    lane.pool = chosen
    _driver(facts)
    return lane


def _names(gpus: Optional[List[Gpu]], policy: Dict[str, Any], lane: Lane) -> Optional[List[str]]:
    """Return the names of the lane's GPUs from the policy, else from the caller's environment, else None."""
    visible = policy["caller_env"].get("CUDA_VISIBLE_DEVICES", "")
    caller = [name.strip() for name in visible.split(",")] if visible.strip() else None
    names: Optional[List[str]] = policy["gpus"]
    if names is not None:
        names = [name.strip() for name in names]
        if caller is not None and _identities(names, gpus) != _identities(caller, gpus):
            raise RefusedError(
                "conflicting_gpus",
                f"the policy names the GPUs {','.join(names)} and the caller's CUDA_VISIBLE_DEVICES is {visible}",
                "Remove one of the two.",
            )
    elif caller is not None:
        names = caller
        lane.from_caller = True
    if names is not None:
        lane.named = True
        lane.by_index = all(is_ordinal(name) for name in names)
    return names


def _identities(names: Sequence[str], gpus: Optional[List[Gpu]]) -> List[Any]:
    found: List[Any] = []
    for name in names:
        matches = resolve(name, gpus or [])
        found.append(matches[0]["index"] if len(matches) == 1 else name)
    return found


def _blind_gpus(names: Optional[List[str]], policy: Dict[str, Any], size: int) -> List[Gpu]:
    """Return stand-ins for GPUs that could not be read: as many as the indices in use say that there must be."""
    indices = {int(name) for name in (names or []) + policy["exclude"] if is_ordinal(name)}
    excluded = {int(name) for name in policy["exclude"] if is_ordinal(name)}
    index = 0
    while names is None and len(indices - excluded) < size:
        indices.add(index)
        index += 1
    unknown = dict.fromkeys(("bus_id", "uuid", "name", "numa_node", "memory_total_mib", "memory_used_mib", "display"))
    return [dict(unknown, index=index, bar1_total_mib=None, pcie={}) for index in sorted(indices)]


def _excluded(gpus: Sequence[Gpu], policy: Dict[str, Any], blind: bool) -> Tuple[Set[int], List[str]]:
    """Return the indices that other lanes own, and the names among them that mean nothing certain.

    A UUID or bus id of a card that is gone names no card of this lane either, so it is no problem; an index that is
    gone means that the numbers have shifted. When the GPUs can't be read, no UUID can be compared with anything.
    """
    excluded: Set[int] = set()
    unclear: List[str] = []
    for name in policy["exclude"]:
        matches = resolve(name, gpus)
        stable = name.strip().startswith("GPU-") or ":" in name
        if len(matches) == 1:
            excluded.add(matches[0]["index"])
        elif matches or blind or not stable:
            unclear.append(name)
    return excluded, unclear


def _too_few(found: int, lane: Lane, what: str) -> RefusedError:
    return RefusedError(
        "too_few_gpus",
        f"the lane needs {lane.size} GPU(s), found {found} {what}",
        "Lower tensor_parallel or pipeline_parallel, or give the lane more GPUs.",
    )


def _unresolved(names: Sequence[str], blind: bool) -> RefusedError:
    shown = ", ".join(ascii(name) for name in names)
    found = "the GPUs can't be read, so only indices can be used" if blind else "it is not exactly one GPU of this box"
    return RefusedError(
        "unresolved_gpu", f"{shown}: {found}", "Name GPUs by index, UUID, a prefix that only one UUID has, or bus id."
    )


def _state(gpu: Gpu, policy: Dict[str, Any]) -> Optional[Tuple[str, str]]:
    """Return ``(reason, message)`` for a GPU that can't serve at the moment."""
    if gpu["health"] == "lost":
        return "gpu_lost", f"{describe(gpu)} is lost: the driver no longer reaches it"
    if gpu["mig"]:
        return "mig_enabled", f"{describe(gpu)} is in MIG mode"
    why = None if policy["allow_busy"] else busy(gpu)
    return ("gpu_busy", f"{describe(gpu)} is busy: {why}") if why else None


_STATE_FIXES = {
    "gpu_lost": "Look for Xid messages in the kernel log; reset the card or reboot the box.",
    "mig_enabled": "Turn MIG mode off or give the lane other GPUs.",
    "gpu_busy": "End what runs there, give the lane other GPUs, or set allow_busy.",
    "memory_too_small": "Give the lane larger GPUs or lower min_memory_mib.",
}


def _named(names: List[str], gpus: List[Gpu], policy: Dict[str, Any], lane: Lane, blind: bool) -> List[Gpu]:
    if len(names) > lane.size and policy["mode"] == "strict" and policy["lane_gpus"] != "auto":
        raise _more(f"{len(names)} GPUs are named", lane)
    if len(names) < lane.size:
        raise _too_few(len(names), lane, "named")
    matches = [resolve(name, gpus) for name in names]
    seen: Set[Any] = set()
    for name, match in zip(names, matches):
        identity = match[0]["index"] if len(match) == 1 else name
        if identity in seen:
            raise RefusedError("duplicate_gpu", f"{name!a} names a GPU that is named before", "Name each once.")
        seen.add(identity)
    excluded, unclear = _excluded(gpus, policy, blind)
    if blind:
        unclear = []  # the names are explicit, and indices among the excluded ones are compared below
    unclear = [name for name, match in zip(names, matches) if len(match) != 1] + unclear
    if unclear:
        raise _unresolved(unclear, blind)
    chosen = [match[0] for match in matches]
    for gpu in chosen:
        if gpu["index"] in excluded:
            raise RefusedError(
                "gpu_owned_by_other_lane", f"{describe(gpu)} belongs to another lane", "Give each GPU to one lane only."
            )
    if not blind:
        states = [state for state in (_state(gpu, policy) for gpu in chosen) if state]
        for reason in ("gpu_lost", "mig_enabled", "gpu_busy"):
            for found, message in states:
                if found == reason:
                    raise RefusedError(reason, message, _STATE_FIXES[reason])
    lane.given = [gpu["index"] for gpu in chosen]
    if policy["mode"] == "fixed" or blind:
        if len(chosen) > lane.size:
            lane.warn("more_gpus_than_needed", f"{len(chosen)} GPUs are named, the lane uses {lane.size} of them")
        if policy["mode"] == "fixed":
            chosen = chosen[: lane.size]
        return sorted(chosen, key=_by_index)[: lane.size]
    return sorted(chosen, key=_by_index)


def _by_index(gpu: Gpu) -> int:
    return int(gpu["index"])


def _unnamed(gpus: List[Gpu], policy: Dict[str, Any], lane: Lane, blind: bool) -> List[Gpu]:
    excluded, unclear = _excluded(gpus, policy, blind)
    left = [gpu for gpu in gpus if gpu["index"] not in excluded]
    if len(left) < lane.size:
        what = f"on this box of {len(gpus)}" + (f", {len(excluded)} of them of other lanes" if excluded else "")
        raise _too_few(len(left), lane, what)
    if unclear:
        raise _unresolved(unclear, blind)
    if blind:
        return left[: lane.size]

    def state(gpu: Gpu) -> Optional[Tuple[str, str]]:
        return _state(gpu, policy) or (_small(gpu, policy) if policy["mode"] != "fixed" else None)

    left = _skip(left, state, lane)
    return left[: lane.size] if policy["mode"] == "fixed" else left


def _skip(left: List[Gpu], state: Callable[[Gpu], Optional[Tuple[str, str]]], lane: Lane) -> List[Gpu]:
    """Return the GPUs that can serve; the others are skipped with a warning as long as enough are left."""
    kept: List[Gpu] = []
    skipped: List[Tuple[str, str]] = []
    for gpu in left:
        found = state(gpu)
        if found:
            skipped.append(found)
        else:
            kept.append(gpu)
    if len(kept) < lane.size:
        reason, message = skipped[0]
        raise RefusedError(
            reason, f"{message}; {len(kept)} GPU(s) are left, the lane needs {lane.size}", _STATE_FIXES[reason]
        )
    for reason, message in skipped:
        lane.warn("gpu_skipped", f"{reason}: {message}")
    return kept


def _small(gpu: Gpu, policy: Dict[str, Any]) -> Optional[Tuple[str, str]]:
    total, least = gpu["memory_total_mib"], policy["min_memory_mib"]
    if total is None or total >= least:
        return None
    return "memory_too_small", f"{describe(gpu)} has {total} MiB, the lane needs {least}"


def _enough_memory(chosen: List[Gpu], policy: Dict[str, Any], lane: Lane) -> List[Gpu]:
    small = [found for found in (_small(gpu, policy) for gpu in chosen) if found]
    if small and (len(chosen) - len(small) < lane.size or policy["mode"] == "fixed"):
        raise RefusedError(small[0][0], small[0][1], _STATE_FIXES["memory_too_small"])
    if small:
        lane.warn("gpu_skipped", "; ".join(f"{reason}: {message}" for reason, message in small))
    kept = [gpu for gpu in chosen if _small(gpu, policy) is None]
    unread = [gpu for gpu in kept if gpu["memory_total_mib"] is None] if policy["min_memory_mib"] else []
    return _certain(kept, unread, "its memory could not be read", policy, lane)


def _certain(chosen: List[Gpu], unsure: List[Gpu], why: str, policy: Dict[str, Any], lane: Lane) -> List[Gpu]:
    """Return ``chosen`` without the GPUs in doubt where others can be chosen; else note the doubt."""
    if not unsure:
        return chosen
    kept = [gpu for gpu in chosen if gpu not in unsure]
    if policy["lane_gpus"] == "auto" and policy["mode"] != "fixed" and len(kept) >= lane.size:
        lane.warn("gpu_skipped", "; ".join(f"{describe(gpu)}: {why}" for gpu in unsure))
        return kept
    for gpu in unsure:
        lane.doubts.append(f"{describe(gpu)}: {why}")
    return chosen


def _alike(chosen: List[Gpu], policy: Dict[str, Any], lane: Lane) -> List[Gpu]:
    """Return the GPUs of names that can fill the lane."""
    if not policy["identical"] or lane.size == 1:
        return chosen
    names = [gpu["name"] for gpu in chosen]
    nameless = names.count(None)
    able = {name for name in names if name is not None and names.count(name) >= lane.size}
    if able:
        return [gpu for gpu in chosen if gpu["name"] in able]
    counts = {name: names.count(name) for name in names if name is not None}
    if nameless and max(counts.values(), default=0) + nameless >= lane.size:
        lane.doubts.append("the name of a GPU could not be read, so it may be unlike the others")
        return chosen
    shown = ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
    raise RefusedError(
        "unlike_gpus",
        f"the lane needs {lane.size} GPUs of one model, found {shown}" + (f", {nameless} unknown" if nameless else ""),
        "Give the lane alike GPUs, or set identical: false and size it for the smallest card.",
    )


def _more(found: str, lane: Lane) -> RefusedError:
    return RefusedError(
        "more_gpus_than_needed",
        f"{found}, the lane needs {lane.size}",
        "Name the GPUs in gpus, or let lane_gpus: auto choose.",
    )


def _more_than_needed(chosen: List[Gpu], policy: Dict[str, Any], lane: Lane) -> List[Gpu]:
    """Cut ``chosen`` to the lane unless the best set is to be chosen, and warn about what is left over."""

    def of_unknown_health() -> List[Gpu]:
        return [gpu for gpu in chosen if gpu["health"] == "unknown"]

    if len(chosen) > lane.size and policy["mode"] != "fixed":
        if policy["lane_gpus"] == "auto":
            lane.choose = True
        elif policy["mode"] == "strict" and not lane.named:
            raise _more(f"{len(chosen)} GPUs could serve", lane)
        else:
            lane.warn("more_gpus_than_needed", f"{len(chosen)} GPUs could serve, the lane takes the first {lane.size}")
            chosen = _first_alike(chosen, policy, lane.size)
    return _certain(chosen, of_unknown_health(), "its health is unknown", policy, lane)


def _first_alike(chosen: List[Gpu], policy: Dict[str, Any], size: int) -> List[Gpu]:
    if not policy["identical"] or size == 1:
        return chosen[:size]
    by_name: Dict[Any, List[Gpu]] = {}
    for gpu in chosen:
        by_name.setdefault(gpu["name"], []).append(gpu)
    lanes = [group[:size] for group in by_name.values() if len(group) >= size] or [chosen[:size]]
    return min(lanes, key=lambda group: [gpu["index"] for gpu in group])


def _driver(facts: Dict[str, Any]) -> None:
    """Refuse when the loaded module and the user's libraries differ.

    Not compared under WSL (the module lives on the Windows side) and on CoreX (its library has a version of its own).
    """
    loaded, userland = facts["driver"]["loaded"], facts["driver"]["userland"]
    if facts["vendor"] == "corex" or facts["host"]["virtualization"] == "wsl":
        return
    if loaded is not None and userland is not None and loaded != userland:
        raise RefusedError(
            "driver_mismatch",
            f"the loaded kernel module is {loaded!a} and the libraries are {userland!a}",
            "Reboot the box (or reload the module), and hold all driver packages at one version.",
        )
