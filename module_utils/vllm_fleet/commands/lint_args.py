"""``vllm-fleet lint-args``: what a version of vLLM would not take of a command line, without that version at hand."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional

from .. import engine_args, files
from ..arguments import Group, group_words
from ..checks import FAIL
from ..errors import UsageError
from .render import CHECKOUT_CATALOG


class Source(NamedTuple):
    """A command line with its environment, and what it was written as."""

    kind: str  #: platform, profile, lane or words
    entry: List[str]
    groups: List[Group]
    env: Dict[str, str]
    bare_env: List[str]
    document: Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "file", metavar="FILE", help="a profile, a file in the platform's format, or a list of arguments"
    )
    parser.add_argument("--engine-version", required=True, metavar="V", help="for example 0.33.0 or 0.6.3+corex.3.2.3")
    parser.add_argument("--migrate", action="store_true", help="propose the same for that version")
    parser.add_argument("--catalog", default=str(CHECKOUT_CATALOG), metavar="DIR", help="the catalog of the engines")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print findings or the proposal; 1 when the version would refuse the command line as it is."""
    source = read(args.file, args.catalog)
    concurrency = source.document.get("concurrency")
    findings = engine_args.lint(
        source.groups,
        args.engine_version,
        source.env,
        source.bare_env,
        int(concurrency) if concurrency else None,
    )
    failed = any(item["status"] == FAIL for item in findings)
    report: Dict[str, Any] = {"engine_version": args.engine_version, "findings": findings}
    if args.migrate:
        groups, env, changes = engine_args.migrate(source.groups, args.engine_version, source.env)
        remaining = engine_args.lint(groups, args.engine_version, env)
        if source.kind == "profile":
            proposal = _profile(source.document, args.engine_version, args.catalog)
        else:
            proposal = _proposal(source, groups, env)
        report.update(changes=changes, proposal=proposal, remaining=remaining)
        failed = any(item["status"] == FAIL for item in remaining)
    if args.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    elif args.migrate:
        for change in report["changes"]:
            print(f"# {change}")
        for item in report["remaining"]:
            print(f"# still {item['code']}: {item['flag']}: {item['message']}")
        print(_text(source, report["proposal"]), end="")
    else:
        for item in findings:
            fix = f" Fix: {item['fix']}" if item["fix"] else ""
            print(f"{item['status']}  {item['code']:<15} {item['flag'] or '-'}: {item['message']}{fix}")
        counts = {status: sum(item["status"] == status for item in findings) for status in ("fail", "warn")}
        print(f"vLLM {args.engine_version}: {counts['fail']} fail, {counts['warn']} warn")
    return 1 if failed else 0


def read(path: str, catalog_directory: str) -> Source:
    """Read a command line from any of the formats.

    :raises UsageError: for what cannot be read, or is none of them.
    """
    file = Path(path)
    if file.suffix == ".json":
        return _from_data(files.read_json(path, "argument"), path, catalog_directory)
    from .. import catalog

    text = catalog.read_text(path, "argument file")
    data = _as_mapping(text, path)
    if data is None:
        return _words(_split(text, path))
    if "command" in data:
        return _platform(text, path)
    return _from_data(catalog.parse_yaml(text, path), path, catalog_directory)


def _as_mapping(text: str, path: str) -> Optional[Dict[str, Any]]:
    """Return the YAML mapping in a text, None for anything else: a plain list of arguments may be no YAML at all."""
    from .. import catalog

    try:
        data = catalog.parse_yaml(text, path, as_written=True)
    except UsageError:
        looks_like_yaml = Path(path).suffix in (".yml", ".yaml") or re.search(r"^(command|args):", text, re.MULTILINE)
        if looks_like_yaml:
            raise
        return None
    if isinstance(data, dict) and not set(data) & {"command", "args", "entry", "schema"}:
        if Path(path).suffix in (".yml", ".yaml"):
            raise UsageError("bad_schema", f"{path}: found no key 'command' (platform) nor 'args' (profile).")
        return None
    return data if isinstance(data, dict) else None


def _split(text: str, path: str) -> List[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise UsageError("bad_arguments", f"{path}: {error}.") from None


def _words(words: List[str]) -> Source:
    from ..platform_format import split_command

    entry: List[str] = []
    if words and not words[0].startswith("-"):
        entry, words = split_command(words)
    return Source("words", entry, group_words(words), {}, [], {})


def _platform(text: str, path: str) -> Source:
    from .. import catalog, platform_format

    engine = {"id": platform_format.DEFAULT_ENGINE, "accelerator": "corex"}
    document = catalog.parse_yaml(text, path, as_written=True)
    profile = platform_format.to_profile(document, path, engine)
    bare = catalog.bare_values(text)
    return Source("platform", profile["entry"], profile["groups"], profile["env"], bare, document)


def _from_data(data: Any, path: str, catalog_directory: str) -> Source:
    if isinstance(data, list) and all(isinstance(word, str) for word in data):
        return _words(data)
    if isinstance(data, dict) and isinstance(data.get("entry"), list) and isinstance(data.get("args"), list):
        groups = [[str(word) for word in group] for group in data["args"]]
        return Source("lane", data["entry"], groups, dict(data.get("env", {})), [], {})
    if not isinstance(data, dict):
        raise UsageError("bad_arguments", f"{path}: neither a profile, a platform file nor a list of arguments.")
    from .. import catalog, profile
    from ..profile_schema import check_profile

    entries = catalog.load(catalog_directory)
    checked = check_profile(data, path)
    entries.profiles[checked["id"]] = checked
    lane = {"name": "main", "profile": checked["id"]}
    if checked["checkpoint"]["path"] is None:
        lane["checkpoint"] = "/model"
    resolved = profile.resolve(lane, entries)
    return Source("profile", resolved["entry"], resolved["args"], resolved["env"], [], data)


def _proposal(source: Source, groups: List[Group], env: Dict[str, str]) -> Dict[str, Any]:
    """Return the proposal in the shape of what was read."""
    command = [*source.entry, *(word for group in groups for word in group)]
    if source.kind != "platform":
        return {"command": command, "env": env}
    document = {**source.document, "command": command}
    if "env" in document:
        document["env"] = [{"name": name, "value": value} for name, value in env.items()]
    return document


def _profile(document: Mapping[str, Any], version: str, catalog_directory: str) -> Dict[str, Any]:
    """Return the same profile for another version, with that engine where the catalog has one."""
    from .. import catalog

    engines = catalog.load(catalog_directory).engines.values()
    fitting = [
        item for item in engines if item["version"] == version and item["accelerator"] == document["accelerator"]
    ]
    proposal = dict(document)
    proposal["id"] = f"{document['id']}-vllm-{version.split('+', 1)[0]}"
    proposal["engine"] = fitting[0]["id"] if fitting else document["engine"]
    arguments: Dict[str, Any] = {}
    for flag, value in document.get("args", {}).items():
        kept, _, _ = engine_args.migrate([[flag]], version, {})
        if kept:
            arguments[kept[0][0]] = value
    proposal["args"] = arguments
    _, env, _ = engine_args.migrate([], version, {name: str(value) for name, value in document.get("env", {}).items()})
    proposal["env"] = {name: value for name, value in document.get("env", {}).items() if name in env}
    return proposal


def _text(source: Source, proposal: Mapping[str, Any]) -> str:
    from .. import catalog

    if source.kind == "platform":
        return catalog.dump_platform(proposal)
    if source.kind == "profile":
        return catalog.dump_yaml(proposal)
    return " ".join(shlex.quote(word) for word in proposal["command"]) + "\n"
