"""The CoreX driver of a box judged: what its installer needs, what it left, and whether the SDK can work with it. Pure.

There is no DKMS: a kernel upgrade leaves the module behind. The vendor names the compilers by the kernel's version, and
gives no list of driver versions for an SDK, so a pair that nobody has named is judged by its major version.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from . import checks

#: Kernel versions from here on -> major versions of gcc that build the module (the vendor's installation guide)
COMPILERS: Tuple[Tuple[Tuple[int, int], Tuple[int, ...]], ...] = (
    ((5, 19), (12,)),
    ((4, 6), (7, 8, 9)),
    ((4, 0), (5,)),
    ((3, 0), (4,)),
)
#: with drivers from here on a box has the control node /dev/itrctl
CONTROL_NODE_FROM = (4, 4)

Facts = Mapping[str, Any]


def numbers(version: Optional[str]) -> Tuple[int, ...]:
    """Return ``(3, 2, 3)`` for ``3.2.3``; empty for none."""
    found = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def numbers_of(release: str) -> Tuple[int, ...]:
    """Return every number of a kernel release, so that ``6.1.0-57`` is newer than ``6.1.0-9``."""
    return tuple(int(part) for part in re.findall(r"\d+", release))


def compilers(kernel: str) -> Tuple[int, ...]:
    """Return the major versions of gcc that build the module for a kernel release; empty when none is known."""
    release = numbers(kernel)[:2]
    return next((majors for first, majors in COMPILERS if release >= first), ())


def needed(facts: Facts, sha256: str) -> bool:
    """Return whether the installer has to run: for this kernel it has not, or the module is gone, or it is another one.

    :param sha256: the installer's; ``""`` when the driver is only verified.
    """
    made = facts["record"] or {}
    same = made.get("sha256") == sha256 and made.get("kernel") == facts["kernel"]
    return bool(sha256) and not (same and facts["module"]["installed"] is not None)


def before_install(facts: Facts, gcc: Sequence[int]) -> List[checks.Result]:
    """Return whether the installer can build the module here; it is not started when something fails.

    :param gcc: major versions to accept instead of the table's; empty for the table.
    """
    kernel, compiler = facts["kernel"], facts["gcc"]
    accepted = tuple(gcc) or compilers(kernel)
    wanted = " or ".join(str(major) for major in accepted)
    results = []
    if not accepted:
        results.append(_fail("kernel", "kernel_unsupported", f"no compiler is known to build for kernel {kernel}", ""))
    elif compiler is None:
        fix = f"apt-get install gcc-{accepted[-1]} make"
        results.append(_fail("compiler", "compiler_missing", f"no gcc; kernel {kernel} needs {wanted}", fix))
    elif compiler not in accepted:
        fix = f"install gcc-{accepted[-1]} and make it the default, or name others in corex_driver_gcc"
        message = f"gcc {compiler}, but kernel {kernel} needs gcc {wanted}"
        results.append(_fail("compiler", "compiler_unsuitable", message, fix))
    else:
        results.append(_pass("compiler", "compiler_suitable", f"gcc {compiler} for kernel {kernel}"))
    if facts["headers"]:
        results.append(_pass("headers", "headers_there", f"headers of kernel {kernel}"))
    else:
        message = f"/lib/modules/{kernel}/build is not there"
        results.append(_fail("headers", "headers_missing", message, f"apt-get install linux-headers-{kernel} make"))
    if facts["secure_boot"]:
        fix = "switch Secure Boot off, or have the vendor sign the module for this kernel"
        results.append(_fail("secure_boot", "secure_boot_on", "the firmware takes signed modules only", fix))
    return results


def verify(
    facts: Facts, cards: Optional[int], sdk: Optional[str], compatible: Mapping[str, Sequence[str]]
) -> List[checks.Result]:
    """Return how the driver stands: module, cards, device nodes, the vendor's tool, the SDK, the next kernel.

    :param cards: how many the box should have; ``None`` for what the PCI bus shows.
    :param sdk: version of the SDK that will be used; ``None`` for the installed one.
    :param compatible: SDK version -> driver versions that are known to work with it.
    """
    expected = cards if cards is not None else facts["pci"]
    return [
        _module(facts),
        _cards(facts, expected),
        _nodes(facts, expected),
        _tool(facts),
        _sdk(facts["driver"], sdk or facts["sdk"], compatible),
        _next_kernel(facts),
    ]


def reboot(facts: Facts) -> Tuple[Optional[bool], List[str]]:
    """Return whether a reboot is needed, and why; ``None`` when it can't be told."""
    module = facts["module"]
    if module["installed"] is None:
        return (False, []) if module["loaded"] is None else (None, ["module_not_installed"])
    if module["loaded"] is None:
        return False, []  # loading it is enough
    if not module["loaded"] or not module["installed"]:
        return None, ["module_unversioned"]
    return (True, ["loaded_differs"]) if module["loaded"] != module["installed"] else (False, [])


def _module(facts: Facts) -> checks.Result:
    module, kernel = facts["module"], facts["kernel"]
    if module["installed"] is None:
        fix = "run the role with the driver's .run file: it installs for the running kernel"
        return _fail("module", "module_missing", f"kernel {kernel} has no module iluvatar", fix)
    if module["loaded"] is None:
        fix = "modprobe iluvatar; the kernel log says why it refuses"
        return _fail("module", "module_not_loaded", "the module iluvatar is installed and not loaded", fix)
    if module["loaded"] != module["installed"]:
        message = f"iluvatar {module['loaded']} is loaded, {module['installed']} is installed"
        return _fail("module", "loaded_differs", message, "reboot the box: playbooks/upgrade_driver.yml")
    return _pass("module", "module_loaded", f"iluvatar {module['loaded'] or 'without a version'} for kernel {kernel}")


def _cards(facts: Facts, expected: int) -> checks.Result:
    if facts["pci"] and facts["pci"] != expected:
        fix = "look at the kernel log, then power-cycle the box and reseat the card"
        return _fail("cards", "card_count_differs", f"{facts['pci']} cards on the bus, {expected} expected", fix)
    if not facts["pci"]:
        message = f"the bus shows no Iluvatar card; {expected} expected"
        return checks.result("cards", checks.UNKNOWN if expected else checks.FAIL, "no_card_on_bus", message)
    return _pass("cards", "card_count_as_expected", f"{expected} cards on the bus")


def _nodes(facts: Facts, expected: int) -> checks.Result:
    found = [node for node in facts["nodes"] if node != "/dev/itrctl"]
    if len(found) != expected:
        message = f"{len(found)} device nodes /dev/iluvatarN, {expected} expected"
        return _fail("device_nodes", "device_nodes_missing", message, "the kernel log names the card that failed")
    if numbers(facts["driver"])[:2] >= CONTROL_NODE_FROM and "/dev/itrctl" not in facts["nodes"]:
        message = f"driver {facts['driver']} has a control node, and /dev/itrctl is not there"
        return _fail("device_nodes", "control_node_missing", message, "reload the module; the kernel log says more")
    return _pass("device_nodes", "device_nodes_there", f"{expected} device nodes")


def _tool(facts: Facts) -> checks.Result:
    answered = facts["ixsmi"]
    if answered is None:
        fix = "run it by hand with LD_LIBRARY_PATH=/usr/local/corex/lib64; a card that hangs makes it hang"
        return _fail("ixsmi", "ixsmi_silent", "ixsmi is missing, fails, or does not answer in time", fix)
    return _pass("ixsmi", "ixsmi_answers", f"ixsmi answers for {answered} cards, driver {facts['driver'] or 'unknown'}")


def _sdk(driver: Optional[str], sdk: Optional[str], compatible: Mapping[str, Sequence[str]]) -> checks.Result:
    if not driver or not sdk:
        message = f"driver {driver or 'unknown'}, SDK {sdk or 'unknown'}: nothing to compare"
        return checks.result("sdk", checks.UNKNOWN, "sdk_unknown", message, "name the SDK in corex_driver_sdk")
    if sdk in compatible:
        named = list(compatible[sdk])
        if driver in named:
            return _pass("sdk", "sdk_compatible", f"driver {driver} is named for SDK {sdk}")
        message = f"driver {driver} is not among those for SDK {sdk}: {', '.join(named)}"
        return _fail("sdk", "driver_not_listed", message, "install one of them, or add it to corex_driver_compatible")
    mine, wanted = numbers(driver)[:1], numbers(sdk)[:1]
    if mine < wanted:
        message = f"driver {driver} is older than SDK {sdk}"
        return _fail("sdk", "driver_older_than_sdk", message, "upgrade the driver, or use an SDK of its generation")
    if mine > wanted:
        message = f"driver {driver} is of a later generation than SDK {sdk}; nobody has named the two together"
        return checks.result("sdk", checks.WARN, "sdk_unproven", message, "prove it, then add corex_driver_compatible")
    return _pass("sdk", "sdk_compatible", f"driver {driver} and SDK {sdk} are of one generation")


def _next_kernel(facts: Facts) -> checks.Result:
    without = facts["kernels_without_module"]
    if without:
        message = f"kernel {', '.join(without)} is installed and has no module iluvatar; a boot of it has no card"
        return _fail(
            "next_kernel", "next_kernel_without_module", message, "remove it, or boot it and run the role again"
        )
    return _pass("next_kernel", "next_kernel_has_module", "every newer kernel has the module")


def _fail(check: str, reason: str, message: str, fix: str) -> checks.Result:
    return checks.result(check, checks.FAIL, reason, message, fix)


def _pass(check: str, reason: str, message: str) -> checks.Result:
    return checks.result(check, checks.PASS, reason, message)


def record(sha256: str, kernel: str, time: str) -> Dict[str, Any]:
    """Return what is kept of an installation that ended well."""
    return {"schema": 1, "sha256": sha256, "kernel": kernel, "since": time}
