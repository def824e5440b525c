"""Driver adapter: what is installed, what is loaded and what the next boot will load, for every kernel of a box.

``root`` is a prefix for tests. What can't be read is ``None``, which is never the same as "there is none".
"""

from __future__ import annotations

import os
import re
from typing import Any, Dict, List, Optional, Tuple

from . import nvml, sysfs
from .host import read_text, run, under

#: names that distributions give the driver's main module: upstream's, and those of Debian's alternatives
_MODULE = re.compile(r"(?:.*/)?nvidia(?:-current(?:-open)?|-tesla(?:-\d+)?(?:-current)?)?\.ko(?:\.\w+)?\Z")
#: depmod prefers modules that were added to those that came with the kernel
_PREFERRED = ("updates/", "extra/", "weak-updates/", "")
#: EFI's global variables: "SecureBoot" holds four bytes of attributes and one byte (UEFI specification, 3.3 and 32.3)
_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_SWITCH_CLASS = "0x0680"  # what NVSwitch shows itself as: a bridge of another kind
#: where DKMS keeps the key that it signs modules with, by its version
MOK_CERTIFICATES = ("/var/lib/dkms/mok.pub", "/var/lib/shim-signed/mok/MOK.der")


def read(root: str = "/") -> Dict[str, Any]:
    """Return the driver facts of a box::

    {"running_kernel": "6.1.0-57-amd64",
     "kernels": [{"release", "headers": bool, "module": {"version", "flavour", "path"} | None}], oldest first
     "boot": {"grub_default", "saved_entry", "next_entry", "symlink"},
     "loaded": {"version", "flavour", "nouveau_loaded", "parameters"},
     "modules_readable": bool, "userland": "580.159.04" | None,
     "dkms": [{"module", "version", "kernel", "status"}] | None,
     "pci": [{"bus_id", "device", "driver"}], "claimed": [bus ids], "nvswitch": bool,
     "nouveau_blocked": bool, "secure_boot": True | False | None, "mok_enrolled": True | False | None}
    """
    releases, signed_only = kernel_releases(root), secure_boot(root)
    return {
        "running_kernel": (read_text(under(root, "/proc/sys/kernel/osrelease")) or "").strip() or None,
        "kernels": [
            {"release": release, "headers": headers(release, root), "module": module_on_disk(release, root)}
            for release in releases
        ],
        "boot": boot_choice(root),
        "loaded": sysfs.nvidia_module(root),
        "modules_readable": read_text(under(root, "/proc/modules")) is not None,
        "userland": nvml.library_version() if root == "/" else None,
        "pci": sysfs.pci_gpus(sysfs.NVIDIA, root),
        "claimed": sorted(sysfs.nvidia_cards(root)),
        "nvswitch": nvswitch(root),
        "nouveau_blocked": nouveau_blocked(root),
        "secure_boot": signed_only,
        "mok_enrolled": mok_enrolled() if signed_only and root == "/" else None,
    }


def version_key(release: str) -> List[Tuple[int, int, str]]:
    """Return the sort key that puts ``6.1.0-57`` behind ``6.1.0-9``, as GRUB orders its menu."""
    parts = re.findall(r"\d+|[^\d.+~-]+", release)
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts]


def kernel_releases(root: str = "/") -> List[str]:
    """Return the releases of the kernels that are installed, oldest first; empty where none is (a container)."""
    try:
        names = os.listdir(under(root, "/boot"))
    except OSError:
        return []
    found = [name[len("vmlinuz-") :] for name in names if name.startswith("vmlinuz-")]
    return sorted((name for name in found if not name.endswith((".old", ".bak"))), key=version_key)


def headers(release: str, root: str = "/") -> bool:
    """Return whether a module can be built for a kernel: its build directory exists and holds a Makefile."""
    link = under(root, f"/lib/modules/{release}/build")
    if os.path.islink(link) and root != "/":
        target = os.readlink(link)
        link = under(root, target) if os.path.isabs(target) else link
    return os.path.isfile(os.path.join(link, "Makefile"))


def module_on_disk(release: str, root: str = "/") -> Optional[Dict[str, Any]]:
    """Return ``{"version", "flavour", "path"}`` of the module that a kernel would load; ``None`` when it has none.

    Read from depmod's list, because a file that is not in it is not found at a boot either.
    """
    directory = f"/lib/modules/{release}"
    listed = read_text(under(root, f"{directory}/modules.dep")) or ""
    paths = [line.split(":", 1)[0] for line in listed.splitlines() if _MODULE.match(line.split(":", 1)[0])]
    if not paths:
        return None
    paths.sort(key=lambda path: next(place for place, word in enumerate(_PREFERRED) if path.startswith(word)))
    path = paths[0] if os.path.isabs(paths[0]) else f"{directory}/{paths[0]}"
    fields = {name: run(["modinfo", "-F", name, under(root, path)]) for name in ("version", "license")}
    values = {name: output.strip().split("\n")[0] for name, (status, output) in fields.items() if status == 0}
    licence = values.get("license", "")
    flavour = "open" if "GPL" in licence else "proprietary" if licence == "NVIDIA" else None
    return {"version": values.get("version") or None, "flavour": flavour, "path": path}


def boot_choice(root: str = "/") -> Dict[str, Optional[str]]:
    """Return what decides the next boot: GRUB's default and saved entries, and where Debian's /vmlinuz points."""
    settings: Dict[str, str] = {}
    configured = os.path.exists(under(root, "/boot/grub/grub.cfg"))
    if configured:
        for line in (read_text(under(root, "/etc/default/grub")) or "").splitlines():
            found = re.match(r"\s*(GRUB_DEFAULT)=(.*)", line)
            if found:
                settings[found.group(1)] = found.group(2).strip().strip("\"'")
    stored = dict(re.findall(r"^(\w+)=(.*)$", read_text(under(root, "/boot/grub/grubenv")) or "", re.M))
    link = under(root, "/vmlinuz")
    return {
        "grub_default": (settings.get("GRUB_DEFAULT") or "0") if configured else None,
        "saved_entry": stored.get("saved_entry") or None,
        "next_entry": stored.get("next_entry") or None,
        "symlink": os.path.basename(os.readlink(link))[len("vmlinuz-") :] if os.path.islink(link) else None,
    }


def nvswitch(root: str = "/") -> bool:
    """Return whether the PCI bus shows an NVSwitch. A guest sees none: there the host runs the fabric manager."""
    base = under(root, "/sys/bus/pci/devices")
    try:
        names = os.listdir(base)
    except OSError:
        return False
    for name in names:
        vendor = (read_text(os.path.join(base, name, "vendor")) or "").strip()
        kind = (read_text(os.path.join(base, name, "class")) or "").strip()
        if vendor == sysfs.NVIDIA and kind.startswith(_SWITCH_CLASS):
            return True
    return False


def nouveau_blocked(root: str = "/") -> bool:
    """Return whether modprobe's configuration keeps nouveau out, by a blacklist line or an install line."""
    for directory in ("/etc/modprobe.d", "/run/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d"):
        try:
            names = sorted(os.listdir(under(root, directory)))
        except OSError:
            continue
        for name in names:
            text = read_text(under(root, f"{directory}/{name}")) or "" if name.endswith(".conf") else ""
            if re.search(r"^\s*(?:blacklist\s+nouveau|install\s+nouveau\s+/bin/(?:false|true))\s*$", text, re.M):
                return True
    return False


def secure_boot(root: str = "/") -> Optional[bool]:
    """Return whether the firmware enforces signatures; ``False`` without EFI, ``None`` when that can't be read."""
    if not os.path.isdir(under(root, "/sys/firmware/efi")):
        return False
    path = under(root, _SECURE_BOOT)
    try:
        with open(path, "rb") as handle:
            value = handle.read()
    except FileNotFoundError:
        # the directory is mounted and the variable is not there: firmware from before Secure Boot
        return False if os.path.isdir(os.path.dirname(path)) and os.listdir(os.path.dirname(path)) else None
    except OSError:
        return None
    return value[4] == 1 if len(value) == 5 else None


def mok_enrolled() -> Optional[bool]:
    """Return whether the key that DKMS signs with is enrolled in the firmware; ``None`` when nobody can say."""
    for path in MOK_CERTIFICATES:
        if os.path.isfile(path):
            status, output = run(["mokutil", "--test-key", path])
            if status is not None:
                return "already enrolled" in output
    return None
