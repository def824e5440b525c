"""Groups and a sum over ranks, through files beside the rendezvous file."""

from __future__ import annotations

import json
import os
import time

_state = {}


def init_process_group(backend, init_method, rank, world_size):
    _state.update(rank=rank, base=init_method[len("file://") :], backend=backend)


def new_group(ranks):
    return ranks


def all_reduce(tensor, group):
    if os.environ.get("FAKE_TORCH_REDUCE") == "fail" and "NCCL_P2P_DISABLE" not in os.environ:
        raise RuntimeError("NCCL error: unhandled system error")
    name = f"{_state['base']}.{'-'.join(map(str, group))}"
    _state[name] = _state.get(name, 0) + 1
    name = f"{name}.{_state[name]}"
    with open(f"{name}.{_state['rank']}.part", "w") as handle:
        json.dump(tensor.values, handle)
    os.rename(f"{name}.{_state['rank']}.part", f"{name}.{_state['rank']}")
    total = [0.0] * len(tensor.values)
    for rank in group:
        while not os.path.exists(f"{name}.{rank}"):
            time.sleep(0.005)
        with open(f"{name}.{rank}") as handle:
            total = [one + two for one, two in zip(total, json.load(handle))]
    tensor.values = total
