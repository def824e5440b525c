"""The NVML simulator for tests: built once a process, and programs run against it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "lab" / "nvml_sim"


@functools.cache
def library() -> Path:
    """Compile the simulator and return the directory that holds ``libnvidia-ml.so.1``."""
    directory = Path(tempfile.mkdtemp(prefix="nvml-sim."))
    subprocess.run(["make", "-s", "-C", SOURCE, f"OUT={directory}"], check=True)
    return directory


def box(name: str) -> dict[str, Any]:
    """Return the facts of a box of the lab."""
    facts: dict[str, Any] = json.loads((SOURCE / "boxes" / f"{name}.json").read_text())
    return facts


def environment(facts: Path | str, installed: bool = True) -> dict[str, str]:
    """Return the environment of a process that sees the simulated cards; without the library when not ``installed``."""
    env = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "NVML_SIM_FACTS")}
    env["PYTHONPATH"] = str(ROOT / "module_utils")
    env["NVML_SIM_FACTS"] = str(facts)
    if installed:
        env["LD_LIBRARY_PATH"] = str(library())
    return env


def python(code: str, facts: Path | str, installed: bool = True, **variables: str) -> Any:
    """Run Python ``code`` against the simulator and return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment(facts, installed), **variables},
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)
