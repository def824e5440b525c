"""Whole virtual machines: a kernel that boots, reboots and loads modules, which no container has.

A machine is QEMU with a disk of its own, reached over real SSH on a port of the loopback. A supervisor keeps it;
it is the power supply and the firmware, so that a reboot is one (QEMU ends, the firmware takes the time that
:func:`set_post` says, kernel and initramfs are read from the disk anew) and needs nobody to wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import registry, vm_image
from .settings import CACHE, ROOT, STATE, USER
from .shell import LabError, phase, run

VMS = STATE / "vms"
#: from power on to SSH; 50 s were measured under emulation on an idle machine
BOOT_DEADLINE_S = 420
MEMORY_MIB = 2048
#: a kernel that KVM really runs prints its first line long before this
KVM_PROBE_S = 10


def home(name: str) -> Path:
    """Return the directory of a machine's state."""
    return VMS / name


def up(name: str) -> None:
    """Make a machine and start it, or start one that is off; returns when it answers over SSH.

    :raises LabError: it does not; names the console's log.
    """
    disk = vm_image.ensure()
    here = home(name)
    here.mkdir(parents=True, exist_ok=True)
    if not supervised(name):
        if not (here / "disk.raw").exists():
            with phase(f"virtual machine {name}: copying the disk"):
                _furnish(name, disk)
        accelerator()  # found out here, where somebody sees it
        log = (here / "supervisor.log").open("ab")
        subprocess.Popen(
            [sys.executable, "-m", "lab.vm", name],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    with phase(f"virtual machine {name}: booting"):
        deadline = time.monotonic() + BOOT_DEADLINE_S
        while not answers(name):
            if time.monotonic() > deadline:
                raise LabError(f"{name} does not answer within {BOOT_DEADLINE_S} s. Look: {here}/console.log")
            time.sleep(1)


def down(name: str) -> None:
    """Switch a machine off and remove it with its disk."""
    pid = supervised(name)
    if pid:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 20
        while supervised(name):
            if time.monotonic() > deadline:
                raise LabError(f"the supervisor of {name}, process {pid}, does not end")
            time.sleep(0.1)
    shutil.rmtree(home(name), ignore_errors=True)


def names() -> list[str]:
    """Return the machines of this checkout."""
    return sorted(path.name for path in VMS.iterdir()) if VMS.is_dir() else []


def set_post(name: str, seconds: float) -> None:
    """Let the firmware take this long at every further boot: memory training and many GPUs take minutes on servers."""
    registry.write(home(name) / "post", f"{seconds}\n")


def ssh_config(name: str) -> Path:
    return home(name) / "ssh_config"


def connection(name: str) -> dict[str, Any]:
    """Return the Ansible variables that reach a machine."""
    return registry.connection_through(ssh_config(name))


def ssh(name: str, command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a shell command as root, over a connection of its own; a machine that is away answers with status 255."""
    argv = ["ssh", "-F", str(ssh_config(name)), "-o", "BatchMode=yes", "-o", "ControlPath=none", name, "sudo -n sh -s"]
    return run(argv, check=False, stdin=command.encode(), timeout=timeout)


def answers(name: str) -> bool:
    """Tell whether the machine has booted and takes commands."""
    try:
        return ssh(name, "systemctl is-system-running | grep -qE 'running|degraded'", timeout=20).returncode == 0
    except LabError:
        return False


def supervised(name: str) -> int | None:
    """Return the process id of the machine's supervisor, or None; the number alone may be another process's by now."""
    try:
        pid = int((home(name) / "pid").read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        # The same name in another checkout is another machine.
        return pid if [b"lab.vm", name.encode()] == words[2:4] and Path(f"/proc/{pid}/cwd").readlink() == ROOT else None
    except (OSError, ValueError):
        return None


def accelerator() -> str:
    """Return ``kvm`` where it runs a kernel, else ``tcg``: the device may be there, and hang.

    Found out once a boot of the host; LAB_VM_ACCEL overrules it.
    """
    forced = os.environ.get("LAB_VM_ACCEL")
    if forced:
        return forced
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    noted = CACHE / "vm" / "accelerator.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        known = json.loads(noted.read_text())
        if known["boot"] == boot:
            return str(known["accelerator"])
    found = "kvm" if _kvm_works() else "tcg"
    registry.write(noted, json.dumps({"boot": boot, "accelerator": found}) + "\n")
    return found


def _kvm_works() -> bool:
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    with phase("virtual machine: trying KVM"):
        work = CACHE / "vm" / "probe"
        work.mkdir(parents=True, exist_ok=True)
        kernel, _ = vm_image.boot_files(vm_image.ensure(), work)
        argv = ["qemu-system-x86_64", "-accel", "kvm", "-m", "256", "-nodefaults", "-display", "none", "-no-reboot"]
        argv += ["-kernel", str(kernel), "-append", "console=ttyS0 earlyprintk=serial panic=-1", "-serial", "stdio"]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            out, _ = process.communicate(timeout=KVM_PROBE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
        shutil.rmtree(work, ignore_errors=True)
    return b"Linux version" in out


def qemu_argv(accel: str, disk: Path, kernel: Path, initrd: Path, port: int, console: Path) -> list[str]:
    """Return QEMU's command line; it ends at a reboot, so that the supervisor reads the disk anew."""
    return [
        "qemu-system-x86_64",
        "-machine", "q35", "-accel", "tcg,thread=multi" if accel == "tcg" else accel,
        "-cpu", "host" if accel == "kvm" else "max",
        "-smp", "2", "-m", str(MEMORY_MIB), "-nodefaults", "-display", "none", "-no-reboot",
        "-kernel", str(kernel), "-initrd", str(initrd),
        "-append", "root=/dev/vda rw console=ttyS0 loglevel=4 systemd.show_status=0",
        "-drive", f"file={disk},format=raw,if=none,id=root,cache=unsafe", "-device", "virtio-blk-pci,drive=root",
        "-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{port}-:22", "-device", "virtio-net-pci,netdev=net,romfile=",
        "-object", "rng-random,filename=/dev/urandom,id=rng", "-device", "virtio-rng-pci,rng=rng",
        "-chardev", f"file,id=console,path={console},append=on", "-serial", "chardev:console",
    ]  # fmt: skip


def _furnish(name: str, disk: Path) -> None:
    """Give a new machine its disk, its keys and its port."""
    here = home(name)
    host_key = here / "ssh_host_ed25519_key"
    registry.make_ssh_key(registry.CLIENT_KEY, f"{USER}@vllm-fleet-lab")
    registry.make_ssh_key(host_key, f"root@{name}")
    public = host_key.with_name(host_key.name + ".pub")
    part = here / "disk.part"
    vm_image.copy(disk, part)
    hostname, hosts = here / "hostname", here / "hosts"
    registry.write(hostname, name + "\n")
    registry.write(hosts, f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    vm_image.put(
        part,
        [
            ("/etc/hostname", hostname, 0o644),
            ("/etc/hosts", hosts, 0o644),
            ("/etc/ssh/ssh_host_ed25519_key", host_key, 0o600),
            ("/etc/ssh/ssh_host_ed25519_key.pub", public, 0o644),
            (
                f"/etc/ssh/authorized_keys/{USER}",
                registry.CLIENT_KEY.with_name(registry.CLIENT_KEY.name + ".pub"),
                0o644,
            ),
        ],
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    registry.write(here / "port", f"{port}\n")
    known = here / "known_hosts"
    registry.write(known, f"{name} {' '.join(public.read_text().split()[:2])}\n")
    host = f"Host {name}\n  HostName 127.0.0.1\n  Port {port}\n  HostKeyAlias {name}\n"
    registry.write(ssh_config(name), host + registry.for_all_hosts(known))
    part.rename(here / "disk.raw")


def _number(path: Path) -> float:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return 0.0


def supervise(name: str) -> int:
    """Boot the machine, again after each reboot, until SIGTERM; ends by itself when QEMU can't be started."""
    here = home(name)
    registry.write(here / "pid", f"{os.getpid()}\n")
    running: list[subprocess.Popen[bytes]] = []

    def end(*_: object) -> None:
        for process in running:
            process.kill()
        (here / "pid").unlink(missing_ok=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    failures = boots = 0
    while failures < 3:
        if boots:
            time.sleep(_number(here / "post"))
        kernel, initrd = vm_image.boot_files(here / "disk.raw", here)
        argv = qemu_argv(
            accelerator(), here / "disk.raw", kernel, initrd, int(_number(here / "port")), here / "console.log"
        )
        started = time.monotonic()
        running[:] = [subprocess.Popen(argv, stdin=subprocess.DEVNULL)]
        status = running[0].wait()
        boots += 1
        failures = failures + 1 if time.monotonic() - started < 5 else 0
        print(f"boot {boots} ended with {status} after {time.monotonic() - started:.0f} s", flush=True)
    (here / "pid").unlink(missing_ok=True)
    return 1


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1]))
