"""The fleet under load while it changes: ``make test-rolling``. The lab must be up (``make lab``).

    python -m tests.rolling [SCENARIO… | wide | watchdog]

Every scenario prints ``scenario=… requests=N failed=M rolled_back=yes|no`` and leaves both boxes in rotation. Requests
come from this machine, through the balancer, for as long as the scenario lasts.
"""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from . import fleet
from .fleet import Played, pid, reconfigure, wait_in_rotation
from .load import CLIENTS, Load, Report


class Result:
    """What a scenario found: the clients' report, whether a release was taken back, and words for the log."""

    def __init__(self, report: Report, rolled_back: bool = False, note: str = "") -> None:
        self.requests, self.failures, self.rolled_back, self.note = (
            report.requests, list(report.failures), rolled_back, note,
        )  # fmt: skip
        self.slowest_s = report.slowest_s


#: the load of the scenario that runs, for the line of one that does not hold
_loads: list[Load] = []


def loaded(clients: int = CLIENTS) -> Load:
    """Return clients of the balancer, to be used as a context manager."""
    _loads.append(Load(fleet.edge_url(), fleet.edge_key(), clients=clients))
    return _loads[-1]


def expect(true: bool, played: Played | None, what: str) -> None:
    """Fail the scenario with the end of the play's output."""
    if not true:
        raise AssertionError(what + (f"\n{played.text[-3000:]}" if played else ""))


def none_failed(report: Report) -> None:
    expect(report.requests > 20, None, f"only {report.requests} requests were made")
    expect(not report.failures, None, f"{len(report.failures)} requests failed: {report.failures[:5]}")


#: seconds that a box may be out of rotation beside drain, engine start and proof
OURS_S = 10

# --- scenarios ------------------------------------------------------------------------------------------------------


def edge_refusals() -> Result:
    """Control endpoints are refused with a key, everything but health without one, and health is the edge's own."""
    report = Report()
    key = {"Authorization": f"Bearer {fleet.edge_key()}"}
    control = [
        "/pause", "/resume", "/update_weights", "/scale_elastic_ep", "/invocations", "/pooling", "/classify",
        "/tokenize", "/detokenize", "/metrics", "/version", "/load", "/docs", "/openapi.json", "/sleep", "/wake_up",
        "/collective_rpc", "/v1/load_lora_adapter", "/v1/../pause", "//pause", "/%70ause", "/v1/completions/",
        "/v1/models/../../pause",
    ]  # fmt: skip
    wanted = [("POST", path, key, 403) for path in control] + [("GET", path, key, 403) for path in control]
    for path in [*control, "/v1/models", "/v1/completions"]:
        wanted += [("POST", path, {}, 401), ("GET", path, {"Authorization": "Bearer wrong"}, 401)]
    lane_key = (fleet.STATE / "keys" / "box1-main.key").read_text().strip()
    wanted += [
        ("GET", "/health", {}, 200), ("GET", "/v1/models", key, 200), ("DELETE", "/v1/models", key, 405),
        ("GET", "/v1/completions", key, 405), ("GET", "/v1/models", {"Authorization": f"Bearer {lane_key}"}, 401),
    ]  # fmt: skip
    with httpx.Client(base_url=fleet.edge_url(), timeout=60, trust_env=False) as client:
        for method, path, headers, status in wanted:
            # As a raw target: a client library would tidy the path first.
            request = client.build_request(method, "/", headers=headers)
            request.url = request.url.copy_with(raw_path=path.encode())
            got = client.send(request).status_code
            report.requests += 1
            if got != status:
                report.failures.append(f"{method} {path}: {got}, expected {status}")
    expect(not report.failures, None, f"{report.failures}")
    for box in fleet.BOXES:
        again = fleet.play("playbooks/balancer.yml", "-l", f"edge1,{box}")
        expect(again.status == 0, again, "the balancer's play fails under a limit")
        expect("edge1" in again.text and "changed=0" in again.text, again, f"-l {box} changed the shared configuration")
    return Result(report)


def unreachable_box() -> Result:
    """A box that cannot be reached counts against the budget: nobody is touched, and the report says so."""
    before = {box: pid(box) for box in fleet.BOXES}
    lost = {"box9": {"lab_ip": "192.0.2.9", "ansible_host": "192.0.2.9", "vllm_lanes": [fleet.lane()]}}
    lost["box9"]["ansible_ssh_common_args"] = "-o ConnectTimeout=3"  # type: ignore[assignment]
    with loaded() as load:
        played = reconfigure(lanes={"args": {"--max-model-len": 500}}, hosts=lost)
    expect(played.status != 0, played, "a rollout with an unreachable box ended well")
    expect(played.state("box9") == "unreachable", played, "the unreachable box is not in the table")
    expect(
        [played.state(box) for box in fleet.BOXES] == ["untouched"] * 2, played, "the others are not shown untouched"
    )
    expect({box: pid(box) for box in fleet.BOXES} == before, played, "a process was touched")
    none_failed(load.report)
    return Result(load.report)


def refused_by_parser() -> Result:
    """The engine's own parser refuses the arguments: no process is touched, no box leaves rotation."""
    before = {box: pid(box) for box in fleet.BOXES}
    with loaded() as load:
        played = reconfigure(lanes={"extra_args": ["--no-such-argument", "7"]})
    expect(played.status != 0, played, "a refused release ended well")
    expect("unrecognized arguments: --no-such-argument 7" in played.text, played, "the parser's words are missing")
    expect({box: pid(box) for box in fleet.BOXES} == before, played, "a process was touched")
    none_failed(load.report)
    return Result(load.report)


def nobody_stands_in() -> Result:
    """The only lane of its model does not go down without a yes."""
    before = {box: pid(box) for box in fleet.BOXES}
    only = {"box1": {"vllm_lanes": [fleet.lane(served_names=["another"])]}}
    with loaded() as load:
        played = reconfigure("-l", "box1", hosts=only)
    expect(played.status != 0, played, "the only lane went down without a yes")
    expect("downtime_not_accepted" in played.text, played, "the reason is missing")
    expect({box: pid(box) for box in fleet.BOXES} == before, played, "a process was touched")
    none_failed(load.report)
    return Result(load.report)


def constant_load() -> Result:
    """Both boxes get another argument, one after the other, and no request fails or is cut."""
    before = {box: pid(box) for box in fleet.BOXES}
    length = "488" if "496" in [fleet.argument(box, "--max-model-len") for box in fleet.BOXES] else "496"
    with fleet.Watch(0.2) as watch, loaded() as load:
        played = reconfigure(lanes={"args": {"--max-model-len": int(length)}})
    expect(played.status == 0, played, "the rollout failed")
    for box in fleet.BOXES:
        expect(played.state(box) == "changed", played, f"{box} is not shown as changed")
        expect(pid(box) != before[box], played, f"{box} was not restarted")
        expect(fleet.argument(box, "--max-model-len") == length, played, f"{box} runs something else")
        (out, drain), (end, start) = watch.out(f"{box}:main"), fleet.engine_s(box)
        ours = out - drain - end - start
        print(
            f"  {box} out of rotation {out:.1f} s: drain {drain:.1f}, end of the old engine {end:.1f}, start and "
            f"proof of the new one {start:.1f}, ours {ours:.1f} (in the table {played.out_s(box)})",
            flush=True,
        )
        expect(0 <= ours <= OURS_S, None, f"{box}: {ours:.1f} s of our own, {OURS_S} are allowed")
    none_failed(load.report)
    return Result(load.report)


def nothing_to_do() -> Result:
    """The same again: no box leaves rotation, no process restarts, no phase is written."""
    before = {box: pid(box) for box in fleet.BOXES}
    began = time.monotonic()
    with loaded() as load:
        played = reconfigure(lanes={"args": {"--max-model-len": int(fleet.argument("box1", "--max-model-len"))}})
    expect(played.status == 0, played, "the rollout failed")
    expect([played.state(box) for box in fleet.BOXES] == ["unchanged"] * 2, played, "a box had something to do")
    expect("Leave rotation" not in played.text, played, "a box left rotation")
    expect({box: pid(box) for box in fleet.BOXES} == before, played, "a process was touched")
    none_failed(load.report)
    return Result(load.report, note=f"{time.monotonic() - began:.0f} s")


def _taken_back(lanes: dict[str, object]) -> Result:
    """Roll out a release that cannot work: box1 is taken back by the play itself, box2 is untouched."""
    before, length = pid("box2"), fleet.argument("box1", "--max-model-len")
    with loaded() as load:
        played = reconfigure(lanes=lanes)
        wait_in_rotation(*fleet.BOXES)
    expect(played.status != 0, played, "a release that cannot answer ended well")
    expect(played.state("box1") == "rolled_back", played, "box1 was not rolled back")
    expect(played.state("box2") == "untouched", played, "box2 is not shown untouched")
    expect(pid("box2") == before, played, "box2's process was touched")
    expect(fleet.argument("box1", "--max-model-len") == length, played, "box1 runs another release than before")
    expect(fleet.phase("box1") == "rolled_back", played, "the record on box1 says something else")
    none_failed(load.report)
    return Result(load.report, rolled_back=True)


def answers_500() -> Result:
    """Healthy, and every completion is a 500: what the CPU engine does with pipeline stages."""
    return _taken_back({"args": {"--max-model-len": 480, "--pipeline-parallel-size": 2}})


def never_healthy() -> Result:
    """Takes its arguments and dies while it loads: the model has less context than asked for."""
    return _taken_back({"args": {"--max-model-len": 4096}})


def wrong_answer() -> Result:
    """Answers well in form and wrongly in content: the golden answer differs."""
    golden = [{"prompt": "Hello", "max_tokens": 4, "answer": "something that no random model says"}]
    return _taken_back({"args": {"--max-model-len": 472}, "readiness": {"golden": golden}})


#: the tasks in whose midst the controller dies, and what the rerun is then to find
PHASES = (
    "Record that the lanes leave rotation",
    "Wait for what the engines still have",
    "Flip and start the lanes",
    "Wait until every lane has answered",
    "Put the lanes back into rotation",
    "Watch it serve",
)


def controller_killed() -> Result:
    """SIGKILL of the controller in each phase, then a rerun: it converges and nobody stays drained."""
    with loaded() as load:
        for number, moment in enumerate(PHASES):
            length = 464 - 8 * number
            lanes = {"args": {"--max-model-len": length}}
            killed = reconfigure(
                "-l", "box1", lanes=lanes, kill_at=f"[rollout : {moment}]" if number in (0, 2, 3, 5) else moment
            )
            expect(killed.status == -9, killed, f"the play was over before '{moment}'")
            played = reconfigure("-l", "box1", lanes=lanes)
            expect(played.status == 0, played, f"the rerun after a kill at '{moment}' failed")
            expect(
                fleet.argument("box1", "--max-model-len") == str(length), played, f"after '{moment}': another release"
            )
            expect(fleet.phase("box1") == "done", played, f"after '{moment}': phase {fleet.phase('box1')}")
            wait_in_rotation(*fleet.BOXES, deadline_s=30)
            print(f"  killed at '{moment}': converged", flush=True)
    none_failed(load.report)
    return Result(load.report)


def interrupted_first() -> Result:
    """A box that a killed rollout has left outside comes back before another one leaves."""
    lanes = {"args": {"--max-model-len": 456}}
    with loaded() as load:
        killed = reconfigure("-l", "box2", lanes=lanes, kill_at="[rollout : Wait until every lane has answered]")
        expect(killed.status == -9, killed, "the play was over before it was killed")
        played = reconfigure(lanes=lanes)
        expect(played.status == 0, played, "the rerun failed")
        expect([played.state(box) for box in fleet.BOXES] == ["changed"] * 2, played, "a box is not shown as changed")
        began = [played.text.index(f"{box}: main, ") for box in fleet.BOXES]
        expect(began[1] < began[0], played, "box1 left while box2 was outside")
        wait_in_rotation(*fleet.BOXES, deadline_s=30)
    none_failed(load.report)
    return Result(load.report)


def engine_killed() -> Result:
    """SIGKILL of a whole engine under load: only what was in flight there is lost, and it comes back by itself."""
    before = pid("box2")
    # Until the process is gone its port takes requests, and they are in flight there as well.
    kill = f"""
        date +%s.%N; systemctl kill --signal=SIGKILL vllm@main
        while kill -0 {before} 2>/dev/null; do sleep 0.01; done; date +%s.%N"""
    # More of them than elsewhere, so that the engine has work whenever the signal reaches it.
    with loaded(clients=8) as load:
        with fleet.Watch(0.01) as watch:
            while load.report.requests < 10 or watch.samples[-1][1]["box2:main"]["in_flight"] == 0:
                time.sleep(0.02)
            began, ended = map(float, fleet.ssh("box2", kill).split())
            time.sleep(1)
        most = watch.in_flight("box2:main", began, ended)
        time.sleep(10)
        lost = len(load.report.failures)
        wait_in_rotation("box2", deadline_s=300)
        time.sleep(5)
    expect(pid("box2") != before, None, "the engine was not restarted")
    expect(most > 0, None, "nothing was in flight there, which proves nothing")
    expect(len(load.report.failures) <= most, None, f"{load.report.failures}: more than the {most} in flight there")
    expect(
        len(load.report.failures) == lost, None, f"requests failed after the first ten seconds: {load.report.failures}"
    )
    return Result(load.report, note=f"{most} in flight there when it was killed; gone after {ended - began:.2f} s")


def rollback_by_hand() -> Result:
    """The lab's own release, then the one before it by the playbook ``rollback``, then the lab's own again."""
    with loaded() as load:
        played = reconfigure()
        expect(played.status == 0, played, "the rollout failed")
        before = fleet.argument("box1", "--max-model-len")
        back = fleet.play("playbooks/rollback.yml", "-l", "box1")
        expect(back.status == 0, back, "the rollback failed")
        expect(fleet.argument("box1", "--max-model-len") != before, back, "box1 runs the same release")
        again = reconfigure()
        expect(again.status == 0, again, "the rollout failed")
        expect(fleet.argument("box1", "--max-model-len") == before, again, "box1 is not as the lab has it")
        wait_in_rotation(*fleet.BOXES, deadline_s=30)
    none_failed(load.report)
    return Result(load.report, rolled_back=True)


#: in an order in which each finds what the one before left; cheap ones first
SCENARIOS: dict[str, Callable[[], Result]] = {
    function.__name__: function
    for function in (
        edge_refusals, unreachable_box, refused_by_parser, nobody_stands_in, constant_load, nothing_to_do, answers_500,
        never_healthy, wrong_answer, controller_killed, interrupted_first, engine_killed, rollback_by_hand,
    )
}  # fmt: skip

#: files of tests that bring the lab into a state of their own, and leave it as ``make lab`` made it
FILES = ("wide", "watchdog")


def run(name: str) -> bool:
    """Run one scenario and print its line; return whether it holds."""
    began = time.monotonic()
    _loads.clear()
    print(f"== {name}: {(SCENARIOS[name].__doc__ or '').strip()}", flush=True)
    try:
        wait_in_rotation(*fleet.BOXES)
        result = SCENARIOS[name]()
    except Exception as error:  # a scenario must not take the others with it
        if not isinstance(error, AssertionError):
            traceback.print_exc()
        for load in _loads[-1:]:
            print(f"  {load.report.requests} requests, {len(load.report.failures)} failed: {load.report.failures[:5]}")
        print(f"  FAILED after {time.monotonic() - began:.0f} s: {error}", flush=True)
        reconfigure()  # what it left half done is not the next one's matter
        return False
    for failure in result.failures:
        print(f"  lost: {failure}")
    print(
        f"scenario={name} requests={result.requests} failed={len(result.failures)} "
        f"rolled_back={'yes' if result.rolled_back else 'no'}"
        + (f"  # {result.note}; " if result.note else "  # ")
        + f"slowest request {result.slowest_s:.1f} s, {time.monotonic() - began:.0f} s in all",
        flush=True,
    )
    return True


class Counted:
    """A plugin of pytest that counts as the scenarios are counted: one for each test, and one for what ends early."""

    def __init__(self) -> None:
        self.held: list[bool] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            self.held.append(report.passed)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.held.append(False)


def tests(files: list[str]) -> list[bool]:
    """Run files of tests of this package, and return for each test whether it holds."""
    counted = Counted()
    here = Path(__file__).parent
    status = pytest.main(["-s", "-q", *(str(here / f"test_{name}.py") for name in files)], plugins=[counted])
    # An end without a single failed test is an end before the first one.
    return counted.held + [False] * (status != 0 and all(counted.held))


def main(names: list[str]) -> int:
    """Run what is named, or all; end non-zero when one does not hold."""
    unknown = [name for name in names if name not in (*SCENARIOS, *FILES)]
    if unknown:
        sys.exit(f"no scenario {', '.join(unknown)}; there are {', '.join((*SCENARIOS, *FILES))}")
    # A play runs in a session of its own: whoever ends this process is to end it too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    wanted = names or [*SCENARIOS, *FILES]
    held = [run(name) for name in wanted if name in SCENARIOS]
    files = [name for name in wanted if name in FILES]
    if files:
        held += tests(files)
    print(f"{held.count(True)} passed, {held.count(False)} failed", flush=True)
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
