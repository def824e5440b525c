"""A virtual machine with a kernel of its own (`make test-vm`): made once for all tests, removed at the end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import boxes, nvml, vm
from lab.settings import NVML_SIM
from tests.processes import kill_tree

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv" / "bin"


#: a line of ``box_reboot`` about a box that it waits for
WAITING = r"^  t-vm: (shutting down|refuses|no answer|SSH is up|away)"


class Machine:
    """The machine, as its owner sees it over SSH, and as plays reach it."""

    name = "t-vm"

    def run(self, command: str, check: bool = True, timeout: float = 300) -> str:
        """Run a shell command as root and return its output."""
        done = vm.ssh(self.name, command, timeout)
        if check and done.returncode:
            raise AssertionError(f"{command!r} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def put(self, path: str, data: bytes) -> None:
        """Write a file, as root."""
        argv = ["ssh", "-F", str(vm.ssh_config(self.name)), "-o", "ControlPath=none", self.name, f"sudo tee {path}"]
        subprocess.run(argv, input=data, stdout=subprocess.DEVNULL, check=True, timeout=60)

    def boot_id(self) -> str:
        return self.run("cat /proc/sys/kernel/random/boot_id")

    def boots(self) -> int:
        """Return how often the machine has booted, by its journal."""
        return len(self.run("journalctl --list-boots --no-pager").splitlines())

    def loaded(self, module: str) -> str:
        return self.run(f"cat /sys/module/{module}/version 2>/dev/null", check=False)

    def record(self) -> dict[str, Any]:
        return dict(json.loads(self.run("cat /var/lib/vllm-fleet/reboot.json")))

    def wait_for_boot(self, before: str, deadline: float = 420) -> None:
        """Wait until another boot than ``before`` answers."""
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            if vm.answers(self.name) and self.boot_id() != before:
                return
            time.sleep(2)
        raise AssertionError(f"the machine is not back within {deadline} s")


class Played:
    """What one ansible-playbook run said."""

    def __init__(self, status: int, text: str) -> None:
        self.status, self.text = status, text
        self.flat = " ".join(text.split())
        found = re.search(r"changed=(\d+)", text)
        self.changed = int(found.group(1)) if found else None


def start(machine: Machine, work: Path, argv: list[str], **variables: Any) -> subprocess.Popen[str]:
    """Start ansible-playbook for the machine, with its output in one pipe."""
    hosts = {machine.name: {**vm.connection(machine.name), "vllm_lanes": [], **variables}}
    (work / "hosts.json").write_text(json.dumps({"gpu-boxes": {"hosts": hosts}}))
    return subprocess.Popen(
        [str(BIN / "ansible-playbook"), "-i", str(work / "hosts.json"), *argv],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_FORCE_COLOR": "0", "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def write_play(work: Path, roles: list[str], tasks: list[dict[str, Any]]) -> str:
    """Write a playbook and return its path."""
    path = work / "play.json"
    plan = [{"name": "Test", "hosts": "gpu-boxes", "gather_facts": False, "roles": roles, "tasks": tasks}]
    path.write_text(json.dumps(plan))
    return str(path)


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Give the machine with four simulated GPUs and the loaded module ``nvidia`` 550.000.01, which boots load."""
    with boxes.lock():
        vm.up(Machine.name)
    vm.set_post(Machine.name, 0)
    box = Machine()
    library = nvml.build()
    assert library is not None
    box.run(
        "rm -f /var/lib/vllm-fleet/reboot.json; mkdir -p /etc/nvml-sim; echo nvidia > /etc/modules-load.d/nvidia.conf; "
        "install -D /opt/kernel/nvidia.ko /lib/modules/$(uname -r)/updates/nvidia.ko && depmod && "
        "(rmmod nvidia 2>/dev/null; modprobe nvidia)"
    )
    box.put(nvml.LIBRARY_PATH, library)
    box.put(nvml.FACTS_PATH, (NVML_SIM / "boxes" / "box1.json").read_bytes())
    work = tmp_path_factory.mktemp("common")
    # The program on the box carries what reads NVML.
    process = start(box, work, [write_play(work, ["common"], [])])
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    yield box
    if not os.environ.get("VM_KEEP"):
        vm.down(Machine.name)


@pytest.fixture
def play(machine: Machine, tmp_path: Path) -> Any:
    """Return a function that runs roles, tasks or a playbook of the project on the machine.

    With ``kill_after`` it is killed at the first line that this pattern matches.
    """

    def run(
        *roles: str,
        playbook: str = "",
        tasks: list[dict[str, Any]] | None = None,
        kill_after: str = "",
        **variables: Any,
    ) -> Played:
        path = playbook or write_play(tmp_path, list(roles), tasks or [])
        process = start(machine, tmp_path, [path], **variables)
        seen = []
        for line in process.stdout or ():
            seen.append(line)
            if kill_after and re.search(kill_after, line):
                kill_tree(process.pid)
                break
        process.wait(60)
        return Played(process.returncode, "".join(seen))

    return run
