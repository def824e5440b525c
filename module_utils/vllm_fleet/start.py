"""What a lane needs before each start: its decision on the live hardware, its runtime environment, its preflight.

The unit runs this as ``ExecStartPre`` at every boot; a play uses the same functions through ``gpu_topology``. All
paths go through ``root``, which is ``/`` on a box.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set

from . import checks, journal, locks, release, render, runtime_env, topology, verdict_store, wide
from .errors import FleetError, RefusedError
from .facts import collect, host, interfaces, ports
from .files import read_json, write_atomic
from .preflight import gather
from .preflight.run import load, names, run_lane

DECISIONS = "/var/lib/vllm-fleet/decisions"
CACHE = "/var/cache/vllm-fleet"
RUN = "/run/vllm-fleet"
SERVICE_USER = "vllm"

#: what an API key may be made of: the characters of a bearer token (RFC 6750)
KEY = re.compile(r"[A-Za-z0-9._~+/=-]{1,512}")

#: how many different decisions of a lane are kept
HISTORY = 20
#: seconds to wait for another lane of this box that decides at this moment
LOCK_S = 60.0

Reader = Callable[[], Dict[str, Any]]
Lane = Mapping[str, Any]


# ---- the decision ----------------------------------------------------------------------------------------------------


def live_facts(
    lanes: Sequence[str], root: str = "/", timeout: float = 20.0, read: Optional[Reader] = None
) -> Dict[str, Any]:
    """Return this box's facts as a start of these lanes finds them: without their own processes, which end before."""
    facts = read() if read else collect.read(timeout=timeout, root=root)
    pids = [entry["pid"] for gpu in facts["gpus"] or [] for entry in gpu["processes"] or []]
    processes = {str(pid): ports.process(pid, root) for pid in pids}
    for lane in lanes:
        facts = gather.own_processes_removed(facts, processes, lane) or facts
    return facts


def claims(lane: Lane, decision: Optional[Mapping[str, Any]]) -> List[str]:
    """Return the GPUs that a lane owns: those that it names, else those of its decision, if that was no refusal."""
    policy = lane["policy"]
    if not policy.get("enabled", True):
        return []
    caller = str((policy.get("caller_env") or {}).get("CUDA_VISIBLE_DEVICES", ""))
    named = policy.get("gpus") or [word.strip() for word in caller.split(",") if word.strip()]
    if not named and decision and not refused(decision):
        named = decision.get("lane") or []
    return [str(gpu) for gpu in named]


def owned_by_others(lane: str, root: str = "/", besides: Sequence[str] = ()) -> List[str]:
    """Return the GPUs that the other lanes installed on this box own, leaving out the lanes in ``besides``."""
    owned: List[str] = []
    for other in names(root):
        if other == lane or other in besides:
            continue
        try:
            owned += claims(load(other, root), stored(other, root))
        except FleetError as error:
            journal.say(f"lane {lane}: the GPUs of lane {other} are not known: {error.one_line()}", "warning")
    return owned


def decide(lane: Lane, facts: Dict[str, Any], owned: Sequence[str]) -> Dict[str, Any]:
    """Return the lane's decision on these facts; GPUs that other lanes own are out of reach.

    :raises UsageError: ``bad_facts`` or ``bad_policy``.
    """
    policy = {name: value for name, value in lane["policy"].items() if name != "enabled"}
    policy["exclude"] = list(dict.fromkeys([*(policy.get("exclude") or []), *owned]))
    decision: Dict[str, Any] = topology.decide(facts, policy)
    return decision


def decide_all(lanes: Sequence[Lane], facts: Dict[str, Any], root: str = "/") -> Dict[str, Dict[str, Any]]:
    """Return the decisions of lanes that are about to be installed together, by name; lanes without GPUs have none.

    Each lane leaves alone what the others of the list name or have been given, and what further lanes of the box own.
    """
    together = [lane["lane"] for lane in lanes]
    decisions: Dict[str, Dict[str, Any]] = {}
    for lane in lanes:
        if not lane["policy"].get("enabled", True):
            continue
        owned = owned_by_others(lane["lane"], root, together)
        for other in lanes:
            if other is not lane:
                owned += claims(other, decisions.get(other["lane"]))
        decisions[lane["lane"]] = decide(lane, facts, owned)
    return decisions


def stored(lane: str, root: str = "/") -> Optional[Dict[str, Any]]:
    """Return the lane's last decision; ``None`` without one, or when the file is damaged."""
    try:
        decision = read_json(decision_path(lane, root), "decision")
    except FleetError:
        return None
    return decision if isinstance(decision, dict) and isinstance(decision.get("status"), str) else None


def decision_path(lane: str, root: str = "/") -> str:
    """Return the file that keeps a lane's last decision."""
    return host.under(root, f"{DECISIONS}/{lane}.json")


def keep(lane: str, decision: Mapping[str, Any], root: str = "/", now: Optional[float] = None) -> bool:
    """Keep a decision; return whether the lane's last one was another.

    ``<lane>.json`` is the last decision that was no refusal: a lane that can't start just now still owns its GPUs.
    ``<lane>.history.json`` is a bounded list of ``{"time", "decision"}``, refusals included, newest last.
    """
    os.makedirs(host.under(root, DECISIONS), mode=0o755, exist_ok=True)
    if not refused(decision):
        text = json.dumps(decision, indent=1, sort_keys=True) + "\n"
        write_atomic(decision_path(lane, root), text.encode(), mode=0o644)
    past = history(lane, root)
    if past and past[-1].get("decision") == decision:
        return False
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    past = [*past, {"time": when, "decision": dict(decision)}][-HISTORY:]
    text = json.dumps(past, indent=1, sort_keys=True) + "\n"
    write_atomic(host.under(root, f"{DECISIONS}/{lane}.history.json"), text.encode(), mode=0o644)
    return True


def history(lane: str, root: str = "/") -> List[Dict[str, Any]]:
    """Return the lane's past decisions, newest last; empty when there are none or the file is damaged."""
    try:
        past = read_json(host.under(root, f"{DECISIONS}/{lane}.history.json"), "decision history")
    except FleetError:
        return []
    return [entry for entry in past if isinstance(entry, dict)] if isinstance(past, list) else []


# ---- the runtime environment -----------------------------------------------------------------------------------------


def cache_key(engine_id: str, facts: Optional[Mapping[str, Any]]) -> str:
    """Return the name of the compile caches' directory: what was compiled is right for one engine, driver and
    GPU architecture only."""
    driver = (facts or {}).get("driver") or {}
    architectures = sorted(
        {".".join(map(str, gpu["compute_capability"] or ["unknown"])) for gpu in (facts or {}).get("gpus") or []}
    )
    text = "\n".join([engine_id, str(driver.get("loaded")), *architectures])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cache_variables(lane: Lane, facts: Optional[Mapping[str, Any]]) -> Dict[str, str]:
    """Return the cache variables that the lane leaves to the start; none when it has a directory of its own."""
    wanted = render.render(lane)["runtime_env"]
    base = f"{CACHE}/{lane['lane']}/{cache_key(lane['engine']['id'], facts)}"
    paths = {
        "VLLM_CACHE_ROOT": base,
        "TRITON_CACHE_DIR": f"{base}/triton",
        "FLASHINFER_WORKSPACE_BASE": f"{base}/flashinfer",
    }
    return {name: value for name, value in paths.items() if name in wanted}


def forget_stale_links(facts: Mapping[str, Any], root: str = "/") -> List[str]:
    """Remove vLLM's stored P2P results of every lane when cards, slots, driver or board changed; return their paths."""
    if not verdict_store.machine_changed(facts, root):
        return []
    places: Set[str] = set()
    for lane in names(root):
        base = host.under(root, f"{CACHE}/{lane}")
        places.update(entry.path for entry in (os.scandir(base) if os.path.isdir(base) else []))
        with contextlib.suppress(FleetError):
            data = load(lane, root)
            own = data["env"].get("VLLM_CACHE_ROOT") or data.get("cache_root")
            places.update([host.under(root, own)] if own else [])
    return verdict_store.remove_vllm_caches(sorted(places))


def make_owned(path: str, account: Optional[Mapping[str, Any]], base: str) -> None:
    """Create the directories of ``path`` below ``base`` for the service user, without following a link on the way.

    Root does this inside directories that the service user owns, so a link planted there must not be followed.

    :raises RefusedError: ``cache_not_a_directory``.
    """
    os.makedirs(base, mode=0o755, exist_ok=True)
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in os.path.relpath(path, base).split(os.sep):
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o750, dir_fd=descriptor)
            try:
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError as error:
                raise RefusedError(
                    "cache_not_a_directory",
                    f"{part} on the way to {path} is no directory: {error.strerror}",
                    "remove it; the start makes the directory again",
                ) from None
            os.close(descriptor)
            descriptor = below
            owner = os.fstat(descriptor)
            if account and os.geteuid() == 0 and (owner.st_uid, owner.st_gid) != (account["uid"], account["gid"]):
                os.fchown(descriptor, account["uid"], account["gid"])
    finally:
        os.close(descriptor)


def environment_text(decision: Optional[Mapping[str, Any]], variables: Mapping[str, str]) -> str:
    """Return the text of ``runtime.env``; without a decision it holds the cache variables alone.

    :raises UsageError: for a value outside the grammar; nothing is written then.
    """
    return runtime_env.format_lines(variables) if decision is None else runtime_env.render(decision, variables)


# ---- the start -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def box_lock(root: str = "/", wait: float = LOCK_S) -> Iterator[None]:
    """Hold the box's lock: two lanes that start together must not choose the same GPU.

    :raises RefusedError: ``start_locked`` after ``wait`` seconds.
    """
    directory = host.under(root, RUN)
    os.makedirs(directory, mode=0o755, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.hold(os.path.join(directory, "start.lock"), "start check", wait))
        except RefusedError as error:
            raise RefusedError("start_locked", f"after {wait:g} s {error.message}") from None
        yield


def check(lane: str, root: str = "/", read: Optional[Reader] = None, timeout: Optional[float] = None) -> Dict[str, Any]:
    """Decide, write the runtime environment, run the preflight.

    :param read: gives the facts; default the hardware, within ``timeout`` seconds (default the lane's own limit).
    :returns: ``{"lane", "exit", "decision": {…} | None, "runtime_env": {…} | None, "removed": […], "results": […]}``;
        ``exit`` is 0, 1 when a check fails, 3 when the decision is refused (the runtime environment stays as it is).
    :raises FleetError: for a lane, policy or facts that can't be read.
    """
    data = load(lane, root)
    outcome: Dict[str, Any] = {"lane": lane, "decision": None, "runtime_env": None, "removed": []}
    facts: Optional[Dict[str, Any]] = None
    with box_lock(root):
        if data["policy"].get("enabled", True):
            limit = float(data.get("topology_timeout_s", 20)) if timeout is None else timeout
            facts = live_facts([lane], root, limit, read)
            outcome["decision"] = decide(data, facts, owned_by_others(lane, root))
            keep(lane, outcome["decision"], root)
        if not refused(outcome["decision"]):
            _write_environment(data, facts, outcome, root)
    outcome["results"] = run_lane(lane, facts=facts, decision=outcome["decision"], boot=True, root=root)
    outcome["exit"] = 3 if refused(outcome["decision"]) else checks.exit_code(outcome["results"])
    return outcome


def refused(decision: Optional[Mapping[str, Any]]) -> bool:
    return decision is not None and decision["status"] == "refused"


def _write_environment(lane: Lane, facts: Optional[Dict[str, Any]], outcome: Dict[str, Any], root: str) -> None:
    caches = cache_variables(lane, facts)
    text = environment_text(outcome["decision"], {**caches, **_interface_variables(lane)})
    account = host.user(SERVICE_USER, root)
    for path in caches.values():
        make_owned(host.under(root, path), account, host.under(root, CACHE))
    if facts is not None:
        outcome["removed"] = forget_stale_links(facts, root)
    directory = host.under(root, f"{RUN}/{lane['lane']}")
    os.makedirs(directory, mode=0o755, exist_ok=True)
    write_atomic(os.path.join(directory, "runtime.env"), text.encode(), mode=0o644)
    outcome["runtime_env"] = runtime_env.parse(text)
    # What this process was started from: a play that was cut off between the flip and the restart sees it here.
    current = os.path.realpath(host.under(root, f"{release.LANES}/{lane['lane']}/current"))
    write_atomic(os.path.join(directory, "release"), (os.path.basename(current) + "\n").encode(), mode=0o644)
    _write_secret(lane, os.path.join(directory, "secret.env"), root)


def _interface_variables(lane: Lane) -> Dict[str, str]:
    """Return what binds a part's connections to its box's interface; nothing for a lane on one box.

    :raises RefusedError: ``address_not_here``, or ``interfaces_unknown`` when nobody could look.
    """
    if not wide.is_wide(lane):
        return {}
    address = lane["part"]["addresses"][lane["part"]["rank"]]
    try:
        interface = interfaces.interface_of(address)
    except OSError as error:
        raise RefusedError("interfaces_unknown", f"the box's interfaces cannot be read: {error}") from None
    if interface is None:
        raise RefusedError(
            "address_not_here",
            f"no interface of this box has the address {address}, by which the lane's other boxes know it",
            "set vllm_box_address of this box to its address in the network between the boxes, and run site.yml",
        )
    return wide.interface_variables(lane, interface)


def api_key(lane: Lane, root: str = "/") -> Optional[str]:
    """Return the lane's API key from its file; ``None`` for a lane without one.

    :raises RefusedError: ``key_missing``, ``key_readable_by_others`` or ``bad_key``.
    """
    source = lane.get("api_key_file")
    if not source:
        return None
    try:
        with open(host.under(root, source), encoding="utf-8") as handle:
            mode = os.fstat(handle.fileno()).st_mode
            key = handle.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RefusedError("key_missing", f"the API key file {source} cannot be read: {error}") from None
    if mode & 0o077:
        raise RefusedError(
            "key_readable_by_others",
            f"the API key file {source} has mode {mode & 0o7777:04o}, expected 0600",
            f"chmod 600 {source}",
        )
    if not KEY.fullmatch(key):
        raise RefusedError(
            "bad_key", f"the API key in {source} is empty or holds other than letters, digits and ._~+/=-"
        )
    return key


def _write_secret(lane: Lane, path: str, root: str) -> None:
    """Hand the API key over as an environment file that only root reads; systemd is root when it opens it."""
    key = api_key(lane, root)
    if key is None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    else:
        write_atomic(path, runtime_env.render_key(key).encode(), mode=0o600)
