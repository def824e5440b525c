"""What a verdict is bound to, when it expires, and how two arms are judged."""

from __future__ import annotations

import copy
import json

import pytest
from vllm_fleet import verdict, verdict_store

from tests import simulator


def facts_of_box1():
    facts = simulator.box("box1")
    facts["extra"] = {
        "module": {"version": "610.43.02", "flavour": "open", "parameters": {"RegistryDwords": "", "EnableMSI": "1"}},
        "board": {"bios_version": "2.8", "board_name": "H12SSL-i"},
    }
    return facts


def verdict_on(facts, **statuses):
    pairs = []
    for name, status in statuses.items():
        members = [int(part) for part in name.strip("p").split("_")]
        gpus = [{"uuid": facts["gpus"][index]["uuid"], "bus_id": facts["gpus"][index]["bus_id"]} for index in members]
        pairs.append({"gpus": gpus, "status": status})
    return {"schema": 1, "bound": verdict.bound(facts), "pairs": pairs}


def test_a_valid_verdict_speaks_in_indices():
    facts = facts_of_box1()
    made = verdict_on(facts, p0_2="pass", p1_3="fail")
    assert verdict.for_facts(made, facts) == {"status": "fail", "pairs": {"0-2": "pass", "1-3": "fail"}}
    assert verdict.changed(made, verdict.bound(facts)) == []


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        (("driver", "loaded"), "595.84", "driver"),
        (("extra", "module", "flavour"), "proprietary", "flavour"),
        (("extra", "module", "parameters", "RegistryDwords"), "RMForceStaticBar1=1", "settings"),
        (("extra", "board", "bios_version"), "2.9", "board"),
        (("extra", "board", "board_name"), "H12DSi", "board"),
        (("host", "iommu"), "translated", "iommu"),
        (("vendor",), "corex", "vendor"),
    ],
)
def test_a_machine_that_changed_has_no_verdict(path, value, name):
    facts = facts_of_box1()
    made = verdict_on(facts, p0_2="pass")
    place = facts
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert verdict.for_facts(made, facts) is None
    assert verdict.changed(made, verdict.bound(facts)) == [name]


def test_a_setting_without_meaning_for_peers_changes_nothing():
    facts = facts_of_box1()
    made = verdict_on(facts, p0_2="pass")
    facts["extra"]["module"]["parameters"]["EnableMSI"] = "0"
    assert verdict.for_facts(made, facts) is not None


def test_a_card_in_another_slot_loses_its_pairs_only():
    facts = facts_of_box1()
    made = verdict_on(facts, p0_2="pass", p1_3="pass")
    facts["gpus"][3]["bus_id"] = "0000:e1:00.0"
    assert verdict.for_facts(made, facts) == {"status": "pass", "pairs": {"0-2": "pass"}}
    facts["gpus"][2]["uuid"] = "GPU-another"
    assert verdict.for_facts(made, facts) is None


def test_two_cards_that_swapped_slots_are_unproven():
    facts = facts_of_box1()
    made = verdict_on(facts, p0_2="pass")
    one, other = facts["gpus"][0], facts["gpus"][2]
    one["uuid"], other["uuid"] = other["uuid"], one["uuid"]
    assert verdict.for_facts(made, facts) is None


def test_a_card_that_is_gone_renumbers_the_rest():
    facts = facts_of_box1()
    made = verdict_on(facts, p0_2="pass", p1_3="inconclusive")
    del facts["gpus"][0]
    for index, gpu in enumerate(facts["gpus"]):
        gpu["index"] = index
    assert verdict.for_facts(made, facts) == {"status": "inconclusive", "pairs": {"0-2": "inconclusive"}}


def test_an_unknown_driver_proves_nothing():
    facts = facts_of_box1()
    made = verdict_on(facts, p0_2="pass")
    facts["driver"]["loaded"] = None
    assert verdict.for_facts(made, facts) is None
    assert verdict.for_facts({**made, "bound": None}, facts) is None


def test_no_cards_no_verdict():
    facts = facts_of_box1()
    made = verdict_on(facts, p0_2="pass")
    assert verdict.for_facts(made, {**facts, "gpus": None}) is None
    assert verdict.for_facts(None, facts) is None


def test_a_new_result_replaces_its_pair_and_keeps_the_others():
    facts = facts_of_box1()
    old = verdict_on(facts, p0_2="pass", p1_3="pass")
    merged = verdict.merge(old, verdict_on(facts, p1_3="fail"))
    assert verdict.for_facts(merged, facts)["pairs"] == {"0-2": "pass", "1-3": "fail"}
    newer = copy.deepcopy(facts)
    newer["driver"]["loaded"] = "620.10"
    merged = verdict.merge(old, verdict_on(newer, p1_3="fail"))
    assert verdict.for_facts(merged, newer)["pairs"] == {"1-3": "fail"}


EQUAL, WRONG, HANG = (
    {"outcome": "equal"},
    {"outcome": "wrong_data", "detail": "7 of 8 values differ"},
    {"outcome": "hang"},
)


@pytest.mark.parametrize(
    ("control", "found", "status", "reason"),
    [
        (EQUAL, EQUAL, "pass", "values_equal"),
        (EQUAL, WRONG, "fail", "wrong_data"),
        (EQUAL, HANG, "fail", "hang"),
        (EQUAL, {"outcome": "error", "detail": "NCCL error"}, "fail", "error"),
        (EQUAL, {"outcome": "error", "detail": "CUDA out of memory."}, "inconclusive", "out_of_memory"),
        (EQUAL, {"outcome": "not_started", "detail": "x"}, "inconclusive", "not_started"),
        (EQUAL, None, "inconclusive", "not_run"),
        (HANG, None, "inconclusive", "control_failed"),
        (WRONG, WRONG, "inconclusive", "control_failed"),
        (WRONG, EQUAL, "inconclusive", "control_failed"),
        ({"outcome": "error"}, EQUAL, "inconclusive", "control_failed"),
    ],
)
def test_judging(control, found, status, reason):
    assert verdict.judge(control, found)[:2] == (status, reason)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"pairs": 1}', '{"schema": 1, "pairs": [{"gpus": [1, 2], "status": "pass"}]}', '{"pairs": [[]]}'],
)
def test_a_damaged_store_is_no_verdict(tmp_path, text):
    path = tmp_path / "var/lib/vllm-fleet/verdicts/p2p.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert verdict_store.load(str(tmp_path)) is None


def test_the_store_gives_back_what_it_got(tmp_path):
    facts = facts_of_box1()
    made = verdict_on(facts, p0_2="pass")
    assert verdict_store.load(str(tmp_path)) is None
    assert verdict_store.save(made, str(tmp_path)) is True
    assert verdict_store.save(made, str(tmp_path)) is False
    assert verdict_store.load(str(tmp_path)) == json.loads(json.dumps(made))


def test_the_machine_is_remembered(tmp_path):
    root, facts = str(tmp_path), facts_of_box1()
    assert verdict_store.machine_changed(facts, root) is True
    assert verdict_store.machine_changed(facts, root) is False
    facts["gpus"][0]["memory_used_mib"] = 900
    assert verdict_store.machine_changed(facts, root) is False
    assert verdict_store.machine_changed({**facts, "gpus": None}, root) is False
    facts["gpus"][0]["bus_id"] = "0000:02:00.0"
    assert verdict_store.machine_changed(facts, root) is True


def test_only_vllms_own_result_files_go(tmp_path):
    names = [
        "gpu_p2p_access_cache_for_0,1,2,3.json",
        "gpu_p2p_access_cache_for_GPU-1a.json",
        "gpu_p2p_access_cache_for_0.txt",
    ]
    for name in [*names, "torch_compile_cache.json"]:
        (tmp_path / name).write_text("{}")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / names[0]).write_text("{}")
    (tmp_path / "gpu_p2p_access_cache_for_9.json").symlink_to(tmp_path / "torch_compile_cache.json")
    removed = verdict_store.remove_vllm_caches([str(tmp_path), str(tmp_path / "absent")])
    assert removed == [str(tmp_path / name) for name in names[:2]]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {names[2], "torch_compile_cache.json", "below", "gpu_p2p_access_cache_for_9.json"}
    assert (tmp_path / "below" / names[0]).exists()
