"""``vllm-fleet driver``: how the NVIDIA driver of this box stands. Reads only; needs no play and no lane."""

from __future__ import annotations

import argparse
import json
from typing import Any, Dict

from .. import checks
from ..driver import state, verify
from ..facts import driver_live


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", metavar="V", help="the driver version that this box should have")
    parser.add_argument("--gpus", type=int, metavar="N", help="how many GPUs this box should have")
    parser.add_argument("--p2p-module", action="store_true", help="also report what a P2P-patched module depends on")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the versions and one line a check; 0 without a fail, 1 with one."""
    report = read(args.version, args.gpus, args.p2p_module)
    if args.json:
        print(json.dumps(report, sort_keys=True))
    else:
        show(report)
    return checks.exit_code(report["results"])


def read(version: Any = None, gpus: Any = None, p2p_module: bool = False) -> Dict[str, Any]:
    """Return ``{"schema": 1, "driver": {installed, loaded, next_boot, …}, "results", "status"}``."""
    facts, topology = driver_live.read()
    results = verify.evaluate(facts, topology, version=version, gpus=gpus, p2p_module=p2p_module)
    return {"schema": 1, "driver": state.assess(facts), "results": results, "status": checks.overall(results)}


def show(report: Dict[str, Any]) -> None:
    """Print a report for a person."""
    driver = report["driver"]
    due = {True: "yes", False: "no", None: "unknown"}[driver["reboot_required"]]
    for name, value in (
        ("installed", driver["installed"]), ("loaded", driver["loaded"]), ("module", driver["flavour"]),
        ("next boot", driver["next_boot"]), ("next kernel", driver["next_kernel"]),
        ("reboot due", due + (f" ({', '.join(driver['reasons'])})" if driver["reasons"] else "")),
    ):  # fmt: skip
        print(f"{name + ':':13}{value or 'unknown'}")
    for item in report["results"]:
        print(f"{item['status']:8}{item['reason']}: {item['message']}")
        if item["fix"] and item["status"] != checks.PASS:
            print(f"        fix: {item['fix']}")
