"""A release's files, its name, and which old ones go."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_fleet import release

PROC_DEVICES = """Character devices:
  1 mem
195 nvidia
195 nvidiactl
234 nvidia-uvm
511 iluvatar

Block devices:
  8 sd
"""


def lane(**changes):
    """Return a resolved lane with some keys changed."""
    root = "/opt/vllm-fleet/engines/e1"
    return {
        "schema": 1, "lane": "main", "profile": "p1",
        "engine": {"id": "e1", "version": "1.0", "accelerator": "cpu", "root": root, "venv": f"{root}/venv",
                   "python": f"{root}/venv/bin/python"},
        "entry": [f"{root}/venv/bin/vllm", "serve", "/models/x"],
        "args": [["--max-num-seqs", "2"]], "env": {"A": "1"}, "clear": ["B"],
        "policy": {"enabled": False, "mode": "auto"}, "cache_root": None,
        "readiness": {"deadline_s": 300}, "log": "/var/log/vllm-fleet/main.log",
        "workdir": "/var/lib/vllm-fleet/lanes/main", "api_key_file": None,
        **changes,
    }  # fmt: skip


def setting(text, name):
    """Return the values of a unit's setting, in order."""
    return [line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{name}=")]


@pytest.mark.parametrize(
    ("accelerator", "expected"),
    [
        ("nvidia", ["char-nvidia rw", "char-nvidiactl rw", "char-nvidia-uvm rw"]),
        ("corex", ["char-iluvatar rw"]),
        ("cpu", []),
    ],
)
def test_devices_are_those_that_are_there(accelerator, expected):
    assert release.device_allow(accelerator, PROC_DEVICES) == expected
    assert release.device_allow(accelerator, "") == []


def test_an_older_driver_names_its_devices_otherwise():
    assert release.device_allow("nvidia", "195 nvidia-frontend\n") == ["char-nvidia-frontend rw"]


def test_the_drop_in_holds_what_differs():
    text = release.unit_conf(lane(), ["char-nvidia rw"], None)
    assert setting(text, "WorkingDirectory") == ["/var/lib/vllm-fleet/lanes/main"]
    assert setting(text, "DeviceAllow") == ["char-nvidia rw"]
    assert setting(text, "UnsetEnvironment") == ["B"]
    assert setting(text, "StandardOutput") == ["append:/var/log/vllm-fleet/main.log"]
    assert setting(text, "ExecStart")[0] == "", "the template's own command line is dropped first"
    assert len(setting(text, "ExecStart")) == 2
    assert setting(text, "EnvironmentFile") == [
        "/etc/vllm-fleet/lanes/main/current/environment",
        "-/run/vllm-fleet/main/runtime.env",
        "-/run/vllm-fleet/main/secret.env",
    ], "what the start decides comes after what the release says"


def test_a_lane_without_a_log_writes_to_the_journal():
    assert setting(release.unit_conf(lane(log=""), [], None), "StandardOutput") == []


@pytest.mark.parametrize(
    ("args", "stop"),
    [
        ([], 30),
        ([["--shutdown-timeout", "60"]], 90),
        ([["--shutdown-timeout=45"]], 75),
        ([["--shutdown-timeout", "1"], ["--shutdown-timeout", "7"]], 31),
    ],
)
def test_a_stop_outlasts_the_engines_own(args, stop):
    assert setting(release.unit_conf(lane(args=args), [], None), "TimeoutStopSec") == [str(stop)]


@pytest.mark.parametrize("deadline", [60, 300, 1800])
def test_the_start_limit_triggers_when_each_failure_takes_the_whole_deadline(deadline):
    """Three starts that each run into their time limit, and are stopped, still fall into one interval."""
    text = release.unit_conf(lane(readiness={"deadline_s": deadline}), [], None)
    start, stop = int(setting(text, "TimeoutStartSec")[0]), int(setting(text, "TimeoutStopSec")[0])
    restart_sec = 10
    assert start > deadline, "the unit gives up later than the wait inside it, which says why"
    assert int(setting(text, "StartLimitIntervalSec")[0]) >= 3 * (start + stop + restart_sec)


def test_a_binding_is_systemds():
    text = release.unit_conf(lane(), [], {"cpus": "0-15", "node": 1})
    assert (setting(text, "CPUAffinity"), setting(text, "NUMAMask")) == (["0-15"], ["1"])
    assert setting(release.unit_conf(lane(), [], {"skipped": "single_node"}), "CPUAffinity") == []


def test_the_files_are_complete_and_their_json_is_the_lane():
    contents = release.files(lane(), [], None)
    assert set(contents) == {"lane.json", "environment", "unit.conf"}
    kept = json.loads(contents["lane.json"])
    assert {key: kept[key] for key in lane()} == lane()
    assert kept["rendered"]["argv"][-2:] == ["--max-num-seqs", "2"]


def test_equal_content_is_the_same_release_and_any_other_is_not():
    names = {
        release.release_id(release.files(one, devices, None))
        for one, devices in [
            (lane(), []),
            (lane(), ["char-nvidia rw"]),
            (lane(env={"A": "2"}), []),
            (lane(args=[["--max-num-seqs", "3"]]), []),
            (lane(log=""), []),
        ]
    }
    assert len(names) == 5
    assert release.release_id(release.files(lane(), [], None)) == release.release_id(release.files(lane(), [], None))


def test_the_name_keeps_file_borders_apart():
    assert release.release_id({"a": "bc", "d": ""}) != release.release_id({"a": "b", "cd": ""})
    assert release.release_id({"a": "1", "b": "2"}) == release.release_id({"b": "2", "a": "1"}), "their order is none"
    assert release.release_id({"a": "1b1"}) != release.release_id({"a": "", "b": "1"})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), unique=True).map(lambda found: [str(item) for item in found]), st.data())
def test_pruning_keeps_what_matters(existing, data):
    keep = data.draw(st.lists(st.sampled_from([*existing, None, "gone"]), max_size=3))
    limit = data.draw(st.integers(1, 10))
    gone = release.removable(existing, keep, limit)
    assert not set(gone) & set(keep)
    left = [name for name in existing if name not in gone]
    assert len(left) <= max(limit, len(set(keep) & set(existing)))
    assert len(left) >= min(limit, len(existing)), "no more than needed"
    spare = [name for name in existing if name not in keep]
    assert gone == spare[: len(gone)], "oldest first"
