"""Which GPUs a lane gets, and every refusal that needs no link."""

import pytest
from topology_boxes import box, codes, refused, shape, values
from vllm_fleet.topology import decide

NAMES = {index: {"uuid": f"GPU-{letter * 8}-0"} for index, letter in enumerate("abcd")}


@pytest.mark.parametrize(
    ("gpus", "order"),
    [
        (["2", "0"], [2, 0]),
        ([" 2 ", "0"], [2, 0]),
        (["GPU-cccccccc-0", "GPU-a"], [2, 0]),
        (["GPU-CCCC", "GPU-AAAAAAAA-0"], [2, 0]),
        (["0000:21:00.0", "00000000:01:00.0"], [2, 0]),
    ],
)
def test_names_are_resolved(gpus, order):
    decision = decide(box(4, gpus=NAMES), shape(2, gpus=gpus))
    assert decision["order"] == order
    assert values(decision)["CUDA_VISIBLE_DEVICES"] == "2,0"


def test_an_exact_uuid_is_no_ambiguous_prefix():
    facts = box(2, gpus={0: {"uuid": "GPU-ab"}, 1: {"uuid": "GPU-abc"}})
    assert decide(facts, shape(gpus=["GPU-ab"]))["order"] == [0]


@pytest.mark.parametrize(
    "name", ["9", "GPU-x", "GPU-", "gpu-aaaaaaaa-0", "MIG-aaaaaaaa", "", "a", "0000:99:00.0", "-1"]
)
def test_unresolved(name):
    assert refused(box(4, gpus=NAMES), shape(gpus=[name])) == "unresolved_gpu"


def test_the_callers_list_counts_when_the_policy_names_none():
    decision = decide(box(4), shape(2, caller_env={"CUDA_VISIBLE_DEVICES": "3, 1"}))
    assert decision["order"] == [3, 1]
    assert decision["env"]["CUDA_VISIBLE_DEVICES"] == {"value": "3,1", "source": "caller"}


@pytest.mark.parametrize("blank", ["", "  "])
def test_a_blank_list_is_unset(blank):
    assert decide(box(2), shape(2, caller_env={"CUDA_VISIBLE_DEVICES": blank}))["order"] == [0, 1]


@pytest.mark.parametrize("mode", ["auto", "fixed", "strict"])
@pytest.mark.parametrize("caller", ["1", "0,1,2", "1,0", "7"])
def test_two_different_lists_conflict(mode, caller):
    policy = shape(2, mode=mode, gpus=["0", "1"], caller_env={"CUDA_VISIBLE_DEVICES": caller})
    assert refused(box(4), policy) == "conflicting_gpus"


def test_two_equal_lists_do_not_conflict():
    policy = shape(2, gpus=["GPU-b", "0"], caller_env={"CUDA_VISIBLE_DEVICES": "1,GPU-aaaaaaaa-0"})
    assert decide(box(4, gpus=NAMES), policy)["order"] == [1, 0]


@pytest.mark.parametrize("mode", ["auto", "fixed", "strict"])
class TestRefusedInEveryMode:
    def test_too_few(self, mode):
        assert refused(box(3), shape(2, 2, mode=mode)) == "too_few_gpus"
        assert refused(box(4), shape(2, 2, mode=mode, gpus=["0"])) == "too_few_gpus"
        assert refused(box(4), shape(2, 2, mode=mode, exclude=["1"])) == "too_few_gpus"
        assert refused(box(0), shape(mode=mode)) == "too_few_gpus"
        assert refused(box(4), shape(1, mode=mode, gpus=[])) == "too_few_gpus"

    def test_duplicate(self, mode):
        assert refused(box(4, gpus=NAMES), shape(2, mode=mode, gpus=["0", "GPU-a"])) == "duplicate_gpu"

    def test_unresolved(self, mode):
        assert refused(box(4), shape(2, mode=mode, gpus=["0", "9"])) == "unresolved_gpu"

    def test_of_other_lane(self, mode):
        assert refused(box(4), shape(2, mode=mode, gpus=["0", "1"], exclude=["1"])) == "gpu_owned_by_other_lane"

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"health": "lost"}, "gpu_lost"),
            ({"mig": True}, "mig_enabled"),
            ({"processes": [{"pid": 1, "name": "python", "memory_mib": 9}]}, "gpu_busy"),
            ({"memory_used_mib": 1025}, "gpu_busy"),
            ({"memory_used_mib": None}, "gpu_busy"),
            ({"processes": None}, "gpu_busy"),
        ],
    )
    def test_unfit_card(self, mode, change, reason):
        facts = box(2, gpus={1: change})
        assert refused(facts, shape(2, mode=mode, gpus=["0", "1"])) == reason
        assert refused(facts, shape(2, mode=mode)) == reason
        spare = decide(box(3, gpus={1: change}), shape(2, mode=mode))
        assert spare["order"] == [0, 2]
        assert codes(spare) == ["gpu_skipped"]
        assert reason in spare["warnings"][0]["message"]

    def test_busy_is_allowed(self, mode):
        facts = box(2, gpus={0: {"processes": None}, 1: {"memory_used_mib": 9000}})
        assert decide(facts, shape(2, mode=mode, allow_busy=True))["order"] == [0, 1]

    def test_idle_up_to_1024_mib(self, mode):
        assert decide(box(1, gpus={0: {"memory_used_mib": 1024}}), shape(mode=mode))["order"] == [0]

    def test_memory(self, mode):
        assert refused(box(2), shape(2, mode=mode, min_memory_mib=24577)) == "memory_too_small"
        assert decide(box(2), shape(2, mode=mode, min_memory_mib=24576))["order"] == [0, 1]

    def test_unlike(self, mode):
        facts = box(2, gpus={1: {"name": "Other"}})
        assert refused(facts, shape(2, mode=mode)) == "unlike_gpus"
        assert decide(facts, shape(2, mode=mode, identical=False))["order"] == [0, 1]
        assert decide(facts, shape(1, mode=mode, gpus=["1"]))["order"] == [1]

    def test_driver_mismatch(self, mode):
        facts = box(2, driver={"userland": "580.2"})
        assert refused(facts, shape(2, mode=mode)) == "driver_mismatch"
        assert refused({**facts, "gpus": None, "pairs": []}, shape(2, mode=mode)) == "driver_mismatch"

    def test_driver_half_known_is_no_mismatch(self, mode):
        assert decide(box(2, driver={"userland": None}), shape(2, mode=mode))["order"] == [0, 1]

    def test_driver_is_not_compared_where_versions_differ_by_design(self, mode):
        assert decide(box(1, driver={"userland": "3"}, vendor="corex"), shape(mode=mode))["order"] == [0]
        facts = box(1, driver={"userland": "3"}, host={"virtualization": "wsl"})
        assert decide(facts, shape(mode=mode))["order"] == [0]

    def test_other_vendor(self, mode):
        assert refused(box(4, vendor="amd"), shape(mode=mode)) == "too_few_gpus"


#: each entry adds one fault to the ones after it; the first that applies gives the reason
FAULTS = [
    ("conflicting_gpus", {}, {"caller_env": {"CUDA_VISIBLE_DEVICES": "3"}}),
    ("too_few_gpus", {}, {"gpus": ["0"]}),
    ("duplicate_gpu", {}, {"gpus": ["0", "0", "9", "1"]}),
    ("unresolved_gpu", {}, {"gpus": ["0", "1", "2", "9"]}),
    ("gpu_owned_by_other_lane", {}, {"exclude": ["3"]}),
    ("gpu_lost", {3: {"health": "lost"}}, {}),
    ("mig_enabled", {2: {"mig": True}}, {}),
    ("gpu_busy", {1: {"processes": None}}, {}),
    ("memory_too_small", {}, {"min_memory_mib": 10**6}),
    ("unlike_gpus", {0: {"name": "Other"}}, {}),
    ("driver_mismatch", {}, {}),
]


@pytest.mark.parametrize("start", range(len(FAULTS)), ids=[fault[0] for fault in FAULTS])
def test_refusals_are_tried_in_order(start):
    gpus, policy = {}, shape(2, 2, gpus=["0", "1", "2", "3"])
    for _, cards, changes in reversed(FAULTS[start:]):
        gpus.update(cards)
        policy.update(changes)
    assert refused(box(4, gpus=gpus, driver={"loaded": "1"}), policy) == FAULTS[start][0]


def test_the_first_one_skipped_gives_the_reason():
    gpus = {1: {"mig": True}, 2: {"health": "lost"}}
    assert refused(box(4, gpus=gpus), shape(4)) == "mig_enabled"
    assert refused(box(3, gpus=gpus), shape(4)) == "too_few_gpus"


def test_one_named_unfit_card_refuses_even_with_others_to_choose_from():
    policy = shape(2, gpus=["0", "1", "2"], lane_gpus="auto")
    assert refused(box(3, gpus={2: {"mig": True}}), policy) == "mig_enabled"


class TestMoreThanNeeded:
    def test_auto_takes_the_first(self):
        decision = decide(box(4, links={(2, 3): "PIX CNS"}), shape(2))
        assert decision["order"] == [0, 1]
        assert codes(decision) == ["more_gpus_than_needed"]

    def test_auto_takes_the_first_of_a_named_list_in_bus_order_and_keeps_its_order(self):
        decision = decide(box(4), shape(2, gpus=["3", "1", "0"]))
        assert decision["order"] == [1, 0]
        assert codes(decision) == ["more_gpus_than_needed"]

    @pytest.mark.parametrize("gpus", [None, ["0", "1", "2"], ["0", "0", "9"]])
    def test_strict_refuses(self, gpus):
        assert refused(box(4), shape(2, mode="strict", gpus=gpus)) == "more_gpus_than_needed"

    def test_strict_counts_what_is_left(self):
        assert decide(box(3), shape(2, mode="strict", exclude=["1"]))["order"] == [0, 2]
        facts = box(3, gpus={0: {"mig": True}})
        assert decide(facts, shape(2, mode="strict"))["order"] == [1, 2]
        facts = box(3, gpus={0: {"name": "Other"}})
        decision = decide(facts, shape(2, mode="strict"))
        assert decision["order"] == [1, 2]
        assert codes(decision) == ["unlike_gpus_skipped"]

    @pytest.mark.parametrize("mode", ["auto", "strict"])
    def test_lane_gpus_chooses_the_best(self, mode):
        facts = box(4, links={(2, 3): "PIX CNS"})
        decision = decide(facts, shape(2, mode=mode, lane_gpus="auto"))
        assert (decision["reason"], decision["order"]) == ("chosen", [2, 3])
        assert codes(decision) == []
        named = decide(facts, shape(2, mode=mode, lane_gpus="auto", gpus=["3", "2", "0"]))
        assert named["order"] == [3, 2]

    def test_lane_gpus_chooses_idle_ones(self):
        facts = box(4, links={(2, 3): "PIX CNS"}, gpus={2: {"memory_used_mib": 5000}})
        assert decide(facts, shape(2, lane_gpus="auto"))["order"] == [0, 1]

    def test_lane_gpus_chooses_alike_ones(self):
        facts = box(5, links={(2, 3): "PIX CNS"}, gpus={0: {"name": "B"}, 2: {"name": "B"}, 4: {"name": "C"}})
        decision = decide(facts, shape(2, lane_gpus="auto"))
        assert decision["order"] == [0, 2]
        assert codes(decision) == ["unlike_gpus_skipped"]
        assert decide(facts, shape(2, lane_gpus="auto", identical=False))["order"] == [2, 3]

    def test_auto_takes_the_first_alike_ones(self):
        facts = box(4, gpus={0: {"name": "B"}})
        decision = decide(facts, shape(2))
        assert decision["order"] == [1, 2]
        assert codes(decision) == ["more_gpus_than_needed", "unlike_gpus_skipped"]

    def test_lane_gpus_prefers_one_node_among_equals(self):
        facts = box(
            4, gpus={0: {"numa_node": 0}, 1: {"numa_node": 1}, 2: {"numa_node": 1}, 3: {"numa_node": 0}}, nodes=2
        )
        assert decide(facts, shape(2, lane_gpus="auto"))["order"] == [0, 3]

    def test_one_node_yields_to_the_score(self):
        facts = box(4, links={(0, 1): "PHB CNS"}, gpus={1: {"numa_node": 1}}, nodes=2)
        assert decide(facts, shape(2, lane_gpus="auto"))["order"] == [0, 1]

    def test_lane_gpus_passes_over_what_is_in_doubt(self):
        facts = box(4, links={(0, 1): "? CNS", (2, 3): "SYS CNS"})
        assert decide(facts, shape(2, lane_gpus="auto"))["order"] == [0, 2]
        facts = box(3, gpus={0: {"health": "unknown"}})
        decision = decide(facts, shape(2, lane_gpus="auto", mode="strict"))
        assert decision["order"] == [1, 2]
        assert codes(decision) == ["gpu_skipped"]

    def test_fixed_takes_the_first_and_never_chooses(self):
        facts = box(4, links={(2, 3): "NV4"})
        for lane_gpus in (None, "auto"):
            decision = decide(facts, shape(2, mode="fixed", lane_gpus=lane_gpus))
            assert (decision["order"], codes(decision)) == ([0, 1], [])
            assert decide(facts, shape(2, mode="fixed", lane_gpus=lane_gpus, exclude=["0"]))["order"] == [1, 2]
        decision = decide(facts, shape(2, mode="fixed", gpus=["3", "0", "2"]))
        assert (decision["order"], codes(decision)) == ([3, 0], ["more_gpus_than_needed"])


class TestExclude:
    def test_a_card_that_is_gone_is_nobodys(self):
        assert decide(box(2, gpus=NAMES), shape(2, exclude=["GPU-99", "0000:99:00.0"]))["order"] == [0, 1]

    @pytest.mark.parametrize("name", ["7", "GPU-", "slot-1"])
    def test_an_unclear_name_refuses(self, name):
        assert refused(box(2, gpus=NAMES), shape(1, exclude=[name])) == "unresolved_gpu"


class TestMemoryAndNames:
    def test_a_small_card_that_was_not_named_is_skipped(self):
        decision = decide(box(3, gpus={0: {"memory_total_mib": 2048}}), shape(2, min_memory_mib=20000))
        assert decision["order"] == [1, 2]
        assert codes(decision) == ["gpu_skipped"]

    def test_fixed_does_not_skip_it(self):
        policy = shape(2, mode="fixed", min_memory_mib=20000)
        assert refused(box(3, gpus={0: {"memory_total_mib": 2048}}), policy) == "memory_too_small"

    def test_unread_memory_is_a_doubt_only_when_asked_for(self):
        facts = box(1, gpus={0: {"memory_total_mib": None}})
        assert decide(facts, shape())["status"] == "selected"
        assert decide(facts, shape(min_memory_mib=1))["reason"] == "facts_unknown"
        assert refused(facts, shape(min_memory_mib=1, mode="strict")) == "facts_unknown"

    def test_unread_name_is_a_doubt_for_more_than_one_card(self):
        facts = box(2, gpus={0: {"name": None}})
        assert decide(facts, shape(gpus=["0"]))["status"] == "selected"
        assert decide(facts, shape(2))["reason"] == "facts_unknown"
        assert decide(facts, shape(2, identical=False))["status"] == "selected"


class TestUnreadable:
    def facts(self):
        return {**box(0), "gpus": None, "pairs": []}

    def test_auto_falls_back(self):
        decision = decide(self.facts(), shape(2, 2))
        assert (decision["status"], decision["reason"], decision["order"]) == ("fixed", "facts_unknown", [0, 1, 2, 3])
        assert decision["lane"] == [None] * 4
        assert decision["score"] is None
        assert codes(decision) == ["facts_unknown"]
        assert values(decision)["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"

    def test_strict_refuses(self):
        assert refused(self.facts(), shape(2, 2, mode="strict")) == "facts_unknown"

    def test_fixed_runs_with_a_warning(self):
        decision = decide(self.facts(), shape(2, mode="fixed", gpus=["3", "1"]))
        assert (decision["order"], codes(decision)) == ([3, 1], ["facts_unknown"])

    def test_excluded_indices_are_left_out(self):
        assert decide(self.facts(), shape(2, exclude=["0", "2"]))["order"] == [1, 3]
        assert refused(self.facts(), shape(2, gpus=["0", "2"], exclude=["2"])) == "gpu_owned_by_other_lane"

    def test_named_cards_do_not_need_the_excluded_ones(self):
        assert decide(self.facts(), shape(2, gpus=["2", "3"], exclude=["GPU-a", "0"]))["order"] == [2, 3]

    def test_what_needs_the_cards_is_refused(self):
        assert refused(self.facts(), shape(gpus=["GPU-a"])) == "unresolved_gpu"
        assert refused(self.facts(), shape(exclude=["GPU-a"])) == "unresolved_gpu"
        assert refused(self.facts(), shape(caller_env={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})) == "unresolved_gpu"

    def test_required_is_refused(self):
        assert refused(self.facts(), shape(2, p2p="required")) == "p2p_unproven"


@pytest.mark.parametrize(
    ("facts", "tensor"),
    [
        (box(2, gpus={1: {"bus_id": "00000000:01:00.0"}}), 1),
        (box(2, gpus={0: {"uuid": "GPU-a"}, 1: {"uuid": "gpu-A"}}), 1),
        (box(1, gpus={0: {"health": "unknown"}}), 1),
        (box(2, default="? CNS"), 2),
        (box(2, default="NODE ?"), 2),
        (box(2, pairs=[]), 2),
        (box(2, pairs=None), 2),
    ],
    ids=["bus", "uuid", "health", "ancestor", "p2p", "missing pair", "no pairs"],
)
def test_doubt(facts, tensor):
    decision = decide(facts, shape(tensor, gpus=["1", "0"][-tensor:]))
    assert (decision["status"], decision["reason"], codes(decision)) == ("fixed", "facts_unknown", ["facts_unknown"])
    assert decision["order"] == [1, 0][-tensor:]
    assert decision["engine_args"] == []
    assert refused(facts, shape(tensor, mode="strict", gpus=["1", "0"][-tensor:])) == "facts_unknown"


def test_no_doubt():
    assert decide(box(2, gpus={0: {"numa_node": None}}), shape(2, mode="strict"))["status"] == "selected"
    assert decide(box(2, default="SYS ?"), shape(2, mode="strict"))["status"] == "selected"
    assert decide(box(3, links={(0, 2): "? ?"}), shape(2, mode="strict", gpus=["0", "1"]))["status"] == "selected"
