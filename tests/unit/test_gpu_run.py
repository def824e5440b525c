"""The parts of `make test-gpu` that need neither a card nor an engine."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
from vllm_fleet import catalog, engine_python, verdict_store

from tests import simulator
from tests.gpu import __main__ as gpu
from tests.gpu import hardware, place
from tests.gpu.report import NotRunError, Report, StepError

FAKES = Path(__file__).resolve().parent.parent / "fakes"


def pair_of_cards():
    extra = {"nodes": ["/dev/nvidia0"], "board": {"bios_version": "1"}, "module": {"flavour": "open"}, "message": ""}
    return {**simulator.box("h200x2"), "extra": extra}


@pytest.fixture
def links(tmp_path, monkeypatch):
    """Both arms with a stand-in for torch, and the verdict below a temporary root."""
    facts = pair_of_cards()
    load, save = verdict_store.load, verdict_store.save
    monkeypatch.setattr(verdict_store, "load", lambda root=str(tmp_path): load(root))
    monkeypatch.setattr(verdict_store, "save", lambda document, root=str(tmp_path): save(document, root))
    known = lambda: hardware.verdict.for_facts(verdict_store.load(), facts)  # noqa: E731
    monkeypatch.setattr(hardware.collect, "read", lambda: {**copy.deepcopy(facts), "p2p_verdict": known()})
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    links = hardware.Links(facts, engine_python.EnginePython(sys.executable, {}, None, None), 2)
    links.launcher = links.launcher._replace(backend="gloo", sizes=(16, 4096), start_s=20.0, pair_s=10.0)
    return links


def test_the_links_pass_and_their_verdict_is_used_and_forgotten(links):
    message, figures = links.both_arms()
    assert "same values" in message
    assert set(figures["milliseconds"]["0-1"]) == {"control", "found"}
    assert links.used_and_forgotten()[1] == {"p2p_level_unproven": "NVL", "p2p_level_proven": "SYS"}


def test_a_corrupted_arm_fails_and_a_killed_one_proves_nothing(links):
    assert links.faulty("corrupt", "fail", "wrong_data")[1]["required"] == "p2p_failed"
    assert links.faulty("killed", "inconclusive", "killed")[1]["required"] != "p2p_failed"
    assert verdict_store.load() is None
    with pytest.raises(StepError, match="expected fail"):
        links.faulty("killed", "fail", "wrong_data")


def test_what_only_a_card_can_show_is_not_run_on_simulated_ones(links):
    links.facts["extra"]["nodes"] = []
    for step in (
        links.both_arms,
        links.used_and_forgotten,
        lambda: hardware.compute(links.facts, links.launcher.engine),
    ):
        with pytest.raises(NotRunError, match="simulated"):
            step()


def test_a_step_that_fails_holds_up_those_that_need_it_and_no_other(capsys):
    report = Report()

    def broken():
        raise StepError("found 3 MiB", {"used": 3})

    assert not report.step("one", broken)
    assert not report.step("two", lambda: ("fine", {}), ("one",))
    assert not report.step("three", lambda: ("fine", {}), ("two",))
    assert report.step("four", lambda: ("fine", {"seconds": 1.5}))
    assert not report.step("five", lambda: 1 / 0)
    document = report.document()
    assert [step["status"] for step in document["steps"]] == ["fail", "not_run", "not_run", "pass", "fail"]
    assert document["counts"] == {"pass": 1, "fail": 2, "not_run": 2}
    assert (document["status"], document["steps"][0]["figures"]) == ("fail", {"used": 3})
    assert "needs one" in report.table()
    assert "not_run two" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "cap", "size"),
    [
        (["a"], 8, 1),
        (["a"] * 2, 8, 2),
        (["a"] * 2, 1, 1),
        (["a"] * 3, 8, 2),
        (["a"] * 8, 8, 8),
        (["a", "b", "b"], 8, 2),
    ],
)
def test_the_lane_takes_a_power_of_two_of_alike_cards(names, cap, size):
    assert gpu.tensor_parallel([{"name": name} for name in names], cap) == size


@pytest.mark.parametrize(
    ("change", "owned", "free"),
    [
        ({}, [], [0, 1]),
        ({"processes": [{"pid": 1}]}, [], [1]),
        ({"memory_used_mib": 5000}, [], [1]),
        ({"health": "lost"}, [], [1]),
        ({}, ["1"], [0]),
        ({}, ["GPU-c2000000-0000-4000-8000-000000000000"], [1]),
        ({}, ["GPU-b1a0"], [0, 1]),
    ],
)
def test_cards_in_use_and_those_of_other_lanes_are_left_alone(change, owned, free):
    facts = pair_of_cards()
    facts["gpus"][0].update(change)
    assert [card["index"] for card in hardware.idle(facts, owned)] == free
    expected = ["0-1"] if not change else []
    assert hardware.Links(facts, engine_python.EnginePython("x", {}, None, None), 2).pairs == expected


def test_the_lane_of_an_installed_engine(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    answer = f'{{"prefix": "{tmp_path}", "site": "x", "python": "3.12", "vllm": "0.25.1", "torch": "2.11.0"}}'
    python.write_text(f"#!/bin/sh\necho '{answer}'\n")
    python.chmod(0o755)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/driver/lib64")
    lane = place.resolve(str(tmp_path), 2, {})
    assert (lane["profile"], lane["engine"]["version"]) == ("tiny-cuda", "0.25.1")
    assert lane["entry"][0] == f"{tmp_path}/bin/vllm"
    assert lane["engine"]["site_packages"] == f"{tmp_path}/lib/python3.12/site-packages"
    assert lane["env"]["LD_LIBRARY_PATH"] == "/opt/driver/lib64"
    assert ["--tensor-parallel-size", "2"] in lane["args"]
    python.write_text(f"#!/bin/sh\necho '{answer.replace('0.25.1', '0.32.0+cpu')}'\n")
    assert place.resolve(str(tmp_path), 2, {})["profile"] == "tiny-cpu"
    python.write_text(f"#!/bin/sh\necho '{answer.replace(chr(34) + '0.25.1' + chr(34), 'null')}'\n")
    with pytest.raises(SystemExit, match="no vLLM"):
        place.installed_engine(str(tmp_path), catalog.load(str(place.ROOT / "catalog")))


def test_tiny_cuda_uses_no_nvlink_multicast():
    """It is memory of a switch that virtual machines share; vLLM's defaults would use it on two Hopper cards."""
    profile = catalog.load(str(place.ROOT / "catalog")).profile("tiny-cuda")
    assert profile["args"]["--compilation-config"]["pass_config"] == {"fuse_allreduce_rms": False}
    for name in ("NCCL_NVLS_ENABLE", "VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER"):
        assert profile["env"][name] == 0
