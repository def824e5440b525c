"""The per-card probe: who is asked, what each answer means, and that a hang ends."""

from __future__ import annotations

import argparse
import json
import stat
import time

import pytest
from vllm_fleet import checks, engine_python
from vllm_fleet.commands import probe
from vllm_fleet.errors import RefusedError, UsageError

from tests import simulator

#: stands in for the engine's Python: one behaviour a card
PROGRAM = """#!/bin/sh
case "$CUDA_VISIBLE_DEVICES" in
*0|0) echo '{"outcome": "right", "milliseconds": 3.5, "torch": "2.11.0"}' ;;
*1|1) echo '{"outcome": "wrong", "milliseconds": 3.5, "torch": "2.11.0"}' ;;
*2|2) sleep 600 ;;
*3|3) echo 'Traceback (most recent call last):' >&2; echo 'RuntimeError: CUDA error: device lost' >&2; exit 1 ;;
esac
"""


@pytest.fixture
def engine(tmp_path):
    program = tmp_path / "python"
    program.write_text(PROGRAM)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return engine_python.EnginePython(str(program), {}, None, None)


def outcome(results):
    return [(item["status"], item["reason"]) for item in results]


def test_each_card_by_itself_and_a_hang_ends(engine):
    started = time.monotonic()
    results = probe.probe(simulator.box("box2"), engine, "cuda", 1.0)
    assert time.monotonic() - started < 10
    assert outcome(results) == [
        ("pass", "probe_right"),
        ("fail", "probe_wrong"),
        ("fail", "probe_hang"),
        ("fail", "probe_error"),
    ]
    assert "device lost" in results[3]["message"]
    assert checks.exit_code(results) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"processes": [{"pid": 1, "name": "x", "memory_mib": 1}]}, "gpu_busy"),
        ({"memory_used_mib": 1025}, "gpu_busy"),
        ({"memory_used_mib": None}, "gpu_busy"),
        ({"health": "lost"}, "gpu_lost"),
        ({"mig": True}, "mig_enabled"),
    ],
)
def test_a_card_in_use_is_never_touched(engine, change, reason):
    facts = simulator.box("box2")
    facts["gpus"] = facts["gpus"][:1]
    facts["gpus"][0].update(change)
    assert outcome(probe.probe(facts, engine._replace(python="/never/started"), "cuda", 5)) == [("unknown", reason)]


def test_corex_cards_are_named_by_index(engine):
    facts = simulator.box("box2")
    facts["vendor"] = "corex"
    for gpu in facts["gpus"]:
        gpu["uuid"] = None
    assert outcome(probe.probe({**facts, "gpus": facts["gpus"][:2]}, engine, "cuda", 5)) == [
        ("pass", "probe_right"),
        ("fail", "probe_wrong"),
    ]


def test_cards_by_name_or_all_by_number():
    facts = simulator.box("box2")
    uuids = [gpu["uuid"] for gpu in facts["gpus"]]
    assert engine_python.devices(facts) == uuids
    facts["gpus"][2]["uuid"] = None
    assert engine_python.devices(facts) == ["0", "1", "2", "3"]
    assert engine_python.devices({**simulator.box("box2"), "vendor": "corex"}) == ["0", "1", "2", "3"]


def test_an_interpreter_that_is_not_there_proves_nothing(engine):
    facts = simulator.box("box2")
    results = probe.probe(facts, engine._replace(python="/nowhere/python"), "cuda", 5)
    assert set(outcome(results)) == {("unknown", "not_started")}


@pytest.mark.parametrize(
    "words",
    [
        "ModuleNotFoundError: No module named 'torch'",
        "ImportError: libcudart.so.13: cannot open shared object file",
        "AssertionError: Torch not compiled with CUDA enabled",
    ],
)
def test_an_interpreter_without_a_fit_torch_proves_nothing(engine, tmp_path, words):
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "{words}" >&2; exit 1\n')
    facts = simulator.box("box2")
    assert set(outcome(probe.probe(facts, engine, "cuda", 5))) == {("unknown", "not_started")}


def test_the_command(engine, monkeypatch, capsys):
    parser = argparse.ArgumentParser()
    probe.add_arguments(parser)
    facts = simulator.box("box2")
    monkeypatch.setattr(probe.collect, "read", lambda: {**facts, "gpus": facts["gpus"][:1]})
    assert probe.run(parser.parse_args(["--python", engine.python, "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["reason"] == "probe_right"
    monkeypatch.setattr(probe.collect, "read", lambda: {"gpus": None, "extra": {"message": "Driver Not Loaded"}})
    with pytest.raises(RefusedError) as caught:
        probe.run(parser.parse_args(["--python", engine.python]))
    assert caught.value.reason == "gpus_unreadable"
    with pytest.raises(UsageError) as wrong:
        probe.run(parser.parse_args(["--python", "/nowhere/python"]))
    assert wrong.value.reason == "no_python"


def test_which_engine(tmp_path):
    with pytest.raises(UsageError) as caught:
        engine_python.find(None, None, str(tmp_path))
    assert caught.value.reason == "which_engine"
