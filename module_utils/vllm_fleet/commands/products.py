"""``vllm-fleet products record|verify TREE``: the build products of an engine tree."""

from __future__ import annotations

import argparse
import json

from .. import checks, products_pass, sums


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    record = actions.add_parser("record", help="hash the products and write the record, marker last")
    record.add_argument("tree", metavar="TREE")
    record.add_argument("--route", required=True, help="how the engine came here: tarball, own, wheel, …")
    record.add_argument("--engine", required=True, metavar="ID", help="the engine's id")
    record.add_argument(
        "--path", action="append", required=True, metavar="P", help="a file or directory in TREE; repeatable"
    )
    record.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="shell pattern or directory; repeatable"
    )
    record.add_argument("--check", action="store_true", help="say what would change and write nothing")
    verify = actions.add_parser("verify", help="compare the products with their record")
    verify.add_argument("tree", metavar="TREE")
    verify.add_argument("--engine", metavar="ID", help="the engine that the record must name")
    verify.add_argument("--trust-read-only", action="store_true", help="read nothing on a read-only mount")
    verify.add_argument("--quiet", action="store_true", help="print only what is not a pass")
    for action in (record, verify):
        action.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.action == "record":
        outcome = products_pass.record(
            args.tree, route=args.route, engine=args.engine, paths=args.path, exclude=args.exclude, check=args.check
        )
        del outcome["before"], outcome["after"]
        if args.json:
            print(json.dumps(outcome))
        else:
            print(f"{sums.printable(args.tree)}: {outcome['reason']}, {outcome['files']} files")
        return 0
    report = products_pass.verify(args.tree, engine=args.engine, trust_read_only=args.trust_read_only)
    if args.json:
        print(json.dumps(report))
    else:
        shown = [item for item in report["results"] if not (args.quiet and item["status"] == checks.PASS)]
        print(*checks.lines(shown), sep="\n", end="\n" if shown else "")
    return checks.exit_code(report["results"])
