"""The module ``p2p_proof`` in this process: box1's simulated cards, a stand-in for torch, real ranks."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_fleet import verdict_store

from tests import in_process, simulator
from tests.unit.preflight_fixtures import LANE

FAKES = Path(__file__).resolve().parent.parent / "fakes"


def lane(**policy: Any) -> dict[str, Any]:
    made = copy.deepcopy(LANE)
    made["engine"]["python"], made["env"] = sys.executable, {}
    made["policy"] = {"enabled": True, "tensor_parallel": 2, "pipeline_parallel": 2, "p2p": "proven", **policy}
    return made


@pytest.fixture
def prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs the module for one lane; ``prove.facts`` are the box's."""
    loaded = in_process.load("p2p_proof", monkeypatch)
    facts = {**simulator.box("box1"), "extra": {"message": ""}}
    for name in ("load", "save"):
        original = getattr(loaded.verdict_store, name)
        monkeypatch.setattr(loaded.verdict_store, name, lambda *args, original=original: original(*args, str(tmp_path)))
    monkeypatch.setattr(loaded.collect, "read", lambda timeout: facts)
    quick = functools.partial(loaded.p2p_proof.prove, sizes=(16,), pair_s=2)
    monkeypatch.setattr(loaded.p2p_proof, "prove", quick)
    monkeypatch.setattr(loaded.p2p_proof.start, "forget_stale_links", lambda facts: [])
    monkeypatch.setenv("PYTHONPATH", str(FAKES))

    def run(made: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
        return in_process.run(loaded, monkeypatch, lanes=[made or lane()], backend="gloo", **params)

    run.facts = facts  # type: ignore[attr-defined]
    run.file = Path(verdict_store.path(str(tmp_path)))  # type: ignore[attr-defined]
    return run


def test_links_are_proven_once(prove: Any) -> None:
    foretold = prove(check=True)
    assert (foretold["changed"], foretold["results"], prove.file.exists()) == (True, [], False)
    done = prove()
    assert (done["changed"], done["reason"]) == (True, "proven")
    assert (done["before"], done["after"]) == ({}, {"0-2": "pass", "1-3": "pass"})
    again = prove()
    assert (again["changed"], again["reason"]) == (False, "still_valid")
    assert [item["reason"] for item in again["results"]] == ["still_valid"] * 2


def test_a_link_that_fails_is_said_and_kept(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FLEET_P2P_TEST_FAULT", "corrupt")
    done = prove()
    assert "failed" not in done
    assert done["after"] == {"0-2": "fail", "1-3": "fail"}
    assert "wrong_data" in done["warned"][0]
    monkeypatch.delenv("VLLM_FLEET_P2P_TEST_FAULT")
    assert prove(pairs="open")["after"] == done["after"]
    assert prove(pairs="all")["after"] == {"0-2": "pass", "1-3": "pass"}


def test_cards_in_use_are_left_alone(prove: Any) -> None:
    """Also those that a lane of this box uses: its transfers would run into the check's."""
    for gpu in prove.facts["gpus"][:2]:
        gpu["processes"] = [{"pid": 1, "name": "python", "memory_mib": 900}]
    found = prove()
    assert (found["changed"], found["reason"], found["after"]) == (False, "gpus_busy", {})
    assert {item["status"] for item in found["results"]} == {"unknown"}


def test_what_gave_no_answer_is_tried_again_only_when_asked(prove: Any) -> None:
    broken = lane()
    broken["env"] = {"PYTHONPATH": "/nowhere"}  # no torch
    assert prove(broken)["after"] == {"0-2": "inconclusive", "1-3": "inconclusive"}
    assert (prove()["changed"], prove()["after"]["0-2"]) == (False, "inconclusive")
    assert prove(pairs="open")["after"]["0-2"] == "pass"


@pytest.mark.parametrize(
    "policy", [{"p2p": "trusted"}, {"enabled": False}, {"tensor_parallel": 1, "pipeline_parallel": 1}]
)
def test_a_lane_without_a_wish_for_proof_starts_nothing(prove: Any, policy: dict[str, Any]) -> None:
    assert prove(lane(**policy))["reason"] == "nothing_to_prove"
    assert not prove.file.exists()
