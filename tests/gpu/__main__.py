"""Everything that a lane goes through on a box, on this machine's cards and with the vLLM that is installed here.

    PYTHONPATH=module_utils:. python3 -m tests.gpu --engine /path/to/venv

Live facts, decision, preflight, release, the engine's own parser, start, streams, progress, stop with a request in
flight, and a second start with the kept compile cache. It needs root, as the product's own start does, changes no
setting of a card, and leaves nothing behind but its report. What the machine can't show is `not_run`, never passed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections import Counter
from typing import Any

from vllm_fleet import bench as bench_load
from vllm_fleet import checks, engine_check, engine_python, start
from vllm_fleet.commands import bench
from vllm_fleet.errors import FleetError
from vllm_fleet.facts import collect
from vllm_fleet.preflight import run_lane
from vllm_fleet.topology import decide

from . import hardware, place
from .engine import Engine, Stream, adopt_orphans
from .report import NotRunError, Report, StepError

STREAMS, TOKENS = 3, 400
#: what a driver may take more for itself after a first context (MiB)
SLACK_MIB = 64
FREE_WITHIN_S = 15.0

Outcome = tuple[str, dict[str, Any]]


def tensor_parallel(gpus: list[dict[str, Any]], cap: int) -> int:
    """Return the lane's size: the largest power of two of cards of one name, at most ``cap``; the tiny checkpoint's
    layers divide by no other number."""
    names = Counter(gpu["name"] for gpu in gpus)
    most = min(max(names.values(), default=1), cap)
    return 1 << (most.bit_length() - 1)


class Run:
    """One run: the lane, its engine, and what the steps leave for each other."""

    def __init__(self, args: argparse.Namespace, where: place.Place) -> None:
        self.args, self.where, self.report = args, where, Report()
        self.facts: dict[str, Any] = {}
        self.owned: list[str] = []
        self.lane: dict[str, Any] = {}
        self.engine: Engine | None = None
        self.cold: dict[str, Any] = {}
        self.before_mib: list[int | None] = []
        self.streams: list[Stream] = []
        self.moments: list[dict[str, float]] = []

    # ---- before the start ----

    def read_facts(self) -> Outcome:
        began = time.monotonic()
        self.facts = start.live_facts([place.LANE])
        seconds = round(time.monotonic() - began, 3)
        if not self.facts["gpus"]:
            raise StepError(f"no GPU can be read: {self.facts['extra']['message'] or 'none is there'}")
        driver = self.facts["driver"]
        if driver["loaded"] != driver["userland"]:
            raise StepError(f"module and library differ: {driver}")
        self.report.facts.update(
            simulated=not hardware.is_real(self.facts), driver=driver, host=platform.node(), kernel=platform.release(),
            systemd=os.path.isdir("/run/systemd/system"),
            gpus=[{key: gpu[key] for key in ("index", "name", "uuid", "bus_id", "memory_total_mib")}
                  for gpu in self.facts["gpus"]],
            pairs=self.facts["pairs"],
        )  # fmt: skip
        names = Counter(gpu["name"] for gpu in self.facts["gpus"])
        shown = ", ".join(f"{count}x {name}" for name, count in names.items())
        return f"{shown}, driver {driver['loaded']}", {"read_s": seconds}

    def resolve(self) -> Outcome:
        self.owned = start.owned_by_others(place.LANE)
        free = hardware.idle(self.facts, self.owned)
        if not free:
            raise StepError("no card of this machine is idle and free of other lanes")
        size = tensor_parallel(free, self.args.tensor_parallel_max)
        self.lane = place.resolve(self.args.engine, size, self.args.overrides)
        self.where.prepare(self.lane)
        engine = self.lane["engine"]
        self.report.facts.update(engine=engine["id"], vllm=engine["version"], profile=self.lane["profile"], size=size)
        notes = "" if place.service_user() else "; no user vllm here, so two checks that ask for it are off"
        return f"{self.lane['profile']} with tensor_parallel {size} on {engine['id']}{notes}", {}

    def decide(self) -> Outcome:
        figures = {}
        for p2p in ("proven", "required", "trusted"):
            policy = {"tensor_parallel": self.report.facts["size"], "p2p": p2p, "exclude": self.owned}
            decision = decide(self.facts, policy)
            figures[p2p] = f"{decision['status']} {decision['reason']}"
            if decision["status"] == "refused" and not (p2p == "required" and decision["reason"] == "p2p_unproven"):
                raise StepError(f"{p2p}: {decision['reason']}: {decision['message']}")
        decision = start.decide(self.lane, self.facts, self.owned)
        if start.refused(decision):
            raise StepError(f"{decision['reason']}: {decision['message']}")
        self.report.facts["decision"] = decision
        return f"{decision['status']} ({decision['reason']}), order {decision['order']}", figures

    def preflight(self) -> Outcome:
        return self._judge(run_lane(place.LANE, facts=self.facts, lane_data=self.lane))

    def _judge(self, results: list[checks.Result]) -> Outcome:
        counts = checks.summary(results)
        shown = [item for item in results if item["status"] != checks.PASS]
        figures = {**counts, "not_passed": shown}
        if checks.failed(results):
            raise StepError("; ".join(f"{i['reason']}: {i['message']}" for i in checks.failed(results)), figures)
        return ", ".join(f"{count} {status}" for status, count in counts.items()), figures

    def render(self) -> Outcome:
        name = self.where.install(self.lane, self.report.facts["decision"].get("binding"))
        self.report.facts["release"] = name
        return f"release {name}", {}

    def start_check(self) -> Outcome:
        outcome = start.check(place.LANE)
        self.report.facts["decision"] = outcome["decision"]
        self.report.facts["runtime_env"] = outcome["runtime_env"]
        message, figures = self._judge(outcome["results"])
        if outcome["exit"]:
            raise StepError(f"exit {outcome['exit']}: {outcome['decision']['message']}", figures)
        return message, figures

    def parser(self) -> Outcome:
        user = start.SERVICE_USER if place.service_user() else None
        result = engine_check.check(self.lane, timeout=300, user=user, write=False)
        if result["status"] != "pass":
            raise StepError(f"{result['reason']}: {result['message']}")
        return result["message"], {"parser_s": result["seconds"]}

    # ---- the lane runs ----

    def _memory(self) -> list[int | None]:
        return [gpu["memory_used_mib"] for gpu in collect.read()["gpus"] or []]

    def start_cold(self) -> Outcome:
        self.before_mib = self._memory()
        self.engine = Engine()
        self.report.facts["argv"] = self.engine.argv
        self.cold = self.engine.start()
        return f"answered after {self.cold['ready_s']:.1f} s, nothing cached", self.cold

    def run_streams(self) -> Outcome:
        engine = self._engine()
        self.moments = [engine.counters()]
        self.streams = [Stream(engine, TOKENS) for _ in range(STREAMS)]
        began = time.monotonic()
        for stream in self.streams:
            stream.start()
        while any(stream.is_alive() for stream in self.streams):
            self.moments.append(engine.counters())
            time.sleep(0.02)
        seconds = time.monotonic() - began
        time.sleep(0.5)
        self.moments.append(engine.counters())
        firsts = sorted(stream.first_s for stream in self.streams if stream.first_s is not None)
        figures = {
            "ttft_s": firsts, "ttft_worst_s": firsts[-1] if firsts else None,
            "tokens_per_s": round(sum(stream.received for stream in self.streams) / seconds, 1),
        }  # fmt: skip
        wrong = [
            stream.error or f"{stream.received} tokens, {stream.finish}"
            for stream in self.streams
            if not stream.whole()
        ]
        if wrong:
            raise StepError("; ".join(wrong), figures)
        return f"{STREAMS} at once, {TOKENS} tokens each", figures

    def heartbeat(self) -> Outcome:
        counts = [moment["generation_tokens_total"] for moment in self.moments]
        between = sorted({count for count in counts if counts[0] < count < counts[-1]})
        figures = {"tokens": counts[-1] - counts[0], "readings": len(counts), "steps_seen": len(between)}
        if counts != sorted(counts) or counts[-1] - counts[0] != STREAMS * TOKENS:
            raise StepError(f"the counter went from {counts[0]} to {counts[-1]}", figures)
        if not between or max(moment["num_requests_running"] for moment in self.moments) < 1:
            raise StepError("the metrics did not show the engine at work", figures)
        return "the engine's token counter rose while it worked", figures

    def benchmark(self) -> Outcome:
        self._engine()
        result = bench.measure(place.LANE, bench_load.Load(concurrency=8), timeout=300)
        plain = {key: result[key] for key in ("requests_per_s", "output_tokens_per_s", "seconds")}
        outer = {f"{kind}_{name}_ms": value for kind in ("ttft", "itl") for name, value in result[f"{kind}_ms"].items()}
        return "vllm bench serve: {prompts} requests, {concurrency} at once".format(**result["load"]), {
            **plain,
            **outer,
        }

    def card_memory(self) -> Outcome:
        hardware.require_real(self.facts, "memory on the cards")
        facts = collect.read()
        mine = [gpu for gpu in facts["gpus"] if gpu["uuid"] in self.report.facts["decision"]["lane"]]
        used = [gpu["memory_used_mib"] for gpu in mine]
        holders = [len(gpu["processes"] or []) for gpu in mine]
        if any((now or 0) <= (self.before_mib[gpu["index"]] or 0) for gpu, now in zip(mine, used, strict=True)):
            raise StepError(f"the engine holds no memory on a card of its lane: {used} MiB")
        return f"{used} MiB in use on the lane's cards", {"used_mib": used, "processes": holders}

    def stop_in_flight(self) -> Outcome:
        engine = self._engine()
        stream = Stream(engine, TOKENS)
        stream.start()
        if not stream.begun.wait(60) or stream.error or not stream.is_alive():
            raise StepError(f"no request in flight: {stream.error or 'it had ended'}")
        figures = engine.stop(limit=60)
        stream.join(60)
        figures["request"] = "completed" if stream.whole() else stream.error or f"{stream.received} tokens"
        if not stream.whole():
            raise StepError(f"the request in flight was lost: {figures['request']}", figures)
        return (
            f"ended {figures['stop_s']} s after SIGTERM, the request in flight was answered whole, nobody left",
            figures,
        )

    def memory_free(self) -> Outcome:
        hardware.require_real(self.facts, "memory on the cards")
        began = time.monotonic()
        while True:
            facts = collect.read()
            used = [gpu["memory_used_mib"] for gpu in facts["gpus"]]
            holders = [entry for gpu in facts["gpus"] for entry in gpu["processes"] or []]
            over = [now - (then or 0) for now, then in zip(used, self.before_mib, strict=True)]
            seconds = round(time.monotonic() - began, 2)
            figures = {"used_mib": used, "before_mib": self.before_mib, "free_after_s": seconds}
            if max(over) <= SLACK_MIB and not holders:
                return f"{used} MiB in use, {self.before_mib} before the start, no process on a card", figures
            if seconds > FREE_WITHIN_S:
                raise StepError(f"{used} MiB in use, {self.before_mib} before; processes {holders}", figures)
            time.sleep(0.2)

    def start_warm(self) -> Outcome:
        outcome = start.check(place.LANE)
        if outcome["exit"] or outcome["runtime_env"] != self.report.facts["runtime_env"]:
            raise StepError(f"the second start differs: {outcome['runtime_env']}")
        self.engine = Engine()
        warm = self.engine.start()
        figures = {**warm, "cold_ready_s": self.cold["ready_s"]}
        saved = self.cold["ready_s"] - warm["ready_s"]
        return (
            f"answered after {warm['ready_s']:.1f} s, {self.cold['ready_s']:.1f} s the first time ({-saved:+.1f})",
            figures,
        )

    def compile_cache(self) -> Outcome:
        engine = self._engine()
        if "compile_s" not in self.cold:
            raise NotRunError("this engine compiles nothing here (eager)")
        warm = engine.log_figures()
        names = ("compile_s", "engine_init_s", "graph_capture_s")
        figures = {
            f"{name}_{when}": seen.get(name) for name in names for when, seen in (("cold", self.cold), ("warm", warm))
        }
        if not warm.get("compile_s", 0.0) < self.cold["compile_s"]:
            raise StepError("the kept cache saved no compile time", figures)
        return (
            f"compiling took {self.cold['compile_s']} s at first, {warm.get('compile_s', 0.0)} s with the cache",
            figures,
        )

    def stop_idle(self) -> Outcome:
        figures = self._engine().stop(limit=60)
        return f"ended {figures['stop_s']} s after SIGTERM", figures

    def _engine(self) -> Engine:
        if self.engine is None:
            raise StepError("the engine was not started")
        return self.engine

    # ---- all of it ----

    def steps(self) -> None:
        """Do every step in order."""
        step = self.report.step
        if not step("facts", self.read_facts) or not step("lane", self.resolve):
            return
        python = engine_python.EnginePython(self.lane["engine"]["python"], self.lane["env"], None, None)
        links = hardware.Links(self.facts, python, self.lane["policy"]["tensor_parallel"])
        step("nvidia_smi", lambda: hardware.against_smi(self.facts))
        step("probe", lambda: hardware.compute(self.facts, python))
        step("decision", self.decide)
        step("p2p_corrupted", lambda: links.faulty("corrupt", "fail", "wrong_data"))
        step("p2p_killed", lambda: links.faulty("killed", "inconclusive", "killed"))
        step("p2p_both_arms", links.both_arms)
        step("p2p_verdict", links.used_and_forgotten, ("p2p_both_arms",))
        step("preflight", self.preflight, ("decision",))
        step("release", self.render, ("decision",))
        step("start_check", self.start_check, ("release",))
        step("arguments", self.parser)
        step("first_start", self.start_cold, ("start_check", "arguments"))
        step("streams", self.run_streams, ("first_start",))
        step("heartbeat", self.heartbeat, ("streams",))
        step("bench", self.benchmark, ("first_start",))
        step("card_memory", self.card_memory, ("first_start",))
        step("stop_in_flight", self.stop_in_flight, ("first_start",))
        step("memory_free", self.memory_free, ("stop_in_flight",))
        step("second_start", self.start_warm, ("stop_in_flight",))
        step("compile_cache", self.compile_cache, ("second_start",))
        step("stop_idle", self.stop_idle, ("second_start",))

    def finish(self) -> None:
        """End what still runs; keep the last of its log when something failed."""
        if self.engine is not None:
            self.engine.kill()
            if self.report.status() == "fail":
                self.report.facts["log"] = self.engine.log()[-20000:]


def main() -> int:
    """Run the steps, print the table, write the report; 0 when nothing failed."""
    parser = argparse.ArgumentParser(prog="tests.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", required=True, metavar="VENV", help="the venv that vLLM is installed in")
    parser.add_argument(
        "--tensor-parallel-max", type=int, default=8, metavar="N", help="use at most N cards (default: %(default)s)"
    )
    parser.add_argument("--report", metavar="FILE", help="write the JSON report there")
    parser.add_argument(
        "--overrides", type=json.loads, default={}, metavar="JSON", help="further keys of the lane, as in an inventory"
    )
    args = parser.parse_args()
    args.engine = os.path.abspath(args.engine)
    if os.geteuid() != 0:
        print("it must be root: the product's start check and its directories are root's", file=sys.stderr)
        return 2
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the engine and the lane's files go also then
    try:
        with place.Place() as where:
            run = Run(args, where)
            try:
                run.steps()
            finally:
                run.finish()
    except FleetError as error:
        print(error.one_line(), file=sys.stderr)
        return 2
    document = run.report.document()
    if args.report:
        with open(args.report, "w", encoding="utf-8") as handle:
            json.dump(document, handle, indent=1)
            handle.write("\n")
    print(f"\n{run.report.table()}\n")
    counts = document["counts"]
    print(f"{document['status']}: {counts['pass']} passed, {counts['fail']} failed, {counts['not_run']} not run")
    return 1 if document["status"] == "fail" else 0


if __name__ == "__main__":
    sys.exit(main())
