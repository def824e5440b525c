"""Driver facts of a box on which all is well; tests change one thing at a time."""

from __future__ import annotations

import copy
from typing import Any

VERSION = "535.309.01"
KERNEL = "6.1.0-57-amd64"
DEBIAN = {"ID": "debian", "VERSION_CODENAME": "bookworm", "PRETTY_NAME": "Debian GNU/Linux 12 (bookworm)"}
UBUNTU = {"ID": "ubuntu", "VERSION_CODENAME": "noble", "PRETTY_NAME": "Ubuntu 24.04 LTS"}


def package(name: str, version: str = VERSION + "-0+deb12u1", held: bool = True, state: str = "ok") -> dict[str, Any]:
    return {"name": name, "version": version, "held": held, "state": state}


PACKAGES = [
    package("nvidia-kernel-dkms"),
    package("libcuda1"),
    package("libnvidia-ml1"),
    package("nvidia-smi"),
    package("nvidia-persistenced", "535.171.04-1~deb12u1"),
    package("nvidia-kernel-common", "20220217+3~deb12u1"),
    package("linux-image-amd64", "6.1.192-3", held=False),
    package("linux-headers-amd64", "6.1.192-3", held=False),
    package(f"linux-headers-{KERNEL}", "6.1.192-3", held=False),
]


def kernel(release: str = KERNEL, version: str | None = VERSION, headers: bool = True) -> dict[str, Any]:
    path = f"/lib/modules/{release}/updates/dkms/nvidia-current.ko"
    module = {"version": version, "flavour": "proprietary", "path": path} if version else None
    return {"release": release, "headers": headers, "module": module}


def facts(**changes: Any) -> dict[str, Any]:
    """Return the facts, with some replaced."""
    found: dict[str, Any] = {
        "running_kernel": KERNEL,
        "kernels": [kernel()],
        "boot": {"grub_default": "0", "saved_entry": None, "next_entry": None, "symlink": KERNEL},
        "loaded": {"version": VERSION, "flavour": "proprietary", "nouveau_loaded": False, "parameters": {}},
        "modules_readable": True,
        "userland": VERSION,
        "pci": [{"bus_id": f"0000:0{slot}:00.0", "device": "0x2204", "driver": "nvidia"} for slot in (1, 2)],
        "claimed": ["0000:01:00.0", "0000:02:00.0"],
        "nvswitch": False,
        "nouveau_blocked": True,
        "secure_boot": False,
        "mok_enrolled": None,
        "packages": copy.deepcopy(PACKAGES),
        "fabric_manager": None,
        "sources": [{"suites": ["bookworm"], "components": ["main"], "signed_by": None}],
    }
    return {**found, **copy.deepcopy(changes)}


def bare(**changes: Any) -> dict[str, Any]:
    """Return the facts of a box with cards and a kernel, and no driver yet."""
    return facts(
        **{
            "kernels": [kernel(version=None, headers=False)],
            "loaded": {"version": None, "flavour": None, "nouveau_loaded": True, "parameters": {}},
            "userland": None,
            "pci": [{"bus_id": "0000:01:00.0", "device": "0x2204", "driver": "nouveau"}],
            "claimed": [],
            "nouveau_blocked": False,
            "packages": [package("linux-image-amd64", "6.1.192-3", held=False)],
            **changes,
        }
    )


def wanted(**changes: Any) -> dict[str, Any]:
    """Return the parameters of a plan."""
    return {
        "source": "distribution", "version": None, "branch": None, "flavour": "auto", "modules": "dkms",
        "fabric_manager": "auto", "packages": [], "repository": None, "mirror": "http://deb.debian.org/debian",
        "security_mirror": "http://deb.debian.org/debian-security", **changes,
    }  # fmt: skip


def answer(**changes: Any) -> dict[str, Any]:
    """Return what apt would install on the bare box."""
    number = VERSION + "-0+deb12u1"
    installs = dict.fromkeys(("nvidia-kernel-dkms", "libcuda1", "libnvidia-ml1", "nvidia-smi"), number)
    installs.update({"nvidia-persistenced": "535.171.04-1~deb12u1", f"linux-headers-{KERNEL}": "6.1.192-3",
                     "linux-headers-amd64": "6.1.192-3", "dkms": "3.0.10-8+deb12u1"})  # fmt: skip
    return {"status": 0, "output": "", "missing": [], "installs": installs, "removes": [], **changes}


def topology(**changes: Any) -> dict[str, Any]:
    """Return topology facts of two healthy cards, as far as the driver's checks read them."""
    gpus = [
        {
            "index": index, "bus_id": f"0000:0{index + 1}:00.0", "uuid": f"GPU-{index}", "health": "ok",
            "memory_total_mib": 24576, "bar1_total_mib": 32768,
            "pcie": {"gen_max": 4, "gen_current": 1, "width_max": 16, "width_current": 16},
        }
        for index in (0, 1)
    ]  # fmt: skip
    found = {
        "vendor": "nvidia", "gpus": gpus,
        "host": {"iommu": "passthrough", "virtualization": "none"}, "pairs": [{"gpus": [0, 1], "acs": False}],
        "extra": {"message": "", "cards": [{"index": i, "persistence": True, "slot_width_max": 16} for i in (0, 1)]},
    }  # fmt: skip
    return {**found, **copy.deepcopy(changes)}
