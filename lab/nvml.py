"""The simulated NVML library of the lab's GPU boxes, compiled on this machine."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .settings import CACHE, NVML_SIM
from .shell import phase, run

LIBRARY_PATH = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
FACTS_PATH = "/etc/nvml-sim/facts.json"
SOURCE = NVML_SIM / "nvml_sim.c"
# Without _GNU_SOURCE and below C23: glibc 2.38 and later would otherwise bind strtol and friends to symbols that
# the older C library of a box does not have.
FLAGS = (
    "-std=c11",
    "-D_POSIX_C_SOURCE=200809L",
    "-O2",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-shared",
    "-Wl,-soname,libnvidia-ml.so.1",
)


def build(source: Path = SOURCE) -> bytes | None:
    """Return the compiled library, from the cache when source and flags are the same; None without a source."""
    if not source.exists():
        return None
    inputs = sorted([*source.parent.glob("*.c"), *source.parent.glob("*.h")])
    digest = hashlib.sha256("\0".join(FLAGS).encode())
    for path in inputs:
        digest.update(path.read_bytes())
    target = CACHE / "nvml" / f"{digest.hexdigest()[:16]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        with phase("compiling the NVML simulator"):
            run(["gcc", *FLAGS, "-o", str(part), str(source), "-lm"])
        part.rename(target)
    return target.read_bytes()
