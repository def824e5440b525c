"""``box_reboot`` where it must not reboot: this machine. All runs are check mode, should a refusal ever fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DUE = {"required": True, "reasons": ["loaded_differs"]}


@pytest.fixture
def run(tmp_path):
    """Return a function that runs the action on this machine and returns its result."""

    def reboot(**arguments):
        task = {"box_reboot": arguments, "register": "answer", "ignore_errors": True, "check_mode": True}
        said = {"ansible.builtin.copy": {"content": "{{ answer | to_json }}", "dest": str(tmp_path / "answer.json")}}
        plan = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": [task, said]}]
        plan[0]["vars"] = {"ansible_python_interpreter": sys.executable}
        (tmp_path / "play.json").write_text(json.dumps(plan))
        done = subprocess.run(
            [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "localhost,", str(tmp_path / "play.json")],
            cwd=ROOT, env={**os.environ, "ANSIBLE_NOCOLOR": "1"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((tmp_path / "answer.json").read_text())

    return reboot


def test_a_local_connection_is_refused(run):
    answer = run(**DUE, allowed=True)
    assert (answer["failed"], answer["reason"]) == (True, "local_connection")
    assert "would reboot the controller" in answer["msg"]


@pytest.mark.parametrize(
    ("arguments", "failed", "reason"),
    [
        ({"required": False}, False, "not_required"),
        ({}, False, "reboot_unknown"),
        (DUE, True, "reboot_undecided"),
        ({**DUE, "allowed": False}, False, "reboot_pending"),
    ],
)
def test_without_a_reboot_a_local_connection_is_as_good_as_any(run, arguments, failed, reason):
    answer = run(**arguments)
    assert (answer["failed"], answer["changed"], answer["reason"]) == (failed, False, reason)
