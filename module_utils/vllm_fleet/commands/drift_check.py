"""``vllm-fleet drift-check``: what moved under a serving box. The daily timer runs it."""

from __future__ import annotations

import argparse
import json
import os
import time

from .. import checks, journal
from ..driver import verify
from ..facts import driver_live
from ..files import write_atomic
from . import driver

RESULT = "/var/lib/vllm-fleet/drift.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", metavar="V", help="the driver version that this box should have")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many GPUs this box should have")
    parser.add_argument("--result", default=RESULT, metavar="FILE", help=f"where the result goes; default {RESULT}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write the result and print it; 0 without a fail, 1 with one. What did not pass goes to the journal too."""
    report = driver.read(args.version, args.gpus)
    report["results"] += verify.kernel_log(driver_live.kernel_log())
    report["status"] = checks.overall(report["results"])
    report["time"] = int(time.time())
    write_atomic(args.result, (json.dumps(report, sort_keys=True, indent=1) + "\n").encode(), mode=0o644)
    if "INVOCATION_ID" in os.environ:
        for item in report["results"]:
            if item["status"] in (checks.FAIL, checks.WARN):
                level = "error" if item["status"] == checks.FAIL else "warning"
                journal.say(f"drift {item['check']}: {item['reason']}: {item['message']}. Fix: {item['fix']}", level)
    if args.json:
        print(json.dumps(report, sort_keys=True))
    else:
        driver.show(report)
    return checks.exit_code(report["results"])
