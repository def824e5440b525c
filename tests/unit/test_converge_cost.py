"""The counting callback, in a real run of Ansible: what action plugins do inside counts too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - name: One module
      ansible.builtin.ping:
    - name: An action plugin that runs two modules
      ansible.builtin.copy:
        content: hi
        dest: "{{ target }}"
        mode: "0600"
    - name: No module at all
      ansible.builtin.set_fact:
        ready: true
"""


def _play(tmp_path, **extra):
    playbook = tmp_path / "play.yml"
    playbook.write_text(PLAY)
    env = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_HOME": str(tmp_path / "home"), **extra}
    variables = {"ansible_python_interpreter": sys.executable, "target": f"{tmp_path}/{{{{ inventory_hostname }}}}"}
    argv = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "one,two,", "-c", "local", str(playbook)]
    argv += ["-e", json.dumps(variables)]
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=True)


def test_every_module_execution_is_counted(tmp_path):
    noted = tmp_path / "cost.txt"
    _play(tmp_path, CONVERGE_COST_FILE=str(noted), ANSIBLE_CALLBACKS_ENABLED="converge_cost")
    lines = noted.read_text().splitlines()
    for host in ("one", "two"):
        calls = [line.split()[2] for line in lines if line.startswith(f"call {host} ")]
        assert calls == ["ansible.builtin.ping", "ansible.legacy.stat", "ansible.legacy.copy"]
        assert f"changed {host} 1" in lines


def test_without_a_file_it_counts_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("CONVERGE_COST_FILE", raising=False)
    _play(tmp_path, ANSIBLE_CALLBACKS_ENABLED="converge_cost")
    assert not (tmp_path / "cost.txt").exists()
