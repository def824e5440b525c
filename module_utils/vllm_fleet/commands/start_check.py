"""``vllm-fleet start-check LANE``: what the unit runs as root before the engine."""

from __future__ import annotations

import argparse
import json
import os

from .. import journal, start
from ..errors import FleetError, from_os
from ..preflight import report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lane", help="name of the lane")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds for the driver to answer (the lane's own)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the outcome; 0 start, 1 a check failed, 2 bad input, 3 the decision is refused."""
    try:
        outcome = start.check(args.lane, timeout=args.timeout)
    except (FleetError, OSError) as error:
        if "INVOCATION_ID" in os.environ:  # inside the unit stderr goes to the lane's log; the reason belongs here too
            readable = error if isinstance(error, FleetError) else from_os(error)
            journal.say(f"start {args.lane}: {readable.one_line()}", "error")
        raise
    decision = outcome["decision"]
    for name in outcome["removed"]:
        journal.say(f"start {args.lane}: the hardware or its driver changed; removed {name}")
    for item in (decision or {}).get("warnings") or []:
        journal.say(f"start {args.lane}: {item['code']}: {item['message']}", "warning")
    if start.refused(decision):
        journal.say(f"start {args.lane}: refused, {decision['reason']}: {decision['message']}", "error")
    if args.json:
        print(json.dumps({**report.as_object(args.lane, outcome["results"]), **outcome}, sort_keys=True))
    elif decision:
        order = ",".join(str(index) for index in decision.get("order") or [])
        print(f"lane {args.lane}: {decision['status']} ({decision['reason']}), GPUs {order or 'none'}")
    return int(outcome["exit"])
