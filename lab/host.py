"""What this machine can do: container runtime, cgroup mode, limits, packages; and in words what it lacks."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from .settings import CACHE
from .shell import SUDO, LabError, run, say

#: bit numbers of linux/capability.h
CAP_NET_ADMIN, CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 12, 21, 24

#: Debian and Ubuntu package -> a file that it brings
PACKAGES = {
    "podman": "/usr/bin/podman",
    "conmon": "/usr/bin/conmon",
    "netavark": "/usr/lib/podman/netavark",
    "aardvark-dns": "/usr/lib/podman/aardvark-dns",
    "iptables": "/usr/sbin/iptables",
    "nftables": "/usr/sbin/nft",
    "mmdebstrap": "/usr/bin/mmdebstrap",
    "debian-archive-keyring": "/usr/share/keyrings/debian-archive-keyring.gpg",
    "openssh-client": "/usr/bin/ssh",
    "iproute2": "/usr/bin/ip",
    "ca-certificates": "/etc/ssl/certs/ca-certificates.crt",
    "gcc": "/usr/bin/gcc",
    "libc6-dev": "/usr/include/stdlib.h",
}
MIN_FREE_GIB, MIN_MEMORY_GIB = 15, 6


def capabilities(status_text: str) -> int:
    """Return the bounding set out of ``/proc/self/status``: what root may have here, with or without sudo."""
    for line in status_text.splitlines():
        if line.startswith("CapBnd:"):
            return int(line.split()[1], 16)
    return 0


def cgroup_mode(mounts_text: str) -> str:
    """Return ``unified``, ``hybrid``, ``legacy`` or ``none`` out of ``/proc/mounts``."""
    rows = [line.split() for line in mounts_text.splitlines()]
    found = {(row[1], row[2]) for row in rows if len(row) > 2}
    if ("/sys/fs/cgroup", "cgroup2") in found:
        return "unified"
    if not any(kind == "cgroup" for _, kind in found):
        return "none"
    return "hybrid" if any(kind == "cgroup2" for _, kind in found) else "legacy"


def choose_runtime(mode: str, crun: bool, runc: bool) -> str | None:
    """Return the OCI runtime that runs systemd under this cgroup mode, or None when none is installed.

    crun refuses a systemd container on a hybrid hierarchy, runc takes every mode.
    """
    if mode == "unified" and crun:
        return "crun"
    return "runc" if runc else None


def ulimit_args(cap_bounding: int, nofile_hard: int, nproc_hard: int, pid_max: int) -> list[str]:
    """Return podman's ``--ulimit`` arguments.

    Only a root without CAP_SYS_RESOURCE needs them: it can't raise its own hard limits to podman's defaults, and
    podman lowers the process limit to the highest process id on its way.
    """
    if cap_bounding >> CAP_SYS_RESOURCE & 1:
        return []
    if nproc_hard < 0:
        nproc_hard = pid_max
    nproc = min(nproc_hard, pid_max)
    args = [f"--ulimit=nproc={nproc}:{nproc}"]
    return args if nofile_hard < 0 else [f"--ulimit=nofile={nofile_hard}:{nofile_hard}", *args]


@dataclass(frozen=True)
class Host:
    """The machine under the lab."""

    runtime: str | None
    cgroups: str
    container_args: tuple[str, ...]
    missing_packages: tuple[str, ...]
    problems: tuple[str, ...]


def detect() -> Host:
    """Look at this machine; installs and changes nothing."""
    bounding = capabilities(Path("/proc/self/status").read_text())
    mode = cgroup_mode(Path("/proc/mounts").read_text())
    pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
    runtime = choose_runtime(
        mode, Path("/usr/bin/crun").exists(), bool(shutil.which("runc", path="/usr/bin:/usr/sbin"))
    )
    missing = [package for package, file in PACKAGES.items() if not Path(file).exists()]
    if runtime is None:
        missing.append("crun" if mode == "unified" else "runc")

    args = ulimit_args(
        bounding, resource.getrlimit(resource.RLIMIT_NOFILE)[1], resource.getrlimit(resource.RLIMIT_NPROC)[1], pid_max
    )
    # The default AppArmor and SELinux confinement of containers forbids the mounts of a hardened unit.
    if (
        Path("/sys/module/apparmor/parameters/enabled").exists()
        and Path("/sys/module/apparmor/parameters/enabled").read_text().strip() == "Y"
    ):
        args.append("--security-opt=apparmor=unconfined")
    if Path("/sys/fs/selinux/enforce").exists():
        args.append("--security-opt=label=disable")
    return Host(runtime, mode, tuple(args), tuple(missing), tuple(_problems(bounding, mode)))


def _problems(bounding: int, mode: str) -> list[str]:
    problems = []
    if platform.machine() != "x86_64":
        problems.append(f"the CPU engine exists for x86_64 only, this is {platform.machine()}")
    if SUDO and not shutil.which("sudo"):
        problems.append("neither root nor sudo: run as root or install sudo")
    for bit, name in ((CAP_SYS_ADMIN, "CAP_SYS_ADMIN"), (CAP_NET_ADMIN, "CAP_NET_ADMIN")):
        if not bounding >> bit & 1:
            problems.append(
                f"root lacks {name} here, which containers with systemd need: use a machine or a VM, "
                "or start this container with --privileged"
            )
    if mode == "none":
        problems.append("no cgroup hierarchy is mounted on /sys/fs/cgroup: mount one, or boot with systemd")
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if memory_gib < MIN_MEMORY_GIB:
        problems.append(f"{memory_gib:.1f} GiB of memory, two engines need {MIN_MEMORY_GIB}")
    for directory in ("/var/lib", CACHE):
        there = next(parent for parent in (Path(directory), *Path(directory).parents) if parent.exists())
        free = shutil.disk_usage(there).free / 2**30
        if free < MIN_FREE_GIB:
            problems.append(f"{free:.1f} GiB free under {directory}, the lab needs {MIN_FREE_GIB}")
            break
    return problems


def apt_settings() -> dict[str, str]:
    """Return the apt settings of this host that its boxes need too: proxies, and leniency about a mirror's dates."""
    wanted = ("Acquire::http::Proxy", "Acquire::https::Proxy", "Acquire::Check-Valid-Until", "Acquire::Check-Date")
    if not shutil.which("apt-config"):
        return {}
    found = {}
    for line in run(["apt-config", "dump"]).stdout.splitlines():
        name, _, value = line.partition(" ")
        if name in wanted and value.strip('";'):
            found[name] = value.strip('";')
    for scheme in ("http", "https"):
        value = os.environ.get(f"{scheme}_proxy", "")
        if value:
            found.setdefault(f"Acquire::{scheme}::Proxy", value)
    return found


def install(packages: tuple[str, ...]) -> None:
    """Install host packages with apt, after saying which.

    :raises LabError: no apt here, or it failed.
    """
    if not packages:
        return
    if not shutil.which("apt-get"):
        raise LabError(f"missing on this host: {', '.join(packages)}; it has no apt. Fix: install them by hand")
    say(f"   installing host packages: {' '.join(packages)}")
    apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300"]
    run([*apt, "update"], root=True, timeout=600)
    run([*apt, "install", "--no-install-recommends", *packages], root=True, timeout=1200)


def ready() -> Host:
    """Make this machine fit for the lab and return what it is.

    :raises LabError: it can't be, with every reason.
    """
    host = detect()
    if host.problems:
        raise LabError("this machine can't hold the lab:\n" + "\n".join(f"  - {line}" for line in host.problems))
    install(host.missing_packages)
    if host.missing_packages:
        host = detect()
        if host.missing_packages:
            raise LabError(f"still missing after the installation: {', '.join(host.missing_packages)}")
    return host


def describe(host: Host) -> str:
    """Return one line for logs."""
    return json.dumps({"runtime": host.runtime, "cgroups": host.cgroups, "container_args": host.container_args})
