#!/usr/bin/env python3
"""Measure the topology decision: whole processes against the limits, and the search against plain enumeration.

    python3 benchmarks/selection.py [--runs 15]

The first table is the processor time of ``vllm-fleet topology --facts FILE --policy FILE`` less that of an empty Python
process; of several runs the least disturbed one counts. Each box is irregular, with links drawn at random, because a
regular box is much cheaper. The second table lets the search and the enumeration of all orders solve the same box and
compares score and order. Exits 1 when a limit is exceeded or the two disagree.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "module_utils"
sys.path.insert(0, str(PACKAGE))

from vllm_fleet.topology.search import Search  # noqa: E402

#: GPUs on the box, tensor parallel, pipeline parallel, limit in seconds over an empty process
LIMITS = ((8, 2, 2, 0.05), (16, 2, 2, 0.1), (16, 4, 2, 0.4))
#: the same for the comparison with plain enumeration
GROWTH = ((4, 2, 2), (6, 2, 2), (8, 2, 2), (8, 4, 1), (8, 2, 3), (8, 4, 2), (16, 4, 2), (16, 8, 2))
ANCESTORS = ("single", "hostbridge", "node", "system")
CLASSES = (6.0, 5.0, 4.0, 3.0, 2.5, 2.25, 2.0, 1.0)


def facts(count: int, seed: int) -> dict:
    """Return the facts of a box with random links."""
    draw = random.Random(seed)  # noqa: S311 - a benchmark
    gpus = [
        {
            "index": index,
            "bus_id": f"0000:{index + 1:02x}:00.0",
            "uuid": f"GPU-{index:08x}-0000-0000-0000-000000000000",
            "name": "NVIDIA GeForce RTX 3090",
            "numa_node": index * 2 // count,
            "health": "ok",
            "memory_total_mib": 24576,
            "memory_used_mib": 1,
            "processes": [],
        }
        for index in range(count)
    ]
    pairs = [
        {
            "gpus": list(pair),
            "ancestor": draw.choice(ANCESTORS),
            "p2p_read": (state := draw.choice(("ok", "chipset_not_supported"))),
            "p2p_write": state,
            "nvlink_lanes": draw.choice((0, 0, 0, 4)),
            "acs": False,
        }
        for pair in itertools.combinations(range(count), 2)
    ]
    return {"schema": 1, "vendor": "nvidia", "gpus": gpus, "pairs": pairs}


def seconds(command: list, runs: int) -> float:
    """Return the smallest processor time of a command."""
    times = []
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def processes(runs: int) -> bool:
    """Print the table of whole processes; return whether all limits hold."""
    good = True
    print(f"{'GPUs':>4}  {'tp x pp':>7}  {'over empty':>10}  {'limit':>6}")
    with tempfile.TemporaryDirectory() as directory:
        for count, tensor, stages, limit in LIMITS:
            facts_file, policy_file = Path(directory, "facts.json"), Path(directory, "policy.json")
            policy = {"tensor_parallel": tensor, "pipeline_parallel": stages, "lane_gpus": "auto", "p2p": "trusted"}
            policy_file.write_text(json.dumps(policy))
            command = [sys.executable, "-m", "vllm_fleet", "topology"]
            command += ["--facts", str(facts_file), "--policy", str(policy_file)]
            worst = 0.0
            for seed in range(3):
                facts_file.write_text(json.dumps(facts(count, seed)))
                worst = max(worst, seconds(command, runs) - seconds([sys.executable, "-c", "pass"], runs))
            good = good and worst <= limit
            mark = "" if worst <= limit else "  EXCEEDED"
            print(f"{count:>4}  {f'{tensor} x {stages}':>7}  {worst:>8.3f} s  {limit:>4} s{mark}")
    return good


def enumerate_orders(matrix: list, tensor: int, stages: int) -> tuple:
    """Return the best (score, order) by trying every order."""
    best = None
    for order in itertools.permutations(range(len(matrix)), tensor * stages):
        groups = [order[start : start + tensor] for start in range(0, len(order), tensor)]
        inside = [matrix[one][other] for group in groups for one, other in itertools.combinations(group, 2)]
        edges = [matrix[one][other] for one, other in zip(order, order[tensor:])]
        key = (min(inside, default=0), sum(inside), min(edges, default=0))
        if best is None or key > best[0]:
            best = (key, list(order))
    return best


def growth() -> bool:
    """Print the table of search against enumeration; return whether they agree."""
    good = True
    print(f"\n{'GPUs':>4}  {'tp x pp':>7}  {'search':>10}  {'enumeration':>11}  agree")
    for count, tensor, stages in GROWTH:
        draw = random.Random(count)  # noqa: S311 - a benchmark
        matrix = [[0.0] * count for _ in range(count)]
        for one, other in itertools.combinations(range(count), 2):
            matrix[one][other] = matrix[other][one] = draw.choice(CLASSES)
        start = time.perf_counter()
        search = Search(matrix, tensor, stages, [0] * count, [0] * count, None)
        score = search.best()
        order, _ = search.order()
        searched = time.perf_counter() - start
        if count > 8:
            print(f"{count:>4}  {f'{tensor} x {stages}':>7}  {searched:>8.4f} s  {'-':>11}  (too many orders)")
            continue
        start = time.perf_counter()
        expected = enumerate_orders(matrix, tensor, stages)
        enumerated = time.perf_counter() - start
        agree = (tuple(value or 0 for value in score), order) == expected
        good = good and agree
        word = "yes" if agree else "NO"
        print(f"{count:>4}  {f'{tensor} x {stages}':>7}  {searched:>8.4f} s  {enumerated:>9.4f} s  {word}")
    return good


def main() -> int:
    """Run both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15, help="processes per measurement (15)")
    runs = parser.parse_args().runs
    results = [processes(runs), growth()]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
