"""``vllm-fleet bench LANE``: measure a lane with the engine's own benchmark, and compare with the release before."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List, Mapping, Optional

from .. import bench, checks, engine_python, fleet_report, release, start
from ..errors import FleetError, RefusedError, UsageError
from ..facts import engine_http
from ..facts.host import read_text, under
from ..files import parse_json, read_json, write_atomic
from ..preflight.run import load as load_lane

DIRECTORY = "/var/lib/vllm-fleet/bench"
#: results that are kept of a lane
KEPT = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    usual = bench.Load()
    parser.add_argument("lane", help="name of a lane that is serving")
    parser.add_argument("--prompts", type=int, default=usual.prompts, metavar="N", help="requests (%(default)s)")
    parser.add_argument(
        "--input-tokens", type=int, default=usual.input_tokens, metavar="N", help="of each prompt (%(default)s)"
    )
    parser.add_argument(
        "--output-tokens", type=int, default=usual.output_tokens, metavar="N", help="of each answer (%(default)s)"
    )
    parser.add_argument(
        "--concurrency", type=int, default=usual.concurrency, metavar="N", help="requests at once (%(default)s)"
    )
    parser.add_argument(
        "--warn-percent", type=float, default=20.0, metavar="P", help="warn when slower by more than this (%(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="for the whole run (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print result and comparison; 0 also for a warning, 2 or 3 when nothing could be measured."""
    load = bench.Load(args.prompts, args.input_tokens, args.output_tokens, args.concurrency)
    if min(load) < 1:
        raise UsageError("bad_load", "prompts, tokens and concurrency are whole numbers of at least 1")
    print(
        f"lane {args.lane}: {load.prompts} requests, {load.concurrency} at once; the lane keeps serving others, slower",
        file=sys.stderr,
    )
    result = measure(args.lane, load, args.timeout)
    earlier = bench.choose_earlier(stored(args.lane), result["release"], _previous(args.lane), result["load"])
    keep(result)
    rows, verdict = bench.compare(result, earlier, args.warn_percent / 100)
    if args.json:
        print(json.dumps({"result": result, "before": earlier, "results": [verdict]}, sort_keys=True))
    else:
        print(fleet_report.columns(rows))
        print(f"{verdict['status']} {verdict['reason']}: {verdict['message']}")
        if verdict["fix"]:
            print(f"  fix: {verdict['fix']}")
    return checks.exit_code([verdict])


def measure(lane: str, load: bench.Load, timeout: float) -> bench.Result:
    """Run the engine's benchmark against the lane's current release and return its result.

    :raises FleetError: ``not_current``, ``not_answering``, ``key_missing``, ``bench_failed``, ``requests_failed``.
    """
    data = load_lane(lane)
    name = os.path.basename(os.path.realpath(f"{release.LANES}/{lane}/current"))
    running = (read_text(f"{start.RUN}/{lane}/release") or "").strip()
    if running != name:
        message = f"lane {lane} runs release {running or 'none'}, its current one is {name}"
        raise RefusedError("not_current", message, f"systemctl restart vllm@{lane}")
    key = start.api_key(data)
    status, _ = engine_http.ask(data["host"], int(data["port"]), "/v1/models", key=key)
    if status != 200:
        message = f"lane {lane} answers {status or 'nothing'} at {data['host']}:{data['port']}"
        raise RefusedError("not_answering", message, f"vllm-fleet doctor {lane}")
    raw = _run_engine(data, load, key, timeout)
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    head = {"schema": 1, "lane": lane, "release": name, "engine": data["engine"]["id"], "time": when}
    return {**head, **bench.condense(raw, load)}


def _run_engine(lane: Mapping[str, Any], load: bench.Load, key: Optional[str], timeout: float) -> Dict[str, Any]:
    """Run ``vllm bench serve`` as the service user, with no GPU in sight; return its result file."""
    engine = engine_python.find(lane["lane"], None)
    host = engine_http.connect_host(lane["host"])
    address = f"[{host}]" if ":" in host else host
    with tempfile.TemporaryDirectory(prefix="vllm-fleet-bench.") as directory:
        if engine.account:
            os.chown(directory, engine.account["uid"], engine.account["gid"])
        env = {
            **engine_python.environment(engine), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": directory, "VLLM_CACHE_ROOT": directory, "XDG_CACHE_HOME": directory, "TMPDIR": directory,
            "NO_PROXY": "*", "no_proxy": "*",
        }  # fmt: skip
        if key:
            env["OPENAI_API_KEY"] = key  # where the benchmark looks; a command line is everyone's to read
        argv = [engine.python, "-m", "vllm.entrypoints.cli.main", *bench.arguments(lane, address, load, directory)]
        try:
            done = subprocess.run(
                argv, env=env, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, timeout=timeout, check=False,
                preexec_fn=engine.become,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise FleetError("bench_timeout", f"the benchmark did not end within {timeout:g} s") from None
        said = [line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
        try:
            with open(os.path.join(directory, "result.json"), "rb") as handle:
                raw = parse_json(handle.read(), "result", "the engine's benchmark")
        except OSError:
            last = said[-1][:300] if said else "no word"
            raise FleetError("bench_failed", f"the benchmark ended with {done.returncode}: {last}") from None
    if not isinstance(raw, dict):
        raise FleetError("bad_result", "the engine's result is no object")
    return raw


def _previous(lane: str) -> Optional[str]:
    try:
        return os.path.basename(os.readlink(f"{release.LANES}/{lane}/previous"))
    except OSError:
        return None


def stored(lane: str, root: str = "/") -> List[bench.Result]:
    """Return the lane's stored results, oldest first; a damaged file is left out."""
    directory = under(root, f"{DIRECTORY}/{lane}")
    found = []
    for name in os.listdir(directory) if os.path.isdir(directory) else []:
        try:
            result = read_json(os.path.join(directory, name), "benchmark result")
            bench.compare(result, None, 0.0)
            found.append({**result, "load": dict(result["load"]), "time": str(result["time"])})
        except (FleetError, KeyError, TypeError, ValueError):
            continue
    return sorted(found, key=lambda result: str(result["time"]))


def keep(result: bench.Result, root: str = "/") -> None:
    """Store a result, in the place of an earlier one of the same release; the oldest beyond :data:`KEPT` go."""
    directory = under(root, f"{DIRECTORY}/{result['lane']}")
    os.makedirs(directory, mode=0o755, exist_ok=True)
    text = json.dumps(result, indent=1, sort_keys=True) + "\n"
    write_atomic(os.path.join(directory, f"{result['release']}.json"), text.encode(), mode=0o644)
    for old in stored(result["lane"], root)[:-KEPT]:
        os.unlink(os.path.join(directory, f"{old['release']}.json"))
