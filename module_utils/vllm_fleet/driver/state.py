"""How the driver of a box stands: installed, loaded and next-boot versions, and whether a reboot is due."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

Facts = Dict[str, Any]


def next_kernel(facts: Facts) -> Optional[str]:
    """Return the release of the kernel that the next boot starts; ``None`` when nothing on the box decides it.

    GRUB's saved or one-time entry if it names a kernel, its first entry (the newest kernel) by default; without GRUB
    Debian's ``/vmlinuz``; the only kernel of a box that has one.
    """
    releases: List[str] = [item["release"] for item in facts["kernels"]]
    boot = facts["boot"]
    if not releases:
        return None
    if boot["next_entry"]:
        return _named(boot["next_entry"], releases)
    if boot["grub_default"] == "saved":
        # grub-set-default has never been called: the first entry
        return _named(boot["saved_entry"], releases) if boot["saved_entry"] else releases[-1]
    if boot["grub_default"] == "0":
        return releases[-1]
    if boot["grub_default"] is not None:
        return _named(boot["grub_default"], releases)
    if boot["symlink"] in releases:
        return str(boot["symlink"])
    return releases[0] if len(releases) == 1 else None


def _named(entry: str, releases: List[str]) -> Optional[str]:
    """Return the release that a menu entry names; the longest one, because 6.1.0-5 is part of 6.1.0-57."""
    found = [release for release in releases if release in entry]
    return max(found, key=len) if found else None


def kernel(facts: Facts, release: Optional[str]) -> Optional[Dict[str, Any]]:
    """Return the facts of one installed kernel."""
    return next((item for item in facts["kernels"] if item["release"] == release), None)


def assess(facts: Facts) -> Dict[str, Any]:
    """Return how the driver stands.

    ``installed`` is the version of the libraries on disk, ``loaded`` that of the module in the kernel, ``next_boot``
    that of the module which the next boot will find; each is ``None`` when there is none or nobody can say, and the
    reasons tell which. ``flavour`` is that of the loaded module, else of the next one. ``reboot_required`` is ``True``
    when a reboot is due, ``False`` when not, ``None`` when that can't be told. ``reboot_blocked`` holds the reasons why
    a reboot would not bring the installed driver up; as long as there is one, don't reboot for it.
    """
    loaded, installed = facts["loaded"]["version"], facts["userland"]
    release = next_kernel(facts)
    coming = kernel(facts, release)
    module = (coming or {}).get("module") or {}
    next_boot = module.get("version")
    blocked = _blocked(release, module, installed)
    reboot, reasons = _due(facts, loaded, installed, next_boot)
    disk_flavour = module.get("flavour")
    if loaded and next_boot and facts["loaded"]["flavour"] and disk_flavour not in (None, facts["loaded"]["flavour"]):
        reboot, reasons = True, [*reasons, "flavour_differs"]
    return {
        "installed": installed,
        "loaded": loaded,
        "next_boot": next_boot,
        "flavour": facts["loaded"]["flavour"] or disk_flavour,
        "reboot_required": reboot,
        "reasons": [*reasons, *(code for code in blocked if installed or loaded)],
        "reboot_blocked": blocked if installed or loaded else [],
        "running_kernel": facts["running_kernel"],
        "next_kernel": release,
    }


def _blocked(release: Optional[str], module: Dict[str, Any], installed: Optional[str]) -> List[str]:
    if release is None:
        return ["next_boot_unknown"]
    if not module:
        return ["next_boot_module_missing"]
    if module["version"] is None:
        return ["next_boot_unknown"]
    return ["next_boot_differs"] if installed and module["version"] != installed else []


def _due(
    facts: Facts, loaded: Optional[str], installed: Optional[str], next_boot: Optional[str]
) -> Tuple[Optional[bool], List[str]]:
    """Return whether a reboot is due and why, from what is loaded and what lies on disk."""
    if loaded and installed:
        return (True, ["loaded_differs"]) if loaded != installed else (False, [])
    if loaded:
        return None, ["installed_unknown"]
    if not installed:
        return (False, ["driver_absent"]) if not next_boot else (None, ["installed_unknown"])
    if facts["loaded"]["nouveau_loaded"] or any(card["driver"] == "nouveau" for card in facts["pci"]):
        return True, ["nouveau_loaded"]
    if not facts["pci"]:
        return False, ["no_gpu"]
    if not facts["modules_readable"]:
        return None, ["loaded_unknown"]
    return True, ["module_not_loaded"]
