"""``vllm-fleet wait-ready LANE``: the unit's ExecStartPost. Ends 0 once the engine has answered a completion.

A headless member of a lane that spans boxes answers nobody: it is ready when it has joined the head, and what the head
answers proves them all.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from typing import Any, Dict, List, Optional

from .. import checks, journal, readiness, release, wide
from ..facts import engine_http, ports, units
from ..files import read_json

#: A healthy engine that refuses or fails this many proofs in a row will not get better by waiting.
MAX_REFUSALS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("lane", help="the lane's name")
    parser.add_argument(
        "--pid", type=int, default=int(os.environ.get("MAINPID", "0")), help="give up when this process ends"
    )


def _alive(pid: int) -> bool:
    if pid <= 0:
        return True
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as handle:
            return handle.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def prove(lane: Dict[str, Any], key: Optional[str], timeout: float, concurrent: int = 1) -> List[checks.Result]:
    """Ask for the models, then for completions, at least ``concurrent`` and what the profile wants of them at once."""
    host, port, names = lane["host"], int(lane["port"]), lane["served_names"]
    results = [readiness.judge_models(*engine_http.ask(host, port, "/v1/models", key=key), names)]
    if checks.failed(results):
        return results
    answers: List[checks.Result] = []

    def one() -> None:
        answers.append(readiness.judge_completion(*engine_http.complete(host, port, names[0], key, timeout), names[0]))

    threads = [
        threading.Thread(target=one) for _ in range(max(concurrent, int(lane["readiness"].get("concurrent", 1))))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for item in lane["readiness"].get("golden", []):
        said = engine_http.complete(host, port, names[0], key, timeout, item["prompt"], item.get("max_tokens", 16))
        answers.append(readiness.judge_golden(*said, names[0], item["prompt"], item["answer"]))
    return results + answers


def run(args: argparse.Namespace) -> int:
    """Wait until the lane answers; on failure say the engine's own last error lines."""
    lane = read_json(os.path.join(release.LANES, args.lane, "current", "lane.json"), "lane")
    deadline = time.monotonic() + float(lane["readiness"]["deadline_s"])
    key = os.environ.get("VLLM_API_KEY")
    began = time.monotonic()
    # The engine was executed a moment ago and prints nothing while Python loads: the log from here on is its own.
    offset = units.log_size(lane["log"]) if lane["log"] else 0
    last: List[checks.Result] = []
    refusals = 0
    reason = "not_ready"
    while time.monotonic() < deadline:
        if not _alive(args.pid):
            reason = "engine_exited"
            break
        if not wide.has_api(lane):
            place = lane["part"]
            if ports.connected(place["addresses"][0], place["master_port"]):
                journal.say(f"joined the head on {place['boxes'][0]} after {time.monotonic() - began:.0f} s")
                return 0
            time.sleep(0.5)
            continue
        status, _ = engine_http.ask(lane["host"], int(lane["port"]), "/health", timeout=5)
        if status == 200:
            last = prove(lane, key, timeout=max(5.0, min(300.0, deadline - time.monotonic())))
            if not checks.failed(last):
                last += readiness.judge_log(_log(lane, offset), lane["readiness"].get("log_lines", []))
                if not checks.failed(last):
                    journal.say(f"ready: {last[-1]['message']} after {time.monotonic() - began:.0f} s")
                    return 0
                reason = checks.failed(last)[0]["reason"]
                break
            reason = checks.failed(last)[0]["reason"]
            refusals += 1
            if refusals == MAX_REFUSALS:
                break
        time.sleep(0.5)
    text = _log(lane, offset)
    said = "; ".join(item["message"] for item in checks.failed(last)) or "; ".join(readiness.last_errors(text))
    hint = readiness.stall_hint(text, os.environ)
    journal.say(
        f"{reason}: lane {args.lane} at '{readiness.phase(text)}' after {time.monotonic() - began:.0f} s: {said}"
        + (f". {hint}" if hint else ""),
        "error",
    )
    return 1


def _log(lane: Dict[str, Any], offset: int) -> str:
    return units.read_log(lane["log"], offset) if lane["log"] else units.journal(f"vllm@{lane['lane']}.service")
