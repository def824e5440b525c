"""What facts and policies are refused with exit 2, and what is only unknown."""

import pytest
from topology_boxes import box, shape
from vllm_fleet.errors import UsageError
from vllm_fleet.topology import POLICY_DEFAULTS, decide, validate_facts, validate_policy


def changed(path, value):
    facts = box(2, verdict={"0-1": "pass"})
    here = facts
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = value
    return facts


BAD_FACTS = [
    (("schema",), 2),
    (("schema",), "1"),
    (("schema",), True),
    (("vendor",), 1),
    (("gpus",), {}),
    (("gpus",), "x"),
    (("gpus", 0), None),
    (("gpus", 0, "index"), None),
    (("gpus", 0, "index"), "0"),
    (("gpus", 0, "index"), True),
    (("gpus", 0, "index"), -1),
    (("gpus", 0, "index"), 1),
    (("gpus", 0, "index"), 5),
    (("gpus", 0, "index"), 0.0),
    (("gpus", 0, "uuid"), 7),
    (("gpus", 0, "uuid"), ""),
    (("gpus", 0, "uuid"), "GPU-$(reboot)"),
    (("gpus", 0, "uuid"), "GPU-a,1"),
    (("gpus", 0, "uuid"), "GPU-a\nLD_PRELOAD=x"),
    (("gpus", 0, "bus_id"), "0000:01:00.0;x"),
    (("gpus", 0, "name"), "RTX\x1b[0m"),
    (("gpus", 0, "name"), "RTX `3090`"),
    (("gpus", 0, "numa_node"), "0"),
    (("gpus", 0, "numa_node"), -2),
    (("gpus", 0, "health"), "fine"),
    (("gpus", 0, "memory_total_mib"), "24576"),
    (("gpus", 0, "memory_total_mib"), 24576.0),
    (("gpus", 0, "memory_used_mib"), -1),
    (("gpus", 0, "mig"), 0),
    (("gpus", 0, "display"), "no"),
    (("gpus", 0, "pcie"), []),
    (("gpus", 0, "pcie", "width_max"), "16"),
    (("gpus", 0, "compute_capability"), [8]),
    (("gpus", 0, "compute_capability"), "8.6"),
    (("gpus", 0, "processes"), {}),
    (("gpus", 0, "processes"), [1]),
    (("gpus", 0, "processes"), [{"pid": "1"}]),
    (("pairs",), {}),
    (("pairs", 0), []),
    (("pairs", 0, "gpus"), [0]),
    (("pairs", 0, "gpus"), [0, 0]),
    (("pairs", 0, "gpus"), ["0", "1"]),
    (("pairs", 0, "gpus"), [0, 2]),
    (("pairs", 0, "ancestor"), "PHB"),
    (("pairs", 0, "p2p_read"), "OK"),
    (("pairs", 0, "nvlink_lanes"), -1),
    (("pairs", 0, "nvlink_lanes"), "4"),
    (("pairs", 0, "acs"), "yes"),
    (("host",), []),
    (("host", "iommu"), "on"),
    (("host", "virtualization"), "kvm"),
    (("host", "numa_nodes"), []),
    (("host", "numa_nodes"), {"zero": {}}),
    (("host", "numa_nodes", "0"), "0-31"),
    (("host", "allowed_cpus"), [0]),
    (("driver",), "580"),
    (("driver", "loaded"), 580),
    (("p2p_verdict",), "pass"),
    (("p2p_verdict", "status"), "ok"),
    (("p2p_verdict", "status"), None),
    (("p2p_verdict", "pairs"), []),
    (("p2p_verdict", "pairs"), {"0": "pass"}),
    (("p2p_verdict", "pairs"), {"0-0": "pass"}),
    (("p2p_verdict", "pairs"), {"0-1": "good"}),
    (("p2p_verdict", "pairs"), {"0-1": "pass", "1-0": "fail"}),
]


@pytest.mark.parametrize(("path", "value"), BAD_FACTS)
def test_bad_facts(path, value):
    with pytest.raises(UsageError) as error:
        decide(changed(path, value), shape(2))
    assert error.value.reason == "bad_facts"
    assert error.value.exit_code == 2
    assert "facts" in error.value.message
    assert error.value.one_line().isprintable()


@pytest.mark.parametrize("facts", [None, [], 1, "x", {}, {"schema": 1}])
def test_no_facts(facts):
    with pytest.raises(UsageError, match="facts"):
        validate_facts(facts)


def test_an_unsorted_list_is_refused():
    facts = box(2)
    facts["gpus"].reverse()
    with pytest.raises(UsageError, match="not sorted by index"):
        validate_facts(facts)
    twice = box(2, pairs=[])
    twice["gpus"][1]["index"] = 0
    with pytest.raises(UsageError, match="not sorted by index"):
        validate_facts(twice)


def test_a_pair_listed_twice():
    facts = box(2)
    facts["pairs"].append({**facts["pairs"][0], "gpus": [1, 0]})
    assert decide(facts, shape(2))["status"] == "selected"
    facts["pairs"][1]["nvlink_lanes"] = 4
    with pytest.raises(UsageError, match="twice"):
        validate_facts(facts)


def test_unknown_keys_in_facts_are_for_other_readers():
    assert decide({**box(1), "nics": []}, shape())["status"] == "selected"


def test_bus_ids_are_normalised():
    facts = validate_facts(box(2, gpus={0: {"bus_id": "00000000:0A:00.0"}, 1: {"bus_id": "00010000:0B:00.0"}}))
    assert [gpu["bus_id"] for gpu in facts["gpus"]] == ["0000:0a:00.0", "00010000:0b:00.0"]


BAD_POLICY = [
    ("mode", "manual"),
    ("mode", None),
    ("tensor_parallel", 0),
    ("tensor_parallel", "2"),
    ("tensor_parallel", True),
    ("tensor_parallel", 2.0),
    ("tensor_parallel", None),
    ("pipeline_parallel", -1),
    ("pipeline_parallel", 2000),
    ("gpus", "0"),
    ("gpus", [0]),
    ("gpus", ["$(x)"]),
    ("gpus", ["0,1"]),
    ("lane_gpus", True),
    ("lane_gpus", "all"),
    ("exclude", None),
    ("exclude", [1]),
    ("min_memory_mib", -1),
    ("min_memory_mib", "24G"),
    ("identical", 1),
    ("allow_busy", "no"),
    ("p2p", "yes"),
    ("nccl_proto", "Simple"),
    ("layer_partition", [25, 23]),
    ("layer_partition", [0]),
    ("layer_partition", "48"),
    ("bind", None),
    ("cpus", [0]),
    ("host_resident_kib", None),
    ("caller_env", None),
    ("caller_env", []),
    ("caller_env", {"NCCL_PROTO": 1}),
    ("caller_env", {"NCCL_PROTO": None}),
    ("caller_env", {"NCCL_PROTO": "LL; reboot"}),
    ("caller_env", {"NCCL_PROTO": "$(id)"}),
    ("caller_env", {"CUDA_VISIBLE_DEVICES": "0\n1"}),
    ("caller_env", {"LD_PRELOAD": "a b"}),
]


@pytest.mark.parametrize(("key", "value"), BAD_POLICY)
def test_bad_policy(key, value):
    with pytest.raises(UsageError) as error:
        validate_policy({key: value})
    assert error.value.reason == "bad_policy"
    assert key in error.value.message
    assert error.value.one_line().isprintable()


@pytest.mark.parametrize("policy", [None, [], "x", 1])
def test_no_policy(policy):
    with pytest.raises(UsageError, match="policy"):
        validate_policy(policy)


def test_defaults():
    assert validate_policy({}) == POLICY_DEFAULTS
    assert validate_policy({"mode": "strict"}) == {**POLICY_DEFAULTS, "mode": "strict"}


def test_an_unknown_key_comes_with_a_suggestion():
    with pytest.raises(UsageError, match="did you mean tensor_parallel") as error:
        validate_policy({"tensor_paralel": 2})
    assert error.value.reason == "unknown_policy_key"
    with pytest.raises(UsageError, match="known: mode, tensor_parallel"):
        validate_policy({"\x1b[31m": 2})


def test_an_unknown_variable_comes_with_a_suggestion():
    with pytest.raises(UsageError, match="did you mean NCCL_PROTO") as error:
        validate_policy({"caller_env": {"NCCL_PROT": "LL"}})
    assert error.value.reason == "unknown_variable"


def test_inputs_are_not_changed():
    facts, policy = box(3, verdict={"0-1": "pass"}), shape(2, gpus=[" 1", "0"], caller_env={"NCCL_PROTO": "LL"})
    before = repr((facts, policy))
    decide(facts, policy)
    assert repr((facts, policy)) == before
