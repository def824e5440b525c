"""What the scenarios' tests share: acting as the service user, running the role again, showing why a unit is down."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


def as_vllm(host: Any, command: str) -> Any:
    """Run a shell command as the lanes' user, from ``/`` and with nothing inherited, and return testinfra's result."""
    return host.run(f"cd / && runuser -u vllm -- env -i PATH=/usr/bin:/bin sh -c {shlex.quote(command)}")


def owned(host: Any, *paths: str) -> dict[str, str]:
    """Return ``mode owner:group`` of each path that is there, such as ``0755 root:root``."""
    found = host.run(f"stat -L -c '%n %04a %U:%G' {shlex.join(paths)}")
    return dict(line.split(" ", 1) for line in found.stdout.splitlines())


def property_of(host: Any, unit: str, name: str) -> str:
    """Return one of systemd's properties of a unit."""
    return host.check_output(f"systemctl show --value --property={name} {shlex.quote(unit)}").strip()


def assert_active(host: Any, unit: str) -> None:
    """Fail with the unit's state and its last journal lines unless it is active."""
    state = property_of(host, unit, "ActiveState")
    if state != "active":
        journal = host.run(f"journalctl --no-pager --output=short-monotonic --lines=40 -u {shlex.quote(unit)}").stdout
        pytest.fail(f"{unit} is {state} ({property_of(host, unit, 'SubState')})\n{journal}")


#: output without colour, also where the variable CI makes molecule force it
PLAIN = {"ANSIBLE_NOCOLOR": "1", "ANSIBLE_FORCE_COLOR": "0"}


def start_converge(*arguments: str, inventory: Path | None = None, **variables: Any) -> subprocess.Popen[str]:
    """Start the scenario's converge playbook again, as molecule does, with further arguments and variables.

    :param inventory: another inventory than the scenario's.
    """
    scenario = yaml.safe_load(Path(os.environ["MOLECULE_FILE"]).read_text())
    playbook = Path(os.environ["MOLECULE_SCENARIO_DIRECTORY"], scenario["ansible"]["playbooks"]["converge"]).resolve()
    inventory = inventory or Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"], "inventory")
    argv = ["ansible-playbook", "--inventory", str(inventory), *arguments]
    if variables:
        argv += ["--extra-vars", yaml.safe_dump(variables, default_flow_style=True, width=1 << 20).strip()]
    return subprocess.Popen(
        [*argv, str(playbook)],
        cwd=ROOT,
        # Molecule forces colour where the variable CI is set.
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_FORCE_COLOR": "0",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def converge(*arguments: str, inventory: Path | None = None, **variables: Any) -> subprocess.CompletedProcess[str]:
    """Run the playbook of :func:`start_converge` to its end.

    :returns: the finished process with its output in ``stdout``; a failure is not raised, a test may expect one.
    """
    process = start_converge(*arguments, inventory=inventory, **variables)
    try:
        output, _ = process.communicate()
    finally:
        process.terminate()
    return subprocess.CompletedProcess(process.args, process.returncode, output)
