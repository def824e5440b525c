"""The lab's virtual machines: their disks, what QEMU is told, and which accelerator is used."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from lab import vm, vm_image
from lab.shell import LabError

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_qemu_ends_at_a_reboot_and_listens_on_the_loopback_only():
    argv = vm.qemu_argv("tcg", Path("/d"), Path("/k"), Path("/i"), 2222, Path("/c"))
    assert "-no-reboot" in argv
    assert argv[argv.index("-accel") + 1] == "tcg,thread=multi"
    assert [word for word in argv if "hostfwd" in word] == ["user,id=net,hostfwd=tcp:127.0.0.1:2222-:22"]
    assert "host" in vm.qemu_argv("kvm", Path("/d"), Path("/k"), Path("/i"), 1, Path("/c"))


def test_the_accelerator_is_found_out_once_a_boot(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(vm, "CACHE", tmp_path)
    monkeypatch.setattr(vm, "_kvm_works", lambda: asked.append(1) or False)
    monkeypatch.delenv("LAB_VM_ACCEL", raising=False)
    assert [vm.accelerator(), vm.accelerator()] == ["tcg", "tcg"]
    assert len(asked) == 1
    noted = tmp_path / "vm" / "accelerator.json"
    assert json.loads(noted.read_text()) == {"boot": BOOT, "accelerator": "tcg"}
    noted.write_text('{"boot": "earlier", "accelerator": "kvm"}')
    assert vm.accelerator() == "tcg"
    assert len(asked) == 2, "another boot may run on another machine"
    monkeypatch.setenv("LAB_VM_ACCEL", "kvm")
    assert vm.accelerator() == "kvm"


@pytest.fixture
def disk(tmp_path):
    """Give a small disk with a kernel and an initramfs that the links in its root name."""
    if not shutil.which("mkfs.ext4") or not shutil.which("debugfs"):
        pytest.fail("mkfs.ext4 and debugfs are missing. Fix: apt-get install e2fsprogs")
    tree = tmp_path / "tree"
    (tree / "boot").mkdir(parents=True)
    (tree / "etc").mkdir()
    (tree / "boot" / "vmlinuz-6.1").write_bytes(b"kernel")
    (tree / "boot" / "initrd.img-6.1").write_bytes(b"initramfs")
    (tree / "vmlinuz").symlink_to("boot/vmlinuz-6.1")
    (tree / "initrd.img").symlink_to("boot/initrd.img-6.1")
    path = tmp_path / "disk.raw"
    subprocess.run(["truncate", "--size=8M", str(path)], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-d", str(tree), str(path)], check=True)
    return path


def test_kernel_and_initramfs_are_those_that_the_disk_names(disk, tmp_path):
    kernel, initrd = vm_image.boot_files(disk, tmp_path)
    assert (kernel.read_bytes(), initrd.read_bytes()) == (b"kernel", b"initramfs")
    rebuilt = tmp_path / "rebuilt"
    rebuilt.write_bytes(b"rebuilt on the machine")
    vm_image.put(disk, [("/boot/initrd.img-6.1", rebuilt, 0o600)])
    assert vm_image.boot_files(disk, tmp_path)[1].read_bytes() == b"rebuilt on the machine"


def test_files_are_put_on_a_disk_with_their_mode(disk, tmp_path):
    source = tmp_path / "key"
    source.write_text("secret")
    vm_image.put(disk, [("/etc/key", source, 0o600)])
    said = subprocess.run(
        ["debugfs", "-R", "stat /etc/key", str(disk)], capture_output=True, text=True, check=True
    ).stdout
    assert "Mode:  0600" in said
    assert "User:     0   Group:     0" in said
    with pytest.raises(LabError, match="could not be written"):
        vm_image.put(disk, [("/missing/key", source, 0o600)])


def test_a_disk_that_boots_nothing_is_named(disk, tmp_path):
    subprocess.run(["debugfs", "-w", "-R", "rm /boot/vmlinuz-6.1", str(disk)], capture_output=True, check=True)
    with pytest.raises(LabError, match=r"no /vmlinuz to boot from"):
        vm_image.boot_files(disk, tmp_path)


def test_a_supervisor_is_known_by_more_than_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(vm, "VMS", tmp_path)
    assert vm.supervised("m") is None
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "pid").write_text("1\n")
    assert vm.supervised("m") is None
    assert vm.names() == ["m"]
