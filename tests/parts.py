"""The parts of ``make test``, cheapest first; each ends with a line ``N passed, M failed in S s``.

Run one with ``python -m tests.parts lint`` (or ``unit``, ``molecule``, ``lab``), several in the given order, and single
scenarios with ``python -m tests.parts molecule:serve``. A part that fails ends the run: what follows costs more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from lab.settings import PREFIX

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
#: in the order of what they build on
SCENARIOS = ("lane_plan", "common", "toolchain", "checkpoint", "engine", "serve", "bi_v100", "balancer", "default")
DRIVERS = ("corex_driver", "nvidia_repository", "nvidia_driver")
LINT = {
    "ruff": ["ruff", "check"],
    "ruff format": ["ruff", "format", "--check", "--quiet"],
    "mypy": ["mypy"],
    "yamllint": ["yamllint", "--strict", "."],
    "ansible-lint": ["ansible-lint"],
}
PARTS = {
    "lint": LINT,
    "unit": {
        "a Python 3.8": ["python", "-m", "tests.python38"],
        "pytest": ["pytest", "tests/unit", "tests/cases", "tests/modules"],
    },
    "molecule": {name: ["molecule", "test", "--scenario-name", name] for name in SCENARIOS},
    "gpu": {"make the lab": ["python", "-m", "lab", "up"], "pytest": ["pytest", "-s", "tests/lab/test_gpu_lane.py"]},
    # compiles a driver's module: too long for every run, so ``test`` leaves it out
    "drivers": {name: ["molecule", "test", "--scenario-name", name] for name in DRIVERS},
    "engines": {
        "make the lab": ["python", "-m", "lab", "up"],
        "pytest": ["pytest", "-s", "-v", "tests/engines"],
    },
    "vm": {"pytest": ["pytest", "tests/vm"]},
    "lab": {"make the lab": ["python", "-m", "lab", "up"], "pytest": ["pytest", "tests/lab"]},
}


def environment(step: str) -> dict[str, str]:
    """Return the environment of a step: the project's own tools first, and nothing of a user's Ansible settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "MOLECULE_"))}
    # Byte code has to be written: without it every play compiles Ansible anew.
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    # In a git hook these would point the tools to another tree.
    kept = {name: value for name, value in kept.items() if not name.startswith("GIT_")}
    return {
        **kept,
        "PATH": f"{BIN}:{kept.get('PATH', '')}",
        "MOLECULE_COMMAND_BORDERS": "false",
        # Molecule's own choice is the same for all checkouts whose directories have one name.
        "MOLECULE_EPHEMERAL_DIRECTORY": str(Path.home() / ".ansible" / "tmp" / f"{PREFIX}-{step}".replace(" ", "-")),
    }


def steps_of(word: str) -> dict[str, list[str]]:
    """Return the steps that a word of the command line names, as ``part`` or ``part:step``."""
    part, _, step = word.partition(":")
    try:
        return {step: PARTS[part][step]} if step else PARTS[part]
    except KeyError:
        known = ", ".join([*PARTS, *(f"{name}:{step}" for name, steps in PARTS.items() for step in steps)])
        sys.exit(f"{word!r} is no part of the tests; there are {known}")


def run(word: str) -> bool:
    """Run the steps of a part, all of them, with their output as it comes; return whether all passed."""
    steps = steps_of(word)
    began, failed = time.monotonic(), []
    for name, argv in steps.items():
        print(f"=== {word}: {name}", flush=True)
        started = time.monotonic()
        status = subprocess.run(
            [str(BIN / argv[0]), *argv[1:]], cwd=ROOT, env=environment(name), check=False
        ).returncode
        print(f"--- {name}: {'passed' if status == 0 else f'FAILED ({status})'} in {time.monotonic() - started:.0f} s")
        if status:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    print(
        f"=== {word}: {len(steps) - len(failed)} passed, {len(failed)} failed in {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return not failed


def main(words: list[str]) -> int:
    """Run the parts in order up to the first that fails."""
    for word in words:
        steps_of(word)
    for number, word in enumerate(words):
        if not run(word):
            if words[number + 1 :]:
                print(f"not run: {', '.join(words[number + 1 :])}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
