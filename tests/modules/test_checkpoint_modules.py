"""``checkpoint``, ``checkpoint_config`` and ``build_products`` through Ansible, in real, check and diff mode."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
ORIGINAL = '{\r\n  "text_config": {\r\n    "rope": 1e6\r\n  }\r\n}'
EDIT = {"key": "text_config.dtype", "value": "fp8"}
DRY = {"check_mode": True, "diff": True}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"x" * 100)
    (path / "config.json").write_bytes(ORIGINAL.encode())
    return path


def environment(tmp_path):
    (tmp_path / "ansible.cfg").touch()
    return dict(
        os.environ,
        ANSIBLE_LIBRARY=str(REPOSITORY / "library"),
        ANSIBLE_MODULE_UTILS=str(REPOSITORY / "module_utils"),
        ANSIBLE_LOCAL_TEMP=str(tmp_path / "ansible"),
        ANSIBLE_REMOTE_TEMP=str(tmp_path / "ansible"),
        ANSIBLE_LOCALHOST_WARNING="False",
        ANSIBLE_NOCOLOR="1",
        ANSIBLE_CONFIG=str(tmp_path / "ansible.cfg"),
    )


def play(tmp_path, *tasks):
    """Run the tasks, failed ones included, and return their results and the output."""
    results = tmp_path / "results.json"
    plan = [dict(task, register=f"result{number}", ignore_errors=True) for number, task in enumerate(tasks)]
    content = "{{ [" + ", ".join(f"result{number}" for number in range(len(tasks))) + "] | to_json }}"
    plan.append({"ansible.builtin.copy": {"content": content, "dest": str(results)}})
    playbook = tmp_path / "play.json"
    variables = {"ansible_python_interpreter": sys.executable}
    hosts = {"hosts": "localhost", "connection": "local", "gather_facts": False, "vars": variables, "tasks": plan}
    playbook.write_text(json.dumps([hosts]))
    command = [str(BIN / "ansible-playbook"), "-i", "localhost,", str(playbook)]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(results.read_text()), done.stdout + done.stderr


def test_checkpoint_config(model, tmp_path):
    path = str(model)
    results, output = play(
        tmp_path,
        {"checkpoint_config": {"path": path, **EDIT}, **DRY},
        {"stat": {"path": f"{path}/config.json.vllm-fleet-orig"}},
        {"checkpoint_config": {"path": path, **EDIT}, "diff": True},
        {"checkpoint_config": {"path": path, **EDIT}},
        {"checkpoint_config": {"path": path, **EDIT}, **DRY},
        {"checkpoint_config": {"path": path, "key": "text_config.dtype", "value": "bf16"}, **DRY},
        {"checkpoint_config": {"path": path, "key": "text_config.dtype", "value": "bf16"}},
        {"checkpoint_config": {"path": path, "key": "text_config.n", "value": 3, "force": True}},
        {"checkpoint_config": {"path": f"{path}/none", **EDIT}, **DRY},
        {"checkpoint_config": {"path": f"{path}/none", "absent_ok_in_check_mode": True, **EDIT}, **DRY},
        {"checkpoint_config": {"path": f"{path}/none", "absent_ok_in_check_mode": True, **EDIT}},
    )
    dry, backup, first, second, dry_again, differs_dry, differs, number, none_dry, fresh_dry, none = results
    assert (dry["changed"], dry["reason"], dry["before"], dry["after"]) == (True, "added", None, '"fp8"')
    assert backup["stat"]["exists"] is False
    assert dry["diff"]["before"] == ORIGINAL
    assert dry["diff"]["after"] == ORIGINAL.replace('{\r\n    "rope"', '{\r\n    "dtype": "fp8",\r\n    "rope"')
    assert dry["diff"] == first["diff"]
    assert '+    "dtype": "fp8",' in output
    assert first["changed"] is True
    assert Path(first["backup"]).read_bytes() == ORIGINAL.encode()
    for again in (second, dry_again):
        assert (again["changed"], again["reason"], again["before"]) == (False, "already_set", '"fp8"')
    for refused in (differs_dry, differs):
        assert (refused["failed"], refused["reason"]) == (True, "value_differs")
        assert str(model / "config.json") in refused["msg"]
    assert (number["changed"], number["after"]) == (True, "3")
    assert json.loads((model / "config.json").read_bytes())["text_config"] == {"n": 3, "dtype": "fp8", "rope": 1e6}
    for refused in (none_dry, none):
        assert (refused["failed"], refused["reason"]) == (True, "checkpoint_absent")
    assert (fresh_dry["changed"], fresh_dry["reason"]) == (True, "checkpoint_absent")


def test_checkpoint(model, tmp_path):
    path, state = str(model), str(tmp_path / "state")
    digest = hashlib.sha256(b"x" * 100).hexdigest()
    (model / "sums").write_text(f"{digest}  model.safetensors\n")
    common = {"path": path, "state_directory": state, "manifest": "sums"}
    results, output = play(
        tmp_path,
        {"checkpoint": common, "check_mode": True},
        {"stat": {"path": state}},
        {"checkpoint": common},
        {"checkpoint": common},
        {"checkpoint": dict(common, hashing="again")},
        {
            "checkpoint": {
                "path": path,
                "settings": [EDIT],
                "sidecars": [{"path": "scales.json"}],
                "user": "nobody-here",
            }
        },
        {"checkpoint": {"path": f"{path}/none"}, "check_mode": True},
        {"checkpoint": {"path": f"{path}/none", "absent_ok_in_check_mode": True}, "check_mode": True},
        {"checkpoint": {"path": f"{path}/none", "absent_ok_in_check_mode": True}},
    )
    dry, kept, first, second, again, wrong, none_dry, fresh_dry, none = results
    assert kept["stat"]["exists"] is False
    assert [item["hashed"] for item in (dry, first, second, again)] == [1, 1, 0, 1]
    for good in (dry, first, second, again):
        assert good["changed"] is False
        assert {item["status"] for item in good["results"]} == {"pass"}
        assert (good["size"], good["shards"]) == (100, [{"name": "model.safetensors", "size": 100}])
    assert (wrong["failed"], wrong["reason"]) == (True, "setting_missing")
    for part in (
        "text_config.dtype is not set, expected",
        "scales.json is missing",
        "nobody-here",
        "checkpoint-config",
    ):
        assert part in wrong["msg"]
    for refused in (none_dry, none):
        assert (refused["failed"], refused["reason"]) == (True, "checkpoint_absent")
    assert fresh_dry["results"][0]["status"] == "unknown"
    assert "Traceback" not in output


def test_build_products(tmp_path):
    tree = tmp_path / "tree"
    (tree / "vllm").mkdir(parents=True)
    (tree / "vllm" / "a.so").write_bytes(b"a")
    make = {"tree": str(tree), "state": "recorded", "route": "own", "engine": "e", "paths": ["vllm"]}
    compare = {"tree": str(tree), "engine": "e"}
    results, output = play(
        tmp_path,
        {"build_products": compare, "check_mode": True},
        {"build_products": dict(compare, absent_ok_in_check_mode=True), "check_mode": True},
        {"build_products": make, **DRY},
        {"stat": {"path": str(tree / ".build-products")}},
        {"build_products": make, "diff": True},
        {"build_products": make, **DRY},
        {"build_products": compare},
        {"copy": {"content": "b", "dest": str(tree / "vllm" / "b.so")}},
        {"build_products": compare},
        {"copy": {"content": "c", "dest": str(tree / "vllm" / "a.so")}},
        {"build_products": compare},
        {"build_products": dict(make, tree=f"{tree}/none", absent_ok_in_check_mode=True), "check_mode": True},
        {"build_products": dict(make, tree=f"{tree}/none")},
    )
    unrecorded, fresh, dry, marker, made, again, good, _, extra, _, tampered, none_dry, none = results
    assert (unrecorded["failed"], unrecorded["reason"]) == (True, "unrecorded")
    assert (fresh["changed"], fresh["reason"]) == (False, "unrecorded")
    assert marker["stat"]["exists"] is False
    for item in (dry, made):
        assert (item["changed"], item["reason"], item["before"], item["after"]) == (True, "recorded", 0, 1)
        assert item["diff"]["after"] == hashlib.sha256(b"a").hexdigest() + "  vllm/a.so\n"
    assert (again["changed"], again["reason"]) == (False, "already_recorded")
    assert (good["changed"], good["reason"], good["files"]) == (False, "products_ok", 1)
    assert extra["reason"] == "extra"
    assert any("vllm/b.so" in warning for warning in extra["warnings"])
    assert (tampered["failed"], tampered["reason"]) == (True, "changed")
    assert "vllm/a.so" in tampered["msg"]
    assert {item["reason"] for item in tampered["problems"]} == {"changed", "extra"}
    assert (none_dry["changed"], none_dry["reason"]) == (True, "not_a_tree")
    assert (none["failed"], none["reason"]) == (True, "not_a_tree")
    assert "Traceback" not in output


def test_ad_hoc(model, tmp_path):
    arguments = ["-i", "localhost,", "-c", "local", "-m", "checkpoint", "-a", f"path={model}", "--check", "--diff"]
    interpreter = ["-e", f"ansible_python_interpreter={sys.executable}"]
    command = [str(BIN / "ansible"), "localhost", *arguments, *interpreter]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "shards_present" in done.stdout
