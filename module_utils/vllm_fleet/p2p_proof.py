"""Proving the links between a box's GPUs with real transfers. Shared by the program and the module ``p2p_proof``."""

from __future__ import annotations

import time
from typing import Any, Dict, List, NamedTuple, Sequence

from . import checks, engine_python, p2p_runner, start, verdict, verdict_store
from .errors import RefusedError, UsageError

_STATUS = {verdict.PASS: checks.PASS, verdict.FAIL: checks.FAIL, verdict.INCONCLUSIVE: checks.UNKNOWN}
_BUSY_MIB = 1024


class Plan(NamedTuple):
    """The pairs of a box: ``held`` have a valid verdict, ``ready`` can be checked now, ``unfit`` say why they can't."""

    bound: Dict[str, Any]
    held: Dict[str, str]
    ready: List[str]
    unfit: Dict[str, Dict[str, Any]]


#: verdicts that need no second look: a person who asks again wants what stayed open to be tried again
DECIDED = (verdict.PASS, verdict.FAIL)


def plan(facts: Dict[str, Any], pairs: str = "", settled: Sequence[str] = DECIDED) -> Plan:
    """Sort the pairs by what is to be done with them.

    :param pairs: such as ``0-1,2-3``; empty for all that the driver grants P2P or NVLink.
    :param settled: valid verdicts that are left as they are.
    :raises RefusedError: ``gpus_unreadable``.
    :raises UsageError: ``bad_pairs``.
    """
    bound = verdict.bound(facts)
    if not facts["gpus"] or bound is None:
        message = facts["extra"]["message"] or "no GPU is visible"
        raise RefusedError("gpus_unreadable", f"nothing to check: {message}", "vllm-fleet doctor says more")
    known = (verdict.for_facts(verdict_store.load(), facts) or {"pairs": {}})["pairs"]
    wanted = choose(facts, pairs)
    held = {pair: known[pair] for pair in wanted if known.get(pair) in settled}
    unfit = {pair: _unfit(facts, pair) for pair in wanted if pair not in held and _unfit(facts, pair)}
    return Plan(bound, held, [pair for pair in wanted if pair not in held and pair not in unfit], unfit)


def prove(
    facts: Dict[str, Any],
    todo: Plan,
    engine: engine_python.EnginePython,
    *,
    backend: str = "nccl",
    sizes: Sequence[int] = (),
    start_s: float = p2p_runner.START_S,
    pair_s: float = p2p_runner.PAIR_S,
) -> Dict[str, Any]:
    """Run the transfers of a plan and store the verdict.

    :param sizes: elements of float32 to send; empty for what suits the backend.
    :returns: ``{"results": check results, "pairs": what was found by pair, "removed": paths of the engine's own
        outdated P2P results}``.
    """
    removed = start.forget_stale_links(facts)
    results = dict(todo.unfit)
    if todo.ready:
        sent = sizes or p2p_runner.SIZES[backend]
        launcher = p2p_runner.Launcher(engine, engine_python.devices(facts), backend, sent, start_s, pair_s)
        found = run_pairs(launcher, todo.ready)
        results.update(found)
        verdict_store.save(verdict.merge(verdict_store.load(), document(todo.bound, facts, found)))
    report = [_result(pair, results[pair]) for pair in sorted(results)]
    report += [
        checks.result("p2p", _STATUS[status], "still_valid", f"GPUs {pair}: {status}, checked before")
        for pair, status in todo.held.items()
    ]
    return {"results": report, "pairs": results, "removed": removed}


def run_pairs(launcher: p2p_runner.Launcher, pairs: Sequence[str]) -> Dict[str, Dict[str, Any]]:
    """Start only the ranks that the pairs need; the names of the pairs stay those of the facts."""
    members = sorted({index for pair in pairs for index in _members(pair)})
    ranks = {index: rank for rank, index in enumerate(members)}
    local = {"-".join(str(ranks[index]) for index in _members(pair)): pair for pair in pairs}
    small = launcher._replace(devices=[launcher.devices[index] for index in members])
    return {local[pair]: result for pair, result in p2p_runner.check(small, list(local)).items()}


def choose(facts: Dict[str, Any], text: str) -> List[str]:
    """Return the pairs to check, such as ``0-1``.

    :raises UsageError: ``bad_pairs`` for a pair that is not on this box.
    """
    granted = {}
    for pair in facts["pairs"]:
        ok = pair["p2p_read"] == "ok" and pair["p2p_write"] == "ok"
        granted["-".join(str(index) for index in pair["gpus"])] = ok or bool(pair["nvlink_lanes"])
    if not text:
        return [name for name, grant in granted.items() if grant]
    wanted = ["-".join(sorted(word.strip().split("-"), key=lambda part: (len(part), part))) for word in text.split(",")]
    unknown = [name for name in wanted if name not in granted]
    if unknown:
        raise UsageError(
            "bad_pairs", f"{', '.join(unknown)} is no pair of this box; there are {', '.join(granted) or 'none'}"
        )
    return list(dict.fromkeys(wanted))


def document(bound: Dict[str, Any], facts: Dict[str, Any], results: Dict[str, Dict[str, Any]]) -> verdict.Verdict:
    """Return the verdict to store, with cards and slots instead of indices."""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    gpus = {gpu["index"]: {"uuid": gpu["uuid"], "bus_id": gpu["bus_id"]} for gpu in facts["gpus"]}
    pairs = [
        {"gpus": [gpus[index] for index in _members(pair)], "time": when, **result} for pair, result in results.items()
    ]
    return {"schema": 1, "bound": bound, "pairs": pairs}


def _members(pair: str) -> List[int]:
    return [int(part) for part in pair.split("-")]


def _unfit(facts: Dict[str, Any], pair: str) -> Dict[str, Any]:
    """Return why a pair can't be checked now; empty when it can."""
    for index in _members(pair):
        gpu = facts["gpus"][index]
        reason = ""
        if gpu["health"] != "ok" or gpu["uuid"] is None:
            reason = "gpu_lost"
        elif gpu["mig"]:
            reason = "mig_enabled"
        elif gpu["processes"] or gpu["processes"] is None or (gpu["memory_used_mib"] or 0) > _BUSY_MIB:
            reason = "gpu_busy"
        if reason:
            message = f"GPU {index} is not free for a check: {reason}"
            return {"status": verdict.INCONCLUSIVE, "reason": reason, "message": message, "arms": {}}
    return {}


def _result(pair: str, result: Dict[str, Any]) -> checks.Result:
    fix = ""
    if result["status"] == verdict.FAIL:
        fix = "the selection now keeps P2P off for this pair; look at IOMMU, ACS and the driver's P2P settings"
    return checks.result("p2p", _STATUS[result["status"]], result["reason"], f"GPUs {pair}: {result['message']}", fix)
