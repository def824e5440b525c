"""NUMA binding: the first rule that applies."""

import pytest
from topology_boxes import box, shape
from vllm_fleet.topology import decide
from vllm_fleet.topology.binding import format_cpulist, parse_cpulist


def binding(facts, **policy):
    return decide(facts, shape(2, gpus=["0", "1"], bind=True, **policy))["binding"]


def test_bound():
    assert binding(box(2, nodes=2)) == {"cpus": "0-15", "node": 0}
    assert binding(box(2, nodes=2), cpus="4-11,20") == {"cpus": "4-11", "node": 0}
    assert binding(box(2, nodes=2, host={"allowed_cpus": "0-3,8-20"})) == {"cpus": "0-3,8-15", "node": 0}
    assert binding(box(2, nodes=2, host={"virtualization": "container"})) == {"cpus": "0-15", "node": 0}


def nodes(**changes):
    facts = box(2, nodes=2)
    facts["host"]["numa_nodes"]["0"].update(changes)
    return facts


#: worst first: each row also carries the faults of all rows below it
ROWS = [
    ("single_node", {"numa_nodes": {"0": {"cpus": "0-15"}}}, None, {}),
    ("numa_unknown", {}, [None, 1], {}),
    ("lane_spans_nodes", {}, [0, 1], {}),
    ("cpus_invalid", {}, None, {"cpus": "4-"}),
    ("too_few_cpus", {}, None, {"cpus": "0-6"}),
    ("node_not_allowed", {"allowed_mems": "1"}, None, {}),
    ("memory_low", {}, None, {"host_resident_kib": 900_001}),
    ("virtual_numa", {"virtualization": "passthrough"}, None, {}),
]


@pytest.mark.parametrize("start", range(len(ROWS)), ids=[row[0] for row in ROWS])
def test_the_first_that_applies(start):
    facts, policy = box(2, nodes=2), {}
    for _, host, on, more in reversed(ROWS[start:]):
        facts["host"].update(host)
        policy.update(more)
        if on:
            for card, node in zip(facts["gpus"], on):
                card["numa_node"] = node
    assert binding(facts, **policy) == {"skipped": ROWS[start][0]}


def test_not_requested():
    assert decide(box(2, nodes=2), shape(2))["binding"] == {"skipped": "not_requested"}


def test_refused():
    assert decide(box(1), shape(2, bind=True))["binding"] == {"skipped": "refused"}


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (box(2, nodes=2, host={"numa_nodes": None}), "single_node"),
        (box(2, nodes=2, gpus={1: {"numa_node": -1}}), "numa_unknown"),
        (box(2, nodes=2, gpus={0: {"numa_node": 7}, 1: {"numa_node": 7}}), "numa_unknown"),
        (nodes(cpus=None), "too_few_cpus"),
        (nodes(cpus="x"), "too_few_cpus"),
        (box(2, nodes=2, host={"allowed_cpus": None}), "too_few_cpus"),
        (box(2, nodes=2, host={"allowed_mems": None}), "node_not_allowed"),
        (nodes(memory_available_kib=None), "memory_low"),
        (box(2, nodes=2, host={"virtualization": "unknown"}), "virtual_numa"),
        (box(2, nodes=2, host={"virtualization": "wsl"}), "virtual_numa"),
    ],
)
def test_unreadable_facts_give_the_code_of_their_step(facts, code):
    assert binding(facts, host_resident_kib=1) == {"skipped": code}


def test_edges():
    assert "cpus" in binding(box(2, nodes=2), cpus="0-7")
    assert binding(box(2, nodes=2), cpus="0-6") == {"skipped": "too_few_cpus"}
    assert binding(box(2, nodes=2), cpus="") == {"skipped": "too_few_cpus"}
    assert "cpus" in binding(box(2, nodes=2), host_resident_kib=750_000)
    assert binding(box(2, nodes=2), host_resident_kib=750_001) == {"skipped": "memory_low"}
    assert "cpus" in binding(nodes(memory_available_kib=None))


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1,,2", "1;2", "1-2-3", "99999", "٣", "1\n;x", "0x1", ","])
def test_malformed_cpulist(text):
    assert parse_cpulist(text) is None


def test_cpulist():
    assert parse_cpulist(" 0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_cpulist("") == set()
    assert format_cpulist({0, 1, 2, 3, 8, 10, 11}) == "0-3,8,10-11"
