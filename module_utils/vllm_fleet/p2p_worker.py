"""One rank of a P2P check; runs in the ENGINE's Python, which has torch. It imports nothing of this package.

Started once a GPU, all ranks with the same arguments but the rank. For each pair in turn the two ranks all-reduce a
small and a large payload and compare it with the exact sum. Every step is one JSON line on stdout, so the caller sees
where a rank stopped: ``{"ready": true}``, ``{"pair": "0-1", "rank": 0, "outcome": "equal", "milliseconds": {…}}``.

Usage: ``… RANK WORLD RENDEZVOUS BACKEND PAIRS SIZES``, with PAIRS like ``0-1,2-3`` and SIZES like ``4096,65536``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any, Dict, List


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def payload(torch: Any, place: int, size: int, device: str) -> Any:
    """Return whole numbers below 2**14, different on the two ranks: float32 adds them exactly."""
    return (torch.arange(size, device=device) % 4093 + 1 + 8192 * place).to(torch.float32)


def exchange(torch: Any, group: Any, place: int, size: int, device: str) -> Dict[str, Any]:
    expected = payload(torch, 0, size, device) + payload(torch, 1, size, device)
    fault = os.environ.get("VLLM_FLEET_P2P_TEST_FAULT") if place == 1 else None  # tests only
    if fault == "hang":
        time.sleep(86400)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    result: Dict[str, Any] = {"outcome": "equal"}
    for _ in range(3):  # the first of them sets up the connection
        values = payload(torch, place, size, device)
        synchronise(torch, device)
        started = time.perf_counter()
        torch.distributed.all_reduce(values, group=group)
        synchronise(torch, device)
        result["milliseconds"] = round((time.perf_counter() - started) * 1000, 3)
        if fault == "corrupt":
            values[size // 2] = 0
        if not torch.equal(values, expected):
            # no early end: the other rank, which may see right values, still waits in the next round
            wrong = int((values != expected).sum())
            result.update(outcome="wrong_data", detail=f"{wrong} of {size} values differ")
    return result


def synchronise(torch: Any, device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def run(rank: int, world: int, rendezvous: str, backend: str, pairs: List[List[int]], sizes: List[int]) -> None:
    import torch  # type: ignore[import-not-found]
    import torch.distributed as dist  # type: ignore[import-not-found]

    device = "cpu" if backend == "gloo" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    say(ready=True, rank=rank)
    for pair in pairs:
        group = dist.new_group(pair)  # every rank takes part in making it
        if rank not in pair:
            continue
        line: Dict[str, Any] = {"pair": f"{pair[0]}-{pair[1]}", "rank": rank, "outcome": "equal", "milliseconds": {}}
        try:
            for size in sizes:
                step = exchange(torch, group, pair.index(rank), size, device)
                line["milliseconds"][str(size)] = step.pop("milliseconds")
                if step["outcome"] != "equal":
                    line.update(step)
        except Exception as error:  # NCCL and CUDA report a broken link as any of several exceptions
            line.update(outcome="error", detail=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            say(**line)
            os._exit(1)
        say(**line)
    os._exit(0)  # tearing the groups down can hang on a link that just failed


if __name__ == "__main__":
    rank_text, world_text, where, which, pairs_text, sizes_text = sys.argv[1:7]
    run(
        int(rank_text),
        int(world_text),
        where,
        which,
        [[int(index) for index in pair.split("-")] for pair in pairs_text.split(",")],
        [int(size) for size in sizes_text.split(",")],
    )
