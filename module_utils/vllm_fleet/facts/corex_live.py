"""CoreX driver adapter: what its installer would find on the box, and what it has left there."""

from __future__ import annotations

import os
import re
from typing import Any, Dict, List, Optional

from .. import corex_driver, versions
from ..errors import UsageError
from ..files import read_json
from . import boot, collect, corex, sysfs
from .host import under
from .units import run

RECORD = "/var/lib/vllm-fleet/corex-driver.json"
_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


def read(timeout: float = 20.0) -> Dict[str, Any]:
    """Return the facts that :mod:`..corex_driver` judges.

    ``{"kernel", "gcc", "headers", "secure_boot", "module": {"loaded", "installed"}, "pci", "nodes", "driver", "ixsmi",
    "sdk", "kernels_without_module", "record"}``; ``ixsmi`` is the number of cards that the vendor's tool shows.

    :param timeout: seconds that the driver has to answer.
    """
    kernel = os.uname().release
    answer = collect.in_child(corex.read, timeout) or {}
    cards = answer.get("gpus")
    return {
        "kernel": kernel,
        "gcc": _gcc(),
        "headers": os.path.isfile(f"/lib/modules/{kernel}/build/Makefile"),
        "secure_boot": secure_boot(),
        "module": {"loaded": boot.loaded("iluvatar"), "installed": boot.installed("iluvatar")},
        "pci": len(sysfs.pci_gpus(sysfs.ILUVATAR)),
        "nodes": corex.device_nodes(),
        "driver": (answer.get("driver") or {}).get("userland"),
        "ixsmi": None if cards is None else len(cards),
        "sdk": sdk(),
        "kernels_without_module": kernels_without_module(kernel),
        "record": _record(),
    }


def _gcc() -> Optional[int]:
    done = run(["gcc", "--version"])
    return versions.parse_compiler(done.stdout)[1] if done.returncode == 0 else None


def _record() -> Optional[Dict[str, Any]]:
    try:
        found = read_json(RECORD, "record of the CoreX driver") if os.path.exists(RECORD) else None
    except UsageError:
        return None  # the installer runs again, which makes it anew
    return found if isinstance(found, dict) else None


def secure_boot(root: str = "/") -> bool:
    """Return whether the firmware is known to enforce signatures: the last byte of EFI's variable."""
    try:
        with open(under(root, _SECURE_BOOT), "rb") as handle:
            return handle.read()[-1:] == b"\x01"
    except OSError:
        return False


def sdk(root: str = "/") -> Optional[str]:
    """Return the version of the installed SDK, which its directory is named by."""
    found = re.search(r"/corex-(\d+(?:\.\d+)+)\Z", os.path.realpath(under(root, corex.DEFAULT_HOME)))
    return found.group(1) if found else None


def kernels_without_module(running: str, root: str = "/") -> List[str]:
    """Return the installed kernels that lack the module and are newer than the running one, so a boot may take them."""
    try:
        names = os.listdir(under(root, "/lib/modules"))
    except OSError:
        return []
    newer = [name for name in names if corex_driver.numbers_of(name) > corex_driver.numbers_of(running)]
    return sorted(
        name
        for name in newer
        if os.path.exists(under(root, f"/boot/vmlinuz-{name}")) and not _has_module(under(root, f"/lib/modules/{name}"))
    )


def _has_module(directory: str) -> bool:
    return any(re.match(r"iluvatar\.ko(\.\w+)?\Z", name) for _, _, names in os.walk(directory) for name in names)
