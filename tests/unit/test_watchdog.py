"""A dead engine is told from a busy one by its own counters; restarts are counted; what acts, acts on what it saw."""

from __future__ import annotations

import json

import pytest
from vllm_fleet import engine_metrics, peers, watchdog
from vllm_fleet.commands import watchdog as command
from vllm_fleet.facts import engine_http, units

LIMITS = {"enabled": True, "interval_s": 10, "stall_s": 60, "silent_s": 40, "probe_every_s": 60, "probe_s": 30}


def engine(requests=0, tokens=0, name="0"):
    return {name: {"requests": requests, "progress": [tokens]}}


def busy(tokens, requests=1):
    return engine(requests, tokens)


#: name: looks (seconds, engines, probe) and what the last one says
HISTORIES = {
    "idle": ([(0, engine()), (10, engine()), (20, engine())], "ok", "idle"),
    "a request that makes progress for ever": ([(t, busy(t)) for t in range(0, 6000, 10)], "ok", "progress"),
    # a long prefill: the KV cache fills, no token comes out for a while, but less long than the limit
    "a request that stands still for a while": ([(t, busy(7)) for t in range(0, 60, 10)], "suspect", "no_progress"),
    "and goes on": ([*((t, busy(7)) for t in range(0, 60, 10)), (60, busy(8))], "ok", "progress"),
    "a request that stands still": ([(t, busy(7)) for t in range(0, 70, 10)], "dead", "no_progress"),
    "requests that only wait": ([(t, engine(5, 7)) for t in range(0, 70, 10)], "dead", "no_progress"),
    "new requests are no progress": ([(t, busy(7, requests=1 + t)) for t in range(0, 70, 10)], "dead", "no_progress"),
    # the machine was suspended: a long time passed, but nobody looked
    "one late look": ([(0, busy(7)), (10, busy(7)), (3600, busy(7))], "ok", "progress"),
    "idle for long, then a request": ([(0, engine()), (3600, engine(1)), (3610, engine(1))], "ok", "progress"),
    "no answer once": ([(0, busy(1)), (10, None)], "suspect", "no_metrics"),
    "no answer for long": ([(0, busy(1)), (10, None), (20, None), (30, None), (50, None)], "dead", "no_metrics"),
    "slow but answering": ([(0, None), (10, busy(1)), (30, None), (40, busy(2)), (60, None)], "suspect", "no_metrics"),
    "two looks without an answer, far apart": ([(0, None), (3600, None)], "suspect", "no_metrics"),
    "an engine without counters": ([(0, {}), (3600, {})], "unknown", "no_counters"),
    "idle and answers": ([(0, engine()), (60, engine(), "answered")], "ok", "idle"),
    "idle and does not answer once": ([(0, engine()), (60, engine(), "failed")], "suspect", "no_answer_when_idle"),
    "idle and does not answer": (
        [(t, engine(), "failed" if t else None) for t in (0, 60, 90, 120)], "dead", "no_answer_when_idle",
    ),
    "two failures and an answer": (
        [(0, engine()), (60, engine(), "failed"), (90, engine(), "failed"), (120, engine(), "answered")], "ok", "idle",
    ),
    # the question waited behind a burst of requests: that it came late says nothing
    "failed questions, but work is done": (
        [(0, engine()), (60, engine(), "failed"), (90, engine(), "failed"), (99, busy(9)), (110, engine(), "failed")],
        "suspect", "no_answer_when_idle",
    ),
    "refused questions": ([(0, engine()), (60, engine(), "refused")], "unknown", "probe_refused"),
    "one engine of two hangs": (
        [(t, {**engine(1, t, "0"), **engine(1, 7, "1")}) for t in range(0, 70, 10)], "dead", "no_progress",
    ),
    "one engine of two is idle": (
        [(t, {**engine(1, t, "0"), **engine(0, 7, "1")}) for t in range(0, 200, 10)], "ok", "progress",
    ),
}  # fmt: skip


def follow(history):
    memory, verdicts = watchdog.empty_memory(), []
    for at, found, *probe in history:
        memory, verdict = watchdog.judge(memory, found, probe[0] if probe else None, float(at), LIMITS)
        verdicts.append(verdict)
    return memory, verdicts


@pytest.mark.parametrize("name", HISTORIES)
def test_history(name):
    history, status, reason = HISTORIES[name]
    _, verdicts = follow(history)
    assert (verdicts[-1].status, verdicts[-1].reason) == (status, reason)
    assert all(verdict.status != "dead" for verdict in verdicts[:-1])


def test_the_engine_that_hangs_is_named():
    _, verdicts = follow(HISTORIES["one engine of two hangs"][0])
    assert "engine 1" in verdicts[-1].message


@pytest.mark.parametrize(
    ("history", "found", "at", "wanted"),
    [
        ([(0, engine())], engine(), 59, False),
        ([(0, engine())], engine(), 60, True),
        ([(0, engine(1, 5))], engine(1, 5), 600, False),
        ([(0, engine()), (60, engine(), "answered")], engine(), 119, False),
        ([(0, engine()), (60, engine(), "answered")], engine(), 120, True),
        ([(0, engine()), (60, engine(), "failed")], engine(), 61, True),
        ([], engine(), 0, False),
        ([(0, engine())], None, 600, False),
        ([(0, engine())], {}, 600, False),
    ],
)
def test_only_an_idle_engine_is_asked(history, found, at, wanted):
    memory, _ = follow(history)
    assert watchdog.wants_probe(memory, found, float(at), LIMITS) is wanted


def test_judging_leaves_the_old_memory_alone():
    memory, _ = follow([(0, busy(7)), (10, busy(7))])
    before = json.dumps(memory)
    watchdog.judge(memory, busy(8), None, 20.0, LIMITS)
    assert json.dumps(memory) == before


METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a, engine=\\"9\\""} 2.0
vllm:num_requests_running{engine="1",model_name="tiny"} 0.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
vllm:generation_tokens_total{engine="0",model_name="tiny"} 284.0
vllm:generation_tokens_total{engine="1",model_name="tiny"} 3.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 1.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 4.0
http_requests_total{handler="/metrics"} 77.0
"""


def test_engines_out_of_metrics():
    found = watchdog.engines(METRICS)
    assert {name: item["requests"] for name, item in found.items()} == {"0": 3, "1": 0}
    assert found["0"]["progress"] != found["1"]["progress"]
    assert engine_metrics.by_engine(METRICS)["0"]["vllm:request_success_total"] == 5.0
    assert found == watchdog.engines(METRICS.replace("77.0", "78.0")), "being asked is no progress"
    assert found != watchdog.engines(METRICS.replace("284.0", "285.0"))


def test_an_older_engine_has_no_label():
    text = 'vllm:num_requests_running{model_name="m"} 1.0\nvllm:num_requests_waiting{model_name="m"} 0.0\n'
    assert watchdog.engines(text)["0"]["requests"] == 1


@pytest.mark.parametrize("text", ["", "http_requests_total 3\n", "vllm:num_requests_running 1\n"])
def test_metrics_that_do_not_count_requests(text):
    assert watchdog.engines(text) == {}
    assert watchdog.engines(None) is None


def test_what_a_lane_leaves_out():
    assert watchdog.limits({}) == watchdog.DEFAULTS
    assert watchdog.limits({"watchdog": {"stall_s": 20}})["stall_s"] == 20


# ---- the program -----------------------------------------------------------------------------------------------------


class World:
    """A box around the watchdog: systemd, the engine's HTTP answers and the clock."""

    def __init__(self, tmp_path, monkeypatch, lane):
        self.state = {
            "ActiveState": "active", "SubState": "running", "Result": "success", "MainPID": 7, "NRestarts": 0,
            "InvocationID": "i1", "UnitFileState": "enabled",
        }  # fmt: skip
        self.metrics, self.answer, self.commands, self.said = METRICS, 200, [], []
        self.home = tmp_path / "lanes" / "main" / "current"
        self.home.mkdir(parents=True)
        (self.home / "lane.json").write_text(json.dumps(lane))
        monkeypatch.setattr(command, "STATE", str(tmp_path / "state"))
        monkeypatch.setattr(command.release, "LANES", str(tmp_path / "lanes"))
        monkeypatch.setattr(command.release, "RUNTIME", str(tmp_path / "run"))
        monkeypatch.setattr(units, "unit_state", lambda unit: dict(self.state))
        monkeypatch.setattr(units, "run", self.run)
        monkeypatch.setattr(
            engine_http, "fetch", lambda *_args, **_keys: (200, self.metrics) if self.metrics else (None, "")
        )
        monkeypatch.setattr(engine_http, "complete", lambda *_args: (self.answer, None))
        monkeypatch.setattr(command.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(command.journal, "say", lambda line, level="info": self.said.append(line))
        self.now = 1000.0
        self.path = tmp_path / "state" / "main.json"
        self.watcher = command.Watcher("main")

    def run(self, argv, timeout=60.0):
        self.commands.append(argv[1:])
        return units.subprocess.CompletedProcess(argv, 0, "", "")

    def look(self, seconds):
        for _ in range(int(seconds / 2)):
            self.now += 2.0
            self.watcher.tick(self.now)

    @property
    def kept(self):
        return json.loads(self.path.read_text())


ALONE = {"lane": "main", "host": "127.0.0.1", "port": 8000, "served_names": ["tiny"], "api_key_file": None,
         "watchdog": {"stall_s": 60, "probe_every_s": 60}}  # fmt: skip
KILL = ["kill", "--signal=SIGKILL", "vllm@main.service"]


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch, ALONE)


def test_a_hung_engine_is_ended_once_and_counted(world):
    world.look(58)
    assert world.commands == []
    assert (world.kept["status"], world.kept["reason"]) == ("suspect", "no_progress")
    world.look(20)
    assert world.commands == [KILL]
    assert world.kept["status"] == "dead"
    assert (world.kept["restarts_total"], world.kept["restarts"][0]["reason"]) == (1, "no_progress")
    assert any(line.startswith("no_progress: lane main ended") for line in world.said)
    world.state.update(ActiveState="activating", SubState="auto-restart", InvocationID="i2", MainPID=0)
    world.look(300)
    assert world.commands == [KILL], "what starts is systemd's affair"
    assert world.kept["status"] == "starting"
    world.state.update(ActiveState="active", SubState="running", InvocationID="i3")
    world.look(50)
    assert world.commands == [KILL], "the new process has its own time"


def test_a_unit_that_does_not_end_is_ended_again(world):
    world.look(80)
    world.look(200)
    assert world.commands[:2] == [KILL, KILL]


def test_the_count_outlives_the_watchdog(world):
    world.look(80)
    again = command.Watcher("main")
    assert again.total == 1
    assert [item["reason"] for item in again.restarts] == ["no_progress"]


def test_an_idle_engine_that_does_not_answer_is_ended(world):
    world.metrics = "\n".join(line[:-3] + "0.0" if "num_requests" in line else line for line in METRICS.splitlines())
    assert watchdog.engines(world.metrics)["0"]["requests"] == 0
    world.look(200)
    assert world.commands == []
    world.answer = None
    world.look(100)
    assert world.commands == [KILL]
    assert world.kept["restarts"][-1]["reason"] == "no_answer_when_idle"


def test_a_unit_that_moved_on_meanwhile_is_left_alone(world, monkeypatch):
    world.look(58)
    states = iter([dict(world.state), dict(world.state, InvocationID="i2")])
    monkeypatch.setattr(units, "unit_state", lambda unit: next(states, dict(world.state, InvocationID="i2")))
    world.now += 10
    world.watcher.tick(world.now)
    assert world.commands == []


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({"ActiveState": "failed", "SubState": "failed", "Result": "start-limit-hit"}, "down", "start_limit_hit"),
        ({"ActiveState": "inactive", "SubState": "dead"}, "down", "dead"),
        ({"ActiveState": "activating", "SubState": "start-post"}, "starting", "start_post"),
        ({"ActiveState": "deactivating", "SubState": "stop-sigterm"}, "starting", "stop_sigterm"),
    ],
)
def test_what_does_not_serve_is_told_and_left_to_systemd(world, changes, status, reason):
    """After the third failed start the unit is down for a person; the watchdog does not try a fourth."""
    world.state.update(changes)
    world.look(600)
    assert (world.kept["status"], world.kept["reason"]) == (status, reason)
    assert world.commands == []


def test_the_state_is_written_when_it_changes_and_now_and_then(world, monkeypatch):
    written = []
    real = command.write_atomic
    monkeypatch.setattr(
        command, "write_atomic", lambda path, *rest, **keys: written.append(path) or real(path, *rest, **keys)
    )
    (world.home / "lane.json").write_text(json.dumps({**ALONE, "watchdog": {"stall_s": 6000}}))
    world.look(600)
    assert 9 <= len(written) <= 13


def test_a_lane_without_a_release_is_unknown(world):
    (world.home / "lane.json").unlink()
    world.look(2)
    assert (world.kept["status"], world.kept["reason"]) == ("unknown", "no_release")


def test_a_part_tells_and_asks_the_others(tmp_path, monkeypatch):
    place = {
        "rank": 0,
        "boxes": ["box1", "box2"],
        "addresses": ["127.0.0.1", "127.0.0.2"],
        "peer_port": 1,
        "master_port": 2,
    }
    world = World(tmp_path, monkeypatch, {**ALONE, "part": place, "watchdog": {"stall_s": 6000}})
    told = peers.record("main", "box2", dict(world.state, InvocationID="m1"), {})
    asked = []
    monkeypatch.setattr(world.watcher.teller, "listen", lambda address, port: asked.append((address, port)))
    monkeypatch.setattr(
        command.peer_link, "ask_all", lambda where, port, lane: {"box2": {"status": "answered", "record": dict(told)}}
    )
    world.look(4)
    assert set(asked) == {("127.0.0.1", 1)}
    assert world.kept["peers"] == {"box2": {"joined": True, "state": "active", "status": "answered"}}
    assert command.Watcher("main").peers["partners"] == {"box2": "m1"}, "a new watchdog knows whom the part joined"
    told["invocation"] = "m2"
    world.look(10)
    assert world.commands == [KILL]
    assert world.kept["restarts"][-1]["reason"] == "peer_restarted"
