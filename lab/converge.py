"""Running the main playbook on the lab, and measuring what a second run costs."""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from pathlib import Path

from .settings import CACHE, INVENTORY, ROOT, STATE, VENV
from .shell import LabError, say

#: what makes the boxes serve, and what makes the balancer in front of them
SITE = ("site.yml", "-l", "gpu-boxes")
BALANCER = ("playbooks/balancer.yml",)
#: what takes boxes back into rotation that a killed rollout has left outside
RESUME = ("playbooks/reconfigure.yml", "-e", "rollout_accept_downtime=true")


def play(playbook: tuple[str, ...] = SITE, env: dict[str, str] | None = None) -> float:
    """Run a playbook on the lab's inventory with its output shown; return the wall time in seconds.

    :raises LabError: it failed; its own output has said why.
    """
    argv = ["ansible-playbook", "-i", str(INVENTORY), *playbook]
    say(f"== {' '.join(argv[:1] + argv[3:])}")
    started = time.monotonic()
    done = subprocess.run(
        [str(VENV / "bin" / argv[0]), *argv[1:]],
        cwd=ROOT,
        check=False,
        env={**os.environ, "VLLM_FLEET_CACHE": str(CACHE), **(env or {})},
    )
    wall = time.monotonic() - started
    if done.returncode:
        raise LabError(
            f"the playbook ended with {done.returncode} after {wall:.0f} s; the boxes stay as they are. "
            "Fix what it says and run make lab again"
        )
    say(f"   playbook: done in {wall:.1f} s")
    return wall


def count(lines: list[str]) -> tuple[int, int]:
    """Return the highest number of module executions for any box and the sum of changes, out of the callback's file.

    An execution that names no host counts for every box.
    """
    calls: Counter[str] = Counter()
    unknown = changed = 0
    for line in lines:
        kind, host, rest = line.split(" ", 2)
        if kind == "changed":
            changed += int(rest)
        elif host == "?":
            unknown += 1
        else:
            calls[host] += 1
    return max(calls.values(), default=0) + unknown, changed


def cost() -> str:
    """Run the playbook twice and return the line about the second run: calls for a box, changes, wall time."""
    play()
    noted = Path(STATE) / "converge-cost.txt"
    noted.unlink(missing_ok=True)
    wall = play(env={"CONVERGE_COST_FILE": str(noted), "ANSIBLE_CALLBACKS_ENABLED": "converge_cost"})
    calls, changed = count(noted.read_text().splitlines())
    return f"calls_per_box={calls} changed={changed} wall_s={wall:.1f}"
