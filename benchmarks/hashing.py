#!/usr/bin/env python3
"""Compare ``vllm-fleet products verify`` with ``sha256sum -c --quiet --strict``: whole process, warm cache.

Usage: ``python3 benchmarks/hashing.py [--files 2000] [--bytes 1073741824] [--runs 5] [--python PYTHON]``

Makes a tree of random files in a temporary directory, records it, and times both programs in turn. Prints the best and
the median of each and the ratio of the best ones, with the load of the machine, because a busy machine slows the
parallel program more than the serial one. Exit status 1 when the ratio is below ``--at-least`` (5).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "module_utils"


def make_tree(tree: Path, files: int, size: int) -> None:
    """Write ``files`` random files of ``size`` bytes in all, spread over 40 directories."""
    for number in range(files):
        directory = tree / "vllm" / f"part{number % 40}"
        directory.mkdir(parents=True, exist_ok=True)
        share = size // files + (1 if number < size % files else 0)
        (directory / f"product{number}.so").write_bytes(os.urandom(share))


def timed(command: list[str], cwd: Path) -> float:
    """Return the seconds that the command took from start to exit; it must succeed."""
    start = time.perf_counter()
    subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--at-least", type=float, default=5.0)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(PACKAGE)
    program = [args.python, "-m", "vllm_fleet", "products"]
    with tempfile.TemporaryDirectory(prefix="vllm-fleet-hashing-") as folder:
        tree = Path(folder)
        make_tree(tree, args.files, args.bytes)
        subprocess.run(
            [*program, "record", folder, "--route", "own", "--engine", "bench", "--path", "vllm"], check=True
        )
        commands = {
            "sha256sum": ["sha256sum", "-c", "--quiet", "--strict", ".build-products.sha256"],
            "vllm-fleet": [*program, "verify", folder, "--quiet"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for command in commands.values():
            timed(command, tree)  # the cache is warm from here on
        for _ in range(args.runs):
            for name, command in commands.items():
                times[name].append(timed(command, tree))
    print(f"{args.files} files, {args.bytes} bytes, {len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}")
    for name, taken in times.items():
        print(f"{name:10} best {min(taken):.3f} s, median {statistics.median(taken):.3f} s of {args.runs} runs")
    ratio = min(times["sha256sum"]) / min(times["vllm-fleet"])
    paired = statistics.median(old / new for old, new in zip(times["sha256sum"], times["vllm-fleet"]))
    print(f"ratio {ratio:.2f} (best), {paired:.2f} (median of the pairs)")
    return 0 if ratio >= args.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
