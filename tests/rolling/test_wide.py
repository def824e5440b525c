"""A lane over both boxes of the lab, tensor parallel 2: it serves, dies and comes back whole, and changes as one.

The lab must be up (``make lab``). The tests run in order; each prints ``scenario=… requests=N failed=M rolled_back=…``.
At the end the lab is as ``make lab`` made it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.conftest import SITE, Box, Played, play

# An engine over two boxes starts in about a minute on an idle machine, and a test may start it twice.
pytestmark = pytest.mark.timeout(1500)
START_S = 900

LANE = {
    "name": "main", "profile": "tiny-cpu", "port": 8000, "host": "{{ lab_ip }}", "checkpoint": "/srv/models/tiny",
    "served_names": ["tiny"], "api_key_file": "/etc/vllm-fleet/secrets/main.key", "boxes": ["box1", "box2"],
    "watchdog": {"interval_s": 5, "stall_s": 120, "silent_s": 60, "probe_every_s": 600},
    "readiness": {"deadline_s": START_S},
    # With tensor parallelism the embedding is compiled by the first request, even where all else is eager: half a
    # minute of two processors that says nothing about lanes over boxes.
    "env": {"TORCH_COMPILE_DISABLE": 1},
}  # fmt: skip


class Lane:
    """The lane and its two boxes."""

    def __init__(self, where: Path) -> None:
        self.where = where / "hosts.json"
        self.head, self.member = self.boxes = (Box("box1"), Box("box2"))

    def play(self, *args: str, lane: dict[str, Any] | None = None, **arguments: Any) -> Played:
        """Run a play with the lane on both boxes; ``arguments`` are the engine's, with underscores."""
        given = {f"--{name.replace('_', '-')}": value for name, value in arguments.items()}
        changed = {**LANE, **(lane or {}), "args": {"--tensor-parallel-size": 2, **given}}
        hosts = {box.name: {"vllm_lanes": [changed]} for box in self.boxes}
        self.where.write_text(json.dumps({"gpu-boxes": {"hosts": hosts}}))
        return play("-i", "inventories/lab", "-i", str(self.where), *args)

    def pids(self) -> list[int]:
        return [box.pid() for box in self.boxes]

    def states(self) -> list[str]:
        return [box.show("ActiveState") for box in self.boxes]

    def wait(self, states: list[str], deadline: float = START_S) -> None:
        """Wait until both units are in these states; fail with what both said."""
        end = time.monotonic() + deadline
        while self.states() != states:
            if time.monotonic() > end:
                said = [box.run("journalctl -u vllm@main -u vllm-watchdog@main -n 40 --no-pager") for box in self.boxes]
                raise AssertionError(f"{self.states()}, expected {states}\n" + "\n".join(said))
            time.sleep(1)

    def wait_whole(self, before: list[int]) -> None:
        """Wait until both parts are other processes than ``before`` and the lane answers."""
        end = time.monotonic() + START_S
        while set(self.pids()) & {*before, 0} and time.monotonic() < end:
            time.sleep(1)
        self.wait(["active", "active"])
        assert not set(self.pids()) & set(before)
        assert self.head.wait_answer()["model"] == "tiny"

    def watchdog(self, box: Box) -> dict[str, Any]:
        return json.loads(box.run("cat /var/lib/vllm-fleet/watchdog/main.json"))


class Load:
    """One client that asks the head again and again, and counts."""

    def __init__(self, box: Box) -> None:
        self.box, self.requests, self.failed = box, 0, 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.ask)

    def ask(self) -> None:
        while not self.stop.is_set():
            self.requests += 1
            try:
                self.box.complete()
            except OSError:
                self.failed += 1
                self.stop.wait(1)
            self.stop.wait(0.2)

    def __enter__(self) -> Load:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()


def say(scenario: str, load: Load | None = None, rolled_back: bool = False) -> None:
    requests, failed = (load.requests, load.failed) if load else (0, 0)
    print(f"\nscenario={scenario} requests={requests} failed={failed} rolled_back={'yes' if rolled_back else 'no'}")


@pytest.fixture(scope="module")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lane]:
    wide = Lane(tmp_path_factory.mktemp("wide"))
    done = wide.play(*SITE)
    assert done.status == 0, done.text[-3000:]
    yield wide
    back = play(*SITE)
    assert back.status == 0, back.text[-3000:]


def test_a_lane_over_two_boxes_serves(lane: Lane) -> None:
    assert lane.states() == ["active", "active"]
    with Load(lane.head) as load:
        while load.requests < 10:
            time.sleep(0.2)
    assert load.failed == 0
    words = lane.member.run(f"tr '\\0' ' ' < /proc/{lane.member.pid()}/cmdline")
    assert "--headless" in words
    assert "--node-rank 1" in words
    assert ":8000 " not in lane.member.run("ss -tlnH"), "a member has no HTTP server"
    environ = lane.member.run(f"tr '\\0' '\\n' < /proc/{lane.member.pid()}/environ").splitlines()
    assert "VLLM_API_KEY" not in "".join(environ)
    assert f"VLLM_HOST_IP={lane.member.address}" in environ
    listening = lane.member.run("ss -tlnpH | grep VLLM || true")
    assert lane.member.address in listening
    assert "0.0.0.0" not in listening, "the ranks' own ports have no key; they stay on the network between the boxes"
    for box, other in ((lane.head, "box2"), (lane.member, "box1")):
        assert lane.watchdog(box)["peers"][other] == {"joined": True, "state": "active", "status": "answered"}
    again = lane.play(*SITE)
    assert again.changed == {"box1": 0, "box2": 0}, again.text[-3000:]
    say("wide_serves", load)


def test_half_of_a_lane_is_refused(lane: Lane) -> None:
    before = lane.pids()
    done = lane.play("site.yml", "-l", "box1", max_model_len=256)
    assert done.status != 0
    assert "boxes_left_out" in done.text
    assert "box2" in done.text
    assert lane.pids() == before
    say("wide_half_refused")


def test_a_box_that_refuses_leaves_all_untouched(lane: Lane) -> None:
    before = lane.pids()
    lane.member.run("mount -o remount,size=32m /dev/shm")
    try:
        done = lane.play(*SITE, max_model_len=256)
    finally:
        lane.member.run("mount -o remount,size=1g /dev/shm")
    assert done.status != 0
    assert "shm_too_small" in done.text
    assert "boxes_not_ready" in done.text, "the head says why it was left alone"
    assert lane.pids() == before
    assert lane.head.complete()["model"] == "tiny"
    say("wide_member_refused")


@pytest.mark.parametrize("which", ["member", "head"])
def test_killing_one_part_takes_the_lane_out_and_brings_it_back_whole(lane: Lane, which: str) -> None:
    before = lane.pids()
    killed, other = (lane.member, lane.head) if which == "member" else (lane.head, lane.member)
    with Load(lane.head) as load:
        while load.requests < 3:
            time.sleep(0.2)
        killed.run("systemctl kill --signal=SIGKILL vllm@main")
        lane.wait_whole(before)
        asked = load.requests
        while load.requests < asked + 5:
            time.sleep(0.2)
        assert load.failed >= 1
        failed = load.failed
        time.sleep(2)
        assert load.failed == failed, "it answers again"
    journal = other.run("journalctl -u vllm-watchdog@main -n 50 --no-pager -o cat")
    assert which == "member" or "peer_" in journal, journal
    say(f"wide_kill_{which}", load)


def test_a_reconfigure_changes_both_boxes_together(lane: Lane) -> None:
    before = lane.pids()
    done = lane.play("playbooks/reconfigure.yml", "-e", "rollout_accept_downtime=true", "-e", "rollout_soak=5",
                     max_model_len=384)  # fmt: skip
    assert done.status == 0, done.text[-4000:]
    assert not set(lane.pids()) & set(before)
    assert lane.head.request("/v1/models")["data"][0]["max_model_len"] == 384
    assert [box.show("NRestarts") for box in lane.boxes] == ["0", "0"]
    say("wide_reconfigure")


def test_a_release_that_one_part_cannot_start_is_taken_back_on_both(lane: Lane) -> None:
    """The engine takes the argument and dies of it later: more context than the model has."""
    before = [box.run("readlink /etc/vllm-fleet/lanes/main/current") for box in lane.boxes]
    done = lane.play("playbooks/reconfigure.yml", "-e", "rollout_accept_downtime=true", "-e", "rollout_soak=5",
                     max_model_len=4096)  # fmt: skip
    assert done.status != 0
    assert [box.run("readlink /etc/vllm-fleet/lanes/main/current") for box in lane.boxes] == before, done.text[-4000:]
    assert lane.head.wait_answer()["model"] == "tiny"
    say("wide_taken_back", rolled_back=True)


def test_a_change_restarts_both_parts_once(lane: Lane) -> None:
    before = lane.pids()
    done = lane.play(*SITE, max_model_len=256)
    assert done.status == 0, done.text[-3000:]
    assert not set(lane.pids()) & set(before)
    assert lane.head.request("/v1/models")["data"][0]["max_model_len"] == 256
    assert [box.show("NRestarts") for box in lane.boxes] == ["0", "0"]
    again = lane.play(*SITE, max_model_len=256)
    assert again.changed == {"box1": 0, "box2": 0}, again.text[-3000:]
    say("wide_site")


def test_the_head_stops_and_starts_the_lane(lane: Lane) -> None:
    lane.head.run("systemctl stop vllm@main")
    lane.wait(["inactive", "inactive"])
    lane.head.run("systemctl start --no-block vllm@main")
    lane.wait(["active", "active"])
    assert lane.head.wait_answer()["model"] == "tiny"
    say("wide_stop_start")
