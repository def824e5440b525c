"""``vllm-fleet checkpoint-config DIR --set KEY=VALUE``: set one key in a checkpoint's JSON file and nothing else."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Tuple

from .. import checkpoint, checkpoint_edit
from ..errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the checkpoint directory")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--set", metavar="KEY=VALUE", dest="text", help="dotted key and a string")
    group.add_argument("--set-json", metavar="KEY=JSON", dest="json_text", help="dotted key and a JSON value")
    parser.add_argument("--file", default=checkpoint.CONFIG, help="the JSON file inside DIR (%(default)s)")
    parser.add_argument("--check", action="store_true", help="say what would change and write nothing")
    parser.add_argument("--diff", action="store_true", help="show the exact change")
    parser.add_argument("--force", action="store_true", help="overwrite a different value, drop a differing stale copy")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def parse_setting(args: argparse.Namespace) -> Tuple[str, Any]:
    """Return key and value of ``--set`` or ``--set-json``.

    :raises UsageError: ``bad_setting``.
    """
    text = args.text if args.text is not None else args.json_text
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise UsageError("bad_setting", f"{text!r} is not KEY=VALUE")
    if args.text is not None:
        return key, value
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UsageError("bad_setting", f"the value of {key} is not JSON: {error}", "use --set for a string") from None


def run(args: argparse.Namespace) -> int:
    key, value = parse_setting(args)
    result = checkpoint_edit.set_key(args.directory, key, value, file=args.file, force=args.force, check=args.check)
    before, after = result.pop("text_before"), result.pop("text_after")
    diff = checkpoint_edit.unified_diff(before, after, args.file) if args.diff else ""
    if args.json:
        print(json.dumps(dict(result, diff=diff) if args.diff else result))
        return 0
    for item in result["warnings"]:
        print(f"warning: {item['reason']}: {item['message']}", file=sys.stderr)
    verb = "would be changed" if args.check else "changed"
    print(f"{result['file']}: {verb + ', ' if result['changed'] else 'unchanged, '}{result['reason']}: {key}")
    if diff:
        sys.stdout.flush()
        sys.stdout.buffer.write(diff.encode("utf-8"))
    return 0
