"""The module ``lane_preflight`` through Ansible: messages, check mode on a fresh box, and that nothing is changed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest

from tests.unit import preflight_fixtures as given

REPOSITORY = Path(__file__).resolve().parents[2]
ANSIBLE = Path(sys.executable).parent / "ansible-playbook"


def lane_at(place: Path, port: int) -> Dict[str, Any]:
    """A lane without GPU whose engine, checkpoint and directories would all be below ``place``."""
    lane = given.cpu_lane()
    lane["engine"].update(
        root=f"{place}/engine",
        venv=f"{place}/engine/venv",
        python=f"{place}/engine/venv/bin/python",
        site_packages=f"{place}/engine/venv/lib/python3.11/site-packages",
    )
    lane.update(
        entry=[f"{place}/engine/venv/bin/vllm", "serve", f"{place}/model"],
        log=f"{place}/log/main.log",
        workdir=f"{place}/work",
        port=port,
        env={},
    )
    lane["checkpoint"]["path"] = f"{place}/model"
    lane["needs"].update(memory_floor_kib=1024, memory_recommended_kib=1024, shm_kib=64, disk_kib=1024)
    return lane


def install(place: Path) -> None:
    """Make what the lane of :func:`lane_at` needs."""
    site = place / "engine/venv/lib/python3.11/site-packages"
    for name in ("vllm", "torch"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").touch()
    binaries = place / "engine/venv/bin"
    binaries.mkdir()
    (binaries / "python").symlink_to("/bin/sh")  # anything that every user may run
    (binaries / "vllm").write_text(f"#!{binaries}/python\n")
    (binaries / "vllm").chmod(0o755)
    (place / "engine/venv/pyvenv.cfg").write_text("version = 3.11.7\n")
    for name in ("log", "work", "model"):
        (place / name).mkdir()
    (place / "model/config.json").write_text(json.dumps({"num_attention_heads": 2}))
    (place / "model/model.safetensors").write_bytes(b"\0" * 4096)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def task(name: str, check_mode: bool = False, **arguments: Any) -> Dict[str, Any]:
    return {
        "name": name,
        "lane_preflight": {"user": "nobody", "box": "gpu-01", **arguments},
        "check_mode": check_mode,
        "ignore_errors": True,
    }


def play(directory: Path, tasks: List[Dict[str, Any]]) -> Dict[str, Dict[str, Any]]:
    """Run the tasks through Ansible, all in one play, and return the results by the tasks' names."""
    (directory / "ansible.cfg").write_text(
        f"[defaults]\nlibrary = {REPOSITORY}/library\nmodule_utils = {REPOSITORY}/module_utils\n"
        "stdout_callback = ansible.builtin.json\nlocalhost_warning = false\n"
    )
    playbook = directory / "play.yml"
    playbook.write_text(json.dumps([{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]))
    env = dict(os.environ, ANSIBLE_CONFIG=str(directory / "ansible.cfg"), ANSIBLE_LOCAL_TEMP=str(directory / "local"))
    command = [str(ANSIBLE), "-i", "localhost,", "-c", "local", "-e", f"ansible_python_interpreter={sys.executable}"]
    done = subprocess.run(
        [*command, str(playbook)], cwd=directory, env=env, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.stdout.lstrip().startswith("{"), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    outcome = json.loads(done.stdout)["plays"][0]["tasks"]
    return {entry["task"]["name"]: entry["hosts"]["localhost"] for entry in outcome}


def reasons(result: Dict[str, Any], lane: int = 0) -> Dict[str, List[str]]:
    return {item["check"]: [item["status"], item["reason"]] for item in result["lanes"][lane]["results"]}


def snapshot(place: Path) -> Dict[str, Any]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in sorted(place.rglob("*"))}


Outcome = Tuple[Dict[str, Dict[str, Any]], int]


@pytest.fixture(scope="module")
def outcome() -> Iterator[Outcome]:
    """The results of every task by name, and the port that this process holds."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as server:
        top = Path(name)
        top.chmod(0o755)  # the service user has to get in
        fresh, installed = top / "fresh", top / "installed"
        fresh.mkdir()
        installed.mkdir()
        install(installed)
        server.bind(("127.0.0.1", 0))
        server.listen()
        held, free = int(server.getsockname()[1]), free_port()
        second = dict(lane_at(installed, held), lane="second")
        before = snapshot(fresh), snapshot(installed)
        results = play(
            top,
            [
                task("fresh, check mode", True, lanes=[lane_at(fresh, free)], user="no-such-user"),
                task("fresh", lanes=[lane_at(fresh, free)], user="no-such-user"),
                task("fresh, check mode, port held", True, lanes=[lane_at(fresh, held)]),
                task("installed", lanes=[lane_at(installed, free)]),
                task("installed, check mode", True, lanes=[lane_at(installed, free)]),
                task("installed, port held", lanes=[lane_at(installed, held)]),
                task("two lanes, report only", lanes=[lane_at(installed, free), second], fail_on_fail=False),
                task("deferred", lanes=[lane_at(installed, held)], defer=["port"]),
                task("defer names no check", lanes=[lane_at(installed, free)], defer=["ports"]),
                task("half a lane", lanes=[{"lane": "half"}]),
            ],
        )
        assert (snapshot(fresh), snapshot(installed)) == before, "nothing was changed"
        yield results, held


def test_a_fresh_box_in_check_mode_is_unknown_and_not_a_fail(outcome: Outcome) -> None:
    result = outcome[0]["fresh, check mode"]
    assert not result.get("failed"), result
    found = reasons(result)
    for name in ("engine_installed", "import_origin", "service_user", "log", "workdir", "checkpoint_path"):
        assert found[name] == ["unknown", "not_yet_installed"], name
    assert found["port"] == ["pass", "port_free"]
    assert result["status"] == "unknown" and result["changed"] is False


def test_a_fresh_box_without_check_mode_fails_by_name(outcome: Outcome) -> None:
    result = outcome[0]["fresh"]
    assert result["failed"] and result["changed"] is False
    assert result["reason"] == "engine_missing"
    failing = {name for name, (status, _reason) in reasons(result).items() if status == "fail"}
    assert {"engine_installed", "service_user", "workdir", "log", "checkpoint_path"} == failing


def test_check_mode_does_not_excuse_what_no_play_mends(outcome: Outcome) -> None:
    result = outcome[0]["fresh, check mode, port held"]
    assert result["failed"] and result["reason"] == "port_occupied"


def test_the_message_has_box_check_found_needed_and_fix_on_their_own_lines(outcome: Outcome) -> None:
    results, held = outcome
    lines = results["installed, port held"]["msg"].splitlines()
    assert lines[:3] == ["box: gpu-01", "lane: main", "check: port (port_occupied)"]
    assert lines[3].startswith(f"found: port {held} is held by pid {os.getpid()} (")
    assert lines[4:] == ["needed: a free port", "fix: stop that process or give the lane another port"]


@pytest.mark.parametrize("name", ["installed", "installed, check mode"])
def test_an_installed_box_passes(outcome: Outcome, name: str) -> None:
    result = outcome[0][name]
    assert not result.get("failed"), result["msg"]
    assert result["changed"] is False and result["deferred"] == []
    assert result["lanes"][0]["summary"]["fail"] == 0
    assert [item for item in result["lanes"][0]["results"] if item["status"] != "pass"] == []


def test_lanes_are_judged_one_by_one(outcome: Outcome) -> None:
    result = outcome[0]["two lanes, report only"]
    assert not result.get("failed")
    assert [entry["lane"] for entry in result["lanes"]] == ["main", "second"]
    assert (result["lanes"][0]["status"], result["lanes"][1]["status"]) == ("pass", "fail")
    assert reasons(result, 1)["port"] == ["fail", "port_occupied"]


def test_deferred_checks_are_left_out_and_named(outcome: Outcome) -> None:
    result = outcome[0]["deferred"]
    assert not result.get("failed"), result["msg"]
    assert result["deferred"] == ["port"] and "port" not in reasons(result)


@pytest.mark.parametrize(("name", "reason"), [("defer names no check", "unknown_check"), ("half a lane", "bad_lane")])
def test_bad_arguments_are_one_readable_message(outcome: Outcome, name: str, reason: str) -> None:
    result = outcome[0][name]
    assert result["failed"] and result["reason"] == reason
    assert "\n" not in result["msg"]
