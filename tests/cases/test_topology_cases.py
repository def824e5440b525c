"""Public bug reports about topology: a fixture with facts, policy and expected outcome each, through the command."""

import json
from pathlib import Path

import pytest
from vllm_fleet.cli import main

CASES = sorted((Path(__file__).parent / "topology").glob("*.json"))


@pytest.mark.parametrize("case", CASES, ids=[case.stem for case in CASES])
def test_case(case, tmp_path, capsys):
    content = json.loads(case.read_text())
    expect = content["expect"]
    for name in ("facts", "policy"):
        (tmp_path / name).write_text(json.dumps(content[name]))
    status = main(["topology", "--facts", str(tmp_path / "facts"), "--policy", str(tmp_path / "policy")])
    output = capsys.readouterr()
    decision = json.loads(output.out)

    assert status == expect.get("exit", 0)
    assert output.err == ""
    assert decision["status"] == expect["status"]
    if "reason" in expect:
        assert decision["reason"] == expect["reason"]
    assert decision["order"] == expect.get("order", [])
    uuids = {gpu["index"]: gpu["uuid"] for gpu in content["facts"]["gpus"] or []}
    assert decision["lane"] == [uuids[index] for index in decision["order"]]
    for name, value in expect.get("env", {}).items():
        assert decision["env"][name]["value"] == value, name
    for name, source in expect.get("sources", {}).items():
        assert decision["env"][name]["source"] == source, name
    for key in ("engine_args", "binding"):
        if key in expect:
            assert decision[key] == expect[key]
    for part in expect.get("message", []):
        assert part in decision["message"]
    assert [warning["code"] for warning in decision["warnings"]] == expect["warnings"]


def test_every_case_is_here():
    numbers = {case.stem[:3] for case in CASES}
    topology = {2, 3, 8, 10, 11, 12, 13, 15, 18, 19, 21, 22, 24, 25, 27, 29, 32, 33, 35, 37, 58, 65}
    assert numbers == {f"{number:03}" for number in topology}
