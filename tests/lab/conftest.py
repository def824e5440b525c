"""The lab end to end: real SSH, real systemd, the real engine. The lab must be up (`make lab`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.processes import kill_tree

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv" / "bin"
STATE = ROOT / "lab" / ".state"
SITE = ("site.yml", "-l", "gpu-boxes")


class Box:
    """A lab box, over the SSH connection that Ansible uses too."""

    def __init__(self, name: str) -> None:
        self.name = name
        entry = json.loads((STATE / "lab.json").read_text())["boxes"][name]
        self.address, self.container = entry["address"], entry["container"]

    def run(self, command: str, check: bool = True) -> str:
        """Run a shell command as root and return its output."""
        done = subprocess.run(
            ["ssh", "-F", str(STATE / "ssh_config"), self.name, "sudo sh -s"],
            input=command, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"{self.name}: {command!r} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def show(self, prop: str) -> str:
        return self.run(f"systemctl show vllm@main -p {prop} --value")

    def pid(self) -> int:
        return int(self.show("MainPID"))

    def wait_answer(self, deadline: float = 180.0) -> dict[str, Any]:
        """Return the lane's answer to a completion; fail with the journal when none comes."""
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            if self.show("ActiveState") == "active":
                try:
                    return self.complete()
                except OSError:
                    pass
            time.sleep(1)
        raise AssertionError(
            f"{self.name} did not answer:\n" + self.run("journalctl -u vllm@main -n 40 --no-pager -o cat")
        )

    def request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        key = (STATE / "keys" / f"{self.name}-main.key").read_text().strip()
        request = urllib.request.Request(
            f"http://{self.address}:8000{path}", None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )  # fmt: skip
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as response:
            return json.load(response)

    def complete(self) -> dict[str, Any]:
        return self.request("/v1/completions", {"model": "tiny", "prompt": "Hi", "max_tokens": 4})


@pytest.fixture(scope="session")
def box1() -> Box:
    return Box("box1")


@pytest.fixture(scope="session")
def box2() -> Box:
    return Box("box2")


class Played:
    """What one ansible-playbook run said."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.status, self.text = done.returncode, done.stdout + done.stderr
        recap = re.findall(r"^(\w+)\s+: ok=(\d+)\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", self.text, re.M)
        self.changed = {name: int(changed) for name, _, changed, _, _ in recap}
        self.failed = {name: int(failed) + int(lost) for name, _, _, lost, failed in recap}


def play(*args: str, kill_after: str = "") -> Played:
    """Run ansible-playbook from the repository's root; with ``kill_after``, SIGKILL it once that text has appeared."""
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "ANSIBLE_NOCOLOR": "1", "PYTHONUNBUFFERED": "1"}
    argv = [str(BIN / "ansible-playbook"), *args]
    if not kill_after:
        return Played(subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False))
    process = subprocess.Popen(
        argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    seen = []
    for line in process.stdout or ():
        seen.append(line)
        if kill_after in line:
            kill_tree(process.pid)
            break
    process.wait(30)
    return Played(subprocess.CompletedProcess(argv, process.returncode, "".join(seen), ""))


@pytest.fixture
def overlay(tmp_path: Path) -> Any:
    """Return a function that makes an inventory which changes box1's lane, to be used after the lab's own."""

    def make(**changes: Any) -> list[str]:
        lane = {
            "name": "main", "profile": "tiny-cpu", "port": 8000, "host": "{{ lab_ip }}",
            "checkpoint": "/srv/models/tiny", "served_names": ["tiny"],
            "api_key_file": "/etc/vllm-fleet/secrets/main.key",
            "topology": {"mode": "auto", "tensor_parallel": 2, "pipeline_parallel": 2},
            "needs": {"toolchain": True}, **changes,
        }  # fmt: skip
        (tmp_path / "hosts.json").write_text(json.dumps({"gpu-boxes": {"hosts": {"box1": {"vllm_lanes": [lane]}}}}))
        return ["-i", "inventories/lab", "-i", str(tmp_path / "hosts.json")]

    return make
