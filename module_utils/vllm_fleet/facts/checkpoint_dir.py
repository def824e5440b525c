"""Reading a checkpoint directory: names, sizes, its small JSON files, who may read it. Weights stay closed."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import stat
from typing import Any, Dict, Iterable, List, Optional, Tuple

from ..files import write_atomic

#: Where remembered digests live on a box.
STATE_DIRECTORY = "/var/lib/vllm-fleet/checkpoints"


def read_directory(path: str, documents: Iterable[str]) -> Dict[str, Any]:
    """Return the facts of one checkpoint (shape: :mod:`..checkpoint`), with the named JSON files parsed."""
    facts: Dict[str, Any] = {
        "path": path, "state": "directory", "problem": "", "files": {}, "documents": {}, "manifest": None,
        "digests": {}, "originals": {}, "access": None, "free": None,
    }  # fmt: skip
    try:
        names = os.listdir(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            facts["state"] = "absent"
        elif isinstance(error, NotADirectoryError):
            facts["state"] = "not_a_directory"
        else:
            facts["state"] = "unreadable"
        facts["problem"] = error.strerror or str(error)
        return facts
    for name in names:
        entry = look_at(os.path.join(path, name))
        if entry["state"] != "other":  # directories and the like are none of the checkpoint's files
            facts["files"][name] = entry
    for name in documents:
        if not os.path.lexists(os.path.join(path, name)):
            continue
        raw, problem = read_bytes(os.path.join(path, name))
        if raw is None:
            facts["documents"][name] = {"problem": problem}
            continue
        try:
            # not the strict parser: engines accept NaN and Infinity here, so a checkpoint with them is good
            value = json.loads(raw.decode("utf-8-sig"))
            facts["documents"][name] = {"value": value, "bom": raw.startswith(b"\xef\xbb\xbf")}
        except (ValueError, RecursionError) as error:
            facts["documents"][name] = {"problem": f"not JSON in UTF-8: {error}"}
    return facts


def look_at(path: str) -> Dict[str, Any]:
    """Return ``{state, size, mtime_ns, inode}`` of a file, with symlinks followed."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return {"state": "dangling" if os.path.islink(path) else "absent"}
    except (OSError, ValueError):
        return {"state": "unreadable"}
    return {
        "state": "file" if stat.S_ISREG(status.st_mode) else "other",
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "inode": status.st_ino,
    }


def access_of(user: str, directory: str, files: Iterable[str]) -> Dict[str, Any]:
    """Say which of ``files`` (relative to ``directory``) the user cannot read, by asking the kernel as that user.

    A child process takes the user's ids and groups and calls access(2) on each name, so ACLs, network mounts and the
    directories above count, and nothing is opened.
    """
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        return {"user": user, "problem": "unknown_user", "unreadable": []}
    names = list(files)
    if os.geteuid() == entry.pw_uid:
        return {"user": user, "problem": "", "unreadable": _not_readable(directory, names)}
    if os.geteuid() != 0:
        return {"user": user, "problem": "only root can test for another user", "unreadable": []}
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.initgroups(user, entry.pw_gid)
            os.setgid(entry.pw_gid)
            os.setuid(entry.pw_uid)
            with os.fdopen(writer, "wb") as handle:
                handle.write(json.dumps(_not_readable(directory, names)).encode("ascii"))
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as handle:
        raw = handle.read()
    if os.waitpid(child, 0)[1] != 0:
        return {"user": user, "problem": f"could not take the ids of {user}", "unreadable": []}
    return {"user": user, "problem": "", "unreadable": json.loads(raw.decode("ascii"))}


def _not_readable(directory: str, names: List[str]) -> List[str]:
    if not os.access(directory, os.R_OK | os.X_OK):
        return [directory]
    return [name for name in names if not os.access(os.path.join(directory, name), os.R_OK)]


def free_space(path: str) -> Dict[str, Any]:
    """Return ``{path, bytes}``: what an ordinary user may still write there; the nearest directory above counts."""
    at = os.path.abspath(path)
    while not os.path.exists(at) and at != "/":
        at = os.path.dirname(at)
    try:
        status = os.statvfs(at)
    except OSError:
        return {"path": path, "bytes": None}
    return {"path": path, "bytes": status.f_bavail * status.f_frsize}


def state_file(path: str, directory: str = STATE_DIRECTORY) -> str:
    """Return the state file of the checkpoint at ``path``; links to the same directory share one."""
    real = os.path.realpath(path)
    key = hashlib.sha256(os.fsencode(real)).hexdigest()[:16]
    return os.path.join(directory, f"{os.path.basename(real) or 'root'}-{key}.json")


def load_remembered(path: str) -> Dict[str, Dict[str, Any]]:
    """Return ``{name: {sha256, size, mtime_ns, inode}}`` of a state file; an unusable one is as good as none."""
    try:
        with open(path, "rb") as handle:
            document = json.loads(handle.read().decode("utf-8"))
        files = document["files"] if document["schema"] == 1 else {}
        return {name: entry for name, entry in files.items() if isinstance(entry, dict)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def save_remembered(path: str, checkpoint: str, remembered: Dict[str, Dict[str, Any]]) -> None:
    """Write a state file, creating its directory."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    document = {"schema": 1, "path": os.path.realpath(checkpoint), "files": remembered}
    write_atomic(path, (json.dumps(document, indent=1, sort_keys=True) + "\n").encode("ascii"), mode=0o644)


def read_bytes(path: str) -> Tuple[Optional[bytes], str]:
    """Return ``(content, "")`` or ``(None, why not)``."""
    try:
        with open(path, "rb") as handle:
            return handle.read(), ""
    except OSError as error:
        return None, error.strerror or str(error)
