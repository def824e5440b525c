"""Talk to HAProxy over its runtime socket."""

from __future__ import annotations

import os
import socket
from typing import Any, Dict, List

from .. import haproxy
from ..errors import UsageError
from ..files import write_atomic

SOCKET = "/run/haproxy/admin.sock"
#: Admin states outlive a reload and a reboot in this file; the configuration names it as ``server-state-file``.
STATE_FILE = "/var/lib/haproxy/vllm-fleet-servers"


def ask(path: str, command: str, timeout: float = 10.0) -> str:
    """Send one command and return the answer.

    :raises UsageError: ``balancer_down`` when nobody answers at the socket.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(path)
            connection.sendall(command.encode() + b"\n")
            parts: List[bytes] = []
            while True:
                part = connection.recv(65536)
                if not part:
                    return b"".join(parts).decode("utf-8", "replace").strip("\n")
                parts.append(part)
    except OSError as error:
        raise UsageError(
            "balancer_down",
            f"HAProxy does not answer at {path}: {error.strerror or error}",
            "systemctl status haproxy; ansible-playbook playbooks/balancer.yml makes it anew",
        ) from None


def servers(path: str) -> List[Dict[str, Any]]:
    """Return the rows of :func:`haproxy.servers`."""
    return haproxy.servers(ask(path, "show stat"), ask(path, "show servers state"))


def set_state(path: str, pool: str, server: str, state: str) -> None:
    """Set a server's admin state, ``drain`` or ``ready``.

    :raises UsageError: ``balancer_refused`` with HAProxy's words.
    """
    said = ask(path, f"set server {pool}/{server} state {state}").strip()
    if said:
        raise UsageError("balancer_refused", f"HAProxy would not set {pool}/{server} to {state}: {said}")


def keep_state(path: str, state_file: str) -> None:
    """Write the servers' states to the file that HAProxy reads when it starts or reloads."""
    text = ask(path, "show servers state")
    if os.path.isdir(os.path.dirname(state_file)):
        write_atomic(state_file, text.encode() + b"\n", 0o644)
