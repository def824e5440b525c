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
