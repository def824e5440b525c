"""The record of a rollout on a box, and the engine's own count of its requests."""

from __future__ import annotations

import pytest
from vllm_fleet import engine_metrics, rollout
from vllm_fleet.errors import UsageError

T1, T2 = "2026-01-31T03:00:00Z", "2026-01-31T03:05:00Z"
LANES = {"main": {"from": "0f11aa22bb33", "to": "8c0e1f2ab34d"}}


def test_a_phase_keeps_its_time_and_the_lanes_until_the_next():
    first = rollout.advance(None, "leaving", "release_changed", "reconfigure", T1, LANES)
    assert first == {
        "schema": 1, "phase": "leaving", "since": T1, "reason": "release_changed", "by": "reconfigure", "lanes": LANES,
    }  # fmt: skip
    assert rollout.advance(first, "leaving", "release_changed", "reconfigure", T2, None) == first
    second = rollout.advance(first, "flipping", "release_changed", "reconfigure", T2, None)
    assert (second["phase"], second["since"], second["lanes"]) == ("flipping", T2, LANES)
    assert rollout.advance(first, "leaving", "resumed", "reconfigure", T2, None)["since"] == T2
    assert rollout.advance(first, "leaving", "release_changed", "rollback", T2, None)["since"] == T2
    assert rollout.advance(second, "done", "", "reconfigure", T2, {})["lanes"] == {}


@pytest.mark.parametrize(
    ("phase", "open_"), [("leaving", True), ("failed", True), ("done", False), ("rolled_back", False)]
)
def test_what_counts_as_unfinished(phase, open_):
    assert rollout.unfinished({"phase": phase}) is open_


def test_no_record_is_nothing_to_resume():
    assert rollout.unfinished(None) is False


@pytest.mark.parametrize("phase", ["", "Leaving", "a b", "../x"])
def test_phases_are_codes(phase):
    with pytest.raises(UsageError) as caught:
        rollout.advance(None, phase, "", "reconfigure", T1, None)
    assert caught.value.reason == "bad_phase"


def test_lanes_are_checked():
    with pytest.raises(UsageError):
        rollout.advance(None, "leaving", "", "reconfigure", T1, {"main": {"form": "x"}})


METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 2.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 4.0
vllm:generation_tokens_total{engine="0"} 1.5e+03
python_info{implementation="CPython"} 1.0
broken line
"""


def test_requests_are_summed_over_engines():
    assert engine_metrics.sums(METRICS)["vllm:generation_tokens_total"] == 1500
    assert engine_metrics.in_flight(METRICS) == 7


@pytest.mark.parametrize("text", ["", "vllm:num_requests_running 0.0\n", "<html>", "vllm:num_requests_running x\n"])
def test_what_is_not_said_is_unknown_and_not_idle(text):
    assert engine_metrics.in_flight(text) is None


# --- the plan of a box ----------------------------------------------------------------------------------------------


def row(lane: str = "main", before: str = "aaa", after: str = "bbb", reason: str = "release_changed") -> dict:
    return {"lane": lane, "before": before, "after": after, "restarted": reason != "as_wanted", "reason": reason}


def stand(phase: str = "", **lanes: dict) -> dict:
    """Return a result of the module rollout_state; without a phase there is no record."""
    return {"unfinished": phase not in ("", "done"), "after": {"phase": phase, "lanes": lanes} if phase else {}}


def test_only_what_differs_moves():
    rows = [row(), row("other", "ccc", "ccc", "as_wanted")]
    assert rollout.plan(stand(), rows) == {
        "moving": ["main"], "record": {"main": {"from": "aaa", "to": "bbb"}}, "reason": "release_changed",
    }  # fmt: skip
    assert rollout.plan(stand("done", main={"from": "x", "to": "y"}), rows[1:]) == {
        "moving": [], "record": {}, "reason": "as_wanted",
    }  # fmt: skip


def test_an_interrupted_box_goes_on_also_when_it_runs_what_is_wanted():
    """Flipped and never proven: it may stand outside, and a failure goes back to where the first run began."""
    planned = rollout.plan(
        stand("flipping", main={"from": "aaa", "to": "bbb"}), [row("main", "bbb", "bbb", "as_wanted")]
    )
    assert planned == {"moving": ["main"], "record": {"main": {"from": "aaa", "to": "bbb"}}, "reason": "interrupted"}


def test_another_wish_after_an_interruption_still_goes_back_to_the_beginning():
    planned = rollout.plan(stand("flipping", main={"from": "aaa", "to": "bbb"}), [row("main", "bbb", "ccc")])
    assert planned["record"] == {"main": {"from": "aaa", "to": "ccc"}}
    assert planned["reason"] == "release_changed"


def test_a_record_without_lanes_is_about_all_of_them():
    rows = [row("main", "a", "a", "as_wanted"), row("other", "b", "b", "as_wanted")]
    assert rollout.plan(stand("leaving"), rows)["moving"] == ["main", "other"]


def test_an_interrupted_lane_brings_no_other_lane_with_it():
    rows = [row("main", "a", "a", "as_wanted"), row("other", "b", "b", "as_wanted")]
    assert rollout.plan(stand("leaving", other={"from": "b", "to": "c"}), rows)["moving"] == ["other"]


def test_a_new_lane_has_no_way_back():
    record = rollout.plan(stand(), [row(before=None), row("old")])["record"]
    assert rollout.way_back(record) == [{"lane": "old", "back_to": "aaa"}]


def test_who_is_alone():
    def lanes(*models: str) -> list[dict]:
        return [{"lane": f"l{number}", "served_names": [model]} for number, model in enumerate(models)]

    fleet = {"b1": lanes("tiny", "big"), "b2": lanes("tiny")}
    assert rollout.alone({"b1": ["l0", "l1"], "b2": []}, fleet) == ["b1:l1"]
    assert rollout.alone({"b1": ["l0"]}, {"b1": fleet["b1"]}) == ["b1:l0"]
    assert rollout.alone({"b1": []}, fleet) == []


def test_the_table_names_every_box():
    outcomes = {
        "b1": {"state": "changed", "out_s": 41.5, "record": {"main": {"from": "aaa", "to": "bbb"}}, "message": ""},
        "b2": {"state": "rolled_back", "record": {"main": {"from": None, "to": "bbb"}}, "message": "late\nlong text"},
        "b3": {"state": "ready", "record": {}},
        "b4": {"state": "unreachable", "message": "unreachable: no route"},
    }
    assert rollout.spent(outcomes) == ["b2", "b4"]
    lines = rollout.table(outcomes).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["b1", "changed"], ["b2", "rolled_back"], ["b3", "untouched"], ["b4", "unreachable"],
    ]  # fmt: skip
    assert "41.5 s" in lines[1]
    assert "main none -> bbb" in lines[2]
    assert lines[2].endswith("late")


def lanes_of(**shared: list[str]) -> dict:
    """Return resolved lanes by box: one of its own each, and those that span boxes."""
    boxes = [f"b{number}" for number in range(1, 11)]
    found: dict = {box: [{"lane": "own", "served_names": ["m"]}] for box in boxes}
    for name, members in shared.items():
        for rank, box in enumerate(members):
            found[box].append({"lane": name, "served_names": ["w"], "part": {"rank": rank, "boxes": members}})
    return found


@pytest.mark.parametrize(
    ("count", "ramp", "sizes"),
    [
        (1, [1, "10%", "25%"], [1]),
        (4, [1, "10%", "25%"], [1, 1, 1, 1]),
        (10, [1, "20%", "50%"], [1, 2, 5, 2]),
        (5, [2], [2, 2, 1]),
        (3, ["100%"], [3]),
    ],
)
def test_batches_follow_the_ramp(count, ramp, sizes):
    boxes = [f"b{number}" for number in range(1, count + 1)]
    made = rollout.batches(boxes, lanes_of(), ramp)
    assert [len(batch) for batch in made] == sizes
    assert [box for batch in made for box in batch] == boxes


def test_boxes_that_share_a_lane_change_together():
    made = rollout.batches(["b1", "b2", "b3", "b4"], lanes_of(wide=["b2", "b4"]), [1, 2])
    assert made == [["b1"], ["b2", "b4"], ["b3"]]


@pytest.mark.parametrize("ramp", [[], [0], ["0%"], ["110%"], ["x"], [True], [-1]])
def test_a_ramp_that_means_nothing_is_refused(ramp):
    with pytest.raises(UsageError) as caught:
        rollout.batches(["b1"], lanes_of(), ramp)
    assert caught.value.reason == "bad_ramp"


def test_a_part_without_http_stands_in_for_nobody():
    fleet = lanes_of(wide=["b1", "b2"])
    assert rollout.alone({"b1": ["wide"], "b2": ["wide"]}, fleet) == ["b1:wide"]
