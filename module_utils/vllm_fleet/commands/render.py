"""``vllm-fleet render``: a lane's command line and environment, as the unit starts it."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple

from .. import files, render
from ..errors import UsageError
from ..profile import resolve
from ..profile_schema import LANE_NAME

#: the catalog of a checkout; the program on a box has none and reads resolved lanes
CHECKOUT_CATALOG = Path(__file__).resolve().parents[3] / "catalog"
RELEASES = "/etc/vllm-fleet/lanes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--profile", metavar="P", help="a profile of the catalog, or a file in the platform's format")
    parser.add_argument(
        "--lane",
        metavar="L",
        help="a lane: a YAML or JSON file with a lane's keys, a resolved lane.json, or the name of a lane on this box",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a knob or a key of the lane, for example max_seqs=8 or topology.mode=auto (repeatable)",
    )
    parser.add_argument(
        "--catalog", default=str(CHECKOUT_CATALOG), metavar="DIR", help="the catalog (default: %(default)s)"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--platform", action="store_true", help="print the lane in the platform's own format")


def run(args: argparse.Namespace) -> int:
    """Print the rendered lane."""
    profile, lane = load(args.profile, args.lane, args.set, args.catalog)
    if args.platform:
        if profile is None:
            raise UsageError(
                "profile_needed", "a resolved lane does not say what of it is the profile.", "Give --profile."
            )
        from .. import catalog, platform_format

        print(catalog.dump_platform(platform_format.from_lane(profile, lane)), end="")
        return 0
    rendered = render.render(lane)
    if args.json:
        print(json.dumps(rendered, indent=2, ensure_ascii=False))
        return 0
    for note in lane["notes"]:
        print(f"# note: {note}")
    for name in rendered["unset"]:
        print(f"# not inherited: {name}")
    for name in rendered["runtime_env"]:
        print(f"# decided at every start: {name}")
    for name, value in rendered["env"].items():
        print(f"export {name}={shlex.quote(value)}")
    print("exec " + " ".join(shlex.quote(word) for word in rendered["argv"]))
    return 0


def load(
    profile_name: Optional[str], lane_name: Optional[str], settings: Any, catalog_directory: str
) -> Tuple[Optional[Dict[str, Any]], Dict[str, Any]]:
    """Return ``(profile, resolved lane)`` for the command line's choices; the profile is None for a resolved lane.

    :param settings: the texts of ``--set``.
    :raises UsageError: for what cannot be read or is not allowed.
    """
    data: Dict[str, Any] = {}
    if lane_name:
        data = _read_lane(lane_name)
        if "entry" in data and "engine" in data:
            if profile_name or settings:
                raise UsageError(
                    "lane_is_resolved", f"{lane_name} is a resolved lane, --profile and --set change nothing."
                )
            return None, data
    from .. import catalog

    entries = catalog.load(catalog_directory)
    reader = catalog.platform_reader(entries, {"base_dir": str(Path(lane_name).parent) if lane_name else ""})
    if profile_name:
        data.pop("profile", None)
        data.pop("profile_source", None)
        is_file = "/" in profile_name or (profile_name not in entries.profiles and Path(profile_name).is_file())
        data["profile_source" if is_file else "profile"] = (
            str(Path(profile_name).resolve()) if is_file else profile_name
        )
    elif "profile" not in data and "profile_source" not in data:
        raise UsageError(
            "profile_needed", "no profile is named.", "Give --profile, or --lane with a file that names one."
        )
    data.setdefault("name", "main")
    profile = reader(data)
    knobs = entries.profile(data["profile"])["knobs"] if profile is None else profile["knobs"]
    for setting in settings:
        _set(data, setting, knobs)
    lane = resolve(data, entries, None, profile)
    return (profile if profile is not None else entries.profile(data["profile"])), lane


def _read_lane(name: str) -> Dict[str, Any]:
    path = Path(name)
    if "/" not in name and not path.is_file() and re.fullmatch(LANE_NAME, name):
        path = Path(RELEASES, name, "current", "lane.json")
    if path.suffix == ".json":
        data = files.read_json(str(path), "lane")
    else:
        from .. import catalog

        data = catalog.parse_yaml(catalog.read_text(str(path), "lane"), str(path))
    if not isinstance(data, dict):
        raise UsageError("bad_schema", f"{path}: a lane is a mapping with at least a name.")
    return data


def _set(lane: Dict[str, Any], setting: str, knobs: Mapping[str, Any]) -> None:
    """Put one ``KEY=VALUE`` into a lane; a knob takes the text, a lane's own key what it means in YAML."""
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise UsageError("bad_setting", f"--set {setting}: found no KEY=VALUE.")
    if key in knobs:
        lane[key] = text
        return
    from .. import catalog

    value = catalog.parse_yaml(text, f"--set {key}") if text else ""
    *parents, last = key.split(".")
    place = lane
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise UsageError("bad_setting", f"--set {setting}: {parent} is no mapping.")
    place[last] = value
