"""Collects what the checks need to know of a box. It reads and never judges; all reading goes through the adapters."""

from __future__ import annotations

import copy
import os
from typing import Any, Dict, List, Optional

from .. import checkpoint_pass, checks, products_pass, wide
from ..driver import state
from ..facts import checkpoint_dir, driver, engine_dir, host, interfaces, ports, toolchain
from .registry import Box, Lane, with_gpu, with_toolchain
from .serving import in_unit

SERVICE_USER = "vllm"
CACHE = "/var/cache/vllm-fleet"
#: what the build products of each engine looked like when they were as recorded
PRODUCTS = "/var/lib/vllm-fleet/products"


def read_box(facts: Optional[Dict[str, Any]], root: str = "/") -> Dict[str, Any]:
    """Read what is the same for every lane of a box; ``facts`` are its topology facts (schema 1), if it has any."""
    modules = host.read_text(host.under(root, "/proc/modules"))
    return {
        "topology": facts,
        "kernel_modules": None
        if modules is None
        else [line.split()[0] for line in modules.splitlines() if line.strip()],
        "shared_memory": host.shared_memory(root),
        "driver": _driver(facts, root),
    }


def _driver(facts: Optional[Dict[str, Any]], root: str) -> Optional[Dict[str, Any]]:
    """Return how the driver stands, with the versions that the topology facts have read already."""
    if facts is None or facts["vendor"] != "nvidia":
        return None
    found = driver.read(root)
    found["userland"], found["loaded"]["version"] = facts["driver"]["userland"], facts["driver"]["loaded"]
    return state.assess(found)


def read_lane(
    lane: Lane,
    common: Dict[str, Any],
    *,
    decision: Optional[Dict[str, Any]] = None,
    root: str = "/",
    user: str = SERVICE_USER,
    execute: bool = True,
    hashing: bool = True,
    remembered: bool = False,
    dry_run: bool = False,
) -> Box:
    """Read what one lane's checks need, in addition to :func:`read_box`.

    :param decision: the lane's topology decision, ``None`` for a lane without GPUs.
    :param execute: run compilers and the venv's interpreter (not below another root).
    :param hashing: read the engine's build products.
    :param remembered: leave those unread that were as recorded and look as they did then.
    :param dry_run: nothing is installed yet; what is absent is unknown.
    """
    engine, env = lane["engine"], toolchain.environment(lane)
    account = host.user(user, root)
    cache = lane.get("cache_root") or os.path.join(CACHE, lane["lane"])
    box: Box = dict(common)
    facts = common["topology"] if with_gpu(lane) else None
    pids = [entry["pid"] for gpu in (facts or {}).get("gpus") or [] for entry in gpu.get("processes") or []]
    box["processes"] = {str(pid): ports.process(pid, root) for pid in pids}
    box["topology"] = own_processes_removed(facts, box["processes"], lane["lane"])
    box["driver_cuda"] = ((facts or {}).get("driver") or {}).get("cuda")
    box["persistence"] = _persistence(facts)
    box["decision"] = decision
    box["memory"] = host.memory(root, f"vllm@{lane['lane']}.service")
    box["user_name"], box["user"] = user, account
    box["cache"] = host.filesystem(cache, root)
    box["workdir"] = host.filesystem(lane["workdir"], root)
    box["log"] = None
    if lane.get("log"):
        box["log"] = dict(host.filesystem(lane["log"], root), parent=host.under(root, os.path.dirname(lane["log"])))
    box["unit_path"] = env["PATH"]
    box.update(_entry(lane, env["PATH"], root))
    asked = [cache, lane["workdir"], engine["python"], box["entry_program"]]
    box["access"] = host.access_as(account, [path for path in asked if path], root)
    box["engine"] = engine_dir.read(engine, root)
    origin = engine_dir.import_origin(
        "vllm", engine, workdir=lane["workdir"], env=env, home=(account or {}).get("home"), root=root
    )
    origin["origin_real"] = os.path.realpath(host.under(root, origin["origin"])) if origin["origin"] else None
    box["import_origin"] = origin
    home = os.path.join(engine.get("tree") or engine["site_packages"], "vllm")
    box["import_expected"] = [os.path.realpath(host.under(root, home))]
    box["listeners"] = ports.listeners(int(lane["port"]), root)
    box.update(_between_boxes(lane, root))
    box["api_key_present"] = bool(lane.get("api_key_file")) and _filled(host.under(root, str(lane["api_key_file"])))
    box["toolchain"] = None
    if with_toolchain(lane):
        tools = toolchain.read(lane, account, root, execute)
        tools["cuda_home_exists"] = bool(tools["cuda_home"]) and os.path.isdir(host.under(root, tools["cuda_home"]))
        box["toolchain"] = tools
    box["results"] = _checkpoint(lane, root, user, dry_run)
    if hashing and box["engine"]["root"]:
        box["results"] += _products(lane, root, remembered, dry_run)
    return box


def _between_boxes(lane: Lane, root: str) -> Dict[str, Any]:
    """Return what the checks of a lane that spans boxes need; nothing for others.

    ``interface`` is empty when none has the part's address, None when they could not be read.
    """
    if not wide.is_wide(lane):
        return {}
    place = lane["part"]
    keys = ("peer_port",) if place["rank"] else ("master_port", "peer_port")
    try:
        interface: Optional[str] = interfaces.interface_of(place["addresses"][place["rank"]]) or ""
    except OSError:
        interface = None
    return {"interface": interface, "rendezvous": {key: ports.listeners(place[key], root) for key in keys}}


def _entry(lane: Lane, path: str, root: str) -> Dict[str, Optional[str]]:
    """Return the program that the unit starts and the interpreter that it runs under.

    A bare ``python3`` is looked up on the unit's PATH although systemd is given the engine's own: Python finds its
    libraries by the name that it was called by. Another bare word is a script of the venv.
    """
    engine, word = lane["engine"], lane["entry"][0]
    if "/" not in word and not word.startswith("python") and engine.get("venv"):
        word = os.path.join(engine["venv"], "bin", word)
    program = toolchain.which(word, path, root)
    script = engine_dir.script_interpreter(program, root) if program else None
    runs = script or program
    return {
        "entry_program": program,
        "entry_interpreter": runs,
        "entry_interpreter_real": os.path.realpath(host.under(root, runs)) if runs else None,
        "python_real": os.path.realpath(host.under(root, engine["python"])),
    }


def own_processes_removed(
    facts: Optional[Dict[str, Any]], processes: Dict[str, Dict[str, Any]], lane: str
) -> Optional[Dict[str, Any]]:
    """Return the facts as they would be with the lane stopped: its processes gone and their memory free.

    Without this a lane that is running would find its own GPUs busy.
    """
    if facts is None or not facts.get("gpus"):
        return facts
    facts = copy.deepcopy(facts)
    for gpu in facts["gpus"]:
        mine = [
            entry
            for entry in gpu.get("processes") or []
            if in_unit(processes.get(str(entry["pid"]), {}).get("cgroup"), lane)
        ]
        if not mine:
            continue
        gpu["processes"] = [entry for entry in gpu["processes"] if entry not in mine]
        sizes = [entry.get("memory_mib") for entry in mine]
        if gpu.get("memory_used_mib") is not None:
            # A driver that hides the size of a process leaves one answer: with nobody else there, it is all the lane's.
            known = sum(size or 0 for size in sizes)
            alone = None in sizes and not gpu["processes"]
            gpu["memory_used_mib"] = 0 if alone else max(0, gpu["memory_used_mib"] - known)
    return facts


def _persistence(facts: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    cards = ((facts or {}).get("extra") or {}).get("cards") or []
    by_index = {card.get("index"): card.get("persistence") for card in cards}
    return {str(gpu["uuid"]): by_index.get(gpu["index"]) for gpu in (facts or {}).get("gpus") or []}


def _filled(path: str) -> bool:
    try:
        return os.stat(path).st_size > 0
    except OSError:
        return False


def _checkpoint(lane: Lane, root: str, user: str, dry_run: bool) -> List[checks.Result]:
    wanted = lane["checkpoint"]
    path = host.under(root, wanted["path"])
    report = checkpoint_pass.inspect(
        path,
        user=user if root == "/" else None,
        sidecars=[
            dict(item, path=host.under(root, item["path"]) if os.path.isabs(item["path"]) else item["path"])
            for item in wanted.get("sidecars") or []
        ],
        settings=wanted.get("patch") or [],
        manifest=wanted.get("manifest"),
        hash_policy="remembered",
        state_directory=host.under(root, checkpoint_dir.STATE_DIRECTORY),
        remember=False,
        tensor_parallel=int(lane["policy"].get("tensor_parallel") or 1),
        absent_is_unknown=dry_run,
    )
    results: List[checks.Result] = report["results"]
    return results


def _products(lane: Lane, root: str, remembered: bool, dry_run: bool) -> List[checks.Result]:
    engine = lane["engine"]
    # a wheel-route engine has no source tree; its products lie where the wheel was installed
    tree = engine.get("tree") or (engine.get("site_packages") if engine["route"] == "wheel" else None)
    if not tree or engine.get("products") != "sha256":
        return []
    report = products_pass.verify(
        host.under(root, tree),
        engine=engine["id"],
        trust_read_only=bool(engine.get("trust_read_only")),
        memory=host.under(root, f"{PRODUCTS}/{engine['id']}.json") if remembered else None,
        remember=not dry_run,
    )
    results: List[checks.Result] = report["results"]
    return results
