"""The outcomes of the driver's checks, each with its status and the way out. docs/drivers.md has one line for each."""

from __future__ import annotations

from typing import Dict, NamedTuple

from .. import checks


class Code(NamedTuple):
    """One outcome: the check that it belongs to, its status, and what to do about it."""

    check: str
    status: str
    fix: str = ""


_REBOOT = "drain the box and reboot it (playbooks/drivers.yml, with the reboot allowed)"
CODES: Dict[str, Code] = {
    "versions_match": Code("driver_versions", checks.PASS),
    "loaded_differs": Code("driver_versions", checks.FAIL, _REBOOT + ", then see why the packages were not held"),
    "flavour_differs": Code("driver_versions", checks.WARN, _REBOOT),
    "module_not_loaded": Code(
        "driver_versions", checks.FAIL, f"{_REBOOT}; or modprobe nvidia, and read its error in dmesg"
    ),
    "nouveau_loaded": Code(
        "driver_versions", checks.FAIL, f"run playbooks/drivers.yml (it blocks nouveau), then {_REBOOT}"
    ),
    "driver_absent": Code("driver_versions", checks.FAIL, "run playbooks/drivers.yml"),
    "no_gpu": Code("driver_versions", checks.FAIL, "no NVIDIA card is on the PCI bus: look at seating and power"),
    "installed_unknown": Code(
        "driver_versions", checks.UNKNOWN, "libnvidia-ml.so.1 was not found: ldconfig -p | grep nvidia"
    ),
    "loaded_unknown": Code("driver_versions", checks.UNKNOWN, "run as root on the box itself"),
    "version_wanted": Code("driver_wanted", checks.PASS),
    "version_differs": Code(
        "driver_wanted", checks.FAIL, "run playbooks/drivers.yml, or correct nvidia_driver_version"
    ),
    "next_boot_ready": Code("next_boot", checks.PASS),
    "next_boot_module_missing": Code(
        "next_boot",
        checks.FAIL,
        "DON'T reboot. Install the headers of that kernel and its metapackage, then dkms autoinstall -k KERNEL; read "
        "/var/lib/dkms/*/*/build/make.log if it fails",
    ),
    "next_boot_differs": Code(
        "next_boot", checks.FAIL, "DON'T reboot. dkms autoinstall -k KERNEL, or run playbooks/drivers.yml"
    ),
    "next_boot_unknown": Code(
        "next_boot", checks.UNKNOWN, "no kernel in /boot, or the boot loader does not say which is next"
    ),
    "every_kernel_has_module": Code("kernels", checks.PASS),
    "kernel_without_module": Code(
        "kernels", checks.WARN, "remove the old kernel, or install its headers and dkms autoinstall"
    ),
    "kernels_unknown": Code(
        "kernels", checks.UNKNOWN, "no kernel is installed here: the host below this container has them"
    ),
    "nouveau_blocked": Code("nouveau", checks.PASS),
    "nouveau_not_blocked": Code(
        "nouveau", checks.WARN, "run playbooks/drivers.yml: it blocks nouveau and rebuilds the initramfs"
    ),
    "nouveau_unknown": Code("nouveau", checks.UNKNOWN, "look on the host below this container"),
    "packages_held": Code("packages", checks.PASS),
    "packages_not_held": Code(
        "packages", checks.WARN, "apt-mark hold the named packages, or run playbooks/drivers.yml"
    ),
    "packages_half_installed": Code("packages", checks.FAIL, "dpkg --configure -a, then run playbooks/drivers.yml"),
    "no_packages": Code("packages", checks.UNKNOWN, "the driver came without packages (a .run file, or the image)"),
    "gpu_count_ok": Code("gpu_count", checks.PASS),
    "gpu_missing": Code(
        "gpu_count", checks.FAIL, "read dmesg for Xid and NVRM lines; power-cycle the box; reseat the card"
    ),
    "gpu_count_unknown": Code("gpu_count", checks.UNKNOWN, "the driver gives no answer: see driver_versions"),
    "persistence_on": Code("persistence", checks.PASS),
    "persistence_off": Code("persistence", checks.WARN, "systemctl enable --now nvidia-persistenced"),
    "persistence_unknown": Code("persistence", checks.UNKNOWN, "the driver gives no answer: see driver_versions"),
    "link_width_full": Code("link_width", checks.PASS),
    "link_width_degraded": Code(
        "link_width", checks.WARN, "reseat the card or its riser; check the slot's lanes in the firmware"
    ),
    "link_width_unknown": Code("link_width", checks.UNKNOWN, "the link could not be read"),
    "fabric_not_needed": Code("fabric", checks.PASS),
    "fabric_manager_ok": Code("fabric", checks.PASS),
    "fabric_manager_missing": Code("fabric", checks.FAIL, "run playbooks/drivers.yml; CUDA answers 802 without it"),
    "fabric_manager_differs": Code("fabric", checks.FAIL, "install the fabric manager of exactly the driver's version"),
    "fabric_manager_down": Code("fabric", checks.FAIL, "systemctl status nvidia-fabricmanager; systemctl restart it"),
    "kernel_log_clean": Code("kernel_log", checks.PASS),
    "xid": Code(
        "kernel_log", checks.WARN, "look the number up in NVIDIA's Xid table; a repeated one means draining the box"
    ),
    "gpu_fell_off_bus": Code("kernel_log", checks.FAIL, "drain the box and power-cycle it (a reboot is not enough)"),
    "kernel_log_unknown": Code("kernel_log", checks.UNKNOWN, "journalctl -k gave no answer: run as root"),
    "p2p_module_ok": Code("p2p_module", checks.PASS),
    "p2p_module_not_open": Code(
        "p2p_module", checks.FAIL, "the patched module is an open one: set nvidia_driver_flavour: open"
    ),
    "p2p_iommu": Code(
        "p2p_module", checks.WARN, "boot with iommu=pt, or prove the transfers with vllm-fleet p2p-check"
    ),
    "p2p_small_bar": Code("p2p_module", checks.WARN, "turn Above 4G Decoding and Resizable BAR on in the firmware"),
    "p2p_acs": Code(
        "p2p_module", checks.WARN, "turn ACS off in the firmware, or prove the transfers with vllm-fleet p2p-check"
    ),
    "p2p_module_unknown": Code("p2p_module", checks.UNKNOWN, "the module's flavour or the cards could not be read"),
}


def say(reason: str, message: str) -> checks.Result:
    """Return the result of a reason code."""
    code = CODES[reason]
    return checks.result(code.check, code.status, reason, message, code.fix)
