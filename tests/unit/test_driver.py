"""The driver's decisions: generations, next boot, reboot, plan, checks, power limits."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from vllm_fleet import checks, cli
from vllm_fleet.driver import codes, generations, names, plan, power, sources, state, verify
from vllm_fleet.errors import FleetError, RefusedError, UsageError
from vllm_fleet.facts import driver as adapter
from vllm_fleet.facts import driver_live, packages
from vllm_fleet.facts import power as power_adapter
from vllm_fleet.preflight import gather

from tests.unit import driver_fixtures as given

ROOT = Path(__file__).resolve().parents[2]


# --- generations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "name", "modules"),
    [
        ("0x13c2", "maxwell", ["proprietary"]),  # GTX 970
        ("0x15f8", "pascal", ["proprietary"]),  # P100
        ("0x1b06", "pascal", ["proprietary"]),  # GTX 1080 Ti
        ("0x1db4", "volta", ["proprietary"]),  # V100
        ("0x1eb8", "turing", ["open", "proprietary"]),  # T4
        ("0x2182", "turing", ["open", "proprietary"]),  # GTX 1660 Ti
        ("0x20b0", "ampere", ["open", "proprietary"]),  # A100
        ("0x2204", "ampere", ["open", "proprietary"]),  # RTX 3090
        ("0x2330", "hopper", ["open", "proprietary"]),  # H100
        ("0x2335", "hopper", ["open", "proprietary"]),  # H200
        ("0x2342", "grace_hopper", ["open"]),  # GH200
        ("0x2684", "ada", ["open", "proprietary"]),  # RTX 4090
        ("0x2901", "blackwell", ["open"]),  # B200
        ("0x2b85", "blackwell", ["open"]),  # RTX 5090
    ],
)
def test_generation_by_pci_id(device, name, modules):
    found = generations.generation(device)
    assert found is not None and found.name == name
    assert generations.common_modules([found]) == modules


@pytest.mark.parametrize("device", ["0xffff", "0x0000", "", None, "no number"])
def test_an_id_in_no_block_is_no_guess(device):
    assert generations.generation(device) is None


def test_blocks_do_not_overlap_unless_the_inner_one_stands_first():
    seen: list[tuple[int, int]] = []
    for first, last, _ in generations._BLOCKS:
        assert first <= last
        for one, other in seen:
            assert last < one or first > other or (first <= one and other <= last), f"{first:#x} is never reached"
        seen.append((first, last))


@pytest.mark.parametrize(
    ("devices", "version", "chosen"),
    [
        (["0x2204"], "535.309.01", "proprietary"),
        (["0x2204"], "580.159.04", "open"),
        (["0x2204"], None, "open"),
        (["0x1b06", "0x2204"], "580.159.04", "proprietary"),  # a mixed box keeps the module that serves both
        (["0x2b85"], "570.10", "open"),
        (["0x1b06", "0x2b85"], "580.1", None),
    ],
)
def test_the_module_that_is_chosen(devices, version, chosen):
    found = [generations.generation(device) for device in devices]
    assert generations.default_module([item for item in found if item], version) == chosen


# --- next boot and reboot -------------------------------------------------------------------------------------------

OLD, NEW = "6.1.0-9-amd64", "6.1.0-57-amd64"


def boot(**changes: Any) -> dict[str, Any]:
    return {"grub_default": None, "saved_entry": None, "next_entry": None, "symlink": None, **changes}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (boot(grub_default="0"), NEW),
        (boot(grub_default="saved"), NEW),
        (boot(grub_default="saved", saved_entry=f"gnulinux-advanced-u>gnulinux-{OLD}-advanced-u"), OLD),
        (boot(grub_default="saved", saved_entry="Windows"), None),
        (boot(grub_default="2"), None),
        (boot(grub_default="0", next_entry=f"gnulinux-{OLD}-advanced"), OLD),
        (boot(symlink=OLD), OLD),
        (boot(symlink="6.0.0-gone"), None),
        (boot(), None),
    ],
)
def test_next_kernel(choice, expected):
    box = given.facts(kernels=[given.kernel(OLD), given.kernel(NEW)], boot=choice)
    assert state.next_kernel(box) == expected


def test_a_kernel_whose_name_begins_another_ones_is_told_apart():
    box = given.facts(
        kernels=[given.kernel("6.1.0-5"), given.kernel("6.1.0-57")], boot=boot(grub_default="x 6.1.0-57 y")
    )
    assert state.next_kernel(box) == "6.1.0-57"


def test_the_only_kernel_is_the_next_one():
    assert state.next_kernel(given.facts(boot=boot())) == given.KERNEL


def test_kernels_are_in_the_order_of_their_versions(tmp_path):
    (tmp_path / "boot").mkdir()
    for release in (NEW, OLD, "6.1.0-100-amd64", "6.12.9+bpo-amd64"):
        (tmp_path / "boot" / f"vmlinuz-{release}").touch()
    assert adapter.kernel_releases(str(tmp_path)) == [OLD, NEW, "6.1.0-100-amd64", "6.12.9+bpo-amd64"]


def assessed(**changes: Any) -> tuple[Any, list[str], list[str]]:
    found = state.assess(given.facts(**changes))
    return found["reboot_required"], found["reasons"], found["reboot_blocked"]


NOT_LOADED = {"version": None, "flavour": None, "nouveau_loaded": False, "parameters": {}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (False, [], [])),
        ({"userland": "535.400.01"}, (True, ["loaded_differs", "next_boot_differs"], ["next_boot_differs"])),
        ({"userland": None}, (None, ["installed_unknown"], [])),
        ({"loaded": NOT_LOADED}, (True, ["module_not_loaded"], [])),
        ({"loaded": {**NOT_LOADED, "nouveau_loaded": True}}, (True, ["nouveau_loaded"], [])),
        ({"loaded": NOT_LOADED, "modules_readable": False}, (None, ["loaded_unknown"], [])),
        ({"loaded": NOT_LOADED, "pci": []}, (False, ["no_gpu"], [])),
        (
            {"kernels": [given.kernel(version=None)]},
            (False, ["next_boot_module_missing"], ["next_boot_module_missing"]),
        ),
        ({"kernels": []}, (False, ["next_boot_unknown"], ["next_boot_unknown"])),
        ({"loaded": NOT_LOADED, "userland": None, "kernels": []}, (False, ["driver_absent"], [])),
    ],
)
def test_reboot(changes, expected):
    assert assessed(**changes) == expected


def test_an_upgrade_that_waits_for_its_reboot():
    newer = given.facts(userland="535.400.01", kernels=[given.kernel(version="535.400.01")])
    found = state.assess(newer)
    assert (found["reboot_required"], found["reboot_blocked"]) == (True, [])
    assert (found["installed"], found["loaded"], found["next_boot"]) == ("535.400.01", given.VERSION, "535.400.01")


def test_another_module_of_the_same_version_needs_a_reboot_too():
    box = given.facts()
    box["kernels"][0]["module"]["flavour"] = "open"
    assert state.assess(box)["reasons"] == ["flavour_differs"]
    assert state.assess(box)["reboot_required"] is True


# --- the adapter ----------------------------------------------------------------------------------------------------


EFI = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


@pytest.mark.parametrize(
    ("content", "expected"), [(b"\6\0\0\0\1", True), (b"\6\0\0\0\0", False), (b"\6\0", None), (None, None)]
)
def test_secure_boot(tmp_path, content, expected):
    assert adapter.secure_boot(str(tmp_path)) is False, "no EFI at all"
    (tmp_path / EFI).parent.mkdir(parents=True)
    if content is not None:
        (tmp_path / EFI).write_bytes(content)
    assert adapter.secure_boot(str(tmp_path)) is expected


def test_nouveau_is_blocked_by_a_line_and_not_by_a_comment(tmp_path):
    directory = tmp_path / "etc/modprobe.d"
    directory.mkdir(parents=True)
    (directory / "a.conf").write_text("# blacklist nouveau\nblacklist nouveau-other\n")
    (directory / "b.disabled").write_text("blacklist nouveau\n")
    assert not adapter.nouveau_blocked(str(tmp_path))
    (directory / "a.conf").write_text("options x y\nblacklist nouveau\n")
    assert adapter.nouveau_blocked(str(tmp_path))


def test_the_module_is_the_one_that_depmod_lists(tmp_path):
    """A file that depmod does not know is not found at a boot; one of the kernel's own loses to DKMS's."""
    directory = tmp_path / "lib/modules/k"
    (directory / "updates/dkms").mkdir(parents=True)
    (directory / "updates/dkms/nvidia-current.ko").touch()
    assert adapter.module_on_disk("k", str(tmp_path)) is None
    (directory / "modules.dep").write_text(
        "kernel/drivers/video/nvidia.ko.zst:\nupdates/dkms/nvidia-current.ko: x.ko\nupdates/dkms/nvidia-drm.ko:\n"
    )
    found = adapter.module_on_disk("k", str(tmp_path))
    assert found == {"version": None, "flavour": None, "path": "/lib/modules/k/updates/dkms/nvidia-current.ko"}


def test_nvswitch(tmp_path):
    device = tmp_path / "sys/bus/pci/devices/0000:05:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    assert not adapter.nvswitch(str(tmp_path))
    (device / "class").write_text("0x068000\n")
    assert adapter.nvswitch(str(tmp_path))


def test_what_dpkg_says():
    text = (
        "libcuda1\t535.1-1\thi \nnvidia-smi\t535.1-1\tii \nhalf\t1\tiF \ngone\t1\trc \nnever\t\tun \nbroken\t1\tiiR\n"
    )
    found = {item["name"]: (item["held"], item["state"]) for item in packages.parse_installed(text)}
    assert found == {
        "libcuda1": (True, "ok"),
        "nvidia-smi": (False, "ok"),
        "half": (False, "half"),
        "broken": (False, "half"),
    }


def test_what_apt_would_do():
    text = (
        "Remv nvidia-old [1]\nInst libcuda1 [535.1-1] (535.2-1 Debian:12/stable [amd64]) []\n"
        "Inst libnvidia-ml1:amd64 (535.2-1 Debian:12/stable [amd64])\nConf libcuda1 (535.2-1 Debian)\n"
    )
    found = packages.parse_simulation(text)
    assert found == {"installs": {"libcuda1": "535.2-1", "libnvidia-ml1": "535.2-1"}, "removes": ["nvidia-old"]}


def test_what_the_source_files_offer(tmp_path):
    directory = tmp_path / "etc/apt/sources.list.d"
    directory.mkdir(parents=True)
    (tmp_path / "etc/apt/sources.list").write_text(
        "# deb http://d bookworm non-free\ndeb [arch=amd64 signed-by=/k.gpg] http://d bookworm main contrib # x\n"
        "deb-src http://d bookworm non-free\n"
    )
    (directory / "debian.sources").write_text(
        "Types: deb deb-src\nURIs: http://d\nSuites: trixie\n trixie-updates\nComponents: main non-free\n"
        "Signed-By: /k.pgp\n\n"
        "Enabled: no\nTypes: deb\nSuites: trixie\nComponents: contrib\n"
    )
    (directory / "ours.sources").write_text("Types: deb\nSuites: trixie\nComponents: contrib\n")
    (directory / "old.bak").write_text("deb http://d bookworm non-free\n")
    assert packages.sources("/etc/apt/sources.list.d/ours.sources", str(tmp_path)) == [
        {"suites": ["bookworm"], "components": ["main", "contrib"], "signed_by": "/k.gpg"},
        {"suites": ["trixie", "trixie-updates"], "components": ["main", "non-free"], "signed_by": "/k.pgp"},
    ]


def debian_source(*components: str, key: str | None = None) -> str:
    box = given.bare(sources=[{"suites": ["bookworm"], "components": list(components), "signed_by": key}])
    return plan.choose(given.wanted(), box, given.DEBIAN)["files"][sources.SOURCE_FILE]


def test_non_free_is_added_once_and_with_the_key_that_the_archive_has_already():
    assert f"Signed-By: {sources.ARCHIVE_KEY}" in debian_source("main")
    assert "Signed-By: /k.pgp" in debian_source("main", "contrib", key="/k.pgp")
    assert debian_source("main", "contrib", "non-free", "non-free-firmware") == ""
    assert "bookworm-security" in debian_source("main")


@pytest.mark.parametrize(
    ("version", "expected"),
    [("535.309.01-0+deb12u1", "535.309.01"), ("580.126.20-0ubuntu3", "580.126.20"), ("1:580.1+x", "580.1")],
)
def test_the_drivers_version_in_a_packages(version, expected):
    assert names.upstream(version) == expected


def test_the_preflight_reads_the_box_and_keeps_the_versions_that_nvml_told(tmp_path):
    (tmp_path / "boot").mkdir()
    (tmp_path / f"boot/vmlinuz-{NEW}").touch()
    module = tmp_path / f"lib/modules/{NEW}"
    module.mkdir(parents=True)
    facts = {"vendor": "nvidia", "driver": {"loaded": "580.1", "userland": "580.1"}}
    found = gather.read_box(facts, str(tmp_path))["driver"]
    assert (found["installed"], found["loaded"], found["next_kernel"]) == ("580.1", "580.1", NEW)
    assert found["reboot_blocked"] == ["next_boot_module_missing"]
    assert gather.read_box({**facts, "vendor": "corex"}, str(tmp_path))["driver"] is None
    assert gather.read_box(None, str(tmp_path))["driver"] is None


# --- the plan -------------------------------------------------------------------------------------------------------


def refused(want: dict[str, Any], box: dict[str, Any], system: dict[str, str] = given.DEBIAN) -> str:
    with pytest.raises(RefusedError) as caught:
        plan.choose(want, box, system)
    assert caught.value.fix, "a refusal names the way out"
    return caught.value.reason


def test_a_bare_debian_box():
    chosen = plan.choose(given.wanted(version=given.VERSION), given.bare(), given.DEBIAN)
    assert chosen["flavour"] == "proprietary"
    assert chosen["headers"] == [f"linux-headers-{given.KERNEL}", "linux-headers-amd64"]
    assert chosen["packages"][0] == "nvidia-kernel-dkms"
    assert chosen["ask"] == chosen["headers"] + chosen["packages"]
    assert "non-free-firmware" in chosen["files"][sources.SOURCE_FILE]
    assert f"Pin: version {given.VERSION}*" in chosen["files"][sources.PIN_FILE]
    final = plan.judge(given.wanted(version=given.VERSION), chosen, given.bare(), given.answer())
    assert final["version"] == given.VERSION
    assert "nvidia-kernel-dkms=535.309.01-0+deb12u1" in final["install"]
    assert f"linux-headers-{given.KERNEL}=6.1.192-3" in final["install_headers"]


@pytest.mark.parametrize(
    ("want", "box", "reason"),
    [
        ({}, {"pci": []}, "no_gpu"),
        ({}, {"pci": [{"bus_id": "0000:01:00.0", "device": "0xfffe", "driver": None}]}, "unknown_gpu"),
        ({"flavour": "open"}, {"pci": [{"bus_id": "x", "device": "0x1b06", "driver": None}]}, "flavour_unsupported"),
        (
            {"flavour": "proprietary"},
            {"pci": [{"bus_id": "x", "device": "0x2b85", "driver": None}]},
            "flavour_unsupported",
        ),
        ({"version": "535.1"}, {"pci": [{"bus_id": "x", "device": "0x2b85", "driver": None}]}, "driver_too_old"),
        ({"version": "590.1"}, {"pci": [{"bus_id": "x", "device": "0x1b06", "driver": None}]}, "driver_too_new"),
        (
            {},
            {"pci": [{"bus_id": "x", "device": d, "driver": None} for d in ("0x1b06", "0x2b85")]},
            "no_common_module",
        ),
        ({}, {"secure_boot": True}, "secure_boot"),
        ({}, {"secure_boot": True, "mok_enrolled": False}, "secure_boot"),
        ({}, {"secure_boot": None}, "secure_boot_unknown"),
        ({"modules": "signed"}, {}, "no_signed_modules"),
        ({}, {"kernels": []}, "no_kernel_installed"),
        ({}, {"userland": "580.1"}, "mixed_installation"),
        ({"source": "run_file", "version": "580.1"}, {"packages": given.PACKAGES}, "mixed_installation"),
        ({"source": "run_file"}, {}, "version_needed"),
        ({}, {"nvswitch": True}, "fabric_manager_unavailable"),
    ],
)  # fmt: skip
def test_refused_before_anything_changes(want, box, reason):
    assert refused(given.wanted(**want), given.bare(**box)) == reason


def test_secure_boot_names_the_steps():
    with pytest.raises(RefusedError) as caught:
        plan.choose(given.wanted(), given.bare(secure_boot=True), given.DEBIAN)
    for word in ("mokutil --import", "reboot", "Enroll MOK", "firmware"):
        assert word in caught.value.fix


def test_an_enrolled_key_and_signed_modules_pass_secure_boot():
    assert plan.choose(given.wanted(), given.bare(secure_boot=True, mok_enrolled=True), given.DEBIAN)["packages"]
    want = given.wanted(modules="signed", version="580.1")
    chosen = plan.choose(want, given.bare(secure_boot=True), given.UBUNTU)
    assert f"linux-modules-nvidia-580-server-open-{given.KERNEL}" in chosen["packages"]
    assert not any("dkms" in name for name in chosen["packages"])


def test_the_inventory_may_name_the_packages_itself():
    want = given.wanted(source="nvidia_repository", packages=["nvidia-open-580"], repository={
        "uri": "https://r", "suite": "/", "components": "", "keyring": "/k.gpg"})  # fmt: skip
    chosen = plan.choose(want, given.bare(), given.UBUNTU)
    assert chosen["packages"] == ["nvidia-open-580"]
    assert "Signed-By: /k.gpg" in chosen["files"][sources.SOURCE_FILE]


def test_ubuntu_needs_a_branch():
    assert refused(given.wanted(), given.bare(), given.UBUNTU) == "branch_needed"
    chosen = plan.choose(given.wanted(branch=570), given.bare(nvswitch=True), given.UBUNTU)
    assert {"nvidia-dkms-570-server-open", "nvidia-fabricmanager-570"} <= set(chosen["packages"])


def test_the_header_metapackages_are_those_of_the_images():
    box = given.bare(
        packages=[given.package("linux-image-generic-hwe-24.04", "6.8"), given.package("linux-image-6.8.0-1", "6")]
    )
    assert sources.header_packages(box)[-1] == "linux-headers-generic-hwe-24.04"
    box = given.bare(packages=[], kernels=[given.kernel("6.1.0-57-cloud-amd64", None, False)])
    assert sources.header_packages(box) == ["linux-headers-6.1.0-57-cloud-amd64", "linux-headers-cloud-amd64"]


@pytest.mark.parametrize(
    ("changes", "want", "reason"),
    [
        ({"status": 100, "missing": ["linux-headers-6.1.0-57-amd64"]}, {}, "headers_unavailable"),
        ({"status": 100, "missing": ["nvidia-kernel-dkms"]}, {}, "packages_unavailable"),
        ({"status": 100, "output": "E: broken\n"}, {}, "apt_refuses"),
        ({"status": 100, "output": "W: GPG error: NO_PUBKEY 3BF863CC\n"}, {}, "repository_key"),
        ({"removes": ["openssh-server"]}, {}, "removes_packages"),
        ({}, {"version": "535.1.1"}, "version_unavailable"),
    ],
)
def test_refused_by_what_apt_would_do(changes, want, reason):
    chosen = plan.choose(given.wanted(**want), given.bare(), given.DEBIAN)
    with pytest.raises(RefusedError) as caught:
        plan.judge(given.wanted(**want), chosen, given.bare(), given.answer(**changes))
    assert caught.value.reason == reason
    assert caught.value.fix


def test_a_module_older_than_the_libraries_is_refused():
    """Debian 12 has had the open module at 535.261 beside libraries at 535.309."""
    want = given.wanted(flavour="open")
    chosen = plan.choose(want, given.bare(), given.DEBIAN)
    found = given.answer()
    found["installs"]["nvidia-open-kernel-dkms"] = "535.261.03-1"
    del found["installs"]["nvidia-kernel-dkms"]
    with pytest.raises(RefusedError) as caught:
        plan.judge(want, chosen, given.bare(), found)
    assert caught.value.reason == "versions_differ"
    assert "libcuda1 535.309.01" in caught.value.message


def test_the_source_decides_the_version_and_a_card_it_does_not_know_is_refused():
    box = given.bare(pci=[{"bus_id": "x", "device": "0x2b85", "driver": None}])
    want = given.wanted(
        source="nvidia_repository", repository={"uri": "u", "suite": "/", "components": "", "keyring": "k"}
    )
    chosen = plan.choose(want, box, given.DEBIAN)
    found = given.answer()
    found["installs"]["nvidia-kernel-open-dkms"] = found["installs"].pop("nvidia-kernel-dkms")
    with pytest.raises(RefusedError) as caught:
        plan.judge(want, chosen, box, found)
    assert caught.value.reason == "driver_too_old"


def test_half_installed_packages_are_asked_for_again():
    box = given.facts()
    box["packages"][1]["state"] = "half"
    assert plan.choose(given.wanted(), box, given.DEBIAN)["ask"] == ["libcuda1"]


def test_a_run_without_a_wish_keeps_the_module_that_is_installed():
    box = given.facts(packages=[given.package("nvidia-open-kernel-dkms")])
    assert plan.choose(given.wanted(), box, given.DEBIAN)["flavour"] == "open"
    assert plan.choose(given.wanted(flavour="proprietary"), box, given.DEBIAN)["flavour"] == "proprietary"


def test_debian_carries_one_branch_and_a_card_it_does_not_know_is_refused():
    box = given.bare(pci=[{"bus_id": "x", "device": "0x2b85", "driver": None}])
    assert refused(given.wanted(), box) == "driver_too_old"
    assert plan.choose(given.wanted(), given.bare(), given.DEBIAN)["flavour"] == "proprietary"


def test_another_version_moves_the_whole_family():
    ask = plan.choose(given.wanted(version="535.400.01"), given.facts(), given.DEBIAN)["ask"]
    assert {"nvidia-kernel-dkms", "libcuda1", "libnvidia-ml1", "nvidia-smi"} <= set(ask)


def test_a_container_without_the_running_kernel_is_told_and_not_refused():
    chosen = plan.choose(given.wanted(), given.bare(running_kernel="6.18.0-host"), given.DEBIAN)
    assert "6.18.0-host" in chosen["warnings"][0]


# --- checks ---------------------------------------------------------------------------------------------------------


def reasons(box: dict[str, Any], cards: dict[str, Any] | None = None, **options: Any) -> dict[str, str]:
    results = verify.evaluate(box, given.topology() if cards is None else cards, **options)
    return {item["reason"]: item["status"] for item in results}


def test_a_healthy_box_passes_every_check():
    found = reasons(given.facts(), version=given.VERSION, gpus=2, p2p_module=False)
    assert set(found.values()) == {"pass"}
    assert {"versions_match", "next_boot_ready", "packages_held", "gpu_count_ok", "persistence_on"} <= set(found)


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        (given.facts(kernels=[given.kernel(OLD, None), given.kernel(NEW)]), "kernel_without_module"),
        (given.facts(nouveau_blocked=False), "nouveau_not_blocked"),
        (given.facts(packages=[given.package("libcuda1", held=False)]), "packages_not_held"),
        (given.facts(packages=[given.package("libcuda1", state="half")]), "packages_half_installed"),
        (given.facts(packages=[]), "no_packages"),
        (given.facts(nvswitch=True), "fabric_manager_missing"),
        (
            given.facts(nvswitch=True, packages=[given.package("nvidia-fabricmanager", "535.1-1")]),
            "fabric_manager_differs",
        ),
        (
            given.facts(nvswitch=True, packages=[given.package("nvidia-fabricmanager-535")], fabric_manager="failed"),
            "fabric_manager_down",
        ),
        (
            given.facts(nvswitch=True, packages=[given.package("nvidia-fabricmanager")], fabric_manager="active"),
            "fabric_manager_ok",
        ),
    ],
)
def test_what_the_box_shows(box, reason):
    assert reason in reasons(box)


def changed_cards(gpu: dict[str, Any] | None = None, card: dict[str, Any] | None = None) -> dict[str, Any]:
    found = given.topology()
    found["gpus"][1].update(gpu or {})
    found["extra"]["cards"][1].update(card or {})
    return found


@pytest.mark.parametrize(
    ("cards", "reason", "status"),
    [
        (changed_cards({"health": "lost"}), "gpu_missing", "fail"),
        (changed_cards(card={"persistence": False}), "persistence_off", "warn"),
        (changed_cards(card={"persistence": None}), "persistence_unknown", "unknown"),
        (changed_cards({"pcie": {"width_max": 16, "width_current": 8}}), "link_width_degraded", "warn"),
        (
            changed_cards({"pcie": {"width_max": 16, "width_current": 8}}, {"slot_width_max": 8}),
            "link_width_full",
            "pass",
        ),
        (changed_cards({"pcie": {"width_max": 16, "width_current": None}}), "link_width_unknown", "unknown"),
    ],
)  # fmt: skip
def test_what_the_cards_show(cards, reason, status):
    assert reasons(given.facts(), cards)[reason] == status


def test_an_unreadable_driver_is_unknown_and_never_a_pass():
    found = reasons(given.facts(), given.topology(gpus=None))
    assert {found[f"{name}_unknown"] for name in ("gpu_count", "persistence", "link_width")} == {"unknown"}


def test_a_container_is_judged_by_the_cards_that_it_was_given():
    cards = given.topology(host={"iommu": "off", "virtualization": "container"})
    bus = [{"bus_id": f"0000:0{slot}:00.0", "device": "0x2335", "driver": "nvidia"} for slot in range(1, 9)]
    box = given.facts(pci=bus, kernels=[], nouveau_blocked=False)
    found = reasons(box, cards)
    assert found["gpu_count_ok"] == "pass"
    assert (found["nouveau_unknown"], found["kernels_unknown"], found["next_boot_unknown"]) == ("unknown",) * 3
    cards["host"]["virtualization"] = "none"
    assert reasons(box, cards)["gpu_missing"] == "fail"


def test_fewer_cards_than_wanted():
    assert reasons(given.facts(), gpus=4)["gpu_missing"] == "fail"


def test_the_p2p_module_is_reported_and_nothing_more():
    cards = given.topology(
        host={"iommu": "translated", "virtualization": "none"}, pairs=[{"gpus": [0, 1], "acs": True}]
    )
    cards["gpus"][0]["bar1_total_mib"] = 256
    found = reasons(given.facts(), cards, p2p_module=True)
    assert {"p2p_module_not_open", "p2p_iommu", "p2p_small_bar", "p2p_acs"} <= set(found)
    box = given.facts()
    box["loaded"]["flavour"] = box["kernels"][0]["module"]["flavour"] = "open"
    assert reasons(box, p2p_module=True)["p2p_module_ok"] == "pass"
    assert "p2p_module_ok" not in reasons(box), "only where it is asked for"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus.", {"gpu_fell_off_bus", "xid"}),
        ("nvidia 0000:01:00.0: GPU has fallen off the bus.", {"gpu_fell_off_bus"}),  # no Xid at all
        ("NVRM: Xid (PCI:0000:01:00): 48, pid='<unknown>', DBE", {"xid"}),
        ("NVRM: Xid (PCI:0000:01:00): 31, pid=77, name=python, MMU Fault", {"kernel_log_clean"}),
        ("usb 1-1: device descriptor read", {"kernel_log_clean"}),
    ],
)
def test_the_kernel_log(line, expected):
    assert {item["reason"] for item in verify.kernel_log([line])} == expected


def test_an_unreadable_kernel_log_is_unknown():
    assert [item["status"] for item in verify.kernel_log(None)] == [checks.UNKNOWN]


def test_every_code_is_in_the_operators_page():
    page = (ROOT / "docs/drivers.md").read_text()
    rows = {word for cell in re.findall(r"^\| (`[^|]+`) \|", page, re.M) for word in re.findall(r"`(\w+)`", cell)}
    refusals = {
        word
        for path in (
            "module_utils/vllm_fleet/driver/plan.py",
            "module_utils/vllm_fleet/driver/sources.py",
            "library/nvidia_driver_plan.py",
        )
        for word in re.findall(r'RefusedError\(\s*"(\w+)"', (ROOT / path).read_text())
    } | {"repository_key", "apt_refuses"}
    needing = {name for name, code in codes.CODES.items() if code.status != checks.PASS}
    assert needing <= rows
    assert refusals <= rows


def test_every_finding_has_a_fix():
    assert [name for name, code in codes.CODES.items() if code.status != checks.PASS and not code.fix] == []


# --- power limits ---------------------------------------------------------------------------------------------------

CARDS = [
    {"index": i, "uuid": f"GPU-{i}abc", "bus_id": "", "limit_mw": 350000, "min_mw": 100000, "max_mw": 350000}
    for i in (0, 1)
]


def test_the_exact_name_wins():
    found = power.changes({"all": 280, "GPU-1a": 250}, CARDS)
    assert [(item.gpu, item.after) for item in found] == [(0, 280000), (1, 250000)]
    assert power.changes({"1": 350}, CARDS) == [], "as it is already"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"all": 90}, "power_out_of_range"),
        ({"0": 351}, "power_out_of_range"),
        ({"7": 300}, "unknown_gpu"),
        ({"GPU-9": 300}, "unknown_gpu"),
        ({"all": "300"}, "bad_power_limits"),
        ({"all": True}, "bad_power_limits"),
    ],
)
def test_limits_that_are_refused_before_one_is_set(limits, reason):
    with pytest.raises(UsageError) as caught:
        power.changes(limits, CARDS)
    assert caught.value.reason == reason
    assert isinstance(caught.value, FleetError)


# --- the program ----------------------------------------------------------------------------------------------------


@pytest.fixture
def live(monkeypatch):
    """Let the program see a box that a test makes."""

    def show(box: dict[str, Any], cards: Any = None, log: Any = ()) -> None:
        monkeypatch.setattr(
            driver_live, "read", lambda timeout=20.0: (box, given.topology() if cards is None else cards)
        )
        monkeypatch.setattr(driver_live, "kernel_log", lambda: log)

    return show


def test_the_program_prints_one_object_and_its_status_says_whether_it_is_well(live, capsys):
    live(given.facts())
    assert cli.main(["driver", "--json", "--version", given.VERSION, "--gpus", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["driver"]["loaded"]) == ("pass", given.VERSION)
    assert cli.main(["driver", "--json", "--gpus", "4"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "fail"


def test_a_person_reads_the_versions_and_the_way_out(live, capsys):
    live(given.facts(userland="535.400.01", kernels=[given.kernel(version="535.400.01")]))
    assert cli.main(["driver"]) == 1
    out = capsys.readouterr().out
    assert "reboot due:  yes (loaded_differs)" in out
    assert "fix: drain the box and reboot it" in out


def test_the_drift_check_leaves_its_result_also_when_something_fails(live, capsys, tmp_path):
    target = tmp_path / "drift.json"
    live(given.facts(), log=["NVRM: GPU at 0000:01:00.0 has fallen off the bus", "GPU has fallen off the bus."])
    assert cli.main(["drift-check", "--result", str(target)]) == 1
    found = json.loads(target.read_text())
    assert found["status"] == "fail" and found["schema"] == 1
    assert "gpu_fell_off_bus" in codes_of(found)
    live(given.facts(), log=["nothing of note"])
    assert cli.main(["drift-check", "--result", str(target)]) == 0
    assert json.loads(target.read_text())["status"] == "pass"


def codes_of(report: dict[str, Any]) -> set[str]:
    return {item["reason"] for item in report["results"]}


def test_power_limits_are_set_once(monkeypatch, capsys, tmp_path):
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(power_adapter, "read", lambda: CARDS)
    monkeypatch.setattr(power_adapter, "write", lambda uuid, milliwatts: asked.append((uuid, milliwatts)))
    limits = tmp_path / "limits.json"
    limits.write_text('{"all": 280}')
    assert cli.main(["power-limits", "--file", str(limits), "--check"]) == 0
    assert asked == []
    assert cli.main(["power-limits", "--file", str(limits)]) == 0
    assert asked == [("GPU-0abc", 280000), ("GPU-1abc", 280000)]
    limits.write_text("{}")
    assert cli.main(["power-limits", "--file", str(limits)]) == 0
    limits.write_text("[1]")
    assert cli.main(["power-limits", "--file", str(limits)]) == 2
    assert "bad_power_limits" in capsys.readouterr().err


def test_a_limit_is_set_by_uuid_and_an_error_is_told():
    class Library:
        said: list[Any] = []

        def nvmlInit(self):
            self.said.append("init")

        def nvmlShutdown(self):
            self.said.append("shutdown")

        def nvmlDeviceGetHandleByUUID(self, uuid):
            return uuid

        def nvmlDeviceSetPowerManagementLimit(self, handle, milliwatts):
            if milliwatts < 1000:
                raise RuntimeError("Invalid Argument")
            self.said.append((handle, milliwatts))

    library = Library()
    assert power_adapter.write("GPU-0", 280000, library) is None
    assert library.said == ["init", ("GPU-0", 280000), "shutdown"]
    assert power_adapter.write("GPU-0", 1, library) == "Invalid Argument"
    assert library.said[-1] == "shutdown", "also after an error"


# --- the fence ------------------------------------------------------------------------------------------------------


def test_the_fence_is_read_as_it_is_meant(monkeypatch):
    import ansible.module_utils

    monkeypatch.setattr(ansible.module_utils, "__path__", [*ansible.module_utils.__path__, str(ROOT / "module_utils")])
    module = importlib.import_module("library.package_hold")
    found = module.regular_expression("*nvidia*", ["nvidia-container*", "libnvidia-container?"])
    fenced = ["nvidia-smi", "libnvidia-ml1", "linux-modules-nvidia-580-6.8", "libnvidia-container-x11"]
    assert [name for name in fenced if not re.match(found, name)] == []
    assert [
        name for name in ("nvidia-container-toolkit", "libnvidia-container1", "libcuda1") if re.match(found, name)
    ] == []
    assert re.match(module.regular_expression("libcuda1", []), "libcuda1-i386") is None
    assert "\\" not in module.fence_text(["*nvidia*", "libcuda1"], ["nvidia-cuda-*"]), "apt.conf has its own idea of it"
