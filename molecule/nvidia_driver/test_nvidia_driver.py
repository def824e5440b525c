"""Debian's real driver on a box: installed, built for its kernel, kept, and refused where it would end half-way.

The tests are in the order in which they leave the box as the next one needs it.
"""

from __future__ import annotations

import json
import re
import time

import pytest

from tests.testinfra_helpers import converge, property_of, start_converge

FENCE = "/etc/apt/apt.conf.d/52vllm-fleet-nvidia"
BLOCK = "/etc/modprobe.d/vllm-fleet-nvidia.conf"
PROGRAM = "/opt/vllm-fleet/bin/vllm-fleet"
FAKE = "6.1.0-999-amd64"


def version_of(host, name):
    return host.check_output(f"dpkg-query -W -f '${{Version}}' {name}")


def kernel_of(host):
    return host.check_output("ls /boot | sed -n 's/^vmlinuz-//p'")


def report(host, *arguments):
    """Return what the on-box program says of the driver; it ends with 1 here, because no module is loaded."""
    return json.loads(host.run(f"{PROGRAM} driver --json {' '.join(arguments)}").stdout)


def codes(found):
    return {item["reason"]: item["status"] for item in found["results"]}


def test_libraries_module_source_and_headers_are_debians_own(host):
    kernel = kernel_of(host)
    for name in ("libcuda1", "libnvidia-ml1", "nvidia-smi", "nvidia-kernel-dkms", "nvidia-persistenced"):
        assert host.package(name).is_installed
    assert host.package(f"linux-headers-{kernel}").is_installed
    assert host.package("linux-headers-amd64").is_installed, "the next kernel's headers come with it (case 044)"
    upstream = version_of(host, "libcuda1").split("-")[0]
    assert version_of(host, "nvidia-kernel-dkms").split("-")[0] == upstream
    found = report(host)["driver"]
    assert (found["installed"], found["next_boot"], found["next_kernel"]) == (upstream, upstream, kernel)
    assert found["flavour"] == "proprietary"
    assert found["reboot_blocked"] == []


def test_dkms_has_built_it_for_every_installed_kernel(host):
    lines = host.check_output("dkms status").splitlines()
    assert [line for line in lines if kernel_of(host) in line and line.endswith("installed")]
    assert codes(report(host))["every_kernel_has_module"] == "pass"


def test_nouveau_is_out_of_modprobe_and_of_early_boot(host):
    assert "blacklist nouveau" in host.file(BLOCK).content_string
    listed = host.check_output(f"lsinitramfs /boot/initrd.img-{kernel_of(host)}")
    assert BLOCK.lstrip("/") in listed


def test_the_whole_family_is_held(host):
    lines = host.check_output("dpkg-query -W -f '${Package} ${db:Status-Abbrev}\\n' '*nvidia*' libcuda1").splitlines()
    states = {name: state for name, state in (line.split() for line in lines) if state not in ("un", "rc")}
    assert len(states) > 8
    assert {name for name, state in states.items() if state != "hi"} == set()


def unattended(host):
    """Return what the real unattended-upgrades would upgrade."""
    output = host.check_output("unattended-upgrade --dry-run --debug 2>&1")
    found = re.search(r"Packages that will be upgraded: (.*)", output)
    return set(found.group(1).split()) if found else set()


#: of the family, and the one that Debian has in two versions which both go with the others
LOOSE = "nvidia-modprobe"


def test_037_unattended_upgrades_leaves_the_driver_alone(host):
    """Held or not: a package that was put back is a candidate, and the fence alone keeps the updater off it."""
    versions = host.check_output(f"apt-cache madison {LOOSE} | awk '{{print $3}}' | sort -uV").split()
    assert len(versions) > 1, "Debian has one version only; the test needs an older one"
    host.check_output(
        f"DEBIAN_FRONTEND=noninteractive apt-get -q -y --allow-downgrades --allow-change-held-packages "
        f"--no-install-recommends install {LOOSE}={versions[0]}"
    )
    host.check_output(f"apt-mark unhold {LOOSE}")
    assert LOOSE not in unattended(host)
    host.check_output(f"mv {FENCE} /root/fence")
    try:
        assert LOOSE in unattended(host), "this is what happens without the fence"
    finally:
        host.check_output(f"mv /root/fence {FENCE}")


def test_090_a_newer_version_in_the_source_moves_nothing(host):
    before = version_of(host, LOOSE)
    done = converge()
    assert done.returncode == 0, done.stdout
    assert re.search(r"changed=1 ", done.stdout), "it is held again, and that is all"
    assert version_of(host, LOOSE) == before
    again = converge()
    assert re.search(r"changed=0 ", again.stdout), again.stdout


def test_check_mode_names_what_another_version_would_move(host):
    planned = converge("--check", "--diff", nvidia_driver_version="535.261.03")
    assert planned.returncode == 0, planned.stdout
    assert re.search(r"libcuda1: 535\.261\.03-1", planned.stdout)
    assert re.search(r"nvidia-kernel-dkms: 535\.261\.03-1", planned.stdout)


def test_a_pinned_version_is_kept_and_proven(host):
    wanted = version_of(host, "libcuda1").split("-")[0]
    done = converge(nvidia_driver_version=wanted)
    assert done.returncode == 0, done.stdout
    assert f"Pin: version {wanted}*" in host.file("/etc/apt/preferences.d/vllm-fleet-nvidia").content_string
    assert codes(report(host, "--version", wanted))["version_wanted"] == "pass"
    assert codes(report(host, "--version", "535.1.1"))["version_differs"] == "fail"


def test_a_version_that_the_source_lacks_is_refused(host):
    done = converge(nvidia_driver_version="535.1.1")
    assert done.returncode != 0
    assert "version_unavailable" in done.stdout
    assert re.search(r"changed=0 ", done.stdout)


def test_084_a_foreign_lock_is_waited_out(host):
    """Unattended upgrades hold dpkg's lock for 20 s while the role has a package to install."""
    host.check_output("DEBIAN_FRONTEND=noninteractive apt-get -q -y --allow-change-held-packages remove nvidia-smi")
    hold = (
        "import fcntl, time; files = [open(p, 'w') for p in ('/var/lib/dpkg/lock-frontend', '/var/lib/dpkg/lock')]; "
        "[fcntl.lockf(f, fcntl.LOCK_EX) for f in files]; open('/run/holding', 'w').close(); time.sleep(600)"
    )
    host.check_output("rm -f /run/holding")
    host.check_output(f'systemd-run --quiet --collect --unit=hold-dpkg /usr/bin/python3 -c "{hold}"')
    try:
        while not host.file("/run/holding").exists:
            time.sleep(0.1)
        assert host.run("apt-get -q -y install nvidia-smi").rc != 0, "this is what happens without the wait"
        process = start_converge()
        since = None
        while since is None or time.monotonic() - since < 20:
            assert process.poll() is None, process.communicate()[0]
            if since is None and host.run("pgrep -f 'apt-get .*install'").stdout:
                since = time.monotonic()
            time.sleep(0.5)
    finally:
        host.check_output("systemctl stop hold-dpkg")
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert host.package("nvidia-smi").is_installed
    assert codes(report(host))["packages_held"] == "pass"


def test_an_initramfs_that_is_older_than_the_block_is_rebuilt(host):
    """The run before was killed between the two: early boot would load nouveau."""
    image = f"/boot/initrd.img-{kernel_of(host)}"
    host.check_output(f"touch -d '2020-01-01' {image}")
    done = converge()
    assert done.returncode == 0, done.stdout
    assert host.file(image).mtime.year > 2020
    assert re.search(r"changed=1 ", done.stdout)


def test_086_a_kernel_without_headers_is_refused(host):
    host.check_output(
        f"touch /boot/vmlinuz-{FAKE} && mkdir -p /lib/modules/{FAKE} && ln -sfn boot/vmlinuz-{FAKE} /vmlinuz"
    )
    done = converge()
    assert done.returncode != 0
    assert f"headers_unavailable: no package linux-headers-{FAKE}" in done.stdout
    assert codes(report(host))["next_boot_module_missing"] == "fail", "the newest kernel is next, and it has none"


def test_044_no_module_for_a_kernel_leaves_nouveau_alone(host):
    """Headers that do not build: the role stops before it takes from the box the driver that it still has."""
    host.check_output(
        f"mkdir -p /lib/modules/{FAKE}/build && printf 'all:\\n\\tfalse\\n' > /lib/modules/{FAKE}/build/Makefile"
    )
    host.check_output(f"rm {BLOCK}")
    done = converge()
    assert done.returncode != 0
    assert "dkms_incomplete" in done.stdout and FAKE in done.stdout
    assert not host.file(BLOCK).exists
    host.check_output(f"rm -rf /boot/vmlinuz-{FAKE} /lib/modules/{FAKE}")
    host.check_output(f"ln -sfn boot/vmlinuz-{kernel_of(host)} /vmlinuz")
    assert converge().returncode == 0
    assert host.file(BLOCK).exists


def test_secure_boot_stops_before_any_change(host):
    host.check_output(
        "mount -t tmpfs simulated /sys/firmware && cd /sys/firmware && mkdir -p efi/efivars && "
        "printf '\\006\\0\\0\\0\\001' > efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    )
    try:
        host.check_output("apt-mark unhold nvidia-smi")
        done = converge()
        assert done.returncode != 0
        assert "secure_boot: Secure Boot is on" in done.stdout
        assert "mokutil --import" in done.stdout
        assert re.search(r"changed=0 ", done.stdout)
        assert "nvidia-smi" not in host.check_output("apt-mark showhold").split()
    finally:
        host.check_output("umount /sys/firmware; apt-mark hold nvidia-smi")


@pytest.mark.parametrize(
    ("cards", "variables", "reason"),
    [
        ("0x2b85", {}, "driver_too_old"),
        ("0x1b06 0x2204", {"nvidia_driver_flavour": "open"}, "flavour_unsupported"),
        ("0x2204 0xfffe", {}, "unknown_gpu"),
        ("", {}, "no_gpu"),
    ],
)
def test_cards_that_the_driver_can_not_serve_are_refused(host, cards, variables, reason):
    host.check_output(f"simulate-pci {cards}")
    try:
        done = converge(**variables)
        assert done.returncode != 0
        assert reason in done.stdout
        assert re.search(r"changed=0 ", done.stdout)
    finally:
        host.check_output("simulate-pci 0x2204 0x2204")


def test_042_nothing_is_called_well_that_is_not(host):
    """Packages are in place and no module is loaded: the verify-only path fails instead of ending green."""
    done = converge(nvidia_driver_source="none")
    assert done.returncode != 0
    assert "gpu_count_unknown" in done.stdout, "what could not be looked at is no pass"
    found = codes(report(host))
    assert set(found) & {"loaded_unknown", "module_not_loaded"}
    assert found["gpu_count_unknown"] == "unknown"


def test_the_daily_check_leaves_its_result_and_says_what_it_found(host):
    assert property_of(host, "vllm-fleet-drift.timer", "ActiveState") == "active"
    host.run("systemctl start vllm-fleet-drift.service")
    found = json.loads(host.file("/var/lib/vllm-fleet/drift.json").content_string)
    assert found["driver"]["installed"] and abs(found["time"] - time.time()) < 120
    assert {item["check"] for item in found["results"]} >= {"driver_versions", "next_boot", "packages", "kernel_log"}
    host.check_output("apt-mark unhold libcuda1")
    host.run("systemctl start vllm-fleet-drift.service")
    assert "packages_not_held: an upgrade would move libcuda1" in host.check_output("journalctl -u vllm-fleet-drift")
    host.check_output("apt-mark hold libcuda1")


def test_power_limits_come_with_the_boot_and_with_the_daemon(host):
    assert json.loads(host.file("/etc/vllm-fleet/power-limits.json").content_string) == {"all": 280}
    assert property_of(host, "vllm-fleet-power-limits", "UnitFileState") == "enabled"
    assert "nvidia-persistenced.service" in property_of(host, "vllm-fleet-power-limits", "PartOf")
    found = host.run(f"{PROGRAM} power-limits --wait 0")
    assert found.rc == 3 and "gpus_unreadable" in found.stderr
