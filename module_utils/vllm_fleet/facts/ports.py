"""Socket adapter: who listens on a TCP port, with its process and the unit that owns the process."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any, Dict, List, Optional, Set, Tuple

from .host import read_text, under

_ESTABLISHED = "01"
_LISTEN = "0A"


def connected(address: str, port: int, root: str = "/") -> bool:
    """Return whether something on this box has a connection to that port there."""
    wanted = ipaddress.ip_address(address)
    for name in ("tcp", "tcp6"):
        for line in (read_text(under(root, f"/proc/net/{name}")) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10 or fields[3] != _ESTABLISHED:
                continue
            remote, _, number = fields[2].rpartition(":")
            there = ipaddress.ip_address(_address(remote))
            if int(number, 16) == port and wanted in (there, getattr(there, "ipv4_mapped", None)):
                return True
    return False


def listeners(port: int, root: str = "/") -> Optional[List[Dict[str, Any]]]:
    """Return the sockets that listen on ``port``; ``None`` when the kernel's table can't be read.

    Each is ``{"address", "pid", "command", "cgroup"}``; ``pid`` is ``None`` when the owner is out of sight.
    """
    tables = [read_text(under(root, f"/proc/net/{name}")) for name in ("tcp", "tcp6")]
    if all(table is None for table in tables):
        return None
    found: List[Tuple[str, str]] = []
    for table in tables:
        for line in (table or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10 or fields[3] != _LISTEN:
                continue
            address, _, number = fields[1].rpartition(":")
            if int(number, 16) == port:
                found.append((_address(address), fields[9]))
    if not found:
        return []
    owners = _owners({inode for _, inode in found}, root)
    result = []
    for address, inode in found:
        pid = owners.get(inode)
        owner = process(pid, root) if pid is not None else {"command": None, "cgroup": None}
        result.append({"address": address, "pid": pid, "command": owner["command"], "cgroup": owner["cgroup"]})
    return result


def process(pid: int, root: str = "/") -> Dict[str, Any]:
    """Return ``{"command", "cgroup"}`` of a process; values are ``None`` when it is gone or hidden."""
    line = read_text(under(root, f"/proc/{pid}/cmdline"))
    command = " ".join((line or "").replace("\0", " ").split()) or (read_text(under(root, f"/proc/{pid}/comm")) or "")
    groups = read_text(under(root, f"/proc/{pid}/cgroup"))
    paths = [entry.split(":", 2)[2] for entry in (groups or "").splitlines() if entry.count(":") >= 2]
    return {"command": command.strip()[:200] or None, "cgroup": max(paths, key=len) if paths else None}


def _address(text: str) -> str:
    """Turn the kernel's hexadecimal address (32-bit words in host order) into the usual spelling."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    raw = b"".join(words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def _owners(inodes: Set[str], root: str) -> Dict[str, int]:
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    owners: Dict[str, int] = {}
    try:
        entries = os.listdir(under(root, "/proc"))
    except OSError:
        return owners
    for entry in entries:
        if not entry.isdigit():
            continue
        directory = under(root, f"/proc/{entry}/fd")
        try:
            handles = os.listdir(directory)
        except OSError:
            continue
        for handle in handles:
            try:
                inode = wanted.get(os.readlink(os.path.join(directory, handle)))
            except OSError:
                continue
            if inode is not None:
                owners.setdefault(inode, int(entry))
        if len(owners) == len(wanted):
            break
    return owners
