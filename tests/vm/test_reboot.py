"""Reboots of a real kernel: the decision, the proof, and what happens to a run that is interrupted.

The tests run in the order of the file on one machine; each leaves it up. The module ``nvidia`` is one that does nothing
but has a version, and the GPUs are the simulator's; kernel, initramfs, systemd, SSH and the reboots are real.
"""

from __future__ import annotations

import pytest
from conftest import WAITING

from lab import vm

# An emulated processor takes minutes for an initramfs or a reboot, and a busy machine twice as long.
pytestmark = pytest.mark.timeout(1500)

UPDATES = "/lib/modules/$(uname -r)/updates/nvidia.ko"
DUE = {"reboot_required": True, "reboot_reasons": ["loaded_differs"], "reboot_module": "nvidia"}


def install(machine, digit):
    """Put another version of the module on the disk, as an upgrade does: the loaded one stays."""
    machine.run(f"sed 's/550\\.000\\.01/550.000.0{digit}/' /opt/kernel/nvidia.ko > {UPDATES} && depmod")
    assert machine.run("modinfo -F version nvidia") == f"550.000.0{digit}"


@pytest.fixture
def same_boot(machine):
    """Fail unless the test leaves the machine in the boot that it found."""
    before = machine.boot_id()
    yield
    assert machine.boot_id() == before


def test_no_need_no_reboot(machine, play, same_boot):
    played = play("reboot", reboot_required=False, reboot_allowed=True)
    assert (played.status, played.changed) == (0, 0), played.text


def test_an_unknown_need_is_said_and_is_no_reboot(machine, play, same_boot):
    played = play("reboot", reboot_allowed=True)
    assert played.status == 0, played.text
    assert "reboot_unknown" in played.flat


def test_nobody_has_decided(machine, play, same_boot):
    install(machine, 2)
    played = play("reboot", **DUE)
    assert played.status != 0
    assert "nobody has decided about it. Fix: set reboot_allowed to true, or to false" in played.flat
    assert "reboot_undecided" in played.flat


def test_not_allowed_is_reported_and_goes_on(machine, play, same_boot):
    played = play("reboot", reboot_allowed=False, **DUE)
    assert (played.status, played.changed) == (0, 0), played.text
    assert "reboot_pending: a reboot is needed (loaded_differs) and not allowed" in played.flat


def test_a_reboot_that_would_not_help_is_refused(machine, play, same_boot):
    played = play("reboot", reboot_allowed=True, reboot_blocked=["next_boot_module_missing"], **DUE)
    assert played.status != 0
    assert "reboot_blocked" in played.flat


def test_an_allowed_reboot_is_made_once_and_proven(machine, play):
    """The firmware takes its time, which the play sits out and says."""
    before, boots = machine.boot_id(), machine.boots()
    assert machine.loaded("nvidia") == "550.000.01"
    vm.set_post(machine.name, 25)
    played = play("reboot", reboot_allowed=True, **DUE)
    assert played.status == 0, played.text
    assert machine.boot_id() != before
    assert machine.boots() == boots + 1
    assert machine.loaded("nvidia") == "550.000.02"
    assert f"{machine.name}: back after" in played.text
    record = machine.record()
    assert (record["phase"], record["after_boot_id"]) == ("done", machine.boot_id())
    assert record["before"]["gpus"]["driver"] == 4
    again = play("reboot", reboot_allowed=True, **{**DUE, "reboot_required": False})
    assert (again.status, again.changed) == (0, 0), again.text


def test_a_killed_run_goes_on_with_the_proof(machine, play, tmp_path):
    """The controller dies while the box is away. The box had left rotation before it went down."""
    vm.set_post(machine.name, 0)
    install(machine, 3)
    machine.run(
        "printf '[Service]\\nExecStart=sleep infinity\\n' > /etc/systemd/system/vllm@.service && "
        "systemctl daemon-reload && systemctl start vllm@main"
    )
    leave = tmp_path / "leave.yml"
    leave.write_text(
        "- name: Note when the box leaves\n"
        "  ansible.builtin.command: cp /proc/sys/kernel/random/boot_id /root/left-{{ rotation_lanes | join('-') }}\n"
        "  changed_when: true\n"
    )
    before, boots = machine.boot_id(), machine.boots()
    killed = play(
        "reboot", kill_after=WAITING, reboot_allowed=True, rotation_leave_tasks=str(leave),
        rotation_drain_deadline=5, **DUE,
    )  # fmt: skip
    assert killed.status == -9, killed.text
    machine.wait_for_boot(before)
    assert machine.run("cat /root/left-main") == before
    assert machine.record()["phase"] == "requested"
    machine.run("rm /etc/systemd/system/vllm@.service")
    resumed = play("reboot", reboot_allowed=None, reboot_rotation=False, **DUE)
    assert resumed.status == 0, resumed.text
    assert machine.boots() == boots + 1, "the proof needs no second reboot"
    assert (machine.record()["phase"], machine.loaded("nvidia")) == ("done", "550.000.03")


def test_a_box_that_takes_too_long_and_a_module_that_stays_the_old_one(machine, play):
    """Case 089, and the end of a loop: an old copy of the module is loaded at every boot, whatever is installed."""
    install(machine, 4)
    machine.run("echo 'install nvidia insmod /opt/kernel/nvidia.ko' > /etc/modprobe.d/old.conf")
    before, boots = machine.boot_id(), machine.boots()
    vm.set_post(machine.name, 60)
    late = play("reboot", reboot_allowed=True, reboot_deadline=30, **DUE)
    assert late.status != 0
    assert "not back within 30 s" in late.flat
    assert "Look at its console (BMC)" in late.flat
    assert "run the same play again and it goes on with the proof" in late.flat
    machine.wait_for_boot(before)
    vm.set_post(machine.name, 0)

    proven = play("reboot", reboot_allowed=True, reboot_settle=5, **DUE)
    assert proven.status != 0
    assert "nvidia 550.000.01 is loaded, 550.000.04 was expected" in proven.flat
    assert machine.record()["phase"] == "failed"

    for _ in range(2):
        looped = play("reboot", reboot_allowed=True, **DUE)
        assert looped.status != 0
        assert "survived_reboot" in looped.flat
    assert machine.boots() == boots + 1, "one reboot, however often the play runs"
    machine.run("rm /etc/modprobe.d/old.conf")
