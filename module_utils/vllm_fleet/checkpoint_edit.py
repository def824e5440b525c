"""Setting one key in a JSON file of a checkpoint: the file work around :mod:`.json_edit`.

Whatever instruction the process dies at, the file is the old one or the new one. The order is: backup (temporary file,
fsync, link to a name that must be free), new content (temporary file with mode, owner and extended attributes, fsync),
rename, fsync of the directory.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import os
import stat
import tempfile
from typing import Any, Dict, Iterator, List, Tuple

from . import checkpoint, checks, json_edit
from .errors import FleetError, RefusedError, UsageError
from .facts import checkpoint_dir
from .files import fsync_directory

_TEMPORARY_SUFFIX = ".vllm-fleet-tmp"


def set_key(
    directory: str, key: str, value: Any, *, file: str = checkpoint.CONFIG, force: bool = False, check: bool = False
) -> Dict[str, Any]:
    """Set ``key`` in ``directory/file`` unless it is set already.

    A symlink is followed to its file, as the hub's cache uses them; the backup stands beside the link. The checkpoint
    must be whole, because a download that is resumed later would fetch the file again and lose the edit.

    :param key: dotted path; ``value``: any JSON value; ``force``: see :func:`.json_edit.set_key`.
    :param check: write nothing; everything else, refusals included, is as in a real run.
    :returns: ``{"changed", "reason", "file" (the link), "target" (the file), "before", "after" (JSON texts of
        the value; ``before`` may be null), "text_before", "text_after" (the whole file), "backup", "warnings"}``.
    :raises RefusedError: nothing was written; reasons of :func:`.json_edit.set_key`, of the checkpoint's check, and
        ``checkpoint_absent``, ``config_missing``, ``unreadable_file``, ``read_only``, ``attributes_not_kept``,
        ``changed_meanwhile``, ``write_failed``.
    """
    if os.path.isabs(file) or ".." in file.split("/"):
        raise UsageError("bad_file", f"--file must name a file inside the checkpoint, not {file}")
    directory = os.path.abspath(directory)
    warnings = _require_whole(directory)
    link = os.path.join(directory, file)
    target = os.path.realpath(link)
    with _locked(os.path.dirname(target)):
        return _set_key(link, target, key, value, force=force, check=check, warnings=warnings)


def _set_key(
    link: str, target: str, key: str, value: Any, *, force: bool, check: bool, warnings: List[checks.Result]
) -> Dict[str, Any]:
    backup = link + checkpoint.BACKUP_SUFFIX
    raw, status = _read(link, target)
    try:
        edit = json_edit.set_key(raw, key, value, force)
    except FleetError as error:
        error.message = f"{link}: {error.message}"
        raise
    result = {
        "changed": edit.changed,
        "reason": edit.reason,
        "file": link,
        "target": target,
        "before": edit.before,
        "after": edit.after,
        "text_before": raw.decode("utf-8"),
        "text_after": edit.raw.decode("utf-8"),
        "backup": backup if edit.changed or os.path.lexists(backup) else None,
        "warnings": warnings,
    }
    if not edit.changed:
        return result
    if status.st_nlink > 1:
        message = f"{target} has {status.st_nlink - 1} other hard links; they keep the old content"
        warnings.append(checks.result("checkpoint_config", checks.WARN, "hard_links", message, "edit them as well"))
    command = checkpoint.edit_command(*os.path.split(link), key, value)
    _require_writable(link, target, backup, command, status)
    if not check:
        try:
            _write(target, backup, raw, edit.raw, status)
        except OSError as error:
            message = f"cannot replace {target}: {error.strerror or error}; it is unchanged"
            raise RefusedError(
                "write_failed", message, "correct the disk or the permissions and run it again"
            ) from None
    return result


def unified_diff(before: str, after: str, name: str) -> str:
    """Return the exact change as a patch, line ends and a missing last newline included."""
    pieces = []
    for line in difflib.unified_diff(_lines(before), _lines(after), f"a/{name}", f"b/{name}", n=2):
        pieces.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(pieces)


def _lines(text: str) -> List[str]:
    lines = [line + "\n" for line in text.split("\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _require_whole(directory: str) -> List[checks.Result]:
    """Refuse a directory that is no whole checkpoint; return its warnings."""
    facts = checkpoint_dir.read_directory(directory, [checkpoint.INDEX])
    if facts["state"] != "directory":
        fix = "correct the path, or download the checkpoint first"
        raise RefusedError("checkpoint_absent", f"{directory} is no readable directory: {facts['problem']}", fix)
    for name in checkpoint.named_files(facts, []) - set(facts["files"]):
        facts["files"][name] = checkpoint_dir.look_at(os.path.join(directory, name))
    results = checkpoint.check_weights(facts)
    for item in checks.failed(results):
        raise RefusedError(item["reason"], item["message"], item["fix"])
    return [item for item in results if item["status"] != checks.PASS]


def _read(link: str, target: str) -> Tuple[bytes, os.stat_result]:
    try:
        # O_NONBLOCK: a fifo in the file's place must not hang
        descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        gone = f" (a link to {target}, which is gone)" if os.path.islink(link) else ""
        raise RefusedError("config_missing", f"there is no {link}{gone}", checkpoint.DOWNLOAD_AGAIN) from None
    except OSError as error:
        raise RefusedError("unreadable_file", f"cannot read {link}: {error.strerror}", "run this as root") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise RefusedError("unreadable_file", f"{link} is not a regular file", checkpoint.DOWNLOAD_AGAIN)
        with os.fdopen(descriptor, "rb", closefd=False) as handle:
            return handle.read(), status
    finally:
        os.close(descriptor)


def _require_writable(link: str, target: str, backup: str, command: str, status: os.stat_result) -> None:
    places = [os.path.dirname(target)]
    if not os.path.lexists(backup):
        places.append(os.path.dirname(backup))
    closed = [place for place in places if not os.access(place, os.W_OK | os.X_OK)]
    if closed:
        fix = f"on the machine where it is writable, as a user who may write, run once: {command}"
        raise RefusedError("read_only", f"{link} needs an edit, and {closed[0]} cannot be written to", fix)
    groups = {os.getegid(), *os.getgroups()}
    if os.geteuid() != 0 and (os.geteuid() != status.st_uid or status.st_gid not in groups):
        message = f"{target} belongs to {status.st_uid}:{status.st_gid}, which only root or its owner can keep"
        raise RefusedError("attributes_not_kept", message, "run this as root or as the owner of the file")


def _write(target: str, backup: str, raw: bytes, edited: bytes, status: os.stat_result) -> None:
    for name in (target, backup):
        _remove_leftovers(name)
    if not os.path.lexists(backup):
        with _temporary(backup, raw, target, status) as temporary:
            _link_once(temporary, backup)
        fsync_directory(os.path.dirname(backup))
    with _temporary(target, edited, target, status) as temporary:
        now = os.stat(target)
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (status.st_ino, status.st_size, status.st_mtime_ns):
            raise RefusedError("changed_meanwhile", f"{target} was changed by someone else", "run this again")
        os.replace(temporary, target)
    fsync_directory(os.path.dirname(target))


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Let one editor at a time into a directory; one that cannot be opened or locked goes without."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _remove_leftovers(name: str) -> None:
    """Remove the temporary files of runs that were killed; the lock keeps the living ones out."""
    directory, base = os.path.split(name)
    for entry in os.listdir(directory):
        if entry.startswith(f".{base}.") and entry.endswith(_TEMPORARY_SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, entry))


@contextlib.contextmanager
def _temporary(name: str, content: bytes, model: str, status: os.stat_result) -> Iterator[str]:
    """Write ``content`` durably beside ``name`` with mode, owner and attributes of ``model``; remove what is left."""
    prefix = f".{os.path.basename(name)}."
    descriptor, path = tempfile.mkstemp(prefix=prefix, suffix=_TEMPORARY_SUFFIX, dir=os.path.dirname(name))
    try:
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fchown(descriptor, status.st_uid, status.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
            _copy_attributes(model, descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _copy_attributes(source: str, descriptor: int) -> None:
    try:
        names = os.listxattr(source)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.ENOSYS):
            return
        raise
    for name in names:
        value = os.getxattr(source, name)
        try:
            if os.getxattr(descriptor, name) == value:
                continue  # such as the security label that the directory gives
        except OSError:
            pass
        try:
            os.setxattr(descriptor, name, value)
        except OSError as error:
            message = f"the extended attribute {name} of {source} cannot be kept: {error.strerror}"
            raise RefusedError("attributes_not_kept", message, "run this as root") from None


def _link_once(temporary: str, backup: str) -> None:
    """Give the backup its name; another run's backup, made a moment ago, stays."""
    try:
        os.link(temporary, backup)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        os.replace(temporary, backup)  # no hard links here; the lock keeps the second run out
