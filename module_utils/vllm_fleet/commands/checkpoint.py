"""``vllm-fleet checkpoint DIR``: is the checkpoint complete, readable and the one that was meant?"""

from __future__ import annotations

import argparse
import json

from .. import checkpoint, checkpoint_pass, checks
from ..errors import UsageError
from ..facts.checkpoint_dir import STATE_DIRECTORY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the checkpoint directory")
    parser.add_argument("--user", help="the service user that must be able to read it")
    parser.add_argument(
        "--sidecar", action="append", default=[], metavar="FILE[=SHA256]", help="a file that must be there; repeatable"
    )
    parser.add_argument(
        "--setting", action="append", default=[], metavar="KEY=VALUE", help="a string in config.json; repeatable"
    )
    parser.add_argument("--manifest", metavar="FILE", help="hashes of its files, relative to DIR or absolute")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--rehash", action="store_true", help="read every file of the manifest again")
    group.add_argument("--remembered-only", action="store_true", help="read no file of the manifest")
    parser.add_argument(
        "--state-directory", default=STATE_DIRECTORY, metavar="DIR", help="where digests are remembered"
    )
    parser.add_argument("--tensor-parallel", type=int, metavar="N", help="a size that must divide the attention heads")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.tensor_parallel is not None and args.tensor_parallel < 1:
        raise UsageError("bad_tensor_parallel", f"--tensor-parallel must be 1 or more, not {args.tensor_parallel}")
    sidecars = []
    for text in args.sidecar:
        path, _, digest = text.partition("=")
        sidecars.append({"path": path, "sha256": digest or None})
    settings = []
    for text in args.setting:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise UsageError("bad_setting", f"{text!r} is not KEY=VALUE")
        settings.append({"file": checkpoint.CONFIG, "key": key, "value": value})
    report = checkpoint_pass.inspect(
        args.directory,
        user=args.user,
        sidecars=sidecars,
        settings=settings,
        manifest=args.manifest,
        hash_policy="again" if args.rehash else "remembered" if args.remembered_only else "due",
        state_directory=args.state_directory,
        tensor_parallel=args.tensor_parallel,
    )
    if args.json:
        print(json.dumps(report))
    else:
        print(*checks.lines(report["results"]), sep="\n")
    return checks.exit_code(report["results"])
