"""Public bug reports about fleets and units that a rollout must get right; numbers are those of the reports' digest."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ansible.module_utils
import pytest
from vllm_fleet import release, rollout

from tests.unit.test_release import lane

ROOT = Path(__file__).resolve().parents[2]


def setting(text: str, name: str) -> str:
    """Return the last value of a setting in a unit's text."""
    return re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)[-1]


@pytest.mark.parametrize("deadline_s", [300, 1800, 7200])
def test_077_a_start_may_take_as_long_as_a_cold_compile(deadline_s: int) -> None:
    """systemd's default of 90 s kills a load that needs minutes, and the restart throws the compile away again."""
    conf = release.unit_conf(lane(readiness={"deadline_s": deadline_s}), [], None)
    assert int(setting(conf, "TimeoutStartSec")) > deadline_s


@pytest.mark.parametrize("deadline_s", [300, 1800])
def test_079_a_loop_of_slow_failures_ends(deadline_s: int) -> None:
    """Five starts in ten seconds never happen when a failure takes minutes: the interval holds three whole attempts."""
    unit = (ROOT / "roles/serve/files/vllm@.service").read_text()
    conf = release.unit_conf(lane(readiness={"deadline_s": deadline_s}), [], None)
    burst, pause_s = int(setting(unit, "StartLimitBurst")), int(setting(unit, "RestartSec"))
    attempt_s = int(setting(conf, "TimeoutStartSec")) + int(setting(conf, "TimeoutStopSec")) + pause_s
    assert burst == 3
    assert pause_s >= 10
    assert int(setting(conf, "StartLimitIntervalSec")) >= burst * attempt_s


def test_091_a_batch_that_fails_whole_leaves_a_report() -> None:
    """Ansible ends a play when all hosts of a batch fail, so a failed box is an outcome here, not a failed host."""
    outcomes = {
        "b1": {"state": "rolled_back", "message": "lane main failed"},
        "b2": {"state": "ready"},
        "b3": {"state": "unreachable", "message": "unreachable"},
    }
    assert rollout.spent(outcomes) == ["b1", "b3"], "unreachable boxes count against the budget too"
    assert re.search(r"^b2 +untouched ", rollout.table(outcomes), re.MULTILINE)
    book = (ROOT / "playbooks/reconfigure.yml").read_text()
    assert book.count("ignore_unreachable: true") == 2
    assert "max_fail_percentage" not in book


def test_093_a_limited_play_writes_the_whole_balancer(tmp_path: Path) -> None:
    """Facts of hosts outside --limit are not there; the configuration is made from inventory variables alone."""
    boxes = {
        name: {"ansible_host": f"192.0.2.{number}", "serve_api_keys": {"main": "k"}, "vllm_lanes": [
            {"name": "main", "profile": "tiny-cpu", "port": 8000, "host": "{{ ansible_host }}",
             "served_names": ["tiny"], "api_key_file": "/etc/k"}]}
        for number, name in enumerate(("b1", "b2", "b3"), 1)
    }  # fmt: skip
    inventory = {"gpu-boxes": {"hosts": boxes}, "edge": {"hosts": {"e1": {"ansible_connection": "local"}}}}
    (tmp_path / "hosts.json").write_text(json.dumps(inventory))
    role = ROOT / "roles/balancer"
    book = [{
        "hosts": "edge", "gather_facts": False, "vars": {"role_path": str(role), "balancer_api_keys": ["c"]},
        "vars_files": [str(role / "defaults/main.yml"), str(role / "vars/main.yml")],
        "tasks": [{"ansible.builtin.debug": {"msg": "{{ lookup('ansible.builtin.template', template) }}"},
                   "vars": {"template": str(role / "templates/haproxy.cfg.j2")}}],
    }]  # fmt: skip
    (tmp_path / "play.yml").write_text(json.dumps(book))
    ansible_playbook = Path(sys.executable).with_name("ansible-playbook")
    argv = [str(ansible_playbook), "-i", str(tmp_path / "hosts.json"), str(tmp_path / "play.yml"), "-l", "e1"]
    done = subprocess.run(
        [*argv, "-e", '{"balancer_api_keys": ["c"]}'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for number in (1, 2, 3):
        assert f"server b{number}:main 192.0.2.{number}:8000" in done.stdout


def activate() -> Any:
    """Return the module lane_activate as Python."""
    folder = str(ROOT / "module_utils")
    if folder not in ansible.module_utils.__path__:
        ansible.module_utils.__path__.append(folder)
    spec = importlib.util.spec_from_file_location("lane_activate", ROOT / "library/lane_activate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_095_an_owed_restart_is_seen_from_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that was never run is forgotten; here the release is flipped already and the process is the old one."""
    module = activate()
    state = {"ActiveState": "active"}
    monkeypatch.setattr(module, "started_release", lambda name: "old")
    assert module.why_restart(state, "new", "new", "main", {}) == "runs_another_release"
    monkeypatch.setattr(module, "started_release", lambda name: "new")
    assert module.why_restart(state, "new", "new", "main", {}) is None
    assert not list((ROOT / "roles").glob("*/handlers/*")), "restarts are tasks"
