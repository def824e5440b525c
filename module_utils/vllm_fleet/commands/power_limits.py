"""``vllm-fleet power-limits``: set the power limits that the box's file names; its unit runs this at every boot."""

from __future__ import annotations

import argparse
import time
from typing import Any, Dict, List

from ..driver import power
from ..errors import FleetError, RefusedError
from ..facts import power as adapter
from ..files import read_json

FILE = "/etc/vllm-fleet/power-limits.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", default=FILE, help=f"JSON object, GPU to watts; default {FILE}")
    parser.add_argument("--wait", type=float, default=60.0, metavar="S", help="for the driver to answer after a boot")
    parser.add_argument("--check", action="store_true", help="say what would be set, and set nothing")


def run(args: argparse.Namespace) -> int:
    """Set what differs and say it; 0 when every limit is as the file says afterwards."""
    limits = read_json(args.file, "power limits")
    if not isinstance(limits, dict):
        raise FleetError("bad_power_limits", f"{args.file} holds no JSON object")
    if not limits:
        print("no power limit is asked for")
        return 0
    todo = power.changes(limits, _cards(args.wait))
    for item in todo:
        error = None if args.check else adapter.write(item.uuid, item.after)
        if error:
            raise FleetError(
                "power_limit_refused", f"GPU {item.gpu} refuses {item.after / 1000:g} W: {error}", "run as root"
            )
        print(f"GPU {item.gpu}: {(item.before or 0) / 1000:g} W -> {item.after / 1000:g} W")
    if not todo:
        print("every power limit is as wanted")
    return 0


def _cards(wait: float) -> List[Dict[str, Any]]:
    """Return the cards; the driver may need some time after a boot."""
    deadline = time.monotonic() + wait
    while True:
        cards = adapter.read()
        if cards:
            return cards
        if time.monotonic() >= deadline:
            raise RefusedError("gpus_unreadable", f"the driver shows no GPU within {wait:g} s", "vllm-fleet driver")
        time.sleep(2)
