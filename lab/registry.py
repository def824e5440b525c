"""What the lab has made: its boxes, their addresses, and the keys; everything that SSH needs to know of them."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .settings import NETWORK, STATE, USER
from .shell import run

REGISTRY = STATE / "lab.json"
SSH_CONFIG = STATE / "ssh_config"
KNOWN_HOSTS = STATE / "known_hosts"
CLIENT_KEY = STATE / "keys" / "id_ed25519"
#: where Ansible keeps its connections to the boxes open; the inventory names the same path
CONTROL_PATH = "~/.ansible/cp/lab-%C"


@dataclass(frozen=True)
class Box:
    """A box that the lab has made.

    :param lab: whether it belongs to the lab proper, and is not one beside it.
    """

    name: str
    container: str
    address: str
    lab: bool


def registry() -> dict[str, Box]:
    """Return the boxes that the state knows, by name; a missing or torn file counts as none."""
    try:
        return {name: Box(name, **entry) for name, entry in json.loads(REGISTRY.read_text())["boxes"].items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as stream:
        stream.write(text)
    part.replace(path)


def register(boxes: dict[str, Box]) -> None:
    """Write the registry and what SSH reads: addresses, users, keys and the boxes' own host keys."""
    entries = {box.name: {"container": box.container, "address": box.address, "lab": box.lab} for box in boxes.values()}
    write(REGISTRY, json.dumps({"network": NETWORK, "boxes": entries}, indent=2, sort_keys=True) + "\n")
    hosts, known = [], []
    for box in boxes.values():
        public = (box_dir(box.name) / "ssh_host_ed25519_key.pub").read_text().split()
        known.append(f"{box.name},{box.address} {public[0]} {public[1]}\n")
        hosts.append(f"Host {box.name}\n  HostName {box.address}\n")
    write(KNOWN_HOSTS, "".join(known))
    write(SSH_CONFIG, "".join(hosts) + for_all_hosts(KNOWN_HOSTS))


def for_all_hosts(known_hosts: Path) -> str:
    """Return the SSH configuration that all machines of the lab share: who logs in, and host keys checked."""
    return (
        f'Host *\n  User {USER}\n  IdentityFile "{CLIENT_KEY}"\n  IdentitiesOnly yes\n  StrictHostKeyChecking yes\n'
        f'  UserKnownHostsFile "{known_hosts}"\n  GlobalKnownHostsFile /dev/null\n  HostKeyAlgorithms ssh-ed25519\n'
        "  CheckHostIP no\n  ConnectTimeout 10\n  LogLevel ERROR\n"
    )


def box_dir(name: str) -> Path:
    return STATE / "boxes" / name


def make_ssh_key(path: Path, comment: str) -> None:
    """Make an SSH key pair unless a whole one is there."""
    public = path.with_name(path.name + ".pub")
    if path.exists() and public.exists() and public.read_text().startswith("ssh-ed25519 "):
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for leftover in (path, public):
        leftover.unlink(missing_ok=True)
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)])


def api_key_file(box: str, lane: str) -> Path:
    """Return the controller's file with the API key of a lane of the lab."""
    return STATE / "keys" / f"{box}-{lane}.key"


#: the controller's file with the key that clients of the balancer have
CLIENT_API_KEY = STATE / "keys" / "edge.key"


def make_api_keys(lanes: dict[str, tuple[str, ...]]) -> None:
    """Make the API keys of the lab's lanes (box name -> lane names) and of the balancer's clients.

    Lanes of one name share a key, because a balancer in front of them knows one for all. What is there is kept.
    """
    shared: dict[str, str] = {}
    for box, names in lanes.items():
        for name in names:
            path = api_key_file(box, name)
            there = path.read_text().strip() if path.exists() else ""
            key = shared.setdefault(name, there or secrets.token_urlsafe(32))
            if there != key:
                write(path, key + "\n", 0o600)
    if not CLIENT_API_KEY.exists() or not CLIENT_API_KEY.read_text().strip():
        write(CLIENT_API_KEY, secrets.token_urlsafe(32) + "\n", 0o600)


def connection(box: Box) -> dict[str, Any]:
    """Return the Ansible variables that reach a box; the lab's inventory says the same in its own way."""
    return {**connection_through(SSH_CONFIG), "lab_ip": box.address}


def connection_through(ssh_config: Path) -> dict[str, Any]:
    """Return the Ansible variables that reach a machine which this SSH configuration names."""
    return {
        "ansible_user": USER,
        "ansible_become": True,
        "ansible_python_interpreter": "/usr/bin/python3",
        "ansible_ssh_common_args": f'-F "{ssh_config}"',
        "ansible_control_path": CONTROL_PATH.replace("%", "%%"),
    }
