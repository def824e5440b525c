"""Runs the ranks of a P2P check in the engine's Python, with and without P2P, under hard time limits."""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

from . import p2p_worker, verdict  # the worker is imported so that Ansible packs it into a module
from .engine_python import EnginePython, environment

#: backend -> elements of float32: one payload that NCCL sends in its low-latency way, one of 168 MB; gloo has one way
#: only, and on a CPU that is busy the large one can take longer than a pair may
SIZES = {"nccl": (4096, 41943040), "gloo": (4096, 65536)}

#: seconds; importing torch from a cold disk is the slow part of a start
START_S, PAIR_S = 180.0, 60.0

#: arm -> what it sets; P2P as the driver grants it is what an engine with a `SYS` decision would use
ARMS: Dict[str, Dict[str, str]] = {"control": {"NCCL_P2P_DISABLE": "1"}, "found": {"NCCL_P2P_LEVEL": "SYS"}}
_P2P_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_P2P_DIRECT_DISABLE", "NCCL_IGNORE_DISABLED_P2P")

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_TEST_FAULT = "VLLM_FLEET_P2P_TEST_FAULT"  # read by the worker, in the arm with P2P only


class Launcher(NamedTuple):
    """How ranks are started: whose Python, on which GPUs (see :func:`.engine_python.devices`), with which limits."""

    engine: EnginePython
    devices: Sequence[str]
    backend: str = "nccl"
    sizes: Sequence[int] = SIZES["nccl"]
    start_s: float = START_S
    pair_s: float = PAIR_S

    def environment(self, arm: str) -> Dict[str, str]:
        """Return a rank's environment. Every rank sees all cards: NCCL uses no P2P with a peer that it can't see."""
        env = {name: value for name, value in environment(self.engine).items() if name not in _P2P_VARIABLES}
        env.update(CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES=",".join(self.devices), PYTHONUNBUFFERED="1")
        # Multicast through an NVSwitch is another path than the one between two cards, and not what is proven here.
        env.update(ARMS[arm], NCCL_NVLS_ENABLE="0")
        if arm == "found" and _TEST_FAULT in os.environ:
            env[_TEST_FAULT] = os.environ[_TEST_FAULT]
        return env


def check(launcher: Launcher, pairs: Sequence[str]) -> Dict[str, Dict[str, Any]]:
    """Check pairs of local ranks such as ``0-1``; return ``{pair: {"status", "reason", "message", "arms"}}``."""
    control = run_arm(launcher, "control", pairs)
    sound = [pair for pair in pairs if control[pair]["outcome"] == "equal"]
    found = run_arm(launcher, "found", sound)
    results = {}
    for pair in pairs:
        status, reason, message = verdict.judge(control[pair], found.get(pair))
        arms = {"control": control[pair], "found": found.get(pair)}
        results[pair] = {"status": status, "reason": reason, "message": message, "arms": arms}
    return results


def run_arm(launcher: Launcher, arm: str, pairs: Sequence[str]) -> Dict[str, Dict[str, Any]]:
    """Run one arm over all pairs; a pair that hangs or crashes ends a launch, and the rest gets a new one."""
    outcomes: Dict[str, Dict[str, Any]] = {}
    left = list(pairs)
    while left:
        done = _launch(launcher, arm, left)
        outcomes.update(done)
        left = [pair for pair in left if pair not in done]
    return outcomes


def _launch(launcher: Launcher, arm: str, pairs: Sequence[str]) -> Dict[str, Dict[str, Any]]:
    """Start all ranks and follow them; return the outcome of at least the first pair."""
    source = pkgutil.get_data(__package__ or "", os.path.basename(p2p_worker.__file__ or "p2p_worker.py"))
    if source is None:
        raise RuntimeError("p2p_worker.py is not in the package")
    directory = tempfile.mkdtemp(prefix="vllm-fleet-p2p.")
    ranks: List[subprocess.Popen[bytes]] = []
    try:
        if launcher.engine.account:
            os.chown(directory, launcher.engine.account["uid"], launcher.engine.account["gid"])
        for rank in range(len(launcher.devices)):
            with open(os.path.join(directory, f"stderr.{rank}"), "wb") as errors:
                ranks.append(
                    subprocess.Popen(
                        [
                            launcher.engine.python,
                            "-c",
                            source.decode(),
                            str(rank),
                            str(len(launcher.devices)),
                            os.path.join(directory, "rendezvous"),
                            launcher.backend,
                            ",".join(pairs),
                            ",".join(str(size) for size in launcher.sizes),
                        ],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        env=launcher.environment(arm),
                        cwd=directory,
                        start_new_session=True,
                        preexec_fn=launcher.engine.become,  # noqa: PLW1509 - no threads here
                    )
                )
        return _follow(ranks, pairs, launcher, directory)
    except OSError as error:
        return {
            pair: {"outcome": "not_started", "detail": f"{launcher.engine.python}: {error.strerror}"} for pair in pairs
        }
    finally:
        _kill(ranks)
        shutil.rmtree(directory, ignore_errors=True)


def _follow(
    ranks: List[subprocess.Popen[bytes]], pairs: Sequence[str], launcher: Launcher, directory: str
) -> Dict[str, Dict[str, Any]]:
    outcomes: Dict[str, Dict[str, Any]] = {}
    said: Dict[str, List[Dict[str, Any]]] = {pair: [] for pair in pairs}
    buffers = [b"" for _ in ranks]
    ready, late, killed = 0, False, ""
    deadline = time.monotonic() + launcher.start_s
    with selectors.DefaultSelector() as selector:
        for number, rank in enumerate(ranks):
            if rank.stdout is not None:
                selector.register(rank.stdout, selectors.EVENT_READ, number)
        while selector.get_map() and len(outcomes) < len(pairs) and not killed:
            events = selector.select(max(0.0, deadline - time.monotonic()))
            late = not events
            if late:
                break
            for key, _ in events:
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fileobj)
                    killed = killed or _killed_by(ranks[key.data])
                    continue
                *lines, buffers[key.data] = (buffers[key.data] + chunk).split(b"\n")
                for line in map(_parse, lines):
                    if line.get("ready") is True:
                        ready += 1
                        deadline = time.monotonic() + (launcher.pair_s if ready == len(ranks) else launcher.start_s)
                    elif line.get("pair") in said:
                        said[line["pair"]].append(line)
            for pair in pairs:
                if pair not in outcomes and (len(said[pair]) == 2 or _broken(said[pair])):
                    outcomes[pair] = _join(said[pair])
                    deadline = time.monotonic() + launcher.pair_s
    if killed and len(outcomes) < len(pairs):
        pair = next(pair for pair in pairs if pair not in outcomes)
        return {**outcomes, pair: {"outcome": "killed", "detail": killed}}
    return _account_for_rest(outcomes, pairs, ranks, ready, late, directory, launcher)


def _killed_by(rank: subprocess.Popen[bytes]) -> str:
    """Return which signal of a person, or of the kernel when memory is short, ended a rank; empty when none did.

    Its partner would wait for it for ever, which is not the link's fault. What a library does to itself (SIGABRT,
    SIGSEGV, SIGBUS) is an error.
    """
    try:
        status = rank.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return ""
    return f"a rank got {signal.Signals(-status).name}" if -status in _FROM_OUTSIDE else ""


def _account_for_rest(
    outcomes: Dict[str, Dict[str, Any]],
    pairs: Sequence[str],
    ranks: List[subprocess.Popen[bytes]],
    ready: int,
    late: bool,
    directory: str,
    launcher: Launcher,
) -> Dict[str, Dict[str, Any]]:
    """Say what became of the pair at which the ranks stopped; later ones are left for another launch."""
    rest = [pair for pair in pairs if pair not in outcomes]
    if not rest or any(outcome["outcome"] == "error" for outcome in outcomes.values()):
        return outcomes
    if ready < len(ranks):
        detail = (
            f"{ready} of {len(ranks)} ranks were ready after {launcher.start_s:g} s" if late else _errors(directory)
        )
        return {**outcomes, **{pair: {"outcome": "not_started", "detail": detail} for pair in rest}}
    if late:
        outcomes[rest[0]] = {"outcome": "hang", "detail": f"no answer within {launcher.pair_s:g} s"}
    else:
        outcomes[rest[0]] = {"outcome": "error", "detail": _errors(directory)}
    return outcomes


def _parse(line: bytes) -> Dict[str, Any]:
    """Return a rank's line; anything else that a library prints is an empty one."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _broken(lines: Sequence[Mapping[str, Any]]) -> bool:
    return any(line.get("outcome") == "error" for line in lines)


def _join(lines: Sequence[Mapping[str, Any]]) -> Dict[str, Any]:
    """Return the worse of what two ranks say, with the time of the slower one for each size."""
    for outcome in ("error", "wrong_data"):
        for line in lines:
            if line.get("outcome") == outcome:
                return {"outcome": outcome, "detail": str(line.get("detail", ""))}
    sizes = [dict(line.get("milliseconds") or {}) for line in lines]
    return {
        "outcome": "equal",
        "milliseconds": {size: max(one[size] for one in sizes if size in one) for size in sizes[0]},
    }


def _errors(directory: str) -> str:
    """Return the last line that a rank wrote on stderr."""
    for name in sorted(os.listdir(directory)):
        if name.startswith("stderr."):
            with open(os.path.join(directory, name), encoding="utf-8", errors="replace") as handle:
                lines = [line.strip() for line in handle if line.strip()]
            if lines:
                return lines[-1][:300]
    return "a rank ended without a word"


def _kill(ranks: List[subprocess.Popen[bytes]]) -> None:
    """End the process groups; a rank that the kernel holds is left behind after five seconds."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            os.killpg(rank.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(timeout=max(0.01, deadline - time.monotonic()))
        if rank.stdout is not None:
            rank.stdout.close()
