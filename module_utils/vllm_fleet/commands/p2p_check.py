"""``vllm-fleet p2p-check``: prove the links between GPUs with real transfers, and store the verdict."""

from __future__ import annotations

import argparse
import json
from typing import List

from .. import checks, engine_python, p2p_proof, p2p_runner, verdict, verdict_store
from ..errors import UsageError
from ..facts import collect


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lane", help="use this lane's engine; default the only lane of the box")
    parser.add_argument("--python", metavar="FILE", help="use this interpreter (with torch) instead of a lane's engine")
    parser.add_argument(
        "--pairs", metavar="0-1,2-3", help="these pairs only; default all that the driver grants P2P or NVLink"
    )
    parser.add_argument("--again", action="store_true", help="also check pairs whose stored verdict is still valid")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="gloo runs on the CPU, for a lab")
    parser.add_argument(
        "--sizes", metavar="N,N", help="elements of float32 to send; default 4096,41943040, with gloo 4096,65536"
    )
    parser.add_argument(
        "--start-timeout", type=float, default=p2p_runner.START_S, metavar="S", help="for the ranks to start"
    )
    parser.add_argument(
        "--pair-timeout", type=float, default=p2p_runner.PAIR_S, metavar="S", help="for one pair's transfers"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the results; 0 without a fail, 1 with one, 3 when the cards or the driver can't be read."""
    sizes = _numbers(args.sizes) if args.sizes else ()
    engine = engine_python.find(args.lane, args.python)
    facts = collect.read()
    outcome = p2p_proof.prove(
        facts,
        p2p_proof.plan(facts, args.pairs or "", () if args.again else p2p_proof.DECIDED),
        engine,
        backend=args.backend,
        sizes=sizes,
        start_s=args.start_timeout,
        pair_s=args.pair_timeout,
    )
    report = outcome["results"]
    if args.json:
        stored = verdict.for_facts(verdict_store.load(), facts)
        print(json.dumps({**outcome, "p2p_verdict": stored}, sort_keys=True))
    else:
        print(*(checks.lines(report) or ["no pair of this box has P2P or NVLink; nothing to check"]), sep="\n")
        for name in outcome["removed"]:
            print(f"the hardware or its driver changed; removed {name}")
    return checks.exit_code(report)


def _numbers(text: str) -> List[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UsageError("bad_sizes", f"--sizes must be whole numbers like 4096,41943040, not {text!r}")
    return numbers
