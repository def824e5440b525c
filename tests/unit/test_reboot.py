"""Reboots as a decision: when one is made, when it is refused, and what counts as its proof."""

from __future__ import annotations

import copy

import pytest
from vllm_fleet import reboot
from vllm_fleet.errors import UsageError

WHY = ["driver_mismatch"]


def facts(boot="a", loaded="550.1", installed="550.2", pci=4, driver=4, container=False, module="nvidia"):
    return {
        "boot_id": boot, "kernel": "6.1.0", "container": container, "gpus": {"pci": pci, "driver": driver},
        "module": {"name": module, "loaded": loaded, "installed": installed} if module else None,
    }  # fmt: skip


def record(phase, before=None, after_boot_id="b", reasons=WHY):
    made = reboot.request("test", reasons, ["main"], before or facts(), "2026-01-31T03:00:00Z")
    return {**made, "phase": phase, "after_boot_id": None if phase == "requested" else after_boot_id}


def plan(allowed=None, required=True, again=False, known=None, now=None, reasons=WHY, blocked=()):
    answer = reboot.plan(allowed, required, reasons, blocked, again, known, now or facts())
    return answer["action"], answer["reason"]


@pytest.mark.parametrize(
    ("allowed", "required", "expected"),
    [
        (None, False, ("none", "not_required")),
        (True, False, ("none", "not_required")),
        (False, False, ("none", "not_required")),
        (None, None, ("report", "reboot_unknown")),
        (True, None, ("report", "reboot_unknown")),
        (None, True, ("refuse", "reboot_undecided")),
        (False, True, ("report", "reboot_pending")),
        (True, True, ("reboot", "reboot_required")),
    ],
)
def test_the_decision(allowed, required, expected):
    assert plan(allowed, required) == expected


def test_a_container_is_not_rebooted():
    assert plan(True, now=facts(container=True)) == ("refuse", "container")
    assert plan(False, now=facts(container=True)) == ("report", "reboot_pending")


def test_a_reboot_that_would_not_help_is_refused():
    assert plan(True, blocked=["next_boot_module_missing"]) == ("refuse", "reboot_blocked")
    assert plan(False, blocked=["next_boot_module_missing"]) == ("report", "reboot_pending")
    assert plan(True, required=False, blocked=["next_boot_module_missing"]) == ("none", "not_required")


def test_what_a_run_left_open_is_proven_first():
    open_record = record("requested", facts(boot="a"))
    for allowed in (None, True, False):
        for required in (None, True, False):
            assert plan(allowed, required, known=open_record, now=facts(boot="b")) == ("prove", "resumed")


def test_a_request_that_never_happened_is_made_again():
    assert plan(True, known=record("requested", facts(boot="a")), now=facts(boot="a")) == ("reboot", "reboot_required")


def test_a_cause_that_survived_its_reboot_is_no_reason_for_another():
    failed, after = record("failed"), facts(boot="b")
    assert plan(True, known=failed, now=after) == ("refuse", "survived_reboot")
    assert plan(True, known=failed, now=facts(boot="c")) == ("refuse", "survived_reboot"), "also after one by hand"
    assert plan(None, known=failed, now=after) == ("refuse", "survived_reboot")
    assert plan(True, again=True, known=failed, now=after) == ("reboot", "reboot_required")
    assert plan(True, known=failed, now=facts(boot="b", installed="550.3")) == ("reboot", "reboot_required")
    assert plan(True, known=failed, now=after, reasons=["kernel_changed"]) == ("reboot", "reboot_required")


def test_a_need_that_outlives_a_good_proof_is_no_loop_either():
    done = record("done", after_boot_id="b")
    assert plan(True, known=done, now=facts(boot="b")) == ("refuse", "survived_reboot")
    assert plan(True, known=done, now=facts(boot="c")) == ("reboot", "reboot_required"), "came up anew on a later boot"


def verdicts(before, after):
    return [(item["status"], item["reason"]) for item in reboot.judge(before, after)]


REBOOTED = ("pass", "rebooted")
AS_INSTALLED = ("pass", "module_as_installed")
AS_BEFORE = ("pass", "gpu_count_equal")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"loaded": "550.2"}, [REBOOTED, AS_INSTALLED, AS_BEFORE]),
        ({}, {"boot": "a", "loaded": "550.2"}, [("fail", "boot_id_unchanged"), AS_INSTALLED, AS_BEFORE]),
        ({}, {"boot": None, "loaded": "550.2"}, [("unknown", "boot_id_unreadable"), AS_INSTALLED, AS_BEFORE]),
        ({}, {}, [REBOOTED, ("fail", "module_mismatch"), AS_BEFORE]),
        ({}, {"loaded": None}, [REBOOTED, ("fail", "module_not_loaded"), AS_BEFORE]),
        ({}, {"installed": None}, [REBOOTED, ("fail", "module_not_installed"), AS_BEFORE]),
        # nothing tells one build from another: that is no pass
        ({}, {"loaded": "", "installed": ""}, [REBOOTED, ("unknown", "module_unversioned"), AS_BEFORE]),
        # another kernel was booted, whose own module is older than the one that the reboot was for
        ({}, {"loaded": "550.1", "installed": "550.1"}, [REBOOTED, ("fail", "module_mismatch"), AS_BEFORE]),
        ({}, {"loaded": "550.2", "pci": 3, "driver": 3}, [REBOOTED, AS_INSTALLED, ("fail", "gpu_count_changed")]),
        ({}, {"loaded": "550.2", "driver": 3}, [REBOOTED, AS_INSTALLED, ("fail", "gpu_count_changed")]),
        ({}, {"loaded": "550.2", "driver": None}, [REBOOTED, AS_INSTALLED, ("fail", "gpus_unreadable")]),
        # a driver that answered for none before answers for all that are on the bus
        ({"driver": None}, {"loaded": "550.2"}, [REBOOTED, AS_INSTALLED, AS_BEFORE]),
        ({"driver": None}, {"loaded": "550.2", "driver": 3}, [REBOOTED, AS_INSTALLED, ("fail", "gpu_count_changed")]),
        ({"driver": None}, {"loaded": "550.2", "driver": None}, [REBOOTED, AS_INSTALLED, ("fail", "gpus_unreadable")]),
        ({"module": ""}, {"module": ""}, [REBOOTED, AS_BEFORE]),
        ({"module": "", "driver": None}, {"module": "", "driver": None}, [REBOOTED, ("unknown", "gpus_unknown")]),
        (
            {"module": "", "pci": 0, "driver": None},
            {"module": "", "pci": 0, "driver": None},
            [REBOOTED, ("unknown", "gpus_unknown")],
        ),
    ],
)
def test_the_proof(before, after, expected):
    assert verdicts(facts(**before), facts(**{"boot": "b", **after})) == expected


def test_the_record_closes_with_the_proof():
    opened = record("requested", facts(boot="a"))
    good, bad = facts(boot="b", loaded="550.2"), facts(boot="b")
    assert reboot.close(opened, reboot.judge(facts(), good), good, "t")["phase"] == "done"
    closed = reboot.close(opened, reboot.judge(facts(), bad), bad, "t")
    assert (closed["phase"], closed["since"], closed["after_boot_id"]) == ("failed", "t", "b")
    assert plan(True, known=closed, now=bad) == ("refuse", "survived_reboot")


def test_a_damaged_record_is_named():
    good = record("done")
    assert reboot.well_formed(good) == good
    for path in (
        ["phase"],
        ["since"],
        ["before"],
        ["before", "gpus"],
        ["before", "module"],
        ["after_boot_id"],
        ["lanes"],
    ):
        broken = copy.deepcopy(good)
        node = broken
        for key in path[:-1]:
            node = node[key]
        del node[path[-1]]
        with pytest.raises(UsageError, match=r"reboot\.json"):
            reboot.well_formed(broken)
    for other in ([], None, "x", {**good, "phase": "odd"}):
        with pytest.raises(UsageError):
            reboot.well_formed(other)


@pytest.mark.parametrize(
    ("error", "fatal", "words"),
    [
        ("ssh: connect to host 10.0.0.2 port 22: Connection refused", False, "refuses SSH"),
        ("ssh: connect to host 10.0.0.2 port 22: Connection timed out", False, "firmware"),
        ("Connection timed out during banner exchange", False, "firmware"),
        ("System is booting up. Unprivileged users are not permitted to log in yet.", False, "does not let us in yet"),
        ("@@@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @@@", True, "another one"),
        ("Host key verification failed.", True, "another one"),
        ("", False, "away"),
    ],
)
def test_why_a_box_does_not_answer_089(error, fatal, words):
    """Case 089: a changed host key never ends by waiting, firmware does."""
    answer = reboot.why_away(error)
    assert answer["fatal"] is fatal
    assert words in answer["message"]
    assert answer["reason"] == ("host_key_changed" if fatal else "away")
