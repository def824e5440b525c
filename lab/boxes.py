"""Network, containers and keys of the lab: made, kept, repaired and removed.

A box is a podman container with systemd as PID 1 that is reached over SSH as an ordinary user with sudo. Its keys and
its address live in ``lab/.state``, so a box that had to be made anew is still the same host to SSH.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import ipaddress
import json
import os
import secrets
import shutil
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import image, nvml
from .host import Host
from .settings import CACHE, LAB_BOXES, LABEL, NETWORK, PREFIX, ROOT, STATE, USER, BoxSpec
from .shell import LabError, phase, run, say

REGISTRY = STATE / "lab.json"
SSH_CONFIG = STATE / "ssh_config"
KNOWN_HOSTS = STATE / "known_hosts"
CLIENT_KEY = STATE / "keys" / "id_ed25519"
APT_POOL = CACHE / "apt"
#: where Ansible keeps its connections to the boxes open; the inventory names the same path
CONTROL_PATH = "~/.ansible/cp/lab-%C"
#: where podman's monitors leave the exit status of a container
EXITS = Path("/run/libpod/exits")
BOOT_DEADLINE_S = 90


@dataclass(frozen=True)
class Box:
    """A box that the lab has made: name, container, address in the lab network, and whether it belongs to the lab proper."""

    name: str
    container: str
    address: str
    lab: bool


def podman(*args: str, check: bool = True, stdin: bytes | None = None, timeout: float = 120) -> str:
    """Run podman as root and return its stdout."""
    return run(["podman", *args], root=True, check=check, stdin=stdin, timeout=timeout).stdout


@contextmanager
def lock() -> Iterator[None]:
    """Let one process at a time change the lab. The lock is on the directory and goes with the process."""
    handle = os.open(ROOT / "lab", os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("   waiting for another process that changes the lab")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# --- registry ---------------------------------------------------------------------------------------------------


def registry() -> dict[str, Box]:
    """Return the boxes that the state knows, by name; a missing or torn file counts as none."""
    try:
        return {name: Box(name, **entry) for name, entry in json.loads(REGISTRY.read_text())["boxes"].items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as stream:
        stream.write(text)
    part.replace(path)


def _register(boxes: dict[str, Box]) -> None:
    """Write the registry and what SSH reads: addresses, users, keys and the boxes' own host keys."""
    entries = {box.name: {"container": box.container, "address": box.address, "lab": box.lab} for box in boxes.values()}
    _write(REGISTRY, json.dumps({"network": NETWORK, "boxes": entries}, indent=2, sort_keys=True) + "\n")
    hosts, known = [], []
    for box in boxes.values():
        public = (_box_dir(box.name) / "ssh_host_ed25519_key.pub").read_text().split()
        known.append(f"{box.name},{box.address} {public[0]} {public[1]}\n")
        hosts.append(f"Host {box.name}\n  HostName {box.address}\n")
    common = (f"Host *\n  User {USER}\n  IdentityFile {CLIENT_KEY}\n  IdentitiesOnly yes\n  StrictHostKeyChecking yes\n"
              f"  UserKnownHostsFile {KNOWN_HOSTS}\n  GlobalKnownHostsFile /dev/null\n  HostKeyAlgorithms ssh-ed25519\n"
              "  CheckHostIP no\n  ConnectTimeout 10\n  LogLevel ERROR\n")
    _write(KNOWN_HOSTS, "".join(known))
    _write(SSH_CONFIG, "".join(hosts) + common)


def _box_dir(name: str) -> Path:
    return STATE / "boxes" / name


def _ssh_key(path: Path, comment: str) -> None:
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


# --- network ----------------------------------------------------------------------------------------------------


def free_subnet(taken: list[ipaddress.IPv4Network], first: int = 0) -> ipaddress.IPv4Network:
    """Return a 10.89.N.0/24 that overlaps nothing in ``taken``.

    :param first: where among the candidates to begin.
    :raises LabError: all of them are taken.
    """
    candidates = [ipaddress.IPv4Network(f"10.89.{third}.0/24") for third in range(64, 251)]
    for number in range(len(candidates)):
        subnet = candidates[(first + number) % len(candidates)]
        if not any(subnet.overlaps(other) for other in taken):
            return subnet
    raise LabError("no free network in 10.89.64.0 to 10.89.250.255 for the lab. Fix: podman network prune")


def _taken_subnets() -> list[ipaddress.IPv4Network]:
    routes = json.loads(run(["ip", "-json", "-4", "route", "show", "table", "all"]).stdout or "[]")
    taken = [ipaddress.IPv4Network(route["dst"], strict=False) for route in routes
             if route.get("dst", "default") != "default" and route.get("type", "unicast") == "unicast"]
    names = podman("network", "ls", "--quiet").split()
    for network in json.loads(podman("network", "inspect", *names)) if names else []:
        taken += [ipaddress.IPv4Network(item["subnet"]) for item in network.get("subnets") or [] if ":" not in item["subnet"]]
    return taken


def ensure_network(first: int = 0) -> ipaddress.IPv4Network:
    """Return the lab network's subnet, after making the network when it is not there or unreadable."""
    found = run(["podman", "network", "inspect", NETWORK], root=True, check=False)
    if found.returncode == 0:
        try:
            return ipaddress.IPv4Network(json.loads(found.stdout)[0]["subnets"][0]["subnet"])
        except (ValueError, KeyError, IndexError, TypeError):
            podman("network", "rm", "-f", NETWORK, check=False)
    subnet = free_subnet(_taken_subnets(), first)
    podman("network", "create", f"--subnet={subnet}", f"--label={LABEL}={ROOT}", NETWORK)
    return subnet


def _address(spec: BoxSpec, subnet: ipaddress.IPv4Network, boxes: dict[str, Box], other: bool) -> str:
    """Return the box's address: the one it has, else its usual one, else any free one.

    :param other: take another one than those, because a lease that podman kept may block them.
    """
    used = {box.address for name, box in boxes.items() if name != spec.name}
    known = boxes.get(spec.name)
    if not other and known and ipaddress.IPv4Address(known.address) in subnet:
        return known.address
    if not other and spec.host_number is not None:
        return str(subnet[spec.host_number])
    free = [str(subnet[number]) for number in range(100, 250) if str(subnet[number]) not in used]
    return secrets.choice(free)


# --- containers -------------------------------------------------------------------------------------------------


def _inspect(container: str) -> dict[str, Any] | None:
    done = run(["podman", "container", "inspect", container], root=True, check=False)
    if done.returncode:
        return None
    try:
        found: dict[str, Any] = json.loads(done.stdout)[0]
    except (ValueError, IndexError):
        return None
    return found


def _archive(spec: BoxSpec, library: bytes | None) -> bytes:
    """Return the files that make the image this box, as a tar stream (everything root's)."""
    host_key = _box_dir(spec.name) / "ssh_host_ed25519_key"
    files = [
        ("etc/ssh/ssh_host_ed25519_key", host_key.read_bytes(), 0o600),
        ("etc/ssh/ssh_host_ed25519_key.pub", host_key.with_name(host_key.name + ".pub").read_bytes(), 0o644),
        (f"etc/ssh/authorized_keys/{USER}", CLIENT_KEY.with_name(CLIENT_KEY.name + ".pub").read_bytes(), 0o644),
    ]
    if library is not None and spec.nvml is not None:
        files += [(nvml.LIBRARY_PATH.lstrip("/"), library, 0o644),
                  (nvml.FACTS_PATH.lstrip("/"), spec.nvml.read_bytes(), 0o644)]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data, mode in files:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), mode, int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _furnish(spec: BoxSpec, box: Box, library: bytes | None) -> None:
    """Put keys and simulated GPUs into a box, running or not; a changed simulator needs no new box."""
    podman("cp", "-", f"{box.container}:/", stdin=_archive(spec, library))


def _create(spec: BoxSpec, box: Box, host: Host, image_name: str, recipe: str) -> None:
    archives = _box_dir(spec.name) / "apt-archives"
    archives.mkdir(parents=True, exist_ok=True)
    APT_POOL.mkdir(parents=True, exist_ok=True)
    _copy_debs(APT_POOL, archives)
    argv = [
        "create", f"--name={box.container}", f"--hostname={spec.name}", f"--label={LABEL}={ROOT}",
        f"--label=vllm-fleet.recipe={recipe}", f"--network={NETWORK}", f"--network-alias={spec.name}",
        f"--ip={box.address}", f"--runtime={host.runtime}", "--systemd=always", "--cap-add=SYS_ADMIN",
        f"--shm-size={spec.shm_size}", "--pids-limit=-1", "--log-driver=none", "--stop-timeout=20",
        f"--volume={archives}:/var/cache/apt/archives", *host.container_args, image_name,
    ]
    podman(*argv)


def _copy_debs(source: Path, target: Path) -> None:
    """Give packages that one place has to the other, by hard link where that is possible."""
    packages = [str(path) for path in source.glob("*.deb")]
    for flags in (["--link"], []):
        if not packages or run(["cp", "--no-clobber", *flags, "--target-directory", str(target), *packages],
                               root=True, check=False).returncode == 0:
            return


def harvest_packages() -> None:
    """Keep the packages that the boxes have downloaded, so that the next box need not."""
    for archives in (STATE / "boxes").glob("*/apt-archives"):
        _copy_debs(archives, APT_POOL)


def ssh(name: str, command: str, *, check: bool = True, timeout: float = 30) -> str:
    """Run a shell command on a box over SSH and return its stdout."""
    return run(["ssh", "-F", str(SSH_CONFIG), "-o", "BatchMode=yes", name, command], check=check, timeout=timeout).stdout


def connection(box: Box) -> dict[str, Any]:
    """Return the Ansible variables that reach a box; the lab's inventory says the same in its own way."""
    return {
        "ansible_user": USER, "ansible_become": True, "ansible_python_interpreter": "/usr/bin/python3",
        "ansible_ssh_common_args": f"-F {SSH_CONFIG}", "ansible_control_path": CONTROL_PATH.replace("%", "%%"),
        "lab_ip": box.address,
    }


def answers(box: Box) -> bool:
    """Tell whether the box's systemd has booted and it can be reached over SSH with sudo."""
    try:
        state = podman("exec", box.container, "systemctl", "is-system-running", check=False, timeout=20).strip()
        if state not in ("running", "degraded"):
            return False
        return run(["ssh", "-F", str(SSH_CONFIG), "-o", "BatchMode=yes", "-o", "ControlPath=none", box.name,
                    "sudo -n true"], check=False, timeout=20).returncode == 0
    except LabError:
        return False


def _wait(boxes: list[Box]) -> list[Box]:
    """Wait until the boxes answer and return those that did not."""
    deadline, waiting = time.monotonic() + BOOT_DEADLINE_S, list(boxes)
    while waiting and time.monotonic() < deadline:
        waiting = [box for box in waiting if not answers(box)]
        if waiting:
            time.sleep(0.5)
    return waiting


def _close_connections(name: str) -> None:
    """End kept SSH connections to a box that is going away; without it the next play would wait on a dead one."""
    if SSH_CONFIG.exists():
        run(["ssh", "-F", str(SSH_CONFIG), "-o", f"ControlPath={CONTROL_PATH}", "-O", "exit", name], check=False)


def _remove(container: str) -> None:
    """Remove a container whatever state it is in."""
    _close_connections(container.removeprefix(f"{PREFIX}-"))
    for _ in range(3):
        podman("rm", "-f", "-t", "2", container, check=False)
        if run(["podman", "container", "exists", container], root=True, check=False).returncode == 1:
            return
        podman("container", "cleanup", container, check=False)
    raise LabError(f"container {container} can't be removed. Look: podman rm -f {container}")


def _process_alive(found: dict[str, Any]) -> bool:
    """Tell whether PID 1 of an inspected container really runs; the number alone may be another process's by now."""
    pid = found.get("State", {}).get("Pid", 0)
    try:
        return bool(pid) and found["Id"] in Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False


def _start(box: Box) -> bool:
    """Start a container that is stopped, hangs, or that podman only believes to run; False when it can't be."""
    _close_connections(box.name)
    found = _inspect(box.container)
    if found is None:
        return False
    if _process_alive(found):
        podman("stop", "-t", "5", box.container, check=False)
    elif found["State"].get("Status") in ("running", "stopping", "paused") and EXITS.is_dir():
        # Its processes and podman's monitor were killed together, so nobody has told podman. The monitor would have
        # left the exit status in this file; with it podman sees the truth and the box keeps its contents.
        run(["tee", str(EXITS / found["Id"])], root=True, stdin=b"137")
    return run(["podman", "start", box.container], root=True, check=False, timeout=60).returncode == 0


def _bring_up(
    specs: list[BoxSpec], host: Host, anew: bool = False, first_subnet: int | None = None
) -> dict[str, Box]:
    """Make, start or repair the boxes; keeps every one that works, and its contents."""
    own_image = image.ensure(rebuild=first_subnet is not None)
    subnet, boxes = ensure_network(first_subnet or 0), registry()
    _ssh_key(CLIENT_KEY, f"{USER}@vllm-fleet-lab")
    library = nvml.build() if any(spec.nvml for spec in specs) else None
    recipes = {}
    for spec in specs:
        _ssh_key(_box_dir(spec.name) / "ssh_host_ed25519_key", f"root@{spec.name}")
        boxes[spec.name] = Box(spec.name, f"{PREFIX}-{spec.name}", _address(spec, subnet, boxes, anew), spec in LAB_BOXES)
        parts = [spec.image or own_image, str(subnet), str(host), spec.shm_size, boxes[spec.name].address]
        recipes[spec.name] = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    _register(boxes)

    wanted = [boxes[spec.name] for spec in specs]
    for spec, box in zip(specs, wanted, strict=True):
        found = _inspect(box.container)
        if found is not None:
            made_from = (found.get("Config", {}).get("Labels") or {}).get("vllm-fleet.recipe")
            if made_from != recipes[spec.name]:
                say(f"   {box.name}: what it is made of has changed, making it anew")
            elif answers(box) or (_start(box) and not _wait([box])):
                _furnish(spec, box, library)
                continue
            else:
                say(f"   {box.name}: does not come back, making it anew")
            _remove(box.container)
        _create(spec, box, host, spec.image or own_image, recipes[spec.name])
        _furnish(spec, box, library)
        podman("start", box.container)
    dead = _wait(wanted)
    if dead:
        raise LabError("no answer over SSH within "
                       f"{BOOT_DEADLINE_S} s from {', '.join(box.name for box in dead)}. Look: podman exec "
                       f"{dead[0].container} systemctl status ssh")
    return boxes


def up(specs: list[BoxSpec], host: Host) -> dict[str, Box]:
    """Bring the boxes up and return all boxes by name.

    What is half made or was killed is repaired in place if it can be, else made anew; when none of the other boxes
    works either, with the network and everything.

    :raises LabError: it is not to be had even from nothing.
    """
    with lock(), phase(f"boxes: {', '.join(spec.name for spec in specs)}"):
        try:
            return _bring_up(specs, host)
        except LabError as error:
            say(f"   that failed, making it anew from nothing: {error}")
            names = {spec.name for spec in specs}
            if any(answers(box) for box in registry().values() if box.name not in names):
                for name in names:
                    _remove(f"{PREFIX}-{name}")
                return _bring_up(specs, host, anew=True)
            for container in containers():
                _remove(container)
            podman("network", "rm", "-f", NETWORK, check=False)
            REGISTRY.unlink(missing_ok=True)
            # Some other subnet, because podman keeps the leases of containers that were killed, by subnet.
            return _bring_up(specs, host, anew=True, first_subnet=secrets.randbelow(180))


def make_api_keys(lanes: dict[str, tuple[str, ...]]) -> None:
    """Make the API keys of the lab's lanes (box name -> lane names) that are not there yet."""
    for box, names in lanes.items():
        for name in names:
            path = api_key_file(box, name)
            if not path.exists() or not path.read_text().strip():
                _write(path, secrets.token_urlsafe(32) + "\n", 0o600)


def containers() -> list[str]:
    """Return the names of all containers of this checkout, running or not.

    Those that the lab should have are always among them: one broken container makes podman refuse to list any.
    """
    listed = podman("ps", "--all", f"--filter=name=^{PREFIX}-", "--format={{.Names}}", check=False).split()
    expected = {f"{PREFIX}-{name}" for name in (*registry(), *(spec.name for spec in LAB_BOXES))}
    return sorted({*listed, *expected})


def destroy(name: str) -> None:
    """Remove one box and its state; nothing happens when there is none."""
    with lock():
        boxes = registry()
        _remove(f"{PREFIX}-{name}")
        harvest_packages()
        boxes.pop(name, None)
        run(["rm", "-rf", str(_box_dir(name))], root=True)
        if boxes:
            _register(boxes)
        else:
            podman("network", "rm", "-f", NETWORK, check=False)
            REGISTRY.unlink(missing_ok=True)


def down(purge: bool = False) -> None:
    """Remove all containers of this checkout, its network and its state.

    :param purge: the cache and the images too.
    """
    with lock(), phase("removing the lab"):
        if shutil.which("podman"):
            for container in containers():
                _remove(container)
            podman("network", "rm", "-f", NETWORK, check=False)
            harvest_packages()
            if purge:
                for name in podman("images", "--format={{.Repository}}:{{.Tag}}", check=False).split():
                    if name.startswith("localhost/vllm-fleet-box:"):
                        podman("image", "rm", name, check=False)
        for path in (STATE, CACHE) if purge else (STATE,):
            run(["rm", "-rf", str(path)], root=True)
