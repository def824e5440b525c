"""CoreX: the table of ixsmi, and libixml through pynvml (the simulator under the other name)."""

from __future__ import annotations

import json
import shutil
import stat

import pytest
from vllm_fleet.facts import collect, corex

from tests import simulator

TABLE = """\
Timestamp    Tue Jul 14 10:15:00 2026
+-----------------------------------------------------------------------------+
|  IX-ML: 3.2.3       Driver Version: 3.2.3       CUDA Version: 10.2          |
|-------------------------------+----------------------+----------------------|
| GPU  Name                     | Bus-Id               | Clock-SM  Clock-Mem  |
| Fan  Temp  Perf  Pwr:Usage/Cap|      Memory-Usage    | GPU-Util  Compute M. |
|===============================+======================+======================|
| 0    Iluvatar BI-V100         | 00000000:8A:00.0     | 1500MHz   1200MHz    |
| 0%   33C   P0    50W / 250W   | 257MiB / 32768MiB    | 0%        Default    |
+-------------------------------+----------------------+----------------------+
| 1    Iluvatar BI-V100         | 00000000:3D:00.0     | 1500MHz   1200MHz    |
| N/A  35C   P0    N/A / N/A    | 9MiB / 32768MiB      | 0%        Default    |
+-------------------------------+----------------------+----------------------+

+-----------------------------------------------------------------------------+
| Processes:                                                       GPU Memory |
|  GPU        PID      Process name                                Usage(MiB) |
|=============================================================================|
|    0      12345      python3 -m vllm                                  248   |
+-----------------------------------------------------------------------------+
"""
LISTING = "GPU 0: Iluvatar BI-V100 (UUID: GPU-aaaa)\nGPU 1: Iluvatar BI-V100 (UUID: GPU-bbbb)\n"


def test_the_table():
    answer = corex.parse_table(TABLE, LISTING)
    assert answer["driver"] == {"userland": "3.2.3", "cuda": [10, 2]}
    first, second = answer["gpus"]
    assert (first["index"], first["bus_id"], first["uuid"], first["name"]) == (
        0,
        "0000:3d:00.0",
        "GPU-bbbb",
        "Iluvatar BI-V100",
    )
    assert (first["memory_used_mib"], first["memory_total_mib"], first["processes"]) == (9, 32768, [])
    assert (second["bus_id"], second["uuid"], second["memory_used_mib"]) == ("0000:8a:00.0", "GPU-aaaa", 257)
    assert second["processes"] == [{"pid": 12345, "name": "python3 -m vllm", "memory_mib": 248}]
    assert [pair["gpus"] for pair in answer["pairs"]] == [[0, 1]]
    assert answer["pairs"][0]["ancestor"] == "unknown"


def test_a_table_without_processes_leaves_them_unknown():
    answer = corex.parse_table(TABLE.split("| Processes:", maxsplit=1)[0])
    assert [gpu["processes"] for gpu in answer["gpus"]] == [None, None]
    assert [gpu["uuid"] for gpu in answer["gpus"]] == [None, None]


@pytest.mark.parametrize(
    "text", ["", "ixsmi: error\n", "============ ROCm System Management Interface ============\nGPU0 GPU1\n"]
)
def test_what_is_no_table_has_no_cards(text):
    answer = corex.parse_table(text)
    assert (answer["gpus"], answer["status"]) == (None, "nvml_error")


def test_cuda_may_be_not_available():
    assert corex.parse_table(TABLE.replace("10.2 ", "N/A "))["driver"]["cuda"] is None


def test_the_accelerator_is_found_by_its_nodes(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("iluvatar0", "iluvatar1", "itrctl", "iluvatar-notes", "null"):
        (tmp_path / "dev" / name).touch()
    assert corex.device_nodes(str(tmp_path)) == ["/dev/iluvatar0", "/dev/iluvatar1", "/dev/itrctl"]
    assert collect.find_vendor(str(tmp_path)) == "corex"
    assert collect.find_vendor(str(tmp_path / "empty")) == "nvidia"


@pytest.fixture
def home(tmp_path):
    """A CoreX installation with the simulator as its libixml.so."""
    (tmp_path / "lib64").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(simulator.library() / "libnvidia-ml.so.1", tmp_path / "lib64" / "libixml.so")
    return tmp_path


READ = "import json; from vllm_fleet.facts import corex; print(json.dumps(corex.read()))"


def facts_file(tmp_path, **changes):
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({**simulator.box("box2"), **changes}))
    return path


def test_libixml_under_its_own_name(home, tmp_path):
    answer = simulator.python(READ, facts_file(tmp_path), installed=False, COREX_HOME=str(home))
    assert answer["status"] == "ok"
    assert [gpu["bus_id"] for gpu in answer["gpus"]] == [f"0000:{bus}:00.0" for bus in ("01", "41", "81", "c4")]
    assert answer["gpus"][0]["health"] == "ok"
    assert answer["cards"][0]["health_faults"] == []


def test_ixsmi_when_the_library_fails(home, tmp_path):
    program = home / "bin" / "ixsmi"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && {{ printf '%s' '{LISTING}'; exit; }}\ncat <<'END'\n{TABLE}END\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    broken = facts_file(tmp_path, faults=[{"call": "nvmlInit", "error": "unknown"}])
    answer = simulator.python(READ, broken, installed=False, COREX_HOME=str(home))
    assert [gpu["uuid"] for gpu in answer["gpus"]] == ["GPU-bbbb", "GPU-aaaa"]
    (home / "lib64" / "libixml.so").unlink()
    answer = simulator.python(READ, broken, installed=False, COREX_HOME=str(home))
    assert (answer["status"], len(answer["gpus"])) == ("ok", 2)


def test_neither_library_nor_program(home, tmp_path):
    (home / "lib64" / "libixml.so").unlink()
    answer = simulator.python(READ, facts_file(tmp_path), installed=False, COREX_HOME=str(home), PATH="/nowhere")
    assert (answer["status"], answer["gpus"]) == ("library_missing", None)
    assert str(home) in answer["message"]


class Health:
    """A libixml whose health call answers one value for every card."""

    def __init__(self, code, bits):
        self.code, self.bits = code, bits

    def ixmlDeviceGetHealth(self, handle, out):
        out._obj.value = self.bits
        return self.code


@pytest.mark.parametrize(
    ("code", "bits", "health", "faults"),
    [
        (0, 0, "ok", []),
        (0, 0x44, "unknown", ["over_temperature", "pcie"]),
        (3, 0, "ok", []),
        (999, 0, "unknown", []),
    ],
)
def test_health_bits(code, bits, health, faults):
    outcome = {"gpus": [{"index": 0, "health": "ok"}], "cards": [{}]}

    class Bindings:
        @staticmethod
        def nvmlDeviceGetHandleByIndex(index):
            return index

    corex._read_health(Bindings, Health(code, bits), outcome)
    assert (outcome["gpus"][0]["health"], outcome["cards"][0]["health_faults"]) == (health, faults)


def test_names_are_looked_up_as_their_twins():
    class Library:
        nvmlInit_v2 = "init"
        ixmlDeviceGetName = "name"

    library = corex._Library(Library)
    assert (library.nvmlInitWithFlags, library.nvmlDeviceGetName) == ("init", "name")
    with pytest.raises(AttributeError):
        library.nvmlDeviceGetUUID  # noqa: B018
