"""The controller's environment: host packages and ``.venv`` from the hash lock. Runs on the system's Python alone."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from . import host
from .settings import ROOT, VENV
from .shell import LabError, phase, run

MIN_PYTHON = (3, 11)
LOCK = ROOT / "requirements.lock"
STAMP = VENV / ".requirements.sha256"


def fingerprint(lock: bytes, python_version: str) -> str:
    """Return what a finished environment is stamped with: the lock and the interpreter's version."""
    return hashlib.sha256(lock + python_version.encode()).hexdigest()


def _works(python: Path) -> bool:
    if not python.exists():
        return False
    probe = f"import pip, sys; sys.exit(sys.version_info < {MIN_PYTHON})"
    return subprocess.run([str(python), "-c", probe], capture_output=True, check=False).returncode == 0


def ensure() -> None:
    """Make ``.venv`` what the lock says; returns at once when it is.

    :raises LabError: this Python is too old, or a package could not be had.
    """
    if sys.version_info < MIN_PYTHON:
        raise LabError(
            f"Python {sys.version.split()[0]} at {sys.executable}; the controller needs "
            f"{'.'.join(map(str, MIN_PYTHON))} or later. Fix: make PYTHON=python3.11 …"
        )
    python = VENV / "bin" / "python"
    wanted = fingerprint(LOCK.read_bytes(), ".".join(map(str, sys.version_info[:2])))
    if STAMP.exists() and STAMP.read_text().strip() == wanted and _works(python):
        return
    _ensure_venv_package()
    with phase("controller environment: .venv from requirements.lock"):
        STAMP.unlink(missing_ok=True)
        if not _works(python):
            run([sys.executable, "-m", "venv", *(["--clear"] if VENV.exists() else []), str(VENV)])
        run(
            [
                str(python),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                "--require-hashes",
                "--no-deps",
                "--requirement",
                str(LOCK),
            ],
            timeout=1800,
        )
        STAMP.write_text(wanted + "\n")


def _ensure_venv_package() -> None:
    """Debian and Ubuntu split ``ensurepip`` off into a package of its own."""
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        if not shutil.which("apt-get"):
            raise LabError("this Python has no ensurepip. Fix: install its venv package") from None
        host.install((f"python{sys.version_info[0]}.{sys.version_info[1]}-venv",))
