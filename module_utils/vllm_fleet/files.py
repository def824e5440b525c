"""File adapters: reading text and JSON with readable errors, and replacing a file so that a crash never breaks it."""

from __future__ import annotations

import contextlib
import json
import os
import stat

from .errors import UsageError

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Optional


def read_json(path: str, what: str) -> Any:
    """Parse a JSON file.

    :param what: the word for messages, such as ``facts``.
    :raises UsageError: ``unreadable_file`` or ``bad_json``, naming the file.
    """
    try:
        with open(path, "rb") as handle:
            raw = handle.read()
    except OSError as error:
        raise UsageError("unreadable_file", f"cannot read the {what} file {path}: {error.strerror}") from None
    return parse_json(raw, what, path)


def parse_json(raw: bytes, what: str, source: str) -> Any:
    """Parse JSON bytes strictly (UTF-8, no NaN or Infinity).

    :raises UsageError: ``bad_json``.
    """

    def refuse(token: str) -> Any:
        raise ValueError(f"{token} is not JSON")

    try:
        return json.loads(raw.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise UsageError("bad_json", f"the {what} in {source} is not JSON: {error}") from None


def fsync_directory(path: str) -> None:
    """Make a rename inside ``path`` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(
    path: str, data: bytes, mode: Optional[int] = None, uid: Optional[int] = None, gid: Optional[int] = None
) -> bool:
    """Replace ``path`` with ``data`` by temporary file, fsync and rename; return whether anything changed.

    A symlink is followed to its file. An existing file keeps its mode and owner unless they are given; a new one
    gets ``mode`` or 0644. Nothing is written when content, mode and owner are already right.
    """
    path = os.path.realpath(path)
    try:
        old: Optional[os.stat_result] = os.stat(path)
    except FileNotFoundError:
        old = None
    if mode is None:
        mode = stat.S_IMODE(old.st_mode) if old else 0o644
    want_uid = uid if uid is not None else (old.st_uid if old else os.geteuid())
    want_gid = gid if gid is not None else (old.st_gid if old else os.getegid())
    if old and stat.S_IMODE(old.st_mode) == mode and (old.st_uid, old.st_gid) == (want_uid, want_gid):
        with open(path, "rb") as handle:
            if handle.read() == data:
                return False
    import tempfile  # a third of the start-up time of a command that only reads

    directory = os.path.dirname(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=directory)
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fchmod(handle.fileno(), mode)
            if (want_uid, want_gid) != (os.geteuid(), os.getegid()):
                os.fchown(handle.fileno(), want_uid, want_gid)
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_directory(directory)
    return True


def link_atomic(target: str, link: str) -> bool:
    """Point the symlink ``link`` at ``target`` in one step; return whether it changed."""
    try:
        if os.readlink(link) == target:
            return False
    except OSError:
        pass
    directory = os.path.dirname(link)
    temporary = os.path.join(directory, f".{os.path.basename(link)}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    os.symlink(target, temporary)
    os.replace(temporary, link)
    fsync_directory(directory)
    return True
