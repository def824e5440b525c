"""The real pynvml, and the adapter above it, against the compiled simulator."""

from __future__ import annotations

import copy
import json
import time
import zipfile

import pynvml
import pytest

from tests import simulator

READ = "import json; from vllm_fleet.facts import nvml; print(json.dumps(nvml.read()))"
COLLECT = "import json, sys; from vllm_fleet.facts import collect; print(json.dumps(collect.read(timeout={timeout})))"


@pytest.fixture
def facts_file(tmp_path):
    path = tmp_path / "facts.json"

    def write(facts):
        path.write_text(json.dumps(facts))
        return path

    return write


def without_acs(pairs):
    return [{key: value for key, value in pair.items() if key != "acs"} for pair in pairs]


@pytest.mark.parametrize("name", ["box1", "box2"])
def test_what_the_facts_file_says_comes_back_through_pynvml(name, facts_file):
    facts = simulator.box(name)
    answer = simulator.python(READ, facts_file(facts))
    assert answer["status"] == "ok"
    assert answer["driver"] == {"userland": "610.43.02", "cuda": [13, 3]}
    wanted = [{key: value for key, value in gpu.items() if key != "nvlink_links"} for gpu in facts["gpus"]]
    assert answer["gpus"] == wanted
    assert without_acs(answer["pairs"]) == without_acs(facts["pairs"])
    assert [card["minor"] for card in answer["cards"]] == [0, 1, 2, 3]


def test_what_the_driver_keeps_for_itself_is_not_in_use(facts_file):
    facts = simulator.box("box2")
    facts["gpus"][0]["memory_reserved_mib"] = 1400
    assert simulator.python(READ, facts_file(facts))["gpus"][0]["memory_used_mib"] == 1


def test_box1_gets_its_crossed_pairs_and_box2_its_bus_order(facts_file):
    code = (
        "import json; from vllm_fleet.facts import collect; from vllm_fleet.topology import decide;"
        "print(json.dumps(decide(collect.read(), {'tensor_parallel': 2, 'pipeline_parallel': 2})['order']))"
    )
    assert simulator.python(code, facts_file(simulator.box("box1"))) == [0, 2, 1, 3]
    assert simulator.python(code, facts_file(simulator.box("box2"))) == [0, 1, 2, 3]


def test_every_call_that_the_project_uses_answers(facts_file):
    facts = simulator.box("box1")
    facts["gpus"][0].update(processes=[{"pid": 4242, "name": "python", "memory_mib": 900}], vbios="94.02", mig=None)
    code = """
import json, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0); p = n.nvmlDeviceGetHandleByIndex(2)
memory = n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2)
pci = n.nvmlDeviceGetPciInfo(h)
process = n.nvmlDeviceGetComputeRunningProcesses(h)[0]
def error(call, *args):
    try:
        call(*args)
    except n.NVMLError as e:
        return [e.value, str(e)]
print(json.dumps({
 "count": n.nvmlDeviceGetCount(), "nvml": n.nvmlSystemGetNVMLVersion(),
 "uuid": n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(p))),
 "pci": n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId("00000000:81:00.0")),
 "bus": [pci.busId, pci.busIdLegacy, pci.bus], "v2": [memory.total >> 20, memory.used >> 20, memory.reserved],
 "v1": n.nvmlDeviceGetMemoryInfo(h).used >> 20, "bar1": n.nvmlDeviceGetBAR1MemoryInfo(h).bar1Total >> 20,
 "process": [process.pid, process.usedGpuMemory >> 20], "comm": n.nvmlSystemGetProcessName(4242),
 "links": [n.nvmlDeviceGetNvLinkState(h, i) for i in range(4)],
 "remote": n.nvmlDeviceGetNvLinkRemotePciInfo(h, 3).busId, "type": n.nvmlDeviceGetNvLinkRemoteDeviceType(h, 3),
 "status": [n.nvmlDeviceGetP2PStatus(h, p, i) for i in range(4)], "self": n.nvmlDeviceGetTopologyCommonAncestor(h, h),
 "power": [n.nvmlDeviceGetPowerManagementLimit(h), n.nvmlDeviceGetPowerManagementLimitConstraints(h)],
 "persistence": n.nvmlDeviceGetPersistenceMode(h), "vbios": n.nvmlDeviceGetVbiosVersion(h),
 "errors": [error(n.nvmlDeviceGetNvLinkState, h, 4), error(n.nvmlDeviceGetMigMode, h),
            error(n.nvmlDeviceGetNumaNodeId, h),
            error(n.nvmlDeviceGetHandleByIndex, 4), error(n.nvmlDeviceGetHandleByUUID, "GPU-x")],
}))
n.nvmlShutdown()
"""
    answer = simulator.python(code, facts_file(facts))
    assert answer == {
        "count": 4,
        "nvml": "13.610.43.02",
        "uuid": 2,
        "pci": 2,
        "bus": ["00000000:01:00.0", "0000:01:00.0", 1],
        "v2": [24576, 1, 0],
        "v1": 1,
        "bar1": 256,
        "process": [4242, 900],
        "comm": "python",
        "links": [1, 1, 1, 1],
        "remote": "00000000:81:00.0",
        "type": 0,
        "status": [0, 0, 0, 5],
        "self": 0,
        "power": [350000, [100000, 350000]],
        "persistence": 1,
        "vbios": "94.02",
        "errors": [
            [2, "Invalid Argument"],
            [3, "Not Supported"],
            [3, "Not Supported"],
            [2, "Invalid Argument"],
            [6, "Not Found"],
        ],
    }


def test_an_edit_acts_at_the_next_initialisation(facts_file):
    facts = simulator.box("box1")
    path = facts_file(facts)
    fewer = copy.deepcopy(facts)
    del fewer["gpus"][1]
    code = f"""
import json, pynvml as n
counts = []
for text in (None, {json.dumps(json.dumps(fewer))}):
    if text:
        open({str(path)!r}, "w").write(text)
    n.nvmlInit()
    counts.append(n.nvmlDeviceGetCount())
    n.nvmlShutdown()
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0), n.nvmlDeviceGetHandleByIndex(1)
print(json.dumps([counts, n.nvmlDeviceGetP2PStatus(*h, 2)]))
"""
    # what was GPU 2 is now the second one, and still bridged to GPU 0
    assert simulator.python(code, path) == [[4, 3], 0]


def test_an_nvswitch_guest_shows_lanes_on_every_pair(facts_file):
    facts = simulator.box("box2")
    facts["nvlink_fabric"] = True
    for pair in facts["pairs"]:
        pair.update(nvlink_lanes=6, p2p_read="ok", p2p_write="ok", ancestor="hostbridge")
    answer = simulator.python(READ, facts_file(facts))
    assert {pair["nvlink_lanes"] for pair in answer["pairs"]} == {18}


def test_a_refused_nvlink_grant_is_no_lane(facts_file):
    facts = simulator.box("box2")
    facts["nvlink_fabric"] = True
    for pair in facts["pairs"]:
        pair.update(nvlink_lanes=6, p2p_nvlink="not_supported")
    answer = simulator.python(READ, facts_file(facts))
    assert {pair["nvlink_lanes"] for pair in answer["pairs"]} == {0}


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"driver": {"loaded": None, "userland": "610.43.02"}}, "driver_not_loaded"),
        ({"gpus": None}, "driver_not_loaded"),
        ({"driver": {"loaded": "595.84", "userland": "610.43.02"}}, "driver_mismatch"),
        ({"faults": [{"call": "nvmlInit", "error": "no_permission"}]}, "nvml_error"),
        ({"faults": [{"call": "nvmlDeviceGetCount", "error": 999}]}, "nvml_error"),
    ],
)
def test_no_cards_and_the_reason(change, status, facts_file):
    answer = simulator.python(READ, facts_file({**simulator.box("box1"), **change}))
    assert (answer["status"], answer["gpus"]) == (status, None)


def test_a_mismatch_names_the_version_of_the_library(facts_file):
    facts = {**simulator.box("box1"), "driver": {"loaded": "595.84", "userland": "610.43.02"}}
    assert simulator.python(READ, facts_file(facts))["driver"]["userland"] == "610.43.02"


def test_the_program_on_the_box_brings_the_bindings(facts_file, tmp_path):
    """The distribution's Python has no pynvml; the packed program has."""
    program = tmp_path / "vllm-fleet"
    with zipfile.ZipFile(program, "w") as archive:
        archive.write(pynvml.__file__, "pynvml.py")
    program.write_bytes(b"#!/usr/bin/python3\n" + program.read_bytes())
    read = f"""
import json, sys
sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
from vllm_fleet.facts import nvml
nvml.PROGRAM = {str(tmp_path / "absent")!r}
missing = nvml.read()["status"]
nvml.PROGRAM = {str(program)!r}
print(json.dumps([missing, nvml.read()["status"]]))
"""
    assert simulator.python(read, facts_file(simulator.box("box1"))) == ["pynvml_missing", "ok"]


def test_no_library_and_no_facts_file(facts_file, tmp_path):
    answer = simulator.python(READ, facts_file(simulator.box("box1")), installed=False)
    assert (answer["status"], answer["gpus"]) == ("library_missing", None)
    assert simulator.python(READ, tmp_path / "absent.json")["status"] == "driver_not_loaded"


def test_a_damaged_facts_file_is_a_driver_that_does_not_load(tmp_path, capfd):
    path = tmp_path / "facts.json"
    path.write_text('{"gpus": [\n{"index": 0,}]}')
    assert simulator.python(READ, path)["status"] == "driver_not_loaded"
    assert f"{path}:2: a string was expected" in capfd.readouterr().err


def test_a_lost_card_keeps_its_address(facts_file):
    facts = simulator.box("box1")
    facts["gpus"][1]["health"] = "lost"
    answer = simulator.python(READ, facts_file(facts))
    lost, whole = answer["gpus"][1], answer["gpus"][0]
    assert (lost["health"], lost["bus_id"], lost["uuid"], lost["processes"]) == ("lost", "0000:41:00.0", None, None)
    assert whole["health"] == "ok"
    states = {tuple(pair["gpus"]): (pair["p2p_read"], pair["nvlink_lanes"]) for pair in answer["pairs"]}
    assert states[(0, 2)] == ("ok", 4)
    assert states[(1, 3)] == ("unknown", None)


def test_a_card_without_a_handle_keeps_its_place(facts_file):
    facts = simulator.box("box1")
    facts["faults"] = [{"call": "nvmlDeviceGetHandleByIndex", "gpu": 1, "error": "gpu_is_lost"}]
    answer = simulator.python(READ, facts_file(facts))
    assert [gpu["health"] for gpu in answer["gpus"]] == ["ok", "lost", "ok", "ok"]
    assert [gpu["bus_id"] for gpu in answer["gpus"]] == ["0000:01:00.0", None, "0000:81:00.0", "0000:c4:00.0"]


@pytest.mark.parametrize(
    "change",
    [
        {"gpus": 1},
        {"faults": [{"call": "nvmlDeviceGetHandleByIndex", "gpu": 1, "error": "gpu_is_lost"}]},
        {"faults": [{"call": "nvmlDeviceGetName", "gpu": 1, "error": "gpu_is_lost"}]},
    ],
)
def test_a_lost_card_is_the_reason_of_the_refusal(change, facts_file):
    facts = simulator.box("box1")
    if "gpus" in change:
        facts["gpus"][1]["health"] = "lost"
    else:
        facts.update(change)
    code = (
        "import json; from vllm_fleet.facts import collect; from vllm_fleet.topology import decide;"
        "d = decide(collect.read(), {'tensor_parallel': 2, 'pipeline_parallel': 2});"
        "e = decide(collect.read(), {'tensor_parallel': 2});"
        "print(json.dumps([d['status'], d['reason'], e['status'], e['order'], [w['code'] for w in e['warnings']]]))"
    )
    # four of four are not there; two of the three that are left can be had, and it is said which one was left out
    status, reason, fewer, order, warnings = simulator.python(code, facts_file(facts))
    assert (status, reason) == ("refused", "gpu_lost")
    assert (fewer, order) == ("selected", [0, 2])
    assert "gpu_skipped" in warnings


def test_one_call_that_fails_costs_one_value(facts_file):
    facts = simulator.box("box1")
    facts["faults"] = [
        {"call": "nvmlDeviceGetBAR1MemoryInfo", "gpu": 2, "error": "unknown"},
        {"call": "nvmlDeviceGetComputeRunningProcesses", "gpu": 3, "error": "no_permission"},
    ]
    answer = simulator.python(READ, facts_file(facts))
    assert [gpu["bar1_total_mib"] for gpu in answer["gpus"]] == [256, 256, None, 256]
    assert [gpu["processes"] for gpu in answer["gpus"]] == [[], [], [], None]
    assert {gpu["health"] for gpu in answer["gpus"]} == {"ok"}


def test_a_hung_driver_costs_the_timeout_and_no_more(facts_file):
    facts = simulator.box("box1")
    facts["faults"] = [{"call": "nvmlDeviceGetP2PStatus", "gpu": 1, "hang_s": 600}]
    path = facts_file(facts)
    started = time.monotonic()
    answer = simulator.python(COLLECT.format(timeout=1), path)
    assert time.monotonic() - started < 10
    assert (answer["gpus"], answer["extra"]["status"]) == (None, "timeout")
    assert "1 s" in answer["extra"]["message"]


def test_a_slow_call_within_the_limit_is_waited_for(facts_file):
    facts = simulator.box("box1")
    facts["faults"] = [{"call": "nvmlInit", "hang_s": 0.3}]
    assert len(simulator.python(COLLECT.format(timeout=20), facts_file(facts))["gpus"]) == 4
