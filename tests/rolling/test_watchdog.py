"""A hung engine behind ``/health`` 200 is ended and comes back; a busy one is left alone; a failing one ends for good.

The lab must be up (``make lab``). Each test prints ``scenario=… requests=N failed=M rolled_back=…``.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.conftest import SITE, STATE, Box, play
from tests.rolling.test_wide import say

pytestmark = pytest.mark.timeout(1200)

#: far above what a loaded machine needs between two tokens, far below what the tests wait
STALL_S = 45
LANE = {
    "name": "main", "profile": "tiny-cpu", "port": 8000, "host": "{{ lab_ip }}", "checkpoint": "/srv/models/tiny",
    "served_names": ["tiny"], "api_key_file": "/etc/vllm-fleet/secrets/main.key",
    "topology": {"mode": "auto", "tensor_parallel": 2, "pipeline_parallel": 2},
    "watchdog": {"interval_s": 3, "stall_s": STALL_S, "silent_s": 45, "probe_every_s": 30, "probe_s": 15},
}  # fmt: skip


class Asker:
    """A client with requests of a given length, in the background; counts what it got."""

    def __init__(self, box: Box, tokens: int, clients: int = 1) -> None:
        self.box, self.tokens, self.requests, self.failed = box, tokens, 0, 0
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self.ask) for _ in range(clients)]

    def ask(self) -> None:
        key = (STATE / "keys" / f"{self.box.name}-main.key").read_text().strip()
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": self.tokens, "ignore_eos": True}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while not self.stop.is_set():
            self.requests += 1
            request = urllib.request.Request(
                f"http://{self.box.address}:8000/v1/completions", json.dumps(body).encode(),
                {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
            )  # fmt: skip
            try:
                with opener.open(request, timeout=300) as answer:
                    assert json.load(answer)["usage"]["completion_tokens"] == self.tokens
            except OSError:
                self.failed += 1
                self.stop.wait(1)

    def __enter__(self) -> Asker:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


def watchdog(box: Box) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(box.run("cat /var/lib/vllm-fleet/watchdog/main.json"))
    return found


def engine_core(box: Box) -> int:
    """Return the process that runs the model's loop, which is neither the API server nor a worker."""
    return int(box.run("pgrep -f '^VLLM::EngineCor' | head -1"))


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    where = tmp_path_factory.mktemp("watchdog") / "hosts.json"
    where.write_text(json.dumps({"gpu-boxes": {"hosts": {"box1": {"vllm_lanes": [LANE]}}}}))
    done = play("-i", "inventories/lab", "-i", str(where), "site.yml", "-l", "box1")
    assert done.status == 0, done.text[-3000:]
    found = Box("box1")
    found.wait_answer()
    yield found
    back = play(*SITE, "-l", "box1")
    assert back.status == 0, back.text[-3000:]


def test_a_long_busy_engine_is_left_alone(box: Box) -> None:
    """One request after the other, never idle, for twice the limit; and one that takes longer than it."""
    pid, total = box.pid(), watchdog(box)["restarts_total"]
    with Asker(box, 400, clients=3) as load:
        end = time.monotonic() + 2 * STALL_S
        while time.monotonic() < end:
            assert watchdog(box)["status"] in ("ok", "suspect")
            time.sleep(3)
    assert (load.failed, box.pid(), watchdog(box)["restarts_total"]) == (0, pid, total)
    say("watchdog_busy", load)  # type: ignore[arg-type]


def test_one_slow_request_is_left_alone(box: Box) -> None:
    """A request that takes longer than the limit, token by token, because the machine is slow."""
    pid, total = box.pid(), watchdog(box)["restarts_total"]
    core = engine_core(box)
    with Asker(box, 480) as load:
        began = time.monotonic()
        while load.requests < 2 and time.monotonic() < began + 1.5 * STALL_S:
            # Stopped for most of each second: a hundred times slower, and not hung.
            box.run(f"kill -STOP {core}; sleep 2; kill -CONT {core}; sleep 0.02", check=False)
            load.stop.set()
    took = time.monotonic() - began
    assert took > STALL_S, f"the request took {took:.0f} s, which proves nothing"
    assert (load.failed, box.pid(), watchdog(box)["restarts_total"]) == (0, pid, total)
    say("watchdog_slow", load)  # type: ignore[arg-type]


def test_a_hung_engine_behind_a_healthy_server_is_ended_and_comes_back(box: Box) -> None:
    pid, total = box.pid(), watchdog(box)["restarts_total"]
    core = engine_core(box)
    with Asker(box, 400) as load:
        while load.requests < 3:
            time.sleep(0.1)
        box.run(f"kill -STOP {core}")
        stopped = time.monotonic()
        assert box.run(
            f"python3 -c 'import urllib.request as u; print(u.urlopen(\"http://{box.address}:8000/health\").status)'"
        ) == "200", "the server still calls itself healthy"  # fmt: skip
        while box.pid() == pid:
            assert time.monotonic() - stopped < 4 * STALL_S, watchdog(box)
            time.sleep(1)
        assert time.monotonic() - stopped > STALL_S / 2
        load.stop.set()
        box.wait_answer(300)
    state = watchdog(box)
    assert state["restarts_total"] == total + 1
    assert state["restarts"][-1]["reason"] == "no_progress"
    assert "no_progress: lane main ended" in box.run("journalctl -u vllm-watchdog@main -n 30 --no-pager -o cat")
    assert 1 <= load.failed <= 2
    say("watchdog_hung", load)  # type: ignore[arg-type]


def test_an_engine_that_hangs_while_idle_is_found_before_a_client_finds_it(box: Box) -> None:
    pid, total = box.pid(), watchdog(box)["restarts_total"]
    box.run(f"kill -STOP {engine_core(box)}")
    stopped = time.monotonic()
    while box.pid() == pid:
        assert time.monotonic() - stopped < 300, watchdog(box)
        time.sleep(1)
    box.wait_answer(300)
    state = watchdog(box)
    assert state["restarts_total"] == total + 1
    assert state["restarts"][-1]["reason"] == "no_answer_when_idle"
    say("watchdog_idle")


def test_a_lane_that_cannot_start_ends_after_three_tries(box: Box) -> None:
    """The public report 079: a loop of restarts without end. The limit counts failures that take long, too."""
    box.run("systemctl stop vllm@main && systemctl reset-failed vllm@main")
    box.run(f"cd / && systemd-run -q --unit=squatter python3 -m http.server 8000 --bind {box.address}")
    try:
        box.run("systemctl start --no-block vllm@main")
        end = time.monotonic() + 120
        while (box.show("ActiveState"), box.show("Result")) != ("failed", "start-limit-hit"):
            assert time.monotonic() < end, box.run("systemctl status vllm@main --no-pager", check=False)
            time.sleep(1)
        time.sleep(20)
        assert box.show("ActiveState") == "failed", "nobody tries a fourth time"
        state = watchdog(box)
        assert (state["status"], state["reason"]) == ("down", "start_limit_hit")
    finally:
        box.run("systemctl stop squatter; systemctl reset-failed vllm@main; systemctl start --no-block vllm@main")
    box.wait_answer(300)
    say("watchdog_start_limit")


def test_the_start_limit_outlasts_the_longest_start(box: Box) -> None:
    """The public report 077: a limit of 90 s kills a load that needs minutes, again and again."""
    seconds = [box.run(f"systemctl show vllm@main -p {name} --value") for name in ("TimeoutStartUSec",)]
    assert seconds == ["6min"], "the profile's deadline of 300 s, and a minute"
    say("start_deadline")
