"""The CoreX driver judged: compilers by kernel, module and nodes, driver against SDK, and when the installer runs."""

from __future__ import annotations

import os

import pytest
from vllm_fleet import corex_driver
from vllm_fleet.facts import boot, corex_live

SHA = "a" * 64


def facts(**changes):
    given = {
        "kernel": "5.4.0-190-generic", "gcc": 9, "headers": True, "secure_boot": False,
        "module": {"loaded": "3.2.1", "installed": "3.2.1"}, "pci": 4, "driver": "3.2.1", "ixsmi": 4, "sdk": "3.2.3",
        "nodes": [f"/dev/iluvatar{card}" for card in range(4)], "kernels_without_module": [],
        "record": {"sha256": SHA, "kernel": "5.4.0-190-generic"},
    }  # fmt: skip
    return {**given, **changes}


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("3.10.0-1160.el7", (4,)),
        ("4.4.0-210-generic", (5,)),
        ("4.6.0", (7, 8, 9)),
        ("5.4.0-190-generic", (7, 8, 9)),
        ("5.18.0", (7, 8, 9)),
        ("5.19.0-50-generic", (12,)),
        ("6.1.0-57-amd64", (12,)),
        ("2.6.32", ()),
        ("", ()),
    ],
)
def test_compilers_by_kernel(kernel, expected):
    assert corex_driver.compilers(kernel) == expected


def reasons(results):
    return {item["check"]: (item["status"], item["reason"]) for item in results}


@pytest.mark.parametrize(
    ("changes", "gcc", "expected"),
    [
        ({}, [], {}),
        ({"gcc": 12}, [], {"compiler": ("fail", "compiler_unsuitable")}),
        ({"gcc": 12}, [12], {}),
        ({"gcc": None}, [], {"compiler": ("fail", "compiler_missing")}),
        ({"headers": False}, [], {"headers": ("fail", "headers_missing")}),
        ({"secure_boot": True}, [], {"secure_boot": ("fail", "secure_boot_on")}),
        ({"kernel": "2.6.32"}, [], {"kernel": ("fail", "kernel_unsupported")}),
    ],
)
def test_what_the_installer_needs(changes, gcc, expected):
    found = reasons(corex_driver.before_install(facts(**changes), gcc))
    assert {check: result for check, result in found.items() if result[0] != "pass"} == expected


def test_when_the_installer_runs():
    assert not corex_driver.needed(facts(), SHA)
    assert not corex_driver.needed(facts(), ""), "verified only"
    assert corex_driver.needed(facts(), "b" * 64), "another driver is wanted"
    assert corex_driver.needed(facts(record=None), SHA)
    assert corex_driver.needed(facts(kernel="5.4.0-191-generic"), SHA), "a new kernel came without the module"
    assert corex_driver.needed(facts(module={"loaded": None, "installed": None}), SHA)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"module": {"loaded": None, "installed": None}}, {"module": ("fail", "module_missing")}),
        ({"module": {"loaded": None, "installed": "3.2.1"}}, {"module": ("fail", "module_not_loaded")}),
        ({"module": {"loaded": "3.1.0", "installed": "3.2.1"}}, {"module": ("fail", "loaded_differs")}),
        ({"pci": 3}, {"cards": ("fail", "card_count_differs")}),
        ({"pci": 0}, {"cards": ("unknown", "no_card_on_bus")}),
        ({"nodes": ["/dev/iluvatar0"]}, {"device_nodes": ("fail", "device_nodes_missing")}),
        ({"driver": "4.4.0", "sdk": "4.4.0"}, {"device_nodes": ("fail", "control_node_missing")}),
        ({"ixsmi": None}, {"ixsmi": ("fail", "ixsmi_silent")}),
        ({"kernels_without_module": ["5.4.0-191-generic"]}, {"next_kernel": ("fail", "next_kernel_without_module")}),
    ],
)
def test_how_the_driver_stands(changes, expected):
    found = reasons(corex_driver.verify(facts(**changes), 4, None, {}))
    assert {check: result for check, result in found.items() if result[0] != "pass"} == expected


def test_the_control_node_is_no_card():
    nodes = [*facts()["nodes"], "/dev/itrctl"]
    found = reasons(corex_driver.verify(facts(nodes=nodes, driver="4.4.0", sdk="4.4.0"), 4, None, {}))
    assert found["device_nodes"] == ("pass", "device_nodes_there")


@pytest.mark.parametrize(
    ("driver", "sdk", "compatible", "expected"),
    [
        ("3.2.1", "3.2.3", {}, ("pass", "sdk_compatible")),
        ("4.0.0", "4.2.0", {}, ("pass", "sdk_compatible")),
        ("3.1.0", "4.2.0", {}, ("fail", "driver_older_than_sdk")),
        ("4.3.8", "3.2.3", {}, ("warn", "sdk_unproven")),
        ("4.3.8", "3.2.3", {"3.2.3": ["4.3.8"]}, ("pass", "sdk_compatible")),
        ("3.2.2", "3.2.3", {"3.2.3": ["3.2.1"]}, ("fail", "driver_not_listed")),
        (None, "3.2.3", {}, ("unknown", "sdk_unknown")),
        ("3.2.1", None, {}, ("unknown", "sdk_unknown")),
    ],
)
def test_driver_against_sdk(driver, sdk, compatible, expected):
    found = reasons(corex_driver.verify(facts(driver=driver, sdk=None), 4, sdk, compatible))
    assert found["sdk"] == expected


@pytest.mark.parametrize(
    ("loaded", "installed", "expected"),
    [
        ("3.2.1", "3.2.1", (False, [])),
        ("3.1.0", "3.2.1", (True, ["loaded_differs"])),
        (None, "3.2.1", (False, [])),
        (None, None, (False, [])),
        ("3.2.1", None, (None, ["module_not_installed"])),
        ("", "", (None, ["module_unversioned"])),
    ],
)
def test_whether_a_reboot_is_due(loaded, installed, expected):
    assert corex_driver.reboot(facts(module={"loaded": loaded, "installed": installed})) == expected


def test_kernels_that_would_boot_without_the_module(tmp_path):
    for name, module in (("6.1.0-9-amd64", True), ("6.1.0-57-amd64", False), ("6.1.0-8-amd64", False)):
        directory = tmp_path / "lib/modules" / name / "extra"
        directory.mkdir(parents=True)
        if module:
            (directory / "iluvatar.ko.xz").touch()
        (tmp_path / "boot").mkdir(exist_ok=True)
        (tmp_path / "boot" / f"vmlinuz-{name}").touch()
    found = corex_live.kernels_without_module("6.1.0-9-amd64", str(tmp_path))
    assert found == ["6.1.0-57-amd64"], "an older one is no boot's first choice"
    (tmp_path / "boot/vmlinuz-6.1.0-57-amd64").unlink()
    assert corex_live.kernels_without_module("6.1.0-9-amd64", str(tmp_path)) == [], "its modules alone boot nothing"


def test_sdk_and_secure_boot_are_read(tmp_path):
    root = str(tmp_path)
    assert corex_live.sdk(root) is None
    (tmp_path / "usr/local/corex-3.2.3").mkdir(parents=True)
    os.symlink("corex-3.2.3", tmp_path / "usr/local/corex")
    assert corex_live.sdk(root) == "3.2.3"
    assert corex_live.secure_boot(root) is False
    variables = tmp_path / "sys/firmware/efi/efivars"
    variables.mkdir(parents=True)
    (variables / "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c").write_bytes(b"\x06\0\0\0\x01")
    assert corex_live.secure_boot(root) is True


def test_a_module_without_a_version_is_told_by_its_sources(tmp_path):
    module = tmp_path / "sys/module/iluvatar"
    module.mkdir(parents=True)
    assert boot.loaded("iluvatar", str(tmp_path)) == ""
    (module / "srcversion").write_text("0A1B\n")
    assert boot.loaded("iluvatar", str(tmp_path)) == "0A1B"
    (module / "version").write_text("4.3.8\n")
    assert boot.loaded("iluvatar", str(tmp_path)) == "4.3.8"
    assert boot.loaded("nvidia", str(tmp_path)) is None
