"""The containers of the lab: made, kept, repaired and removed.

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
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import checkpoint, image, nvml
from .host import Host
from .network import address_for, ensure_network, other_address
from .registry import (
    CLIENT_KEY,
    CONTROL_PATH,
    REGISTRY,
    SSH_CONFIG,
    Box,
    box_dir,
    make_ssh_key,
    register,
    registry,
)
from .settings import BOX_CHECKPOINT, CACHE, CHECKPOINT, LAB_BOXES, LABEL, NETWORK, PREFIX, ROOT, STATE, USER, BoxSpec
from .shell import LabError, phase, podman, run, say

APT_POOL = CACHE / "apt"
#: where podman's monitors leave the exit status of a container
EXITS = Path("/run/libpod/exits")
BOOT_DEADLINE_S = 90


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


def _inspect(container: str) -> dict[str, Any] | None:
    done = run(["podman", "container", "inspect", container], root=True, check=False)
    if done.returncode:
        return None
    try:
        found: dict[str, Any] = json.loads(done.stdout)[0]
    except (ValueError, IndexError):
        return None
    return found


def _archive(files: list[tuple[str, bytes, int]]) -> bytes:
    """Return files (path below the root, content, mode) as a tar stream; everything is root's."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data, mode in files:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), mode, int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _furnish(spec: BoxSpec, box: Box, library: bytes | None) -> None:
    """Put into a box, running or not, what its owner would: keys, GPUs and, once, the model.

    Changed simulated GPUs need no new box. The model is left alone once it is there, because roles may edit its files.
    """
    host_key = box_dir(spec.name) / "ssh_host_ed25519_key"
    files = [
        ("etc/ssh/ssh_host_ed25519_key", host_key.read_bytes(), 0o600),
        ("etc/ssh/ssh_host_ed25519_key.pub", host_key.with_name(host_key.name + ".pub").read_bytes(), 0o644),
        (f"etc/ssh/authorized_keys/{USER}", CLIENT_KEY.with_name(CLIENT_KEY.name + ".pub").read_bytes(), 0o644),
    ]
    if spec.nvml is not None:
        if library is not None:
            files += [
                (nvml.LIBRARY_PATH.lstrip("/"), library, 0o644),
                (nvml.FACTS_PATH.lstrip("/"), spec.nvml.read_bytes(), 0o644),
            ]
        there = ["podman", "exec", box.container, "test", "-e", f"{BOX_CHECKPOINT}/config.json"]
        if run(there, root=True, check=False).returncode:
            model = checkpoint.generate(CHECKPOINT)
            files += [
                (f"{BOX_CHECKPOINT}/{path.name}".lstrip("/"), path.read_bytes(), 0o644) for path in model.iterdir()
            ]
    podman("cp", "-", f"{box.container}:/", stdin=_archive(files))


def _create(spec: BoxSpec, box: Box, host: Host, image_name: str, recipe: str) -> None:
    archives = box_dir(spec.name) / "apt-archives"
    archives.mkdir(parents=True, exist_ok=True)
    APT_POOL.mkdir(parents=True, exist_ok=True)
    _copy_debs(APT_POOL, archives)
    argv = [
        "create",
        f"--name={box.container}",
        f"--hostname={spec.name}",
        f"--label={LABEL}={ROOT}",
        f"--label=vllm-fleet.recipe={recipe}",
        f"--network={NETWORK}",
        f"--network-alias={spec.name}",
        f"--ip={box.address}",
        f"--runtime={host.runtime}",
        "--systemd=always",
        "--cap-add=SYS_ADMIN",
        # root of a real box can see who holds a port; without this the owner's open files are hidden from it
        "--cap-add=SYS_PTRACE",
        f"--shm-size={spec.shm_size}",
        "--pids-limit=-1",
        "--log-driver=none",
        "--stop-timeout=20",
        f"--volume={archives}:/var/cache/apt/archives",
        *host.container_args,
        image_name,
    ]
    podman(*argv)


def _copy_debs(source: Path, target: Path) -> None:
    """Give packages that one place has to the other, by hard link where that is possible."""
    packages = [str(path) for path in source.glob("*.deb")]
    for flags in (["--link"], []):
        if (
            not packages
            or run(
                ["cp", "--no-clobber", *flags, "--target-directory", str(target), *packages], root=True, check=False
            ).returncode
            == 0
        ):
            return


def harvest_packages() -> None:
    """Keep the packages that the boxes have downloaded, so that the next box need not."""
    for archives in (STATE / "boxes").glob("*/apt-archives"):
        _copy_debs(archives, APT_POOL)


def ssh(name: str, command: str, *, check: bool = True, timeout: float = 30) -> str:
    """Run a shell command on a box over SSH and return its stdout."""
    return run(
        ["ssh", "-F", str(SSH_CONFIG), "-o", "BatchMode=yes", name, command], check=check, timeout=timeout
    ).stdout


def amid_rollout(name: str) -> bool:
    """Return whether a rollout was begun on the box and not ended; it may have left the box out of rotation."""
    record = json.loads(ssh(name, "cat /var/lib/vllm-fleet/rollout.json 2>/dev/null || echo null"))
    return record is not None and record.get("phase") not in ("done", "rolled_back")


def answers(box: Box) -> bool:
    """Tell whether the box's systemd has booted and it can be reached over SSH with sudo."""
    try:
        state = podman("exec", box.container, "systemctl", "is-system-running", check=False, timeout=20).strip()
        if state not in ("running", "degraded"):
            return False
        return (
            run(
                [
                    "ssh",
                    "-F",
                    str(SSH_CONFIG),
                    "-o",
                    "BatchMode=yes",
                    "-o",
                    "ControlPath=none",
                    box.name,
                    "sudo -n true",
                ],
                check=False,
                timeout=20,
            ).returncode
            == 0
        )
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
    elif found["State"].get("Status") in ("running", "stopping", "paused"):
        # Its processes and podman's monitor were killed together, so nobody has told podman. The monitor would have
        # left the exit status in this file; with it podman sees the truth and the box keeps its contents.
        run(["tee", str(EXITS / found["Id"])], root=True, check=False, stdin=b"137")
    return run(["podman", "start", box.container], root=True, check=False, timeout=60).returncode == 0


def _recipe(spec: BoxSpec, box: Box, host: Host, image_name: str, subnet: ipaddress.IPv4Network) -> str:
    """Return the digest of what a container is made with; one made with something else is made anew.

    Limits are left out: they differ from shell to shell and are no reason to throw a working box away.
    """
    parts = [image_name, str(subnet), str(host.runtime), spec.shm_size, box.address]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _kept(box: Box, recipe: str) -> bool:
    """Tell whether the box's container works, after starting it if need be; one that does not is removed."""
    found = _inspect(box.container)
    if found is None:
        _remove(box.container)
        return False
    if (found.get("Config", {}).get("Labels") or {}).get("vllm-fleet.recipe") != recipe:
        say(f"   {box.name}: what it is made of has changed, making it anew")
    elif answers(box) or (_start(box) and not _wait([box])):
        return True
    else:
        say(f"   {box.name}: does not come back, making it anew")
    _remove(box.container)
    return False


def _bring_up(specs: list[BoxSpec], host: Host, first_subnet: int | None = None) -> dict[str, Box]:
    """Make, start or repair the boxes; keeps every one that works, and its contents.

    :param first_subnet: given when all is made anew: where to begin to look for a subnet.
    """
    own_image = image.ensure(rebuild=first_subnet is not None)
    subnet, boxes = ensure_network(first_subnet or 0), registry()
    make_ssh_key(CLIENT_KEY, f"{USER}@vllm-fleet-lab")
    library = nvml.build() if any(spec.nvml for spec in specs) else None
    for spec in specs:
        make_ssh_key(box_dir(spec.name) / "ssh_host_ed25519_key", f"root@{spec.name}")
        boxes[spec.name] = Box(spec.name, f"{PREFIX}-{spec.name}", address_for(spec, subnet, boxes), spec in LAB_BOXES)
    register(boxes)

    for spec in specs:
        image_name = spec.image or own_image
        if _kept(boxes[spec.name], _recipe(spec, boxes[spec.name], host, image_name, subnet)):
            _furnish(spec, boxes[spec.name], library)
            continue
        for attempt in (1, 2, 3):
            box = boxes[spec.name]
            try:
                _create(spec, box, host, image_name, _recipe(spec, box, host, image_name, subnet))
                _furnish(spec, box, library)
                podman("start", box.container)
                break
            except LabError as error:
                _remove(box.container)
                if attempt == 3:
                    raise
                say(f"   {box.name}: {str(error).splitlines()[-1].strip()}; trying another address")
                boxes[spec.name] = replace(box, address=other_address(subnet, boxes))
                register(boxes)
    wanted = [boxes[spec.name] for spec in specs]
    dead = _wait(wanted)
    if dead:
        raise LabError(
            "no answer over SSH within "
            f"{BOOT_DEADLINE_S} s from {', '.join(box.name for box in dead)}. Look: podman exec "
            f"{dead[0].container} systemctl status ssh"
        )
    return boxes


def up(specs: list[BoxSpec], host: Host) -> dict[str, Box]:
    """Bring the boxes up and return all boxes by name.

    What is half made or was killed is repaired in place if it can be, else made anew; when that fails and no box
    works at all, with the network and everything.

    :raises LabError: it is not to be had even from nothing.
    """
    with lock(), phase(f"boxes: {', '.join(spec.name for spec in specs)}"):
        try:
            return _bring_up(specs, host)
        except LabError as error:
            if any(answers(box) for box in registry().values()):
                raise
            say(f"   that failed and no box works, making all anew: {error}")
            for container in containers():
                _remove(container)
            podman("network", "rm", "-f", NETWORK, check=False)
            REGISTRY.unlink(missing_ok=True)
            # Some other subnet, because podman keeps the leases of containers that were killed, by subnet.
            return _bring_up(specs, host, first_subnet=secrets.randbelow(180))


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
        run(["rm", "-rf", str(box_dir(name))], root=True)
        if boxes:
            register(boxes)
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
