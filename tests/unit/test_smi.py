"""The tables of nvidia-smi in all their layouts, and what is none of its tables."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_fleet.facts import smi

NODE = {(0, 1): "NODE", (1, 0): "NODE", (0, 0): "X", (1, 1): "X"}

NEW = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNODE\tPHB\t0-191\t0\t\tN/A\nGPU1\tNODE\t X \tNODE\t0-191\t0\t\tN/A\nNIC0\tPHB\tNODE\t X \n\n"
    "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n"
)
SPACES = (
    "        GPU0    GPU1    CPU Affinity    NUMA Affinity\n"
    "GPU0     X      NODE    0-191           0\nGPU1    NODE     X      0-191           0\n"
)
OLD = "        GPU0    GPU1    CPU Affinity\nGPU0     X      NODE    0-95\nGPU1    NODE     X      0-95\n"
MELLANOX = (
    "\tGPU0\tGPU1\tmlx4_0\tmlx5_1\tCPU Affinity\nGPU0\t X \tNODE\tSYS\tPIX\t0-95\n"
    "GPU1\tNODE\t X \tSYS\tPXB\t0-95\nmlx4_0\tSYS\tSYS\t X \tSYS\nmlx5_1\tPIX\tPXB\tSYS\t X \n"
)
BARE = "\tGPU0\tGPU1\nGPU0\t X \tNODE\nGPU1\tNODE\t X \n"


@pytest.mark.parametrize("text", [NEW, SPACES, OLD, MELLANOX, BARE, NEW.replace("\n", "\r\n")])
def test_every_layout_says_the_same(text):
    assert smi.parse_matrix(text) == NODE


def test_p2p_table():
    text = (
        " \t\x1b[4mGPU0\tGPU1\tGPU2\x1b[0m\n GPU0\tX\tOK\tCNS\n GPU1\tOK\tX\tNS\n GPU2\tCNS\tNS\tX\n\n"
        "Legend:\n  OK = Status Ok\n"
    )
    matrix = smi.parse_matrix(text)
    found = {tuple(pair["gpus"]): pair["p2p_read"] for pair in smi.pairs(3, None, matrix, matrix)}
    assert found == {(0, 1): "ok", (0, 2): "chipset_not_supported", (1, 2): "not_supported"}


def test_one_direction_is_no_grant():
    matrix = {(0, 1): "OK", (1, 0): "TNS"}
    (pair,) = smi.pairs(2, None, matrix, {(0, 1): "OK"})
    assert (pair["p2p_read"], pair["p2p_write"]) == ("topology_not_supported", "unknown")


@pytest.mark.parametrize(
    ("cell", "ancestor", "lanes"),
    [
        ("NV4", "unknown", 4),
        ("NV18", "unknown", 18),
        ("PIX", "single", 0),
        ("PHB", "hostbridge", 0),
        ("SOC", "system", 0),
    ],
)
def test_cells(cell, ancestor, lanes):
    (pair,) = smi.pairs(2, {(0, 1): cell}, None, None)
    assert (pair["ancestor"], pair["nvlink_lanes"]) == (ancestor, lanes)


def test_no_table_leaves_everything_unknown():
    (pair,) = smi.pairs(2, None, None, None)
    assert (pair["ancestor"], pair["p2p_read"], pair["nvlink_lanes"]) == ("unknown", "unknown", None)


ROCM = (
    "============================ ROCm System Management Interface ============================\n"
    "================================ Weight between two GPUs =================================\n"
    "       GPU0         GPU1         \nGPU0   0            40           \nGPU1   40           0            \n"
)


@pytest.mark.parametrize(
    "text", ["", "NVIDIA-SMI has failed because it couldn't communicate\n", ROCM, "GPU0 GPU1\nGPU0 X 15\n"]
)
def test_what_is_no_table(text):
    assert smi.parse_matrix(text) is None


LISTING = (
    "00000000:41:00.0, GPU-b, NVIDIA RTX 3090, 24576, 1, 4, 1, 16, 16, [N/A], Disabled, Enabled, 94.02.42.00.B4\n"
    "00000000:01:00.0, GPU-a, NVIDIA GeForce RTX 3090, 24576, 9000, 4, 4, 16, 8, Enabled, Enabled, Disabled, [N/A]\n"
    "00000000:81:00.0, [GPU is lost], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A]\n"
)
APPS = "GPU-a, 4242, /usr/bin/python3, 8990\nGPU-a, 4243, [Not Found], [N/A]\nNo running processes found\n"


def test_cards():
    first, second, lost = smi.parse_gpus(LISTING, APPS)
    assert (first["index"], first["bus_id"], first["uuid"], first["mig"], first["display"]) == (
        0,
        "0000:01:00.0",
        "GPU-a",
        True,
        True,
    )
    assert first["pcie"] == {"gen_max": 4, "gen_current": 4, "width_max": 16, "width_current": 8}
    assert first["processes"] == [
        {"pid": 4242, "name": "/usr/bin/python3", "memory_mib": 8990},
        {"pid": 4243, "name": "[Not Found]", "memory_mib": None},
    ]
    assert (second["mig"], second["processes"], second["display"]) == (False, [], False)
    assert (lost["bus_id"], lost["uuid"], lost["health"], lost["memory_used_mib"]) == (
        "0000:81:00.0",
        None,
        "unknown",
        None,
    )
    assert smi.parse_gpus(LISTING, None)[0]["processes"] is None


PROGRAM = """#!/bin/sh
case "$*" in
*--query-gpu=uuid,compute_cap*) printf 'GPU-a, 8.6\\nGPU-b, 8.6\\n' ;;
*--query-gpu=*) head -n 2 "$0.listing" ;;
*--query-compute-apps*) ;;
"topo -m") printf '\\tGPU0\\tGPU1\\nGPU0\\t X \\tNV4\\nGPU1\\tNV4\\t X \\n' ;;
"topo -p2p"*) printf ' \\tGPU0\\tGPU1\\n GPU0\\tX\\tOK\\n GPU1\\tOK\\tX\\n' ;;
"") printf '| NVIDIA-SMI 610.43.02   KMD Version: 610.43.02     CUDA UMD Version: 13.3 |\\n' ;;
esac
"""


def test_reading_through_the_program(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (tmp_path / "nvidia-smi.listing").write_text(LISTING)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    answer = smi.read()
    assert (answer["status"], answer["driver"]) == ("ok", {"userland": "610.43.02", "cuda": [13, 3]})
    assert [(gpu["uuid"], gpu["compute_capability"]) for gpu in answer["gpus"]] == [
        ("GPU-a", [8, 6]),
        ("GPU-b", [8, 6]),
    ]
    assert answer["pairs"][0]["nvlink_lanes"] == 4
    assert answer["pairs"][0]["p2p_write"] == "ok"
    assert answer["cards"][1] == {"index": 1, "virtualization": None, "persistence": True, "vbios": "94.02.42.00.B4"}
    assert "_card" not in answer["gpus"][0]


def test_without_the_program(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (smi.read()["status"], smi.read()["gpus"]) == ("smi_missing", None)


@settings(deadline=None, max_examples=150)
@given(st.text(alphabet=st.sampled_from("GPU01 \t\nXNV4OKNODE[],.:-\x1b4m/A"), max_size=200))
def test_no_table_is_a_traceback(text):
    smi.pairs(2, smi.parse_matrix(text), smi.parse_matrix(text), None)
    smi.parse_gpus(text, text)
