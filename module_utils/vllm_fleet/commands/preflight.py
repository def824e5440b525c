"""``vllm-fleet preflight LANE``: run every check of a lane and give one verdict."""

from __future__ import annotations

import argparse
import json

from .. import checks
from ..preflight import report, run_lane


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("lane", help="name of a lane on this box")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--boot", action="store_true", help="store the result for monitoring and write what did not pass to the journal"
    )
    parser.add_argument("--no-hashing", action="store_true", help="leave the engine's build products unread")


def run(args: argparse.Namespace) -> int:
    """Print the results; 0 without a fail, 1 with one."""
    results = run_lane(args.lane, boot=args.boot, hashing=not args.no_hashing)
    if args.json:
        print(json.dumps(report.as_object(args.lane, results), sort_keys=True))
    elif not args.boot:
        for item in results:
            if item["status"] != checks.PASS:
                print(report.line(args.lane, item))
        counts = checks.summary(results)
        print(f"preflight {args.lane}: " + ", ".join(f"{count} {status}" for status, count in counts.items()))
    return checks.exit_code(results)
