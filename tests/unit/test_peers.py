"""The boxes of one lane, each with its own watchdog: whatever happens to one, all end up together or down together."""

from __future__ import annotations

import itertools
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_fleet import peers
from vllm_fleet.facts import peer_link


class Part:
    """A simulated box: its unit as systemd runs it, and its watchdog with the real rules."""

    numbers = itertools.count(1)

    def __init__(self, box, others, leads, delay=0):
        self.box, self.others, self.leads, self.delay = box, others, leads, delay
        self.memory = peers.empty_memory()
        self.state, self.invocation, self.restarts, self.due = "inactive", "", 0, None
        self.reachable = True
        self.watching = True
        self.actions = []

    def start(self, now):
        self.state, self.invocation, self.due = "active", f"{self.box}{next(self.numbers)}", None

    def crash(self, now):
        """End the process; systemd starts it again after ten seconds."""
        self.state, self.due = "activating", now + 10
        self.restarts += 1

    def record(self):
        running = self.state in ("active", "deactivating")
        state = {
            "ActiveState": self.state, "MainPID": 1 if running else 0, "UnitFileState": "enabled",
            "InvocationID": self.invocation, "NRestarts": self.restarts,
        }  # fmt: skip
        return peers.record("main", self.box, state, self.memory["partners"])

    def tick(self, now, boxes):
        if self.due is not None and now >= self.due:
            self.start(now)
        if not self.watching or not self.reachable:
            return
        seen = {}
        for other in self.others:
            box = boxes[other]
            if not box.reachable:
                seen[other] = {"status": peers.SILENT}
            elif not box.watching:
                seen[other] = {"status": peers.REFUSED}
            else:
                seen[other] = {"status": peers.ANSWERED, "record": box.record()}
        self.memory, action = peers.judge(self.memory, self.record(), seen, now, self.leads)
        if action is None:
            return
        self.actions.append(action.reason)
        if action.verb == "kill":
            self.crash(now)
        elif action.verb == "stop":
            self.state, self.due = "inactive", None
        else:
            self.start(now)


class Lane:
    """A head and its members."""

    def __init__(self, members=1):
        names = [f"m{number}" for number in range(members)]
        self.head = Part("h", names, leads=True)
        self.members = [Part(name, ["h"], leads=False) for name in names]
        self.parts = [self.head, *self.members]
        self.boxes = {part.box: part for part in self.parts}
        self.now = 0.0

    def run(self, seconds, order=None):
        for _ in range(int(seconds / 2)):
            self.now += 2.0
            for part in order or self.parts:
                part.tick(self.now, self.boxes)

    def up(self):
        for part in self.parts:
            part.start(self.now)
        self.run(10)
        return self

    def whole(self):
        """Whether every part runs and is joined with the very processes that run."""
        head = self.head
        return all(
            part.state == "active"
            and part.memory["partners"].get("h") == head.invocation
            and head.memory["partners"].get(part.box) == part.invocation
            for part in self.members
        ) and head.state == "active"  # fmt: skip


@pytest.fixture(params=[1, 3])
def lane(request):
    return Lane(request.param).up()


def test_parts_that_start_join(lane):
    assert lane.whole()
    lane.run(300)
    assert lane.whole()
    assert [part.actions for part in lane.parts] == [[] for _ in lane.parts]


def test_a_member_that_dies_takes_all_down_and_all_come_back(lane):
    before = {part.invocation for part in lane.parts}
    lane.members[0].crash(lane.now)
    lane.run(60)
    assert lane.whole()
    assert not before & {part.invocation for part in lane.parts}, "no old process goes on"
    assert lane.head.actions[0] in ("peer_down", "peer_restarted")


def test_a_head_that_dies_takes_all_down_and_all_come_back(lane):
    before = {part.invocation for part in lane.parts}
    lane.head.crash(lane.now)
    lane.run(60)
    assert lane.whole()
    assert not before & {part.invocation for part in lane.parts}
    assert [len(part.actions) for part in lane.members] == [1] * len(lane.members)


def test_a_restart_of_all_at_once_ends_nobody(lane):
    """A play restarts every part, a moment apart."""
    for part in lane.parts:
        part.start(lane.now)
        lane.run(2)
    lane.run(30)
    assert lane.whole()
    assert all(not part.actions for part in lane.parts)


def test_a_play_that_stops_and_starts_all_ends_nobody(lane):
    """It reaches one box a moment before the other."""
    for part in lane.parts[::-1]:
        part.state = "inactive"
        lane.run(2)
    for part in lane.parts:
        part.start(lane.now)
    lane.run(30)
    assert lane.whole()
    assert all(not part.actions for part in lane.parts)


def test_a_head_that_answers_its_last_requests_is_not_cut_short(lane):
    lane.head.state = "deactivating"
    lane.members[0].crash(lane.now)
    lane.run(8)
    assert lane.head.actions == []
    assert lane.head.state == "deactivating"


def test_a_member_that_boots_first_waits(lane):
    for part in lane.parts:
        part.state, part.memory = "inactive", peers.empty_memory()
    for part in lane.members:
        part.start(lane.now)
    lane.run(14)
    assert all(part.actions == [] for part in lane.members)
    lane.head.start(lane.now)
    lane.run(10)
    assert lane.whole()


def test_a_head_that_was_stopped_stops_its_members_and_starts_them_again(lane):
    lane.head.state = "deactivating"
    lane.run(40)
    assert all(part.state == "active" for part in lane.members), "while the head still answers its last requests"
    lane.head.state = "inactive"
    lane.run(20)
    assert {part.state for part in lane.members} == {"inactive"}
    lane.run(300)
    assert {part.state for part in lane.parts} == {"inactive"}, "nothing starts by itself"
    lane.head.start(lane.now)
    lane.run(30)
    assert lane.whole()


def test_a_box_that_falls_silent_ends_the_rest_and_is_waited_for(lane):
    lost = lane.members[0]
    lost.reachable = False
    lane.run(60)
    assert "peer_silent" in lane.head.actions
    ended = lane.head.invocation
    lane.run(120)
    assert lane.head.invocation == ended, "it is ended once, then it waits"
    lost.state = "inactive"
    lost.memory = peers.empty_memory()
    lost.reachable = True
    lost.start(lane.now)  # a box that boots starts its unit
    lane.run(60)
    assert lane.whole()


def test_a_head_that_gave_up_for_want_of_a_box_starts_when_it_is_back(lane):
    lost = lane.members[0]
    lost.reachable = False
    lane.run(60)
    for part in lane.parts:
        part.state, part.due = "failed", None
    lane.run(60)
    assert lane.head.state == "failed"
    lost.reachable = True
    lane.run(60)
    assert lane.whole()
    assert lane.head.actions.count("peers_returned") == 1


def test_a_head_that_failed_by_itself_stays_down_for_a_person(lane):
    lane.head.state = "failed"
    lane.run(600)
    assert lane.head.state == "failed"
    assert {part.state for part in lane.members} == {"inactive"}


def test_a_member_is_started_once_for_a_start_of_the_head(lane):
    member = lane.members[0]
    member.state = "failed"
    lane.head.start(lane.now)
    lane.run(10)
    assert member.actions == ["head_started"]
    # What fails beside the same process of the head once more is left for a person.
    member.state = "failed"
    lane.head.memory["partners"].pop(member.box, None)
    lane.run(60)
    assert member.actions == ["head_started"]
    lane.head.start(lane.now)
    lane.run(60)
    assert lane.whole()


def test_a_watchdog_that_is_away_is_no_reason_to_end_anything(lane):
    lane.members[0].watching = False
    lane.run(300)
    assert not lane.head.actions
    lane.members[0].watching = True
    lane.run(20)
    assert lane.whole()


def test_a_restart_behind_a_watchdogs_back_is_seen_when_it_is_back(lane):
    lane.members[0].watching = False
    lane.members[0].start(lane.now)
    lane.run(20)
    lane.members[0].watching = True
    lane.run(60)
    assert lane.whole()


EVENTS = st.lists(
    st.tuples(st.sampled_from(["crash", "blind", "silent", "memory"]), st.integers(0, 2), st.integers(2, 40)),
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.randoms(use_true_random=False))
def test_after_any_trouble_the_lane_is_whole_again(events, random):
    """Crashes, watchdogs that are away, boxes out of reach, lost memories, in any order: no half, no endless loop."""
    lane = Lane(2).up()
    for kind, number, seconds in events:
        part = lane.parts[number]
        if kind == "crash" and part.state == "active":
            part.crash(lane.now)
        elif kind == "blind":
            part.watching = not part.watching
        elif kind == "silent":
            part.reachable = not part.reachable
        elif kind == "memory" and part.state != "active":
            part.memory = peers.empty_memory()  # the box was rebooted: its unit does not run either
        order = list(lane.parts)
        random.shuffle(order)
        lane.run(seconds, order)
    for part in lane.parts:
        part.watching = part.reachable = True
    lane.run(120)
    assert lane.whole(), [(part.box, part.state, part.invocation, part.memory) for part in lane.parts]
    quiet = [len(part.actions) for part in lane.parts]
    lane.run(300)
    assert [len(part.actions) for part in lane.parts] == quiet


# ---- the link --------------------------------------------------------------------------------------------------------


def unit(**changes):
    return {
        "ActiveState": "active", "MainPID": 7, "UnitFileState": "enabled", "InvocationID": "i", "NRestarts": 0,
        **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "alive"),
    [
        ({}, True),
        ({"ActiveState": "activating"}, True),
        ({"ActiveState": "deactivating"}, True),
        ({"ActiveState": "activating", "MainPID": 0}, False),
        ({"ActiveState": "failed", "MainPID": 0}, False),
        ({"ActiveState": "inactive"}, False),
    ],
)
def test_alive_means_that_there_is_a_process(changes, alive):
    assert peers.record("main", "a", unit(**changes), {})["alive"] is alive


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_box_says_how_it_stands():
    teller, port = peer_link.Teller(), free_port()
    said = peers.record("main", "a", unit(), {"b": "i2"})
    teller.say(said)
    teller.listen("127.0.0.1", port)
    try:
        assert peer_link.ask("127.0.0.1", port, "main") == {"status": "answered", "record": said}
        assert peer_link.ask("127.0.0.1", port, "other") == {"status": "refused"}
        teller.say({"schema": 1, "lane": "main"})
        assert peer_link.ask("127.0.0.1", port, "main") == {"status": "refused"}, "another version's record"
        assert peer_link.ask_all({"a": "127.0.0.1", "b": "127.0.0.1"}, port, "main").keys() == {"a", "b"}
    finally:
        teller.close()


def test_a_closed_door_is_not_silence():
    assert peer_link.ask("127.0.0.1", free_port(), "main") == {"status": "refused"}
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert peer_link.ask("127.0.0.1", mute.getsockname()[1], "main", timeout=0.1) == {"status": "silent"}


def test_an_address_that_is_not_here_is_an_error():
    with pytest.raises(OSError, match="address"):
        peer_link.Teller().listen("192.0.2.1", free_port())
