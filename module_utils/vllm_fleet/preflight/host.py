"""Checks of the host: memory, shared memory, disks, the service user and what it may write."""

from __future__ import annotations

import os
from typing import List

from .registry import Box, Finding, Lane, check, denied, fail, ok, unknown, warn

#: what a start needs when the profile names nothing: a compile cache takes ~160 MB, a log some lines
CACHE_FLOOR_KIB = 512 * 1024
LOG_FLOOR_KIB = 16 * 1024

_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "ceph", "glusterfs", "fuse.sshfs", "9p", "lustre", "beegfs")


def _gib(kib: int) -> str:
    return f"{kib / 1048576:.1f} GiB" if kib >= 1048576 else f"{kib / 1024:.0f} MiB"


@check(
    "memory",
    {
        "memory_ok": ok("at least what the profile recommends"),
        "memory_below_floor": fail("less memory than the profile's resident floor: the start would end in an OOM kill"),
        "memory_below_recommended": warn("above the floor, below what the profile recommends"),
        "memory_unknown": unknown("the size of the memory could not be read"),
    },
    applies=lambda lane: bool(lane["needs"].get("memory_floor_kib") or lane["needs"].get("memory_recommended_kib")),
)
def memory(lane: Lane, box: Box) -> List[Finding]:
    """The memory that the unit may use, the smaller of MemTotal and the cgroup limits (v1 and v2), against the
    profile's floor and recommendation, in KiB."""
    total, limit = box["memory"]["total_kib"], box["memory"]["limit_kib"]
    sizes = [size for size in (total, limit) if size is not None]
    if not sizes:
        return [Finding("memory_unknown", "neither MemTotal nor a cgroup limit could be read")]
    size = min(sizes)
    text = f"{_gib(size)} ({size} KiB) of memory"
    fix = "use a box with more memory"
    if limit is not None and size == limit:
        text += f" by {box['memory']['limit_source']}"
        fix = "raise the memory limit of the unit or container"
    floor, recommended = lane["needs"].get("memory_floor_kib"), lane["needs"].get("memory_recommended_kib")
    if floor and size < floor:
        return [Finding("memory_below_floor", text, f"at least {_gib(floor)} ({floor} KiB)", fix)]
    if recommended and size < recommended:
        return [Finding("memory_below_recommended", text, f"{_gib(recommended)} ({recommended} KiB) recommended", fix)]
    return [Finding("memory_ok", text)]


@check(
    "shared_memory",
    {
        "shm_ok": ok("enough of /dev/shm is available"),
        "shm_too_small": fail("shared memory is smaller than the profile needs"),
        "shm_occupied": fail("shared memory is large enough but too little of it is available"),
        "shm_unknown": unknown("the shared memory could not be measured"),
    },
    applies=lambda lane: bool(lane["needs"].get("shm_kib")),
)
def shared_memory(lane: Lane, box: Box) -> List[Finding]:
    """The *available* size of ``/dev/shm`` covers the profile's need. All traffic between GPUs without peer-to-peer
    runs through it; segments that a dead engine left count as used."""
    shm, need = box["shared_memory"], lane["needs"]["shm_kib"]
    if shm is None:
        return [Finding("shm_unknown", "the size of /dev/shm could not be measured")]
    text = f"{_gib(shm['available_kib'])} of {_gib(shm['total_kib'])} available in /dev/shm"
    if shm["total_kib"] < need:
        fix = (
            f"mount -o remount,size={need // 1024 + 1}M /dev/shm, and in /etc/fstab (containers: shm size or host IPC)"
        )
        return [Finding("shm_too_small", text, f"{_gib(need)} ({need} KiB)", fix)]
    if shm["available_kib"] < need:
        fix = "remove files that dead processes left in /dev/shm, or enlarge it"
        return [Finding("shm_occupied", text, f"{_gib(need)} ({need} KiB)", fix)]
    return [Finding("shm_ok", text)]


@check(
    "disk",
    {
        "disk_ok": ok("the file system of the compile cache has room"),
        "disk_full": fail("the file system of the compile cache has less room than the profile needs"),
        "disk_unknown": unknown("the free space could not be read"),
    },
)
def disk(lane: Lane, box: Box) -> List[Finding]:
    """The file system of the compile cache has the free space that the profile names, 512 MiB when it names none."""
    place = box["cache"]
    need = lane["needs"].get("disk_kib") or CACHE_FLOOR_KIB
    if place["available_kib"] is None:
        return [Finding("disk_unknown", f"the free space of {place['path']} could not be read")]
    text = f"{_gib(place['available_kib'])} free for {place['path']}"
    if place["available_kib"] < need:
        return [Finding("disk_full", text, f"{_gib(need)} ({need} KiB)", "free some space or use a larger disk")]
    return [Finding("disk_ok", text)]


@check(
    "service_user",
    {
        "user_ok": ok("the service user exists"),
        "user_missing": fail("the service user does not exist", absent=True),
    },
)
def service_user(lane: Lane, box: Box) -> List[Finding]:
    """The system user that runs the engine exists in the name service (an engine without a passwd entry fails in
    libraries that ask for the home directory)."""
    if box["user"] is None:
        name = box["user_name"]
        fix = f"useradd --system --home-dir /var/lib/vllm-fleet {name}"
        return [Finding("user_missing", f"no user {name}", "the user that the unit runs as", fix)]
    return [Finding("user_ok", f"user {box['user']['name']}, uid {box['user']['uid']}")]


@check(
    "cache",
    {
        "cache_ok": ok("the service user can write the compile cache, on a local disk"),
        "cache_created_at_start": ok("the cache directory is made at the start; its file system can be written"),
        "cache_missing": fail("the cache directory that the profile names does not exist", absent=True),
        "cache_not_a_directory": fail("the cache path is no directory"),
        "cache_read_only": fail("the cache lies on a read-only file system"),
        "cache_noexec": fail("the cache lies on a file system mounted noexec: compiled kernels could not be loaded"),
        "cache_not_writable": fail("the service user cannot write the cache directory"),
        "cache_in_memory": warn("the cache lies in memory and is lost at a reboot: the next start compiles again"),
        "cache_on_network": warn("the cache lies on a network file system, where compilers' file locks are unreliable"),
        "cache_unknown": unknown("whether the service user can write the cache could not be asked", absent=True),
    },
)
def cache(lane: Lane, box: Box) -> List[Finding]:
    """The service user can write the compile cache; its file system is writable, executable, local and lasting."""
    place, path = box["cache"], box["cache"]["path"]
    options = place["options"]
    if place["exists"] and place["kind"] != "directory":
        return [Finding("cache_not_a_directory", f"{path} is a {place['kind']}", "a directory", f"remove {path}")]
    if not place["exists"] and lane.get("cache_root"):
        fix = f"install -d -o {box['user_name']} {path}"
        return [Finding("cache_missing", f"no directory {path}", "the cache directory of the profile", fix)]
    if "ro" in options:
        return [
            Finding("cache_read_only", f"{path} is on a read-only file system", "a writable one", "mount it writable")
        ]
    if "noexec" in options:
        fix = "mount it with exec, or choose another cache_root"
        return [
            Finding("cache_noexec", f"{path} is on a file system mounted noexec", "compiled kernels can be loaded", fix)
        ]
    if place["exists"]:
        if box["access"] is None:
            return [Finding("cache_unknown", f"whether {box['user_name']} can write {path} was not tested")]
        if denied(box, path, "wx"):
            fix = f"chown {box['user_name']} {path}"
            return [
                Finding("cache_not_writable", f"{box['user_name']} cannot write {path}", "a writable directory", fix)
            ]
    if place["type"] in _MEMORY_FILESYSTEMS:
        fix = "use a directory on a disk unless this is intended"
        return [Finding("cache_in_memory", f"{path} is on {place['type']}", "a disk", fix)]
    if place["type"] in _NETWORK_FILESYSTEMS:
        return [Finding("cache_on_network", f"{path} is on {place['type']}", "a local disk", "use a local cache_root")]
    if not place["exists"]:
        return [Finding("cache_created_at_start", f"{path} on {place['type'] or 'an unnamed file system'}")]
    return [Finding("cache_ok", f"{path} on {place['type'] or 'an unnamed file system'}")]


@check(
    "cache_key",
    {
        "cache_keyed": ok(
            "the directory's name holds the engine, or the start chooses it by engine, driver and architecture"
        ),
        "cache_not_keyed": warn("a fixed directory that another engine version or driver would share"),
    },
)
def cache_key(lane: Lane, box: Box) -> List[Finding]:
    """The compile cache is one per engine, driver and GPU architecture: kernels of another one can give garbled output.
    A directory that the profile fixes must at least carry the engine's id in its name."""
    root, engine = lane.get("cache_root"), lane["engine"]["id"]
    if root and engine not in root:
        fix = f"leave cache_root out, or use a directory with {engine} in its name"
        return [Finding("cache_not_keyed", f"the fixed directory {root}", f"a cache of {engine} alone", fix)]
    return [Finding("cache_keyed", root or "chosen at the start by engine, driver and architecture")]


@check(
    "log",
    {
        "log_journal": ok("the output goes to the journal"),
        "log_ok": ok("the log file can be written"),
        "log_directory_missing": fail("the directory of the log file does not exist", absent=True),
        "log_not_a_file": fail("the log path is no regular file"),
        "log_read_only": fail("the log file lies on a read-only file system"),
        "log_disk_full": fail("the file system of the log file is full"),
    },
)
def log(lane: Lane, box: Box) -> List[Finding]:
    """systemd can open the lane's log file for appending: a regular file or a new one in an existing directory, on a
    writable file system with room."""
    path, place = lane.get("log"), box["log"]
    if not path or place is None:
        return [Finding("log_journal", "output goes to the journal")]
    if place["exists"] and place["kind"] != "file":
        return [
            Finding("log_not_a_file", f"{path} is a {place['kind']}", "a regular file", f"remove {path} or set log")
        ]
    if not place["exists"] and place["nearest"] != place["parent"]:
        directory = os.path.dirname(path)
        fix = f"install -d -o {box['user_name']} {directory}"
        return [Finding("log_directory_missing", f"no directory {directory}", "the log file's directory", fix)]
    if "ro" in place["options"]:
        return [
            Finding("log_read_only", f"{path} is on a read-only file system", "a writable one", "mount it writable")
        ]
    if place["available_kib"] is not None and place["available_kib"] < LOG_FLOOR_KIB:
        text = f"{_gib(place['available_kib'])} free for {path}"
        return [Finding("log_disk_full", text, f"{_gib(LOG_FLOOR_KIB)}", "free some space; check the log rotation")]
    return [Finding("log_ok", path)]


@check(
    "workdir",
    {
        "workdir_ok": ok("the working directory exists"),
        "workdir_missing": fail("the working directory does not exist: systemd would not start the unit", absent=True),
        "workdir_not_enterable": fail("the service user cannot enter the working directory"),
    },
)
def workdir(lane: Lane, box: Box) -> List[Finding]:
    """The unit's working directory exists and the service user may enter it."""
    path = lane["workdir"]
    if box["workdir"]["kind"] != "directory":
        return [
            Finding("workdir_missing", f"no directory {path}", "the unit's working directory", f"install -d {path}")
        ]
    if denied(box, path, "x"):
        text = f"{box['user_name']} cannot enter {path}"
        return [
            Finding("workdir_not_enterable", text, "the unit's working directory", f"chown {box['user_name']} {path}")
        ]
    return [Finding("workdir_ok", path)]
