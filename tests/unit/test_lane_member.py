"""A member of a lane that spans boxes, in a play: when it ends, and when it counts as ready."""

from __future__ import annotations

import json

import pytest

from tests import in_process

LANE = {
    "lane": "main",
    "part": {"rank": 1, "boxes": ["h", "m"], "addresses": ["10.0.0.1", "10.0.0.2"], "master_port": 1, "peer_port": 2},
    "rendered": {"argv": ["vllm", "serve", "/m", "--shutdown-timeout", "10"]},
}


def head(**changes):
    """Return what the head's watchdog says."""
    record = {
        "schema": 1, "lane": "main", "box": "h", "state": "active", "alive": True, "enabled": True, "invocation": "h1",
        "restarts": 0, "partners": {"m": "m1"}, **changes,
    }  # fmt: skip
    return {"status": "answered", "record": record}


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def activate(tmp_path, monkeypatch):
    """Return the module with a clock, and a member that is joined with the head's process h1."""
    loaded = in_process.load("lane_activate", monkeypatch)
    monkeypatch.setattr(loaded.release, "RUNTIME", str(tmp_path))
    loaded.time = Clock()
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "peers.json").write_text(json.dumps({"partners": {"h": "h1"}}))
    return loaded


def waited(loaded, said, lane=LANE):
    """Return the seconds that the member waited; ``said`` is what the head's watchdog says from which second on."""

    def told(address, port, name):
        assert (address, port, name) == ("10.0.0.1", 2, "main")
        return [answer for since, answer in said if since <= loaded.time.now][-1]

    loaded.wait_for_head("main", lane, told)
    return loaded.time.now


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ([(0, head(state="deactivating")), (7, head(state="inactive", alive=False))], 7),
        ([(0, head()), (2, head(state="deactivating")), (9, head(invocation="h2"))], 9),
        ([(0, head())], 15),  # it does not end at all
        ([(0, head(invocation="h2", state="activating"))], 0),
        ([(0, {"status": "silent"})], 0),
    ],
)
def test_a_member_ends_after_its_heads_last_request(activate, said, seconds):
    assert waited(activate, said) == pytest.approx(seconds)


def test_nobody_else_waits(activate, tmp_path):
    assert waited(activate, [(0, head())], {"lane": "main"}) == 0
    assert waited(activate, [(0, head())], {**LANE, "part": {**LANE["part"], "rank": 0}}) == 0
    (tmp_path / "main" / "peers.json").unlink()
    assert waited(activate, [(0, head())]) == 0, "it is joined with nobody"


@pytest.mark.parametrize(
    ("said", "started", "state"),
    [
        (head(), True, "ready"),
        (head(state="activating"), True, "starting"),
        (head(partners={}), True, "starting"),
        (head(partners={"m": "m0"}), True, "starting"),
        (head(state="failed", alive=False), True, "failed"),
        (head(state="activating", restarts=1), True, "starting"),
        (head(state="activating", restarts=2), True, "failed"),
        (head(state="activating", restarts=2), False, "starting"),
        ({"status": "refused"}, True, "starting"),
    ],
)
def test_a_member_is_ready_when_the_head_answered_with_this_very_process(monkeypatch, said, started, state):
    probe = in_process.load("lane_probe", monkeypatch)
    monkeypatch.setattr(probe.peer_link, "ask", lambda *_args: said)
    row = probe.member(
        LANE, {"lane": "main", "phase": "x"}, {"InvocationID": "m1"}, {"lane": "main"} if started else None
    )
    assert row["state"] == state
