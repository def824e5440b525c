"""A lane and the facts of a box on which every check passes; tests change one thing at a time."""

from __future__ import annotations

import copy
from typing import Any, Dict, List

ENGINE_ROOT = "/opt/vllm-fleet/engines/e1"
SITE = ENGINE_ROOT + "/venv/lib/python3.13/site-packages"
CUDA = SITE + "/nvidia/cu13"
UNIT_CGROUP = "/system.slice/system-vllm.slice/vllm@main.service"

LANE: Dict[str, Any] = {
    "schema": 1,
    "lane": "main",
    "profile": "four-cards",
    "engine": {
        "id": "e1",
        "version": "0.30.0",
        "route": "git",
        "accelerator": "nvidia",
        "root": ENGINE_ROOT,
        "venv": ENGINE_ROOT + "/venv",
        "python": ENGINE_ROOT + "/venv/bin/python",
        "tree": ENGINE_ROOT + "/tree",
        "site_packages": SITE,
        "products": "sha256",
    },
    "entry": [ENGINE_ROOT + "/venv/bin/vllm", "serve", "/models/m"],
    "checkpoint": {"path": "/models/m", "patch": [], "sidecars": [], "manifest": None},
    "served_names": ["m"],
    "host": "127.0.0.1",
    "port": 8000,
    "api_key_file": None,
    "args": [
        ["--tensor-parallel-size", "2"],
        ["--max-model-len", "262144"],
        ["--max-num-seqs", "2"],
        ["--max-num-batched-tokens", "2048"],
        ["--gpu-memory-utilization", "0.96"],
        ["--enable-prefix-caching"],
    ],
    "env": {"CUDA_HOME": CUDA, "PATH": f"{CUDA}/bin:/usr/bin:/bin", "VLLM_PLE_OFFLOAD_READY_TIMEOUT": "1800"},
    "clear": [],
    "policy": {"enabled": True, "mode": "auto", "tensor_parallel": 2, "pipeline_parallel": 1, "gpus": None},
    "needs": {
        "memory_floor_kib": 72351744,
        "memory_recommended_kib": 100663296,
        "shm_kib": 1048576,
        "disk_kib": 1048576,
        "driver_cuda": [13, 0],
        "gpu_memory_mib": 22000,
        "toolchain": True,
    },
    "checks": {},
    "readiness": {"deadline_s": 1800, "log_lines": ["GPU KV cache size: 924,993 tokens"], "concurrent": 1},
    "cache_root": None,
    "log": "/var/log/vllm-fleet/main.log",
    "workdir": "/var/lib/vllm-fleet/lanes/main",
    "notes": [],
}


def gpu(index: int) -> Dict[str, Any]:
    """An idle RTX 3090 as the facts show it."""
    return {
        "index": index,
        "bus_id": f"0000:{index + 1:02x}:00.0",
        "uuid": f"GPU-{index}",
        "name": "NVIDIA GeForce RTX 3090",
        "numa_node": 0,
        "health": "ok",
        "memory_total_mib": 24124,
        "memory_used_mib": 1,
        "bar1_total_mib": 32768,
        "compute_capability": [8, 6],
        "pcie": {"gen_max": 4, "gen_current": 1, "width_max": 16, "width_current": 16},
        "mig": False,
        "display": False,
        "processes": [],
    }


BOX: Dict[str, Any] = {
    "topology": {
        "schema": 1,
        "vendor": "nvidia",
        "driver": {"loaded": "610.43.02", "userland": "610.43.02", "cuda": [13, 3]},
        "gpus": [gpu(0), gpu(1)],
        "pairs": [],
        "extra": {"status": "ok", "message": "", "cards": []},
    },
    "decision": {"status": "selected", "reason": "kept", "message": "", "order": [0, 1], "warnings": []},
    "driver_cuda": [13, 3],
    "kernel_modules": ["nvidia", "nvidia_uvm"],
    "driver": {
        "installed": "610.43.02",
        "loaded": "610.43.02",
        "next_boot": "610.43.02",
        "flavour": "open",
        "reboot_required": False,
        "reasons": [],
        "reboot_blocked": [],
        "running_kernel": "6.1.0-57-amd64",
        "next_kernel": "6.1.0-57-amd64",
    },
    "persistence": {"GPU-0": True, "GPU-1": True},
    "processes": {},
    "memory": {"total_kib": 197000000, "limit_kib": None, "limit_source": ""},
    "shared_memory": {"total_kib": 98000000, "available_kib": 97000000},
    "user_name": "vllm",
    "user": {"name": "vllm", "uid": 990, "gid": 990, "home": "/var/lib/vllm-fleet", "groups": [990]},
    "access": {
        "/var/cache/vllm-fleet/main": "rwx",
        "/var/lib/vllm-fleet/lanes/main": "rwx",
        ENGINE_ROOT + "/venv/bin/python": "rx",
        ENGINE_ROOT + "/venv/bin/vllm": "rx",
    },
    "cache": {
        "path": "/var/cache/vllm-fleet/main",
        "exists": True,
        "kind": "directory",
        "nearest": "/var/cache/vllm-fleet/main",
        "type": "ext4",
        "options": ["relatime", "rw"],
        "available_kib": 100000000,
    },
    "workdir": {"path": "/var/lib/vllm-fleet/lanes/main", "exists": True, "kind": "directory"},
    "log": {
        "path": "/var/log/vllm-fleet/main.log",
        "exists": True,
        "kind": "file",
        "nearest": "/var/log/vllm-fleet/main.log",
        "parent": "/var/log/vllm-fleet",
        "type": "ext4",
        "options": ["rw"],
        "available_kib": 100000000,
    },
    "unit_path": f"{CUDA}/bin:/usr/bin:/bin",
    "entry_program": ENGINE_ROOT + "/venv/bin/vllm",
    "entry_interpreter": ENGINE_ROOT + "/venv/bin/python3",
    "entry_interpreter_real": "/usr/bin/python3.13",
    "python_real": "/usr/bin/python3.13",
    "engine": {
        "root": True,
        "python": True,
        "site_packages": True,
        "package": False,
        "tree_package": True,
        "console_script": {
            "path": ENGINE_ROOT + "/venv/bin/vllm",
            "exists": True,
            "executable": True,
            "interpreter": ENGINE_ROOT + "/venv/bin/python3",
        },
        "venv_version": "3.13",
        "distributions": {"vllm": "0.30.0", "nvidia-ml-py": "13.610.43"},
    },
    "import_origin": {
        "origin": ENGINE_ROOT + "/tree/vllm",
        "origin_real": ENGINE_ROOT + "/tree/vllm",
        "source": "editable",
        "shadowing": [],
    },
    "import_expected": [ENGINE_ROOT + "/tree/vllm"],
    "listeners": [],
    "interface": "eth1",
    "rendezvous": {"master_port": [], "peer_port": []},
    "api_key_present": False,
    "toolchain": {
        "cuda_home": CUDA,
        "cuda_home_source": "environment",
        "cuda_home_exists": True,
        "cc": "/usr/bin/cc",
        "cxx": "/usr/bin/c++",
        "ninja": "/usr/bin/ninja",
        "host_compiler": {"path": "/usr/bin/c++", "family": "gcc", "major": 12},
        "python_include": "/usr/include/python3.13",
        "python_header": "/usr/include/python3.13/Python.h",
        "nvcc": {"path": CUDA + "/bin/nvcc", "release": [13, 0], "output": ""},
        "cudart": {"path": CUDA + "/lib64/libcudart.so", "state": "ok"},
        "gcc_limit": 15,
        "compile": {"state": "ok", "output": "", "user": "vllm"},
    },
    "results": [],
}


def lane() -> Dict[str, Any]:
    """A lane of two GPUs that compiles at its first start."""
    return copy.deepcopy(LANE)


def wide_lane() -> Dict[str, Any]:
    """The head of such a lane over two boxes."""
    place = {"rank": 0, "boxes": ["box1", "box2"], "addresses": ["10.0.0.11", "10.0.0.12"]}
    return {**lane(), "part": {**place, "master_port": 29501, "peer_port": 29502}}


def cpu_lane() -> Dict[str, Any]:
    """A lane without GPU and without a toolchain."""
    data = lane()
    data["engine"].update(accelerator="cpu", tree=None, products="none", route="wheel")
    data["policy"]["enabled"] = False
    data["needs"].update(toolchain=False, driver_cuda=None, gpu_memory_mib=None)
    return data


def box() -> Dict[str, Any]:
    """A box on which the lane passes everything."""
    return copy.deepcopy(BOX)


def put(data: Dict[str, Any], path: str, value: Any) -> None:
    """Set ``a.b.0.c`` inside nested dictionaries and lists."""
    *front, last = path.split(".")
    at: Any = data
    for part in front:
        at = at[int(part)] if isinstance(at, list) else at[part]
    if isinstance(at, list):
        at[int(last)] = value
    else:
        at[last] = value


def set_argument(data: Dict[str, Any], name: str, value: str) -> None:
    """Replace or add an engine argument."""
    data["args"] = [group for group in data["args"] if group[0] != name] + [[name, value]]


def of(results: List[Dict[str, str]], check: str) -> List[Dict[str, str]]:
    """Return the results of one check."""
    return [item for item in results if item["check"] == check]
