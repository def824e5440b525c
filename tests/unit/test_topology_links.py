"""Link classes, the order, and what P2P state, environment and engine arguments follow from them."""

import pytest
from topology_boxes import RTX, box, codes, refused, shape, values
from vllm_fleet.topology import decide

FIXED = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "VLLM_SKIP_P2P_CHECK": "1",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_P2P_DISABLE": None,
    "NCCL_PROTO": "LL",
}
OFF = {**FIXED, "VLLM_SKIP_P2P_CHECK": "0", "NCCL_P2P_LEVEL": None, "NCCL_P2P_DISABLE": "1"}
ON = {**FIXED, "VLLM_SKIP_P2P_CHECK": "0"}
NVL = {**ON, "NCCL_P2P_LEVEL": "NVL"}
NO_CUSTOM = ["--disable-custom-all-reduce"]
PASS, FAIL, INCONCLUSIVE = {"0-1": "pass"}, {"0-1": "fail"}, {"0-1": "inconclusive"}


def settings(decision):
    """Return the environment without the list of GPUs."""
    return {name: value for name, value in values(decision).items() if name != "CUDA_VISIBLE_DEVICES"}


@pytest.mark.parametrize(
    ("link", "verdict", "p2p", "expected"),
    [
        ("NV4 NODE", None, "proven", 6),
        ("NV1 SYS", None, "proven", 6),
        ("NV4 ? ?", None, "proven", 6),
        ("NV4 PHB", FAIL, "proven", 2.25),
        ("NV4 SYS", FAIL, "proven", 1),
        ("INT ok", PASS, "proven", 5),
        ("PIX ok", PASS, "proven", 5),
        ("PXB ok", PASS, "required", 5),
        ("PXB ok", None, "trusted", 5),
        ("PHB ok", PASS, "proven", 4),
        ("NODE ok", PASS, "proven", 3),
        ("SYS ok", PASS, "proven", 1),
        ("INT CNS", None, "trusted", 2.5),
        ("PIX ok", None, "proven", 2.5),
        ("PXB ok", INCONCLUSIVE, "proven", 2.5),
        ("PXB ok", INCONCLUSIVE, "trusted", 5),
        ("PHB ok", FAIL, "proven", 2.25),
        ("PHB GNS", PASS, "proven", 2.25),
        ("NODE CNS", None, "trusted", 2),
        ("SYS CNS", None, "trusted", 1),
        ("SYS ?", None, "proven", 1),
        ("NODE ?", None, "proven", None),
        ("? ok", None, "trusted", None),
    ],
)
def test_class(link, verdict, p2p, expected):
    decision = decide(box(2, default=link, verdict=verdict), shape(2, p2p=p2p, identical=False))
    assert (decision["score"] or {"tensor_min": None})["tensor_min"] == expected


@pytest.mark.parametrize("key", ["p2p_read", "p2p_write"])
def test_both_directions_count(key):
    facts = box(2, default="PHB ok", verdict=PASS)
    facts["pairs"][0][key] = "disabled_by_regkey"
    assert decide(facts, shape(2))["score"]["tensor_min"] == 2.25
    facts["pairs"][0][key] = "unknown"
    assert decide(facts, shape(2))["reason"] == "facts_unknown"


def test_unread_lanes_are_a_doubt():
    facts = box(2)
    facts["pairs"][0]["nvlink_lanes"] = None
    assert decide(facts, shape(2))["reason"] == "facts_unknown"


class TestOrder:
    def test_smallest_class_inside_groups_comes_first(self):
        links = {(0, 1): "NV4", (2, 3): "SYS CNS"}  # 0,1,2,3 sums to 7; 0,2,1,3 to 4 but never falls to 1
        assert decide(box(4, links=links), shape(2, 2))["order"] == [0, 2, 3, 1]

    def test_then_their_sum(self):
        links = {(0, 3): "NV4"}
        assert decide(box(4, links=links), shape(2, 2))["order"] == [0, 3, 1, 2]

    def test_then_the_smallest_pipeline_edge(self):
        links = {(0, 1): "NV4", (2, 3): "NV4", (0, 2): "SYS CNS"}
        decision = decide(box(4, links=links), shape(2, 2))
        assert decision["order"] == [0, 1, 3, 2]
        assert decision["score"] == {"tensor_min": 6, "tensor_sum": 12, "pipeline_min": 2}
        assert decision["input_score"] == {"tensor_min": 6, "tensor_sum": 12, "pipeline_min": 1}

    def test_a_given_order_is_kept_among_equals(self):
        decision = decide(box(4), shape(2, 2, gpus=["3", "1", "0", "2"]))
        assert (decision["reason"], decision["order"]) == ("kept", [3, 1, 0, 2])

    def test_a_given_order_yields_to_a_strictly_better_one(self):
        decision = decide(box(4, links={(0, 1): "NV4"}), shape(2, 2, gpus=["3", "1", "0", "2"]))
        assert (decision["reason"], decision["order"]) == ("reordered", [0, 1, 2, 3])
        assert decision["env"]["CUDA_VISIBLE_DEVICES"]["source"] == "selector"

    def test_the_callers_order_may_be_changed(self):
        policy = shape(2, 2, caller_env={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
        decision = decide(box(4, links={(0, 2): "NV4", (1, 3): "NV4"}), policy)
        assert decision["order"] == [0, 2, 1, 3]
        assert decision["env"]["CUDA_VISIBLE_DEVICES"] == {"value": "0,2,1,3", "source": "selector"}

    def test_larger_stage_takes_the_group_with_more_free_memory(self):
        gpus = {0: {"memory_used_mib": 900}, 1: {"memory_used_mib": 0}, 2: {"memory_used_mib": 500}}
        links = {(0, 1): "NV4", (2, 3): "NV4"}
        order = decide(box(4, gpus=gpus, links=links), shape(2, 2, layer_partition=[25, 23]))["order"]
        assert order == [2, 3, 0, 1]  # the poorest card of 0,1 has 900 MiB in use, of 2,3 only 500
        assert decide(box(4, gpus=gpus, links=links), shape(2, 2, layer_partition=[23, 25]))["order"] == [0, 1, 2, 3]
        assert decide(box(4, gpus=gpus, links=links), shape(2, 2, layer_partition=[24, 24]))["order"] == [0, 1, 2, 3]

    def test_a_given_order_wins_over_the_layer_partition(self):
        gpus = {0: {"memory_used_mib": 900}}
        policy = shape(2, 2, layer_partition=[25, 23], gpus=["0", "1", "2", "3"])
        assert decide(box(4, gpus=gpus), policy)["order"] == [0, 1, 2, 3]

    def test_unread_memory_leaves_bus_order(self):
        gpus = {0: {"memory_used_mib": 900}, 3: {"memory_used_mib": None}}
        policy = shape(2, 2, layer_partition=[25, 23], allow_busy=True)
        assert decide(box(4, gpus=gpus), policy)["order"] == [0, 1, 2, 3]

    def test_candidates(self):
        decision = decide(box(4, links={(0, 2): "NV4", (1, 3): "NV4"}), shape(2, 2))
        assert [candidate["order"] for candidate in decision["candidates"]] == [[0, 2, 1, 3], [0, 1, 2, 3]]
        assert decision["candidates"][1]["score"] == decision["input_score"]


class TestSelected:
    @pytest.mark.parametrize(
        ("link", "verdict", "p2p", "env", "arguments", "warnings"),
        [
            ("PHB ok", PASS, "proven", ON, [], []),
            ("PHB ok", PASS, "required", ON, [], []),
            ("PHB ok", None, "trusted", ON, NO_CUSTOM, []),
            ("PHB ok", INCONCLUSIVE, "trusted", ON, NO_CUSTOM, []),
            ("PHB ok", PASS, "trusted", ON, [], []),
            ("SYS ok", PASS, "proven", ON, [], []),
            ("NV4 PHB CNS", None, "proven", NVL, [], []),
            ("NV4 PHB ok", None, "proven", NVL, [], []),
            ("NV4 PHB", None, "required", NVL, [], []),
            ("NV4 PHB ok", FAIL, "proven", OFF, NO_CUSTOM, ["p2p_unproven"]),
            ("PHB ok", None, "proven", OFF, NO_CUSTOM, ["p2p_unproven"]),
            ("PHB ok", INCONCLUSIVE, "proven", OFF, NO_CUSTOM, ["p2p_unproven"]),
            ("PHB ok", FAIL, "proven", OFF, NO_CUSTOM, ["p2p_unproven"]),
            ("PHB CNS", None, "proven", OFF, NO_CUSTOM, []),
            ("PHB CNS", None, "trusted", OFF, NO_CUSTOM, []),
        ],
    )
    def test_one_pair(self, link, verdict, p2p, env, arguments, warnings):
        # a third, idle card keeps the trusted cases from being the reference layout
        facts = box(3, default=link, verdict=verdict)
        decision = decide(facts, shape(2, p2p=p2p, gpus=["0", "1"]))
        assert decision["status"] == "selected"
        assert settings(decision) == env
        assert decision["engine_args"] == arguments
        assert codes(decision) == warnings

    @pytest.mark.parametrize(
        ("links", "verdict", "env", "arguments"),
        [
            # every granted pair that is used must be usable
            ({(0, 1): "PXB ok", (2, 3): "PXB ok"}, {"0-1": "pass", "2-3": "pass"}, ON, []),
            ({(0, 1): "PXB ok", (2, 3): "PXB ok"}, {"0-1": "pass"}, OFF, NO_CUSTOM),
            ({(0, 1): "PXB ok", (2, 3): "PXB CNS"}, {"0-1": "pass"}, ON, NO_CUSTOM),
            # NVLink in one group: NCCL may use it there, and the other group goes through the host
            ({(0, 1): "NV4", (2, 3): "PXB CNS"}, None, NVL, NO_CUSTOM),
            ({(0, 1): "NV4", (2, 3): "PXB ok"}, None, NVL, NO_CUSTOM),
            ({(0, 1): "NV4", (2, 3): "PXB ok"}, {"2-3": "pass"}, ON, []),
            ({(0, 1): "NV4", (2, 3): "PXB ok"}, {"2-3": "fail"}, NVL, NO_CUSTOM),
            # what isn't used isn't judged
            ({(0, 1): "PXB ok", (2, 3): "PXB ok", (0, 3): "NODE ok"}, {"0-1": "pass", "2-3": "pass"}, ON, []),
            ({(0, 1): "PXB ok", (2, 3): "PXB ok", (0, 2): "NODE ok"}, {"0-1": "pass", "2-3": "pass"}, ON, []),
        ],
    )
    def test_two_groups(self, links, verdict, env, arguments):
        decision = decide(box(4, links=links, verdict=verdict), shape(2, 2))
        assert decision["order"] == [0, 1, 2, 3]
        assert settings(decision) == env
        assert decision["engine_args"] == arguments

    def test_a_failed_pipeline_edge_is_a_veto(self):
        links = {(0, 1): "PXB ok", (2, 3): "PXB ok"}
        verdict = {"0-1": "pass", "2-3": "pass", "0-2": "fail", "1-3": "fail", "0-3": "fail", "1-2": "fail"}
        decision = decide(box(4, default="NODE ok", links=links, verdict=verdict), shape(2, 2))
        assert settings(decision) == OFF
        assert (
            refused(box(4, default="NODE ok", links=links, verdict=verdict), shape(2, 2, p2p="required"))
            == "p2p_failed"
        )

    def test_a_failed_nvlink_pair_turns_all_off(self):
        links = {(0, 1): "NV4", (2, 3): "NV4"}
        decision = decide(box(4, links=links, verdict={"0-1": "fail"}, gpus={}), shape(4))
        assert settings(decision) == OFF

    def test_groups_of_one_are_judged_by_their_pipeline_edges(self):
        facts = box(3, default="PHB ok", verdict={"0-1": "pass", "1-2": "pass"})
        decision = decide(facts, shape(1, 3))
        assert (decision["order"], settings(decision), decision["engine_args"]) == ([0, 1, 2], ON, [])
        assert decision["score"] == {"tensor_min": None, "tensor_sum": 0, "pipeline_min": 4}
        decision = decide(box(3, default="PHB ok", verdict={"0-1": "pass"}), shape(1, 3))
        assert (settings(decision), codes(decision)) == (OFF, ["p2p_unproven"])

    def test_one_card(self):
        decision = decide(box(1), shape())
        assert (decision["order"], decision["engine_args"], codes(decision)) == ([0], [], [])
        assert decision["score"] == {"tensor_min": None, "tensor_sum": 0, "pipeline_min": None}

    def test_nccl_proto_default(self):
        assert values(decide(box(2), shape(2, nccl_proto="default")))["NCCL_PROTO"] is None
        facts = box(2, default="PHB ok", verdict=PASS)
        assert values(decide(facts, shape(2, nccl_proto="default")))["NCCL_PROTO"] == "LL"
        assert values(decide(box(2, default="NV4"), shape(2, nccl_proto="default")))["NCCL_PROTO"] == "LL"

    @pytest.mark.parametrize(("verdict", "source"), [(PASS, "verdict"), (FAIL, "verdict"), (None, "selector")])
    def test_source_says_that_a_verdict_decided(self, verdict, source):
        env = decide(box(2, default="PHB ok", verdict=verdict), shape(2))["env"]
        assert env["NCCL_P2P_LEVEL"]["source"] == env["NCCL_P2P_DISABLE"]["source"] == source
        assert env["NCCL_PROTO"]["source"] == "selector"

    def test_a_failed_verdict_without_pairs_counts_for_all(self):
        facts = box(2, default="PHB ok")
        facts["p2p_verdict"] = {"status": "fail", "pairs": {}}
        assert settings(decide(facts, shape(2))) == OFF
        assert refused(facts, shape(2, p2p="trusted")) == "p2p_failed"


class TestP2pPolicy:
    @pytest.mark.parametrize("link", ["PHB ok", "NV4 PHB", "SYS ok"])
    def test_failed_inside_a_group(self, link):
        facts = box(2, default=link, verdict=FAIL)
        assert refused(facts, shape(2, p2p="trusted")) == "p2p_failed"
        assert refused(facts, shape(2, p2p="required")) == "p2p_failed"
        assert decide(facts, shape(2, p2p="proven"))["status"] == "selected"

    @pytest.mark.parametrize("mode", ["auto", "strict", "fixed"])
    @pytest.mark.parametrize(
        ("link", "verdict"),
        [("PHB ok", None), ("PHB ok", INCONCLUSIVE), ("PHB CNS", None), ("PHB CNS", PASS), ("PHB ?", None)],
    )
    def test_required_wants_proof(self, mode, link, verdict):
        assert refused(box(2, default=link, verdict=verdict), shape(2, mode=mode, p2p="required")) == "p2p_unproven"

    @pytest.mark.parametrize("mode", ["auto", "strict", "fixed"])
    def test_required_is_content_with_proof_nvlink_or_one_card(self, mode):
        for facts, tensor in ((box(2, default="PHB ok", verdict=PASS), 2), (box(2, default="NV4"), 2), (box(1), 1)):
            assert decide(facts, shape(tensor, mode=mode, p2p="required"))["status"] != "refused"

    @pytest.mark.parametrize("p2p", ["proven", "trusted", "required"])
    def test_fixed_is_refused_on_a_failed_pair_of_its_own(self, p2p):
        verdict = {"0-1": "fail"}
        facts = box(3, default="PHB ok", verdict=verdict)
        assert refused(facts, shape(2, mode="fixed", p2p=p2p)) == "p2p_failed"
        assert refused(facts, shape(1, 2, mode="fixed", p2p=p2p)) == "p2p_failed"
        if p2p != "required":
            assert decide(facts, shape(2, mode="fixed", p2p=p2p, gpus=["0", "2"]))["status"] == "fixed"

    def test_the_fallback_is_refused_on_a_failed_pair(self):
        facts = box(2, default="PHB ok", verdict=FAIL, gpus={0: {"health": "unknown"}})
        assert refused(facts, shape(2)) == "p2p_failed"


class TestFixed:
    def test_settings(self):
        decision = decide(box(2, default="PHB ok"), shape(2, mode="fixed"))
        assert (decision["status"], decision["reason"]) == ("fixed", "fixed")
        assert settings(decision) == FIXED
        assert decision["engine_args"] == []
        assert {entry["source"] for entry in decision["env"].values()} == {"fixed"}

    def test_the_given_order_stays(self):
        facts = box(4, links={(0, 1): "NV4", (2, 3): "NV4"})
        decision = decide(facts, shape(2, 2, mode="fixed", gpus=["3", "1", "0", "2"]))
        assert decision["order"] == [3, 1, 0, 2]

    def test_the_callers_values_are_overwritten(self):
        caller = {"NCCL_PROTO": "Simple", "CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": "1,0"}
        decision = decide(box(2), shape(2, mode="fixed", caller_env=caller))
        assert values(decision) == {**FIXED, "CUDA_VISIBLE_DEVICES": "1,0"}
        assert {entry["source"] for entry in decision["env"].values()} == {"fixed"}


class TestCaller:
    @pytest.mark.parametrize("mode", ["auto", "strict"])
    def test_the_callers_values_win(self, mode):
        caller = {"NCCL_PROTO": "Simple", "NCCL_P2P_LEVEL": "PHB", "VLLM_SKIP_P2P_CHECK": ""}
        env = decide(box(2, default="PHB ok", verdict=PASS), shape(2, mode=mode, caller_env=caller))["env"]
        for name, value in caller.items():
            assert env[name] == {"value": value, "source": "caller"}
        assert env["CUDA_DEVICE_ORDER"] == {"value": "PCI_BUS_ID", "source": "selector"}

    def test_also_in_the_fallback(self):
        caller = {"NCCL_PROTO": "Simple", "CUDA_VISIBLE_DEVICES": "1,0"}
        env = decide(box(2, default="? ?"), shape(2, caller_env=caller))["env"]
        assert env["NCCL_PROTO"] == {"value": "Simple", "source": "caller"}
        assert env["CUDA_VISIBLE_DEVICES"] == {"value": "1,0", "source": "caller"}
        assert env["NCCL_P2P_LEVEL"] == {"value": "SYS", "source": "fixed"}

    @pytest.mark.parametrize("facts", [box(2), box(2, default="? ?")], ids=["selected", "fallback"])
    def test_a_foreign_device_order_makes_uuids(self, facts):
        decision = decide(facts, shape(2, gpus=["1", "0"], caller_env={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}))
        assert values(decision)["CUDA_VISIBLE_DEVICES"] == ",".join(decision["lane"])
        assert decision["order"] == [1, 0]
        assert decision["env"]["CUDA_DEVICE_ORDER"] == {"value": "FASTEST_FIRST", "source": "caller"}

    def test_a_foreign_device_order_needs_uuids(self):
        facts = box(1, gpus={0: {"uuid": None}})
        assert refused(facts, shape(caller_env={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})) == "unresolved_gpu"

    def test_a_blank_device_order_is_none(self):
        env = decide(box(1), shape(caller_env={"CUDA_DEVICE_ORDER": ""}))["env"]
        assert env["CUDA_DEVICE_ORDER"] == {"value": "PCI_BUS_ID", "source": "selector"}


class TestReference:
    @pytest.mark.parametrize("mode", ["auto", "strict"])
    @pytest.mark.parametrize("gpus", [None, ["0", "1", "2", "3"], ["3", "2", "1", "0"]])
    def test_reference(self, mode, gpus):
        decision = decide(box(4, default="NODE ok"), shape(2, 2, mode=mode, p2p="trusted", gpus=gpus))
        assert (decision["status"], decision["reason"]) == ("fixed", "reference")
        assert decision["order"] == [int(name) for name in gpus or "0123"]
        assert settings(decision) == FIXED
        assert (decision["engine_args"], codes(decision)) == ([], [])

    @pytest.mark.parametrize(
        ("facts", "more"),
        [
            (box(5, default="NODE ok"), {"gpus": ["0", "1", "2", "3"]}),
            (box(4, default="NODE ok", gpus={3: {"name": "Other"}}), {"identical": False}),
            (box(4, default="NODE ok", links={(0, 3): "NODE CNS"}), {}),
            (box(4, default="NODE ok", links={(0, 1): "NV4 NODE ok", (2, 3): "NV4 NODE ok"}), {}),
            (box(4, default="NODE ok", gpus={3: {"numa_node": 1}}), {}),
            (box(4, default="NODE ok", gpus={3: {"numa_node": None}}), {}),
            (box(4, default="NODE ok"), {"gpus": ["GPU-0", "1", "2", "3"]}),
            (box(4, default="NODE ok"), {"p2p": "proven"}),
            (box(4, default="NODE ok", links={(0, 2): "PXB ok", (1, 3): "PXB ok"}), {}),
        ],
        ids=["fifth", "unlike", "link", "nvlink", "node", "unknown-node", "uuid", "proven", "reordered"],
    )
    def test_not_reference(self, facts, more):
        decision = decide(facts, shape(2, 2, **{"p2p": "trusted", **more}))
        assert decision["status"] == "selected"

    def test_a_single_card_is_not_the_reference(self):
        assert decide(box(1), shape(p2p="trusted"))["status"] == "selected"

    def test_the_callers_values_win(self):
        caller = {"NCCL_PROTO": "Simple"}
        env = decide(box(2, default="NODE ok"), shape(2, p2p="trusted", caller_env=caller))["env"]
        assert env["NCCL_PROTO"] == {"value": "Simple", "source": "caller"}
        assert env["VLLM_SKIP_P2P_CHECK"] == {"value": "1", "source": "fixed"}


class TestWarnings:
    @pytest.mark.parametrize(
        ("facts", "expected"),
        [
            (
                box(2, gpus={1: {"pcie": {"width_max": 16, "width_current": 8}}}),
                "link_width_degraded",
            ),
            (box(2, gpus={1: {"display": True}}), "display_attached"),
            (box(2, host={"iommu": "translated"}), "iommu_translated"),
            (box(2, default="PHB ok", verdict=PASS, gpus={1: {"bar1_total_mib": 24575}}), "small_bar1"),
            (box(2, host={"virtualization": "passthrough"}), "virtualized"),
            (box(2, host={"virtualization": "wsl"}), "virtualized"),
        ],
    )
    def test_warning(self, facts, expected):
        assert codes(decide(facts, shape(2))) == [expected]

    def test_acs(self):
        facts = box(2)
        facts["pairs"][0]["acs"] = True
        assert codes(decide(facts, shape(2))) == ["acs_enabled"]

    @pytest.mark.parametrize(
        "facts",
        [
            box(2),
            box(2, host={"virtualization": "container"}),
            box(2, host={"virtualization": "unknown", "iommu": "unknown"}),
            box(2, gpus={1: {"bar1_total_mib": 256}}),
            box(2, default="NV4 PHB ok", gpus={1: {"bar1_total_mib": 256}}),
            box(2, gpus={1: {"pcie": None, "display": None, "bar1_total_mib": None}}),
            box(3, gpus={2: {"display": True, "pcie": {"width_max": 16, "width_current": 1}}}, host={}),
        ],
    )
    def test_none(self, facts):
        assert codes(decide(facts, shape(2, gpus=["0", "1"]))) == []

    def test_a_refusal_still_shows_them(self):
        facts = box(2, gpus={1: {"display": True}})
        assert codes(decide(facts, shape(4))) == ["display_attached"]

    def test_names_are_in_the_message(self):
        message = decide(box(2, gpus={1: {"display": True}}), shape(2))["warnings"][0]["message"]
        assert "GPU 1" in message and RTX in message
