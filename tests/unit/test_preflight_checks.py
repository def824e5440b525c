"""Every check, one changed fact at a time: each reason code is reached, with its status, and nothing else changes."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import pytest
from vllm_fleet.preflight import gpu, run
from vllm_fleet.preflight.registry import CHECKS

from tests.unit import preflight_fixtures as given

Change = Callable[[Dict[str, Any], Dict[str, Any]], None]


def facts(**changes: Any) -> Change:
    """Change the box; two underscores stand for a dot."""

    def apply(lane: Dict[str, Any], box: Dict[str, Any]) -> None:
        for path, value in changes.items():
            given.put(box, path.replace("__", "."), value)

    return apply


def spec(**changes: Any) -> Change:
    """Change the lane."""

    def apply(lane: Dict[str, Any], box: Dict[str, Any]) -> None:
        for path, value in changes.items():
            given.put(lane, path.replace("__", "."), value)

    return apply


def argument(name: str, value: str) -> Change:
    """Change an engine argument."""
    return lambda lane, box: given.set_argument(lane, name, value)


def both(*changes: Change) -> Change:
    """Apply several changes."""

    def apply(lane: Dict[str, Any], box: Dict[str, Any]) -> None:
        for change in changes:
            change(lane, box)

    return apply


def listener(address: str, cgroup: Optional[str], pid: Optional[int] = 4242) -> Dict[str, Any]:
    return {"address": address, "pid": pid, "command": "python3 -m http.server 8000", "cgroup": cgroup}


def process(pid: int, name: str, memory: Optional[int] = 900) -> Dict[str, Any]:
    return {"pid": pid, "name": name, "memory_mib": memory}


UNIT = "/system.slice/system-vllm.slice/vllm@main.service"
WATCHDOG = "/system.slice/vllm-watchdog@main.service"
WORKDIR = "/var/lib/vllm-fleet/lanes/main"
OLD_DRIVER = {"loaded": "595.84", "userland": "610.43.02", "cuda": [13, 3]}

#: check, change, expected reason, expected status, and what the message must name
CASES: List[Tuple[str, Change, str, str, str]] = [
    ("engine_installed", facts(), "engine_ok", "pass", "e1"),
    ("engine_installed", facts(engine__root=False), "engine_missing", "fail", given.ENGINE_ROOT),
    ("engine_installed", facts(engine__python=False), "python_missing", "fail", "bin/python"),
    ("engine_installed", facts(engine__tree_package=False), "package_missing", "fail", "tree/vllm/__init__.py"),
    ("engine_installed", spec(engine__tree=None), "package_missing", "fail", given.SITE),
    ("engine_installed", facts(engine__console_script__executable=False), "console_script_missing", "fail", "bin/vllm"),
    ("interpreter", facts(), "interpreter_ok", "pass", "bin/vllm"),
    ("interpreter", facts(engine__root=False), "engine_absent", "unknown", given.ENGINE_ROOT),
    (
        "interpreter",
        facts(access={given.ENGINE_ROOT + "/venv/bin/python": ""}),
        "interpreter_not_executable",
        "fail",
        "vllm cannot run " + given.ENGINE_ROOT + "/venv/bin/python",
    ),
    ("interpreter", facts(access=None), "interpreter_ok", "pass", ""),
    ("ninja", both(spec(engine__venv=None), facts()), "ninja_ok", "pass", ""),
    ("interpreter", facts(entry_program=None), "entry_missing", "fail", "PATH"),
    (
        "interpreter",
        facts(entry_interpreter="/usr/bin/python3"),
        "interpreter_outside_venv",
        "fail",
        "bin/vllm runs under /usr/bin/python3",
    ),
    (
        "interpreter",
        facts(entry_program="/usr/bin/python3", entry_interpreter="/usr/bin/python3"),
        "interpreter_outside_venv",
        "fail",
        "the entry runs under /usr/bin/python3",
    ),
    (
        "interpreter",
        both(spec(engine__venv=None), facts(entry_program="/usr/bin/python3", entry_interpreter="/usr/bin/python3")),
        "interpreter_ok",
        "pass",
        "/usr/bin/python3",
    ),
    (
        "interpreter",
        both(
            spec(engine__venv=None),
            facts(
                entry_interpreter="/home/u/.pyenv/shims/python3", entry_interpreter_real="/home/u/.pyenv/shims/python3"
            ),
        ),
        "interpreter_outside_venv",
        "fail",
        ".pyenv",
    ),
    ("interpreter", facts(engine__venv_version="3.12"), "python_version_differs", "fail", "3.12"),
    ("import_origin", facts(), "origin_ok", "pass", "tree/vllm"),
    ("import_origin", facts(engine__root=False), "engine_absent", "unknown", given.ENGINE_ROOT),
    ("import_origin", facts(import_origin__origin=None), "import_missing", "fail", "no vllm"),
    (
        "import_origin",
        facts(
            import_origin__origin=WORKDIR + "/vllm",
            import_origin__origin_real=WORKDIR + "/vllm",
            import_origin__source="workdir",
        ),
        "import_shadowed",
        "fail",
        WORKDIR + "/vllm",
    ),
    ("import_origin", facts(import_origin__shadowing=["torch"]), "workdir_shadows_packages", "fail", "torch"),
    ("pynvml_package", facts(), "pynvml_ok", "pass", ""),
    ("pynvml_package", facts(engine__root=False), "engine_absent", "unknown", ""),
    ("pynvml_package", facts(engine__distributions={"pynvml": "11.5.3"}), "pynvml_clash", "fail", "11.5.3"),
    ("pynvml_package", facts(engine__distributions={"pynvml": "13.0.1"}), "pynvml_ok", "pass", ""),
    ("compiler", facts(), "compiler_ok", "pass", "/usr/bin/cc"),
    ("compiler", facts(toolchain__cc=None), "compiler_missing", "fail", "no cc"),
    ("compiler", facts(toolchain__cxx=None), "compiler_missing", "fail", "no c++"),
    ("ninja", facts(), "ninja_ok", "pass", "/usr/bin/ninja"),
    ("ninja", facts(toolchain__ninja=None), "ninja_missing", "fail", "no ninja"),
    (
        "ninja",
        facts(toolchain__ninja=given.ENGINE_ROOT + "/venv/bin/ninja"),
        "ninja_not_on_path",
        "fail",
        "venv/bin/ninja",
    ),
    (
        "ninja",
        facts(
            toolchain__ninja=given.ENGINE_ROOT + "/venv/bin/ninja", unit_path=given.ENGINE_ROOT + "/venv/bin:/usr/bin"
        ),
        "ninja_ok",
        "pass",
        "",
    ),
    ("python_headers", facts(), "headers_ok", "pass", "python3.13"),
    (
        "python_headers",
        facts(toolchain__python_header=None),
        "headers_missing",
        "fail",
        "/usr/include/python3.13/Python.h",
    ),
    ("python_headers", facts(toolchain__python_include=None), "headers_unknown", "unknown", "bin/python"),
    ("cuda_home", facts(), "cuda_home_ok", "pass", given.CUDA),
    ("cuda_home", facts(toolchain__cuda_home=None), "cuda_home_missing", "fail", "no CUDA_HOME"),
    ("cuda_home", facts(toolchain__cuda_home_exists=False), "cuda_home_missing", "fail", given.CUDA),
    ("cuda_home", facts(toolchain__cuda_home="cuda"), "cuda_home_malformed", "fail", "'cuda'"),
    ("cuda_home", facts(toolchain__cuda_home="/a:/b"), "cuda_home_malformed", "fail", "/a:/b"),
    ("cuda_home", facts(toolchain__cuda_home="/usr/local/cuda "), "cuda_home_malformed", "fail", "/usr/local/cuda "),
    ("cuda_home", facts(toolchain__cuda_home="/usr/local/cuda/bin/"), "cuda_home_malformed", "fail", "bin"),
    ("cuda_home", facts(toolchain__cuda_home_source="venv"), "cuda_home_not_in_unit", "warn", "venv"),
    ("nvcc", facts(), "nvcc_ok", "pass", "13.0"),
    ("nvcc", facts(toolchain__nvcc__path=None), "nvcc_missing", "fail", given.CUDA + "/bin/nvcc"),
    ("nvcc", facts(toolchain__nvcc__release=None), "nvcc_unreadable", "fail", "bin/nvcc"),
    ("nvcc_driver", facts(), "nvcc_not_newer", "pass", "13.0"),
    ("nvcc_driver", facts(toolchain__nvcc__release=[13, 4]), "nvcc_newer_than_driver", "fail", "nvcc CUDA 13.4"),
    ("nvcc_driver", facts(toolchain__nvcc__release=[13, 10]), "nvcc_newer_than_driver", "fail", "13.10"),
    ("nvcc_driver", facts(toolchain__nvcc__release=[12, 9], driver_cuda=[12, 10]), "nvcc_not_newer", "pass", "12.10"),
    ("nvcc_driver", facts(driver_cuda=None), "nvcc_driver_unknown", "unknown", "driver CUDA unknown"),
    ("nvcc_driver", facts(toolchain__nvcc__release=None), "nvcc_driver_unknown", "unknown", "nvcc CUDA unknown"),
    ("cudart_link", facts(), "cudart_ok", "pass", "libcudart.so"),
    ("cudart_link", facts(toolchain__cudart__state="missing"), "cudart_missing", "fail", "lib64/libcudart.so"),
    ("cudart_link", facts(toolchain__cudart__state="dangling"), "cudart_dangling", "fail", "dangling"),
    ("host_compiler", facts(), "host_compiler_ok", "pass", "gcc 12"),
    ("host_compiler", facts(toolchain__host_compiler__major=16), "gcc_too_new", "fail", "gcc 16"),
    ("host_compiler", facts(toolchain__host_compiler__major=15), "host_compiler_ok", "pass", "gcc 15"),
    ("host_compiler", facts(toolchain__host_compiler__family="clang"), "host_compiler_ok", "pass", "clang"),
    ("host_compiler", facts(toolchain__gcc_limit=None), "host_compiler_unknown", "unknown", "limit None"),
    ("compile", facts(), "compile_ok", "pass", "as vllm"),
    ("compile", facts(toolchain__compile__user=None), "compile_ok", "pass", "another user"),
    (
        "compile",
        facts(toolchain__compile={"state": "failed", "output": "ld: cannot find -lcudart", "user": "vllm"}),
        "compile_failed",
        "fail",
        "-lcudart",
    ),
    (
        "compile",
        facts(toolchain__compile={"state": "not_run", "output": "", "user": None}),
        "compile_not_run",
        "unknown",
        "",
    ),
    ("memory", facts(), "memory_ok", "pass", "197000000 KiB"),
    ("memory", facts(memory__total_kib=72351743), "memory_below_floor", "fail", "72351743 KiB"),
    ("memory", facts(memory__total_kib=72351744), "memory_below_recommended", "warn", "72351744 KiB"),
    ("memory", facts(memory__total_kib=100663295), "memory_below_recommended", "warn", "100663296 KiB"),
    ("memory", facts(memory__total_kib=100663296), "memory_ok", "pass", ""),
    (
        "memory",
        facts(memory__limit_kib=1000, memory__limit_source="/sys/fs/cgroup/memory.max"),
        "memory_below_floor",
        "fail",
        "memory.max",
    ),
    ("memory", facts(memory__limit_kib=300000000), "memory_ok", "pass", "197000000"),
    ("memory", facts(memory__total_kib=None), "memory_unknown", "unknown", ""),
    ("shared_memory", facts(), "shm_ok", "pass", "/dev/shm"),
    (
        "shared_memory",
        facts(shared_memory={"total_kib": 65536, "available_kib": 65536}),
        "shm_too_small",
        "fail",
        "64 MiB",
    ),
    (
        "shared_memory",
        facts(shared_memory={"total_kib": 2097152, "available_kib": 1048575}),
        "shm_occupied",
        "fail",
        "1024 MiB of 2.0 GiB",
    ),
    ("shared_memory", facts(shared_memory=None), "shm_unknown", "unknown", ""),
    ("disk", facts(), "disk_ok", "pass", "/var/cache/vllm-fleet/main"),
    ("disk", facts(cache__available_kib=1048575), "disk_full", "fail", "1024 MiB free"),
    ("disk", both(spec(needs__disk_kib=None), facts(cache__available_kib=524287)), "disk_full", "fail", "524288 KiB"),
    ("disk", both(spec(needs__disk_kib=None), facts(cache__available_kib=524288)), "disk_ok", "pass", ""),
    ("disk", both(spec(needs__disk_kib=65536), facts(cache__available_kib=65536)), "disk_ok", "pass", ""),
    ("disk", facts(cache__available_kib=None), "disk_unknown", "unknown", ""),
    ("service_user", facts(), "user_ok", "pass", "990"),
    ("service_user", facts(user=None), "user_missing", "fail", "no user vllm"),
    ("cache", facts(), "cache_ok", "pass", "ext4"),
    ("cache", facts(cache__exists=False, cache__kind="missing"), "cache_created_at_start", "pass", ""),
    (
        "cache",
        both(spec(cache_root="/fast/e1"), facts(cache__exists=False, cache__kind="missing", cache__path="/fast/e1")),
        "cache_missing",
        "fail",
        "/fast/e1",
    ),
    ("cache", facts(cache__kind="file"), "cache_not_a_directory", "fail", "is a file"),
    ("cache", facts(cache__options=["relatime", "ro"]), "cache_read_only", "fail", "read-only"),
    ("cache", facts(cache__options=["rw", "noexec"]), "cache_noexec", "fail", "noexec"),
    ("cache", facts(access={"/var/cache/vllm-fleet/main": "rx"}), "cache_not_writable", "fail", "vllm cannot write"),
    ("cache", facts(access={"/var/cache/vllm-fleet/main": "rw"}), "cache_not_writable", "fail", "vllm cannot write"),
    ("cache", facts(access={"/var/cache/vllm-fleet/main": "wx"}), "cache_ok", "pass", ""),
    ("cache", facts(access=None), "cache_unknown", "unknown", "not tested"),
    ("cache", facts(cache__type="tmpfs"), "cache_in_memory", "warn", "tmpfs"),
    ("cache", facts(cache__type="nfs4"), "cache_on_network", "warn", "nfs4"),
    ("cache_key", facts(), "cache_keyed", "pass", "chosen at the start"),
    ("cache_key", spec(cache_root="/fast/e1/cache"), "cache_keyed", "pass", "/fast/e1/cache"),
    ("cache_key", spec(cache_root="/fast/cache"), "cache_not_keyed", "warn", "/fast/cache"),
    ("log", facts(), "log_ok", "pass", "main.log"),
    ("log", both(spec(log=""), facts(log=None)), "log_journal", "pass", "journal"),
    ("log", facts(log__kind="directory"), "log_not_a_file", "fail", "is a directory"),
    (
        "log",
        facts(log__exists=False, log__kind="missing", log__nearest="/var/log"),
        "log_directory_missing",
        "fail",
        "no directory /var/log/vllm-fleet",
    ),
    (
        "log",
        facts(log__exists=False, log__kind="missing", log__nearest="/var/log/vllm-fleet"),
        "log_ok",
        "pass",
        "",
    ),
    ("log", facts(log__options=["ro"]), "log_read_only", "fail", "read-only"),
    ("log", facts(log__available_kib=16383), "log_disk_full", "fail", "main.log"),
    ("workdir", facts(), "workdir_ok", "pass", WORKDIR),
    ("workdir", facts(workdir__kind="missing"), "workdir_missing", "fail", WORKDIR),
    ("workdir", facts(access={WORKDIR: "r"}), "workdir_not_enterable", "fail", "cannot enter"),
    ("port", facts(), "port_free", "pass", "8000"),
    ("port", facts(listeners=[listener("127.0.0.1", given.UNIT_CGROUP)]), "port_own", "pass", "own unit"),
    (
        "port",
        facts(listeners=[listener("0.0.0.0", "/user.slice")]),
        "port_occupied",
        "fail",
        "pid 4242 (python3 -m http.server",
    ),
    ("port", facts(listeners=[listener("::", "/user.slice")]), "port_occupied", "fail", "4242"),
    ("port", facts(listeners=[listener("::ffff:127.0.0.1", "/")]), "port_occupied", "fail", "4242"),
    ("port", facts(listeners=[listener("192.0.2.7", "/user.slice")]), "port_free", "pass", ""),
    ("port", facts(listeners=[listener("::1", "/user.slice")]), "port_free", "pass", ""),
    ("port", both(spec(host="::"), facts(listeners=[listener("127.0.0.1", "/")])), "port_occupied", "fail", ""),
    ("port", both(spec(host="0.0.0.0"), facts(listeners=[listener("192.0.2.7", "/")])), "port_occupied", "fail", ""),
    (
        "port",
        facts(listeners=[listener("127.0.0.1", given.UNIT_CGROUP.replace("main", "other"))]),
        "port_occupied",
        "fail",
        "vllm@other.service",
    ),
    ("port", facts(listeners=[listener("127.0.0.1", None, None)]), "port_occupied", "fail", "pid unknown"),
    ("port", facts(listeners=None), "port_unknown", "unknown", ""),
    ("exposure", facts(), "loopback", "pass", "127.0.0.1"),
    ("exposure", spec(host="localhost"), "loopback", "pass", ""),
    ("exposure", spec(host="::1"), "loopback", "pass", ""),
    ("exposure", spec(host="0.0.0.0"), "public_without_key", "fail", "0.0.0.0"),
    ("exposure", spec(host="gpu-01.example.net"), "public_without_key", "fail", "gpu-01"),
    ("exposure", spec(host="0.0.0.0", env={"VLLM_API_KEY": "s3cret"}), "public_with_key", "warn", "/v1 routes only"),
    (
        "exposure",
        both(spec(host="10.0.0.5", api_key_file="/etc/k"), facts(api_key_present=True)),
        "public_with_key",
        "warn",
        "10.0.0.5",
    ),
    ("exposure", spec(api_key_file="/etc/k"), "api_key_unusable", "fail", "/etc/k"),
    ("scheduler_numbers", facts(), "numbers_ok", "pass", ""),
    ("scheduler_numbers", argument("--max-num-seqs", "08"), "number_invalid", "fail", "'08'"),
    ("scheduler_numbers", argument("--max-num-seqs", "010"), "number_invalid", "fail", "'010'"),
    ("scheduler_numbers", argument("--max_num_seqs", "0"), "number_invalid", "fail", "--max-num-seqs '0'"),
    ("scheduler_numbers", argument("--max-num-seqs", "4.0"), "number_invalid", "fail", "'4.0'"),
    ("scheduler_numbers", argument("--max-num-seqs", ""), "number_invalid", "fail", "''"),
    ("scheduler_numbers", argument("--max-num-seqs", "٤"), "number_invalid", "fail", ""),
    ("scheduler_numbers", argument("--max-model-len", "auto"), "numbers_ok", "pass", ""),
    ("scheduler_numbers", argument("--max-num-batched-tokens", "2k"), "numbers_ok", "pass", ""),
    ("scheduler_numbers", argument("--max-num-batched-tokens", "-1"), "number_invalid", "fail", "'-1'"),
    ("scheduler_numbers", argument("--max-num-batched-tokens", "1"), "batched_tokens_below_sequences", "fail", "below"),
    ("scheduler_numbers", argument("--max-num-batched-tokens", "2"), "numbers_ok", "pass", ""),
    ("kv_pool", facts(), "pool_ok", "pass", "924993"),
    ("kv_pool", spec(readiness__log_lines=[]), "pool_unnamed", "pass", ""),
    ("kv_pool", spec(readiness__log_lines=["GPU KV cache size: 524,288 tokens"]), "pool_ok", "pass", "524288"),
    ("kv_pool", spec(readiness__log_lines=["GPU KV cache size: 524,287 tokens"]), "pool_preempts", "warn", "524287"),
    ("kv_pool", argument("--max-num-seqs", "4"), "pool_preempts", "warn", "1048576"),
    ("kv_pool", argument("--max-model-len", "1M"), "context_exceeds_pool", "fail", "1048576"),
    ("start_deadline", facts(), "deadline_ok", "pass", "1800"),
    ("start_deadline", spec(readiness__deadline_s=90), "deadline_short", "warn", "90 s"),
    ("start_deadline", spec(env__VLLM_PLE_OFFLOAD_READY_TIMEOUT="3600"), "deadline_short", "warn", "3600 s"),
    ("visible_devices", facts(), "devices_ok", "pass", ""),
    ("visible_devices", spec(env__CUDA_VISIBLE_DEVICES="0, 1"), "devices_ok", "pass", ""),
    ("visible_devices", spec(env__CUDA_VISIBLE_DEVICES="GPU-aa"), "devices_not_indices", "fail", "GPU-aa"),
    ("gpus_readable", facts(), "gpus_ok", "pass", "610.43.02"),
    ("gpus_readable", facts(topology__gpus=[]), "gpus_none", "fail", ""),
    ("gpus_readable", facts(topology=None), "gpus_unreadable", "unknown", ""),
    (
        "gpus_readable",
        facts(topology__gpus=None, topology__extra={"status": "driver_not_loaded", "message": "Driver Not Loaded"}),
        "driver_not_loaded",
        "fail",
        "Driver Not Loaded",
    ),
    (
        "gpus_readable",
        facts(topology__gpus=None, topology__extra={"status": "library_missing", "message": "no libnvidia-ml.so.1"}),
        "driver_library_missing",
        "fail",
        "libnvidia-ml",
    ),
    (
        "gpus_readable",
        facts(topology__gpus=None, topology__extra={"status": "timeout", "message": "no answer within 20 s"}),
        "gpus_unreadable",
        "unknown",
        "20 s",
    ),
    ("topology", facts(), "topology_ok", "pass", "GPUs 0,1"),
    (
        "topology",
        facts(decision={"status": "refused", "reason": "too_few_gpus", "message": "2 of 4 GPUs"}),
        "topology_refused",
        "fail",
        "too_few_gpus",
    ),
    (
        "topology",
        facts(decision={"status": "refused", "reason": "facts_unknown", "message": "NVML"}, topology__gpus=None),
        "topology_refused_unread",
        "fail",
        "facts_unknown",
    ),
    (
        "topology",
        facts(decision__warnings=[{"code": "acs_enabled", "message": "ACS is on"}]),
        "topology_doubt",
        "warn",
        "acs_enabled",
    ),
    ("topology", facts(decision__warnings=[{"code": "display_attached", "message": "x"}]), "topology_ok", "pass", ""),
    ("topology", facts(decision=None), "topology_unknown", "unknown", ""),
    ("driver_match", facts(), "driver_match_ok", "pass", "610.43.02"),
    (
        "driver_match",
        facts(topology__driver=OLD_DRIVER),
        "driver_mismatch",
        "fail",
        "module 595.84, libraries 610.43.02",
    ),
    (
        "driver_match",
        facts(
            topology__driver={"loaded": "460.56", "userland": None, "cuda": None},
            topology__extra={"status": "driver_mismatch", "message": ""},
        ),
        "driver_mismatch",
        "fail",
        "460.56",
    ),
    ("driver_match", facts(topology__driver__userland=None), "driver_unknown", "unknown", "libraries unknown"),
    ("driver_cuda", facts(), "driver_cuda_ok", "pass", "13.3"),
    ("driver_cuda", facts(driver_cuda=[12, 9]), "driver_cuda_too_old", "fail", "12.9"),
    (
        "driver_cuda",
        both(spec(needs__driver_cuda=[12, 9]), facts(driver_cuda=[12, 10])),
        "driver_cuda_ok",
        "pass",
        "12.10",
    ),
    ("driver_cuda", facts(driver_cuda=None), "driver_cuda_unknown", "unknown", ""),
    ("nouveau", facts(), "nouveau_absent", "pass", ""),
    ("driver_next_boot", facts(), "next_boot_ok", "pass", "6.1.0-57-amd64"),
    (
        "driver_next_boot",
        facts(driver__reboot_required=True, driver__reasons=["loaded_differs"]),
        "reboot_due",
        "warn",
        "",
    ),
    (
        "driver_next_boot",
        facts(driver__next_boot=None, driver__reboot_blocked=["next_boot_module_missing"]),
        "next_boot_without_driver",
        "warn",
        "none",
    ),
    ("driver_next_boot", facts(driver__reboot_blocked=["next_boot_unknown"]), "next_boot_unknown", "unknown", ""),
    ("driver_next_boot", facts(driver=None), "next_boot_unknown", "unknown", ""),
    ("nouveau", facts(kernel_modules=["nouveau", "ttm"]), "nouveau_loaded", "fail", "nouveau"),
    ("nouveau", facts(topology__extra={"pci": [{"bus_id": "0", "driver": "nouveau"}]}), "nouveau_loaded", "fail", ""),
    (
        "nouveau",
        facts(kernel_modules=None, topology__extra={"pci": [{"bus_id": "0", "driver": "nvidia"}]}),
        "nouveau_absent",
        "pass",
        "",
    ),
    ("nouveau", facts(kernel_modules=None), "nouveau_unknown", "unknown", ""),
    ("gpu_processes", facts(), "gpus_free", "pass", "2 GPUs"),
    (
        "gpu_processes",
        facts(
            topology__gpus__0__processes=[process(77, "blender")],
            processes={"77": {"command": "blender", "cgroup": "/u"}},
        ),
        "gpu_occupied",
        "fail",
        "pid 77 (blender)",
    ),
    (
        "gpu_processes",
        facts(
            topology__gpus__1__processes=[process(88, "python")],
            processes={"88": {"command": "VLLM::Worker_TP1", "cgroup": "/init.scope"}},
        ),
        "gpu_orphan",
        "fail",
        "pid 88 (VLLM::Worker_TP1) on GPU 1",
    ),
    (
        "gpu_processes",
        facts(
            topology__gpus__0__processes=[process(99, "VLLM::Worker")],
            processes={"99": {"command": "VLLM::Worker", "cgroup": given.UNIT_CGROUP.replace("main", "other")}},
        ),
        "gpu_occupied",
        "fail",
        "pid 99",
    ),
    (
        "gpu_processes",
        facts(
            topology__gpus__0__processes=[process(99, "VLLM::Worker")],
            processes={"99": {"command": "VLLM::Worker", "cgroup": given.UNIT_CGROUP}},
        ),
        "gpus_free",
        "pass",
        "",
    ),
    (
        "gpu_processes",
        both(spec(policy__allow_busy=True), facts(topology__gpus__0__processes=[process(77, "blender", None)])),
        "gpu_shared",
        "warn",
        "pid 77",
    ),
    ("gpu_processes", facts(topology__gpus__0__processes=None), "gpu_processes_unknown", "unknown", "GPU 0"),
    ("gpu_processes", facts(topology=None), "gpu_processes_unknown", "unknown", ""),
    ("gpu_memory", facts(), "gpu_memory_ok", "pass", "2 GPUs"),
    (
        "gpu_memory",
        facts(topology__gpus__1__memory_used_mib=966),
        "gpu_memory_short",
        "fail",
        "23158 of 24124 MiB free on GPU 1",
    ),
    ("gpu_memory", facts(topology__gpus__1__memory_used_mib=965), "gpu_memory_ok", "pass", ""),
    ("gpu_memory", facts(topology__gpus__1__memory_used_mib=None), "gpu_memory_unknown", "unknown", "GPU 1"),
    ("gpu_memory", facts(topology=None), "gpu_memory_unknown", "unknown", ""),
    (
        "gpu_memory",
        both(argument("--gpu-memory-utilization", "x"), facts(topology__gpus__0__memory_used_mib=2125)),
        "gpu_memory_short",
        "fail",
        "22000 MiB",
    ),
    ("box_address", facts(), "address_here", "pass", "10.0.0.11 is on eth1"),
    ("box_address", facts(interface=""), "address_not_here", "fail", "10.0.0.11"),
    ("box_address", facts(interface=None), "interfaces_unknown", "unknown", ""),
    ("rendezvous", facts(), "rendezvous_free", "pass", "29501"),
    (
        "rendezvous",
        facts(rendezvous__peer_port=[listener("10.0.0.11", "/x.service")]),
        "rendezvous_occupied",
        "fail",
        "peer_port 29502",
    ),
    (
        "rendezvous",
        facts(rendezvous__master_port=[listener("127.0.0.1", None)]),
        "rendezvous_occupied",
        "fail",
        "29501",
    ),
    ("rendezvous", facts(rendezvous__peer_port=[listener("10.0.0.99", None)]), "rendezvous_free", "pass", ""),
    ("rendezvous", facts(rendezvous__peer_port=[listener("10.0.0.11", WATCHDOG)]), "rendezvous_free", "pass", ""),
    ("rendezvous", facts(rendezvous__master_port=[listener("0.0.0.0", UNIT)]), "rendezvous_free", "pass", ""),
    ("rendezvous", facts(rendezvous__master_port=None), "rendezvous_unknown", "unknown", ""),
    ("display", facts(), "display_none", "pass", ""),
    ("display", facts(topology__gpus__1__display=True), "display_attached", "warn", "GPU 1"),
    ("display", facts(topology__gpus__1__display=None), "display_unknown", "unknown", ""),
    ("persistence", facts(), "persistence_on", "pass", ""),
    ("persistence", facts(persistence={"GPU-0": True, "GPU-1": False}), "persistence_off", "warn", "GPU-1"),
    ("persistence", facts(persistence={}), "persistence_unknown", "unknown", ""),
]


def evaluate(change: Change) -> List[Dict[str, str]]:
    lane, box = given.wide_lane(), given.box()
    change(lane, box)
    return [verdict.result for verdict in run.evaluate(lane, box)]


def test_nothing_is_wrong_with_the_untouched_box() -> None:
    results = evaluate(facts())
    assert {item["status"] for item in results} == {"pass"}
    assert {item["check"] for item in results} == set(CHECKS)


@pytest.mark.parametrize(
    ("check", "change", "reason", "status", "names"),
    CASES,
    ids=[f"{case[0]}-{case[2]}-{n}" for n, case in enumerate(CASES)],
)
def test_check(check: str, change: Change, reason: str, status: str, names: str) -> None:
    found = given.of(evaluate(change), check)
    assert [(item["reason"], item["status"]) for item in found] == [(reason, status)]
    assert names in found[0]["message"]
    if status == "fail" and reason != "compile_failed":
        assert found[0]["fix"], "a fail says how to mend it"


def test_every_reason_code_is_reached() -> None:
    """The table above covers the documentation: no code that no box can give."""
    reached = {(check, reason) for check, _change, reason, _status, _names in CASES}
    documented = {(name, reason) for name, item in CHECKS.items() for reason in item.codes}
    assert documented == reached


def test_codes_read_as_stable_names() -> None:
    for name, item in CHECKS.items():
        assert name.isidentifier() and name == name.lower()
        assert item.about.endswith("."), name
        for reason in item.codes:
            assert reason.isidentifier() and reason == reason.lower()


def test_checks_that_do_not_apply_give_no_result() -> None:
    """A lane without GPU and compiler shows no GPU and no compiler check at all, least of all a passed one."""
    lane, box = given.cpu_lane(), given.box()
    box.update(toolchain=None, topology=None, decision=None)
    box["engine"]["package"] = True
    box["import_expected"] = box["import_expected"]
    names = {verdict.result["check"] for verdict in run.evaluate(lane, box)}
    groups = {CHECKS[name].group for name in names}
    assert groups == {"engine", "host", "serving"}
    assert "start_deadline" not in names and "visible_devices" not in names


def test_a_headless_member_is_not_asked_about_the_port_it_does_not_open() -> None:
    lane, box = given.wide_lane(), given.box()
    lane["part"]["rank"] = 1
    names = {verdict.result["check"] for verdict in run.evaluate(lane, box)}
    assert set(CHECKS) - names == {"port", "exposure"}


def test_a_lane_on_one_box_has_no_rendezvous() -> None:
    names = {verdict.result["check"] for verdict in run.evaluate(given.lane(), given.box())}
    assert set(CHECKS) - names == {"box_address", "rendezvous"}


def test_each_foreign_process_is_named() -> None:
    found = given.of(evaluate(facts(topology__gpus__0__processes=[process(7, "a"), process(8, "b")])), "gpu_processes")
    assert [item["message"].split()[1] for item in found] == ["7", "8"]


def test_only_the_lane_s_own_gpus_count() -> None:
    """The decision gives the lane GPU 0; what runs on GPU 1 is another lane's affair."""
    change = facts(decision__order=[0], topology__gpus__1__processes=[process(7, "a")])
    assert given.of(evaluate(change), "gpu_processes")[0]["reason"] == "gpus_free"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"gpus": ["1"]}, [1]),
        ({"gpus": ["GPU-0"]}, [0]),
        ({"exclude": ["0"]}, [1]),
        ({"exclude": ["GPU-1"]}, [0]),
        ({}, [0, 1]),
    ],
)
def test_without_a_decision_the_policy_says_which_gpus_count(policy: Dict[str, Any], expected: List[int]) -> None:
    lane, box = given.lane(), given.box()
    lane["policy"].update(policy)
    box["decision"] = None
    assert [item["index"] for item in gpu.lane_gpus(lane, box)] == expected
