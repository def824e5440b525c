"""The disk of a virtual machine: Debian 12 with a kernel of its own, its headers and a compiler, built once and cached.

There is no boot loader on it. What GRUB would load, the newest kernel and its initramfs by the links in ``/``, is read
from the disk at every boot by :mod:`lab.vm`; so an initramfs that was rebuilt on the machine counts from the next boot.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from . import image
from .host import apt_settings, install
from .settings import CACHE, ROOT
from .shell import LabError, phase, run

#: what the host needs for a virtual machine, besides what the lab needs
PACKAGES = {
    "qemu-system-x86": "/usr/bin/qemu-system-x86_64",
    "e2fsprogs": "/usr/sbin/mkfs.ext4",
    "mmdebstrap": "/usr/bin/mmdebstrap",
    "debian-archive-keyring": "/usr/share/keyrings/debian-archive-keyring.gpg",
}
# The generic kernel, because the cloud one has no graphics drivers, so no nouveau. Headers and compiler are here, as
# fetching and unpacking them takes minutes under emulation.
#: sources of kernel modules that stand in for the drivers'; the image holds them built
MODULES = ROOT / "lab" / "kernel"
INCLUDE = (*image.INCLUDE, "linux-image-amd64", "linux-headers-amd64", "initramfs-tools", "zstd", "gcc", "make")
SIZE = "6G"

# A small initramfs, which a slow machine unpacks and rebuilds in seconds; an address that needs no DHCP; a journal that
# outlives a boot.
CUSTOMIZE = """
set -eu
printf '/dev/vda / ext4 errors=remount-ro 0 1\\n' > /etc/fstab
printf 'MODULES=list\\n' > /etc/initramfs-tools/conf.d/10-lab
printf '%s\\n' virtio_pci virtio_blk ext4 >> /etc/initramfs-tools/modules
update-initramfs -u -k all
printf '%s\\n' '[Match]' 'Type=ether' '[Network]' 'Address=10.0.2.15/24' 'Gateway=10.0.2.2' \\
    > /etc/systemd/network/10-lab.network
printf 'nameserver 10.0.2.3\\n' > /etc/resolv.conf
systemctl enable systemd-networkd
systemctl mask serial-getty@ttyS0.service systemd-networkd-wait-online.service systemd-timesyncd.service
mkdir -p /var/log/journal
make -C /lib/modules/*/build M=/opt/kernel modules
"""
_LINK = re.compile(r'Fast link dest: "([^"]+)"')


def ensure() -> Path:
    """Return the raw disk image of the present recipe, after building it if need be (3 minutes, 1.5 GB).

    :raises LabError: a package or a program failed.
    """
    install(tuple(package for package, file in PACKAGES.items() if not Path(file).exists()))
    sources = {path.name: path.read_text() for path in sorted(MODULES.iterdir())}
    made_of = {"include": INCLUDE, "customize": [image.CUSTOMIZE, CUSTOMIZE], "size": SIZE, "modules": sources}
    recipe = {**image.recipe(), **made_of}
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    disk = CACHE / "vm" / f"{digest}.raw"
    with image.cache_lock():
        if not disk.exists():
            disk.parent.mkdir(parents=True, exist_ok=True)
            tree, part = disk.with_suffix(".tree"), disk.with_suffix(".part")
            run(["rm", "-rf", str(tree), str(part)], root=True)
            with phase(f"virtual machine: installing Debian 12 with a kernel from {image.MIRROR}"):
                image.mmdebstrap(
                    tree, "directory", INCLUDE, (image.CUSTOMIZE, CUSTOMIZE), apt_settings(), ((MODULES, "/opt"),)
                )
            with phase("virtual machine: writing its disk"):
                run(["truncate", f"--size={SIZE}", str(part)])
                run(["mkfs.ext4", "-q", "-F", "-L", "root", "-d", str(tree), str(part)], root=True, timeout=600)
                run(["rm", "-rf", str(tree)], root=True)
            part.rename(disk)
    return disk


def copy(disk: Path, target: Path) -> None:
    """Make a machine's own disk out of the image; holes stay holes."""
    run(["cp", "--sparse=always", "--reflink=auto", str(disk), str(target)], timeout=600)


def put(disk: Path, files: list[tuple[str, Path, int]]) -> None:
    """Put files (path on the disk, local file, mode) on the disk of a machine that is off; everything is root's."""
    commands = []
    for name, source, mode in files:
        commands += [f"rm {name}", f"write {source} {name}", f"sif {name} mode 0{0o100000 | mode:o}"]
        commands += [f"sif {name} uid 0", f"sif {name} gid 0"]
    _debugfs(disk, *commands, write=True)
    for name, _, _ in files:
        if "Inode:" not in _debugfs(disk, f"stat {name}"):
            raise LabError(f"{name} could not be written to {disk}")


def boot_files(disk: Path, target: Path) -> tuple[Path, Path]:
    """Copy kernel and initramfs, as the links in ``/`` name them, out of a disk that is off; return where they are.

    :raises LabError: the disk has none.
    """
    # A machine that was killed leaves its journal to be replayed, as its own kernel would.
    run(["e2fsck", "-p", str(disk)], check=False, timeout=300)
    found = []
    for link in ("vmlinuz", "initrd.img"):
        name = _LINK.search(_debugfs(disk, f"stat /{link}"))
        local = target / link
        local.unlink(missing_ok=True)
        if name:
            _debugfs(disk, f"dump /{name.group(1).lstrip('/')} {local}")
        if not name or not local.exists() or not local.stat().st_size:
            raise LabError(f"{disk} has no /{link} to boot from. Fix: remove the machine and make it anew")
        found.append(local)
    return found[0], found[1]


def _debugfs(disk: Path, *commands: str, write: bool = False) -> str:
    argv = ["debugfs", *(["-w"] if write else []), "-f", "-", str(disk)]
    return run(argv, stdin="\n".join([*commands, ""]).encode(), timeout=120).stdout
