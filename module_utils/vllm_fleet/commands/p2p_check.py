"""``vllm-fleet p2p-check``: prove the links between GPUs with real transfers, and store the verdict."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, Dict, List, Sequence

from .. import checks, engine_python, p2p_runner, start, verdict, verdict_store
from ..errors import RefusedError, UsageError
from ..facts import collect

_STATUS = {verdict.PASS: checks.PASS, verdict.FAIL: checks.FAIL, verdict.INCONCLUSIVE: checks.UNKNOWN}
_BUSY_MIB = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lane", help="use this lane's engine; default the only lane of the box")
    parser.add_argument("--python", metavar="FILE", help="use this interpreter (with torch) instead of a lane's engine")
    parser.add_argument(
        "--pairs", metavar="0-1,2-3", help="these pairs only; default all that the driver grants P2P or NVLink"
    )
    parser.add_argument("--again", action="store_true", help="also check pairs whose stored verdict is still valid")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="gloo runs on the CPU, for a lab")
    parser.add_argument("--sizes", metavar="N,N", help="elements of float32 to send; default 4096,41943040")
    parser.add_argument(
        "--start-timeout", type=float, default=p2p_runner.START_S, metavar="S", help="for the ranks to start"
    )
    parser.add_argument(
        "--pair-timeout", type=float, default=p2p_runner.PAIR_S, metavar="S", help="for one pair's transfers"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the results; 0 without a fail, 1 with one, 3 when the cards or the driver can't be read."""
    sizes = _numbers(args.sizes) if args.sizes else p2p_runner.SIZES
    engine = engine_python.find(args.lane, args.python)
    facts = collect.read()
    bound = verdict.bound(facts)
    if not facts["gpus"] or bound is None:
        message = facts["extra"]["message"] or "no GPU is visible"
        raise RefusedError("gpus_unreadable", f"nothing to check: {message}", "vllm-fleet doctor says more")
    removed = start.forget_stale_links(facts)
    old = verdict_store.load()
    wanted = choose(facts, args.pairs)
    known = (verdict.for_facts(old, facts) or {"pairs": {}})["pairs"]
    held = [] if args.again else [pair for pair in wanted if known.get(pair) in (verdict.PASS, verdict.FAIL)]
    todo = [pair for pair in wanted if pair not in held]
    results = {pair: _unfit(facts, pair) for pair in todo if _unfit(facts, pair)}
    ready = [pair for pair in todo if pair not in results]
    if ready:
        launcher = p2p_runner.Launcher(
            engine, engine_python.devices(facts), args.backend, sizes, args.start_timeout, args.pair_timeout
        )
        results.update(run_pairs(launcher, ready))
        verdict_store.save(verdict.merge(old, document(bound, facts, {pair: results[pair] for pair in ready})))
    report = [_result(pair, results[pair]) for pair in todo]
    report += [
        checks.result("p2p", _STATUS[known[pair]], "still_valid", f"GPUs {pair}: {known[pair]}, checked before")
        for pair in held
    ]
    _print(args.json, facts, report, results, removed)
    return checks.exit_code(report)


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


def _numbers(text: str) -> List[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UsageError("bad_sizes", f"--sizes must be whole numbers like 4096,41943040, not {text!r}")
    return numbers


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


def _print(
    as_json: bool,
    facts: Dict[str, Any],
    report: List[checks.Result],
    results: Dict[str, Dict[str, Any]],
    removed: List[str],
) -> None:
    if as_json:
        stored = verdict.for_facts(verdict_store.load(), facts)
        print(
            json.dumps({"results": report, "pairs": results, "p2p_verdict": stored, "removed": removed}, sort_keys=True)
        )
        return
    for item in report:
        print(f"{item['status']:7} {item['reason']}: {item['message']}")
        if item["fix"]:
            print(f"        fix: {item['fix']}")
    if not report:
        print("no pair of this box has P2P or NVLink; nothing to check")
    for name in removed:
        print(f"the hardware or its driver changed; removed {name}")
