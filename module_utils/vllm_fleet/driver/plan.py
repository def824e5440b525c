"""What an installation of the NVIDIA driver would do to a box, and whether it may: decided before anything changes.

Two steps with apt's answer between them: :func:`choose` needs the box's facts alone, :func:`judge` also what apt would
install. Both refuse with a :class:`~..errors.RefusedError`.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, Optional

from ..errors import RefusedError
from . import generations
from .names import driver_version, family, numbered
from .sources import DEBIAN_BRANCHES, DISTRIBUTION, RUN_FILE, SIGNED, files, header_packages, package_names

SECURE_BOOT_STEPS = (
    "one of these, then run again. (1) Turn Secure Boot off in the firmware. (2) Enrol the key that DKMS signs with: "
    "apt-get install dkms mokutil; dkms generate_mok (an older DKMS makes it at its first build); mokutil --import "
    "/var/lib/dkms/mok.pub, with a one-time password; reboot, and choose Enroll MOK on the console. (3) On Ubuntu, set "
    "nvidia_driver_modules: signed"
)


def choose(wanted: Dict[str, Any], facts: Dict[str, Any], system: Dict[str, str]) -> Dict[str, Any]:
    """Return what to ask apt for.

    :param wanted: ``{"source", "version", "flavour": "auto|open|proprietary", "modules": "dkms|signed", "branch",
        "repository": {"uri", "suite", "components"}, "fabric_manager": "auto|off"}``.
    :param facts: as :func:`..facts.driver.read` gives them, with ``packages`` and ``sources``.
    :param system: /etc/os-release.
    :returns: ``{"flavour", "generations", "packages", "headers", "ask", "files", "warnings"}``; ``ask`` names what
        is to be installed. What is there stays as it is unless another version is asked for: a newer one in the source
        is no reason to move a driver.
    :raises RefusedError: with the reason codes of docs/drivers.md; nothing has been changed.
    """
    if wanted["source"] == RUN_FILE and not wanted["version"]:
        raise RefusedError("version_needed", "a .run file is installed by its version", "set nvidia_driver_version")
    found = _generations(wanted, facts)
    flavour = _flavour(wanted, facts, found, _expected(wanted, system))
    _check_secure_boot(wanted, facts, system)
    _check_mixture(wanted, facts)
    kernels = [kernel["release"] for kernel in facts["kernels"]]
    if not kernels:
        raise RefusedError(
            "no_kernel_installed",
            "no kernel in /boot, so there is nothing to build a module for",
            "install the distribution's kernel, or set nvidia_driver_source: none where the host provides the driver",
        )
    warnings = []
    if facts["running_kernel"] not in kernels:
        warnings.append(
            f"the running kernel {facts['running_kernel']} is not installed here; its module comes with the reboot"
        )
    packages = [] if wanted["source"] == RUN_FILE else package_names(wanted, flavour, system, facts)
    headers = header_packages(facts)
    whole = {item["name"]: item["version"] for item in facts["packages"] or [] if item["state"] == "ok"}
    ask = [name for name in [*headers, *packages] if name not in whole]
    if wanted["version"] and packages and any(number != wanted["version"] for number in numbered(whole).values()):
        ask = list(dict.fromkeys([*ask, *packages, *sorted(numbered(whole))]))
    return {
        "flavour": flavour,
        "generations": sorted({item.name for item in found}),
        "packages": packages,
        "headers": headers,
        "ask": ask,
        "files": files(wanted, system, facts["sources"]) if wanted["source"] != RUN_FILE else {},
        "warnings": warnings,
    }


def _generations(wanted: Dict[str, Any], facts: Dict[str, Any]) -> List[generations.Generation]:
    found = []
    for card in facts["pci"]:
        item = generations.generation(card["device"])
        if item is not None:
            found.append(item)
        elif wanted["flavour"] == "auto":
            raise RefusedError(
                "unknown_gpu",
                f"the card at {card['bus_id']} has the PCI id {card['device']}, which is in no known block",
                "name the module with nvidia_driver_flavour, after reading the driver's list of supported GPUs",
            )
    return found


def _expected(wanted: Dict[str, Any], system: Dict[str, str]) -> Optional[str]:
    """Return the version, or at least the branch, that the installation will bring; ``None`` until apt is asked."""
    branch = wanted["branch"]
    if not branch and wanted["source"] == DISTRIBUTION and system.get("ID") == "debian":
        branch = DEBIAN_BRANCHES.get(system.get("VERSION_CODENAME", ""))
    return wanted["version"] or (str(branch) if branch else None)


def installed_flavour(packages: List[Dict[str, Any]]) -> Optional[str]:
    """Return the module whose package is installed; a run without a wish keeps it."""
    modules = [item["name"] for item in family(packages) if re.search(r"dkms|linux-modules-nvidia", item["name"])]
    if not modules:
        return None
    return generations.OPEN if any("open" in name for name in modules) else generations.PROPRIETARY


def _flavour(
    wanted: Dict[str, Any], facts: Dict[str, Any], found: List[generations.Generation], version: Optional[str]
) -> str:
    """Return the module to install; refuses one that a card of the box can't work with."""
    asked = wanted["flavour"]
    if not found:
        if asked == "auto":
            raise RefusedError(
                "no_gpu",
                "no NVIDIA card is on the PCI bus, so the module can't be chosen by it",
                "seat the card, or name the module with nvidia_driver_flavour",
            )
        return str(asked)
    names = ", ".join(sorted({item.name for item in found}))
    possible = generations.common_modules(found)
    if not possible:
        raise RefusedError(
            "no_common_module",
            f"no one module serves the cards of this box together ({names})",
            "take the cards of one generation out",
        )
    if asked != "auto" and asked not in possible:
        raise RefusedError(
            "flavour_unsupported",
            f"the {asked} module does not serve {names}; possible: {', '.join(possible)}",
            f"set nvidia_driver_flavour: {possible[0]}, or leave it at auto",
        )
    for item in found:
        check_branch(item, version)
    kept = installed_flavour(facts["packages"] or [])
    if asked == "auto" and kept in possible:
        return str(kept)
    return str(generations.default_module(found, version) if asked == "auto" else asked)


def check_branch(item: generations.Generation, version: Optional[str]) -> None:
    """Refuse a driver branch that does not know a generation.

    :raises RefusedError: ``driver_too_old`` or ``driver_too_new``.
    """
    number = generations.branch(version)
    if number is None:
        return
    if number < item.first_branch:
        raise RefusedError(
            "driver_too_old",
            f"driver {version} does not know {item.name} cards; needed: {item.first_branch} or later",
            "choose a newer version, or another nvidia_driver_source (the distribution's may be too old for this card)",
        )
    if item.last_branch is not None and number > item.last_branch:
        raise RefusedError(
            "driver_too_new",
            f"driver {version} no longer serves {item.name} cards; the last branch is {item.last_branch}",
            f"set nvidia_driver_version to one of branch {item.last_branch}",
        )


def _check_secure_boot(wanted: Dict[str, Any], facts: Dict[str, Any], system: Dict[str, str]) -> None:
    if wanted["modules"] == SIGNED:
        if system.get("ID") != "ubuntu" or wanted["source"] != DISTRIBUTION:
            raise RefusedError(
                "no_signed_modules",
                f"{system.get('PRETTY_NAME', 'this system')} has no signed modules of the driver",
                "set nvidia_driver_modules: dkms",
            )
        return
    if facts["secure_boot"] is None:
        raise RefusedError(
            "secure_boot_unknown",
            "the firmware's SecureBoot variable could not be read",
            "run as root with /sys/firmware/efi/efivars mounted: a module without a trusted signature would not load",
        )
    if facts["secure_boot"] and not facts["mok_enrolled"]:
        raise RefusedError(
            "secure_boot",
            "Secure Boot is on and the key that DKMS signs with is not enrolled: the module would be rejected",
            SECURE_BOOT_STEPS,
        )


def _check_mixture(wanted: Dict[str, Any], facts: Dict[str, Any]) -> None:
    """Refuse to lay one kind of installation over the other: each overwrites files of the other unnoticed."""
    packaged = [item["name"] for item in family(facts["packages"] or []) if "dkms" in item["name"]]
    if wanted["source"] == RUN_FILE and packaged:
        raise RefusedError(
            "mixed_installation",
            f"the driver is installed from packages ({', '.join(packaged)}) and a .run file is asked for",
            "remove the packages first: apt-get purge '*nvidia*' libcuda1, with the lanes stopped",
        )
    if wanted["source"] != RUN_FILE and facts["userland"] and not family(facts["packages"] or []):
        raise RefusedError(
            "mixed_installation",
            f"libraries of driver {facts['userland']} are here and no package owns them (a .run file)",
            "nvidia-uninstall, with the lanes stopped; or nvidia_driver_source: run_file or none",
        )


def judge(
    wanted: Dict[str, Any], chosen: Dict[str, Any], facts: Dict[str, Any], answer: Dict[str, Any]
) -> Dict[str, Any]:
    """Return the final plan: ``{"install": ["name=version"], "version", "removes", "reason"}`` from apt's simulation.

    :raises RefusedError: headers, packages or the version are not to be had, module and libraries would differ, the
        version does not serve a card, or something that is not the driver's would be removed.
    """
    _check_available(wanted, chosen, answer)
    before = {item["name"]: item["version"] for item in facts["packages"] or []}
    after = {**before, **answer["installs"]}
    foreign = [
        name for name in answer["removes"] if name not in {item["name"] for item in family(facts["packages"] or [])}
    ]
    if foreign:
        raise RefusedError(
            "removes_packages",
            f"the installation would remove {', '.join(foreign)}, which is not the driver's",
            "look with apt-get --simulate install, and remove or keep these by hand first",
        )
    version = driver_version(after)
    numbers = numbered(after)
    if wanted["version"] and version != wanted["version"]:
        raise RefusedError(
            "version_unavailable",
            f"version {wanted['version']} is not to be had from this source; it offers {version}",
            "correct nvidia_driver_version, or choose another nvidia_driver_source",
        )
    asked = [name for name in chosen["packages"] if name in numbers]
    odd = {
        name: numbers[name] for name in [*asked, "libcuda1", "libnvidia-ml1"] if numbers.get(name, version) != version
    }
    if odd:
        shown = ", ".join(f"{name} {number}" for name, number in sorted(odd.items()))
        raise RefusedError(
            "versions_differ",
            f"module and libraries would be of different versions: {version}, but {shown}",
            "pin nvidia_driver_version to one that this source has of all of them, or choose the other module",
        )
    for card in facts["pci"]:
        item = generations.generation(card["device"])
        if item is not None:
            check_branch(item, version)
    chosen_now = [name for name in chosen["ask"] if name in answer["installs"]]
    return {
        "version": version,
        "install_headers": [f"{name}={after[name]}" for name in chosen_now if name in chosen["headers"]],
        "install": [f"{name}={after[name]}" for name in chosen_now if name not in chosen["headers"]],
        "installs": answer["installs"],
    }


def judge_headers(wanted: Dict[str, Any], chosen: Dict[str, Any], answer: Dict[str, Any]) -> Dict[str, Any]:
    """Return the plan of a ``.run`` file, for which apt brings the kernel's headers and no more.

    :raises RefusedError: the headers are not to be had.
    """
    _check_available(wanted, chosen, answer)
    names = [f"{name}={answer['installs'][name]}" for name in chosen["ask"] if name in answer["installs"]]
    return {"version": wanted["version"], "install_headers": names, "install": [], "installs": answer["installs"]}


def _check_available(wanted: Dict[str, Any], chosen: Dict[str, Any], answer: Dict[str, Any]) -> None:
    missing_headers = [name for name in answer["missing"] if name.startswith("linux-headers-")]
    if missing_headers:
        raise RefusedError(
            "headers_unavailable",
            f"no package {', '.join(missing_headers)}: the mirror no longer has the headers of this kernel",
            "bring kernel and headers to one version first: apt-get install the current linux-image and linux-headers "
            "metapackages, reboot, remove the old kernel, and run again",
        )
    if answer["missing"]:
        raise RefusedError(
            "packages_unavailable",
            f"no package {', '.join(answer['missing'])} in the source {wanted['source']}",
            "correct the source's address or the branch",
        )
    if answer["status"]:
        told = re.compile(r"E:|Err|W: GPG|W: Failed|\s.*(?:Depends|Conflicts|Breaks): ")
        lines = [line.strip() for line in answer["output"].splitlines() if told.match(line)]
        text = " ".join(lines or answer["output"].splitlines()[-5:])[:600]
        key = re.search(
            r"NO_PUBKEY|EXPKEYSIG|BADSIG|not signed|signatures? (?:couldn't|were invalid)", answer["output"]
        )
        raise RefusedError(
            "repository_key" if key else "apt_refuses",
            f"apt refuses: {text}",
            "the repository is signed with another key than the pinned keyring: check its announcement, then replace "
            "the keyring and its checksum"
            if key
            else "correct the package sources of the box; if packages want different versions of each other, pin "
            "nvidia_driver_version to one that the source has of all of them",
        )
