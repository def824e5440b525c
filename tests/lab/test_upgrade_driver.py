"""The upgrade of drivers through real lanes: the whole order of steps on boxes that serve, without the reboot.

A container has no kernel of its own, so no driver is changed here (`make test-vm` does that); the boxes are taken
through all steps by force, and the simulated cards are computed on by the CPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from conftest import Box, play

# Two plays that stop, prove and start both engines, one after the other.
pytestmark = pytest.mark.timeout(1200)

FORCE = {
    "driver_upgrade_force": True, "nvidia_driver_source": "none", "nvidia_driver_fail_on": [],
    "driver_upgrade_fail_on": ["gpu_count"], "driver_upgrade_probe_arguments": ["--device", "cpu"],
    "driver_upgrade_p2p_backend": "gloo", "driver_upgrade_release_deadline": 2,
}  # fmt: skip


def upgrade(*words: str, **variables):
    return play("playbooks/upgrade_driver.yml", "-e", json.dumps({**FORCE, **variables}), *words)


def record(box: Box) -> dict:
    return json.loads(box.run("cat /var/lib/vllm-fleet/rollout.json 2>/dev/null || echo '{}'"))


@pytest.fixture(scope="module", autouse=True)
def as_the_lab_was_made(box1: Box, box2: Box) -> Iterator[None]:
    """Take the records and the verdicts about the links away again."""
    yield
    for box in (box1, box2):
        box.run("rm -f /var/lib/vllm-fleet/rollout.json /var/lib/vllm-fleet/verdicts/p2p.json")


def test_boxes_go_one_after_the_other_and_answer_again(box1: Box, box2: Box) -> None:
    before = box1.pid(), box2.pid()
    played = upgrade()
    assert played.status == 0, played.text
    assert played.failed == {"box1": 0, "box2": 0}
    for box, pid in zip((box1, box2), before, strict=True):
        assert box.pid() != pid, "the lane was stopped for it"
        assert box.show("UnitFileState") == "enabled"
        assert record(box)["phase"] == "done"
        box.wait_answer(30)
    assert len(re.findall(r"^PLAY \[Upgrade the drivers\]", played.text, re.M)) == 2
    order = [found.start() for found in re.finditer(r"Record that the box is done", played.text)]
    assert len(order) == 2, "the second box begins when the first is done"


def test_a_driver_that_cannot_be_had_is_refused_while_the_lanes_serve(box1: Box, box2: Box) -> None:
    before = [(box.pid(), record(box)) for box in (box1, box2)]
    played = upgrade(nvidia_driver_source="distribution", nvidia_driver_version="1.2.3", reboot_allowed=True)
    assert played.status != 0
    assert "no_gpu" in played.text, "the simulated cards are not on the bus"
    assert "Leave rotation" not in played.text
    assert [(box.pid(), record(box)) for box in (box1, box2)] == before


def test_a_held_card_stops_the_rollout_and_the_lane_comes_back(box1: Box, box2: Box) -> None:
    """What holds the card is named; the box serves again, and the next one has not been touched."""
    untouched = box2.pid(), record(box2)
    box1.run("touch /dev/nvidia0; systemd-run --quiet --unit=training sh -c 'exec 3</dev/nvidia0; exec sleep 1000'")
    try:
        played = upgrade()
    finally:
        box1.run("systemctl stop training; rm -f /dev/nvidia0")
    assert played.status != 0
    assert "sleep of training.service: /dev/nvidia0" in " ".join(played.text.split())
    assert record(box1)["phase"] == "rolled_back"
    box1.wait_answer(30)
    assert (box2.pid(), record(box2)) == untouched
    assert "The boxes after it are untouched" in played.text
    assert re.search(r"^\W*box1\s+rolled_back", played.text, re.M)


def test_the_status_is_there_to_be_asked_for(box1: Box) -> None:
    box1.run("cp /var/lib/vllm-fleet/rollout.json /root/kept")
    stuck = {**record(box1), "phase": "verifying", "since": "2026-01-01T00:00:00Z"}
    box1.run(f"echo '{json.dumps(stuck)}' > /var/lib/vllm-fleet/rollout.json")
    try:
        played = play("playbooks/rollout_status.yml")
    finally:
        box1.run("cp /root/kept /var/lib/vllm-fleet/rollout.json")
    assert played.status == 0, played.text
    assert re.search(
        r"box1\s+verifying\s+upgrade_driver\s+2026-01-01T00:00:00Z\s+\S+\s+unfinished for \d+ d", played.text
    )
