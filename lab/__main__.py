"""``python3 -m lab``: the commands of the lab."""

from __future__ import annotations

import argparse
import sys

from . import boxes, host
from .settings import LAB_BOXES
from .shell import LabError, say


def main() -> int:
    parser = argparse.ArgumentParser(prog="lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up")
    down = commands.add_parser("down")
    down.add_argument("--purge", action="store_true")
    args = parser.parse_args()
    if args.command == "up":
        boxes.up(list(LAB_BOXES), host.ready())
    else:
        boxes.down(args.purge)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LabError as error:
        say(f"lab: {error}")
        sys.exit(1)
