"""What a reboot is judged by: boot id, kernel, module versions, GPU counts, and the lanes that run. Reads only."""

from __future__ import annotations

import os
import re
from typing import Any, Dict, List, Optional

from . import collect, sysfs
from .host import read_text, under
from .units import run

#: Names under which a module's file may lie: Debian calls the flavours of ``nvidia`` by names of their own.
FILES = {"nvidia": ("nvidia", "nvidia-current", "nvidia-current-open"), "iluvatar": ("iluvatar",)}


def boot_id(root: str = "/") -> Optional[str]:
    """Return the kernel's id of this boot; ``None`` when it can't be read."""
    return (read_text(under(root, "/proc/sys/kernel/random/boot_id")) or "").strip() or None


def loaded(module: str, root: str = "/") -> Optional[str]:
    """Return what tells one build of a loaded kernel module from another; ``None`` when it is not loaded.

    Its version, else the checksum of its sources, else ``""``.
    """
    if not os.path.isdir(under(root, f"/sys/module/{module}")):
        return None
    texts = [read_text(under(root, f"/sys/module/{module}/{name}")) or "" for name in ("version", "srcversion")]
    return next((text.strip() for text in texts if text.strip()), "")


def installed(module: str) -> Optional[str]:
    """Return the same of the module that the running kernel would load; ``None`` when it has none."""
    for name in FILES.get(module, (module,)):
        done = run(["modinfo", "-F", "filename", name])
        # A builtin has no file, and nothing that could differ.
        if done.returncode == 0 and done.stdout.strip().startswith("/"):
            texts = [run(["modinfo", "-F", field, name]).stdout.strip() for field in ("version", "srcversion")]
            return next((text for text in texts if text), "")
    return None


def active_lanes() -> List[str]:
    """Return the lanes that run or are starting."""
    argv = ["systemctl", "list-units", "vllm@*.service", "--plain", "--no-legend", "--state=active,activating"]
    return sorted(re.findall(r"^vllm@([a-z0-9-]+)\.service\s", run(argv).stdout, re.M))


def snapshot(module: str, driver_timeout: float = 20.0) -> Dict[str, Any]:
    """Return what is compared over a reboot.

    ``{"boot_id", "kernel", "container", "module": {"name", "loaded", "installed"} | None, "gpus": {"pci", "driver"}}``;
    ``pci`` counts the cards on the bus that are not handed to a guest, ``driver`` those that the driver answers for,
    ``None`` when it does not answer.

    :param module: kernel module to look at; ``""`` for none.
    """
    facts = collect.read(driver_timeout)
    on_bus = [card for card in facts["extra"]["pci"] if card["driver"] != "vfio-pci"]
    return {
        "boot_id": boot_id(),
        "kernel": os.uname().release,
        "container": sysfs.in_container(),
        "module": {"name": module, "loaded": loaded(module), "installed": installed(module)} if module else None,
        "gpus": {"pci": len(on_bus), "driver": None if facts["gpus"] is None else len(facts["gpus"])},
    }
