"""``vllm-fleet probe``: one small computation on each free GPU, in the engine's Python, under a time limit."""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import signal
import subprocess
import time
from typing import Any, Dict, List

from .. import checks, engine_python
from ..errors import RefusedError
from ..facts import collect

_BUSY_MIB = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lane", help="use this lane's engine; default the only lane of the box")
    parser.add_argument("--python", metavar="FILE", help="use this interpreter (with torch) instead of a lane's engine")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu computes on the CPU, for a lab")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="for each card, torch's import included"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print one result a card; 0 without a fail, 1 with one, 3 when the cards can't be read."""
    engine = engine_python.find(args.lane, args.python)
    facts = collect.read()
    if not facts["gpus"]:
        message = facts["extra"]["message"] or "no GPU is visible"
        raise RefusedError("gpus_unreadable", f"nothing to probe: {message}", "vllm-fleet doctor says more")
    results = probe(facts, engine, args.device, args.timeout)
    if args.json:
        print(json.dumps({"results": results}, sort_keys=True))
    else:
        print(*checks.lines(results), sep="\n")
    return checks.exit_code(results)


def probe(
    facts: Dict[str, Any], engine: engine_python.EnginePython, device: str, timeout: float
) -> List[checks.Result]:
    """Probe all free cards at once; a card that is busy, lost or in MIG mode is left alone and ``unknown``."""
    source = (pkgutil.get_data((__package__ or "").rpartition(".")[0], "probe_worker.py") or b"").decode()
    started: Dict[int, Any] = {}
    results: Dict[int, checks.Result] = {}
    deadline = time.monotonic() + timeout
    for gpu, visible in zip(facts["gpus"], engine_python.devices(facts)):
        reason = _unfit(gpu)
        if reason:
            results[gpu["index"]] = _result(gpu, checks.UNKNOWN, reason, "not probed")
            continue
        env = {**engine_python.environment(engine), "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}
        try:
            started[gpu["index"]] = subprocess.Popen(
                [engine.python, "-c", source, device],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                cwd="/",
                start_new_session=True,
                preexec_fn=engine.become,  # noqa: PLW1509 - no threads here
            )
        except OSError as error:
            results[gpu["index"]] = _result(gpu, checks.UNKNOWN, "not_started", f"{engine.python}: {error.strerror}")
    for gpu in facts["gpus"]:
        if gpu["index"] in started:
            results[gpu["index"]] = _wait(gpu, started[gpu["index"]], deadline, timeout)
    return [results[index] for index in sorted(results)]


def _unfit(gpu: Dict[str, Any]) -> str:
    if gpu["health"] == "lost":
        return "gpu_lost"
    if gpu["mig"]:
        return "mig_enabled"
    # CoreX's table may hide the processes; then the memory alone tells
    used = gpu["memory_used_mib"]
    return "gpu_busy" if gpu["processes"] or used is None or used > _BUSY_MIB else ""


def _wait(gpu: Dict[str, Any], process: subprocess.Popen[bytes], deadline: float, timeout: float) -> checks.Result:
    try:
        out, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _kill(process)
        message = f"no result within {timeout:g} s"
        fix = "reset or power-cycle the card, and look for its errors in the kernel log"
        return _result(gpu, checks.FAIL, "probe_hang", message, fix)
    try:
        answer = json.loads(out.splitlines()[-1]) if out.strip() else {}
    except ValueError:
        answer = {}
    if answer.get("outcome") == "right":
        return _result(
            gpu, checks.PASS, "probe_right", f"right in {answer['milliseconds']} ms (torch {answer['torch']})"
        )
    if answer.get("outcome") == "wrong":
        return _result(gpu, checks.FAIL, "probe_wrong", "the product is wrong", "take the card out of service")
    lines = errors.decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit status {process.returncode}")
    detail = str(answer.get("detail") or last)[:300]
    if any(words in detail for words in ("No module named", "ImportError", "not compiled with CUDA")):
        return _result(gpu, checks.UNKNOWN, "not_started", detail, "name an interpreter whose torch can use the cards")
    return _result(gpu, checks.FAIL, "probe_error", detail, "look for the card's errors in the kernel log")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the group, without waiting for a process that the kernel holds."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=2)
    except (OSError, subprocess.TimeoutExpired):
        pass


def _result(gpu: Dict[str, Any], status: str, reason: str, message: str, fix: str = "") -> checks.Result:
    return checks.result(
        "gpu_probe", status, reason, f"GPU {gpu['index']} ({gpu['uuid'] or gpu['bus_id']}): {message}", fix
    )
