"""Nouveau kept out, and a driver upgraded box by box, on a real kernel with its real initramfs.

No card is in the machine: what would load nouveau for one, the module alias of a card and a list for early boot, is
used by hand. The CoreX installer is a stand-in that installs a real module for this kernel.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from conftest import WAITING

# An emulated processor takes minutes for an initramfs or a reboot, and a busy machine twice as long.
pytestmark = pytest.mark.timeout(1500)

ROOT = Path(__file__).resolve().parents[2]
INSTALLER = ROOT / "molecule" / "corex_driver" / "corex-driver-linux64-4.3.8-x86_64.run"
#: what udev asks modprobe for when a GeForce RTX 3090 is there; -b makes it heed the blacklist, as udev does
CARD = "pci:v000010DEd00002204sv00001458sd0000403Bbc03sc00i00"
STATE = "cat /var/lib/vllm-fleet/rollout.json"


def test_nouveau_is_kept_out_by_modprobe_and_in_early_boot(machine, play):
    """Case 042: a blacklist alone leaves nouveau in the initramfs."""
    machine.run(
        "printf 'nouveau\\n' > /etc/modules-load.d/card.conf; printf 'nouveau\\n' >> /etc/initramfs-tools/modules"
    )
    machine.run(f"modprobe -b {CARD}")
    assert machine.run("lsmod | grep -c '^nouveau '") == "1", "this is what happens without the role"
    template = ROOT / "roles" / "nvidia_driver" / "templates" / "modprobe.conf.j2"
    block = {"nvidia_modules": {"text": "{{ lookup('ansible.builtin.template', '" + str(template) + "') }}"}}
    options = {"nvidia_driver_module_options": ["install nouveau /bin/false"]}
    played = play(tasks=[block], **options)
    assert (played.status, played.changed) == (0, 1), played.text
    assert "etc/modprobe.d/vllm-fleet-nvidia.conf" in machine.run(
        "lsinitramfs /boot/initrd.img-$(uname -r) < /dev/null"
    )
    again = play(tasks=[block], **options)
    assert (again.status, again.changed) == (0, 0), again.text

    rebooted = play("reboot", reboot_allowed=True, reboot_required=True, reboot_reasons=["nouveau_loaded"])
    assert rebooted.status == 0, rebooted.text
    assert machine.run("cat /etc/modules-load.d/card.conf") == "nouveau"
    assert machine.run("lsmod | grep -c '^nouveau '", check=False) == "0"
    machine.run(f"modprobe -b {CARD}", check=False)
    assert machine.run("lsmod | grep -c '^nouveau '", check=False) == "0"


@pytest.fixture(scope="module")
def installers(tmp_path_factory):
    """Return the variables of the role for two versions of the installer."""
    found = []
    for version in ("4.3.8", "4.3.9"):
        text = INSTALLER.read_text().replace("4.3.8", version)
        path = tmp_path_factory.mktemp("run") / f"corex-driver-linux64-{version}-x86_64.run"
        path.write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        found.append(
            {"corex_driver_run": str(path), "corex_driver_sha256": digest, "corex_driver_answers": "accept",
             "corex_driver_cards": 4}
        )  # fmt: skip
    return found


def test_the_corex_driver_is_installed_loaded_and_its_kernel_held(machine, play, installers):
    # On a box with cards their alias loads the module at a boot.
    machine.run("echo iluvatar > /etc/modules-load.d/iluvatar.conf")
    played = play("corex_driver", **installers[0])
    assert played.status == 0, played.text
    assert machine.loaded("iluvatar") == "4.3.008"
    assert machine.run("ls /dev/iluvatar* | wc -l") == "4"
    held = machine.run("apt-mark showhold").split()
    assert f"linux-image-{machine.run('uname -r')}" in held
    assert "linux-image-amd64" in held
    again = play("corex_driver", **installers[0])
    assert (again.status, again.changed) == (0, 0), again.text


UPGRADE = {"driver_upgrade_role": "corex_driver", "driver_upgrade_probe": False, "driver_upgrade_p2p": False}


def test_an_upgrade_without_a_decision_touches_nothing(machine, play, installers):
    before = machine.boot_id()
    played = play(playbook="playbooks/upgrade_driver.yml", **installers[1], **UPGRADE)
    assert played.status != 0
    assert "reboot_undecided" in played.flat
    assert "untouched" in played.flat
    assert machine.run("modinfo -F version iluvatar") == "4.3.008"
    assert machine.run(f"{STATE} || echo none", check=False).endswith("none")
    assert machine.boot_id() == before


def test_a_process_that_holds_a_card_is_named_and_stops_the_upgrade(machine, play, installers):
    machine.run("systemd-run --quiet --unit=training bash -c 'exec 3</dev/iluvatar2; sleep infinity'")
    pid = machine.run("systemctl show --value --property=MainPID training")
    try:
        played = play(
            playbook="playbooks/upgrade_driver.yml", reboot_allowed=True, driver_upgrade_release_deadline=1,
            **installers[1], **UPGRADE,
        )  # fmt: skip
    finally:
        machine.run("systemctl stop training")
    assert played.status != 0
    assert f"pid {pid} sleep of training.service: /dev/iluvatar2" in played.flat
    assert json.loads(machine.run(STATE))["phase"] == "rolled_back", "nothing was changed, so it serves as before"
    assert machine.run("modinfo -F version iluvatar") == "4.3.008"


def test_an_upgrade_that_is_killed_is_seen_with_its_age_and_goes_on(machine, play, installers):
    before, boots = machine.boot_id(), machine.boots()
    killed = play(
        playbook="playbooks/upgrade_driver.yml", reboot_allowed=True, kill_after=WAITING,
        **installers[1], **UPGRADE,
    )  # fmt: skip
    assert killed.status == -9, killed.text
    machine.wait_for_boot(before)
    standing = play(playbook="playbooks/rollout_status.yml")
    assert standing.status == 0, standing.text
    assert "rebooting" in standing.text
    assert "unfinished for" in standing.text

    resumed = play(playbook="playbooks/upgrade_driver.yml", reboot_allowed=True, **installers[1], **UPGRADE)
    assert resumed.status == 0, resumed.text
    assert machine.loaded("iluvatar") == "4.3.009"
    assert machine.boots() == boots + 1, "the upgrade is one reboot, though it ran twice"
    assert json.loads(machine.run(STATE))["phase"] == "done"
    idle = play(playbook="playbooks/upgrade_driver.yml", **installers[1], **UPGRADE)
    assert (idle.status, idle.changed) == (0, 0), idle.text
