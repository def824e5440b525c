"""``vllm-fleet doctor [LANE]``: the preflight as a table for a person, with the fix for each finding."""

from __future__ import annotations

import argparse
import os
import sys

from .. import checks, start
from ..errors import UsageError
from ..preflight import report, run_lane
from ..preflight.run import gpus_wanted, load, names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("lane", nargs="?", help="name of a lane; every lane of this box when left out")


def run(args: argparse.Namespace) -> int:
    """Print one table a lane; 0 without a fail, 1 with one."""
    lanes = [args.lane] if args.lane else names()
    if not lanes:
        raise UsageError("no_lanes", "no lane is installed on this box")
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    loaded = {name: load(name) for name in lanes}
    facts = start.live_facts(lanes) if gpus_wanted(loaded.values()) else None
    worst = 0
    for name, data in loaded.items():
        results = run_lane(name, facts=facts, lane_data=data)
        print(report.table(name, results, colour))
        worst = max(worst, checks.exit_code(results))
    return worst
