"""The base image of a box: Debian 12 as a freshly installed minimal server, built once and cached by its recipe."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import host as host_module
from .settings import CACHE, USER
from .shell import phase, run

SUITE = "bookworm"  # its Python is 3.11, which the CPU build of torch is for
INCLUDE = (
    "apt-utils",
    "ca-certificates",
    "dbus",
    "gpgv",
    "init",
    "iproute2",
    "iputils-ping",
    "kmod",
    "libpam-systemd",
    "logrotate",
    "netbase",
    "openssh-server",
    "procps",
    "python3",
    "python3-apt",
    "sudo",
    "systemd",
    "systemd-sysv",
)
MIRROR = os.environ.get("LAB_DEBIAN_MIRROR", "http://deb.debian.org/debian")
SECURITY_MIRROR = os.environ.get("LAB_DEBIAN_SECURITY_MIRROR", "http://deb.debian.org/debian-security")

# What an installer would have left behind, and what must differ from box to box taken out again. The apt timers are
# masked because they would start downloads at random times in every box.
CUSTOMIZE = f"""
set -eu
useradd --create-home --shell /bin/bash --uid 1000 {USER}
printf '%s ALL=(ALL) NOPASSWD:ALL\\n' {USER} > /etc/sudoers.d/90-{USER}
chmod 0440 /etc/sudoers.d/90-{USER}
install -d /etc/ssh/authorized_keys
printf '%s\\n' 'PermitRootLogin no' 'PasswordAuthentication no' 'UseDNS no' \\
    'AuthorizedKeysFile .ssh/authorized_keys /etc/ssh/authorized_keys/%u' > /etc/ssh/sshd_config.d/10-lab.conf
rm -f /etc/ssh/ssh_host_*
: > /etc/machine-id
printf 'LANG=C.UTF-8\\n' > /etc/default/locale
printf 'force-unsafe-io\\n' > /etc/dpkg/dpkg.cfg.d/10-lab
# no package lists, as on a fresh installation, and none that look fresh
find /var/lib/apt/lists -mindepth 1 -delete
touch -d 2020-01-01 /var/lib/apt/lists
systemctl mask apt-daily.timer apt-daily-upgrade.timer getty@tty1.service console-getty.service
update-ca-certificates
"""


def host_certificates() -> list[Path]:
    """Return the certificate authorities that this host's administrator added, which its boxes must trust too."""
    return sorted(Path("/usr/local/share/ca-certificates").glob("*.crt"))


def recipe() -> dict[str, object]:
    """Return everything that the image is made from; equal recipes give interchangeable images."""
    return {
        "suite": SUITE,
        "include": INCLUDE,
        "customize": CUSTOMIZE,
        "mirrors": [MIRROR, SECURITY_MIRROR],
        "apt": host_module.apt_settings(),
        "certificates": [hashlib.sha256(path.read_bytes()).hexdigest() for path in host_certificates()],
    }


def image_name(made_from: dict[str, object]) -> str:
    """Return the image's name, whose tag is the digest of its recipe."""
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    return f"localhost/vllm-fleet-box:{digest[:16]}"


@contextmanager
def cache_lock() -> Iterator[None]:
    """Hold the cache directory, so that two checkouts don't build at once. The lock goes with the process."""
    CACHE.mkdir(parents=True, exist_ok=True)
    handle = os.open(CACHE, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def mmdebstrap(
    target: Path,
    kind: str,
    include: tuple[str, ...],
    customize: tuple[str, ...],
    apt: dict[str, str],
    copied: tuple[tuple[Path, str], ...] = (),
) -> None:
    """Install Debian into ``target``.

    :param kind: ``tar`` or ``directory``.
    :param include: packages besides the minimal base.
    :param customize: shell scripts to run in it, in this order.
    :param apt: settings of apt, during the installation and in the result.
    :param copied: local files or directories, each with the directory that it is put into before the scripts run.
    """
    lines = "".join(f'{name} "{value}";\n' for name, value in apt.items())
    argv = [
        "mmdebstrap",
        "--mode=root",
        "--variant=minbase",
        f"--format={kind}",
        f"--include={','.join(include)}",
        "--keyring=/usr/share/keyrings/debian-archive-keyring.gpg",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        *(f'--aptopt={name} "{value}"' for name, value in apt.items()),
        *(
            f"--customize-hook=copy-in {shlex.quote(str(path))} /usr/local/share/ca-certificates"
            for path in host_certificates()
        ),
        "--skip=cleanup/apt/lists",  # done in the hook, which also sets their age
        *(f'--customize-hook=mkdir -p "$1{place}"' for _, place in copied),
        *(f"--customize-hook=copy-in {shlex.quote(str(path))} {place}" for path, place in copied),
        *(f'--customize-hook=chroot "$1" sh -c {shlex.quote(script)}' for script in customize),
        f'--customize-hook=printf %s {shlex.quote(lines)} > "$1/etc/apt/apt.conf.d/90host"',
        SUITE,
        str(target),
        f"deb {MIRROR} {SUITE} main",
        f"deb {MIRROR} {SUITE}-updates main",
        f"deb {SECURITY_MIRROR} {SUITE}-security main",
    ]
    run(argv, root=True, timeout=1200)


def ensure(rebuild: bool = False) -> str:
    """Return the name of an image of the present recipe, after building or importing it if need be.

    :param rebuild: import it again even if podman lists it, because it may be unusable. The old one only loses its
        name, as removing it would take other boxes with it.
    """
    made_from = recipe()
    name = image_name(made_from)
    if not rebuild and run(["podman", "image", "exists", name], root=True, check=False).returncode == 0:
        return name
    tarball = CACHE / "images" / f"{name.rpartition(':')[2]}.tar"
    with cache_lock():
        if not tarball.exists():
            tarball.parent.mkdir(parents=True, exist_ok=True)
            part = tarball.with_suffix(".part.tar")
            with phase(f"base image: installing Debian 12 from {MIRROR}"):
                run(["rm", "-f", str(part)], root=True)
                mmdebstrap(part, "tar", INCLUDE, (CUSTOMIZE,), host_module.apt_settings())
                part.rename(tarball)
        with phase("base image: importing into podman"):
            run(
                [
                    "podman",
                    "import",
                    '--change=CMD ["/sbin/init"]',
                    "--change=STOPSIGNAL SIGRTMIN+3",
                    str(tarball),
                    name,
                ],
                root=True,
            )
    return name
