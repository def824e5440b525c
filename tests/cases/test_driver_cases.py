"""Public bug reports about drivers that the roles must get right. What needs a box is in molecule/nvidia_driver."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

import pytest
from vllm_fleet import versions
from vllm_fleet.driver import plan, state, verify
from vllm_fleet.errors import RefusedError

from tests.unit import driver_fixtures as given

ROOT = Path(__file__).resolve().parents[2]
NEW = "6.1.0-60-amd64"


def statuses(box, cards=None, **options):
    return {item["reason"]: item["status"] for item in verify.evaluate(box, cards or given.topology(), **options)}


def test_037_libraries_moved_under_a_loaded_module() -> None:
    """lyulyul/shine-cluster#30: running jobs go on, new processes fail. The loose package is named."""
    newer = "460.73.01"
    box = given.facts(
        loaded={"version": "460.56", "flavour": "proprietary", "nouveau_loaded": False, "parameters": {}},
        userland=newer,
        kernels=[given.kernel(version=newer)],
        packages=[given.package("libnvidia-common-460", held=False), given.package("nvidia-dkms-460")],
    )
    found = state.assess(box)
    assert (found["reboot_required"], found["reasons"]) == (True, ["loaded_differs"])
    shown = statuses(box, given.topology(gpus=None))
    assert shown["loaded_differs"] == "fail"
    assert shown["packages_not_held"] == "warn", "a hold on some names of the family is no hold"


def test_040_the_text_of_driver_610_is_read_in_both_fields() -> None:
    header = versions.parse_smi_header("| NVIDIA-SMI 610.43.02   KMD Version: 610.43.02     CUDA UMD Version: 13.3 |")
    box = given.facts(userland=header.driver, kernels=[given.kernel(version=header.driver)])
    box["loaded"]["version"] = header.driver
    assert statuses(box, version="610.43.02")["version_wanted"] == "pass"


def test_042_nouveau_owns_the_cards_and_nothing_is_called_well() -> None:
    """NVIDIA/ansible-role-nvidia-driver#44: blacklist, initramfs, reboot, and then the count is verified."""
    box = given.facts(
        loaded={"version": None, "flavour": None, "nouveau_loaded": True, "parameters": {}},
        pci=[{"bus_id": f"0000:0{slot}:00.0", "device": "0x1db4", "driver": "nouveau"} for slot in (1, 2, 3)],
        nouveau_blocked=False,
    )
    found = state.assess(box)
    assert (found["reboot_required"], found["reasons"]) == (True, ["nouveau_loaded"])
    shown = statuses(box, given.topology(gpus=None))
    assert (shown["nouveau_loaded"], shown["nouveau_not_blocked"]) == ("fail", "warn")
    assert shown["gpu_count_unknown"] == "unknown"
    # after the reboot: the driver is up, and one of the three cards is not
    assert statuses(given.facts(), gpus=3)["gpu_missing"] == "fail"


def test_044_the_next_boot_decides() -> None:
    """elementary/os-patches#155: the running kernel is right, the next one has neither headers nor module."""
    box = given.facts(kernels=[given.kernel(), given.kernel(NEW, version=None, headers=False)])
    found = state.assess(box)
    assert found["next_kernel"] == NEW
    assert found["reboot_blocked"] == ["next_boot_module_missing"]
    assert found["reboot_required"] is False, "what runs is right; a reboot is what would break it"
    shown = statuses(box)
    assert (shown["versions_match"], shown["next_boot_module_missing"]) == ("pass", "fail")
    chosen = plan.choose(given.wanted(), box, given.DEBIAN)
    assert chosen["ask"] == [f"linux-headers-{NEW}"]
    assert "linux-headers-amd64" in chosen["headers"], "the metapackage brings those of the kernel after that"


def test_084_a_lock_is_waited_for_and_other_errors_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """ansible-lockdown/UBUNTU22-CIS#215. The real lock is in molecule/nvidia_driver and molecule/toolchain."""
    import ansible.module_utils

    monkeypatch.setattr(ansible.module_utils, "__path__", [*ansible.module_utils.__path__, str(ROOT / "module_utils")])
    module = importlib.import_module("library.package_hold")

    said = ["dpkg: error: dpkg frontend lock was locked by another process with pid 24459\n", ""]

    def answer(argv, **options):
        text = said.pop(0)
        return subprocess.CompletedProcess(argv, 2 if text else 0, "", text)

    monkeypatch.setattr(module.subprocess, "run", answer)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    assert module.hold(["libcuda1"], lock_timeout=60) is None
    assert said == []
    said[:] = ["dpkg: error: unable to write\n", "not asked again"]
    assert module.hold(["libcuda1"], lock_timeout=60) == "dpkg: error: unable to write"
    said[:] = ["dpkg frontend lock was locked by another process\n"] * 3
    assert "locked" in str(module.hold(["libcuda1"], lock_timeout=0))


def test_086_headers_that_the_mirror_no_longer_has_stop_the_box() -> None:
    """NVIDIA/ansible-role-nvidia-driver#18: the newest headers do not help a kernel that is older."""
    box = given.bare(kernels=[given.kernel("3.10.0-957", version=None, headers=False)])
    chosen = plan.choose(given.wanted(), box, given.DEBIAN)
    assert "linux-headers-3.10.0-957" in chosen["ask"]
    answer = given.answer(status=100, missing=["linux-headers-3.10.0-957"])
    with pytest.raises(RefusedError) as caught:
        plan.judge(given.wanted(), chosen, box, answer)
    assert caught.value.reason == "headers_unavailable"
    assert "reboot" in caught.value.fix


def test_090_a_second_run_asks_for_nothing() -> None:
    """NVIDIA/deepops#92: purge, install and reboot on every run. A newer version in the source is no reason either."""
    assert plan.choose(given.wanted(), given.facts(), given.DEBIAN)["ask"] == []
    assert plan.choose(given.wanted(version=given.VERSION), given.facts(), given.DEBIAN)["ask"] == []
    assert state.assess(given.facts())["reboot_required"] is False
