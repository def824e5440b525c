"""A lock between processes of one machine that says who holds it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from typing import Iterator

from .errors import RefusedError


def _who(purpose: str) -> bytes:
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    user = os.environ.get("SUDO_USER") or os.environ.get("LOGNAME") or f"user id {os.geteuid()}"
    who = {"pid": os.getpid(), "user": user, "host": os.uname().nodename, "since": since, "purpose": purpose}
    return json.dumps(who).encode()


def holder(path: str) -> str:
    """Return one sentence part about who holds (or last held) the lock."""
    try:
        with open(path, encoding="utf-8") as handle:
            who = json.loads(handle.read())
        return "process {pid} of {user} on {host} since {since} ({purpose})".format(**who)
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that has not said who it is"


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _is_at(descriptor: int, path: str) -> bool:
    """Whether the open file is still the one at ``path``, and not one that its holder has removed meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def hold(path: str, purpose: str, wait: float = 0.0, remove: bool = False) -> Iterator[None]:
    """Hold the lock ``path`` while the block runs; it ends with the process, however that ends.

    :param purpose: what for, shown to those who wait.
    :param wait: seconds to wait for another holder.
    :param remove: whether the file goes away with the lock, where it lies in a directory that is to be left empty.
    :raises RefusedError: ``locked``, with who holds it.
    """
    descriptor = _open(path)
    try:
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(descriptor, path):
                    break
                os.close(descriptor)
                descriptor = _open(path)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise RefusedError(
                        "locked", f"{path} is held by {holder(path)}", "wait until that run has ended, then run again"
                    ) from None
                time.sleep(0.2)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _who(purpose), 0)
        try:
            yield
        finally:
            if remove:
                os.unlink(path)
    finally:
        os.close(descriptor)
