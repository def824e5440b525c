"""What the unit runs before the engine: decision, runtime environment, ownership of GPUs, history, exit status."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import subprocess
import sys

import pytest
from vllm_fleet import checks, runtime_env, start, verdict, verdict_store
from vllm_fleet.commands import start_check
from vllm_fleet.errors import RefusedError, UsageError

from tests import simulator
from tests.unit.preflight_fixtures import LANE


class Box:
    """A box below a temporary root: lanes, facts, and the preflight's results."""

    def __init__(self, root):
        self.root = str(root)
        self.base = root
        self.facts = simulator.box("box1")
        self.facts["extra"] = {"status": "ok", "message": "", "module": {}, "board": {}, "cards": []}
        self.results = [checks.result("port", checks.PASS, "port_free", "free")]
        self.given = None

    def lane(self, name="main", policy=None, **changes):
        lane = copy.deepcopy(LANE)
        lane.update(lane=name, env={}, **changes)
        lane["policy"] = {
            "enabled": True, "mode": "auto", "tensor_parallel": 2, "pipeline_parallel": 2, "gpus": None,
            "lane_gpus": None, "exclude": [], "min_memory_mib": 0, "identical": True, "allow_busy": False,
            "p2p": "proven", "nccl_proto": "LL", "layer_partition": None, "bind": False, "cpus": None,
            "host_resident_kib": 0, "caller_env": {}, **(policy or {}),
        }  # fmt: skip
        path = self.base / f"etc/vllm-fleet/lanes/{name}/current/lane.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(lane))
        return lane

    def run_lane(self, lane, **given):
        self.given = given
        return self.results

    def check(self, lane="main"):
        return start.check(lane, self.root, read=lambda: copy.deepcopy(self.facts))

    def environment(self, lane="main"):
        return runtime_env.parse((self.base / f"run/vllm-fleet/{lane}/runtime.env").read_text())


@pytest.fixture
def box(tmp_path, monkeypatch):
    made = Box(tmp_path)
    monkeypatch.setattr(start, "run_lane", made.run_lane)
    return made


def test_the_crossed_pairs_reach_the_engine(box):
    box.lane()
    outcome = box.check()
    assert (outcome["exit"], outcome["decision"]["order"]) == (0, [0, 2, 1, 3])
    env = box.environment()
    assert env["CUDA_VISIBLE_DEVICES"] == "0,2,1,3"
    assert env["VLLM_FLEET_ENGINE_ARGS"] == ""
    key = start.cache_key("e1", box.facts)
    assert env["VLLM_CACHE_ROOT"] == f"/var/cache/vllm-fleet/main/{key}"
    assert env["TRITON_CACHE_DIR"] == f"/var/cache/vllm-fleet/main/{key}/triton"
    assert env["FLASHINFER_WORKSPACE_BASE"] == f"/var/cache/vllm-fleet/main/{key}/flashinfer"
    assert (box.base / f"var/cache/vllm-fleet/main/{key}/triton").is_dir()
    assert (box.base / "run/vllm-fleet/main/runtime.env").stat().st_mode & 0o777 == 0o644
    assert box.given["boot"] is True
    assert box.given["decision"] == outcome["decision"]
    assert start.stored("main", box.root) == outcome["decision"]


def test_the_cache_key_follows_engine_driver_and_architecture(box):
    key = start.cache_key("e1", box.facts)
    assert start.cache_key("e2", box.facts) != key
    newer = copy.deepcopy(box.facts)
    newer["driver"]["loaded"] = "620.10"
    assert start.cache_key("e1", newer) != key
    mixed = copy.deepcopy(box.facts)
    mixed["gpus"][3]["compute_capability"] = [8, 9]
    assert start.cache_key("e1", mixed) != key
    busy = copy.deepcopy(box.facts)
    busy["gpus"][0]["memory_used_mib"] = 9000
    busy["gpus"].reverse()
    assert start.cache_key("e1", busy) == key


def test_a_cache_root_of_its_own_is_left_alone(box):
    box.lane(cache_root="/data/cache")
    box.check()
    assert not [name for name in box.environment() if "CACHE" in name or "FLASHINFER" in name]
    assert not (box.base / "var/cache").exists()


def test_a_lane_without_gpus_asks_no_driver(box):
    box.lane(policy={"enabled": False})

    def never():
        raise AssertionError("the driver was asked")

    outcome = start.check("main", box.root, read=never)
    assert (outcome["decision"], outcome["exit"]) == (None, 0)
    assert set(box.environment()) == {"VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"}


def test_a_refusal_leaves_the_old_environment_and_still_runs_the_checks(box):
    box.lane()
    box.check()
    before = (box.base / "run/vllm-fleet/main/runtime.env").read_text()
    kept = start.stored("main", box.root)
    del box.facts["gpus"][3]
    box.facts["pairs"] = [pair for pair in box.facts["pairs"] if 3 not in pair["gpus"]]
    outcome = box.check()
    assert (outcome["exit"], outcome["decision"]["reason"], outcome["runtime_env"]) == (3, "too_few_gpus", None)
    assert outcome["results"] == box.results
    assert (box.base / "run/vllm-fleet/main/runtime.env").read_text() == before
    assert start.stored("main", box.root) == kept
    assert [entry["decision"]["status"] for entry in start.history("main", box.root)] == ["selected", "refused"]


def test_a_failed_check_forbids_the_start(box):
    box.lane()
    box.results.append(checks.result("port", checks.FAIL, "port_occupied", "taken"))
    assert box.check()["exit"] == 1


def test_a_hung_driver_falls_back_or_refuses_by_mode(box):
    box.facts.update(gpus=None, pairs=[])
    box.lane()
    outcome = box.check()
    assert (outcome["exit"], outcome["decision"]["status"]) == (0, "fixed")
    assert "facts_unknown" in [item["code"] for item in outcome["decision"]["warnings"]]
    box.lane(policy={"mode": "strict"})
    outcome = box.check()
    assert (outcome["exit"], outcome["decision"]["reason"]) == (3, "facts_unknown")


def test_history_is_bounded_and_grows_only_with_changes(box):
    box.lane()
    for _ in range(3):
        box.check()
    assert len(start.history("main", box.root)) == 1
    for number in range(start.HISTORY + 5):
        start.keep("main", {"status": "selected", "number": number}, box.root, now=number)
    entries = start.history("main", box.root)
    assert len(entries) == start.HISTORY
    assert (entries[-1]["decision"]["number"], entries[-1]["time"]) == (start.HISTORY + 4, "1970-01-01T00:00:24Z")


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "{}"])
def test_a_damaged_decision_is_none(box, text):
    box.lane()
    path = box.base / "var/lib/vllm-fleet/decisions/main.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (path.parent / "main.history.json").write_text(text)
    assert start.stored("main", box.root) is None
    assert box.check()["exit"] == 0
    assert start.stored("main", box.root)["status"] == "selected"


TWO = {"tensor_parallel": 2, "pipeline_parallel": 1, "lane_gpus": "auto"}


def test_two_lanes_share_the_box_and_keep_what_they_have(box):
    box.lane("a", TWO)
    box.lane("b", TWO)
    first = box.check("a")["decision"]["order"]
    second = box.check("b")["decision"]["order"]
    assert (first, second) == ([0, 2], [1, 3])
    assert box.check("a")["decision"]["order"] == first
    # a lane that is refused for the moment still owns its GPUs
    box.facts["gpus"][0]["health"] = "lost"
    box.lane("a", {**TWO, "gpus": None, "identical": True})
    box.facts["gpus"][2]["health"] = "lost"
    assert box.check("a")["exit"] == 3
    box.facts["gpus"][0]["health"] = box.facts["gpus"][2]["health"] = "ok"
    assert box.check("b")["decision"]["order"] == second


def test_two_lanes_that_name_one_gpu(box):
    box.lane("a", {**TWO, "gpus": ["0", "1"]})
    box.lane("b", {**TWO, "gpus": ["1", "2"]})
    for name in ("a", "b"):
        outcome = box.check(name)
        assert (outcome["exit"], outcome["decision"]["reason"]) == (3, "gpu_owned_by_other_lane")


def test_a_claim_by_the_callers_variable_counts(box):
    box.lane("a", {**TWO, "caller_env": {"CUDA_VISIBLE_DEVICES": "0, 2"}})
    box.lane("b", TWO)
    assert box.check("b")["decision"]["order"] == [1, 3]


def test_a_lane_without_gpus_claims_none(box):
    box.lane("a", {"enabled": False, "gpus": ["0"]})
    box.lane("b", TWO)
    assert box.check("b")["decision"]["order"] == [0, 2]


def test_a_broken_neighbour_does_not_stop_a_lane(box, capsys):
    box.lane("b", TWO)
    path = box.base / "etc/vllm-fleet/lanes/a/current/lane.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert box.check("b")["exit"] == 0
    assert "the GPUs of lane a are not known" in capsys.readouterr().err


def test_lanes_installed_together_leave_each_other_room(box):
    lanes = [box.lane("a", TWO), box.lane("b", TWO), box.lane("c", {"enabled": False})]
    decisions = start.decide_all(lanes, box.facts, box.root)
    assert {name: decision["order"] for name, decision in decisions.items()} == {"a": [0, 2], "b": [1, 3]}
    clash = [box.lane("a", TWO), box.lane("b", {**TWO, "gpus": ["0", "2"]})]
    assert start.decide_all(clash, box.facts, box.root)["a"]["order"] == [1, 3]


def test_its_own_engine_does_not_make_a_lane_busy(box):
    box.lane()
    pid = 4242
    for gpu in box.facts["gpus"]:
        gpu.update(processes=[{"pid": pid, "name": "VLLM::Worker", "memory_mib": 20000}], memory_used_mib=20001)
    assert box.check()["decision"]["reason"] == "gpu_busy"
    path = box.base / f"proc/{pid}/cgroup"
    path.parent.mkdir(parents=True)
    path.write_text("0::/system.slice/system-vllm.slice/vllm@main.service\n")
    assert box.check()["decision"]["status"] == "selected"


def test_a_new_machine_loses_the_engines_own_p2p_results(box):
    box.lane()
    assert box.check()["removed"] == []
    (cache,) = (box.base / "var/cache/vllm-fleet/main").iterdir()
    stale = cache / "gpu_p2p_access_cache_for_0,2,1,3.json"
    stale.write_text("{}")
    assert box.check()["removed"] == []
    box.facts["gpus"][1]["uuid"] = "GPU-replaced"
    assert box.check()["removed"] == [str(stale)]
    assert not stale.exists()


def test_a_link_in_the_cache_is_not_followed(box, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    base = tmp_path / "cache"
    (base / "main").mkdir(parents=True)
    (base / "main" / "key").symlink_to(victim)
    with pytest.raises(RefusedError) as caught:
        start.make_owned(str(base / "main/key/triton"), None, str(base))
    assert caught.value.reason == "cache_not_a_directory"
    assert list(victim.iterdir()) == []


def test_a_start_waits_for_another_and_then_gives_up(box):
    box.lane()
    directory = box.base / "run/vllm-fleet"
    directory.mkdir(parents=True)
    with open(directory / "start.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RefusedError) as caught, start.box_lock(box.root, wait=0.2):
            raise AssertionError("the lock was given twice")
        assert caught.value.reason == "start_locked"
    with start.box_lock(box.root, wait=0.2):
        pass


@pytest.mark.parametrize("name", ["absent", "../main", ""])
def test_a_lane_that_is_none(box, name):
    with pytest.raises(UsageError) as caught:
        box.check(name)
    assert caught.value.reason == "unknown_lane"


def test_hostile_facts_never_reach_the_file(box):
    box.lane(policy={"gpus": ["GPU-b1a0"]})
    for gpu in box.facts["gpus"]:
        gpu["uuid"] += "\nLD_PRELOAD=/tmp/x"
    with pytest.raises(UsageError) as caught:
        box.check()
    assert caught.value.reason == "bad_facts"
    assert not (box.base / "run/vllm-fleet/main").exists()


def test_the_directories_belong_to_the_service_user(tmp_path):
    start.make_owned(str(tmp_path / "cache/main/key/triton"), {"uid": 12345, "gid": 12346}, str(tmp_path / "cache"))
    mine = (os.geteuid(), os.getegid())
    wanted = (12345, 12346) if os.geteuid() == 0 else mine
    owners = {}
    for name in ("cache", "cache/main", "cache/main/key", "cache/main/key/triton"):
        status = (tmp_path / name).stat()
        owners[name] = (status.st_uid, status.st_gid)
    assert owners.pop("cache") == mine
    assert set(owners.values()) == {wanted}


def test_fixed_settings_reach_the_file_too(box):
    box.lane(policy={"mode": "fixed"})
    box.check()
    env = box.environment()
    assert (env["CUDA_VISIBLE_DEVICES"], env["VLLM_SKIP_P2P_CHECK"], env["NCCL_P2P_LEVEL"]) == ("0,1,2,3", "1", "SYS")


def test_with_the_real_preflight(tmp_path):
    made = Box(tmp_path)
    made.lane(engine={**LANE["engine"], "products": "none"})
    outcome = made.check()
    by_name = {item["check"]: item["status"] for item in outcome["results"]}
    # nothing is installed below this root, but the cards are in order
    assert (by_name["topology"], outcome["exit"]) == ("pass", 1)
    assert (tmp_path / "var/lib/vllm-fleet/preflight/main.json").exists()


def test_a_valid_verdict_reaches_the_live_facts(tmp_path):
    """Through the real adapter, the real pynvml and the simulator."""
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(simulator.box("box1")))
    root = tmp_path / "root"
    code = f"import json; from vllm_fleet.facts import collect; print(json.dumps(collect.read(root={str(root)!r})))"
    facts = simulator.python(code, path)
    assert facts["p2p_verdict"] is None
    gpus = [{"uuid": gpu["uuid"], "bus_id": gpu["bus_id"]} for gpu in facts["gpus"]]
    made = {"schema": 1, "bound": verdict.bound(facts), "pairs": [{"gpus": [gpus[3], gpus[1]], "status": "fail"}]}
    verdict_store.save(made, str(root))
    assert simulator.python(code, path)["p2p_verdict"] == {"status": "fail", "pairs": {"1-3": "fail"}}


def test_the_command_says_it_in_the_journal(box, monkeypatch, capsys):
    box.lane()
    decision = {
        "status": "refused",
        "reason": "too_few_gpus",
        "message": "2 GPUs, 4 needed",
        "order": [],
        "warnings": [],
    }
    outcome = {"lane": "main", "decision": decision, "removed": ["/x"], "results": [], "runtime_env": None, "exit": 3}
    monkeypatch.setattr(start_check.start, "check", lambda *args, **kwargs: outcome)
    parser = __import__("argparse").ArgumentParser()
    start_check.add_arguments(parser)
    assert start_check.run(parser.parse_args(["main", "--json"])) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["decision"] == decision
    assert "start main: refused, too_few_gpus: 2 GPUs, 4 needed" in err
    assert "removed /x" in err


def test_an_unknown_lane_is_one_line_and_2():
    done = subprocess.run(
        [sys.executable, "-m", "vllm_fleet", "start-check", "no-such-lane"],
        env={**os.environ, "PYTHONPATH": str(simulator.ROOT / "module_utils")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "unknown_lane" in done.stderr


@pytest.mark.parametrize(("given", "seconds"), [(None, 7.0), (3.0, 3.0)])
def test_the_driver_has_the_lanes_own_time_unless_another_is_given(box, monkeypatch, given, seconds):
    box.lane(topology_timeout_s=7)
    asked = []

    def read(timeout, root):
        asked.append(timeout)
        return copy.deepcopy(box.facts)

    monkeypatch.setattr(start.collect, "read", read)
    start.check("main", box.root, timeout=given)
    assert asked == [seconds]
