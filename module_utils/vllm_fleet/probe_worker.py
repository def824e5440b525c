"""A small computation on one GPU; runs in the ENGINE's Python, which has torch. It imports nothing of this package.

A card can list fine and hang at its first operation, so this is one process a card, under the caller's time limit.
Usage: ``python -c … DEVICE`` with DEVICE ``cuda`` or ``cpu``; prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Dict

SIZE = 512


def probe(device: str) -> Dict[str, Any]:
    import torch  # type: ignore[import-not-found]

    started = time.perf_counter()
    # row i holds i, so every element of the product's row i is i * SIZE: exact in float32
    rows = torch.arange(SIZE, device=device, dtype=torch.float32).unsqueeze(1).expand(SIZE, SIZE).contiguous()
    product = rows @ torch.ones((SIZE, SIZE), device=device, dtype=torch.float32)
    right = bool(torch.equal(product, rows * SIZE))
    milliseconds = round((time.perf_counter() - started) * 1000, 1)
    return {"outcome": "right" if right else "wrong", "milliseconds": milliseconds, "torch": str(torch.__version__)}


if __name__ == "__main__":
    try:
        print(json.dumps(probe(sys.argv[1])), flush=True)
    except Exception as error:  # whatever the driver throws is the answer
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(json.dumps({"outcome": "error", "detail": message}), flush=True)
        sys.exit(1)
