"""``vllm-fleet import-env``: the host variables that do what a start script's ``.env`` does."""

from __future__ import annotations

import argparse
import json

from .. import import_env
from .render import CHECKOUT_CATALOG

PROFILE = "qwen38-flash-next-w4a16-4x3090"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("file", metavar="FILE", help="the environment file of the start script")
    parser.add_argument("--profile", default=PROFILE, help="the profile that the script serves (default: %(default)s)")
    parser.add_argument("--name", default="main", help="the lane's name (default: %(default)s)")
    parser.add_argument("--catalog", default=str(CHECKOUT_CATALOG), metavar="DIR", help="the catalog")
    parser.add_argument("--json", action="store_true", help='print {"vllm_lanes": […], "notes": […]}')


def run(args: argparse.Namespace) -> int:
    """Print ``vllm_lanes`` for a host, after checking that the lane resolves."""
    from .. import catalog, profile

    entries = catalog.load(args.catalog)
    variables = import_env.parse(catalog.read_text(args.file, "environment file"), args.file)
    lane, notes = import_env.to_lane(variables, entries.profile(args.profile), args.name)
    profile.resolve(lane, entries)
    if args.json:
        print(json.dumps({"vllm_lanes": [lane], "notes": notes}, indent=2, ensure_ascii=False))
        return 0
    for note in notes:
        print(f"# {note}")
    print(catalog.dump_yaml({"vllm_lanes": [lane]}), end="")
    return 0
