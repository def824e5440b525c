"""Host adapter: memory and its cgroup limits, filesystems, users, and what a user may do with a path."""

from __future__ import annotations

import json
import os
import pwd
import re
import stat
import subprocess
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

#: limits at or above this mean "none" in cgroup v1, which has no word for it (a page-aligned maximum near 2**63)
_NO_LIMIT_BYTES = 1 << 60


def under(root: str, path: str) -> str:
    """Return ``path`` as seen below ``root`` (``/`` on a live box)."""
    return path if root == "/" else os.path.join(root, path.lstrip("/"))


def read_text(path: str) -> Optional[str]:
    """Return the text of a small file, or ``None`` when it can't be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return None


def first_line(path: str) -> str:
    """Return the first line of a small file without blanks around it; empty when it can't be read."""
    return (read_text(path) or "").partition("\n")[0].strip()


def link_name(path: str) -> Optional[str]:
    """Return the last part of what a symlink points at, ``None`` without a link."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None


def memory(root: str = "/", unit: str = "") -> Dict[str, Any]:
    """Return ``{"total_kib", "limit_kib", "limit_source"}``.

    ``limit_kib`` is the tightest cgroup limit (v2 ``memory.max`` or v1 ``memory.limit_in_bytes``) over the ancestors
    of this process and of ``unit``, ``None`` without one. Started by the unit, this process is in the unit's group.
    """
    found = re.search(r"^MemTotal:\s*(\d+) kB", read_text(under(root, "/proc/meminfo")) or "", re.MULTILINE)
    limit, source = _cgroup_limit(root, unit)
    return {"total_kib": int(found.group(1)) if found else None, "limit_kib": limit, "limit_source": source}


def _cgroup_limit(root: str, unit: str) -> Tuple[Optional[int], str]:
    groups = [("", "/")]
    for line in (read_text(under(root, "/proc/self/cgroup")) or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            groups.append((parts[1], parts[2]))
    if unit:
        slice_name = "system-" + unit.split("@", 1)[0].replace("-", "\\x2d") + ".slice"
        groups.append(("", f"/system.slice/{slice_name}/{unit}"))
    candidates: List[str] = []
    for controllers, group in groups:
        v1 = "memory" in controllers.split(",")
        if controllers and not v1:
            continue
        path = "/" + os.path.normpath(group).strip("/.")
        while True:
            if not v1:
                candidates.append(f"/sys/fs/cgroup{path.rstrip('/')}/memory.max")
            if v1 or path == "/":
                candidates.append(f"/sys/fs/cgroup/memory{path.rstrip('/')}/memory.limit_in_bytes")
            if path == "/":
                break
            path = os.path.dirname(path)
    best: Optional[int] = None
    source = ""
    for name in dict.fromkeys(candidates):
        text = (read_text(under(root, name)) or "").strip()
        if text.isdigit() and int(text) < _NO_LIMIT_BYTES and (best is None or int(text) // 1024 < best):
            best, source = int(text) // 1024, name
    return best, source


def shared_memory(root: str = "/") -> Optional[Dict[str, int]]:
    """Return ``{"total_kib", "available_kib"}`` of ``/dev/shm``, or ``None`` without it."""
    try:
        data = os.statvfs(under(root, "/dev/shm"))  # noqa: S108 - measured, not written
    except OSError:
        return None
    return {"total_kib": data.f_blocks * data.f_frsize // 1024, "available_kib": data.f_bavail * data.f_frsize // 1024}


def filesystem(path: str, root: str = "/") -> Dict[str, Any]:
    """Return where ``path`` is, or would be created.

    ``{"path", "exists", "kind": "directory|file|other|missing", "nearest", "type", "options", "available_kib"}``;
    ``nearest`` is the closest existing ancestor, whose filesystem is described; unreadable values are ``None``.
    """
    real = under(root, path)
    nearest = real
    while not os.path.lexists(nearest) and os.path.dirname(nearest) != nearest:
        nearest = os.path.dirname(nearest)
    kind = "missing"
    try:
        mode = os.stat(real).st_mode
        kind = "directory" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"
    except OSError:
        pass
    available: Optional[int] = None
    try:
        data = os.statvfs(nearest)
        available = data.f_bavail * data.f_frsize // 1024
    except OSError:
        pass
    fs_type, options = _mount_of(os.path.realpath(nearest))
    return {
        "path": path,
        "exists": kind != "missing",
        "kind": kind,
        "nearest": nearest,
        "type": fs_type,
        "options": options,
        "available_kib": available,
    }


def _mount_of(path: str) -> Tuple[Optional[str], List[str]]:
    """Return filesystem type and options of the mount that holds ``path`` (the last, longest match wins)."""
    best, answer = -1, (None, [])  # type: Tuple[int, Tuple[Optional[str], List[str]]]
    for line in (read_text("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if len(fields) < 6 or len(tail) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), fields[4])
        inside = point in ("/", path) or path.startswith(point + "/")
        if inside and len(point) >= best:
            best, answer = len(point), (tail[0], sorted(set(fields[5].split(",")) | set(tail[2].split(","))))
    return answer


def user(name: str, root: str = "/") -> Optional[Dict[str, Any]]:
    """Return ``{"name", "uid", "gid", "home", "groups"}`` of a user, or ``None``.

    A live box asks the name service (the user may come from a directory); below another root its passwd file counts.
    """
    if root == "/":
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            return None
        groups = sorted(os.getgrouplist(name, entry.pw_gid))
        return {"name": name, "uid": entry.pw_uid, "gid": entry.pw_gid, "home": entry.pw_dir, "groups": groups}
    for line in (read_text(under(root, "/etc/passwd")) or "").splitlines():
        fields = line.split(":")
        if len(fields) == 7 and fields[0] == name and fields[2].isdigit() and fields[3].isdigit():
            gid = int(fields[3])
            return {"name": name, "uid": int(fields[2]), "gid": gid, "home": fields[5], "groups": [gid]}
    return None


def can_act_as(account: Optional[Dict[str, Any]]) -> bool:
    """Return whether this process may take the user's identity: it is root, or already that user."""
    return account is not None and (os.geteuid() == 0 or os.geteuid() == account["uid"])


def demote(account: Dict[str, Any]) -> Optional[Callable[[], None]]:
    """Return the function that gives a forked child the user's identity, ``None`` when it already has it."""
    if os.geteuid() == account["uid"]:
        return None

    def become() -> None:
        os.setgroups(account["groups"])
        os.setgid(account["gid"])
        os.setuid(account["uid"])

    return become


def access_as(account: Optional[Dict[str, Any]], paths: Sequence[str], root: str = "/") -> Optional[Dict[str, str]]:
    """Ask the kernel what a user may do: ``{path: "rwx" letters}``, ``None`` when the identity can't be taken.

    A forked child takes the identity, so ACLs, read-only mounts and squashed network roots count as they would later.
    """
    if account is None or not can_act_as(account):
        return None
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read_end)
            become = demote(account)
            if become:
                become()
            answer = {
                path: "".join(
                    letter
                    for letter, mode in (("r", os.R_OK), ("w", os.W_OK), ("x", os.X_OK))
                    if os.access(under(root, path), mode)
                )
                for path in paths
            }
            with os.fdopen(write_end, "w", encoding="utf-8") as handle:
                json.dump(answer, handle)
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end, encoding="utf-8") as handle:
        text = handle.read()
    os.waitpid(child, 0)
    try:
        result = json.loads(text)
    except ValueError:
        return None
    return {str(path): str(letters) for path, letters in result.items()}


def run(
    argv: Sequence[str],
    account: Optional[Dict[str, Any]] = None,
    env: Optional[Dict[str, str]] = None,
    cwd: str = "/",
    timeout: float = 10.0,
) -> Tuple[Optional[int], str]:
    """Run a short command, as ``account`` when given; return ``(exit status, output)``.

    The status is ``None`` when it could not be started or ran past ``timeout`` seconds; the output then says why.
    """
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            timeout=timeout,
            check=False,
            preexec_fn=demote(account) if account else None,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {timeout:g} s"
    except (OSError, subprocess.SubprocessError) as error:
        return None, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace")
