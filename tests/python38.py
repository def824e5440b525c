"""A Python 3.8 for the tests: what runs on a box must run on it. ``python -m tests.python38`` gets one if need be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

UV = Path(sys.executable).parent / "uv"
MISSING = (
    "no Python 3.8 on PATH, below ~/.pyenv/versions or from uv. What runs on boxes must be tried with it: "
    "make unit gets one where GitHub can be reached; else pyenv install 3.8, or apt-get install python3.8"
)


def _is_38(path: str) -> bool:
    """Tell whether it really is one: a shim of pyenv is on PATH also where its version is not in use."""
    program = "import sys; sys.exit(sys.version_info[:2] != (3, 8))"
    return subprocess.run([path, "-I", "-c", program], capture_output=True, check=False).returncode == 0


def find() -> str | None:
    """Return a Python 3.8 of this machine: from PATH, pyenv or uv."""
    # uv's own search ends at the first interpreter that does not start, so PATH and pyenv are looked through here.
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [shutil.which("python3.8"), *map(str, sorted(pyenv.glob("3.8.*/bin/python3.8")))]
    managed = subprocess.run(
        [UV, "python", "find", "--managed-python", "--no-python-downloads", "--no-project", "3.8"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    candidates += managed.stdout.split()
    return next((path for path in candidates if path and _is_38(path)), None)


def main() -> int:
    """Say which one there is; where there is none, install uv's, which is for the user and touches no system file."""
    path = find()
    if path is None:
        print("no Python 3.8 here, getting one: uv python install 3.8", flush=True)
        subprocess.run([UV, "python", "install", "--no-bin", "3.8"], check=False)
        path = find()
    print(path or MISSING)
    return 0 if path else 1


if __name__ == "__main__":
    sys.exit(main())
