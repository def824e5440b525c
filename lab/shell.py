"""Running other programs, with errors a person can act on, and saying what takes long."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence

SUDO: tuple[str, ...] = () if os.geteuid() == 0 else ("sudo",)


class LabError(Exception):
    """Something that stops the lab; the text names the thing, what was found and the fix."""


def run(
    argv: Sequence[str],
    *,
    root: bool = False,
    check: bool = True,
    stdin: bytes | None = None,
    timeout: float | None = 300,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program and return its output.

    :param root: run it as root (through sudo when we are not).
    :param check: raise on a non-zero exit.
    :param timeout: seconds after which it is ended; a program that hangs must not hang the lab.
    :raises LabError: it is missing, failed or ran out of time; carries the last lines of its stderr.
    """
    command = [*(SUDO if root else ()), *argv]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=timeout, env=env, check=False)
    except FileNotFoundError as error:
        raise LabError(f"{command[0]} is not installed. Fix: make env") from error
    except subprocess.TimeoutExpired as error:
        raise LabError(f"no answer from `{' '.join(command[:4])} …` within {timeout:.0f} s") from error
    out, err = (stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
    if check and done.returncode:
        last = "\n  ".join((err.strip() or out.strip()).splitlines()[-8:])
        raise LabError(f"`{' '.join(command[:6])} …` ended with {done.returncode}:\n  {last}")
    return subprocess.CompletedProcess(command, done.returncode, out, err)


def podman(*args: str, check: bool = True, stdin: bytes | None = None, timeout: float = 120) -> str:
    """Run podman as root and return its stdout."""
    return run(["podman", *args], root=True, check=check, stdin=stdin, timeout=timeout).stdout


def say(text: str) -> None:
    """Print one line for the person in front of the terminal, at once."""
    print(text, flush=True)


#: the steps in progress, outermost first; only the innermost one reports
_phases: list[str] = []


@contextlib.contextmanager
def phase(name: str, every_s: float = 10.0) -> Iterator[None]:
    """Name a step; while it lasts longer than ``every_s`` seconds say so, and at the end say how long it took."""
    started, done = time.monotonic(), threading.Event()
    say(f"== {name}")
    _phases.append(name)

    def heartbeat() -> None:
        while not done.wait(every_s):
            if _phases[-1:] == [name]:
                say(f"   {name}: {time.monotonic() - started:.0f} s")

    thread = threading.Thread(target=heartbeat, daemon=True)
    thread.start()
    word = "failed after"
    try:
        yield
        word = "done in"
    finally:
        done.set()
        thread.join()
        _phases.remove(name)
        say(f"   {name}: {word} {time.monotonic() - started:.1f} s")
