"""The two-arm check with real processes: torch is a stand-in, or the real one named by VLLM_FLEET_TEST_TORCH."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import pytest
from vllm_fleet import engine_python, p2p_proof, p2p_runner, verdict, verdict_store
from vllm_fleet.commands import p2p_check
from vllm_fleet.errors import RefusedError, UsageError

from tests import simulator

FAKES = Path(__file__).resolve().parent.parent / "fakes"
PYTHONS = {"stand-in": sys.executable}
if "VLLM_FLEET_TEST_TORCH" in os.environ:
    PYTHONS["torch"] = os.environ["VLLM_FLEET_TEST_TORCH"]


@pytest.fixture(params=list(PYTHONS))
def launcher(request, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKES) if request.param == "stand-in" else "")
    patient = 60 if request.param == "torch" else 10
    engine = engine_python.EnginePython(PYTHONS[request.param], {}, None, None)
    return p2p_runner.Launcher(engine, [f"GPU-{index}" for index in range(4)], "gloo", (16, 4096), patient, 2)


def leftovers():
    """Return the ranks of this test that are still alive."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                line = Path(f"/proc/{entry}/cmdline").read_bytes()
                parent = Path(f"/proc/{entry}/stat").read_text().rsplit(") ", 1)[1].split()[1]
            except OSError:
                continue
            if b"vllm-fleet-p2p." in line and parent in (str(os.getpid()), "1"):
                found.append(entry)
    return found


def test_equal_values_pass(launcher):
    results = p2p_proof.run_pairs(launcher, ["0-2", "1-3", "0-3"])
    assert {pair: result["status"] for pair, result in results.items()} == {"0-2": "pass", "1-3": "pass", "0-3": "pass"}
    arms = results["0-2"]["arms"]
    assert set(arms["control"]["milliseconds"]) == set(arms["found"]["milliseconds"]) == {"16", "4096"}
    assert leftovers() == []


def test_one_wrong_value_fails_the_pair(launcher, monkeypatch):
    monkeypatch.setenv("VLLM_FLEET_P2P_TEST_FAULT", "corrupt")
    result = p2p_proof.run_pairs(launcher, ["1-3"])["1-3"]
    assert (result["status"], result["reason"]) == ("fail", "wrong_data")
    assert "1 of 4096 values differ" in result["message"]
    assert result["arms"]["control"]["outcome"] == "equal"


def test_a_hang_ends_at_the_limit_and_leaves_nobody_behind(launcher, monkeypatch):
    monkeypatch.setenv("VLLM_FLEET_P2P_TEST_FAULT", "hang")
    started = time.monotonic()
    results = p2p_proof.run_pairs(launcher, ["0-2", "1-3"])
    assert {(result["status"], result["reason"]) for result in results.values()} == {("fail", "hang")}
    assert time.monotonic() - started < 2 * launcher.pair_s + 3 * launcher.start_s
    assert leftovers() == []


def test_a_killed_rank_proves_nothing_and_is_not_waited_for(launcher, monkeypatch):
    monkeypatch.setenv("VLLM_FLEET_P2P_TEST_FAULT", "killed")
    launcher = launcher._replace(pair_s=30)
    started = time.monotonic()
    results = p2p_proof.run_pairs(launcher, ["0-2", "1-3"])
    assert {(result["status"], result["reason"]) for result in results.values()} == {("inconclusive", "killed")}
    assert "SIGKILL" in results["0-2"]["message"]
    assert time.monotonic() - started < launcher.pair_s
    assert leftovers() == []


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    engine = engine_python.EnginePython(sys.executable, {}, None, None)
    return p2p_runner.Launcher(engine, ["GPU-0", "GPU-1", "GPU-2"], "gloo", (16,), 10, 2)


def test_a_collective_that_raises_fails_with_its_words(stand_in):
    env = {"FAKE_TORCH_REDUCE": "fail"}
    results = p2p_proof.run_pairs(stand_in._replace(engine=stand_in.engine._replace(env=env)), ["0-1", "1-2"])
    assert {(result["status"], result["reason"]) for result in results.values()} == {("fail", "error")}
    assert "NCCL error: unhandled system error" in results["0-1"]["message"]


@pytest.mark.parametrize(
    ("mode", "words"), [("fail", "libcudart.so.13: cannot open shared object file"), ("crash", "the library fell over")]
)
def test_a_torch_that_does_not_load_proves_nothing(stand_in, mode, words):
    env = {"FAKE_TORCH_IMPORT": mode}
    result = p2p_proof.run_pairs(stand_in._replace(engine=stand_in.engine._replace(env=env)), ["0-1"])["0-1"]
    assert (result["status"], result["reason"]) == ("inconclusive", "control_failed")
    assert words in result["message"]


def test_no_interpreter_proves_nothing(stand_in):
    engine = stand_in.engine._replace(python="/nowhere/python")
    result = p2p_proof.run_pairs(stand_in._replace(engine=engine), ["0-1"])["0-1"]
    assert result["status"] == "inconclusive"
    assert "/nowhere/python: No such file" in result["message"]


def test_the_arms_differ_in_p2p_alone(stand_in, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("VLLM_FLEET_P2P_TEST_FAULT", "corrupt")
    engine = stand_in.engine._replace(env={"NCCL_P2P_LEVEL": "LOC", "NCCL_PROTO": "LL", "LD_LIBRARY_PATH": "/opt/x"})
    launcher = stand_in._replace(engine=engine)
    control, found = launcher.environment("control"), launcher.environment("found")
    assert control.pop("NCCL_P2P_DISABLE") == "1"
    assert (found.pop("NCCL_P2P_LEVEL"), found.pop("VLLM_FLEET_P2P_TEST_FAULT")) == ("SYS", "corrupt")
    assert control == found
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1,GPU-2"
    assert (found["NCCL_PROTO"], found["LD_LIBRARY_PATH"]) == ("LL", "/opt/x")


def facts():
    return {**simulator.box("box1"), "extra": {"message": ""}}


def test_only_pairs_with_a_grant_are_worth_a_test():
    assert p2p_proof.choose(facts(), None) == ["0-2", "1-3"]
    assert p2p_proof.choose(facts(), "3-1, 0-1,1-3") == ["1-3", "0-1"]


@pytest.mark.parametrize("text", ["0-4", "0", "x-y", "0-0", "-", ","])
def test_pairs_that_are_none(text):
    with pytest.raises(UsageError) as caught:
        p2p_proof.choose(facts(), text)
    assert caught.value.reason == "bad_pairs"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"processes": [{"pid": 1}]}, "gpu_busy"),
        ({"processes": None}, "gpu_busy"),
        ({"memory_used_mib": 1025}, "gpu_busy"),
        ({"health": "lost"}, "gpu_lost"),
        ({"mig": True}, "mig_enabled"),
        ({}, None),
    ],
)
def test_a_card_in_use_is_left_alone(change, reason):
    box = facts()
    box["gpus"][2].update(change)
    assert p2p_proof._unfit(box, "0-2").get("reason") == reason


@pytest.fixture
def box(tmp_path, monkeypatch):
    """The command on box1's facts, with its state below a temporary root."""
    monkeypatch.setattr(p2p_check.collect, "read", lambda: state["facts"])
    monkeypatch.setattr(p2p_proof.start, "forget_stale_links", lambda facts: [])
    for name in ("load", "save"):
        original = getattr(verdict_store, name)
        monkeypatch.setattr(verdict_store, name, lambda *args, original=original: original(*args, str(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    state = {"facts": facts()}
    return state


def command(*words):
    parser = argparse.ArgumentParser()
    p2p_check.add_arguments(parser)
    fixed = ["--python", sys.executable, "--backend", "gloo", "--sizes", "16", "--pair-timeout", "2", "--json"]
    return p2p_check.run(parser.parse_args([*fixed, *words]))


def test_the_verdict_is_stored_held_and_made_again(box, capsys, monkeypatch):
    assert command() == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["p2p_verdict"] == {"status": "pass", "pairs": {"0-2": "pass", "1-3": "pass"}}
    assert verdict.for_facts(verdict_store.load(), box["facts"]) == shown["p2p_verdict"]

    monkeypatch.setenv("VLLM_FLEET_P2P_TEST_FAULT", "corrupt")
    assert command() == 0
    assert [item["reason"] for item in json.loads(capsys.readouterr().out)["results"]] == ["still_valid"] * 2

    assert command("--again", "--pairs", "1-3") == 1
    assert json.loads(capsys.readouterr().out)["p2p_verdict"]["pairs"] == {"0-2": "pass", "1-3": "fail"}

    box["facts"]["driver"]["loaded"] = box["facts"]["driver"]["userland"] = "620.10"
    monkeypatch.delenv("VLLM_FLEET_P2P_TEST_FAULT")
    assert command("--pairs", "0-2") == 0
    assert json.loads(capsys.readouterr().out)["p2p_verdict"]["pairs"] == {"0-2": "pass"}


def test_gloo_sends_little_unless_told_otherwise(box, monkeypatch):
    sent = []
    monkeypatch.setattr(
        p2p_proof, "run_pairs", lambda launcher, pairs: sent.append((launcher.backend, launcher.sizes)) or {}
    )
    plan = p2p_proof.plan(box["facts"])
    for words in ({"backend": "gloo"}, {"backend": "nccl"}, {"backend": "gloo", "sizes": [7]}):
        p2p_proof.prove(box["facts"], plan, None, **words)
    assert sent == [("gloo", (4096, 65536)), ("nccl", (4096, 41943040)), ("gloo", [7])]


def test_a_busy_pair_is_unknown_and_not_stored(box, capsys):
    box["facts"]["gpus"][0]["processes"] = [{"pid": 1, "name": "x", "memory_mib": 1}]
    assert command("--pairs", "0-2") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(item["status"], item["reason"]) for item in shown["results"]] == [("unknown", "gpu_busy")]
    assert (shown["p2p_verdict"], verdict_store.load()) == (None, None)


def test_unreadable_cards_are_refused(box):
    box["facts"].update(gpus=None, extra={"message": "Driver Not Loaded"})
    with pytest.raises(RefusedError) as caught:
        command()
    assert (caught.value.reason, "Driver Not Loaded" in caught.value.message) == ("gpus_unreadable", True)
