"""The module ``gpu_topology``: packed and run by Ansible against the simulator, and in this process with its state."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest

from tests import in_process, simulator
from tests.unit.preflight_fixtures import LANE

REPOSITORY = Path(__file__).resolve().parents[2]
ANSIBLE = Path(sys.executable).parent / "ansible-playbook"


def lane(name: str = "main", **policy: Any) -> Dict[str, Any]:
    made = copy.deepcopy(LANE)
    made.update(lane=name, policy={"enabled": True, "tensor_parallel": 2, "pipeline_parallel": 2, **policy})
    return made


def play(directory: Path, facts: Dict[str, Any], tasks: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Run tasks in check mode with diffs, on a box with the given cards."""
    (directory / "facts.json").write_text(json.dumps(facts))
    (directory / "ansible.cfg").write_text(
        f"[defaults]\nlibrary = {REPOSITORY}/library\nmodule_utils = {REPOSITORY}/module_utils\n"
        "stdout_callback = ansible.builtin.json\nlocalhost_warning = false\n"
    )
    book = [{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]
    (directory / "play.yml").write_text(json.dumps(book))
    env = simulator.environment(directory / "facts.json")
    env.update(ANSIBLE_CONFIG=str(directory / "ansible.cfg"), ANSIBLE_LOCAL_TEMP=str(directory / "local"))
    command = [str(ANSIBLE), "-i", "localhost,", "-c", "local", "-e", f"ansible_python_interpreter={sys.executable}"]
    done = subprocess.run(
        [*command, "--check", "--diff", str(directory / "play.yml")],
        cwd=directory, env=env, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return [task["hosts"]["localhost"] for task in json.loads(done.stdout)["plays"][0]["tasks"]]


def test_through_ansible(tmp_path: Path) -> None:
    two = {"tensor_parallel": 2, "pipeline_parallel": 1, "lane_gpus": "auto"}
    tasks = [
        {"gpu_topology": {"lanes": [lane()]}},
        {"gpu_topology": {"lanes": [lane("a", **two), lane("b", **two)]}},
        {"gpu_topology": {"lanes": [lane(tensor_parallel=8)]}, "ignore_errors": True},
        {"gpu_topology": {"lanes": [lane(enabled=False)]}},
    ]
    whole, shared, refused, none = play(tmp_path, simulator.box("box1"), tasks)
    assert (whole["changed"], whole["reason"]) == (True, "decided")
    assert whole["decisions"]["main"]["order"] == [0, 2, 1, 3]
    assert whole["before"] == {"main": []}
    assert [uuid[:12] for uuid in whole["after"]["main"]] == [f"GPU-b1a0{index * 4}" for index in ("0", "2", "1", "3")]
    assert '"order": [' in whole["diff"][0]["after"]
    assert whole["diff"][0]["before"] == ""
    assert len(whole["facts"]["gpus"]) == 4
    assert {name: item["order"] for name, item in shared["decisions"].items()} == {"a": [0, 2], "b": [1, 3]}
    assert (refused["failed"], refused["reason"], refused["changed"]) == (True, "too_few_gpus", False)
    assert refused["msg"].startswith("lane main: too_few_gpus: ")
    assert (none["changed"], none["reason"], none["facts"]) == (False, "no_gpu_lanes", None)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module in this process, with its state below a temporary root."""
    loaded = in_process.load("gpu_topology", monkeypatch)
    start = loaded.start
    facts = simulator.box("box1")
    root = str(tmp_path)
    kept, keep, path = start.stored, start.keep, start.decision_path
    monkeypatch.setattr(start, "stored", lambda name, _root="/": kept(name, root))
    monkeypatch.setattr(start, "keep", lambda name, decision, _root="/": keep(name, decision, root))
    monkeypatch.setattr(start, "decision_path", lambda name, _root=root: path(name, _root))
    monkeypatch.setattr(start, "live_facts", lambda *args, **kwargs: facts)

    def run(check: bool = False, **params: Any) -> Dict[str, Any]:
        return in_process.run(loaded, monkeypatch, check, **params)

    run.facts = facts  # type: ignore[attr-defined]
    run.file = tmp_path / "var/lib/vllm-fleet/decisions/main.json"  # type: ignore[attr-defined]
    return run


def test_check_mode_tells_the_same_and_keeps_nothing(module: Any) -> None:
    foretold = module(check=True, lanes=[lane()])
    assert (foretold["changed"], module.file.exists()) == (True, False)
    done = module(lanes=[lane()])
    assert {key: done[key] for key in ("changed", "diff", "before", "after", "reason")} == {
        key: foretold[key] for key in ("changed", "diff", "before", "after", "reason")
    }
    assert json.loads(module.file.read_text()) == done["decisions"]["main"]


def test_a_second_run_changes_nothing(module: Any) -> None:
    module(lanes=[lane()])
    again = module(lanes=[lane()])
    assert (again["changed"], again["reason"], again["diff"]) == (False, "as_decided", [])
    assert again["before"] == again["after"]


def test_other_cards_are_shown_as_a_diff(module: Any) -> None:
    module(lanes=[lane()])
    module.facts["gpus"][3]["uuid"] = "GPU-replaced"
    changed = module(lanes=[lane()])
    assert changed["changed"] is True
    assert "GPU-replaced" in changed["diff"][0]["after"]
    assert "GPU-replaced" not in changed["diff"][0]["before"]


def test_a_refusal_keeps_the_last_decision(module: Any) -> None:
    module(lanes=[lane()])
    before = module.file.read_text()
    module.facts["gpus"][3]["health"] = "lost"
    refused = module(lanes=[lane()])
    assert (refused["failed"], refused["changed"], refused["reason"]) == (True, False, "gpu_lost")
    assert module.file.read_text() == before


def test_a_report_does_not_fail(module: Any) -> None:
    told = module(lanes=[lane(tensor_parallel=8)], fail_on_refusal=False)
    assert (told.get("failed", False), told["reason"], told["changed"]) == (False, "too_few_gpus", False)
    assert not module.file.exists()


@pytest.mark.parametrize(
    ("given", "reason"),
    [(lane(mode="quick"), "bad_policy"), ({"lane": "half"}, "bad_lane"), (lane(gpu=["0"]), "unknown_policy_key")],
)
def test_bad_input_is_one_message(module: Any, given: Dict[str, Any], reason: str) -> None:
    answer = module(lanes=[given])
    assert (answer["failed"], answer["reason"]) == (True, reason)


@pytest.mark.parametrize(
    ("status", "check", "reason"),
    [
        ("driver_not_loaded", True, "not_yet_installed"),
        ("pynvml_missing", True, "not_yet_installed"),
        ("timeout", True, "facts_unknown"),
        ("driver_not_loaded", False, "facts_unknown"),
    ],
)
def test_a_fresh_box_in_check_mode_is_no_refusal(module: Any, status: str, check: bool, reason: str) -> None:
    module.facts.update(gpus=None, pairs=[], extra={"status": status, "message": ""})
    answer = module(check=check, lanes=[lane(mode="strict")])
    assert (answer["reason"], answer.get("failed", False)) == (reason, reason == "facts_unknown")
    assert answer["changed"] is False


def test_a_binding_is_handed_on(module: Any) -> None:
    module.facts["host"]["numa_nodes"]["1"] = {"cpus": "32-63", "memory_total_kib": 1, "memory_available_kib": 1}
    module.facts["host"].update(allowed_cpus="0-63", allowed_mems="0-1")
    assert module(lanes=[lane(bind=True)])["bindings"] == {"main": {"cpus": "0-31", "node": 0}}
    assert module(lanes=[lane(bind=False)])["bindings"] == {}


def test_a_state_directory_that_cannot_be_written(module: Any, tmp_path: Path) -> None:
    (tmp_path / "var").write_text("a file in the way")
    answer = module(lanes=[lane()])
    assert (answer["failed"], answer["reason"]) == (True, "write_failed")


def test_the_documentation_matches_the_arguments(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    loaded = in_process.load("gpu_topology", monkeypatch)
    options = yaml.safe_load(loaded.DOCUMENTATION)["options"]
    assert set(options) == {"lanes", "driver_timeout", "fail_on_refusal"}
    returned = set(yaml.safe_load(loaded.RETURN))
    answer = module(lanes=[lane()])
    assert set(answer) - {"changed", "diff"} == returned
