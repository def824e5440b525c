"""Read a unit's state, its log and its journal, through systemd's own tools."""

from __future__ import annotations

import os
import subprocess
from typing import Any, Dict, List

_PROPERTIES = (
    "LoadState", "ActiveState", "SubState", "Result", "MainPID", "ExecMainStatus", "ExecMainCode", "NRestarts",
    "InvocationID", "UnitFileState", "NeedDaemonReload", "ControlGroup", "ActiveEnterTimestampMonotonic",
    "InactiveExitTimestampMonotonic",
)  # fmt: skip


def run(argv: List[str], timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a command with a fixed locale; a missing program or a timeout reads as status 127 or 124."""
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout, check=False,
            env=dict(os.environ, LC_ALL="C.UTF-8"),
        )  # fmt: skip
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(argv, 127, "", str(error))
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"no answer within {timeout:.0f} s")


def unit_state(unit: str) -> Dict[str, Any]:
    """Return the unit's properties that the project uses; numbers such as ``MainPID`` as integers (0 when unknown)."""
    done = run(["systemctl", "show", unit, "--property=" + ",".join(_PROPERTIES)])
    values: Dict[str, Any] = dict.fromkeys(_PROPERTIES, "")
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        values[name] = value
    for name in ("MainPID", "NRestarts", "ActiveEnterTimestampMonotonic", "InactiveExitTimestampMonotonic"):
        values[name] = int(values[name]) if str(values[name]).isdigit() else 0
    return values


def log_size(path: str) -> int:
    """Return the size of a log file in bytes, 0 when there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def read_log(path: str, offset: int, limit: int = 1 << 20) -> str:
    """Return the log from ``offset`` on, at most its last ``limit`` bytes; from the start after a rotation."""
    try:
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            start = offset if offset <= size else 0
            handle.seek(max(start, size - limit))
            return handle.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""


def journal(unit: str, invocation: str = "", lines: int = 200) -> str:
    """Return the unit's last journal lines, of one invocation when it is given."""
    argv = ["journalctl", "--no-pager", "--output=cat", f"--lines={lines}"]
    argv += [f"_SYSTEMD_INVOCATION_ID={invocation}", "+", f"INVOCATION_ID={invocation}"] if invocation else ["-u", unit]
    return run(argv).stdout
