"""The sysfs and procfs adapter below a made-up root."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import pytest
from vllm_fleet.facts import collect, sysfs


class Machine:
    """A made-up /sys, /proc and /dev."""

    def __init__(self, root):
        self.root = str(root)
        self.base = root

    def file(self, path, content):
        target = self.base / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())

    def directory(self, path):
        (self.base / path.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def device(self, chain, **files):
        """Make a PCI device below a chain of bridges, such as ``0000:00:01.1/0000:01:00.0``."""
        real = self.base / "sys/devices/pci0000:00" / chain
        real.mkdir(parents=True, exist_ok=True)
        parts = chain.split("/")
        for depth in range(1, len(parts) + 1):
            link = self.base / "sys/bus/pci/devices" / parts[depth - 1]
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(
                    os.path.relpath(self.base / "sys/devices/pci0000:00" / "/".join(parts[:depth]), link.parent)
                )
        for name, content in files.items():
            (real / name).parent.mkdir(parents=True, exist_ok=True)
            (real / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    def gpu(self, chain, driver="nvidia", **files):
        self.device(chain, vendor="0x10de\n", device="0x2204\n", **{"class": "0x030000\n"}, **files)
        drivers = self.base / "sys/bus/pci/drivers" / (driver or "none")
        drivers.mkdir(parents=True, exist_ok=True)
        if driver:
            (self.base / "sys/devices/pci0000:00" / chain / "driver").symlink_to(drivers)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def config(control=None, size=4096):
    """PCI config space: an AER capability, then ACS with ``control``, or no ACS without one."""
    raw = bytearray(size)
    if size > 0x100:
        following = 0x148 if control is not None else 0
        struct.pack_into("<I", raw, 0x100, 0x0001 | 1 << 16 | following << 20)
        if control is not None:
            struct.pack_into("<IHH", raw, 0x148, 0x000D | 1 << 16, 0x005F, control)
    return bytes(raw)


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (config(0x001D), True),  # SrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+
        (config(0x0004), True),
        (config(0x0008), True),
        (config(0x0011), False),  # source validation and upstream forwarding redirect nothing
        (config(0x0000), False),
        (config(None), False),
        (config(size=256), False),  # no extended space
        (config(size=64), None),  # read by somebody who is not root
        (b"", None),
        (struct.pack("<256xI", 0x0001 | 1 << 16 | 0x100 << 20) + bytes(3836), False),  # a list that bites its tail
    ],
)
def test_acs_bits(machine, content, answer):
    machine.device("0000:00:01.1", config=content)
    assert sysfs.acs_redirects("0000:00:01.1", machine.root) is answer


def test_acs_counts_on_the_way_between_two_cards(machine):
    machine.device("0000:00:01.1", config=config(0x1D))
    machine.device("0000:00:02.1", config=config(0))
    machine.device("0000:00:02.1/0000:20:00.0", config=config(0x1D))  # a switch that both cards below share
    for chain in ("0000:00:01.1/0000:01:00.0", "0000:00:02.1/0000:20:00.0/0000:21:00.0"):
        machine.gpu(chain)
    machine.gpu("0000:00:02.1/0000:20:00.0/0000:22:00.0")
    assert sysfs.acs("0000:01:00.0", "0000:21:00.0", machine.root) is True
    assert sysfs.acs("0000:21:00.0", "0000:22:00.0", machine.root) is False
    assert sysfs.acs("0000:21:00.0", "0000:99:00.0", machine.root) is None


def test_one_unreadable_bridge_is_not_a_clean_way(machine):
    machine.device("0000:00:01.1", config=config(0))
    machine.device("0000:00:02.1", config=config(size=64))
    machine.gpu("0000:00:01.1/0000:01:00.0")
    machine.gpu("0000:00:02.1/0000:02:00.0")
    assert sysfs.acs("0000:01:00.0", "0000:02:00.0", machine.root) is None


@pytest.mark.parametrize(
    ("value", "nodes", "node"),
    [("1\n", ["0", "1"], 1), ("-1\n", ["0"], 0), ("-1\n", ["0", "1"], None), ("-1\n", [], None), ("", ["0"], None)],
)
def test_numa_node(machine, value, nodes, node):
    machine.gpu("0000:00:01.1/0000:01:00.0", numa_node=value)
    assert sysfs.numa_node("0000:01:00.0", nodes, machine.root) == node


def test_page_cache_counts_as_available(machine):
    machine.file("/sys/devices/system/node/node0/cpulist", "0-15,32-47\n")
    machine.file(
        "/sys/devices/system/node/node0/meminfo",
        "Node 0 MemTotal:       1000 kB\nNode 0 MemFree:        100 kB\nNode 0 Active(file):   200 kB\n"
        "Node 0 Inactive(file): 300 kB\nNode 0 Shmem:          50 kB\nNode 0 SReclaimable:   40 kB\n",
    )
    machine.file("/sys/devices/system/node/node1/cpulist", "")
    machine.directory("/sys/devices/system/node/power")
    assert sysfs.numa_nodes(machine.root) == {
        "0": {"cpus": "0-15,32-47", "memory_total_kib": 1000, "memory_available_kib": 640},
        "1": {"cpus": "", "memory_total_kib": None, "memory_available_kib": None},
    }


def test_what_a_service_may_use_is_what_process_1_may(machine):
    machine.file("/proc/self/status", "Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0\n")
    assert sysfs.allowed(machine.root) == {"cpus": "0-3", "mems": "0"}
    machine.file("/proc/1/status", "Name:\tsystemd\nCpus_allowed_list:\t0-31\nMems_allowed_list:\t0-1\n")
    assert sysfs.allowed(machine.root) == {"cpus": "0-31", "mems": "0-1"}


@pytest.mark.parametrize(
    ("types", "command_line", "mode"),
    [
        (["identity\n", "identity\n"], "", "passthrough"),
        (["DMA-FQ\n"], "iommu=pt", "translated"),
        (["identity\n", "DMA\n"], "", "translated"),
        ([], "quiet iommu=pt", "passthrough"),
        ([], "quiet", "unknown"),
    ],
)
def test_iommu_mode(machine, types, command_line, mode):
    machine.directory("/sys/kernel/iommu_groups/1")
    machine.file("/proc/cmdline", command_line + "\n")
    buses = [f"0000:0{number}:00.0" for number in range(1, 3)]
    for bus_id, kind in zip(buses, types):
        machine.gpu(f"0000:00:01.1/{bus_id}")
        machine.file(f"/sys/bus/pci/devices/{bus_id}/iommu_group/type", kind)
    assert sysfs.iommu(buses, machine.root) == mode


def test_iommu_off_or_not_to_be_seen(machine):
    assert sysfs.iommu([], machine.root) == "unknown"
    machine.directory("/sys/kernel/iommu_groups")
    assert sysfs.iommu(["0000:01:00.0"], machine.root) == "off"


@pytest.mark.parametrize(
    ("release", "modes", "flags", "container", "answer"),
    [
        ("5.15.146.1-microsoft-standard-WSL2", [0], "hypervisor", False, "wsl"),
        ("6.12.1", [1, 1], "fpu", True, "passthrough"),
        ("6.12.1", [2], "fpu", False, "passthrough"),
        ("6.12.1", [None], "fpu hypervisor", True, "passthrough"),
        ("6.12.1", [0, 0], "fpu hypervisor", False, "none"),
        ("6.12.1", [0], "fpu", True, "container"),
        ("6.12.1", [], "fpu", False, "none"),
        ("6.12.1", [], None, False, "unknown"),
    ],
)
def test_virtualization(machine, release, modes, flags, container, answer):
    machine.file("/proc/sys/kernel/osrelease", release + "\n")
    if flags is not None:
        machine.file("/proc/cpuinfo", f"processor\t: 0\nflags\t\t: {flags}\n")
    if container:
        machine.file("/proc/1/environ", "TERM=linux\0container=lxc\0")
    assert sysfs.virtualization(modes, machine.root) == answer


@pytest.mark.parametrize(
    ("line", "version", "flavour"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder)\n",
            "580.159.04",
            "open",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54  Thu Feb 22\n", "550.54", "proprietary"),
        (None, "610.43.02", None),
    ],
)
def test_the_loaded_module(machine, line, version, flavour):
    machine.file("/sys/module/nvidia/version", "610.43.02\n")
    if line:
        machine.file("/proc/driver/nvidia/version", line + "GCC version:  gcc version 12.2.0\n")
    machine.file("/proc/driver/nvidia/params", 'EnableMSI: 1\nRegistryDwords: "RMForceStaticBar1=1"\n')
    module = sysfs.nvidia_module(machine.root)
    assert (module["version"], module["flavour"], module["nouveau_loaded"]) == (version, flavour, False)
    assert module["parameters"] == {"EnableMSI": "1", "RegistryDwords": "RMForceStaticBar1=1"}


def test_no_module_at_all(machine):
    machine.directory("/sys/module/nouveau")
    module = sysfs.nvidia_module(machine.root)
    assert (module["version"], module["nouveau_loaded"]) == (None, True)


def test_cards_on_the_bus_and_who_owns_them(machine):
    machine.gpu("0000:00:02.1/0000:41:00.0", driver="nouveau")
    machine.gpu("0000:00:01.1/0000:01:00.0", driver=None)
    machine.device("0000:00:02.1/0000:41:00.1", vendor="0x10de\n", **{"class": "0x040300\n"})  # its sound function
    assert sysfs.pci_gpus(sysfs.NVIDIA, machine.root) == [
        {"bus_id": "0000:01:00.0", "device": "0x2204", "driver": None},
        {"bus_id": "0000:41:00.0", "device": "0x2204", "driver": "nouveau"},
    ]


def test_link_width_of_card_and_slot(machine):
    machine.device("0000:00:01.1", max_link_width="4\n")
    machine.gpu(
        "0000:00:01.1/0000:01:00.0",
        max_link_width="16\n",
        current_link_width="4\n",
        max_link_speed="16.0 GT/s PCIe\n",
        current_link_speed="2.5 GT/s PCIe\n",
    )
    assert sysfs.pcie("0000:01:00.0", machine.root) == {
        "width_max": 16,
        "width_current": 4,
        "gen_max": 4,
        "gen_current": 1,
        "slot_width_max": 4,
    }


def driver_answer(*bus_ids, **changes):
    gpus = [
        {
            "index": index,
            "bus_id": bus_id,
            "uuid": f"GPU-{index}",
            "name": "x",
            "numa_node": 7,
            "health": "ok",
            "pcie": {"gen_max": None, "gen_current": 4, "width_max": None, "width_current": 16},
            "processes": [{"pid": 1, "name": "x", "memory_mib": 1}],
        }
        for index, bus_id in enumerate(bus_ids)
    ]
    cards = [{"index": index, "virtualization": 0} for index in range(len(bus_ids))]
    pairs = [{"gpus": [0, 1], "acs": None}] if len(bus_ids) > 1 else []
    driver = {"userland": "610.43.02", "cuda": [13, 3]}
    return {"status": "ok", "message": "", "driver": driver, "gpus": gpus, "pairs": pairs, "cards": cards, **changes}


def test_assembly_of_the_facts(machine):
    machine.file("/sys/devices/system/node/node0/cpulist", "0-7\n")
    machine.file("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.84  R\n")
    machine.file("/proc/1/status", "Cpus_allowed_list:\t0-7\nMems_allowed_list:\t0\n")
    machine.file("/sys/class/dmi/id/bios_version", "2.8\n")
    machine.file("/dev/nvidia0", "")
    machine.device("0000:00:01.1", config=config(0x1D))
    machine.device("0000:00:02.1", config=config(0))
    machine.gpu("0000:00:01.1/0000:01:00.0", numa_node="-1\n", max_link_width="16\n", max_link_speed="16.0 GT/s PCIe\n")
    machine.gpu("0000:00:02.1/0000:41:00.0", numa_node="-1\n")
    facts = collect.assemble("nvidia", driver_answer("0000:01:00.0", "0000:41:00.0"), machine.root)
    assert facts["driver"] == {"loaded": "595.84", "userland": "610.43.02", "cuda": [13, 3]}
    assert [gpu["numa_node"] for gpu in facts["gpus"]] == [0, 0]
    assert facts["gpus"][0]["pcie"] == {"gen_max": 4, "gen_current": 4, "width_max": 16, "width_current": 16}
    assert facts["pairs"][0]["acs"] is True
    assert (facts["host"]["allowed_cpus"], facts["host"]["allowed_mems"]) == ("0-7", "0")
    extra = facts["extra"]
    assert (extra["nodes"], extra["board"]["bios_version"]) == (["/dev/nvidia0"], "2.8")
    assert [item["driver"] for item in extra["pci"]] == ["nvidia", "nvidia"]


def test_nvmls_own_version_stands_in_for_a_module_out_of_sight(machine):
    assert collect.assemble("nvidia", driver_answer(), machine.root)["driver"]["loaded"] == "610.43.02"
    refused = driver_answer(status="driver_mismatch", gpus=None)
    assert collect.assemble("nvidia", refused, machine.root)["driver"]["loaded"] is None


def test_a_corex_build_id_is_no_driver_version(machine):
    machine.file("/sys/module/iluvatar/version", "a1b2c3d\n")
    facts = collect.assemble("corex", driver_answer("0000:01:00.0"), machine.root)
    assert facts["driver"]["loaded"] == "610.43.02"
    assert facts["extra"]["module"]["version"] == "a1b2c3d"


def test_nvmls_node_stays_where_sysfs_shows_no_device(machine):
    machine.file("/sys/devices/system/node/node0/cpulist", "0-7\n")
    facts = collect.assemble("nvidia", driver_answer("0000:01:00.0"), machine.root)
    assert facts["gpus"][0]["numa_node"] == 7


def test_a_lost_card_gets_the_address_that_the_module_knows(machine):
    for bus_id, uuid in (("0000:01:00.0", "GPU-0"), ("0000:41:00.0", "GPU-gone")):
        machine.file(f"/proc/driver/nvidia/gpus/{bus_id}/information", f"Model: \t\t NVIDIA RTX\nGPU UUID: \t {uuid}\n")
    answer = driver_answer("0000:01:00.0", None)
    facts = collect.assemble("nvidia", answer, machine.root)
    assert (facts["gpus"][1]["bus_id"], facts["gpus"][1]["uuid"]) == ("0000:41:00.0", "GPU-gone")


def test_a_child_that_hangs_dies_with_its_own_children(tmp_path):
    marker = tmp_path / "pid"

    def work():
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        marker.write_text(str(child))
        os.waitpid(child, 0)

    assert collect.in_child(work, 0.5) is None
    grandchild = int(marker.read_text())
    for _ in range(100):
        try:
            state = Path(f"/proc/{grandchild}/stat").read_text().rsplit(") ", 1)[1][0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.02)
    raise AssertionError("the grandchild outlived its group")


@pytest.mark.parametrize("work", [lambda: 1 / 0, lambda: os._exit(7), lambda: {1, 2}])
def test_a_child_that_dies_gives_no_answer(work):
    assert collect.in_child(work, 10) is None


def test_a_large_answer_comes_through_whole():
    assert collect.in_child(lambda: ["x" * 1000] * 1000, 10) == ["x" * 1000] * 1000
