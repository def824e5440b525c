"""``vllm-fleet topology``: the decision for facts and a policy, offline from files or live from the box."""

from __future__ import annotations

import argparse
import json
import sys

from ..errors import UsageError
from ..files import parse_json, read_json, write_atomic
from ..topology import decide

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Dict


REFUSED = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("--facts", metavar="FILE", help="topology facts as JSON, - for stdin (default: read the box)")
    parser.add_argument("--policy", metavar="FILE", help="policy as JSON, - for stdin (default: one GPU, mode auto)")
    parser.add_argument("--timeout", type=float, default=20.0, metavar="S", help="seconds for reading the box (20)")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print the decision as one JSON object (the default)")
    shape.add_argument("--table", action="store_true", help="print links and lane as a table for a person instead")
    parser.add_argument("--svg", metavar="FILE", help="also write a picture of links and lane")
    parser.add_argument("--env-out", metavar="FILE", help="also write the runtime environment, unless refused")


def run(args: argparse.Namespace) -> int:
    """Print one decision; return 0 when a lane can start, 3 when it is refused."""
    if args.facts == args.policy == "-":
        raise UsageError("bad_arguments", "only one of --facts and --policy can be - (stdin)")
    if not 0 < args.timeout <= 600:
        raise UsageError("bad_arguments", f"--timeout is {args.timeout}, expected more than 0 and at most 600 seconds")
    policy = {} if args.policy is None else _load(args.policy, "policy")
    facts = _live(args.timeout) if args.facts is None else _load(args.facts, "facts")
    decision = decide(facts, policy)
    refused = decision["status"] == "refused"
    if args.env_out and not refused:
        from ..runtime_env import render

        _write(args.env_out, render(decision, {}))
    if args.svg or args.table:
        from ..topology import picture

        if args.svg:
            _write(args.svg, picture.svg(facts, policy, decision))
        if args.table:
            sys.stdout.write(picture.table(facts, policy, decision))
    if not args.table:
        print(json.dumps(decision, ensure_ascii=True))
    return REFUSED if refused else 0


def _load(path: str, what: str) -> Any:
    if path == "-":
        return parse_json(sys.stdin.buffer.read(), what, "stdin")
    return read_json(path, what)


def _live(timeout: float) -> Dict[str, Any]:
    from ..facts import collect

    facts: Dict[str, Any] = collect.read(timeout=timeout)
    return facts


def _write(path: str, text: str) -> None:
    try:
        write_atomic(path, text.encode("utf-8"))
    except OSError as error:
        raise UsageError("unwritable_file", f"cannot write {path}: {error.strerror}") from None
