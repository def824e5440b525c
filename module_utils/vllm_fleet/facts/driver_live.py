"""The driver facts of this box with what other adapters tell: packages, units, the cards' answers, the kernel log."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from . import collect, driver, packages, units


def read(timeout: float = 20.0) -> Tuple[Dict[str, Any], Optional[Dict[str, Any]]]:
    """Return the driver facts and the topology facts; the second are ``None`` on a box without NVIDIA's driver."""
    facts = driver.read()
    facts["packages"] = packages.installed()
    facts["fabric_manager"] = None
    if facts["nvswitch"]:
        facts["fabric_manager"] = units.unit_state("nvidia-fabricmanager.service")["ActiveState"]
    topology = collect.read(timeout=timeout)
    if topology["vendor"] != "nvidia":
        return facts, None
    if facts["loaded"]["version"] is None and topology["extra"]["status"] == "ok":
        # NVML answers only when module and library are of one version, so it knows what a container does not show
        facts["loaded"]["version"] = topology["driver"]["loaded"]
    facts["userland"] = topology["driver"]["userland"] or facts["userland"]
    return facts, topology


def kernel_log() -> Optional[List[str]]:
    """Return the kernel's lines since the boot; ``None`` when the journal gives none at all."""
    done = units.run(["journalctl", "--dmesg", "--boot", "--no-pager", "--output=short-iso"])
    lines = [line for line in done.stdout.splitlines() if not line.startswith("-- ")]
    return lines if done.returncode == 0 and lines else None
