"""The pass over all checks: overrides, dry runs, the stored result, the commands, and the page that documents it."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import time
from pathlib import Path
from typing import Any, Dict, List

import pytest
from vllm_fleet import checks, cli, journal, products
from vllm_fleet.commands import doctor
from vllm_fleet.errors import UsageError
from vllm_fleet.preflight import gather, report, run
from vllm_fleet.preflight.delegated import DELEGATED
from vllm_fleet.preflight.registry import CHECKS

from tests.unit import preflight_fixtures as given

REPOSITORY = Path(__file__).resolve().parents[2]


def statuses(lane: Dict[str, Any], box: Dict[str, Any], **options: Any) -> Dict[str, str]:
    return {item.result["check"]: item.result["status"] for item in run.evaluate(lane, box, **options)}


# ---- severities ------------------------------------------------------------------------------------------------------


def test_a_fail_can_be_softened_and_a_warning_hardened() -> None:
    lane, box = given.lane(), given.box()
    box["kernel_modules"] = ["nouveau"]
    box["persistence"] = {"GPU-0": False, "GPU-1": False}
    assert (statuses(lane, box)["nouveau"], statuses(lane, box)["persistence"]) == ("fail", "warn")
    lane["checks"] = {"nouveau": "warn", "persistence": "fail"}
    assert (statuses(lane, box)["nouveau"], statuses(lane, box)["persistence"]) == ("warn", "fail")


def test_an_override_changes_no_pass_and_no_unknown() -> None:
    lane, box = given.lane(), given.box()
    box["kernel_modules"] = None
    lane["checks"] = {"nouveau": "fail", "display": "fail", "port": "warn"}
    found = statuses(lane, box)
    assert (found["nouveau"], found["display"], found["port"]) == ("unknown", "pass", "pass")


def test_off_and_skipped_checks_give_no_result() -> None:
    lane, box = given.lane(), given.box()
    lane["checks"] = {"nouveau": "off", "checkpoint_index": "off"}
    box["results"] = [checks.result("checkpoint_index", "fail", "index_missing", "x")]
    found = statuses(lane, box, skip=["port"])
    assert not {"nouveau", "checkpoint_index", "port"} & set(found)


def test_overrides_reach_the_checks_of_other_modules() -> None:
    lane, box = given.lane(), given.box()
    box["results"] = [checks.result("checkpoint_shards", "warn", "shards_larger_than_index", "x")]
    lane["checks"] = {"checkpoint_shards": "fail"}
    assert statuses(lane, box)["checkpoint_shards"] == "fail"
    assert box["results"][0]["status"] == "warn", "the facts stay as they are"


# ---- a dry run on a fresh box ----------------------------------------------------------------------------------------


def test_a_dry_run_excuses_only_what_a_play_would_have_installed() -> None:
    lane, box = given.lane(), given.box()
    box["engine"]["root"] = False
    box["user"] = None
    box["listeners"] = [{"address": "0.0.0.0", "pid": 1, "command": "x", "cgroup": "/"}]
    box["memory"]["total_kib"] = 1000
    box["results"] = [
        checks.result("checkpoint_path", "fail", "checkpoint_absent", "x"),
        checks.result("checkpoint_config", "fail", "setting_differs", "x"),
    ]
    found = {item.result["check"]: item.result for item in run.evaluate(lane, box, dry_run=True)}
    for name in ("engine_installed", "import_origin", "service_user", "checkpoint_path"):
        assert (found[name]["status"], found[name]["reason"]) == ("unknown", "not_yet_installed"), name
    for name in ("port", "memory", "checkpoint_config"):
        assert found[name]["status"] == "fail", name


def test_a_dry_run_keeps_a_hardened_unknown_unknown() -> None:
    lane, box = given.lane(), given.box()
    lane["checks"] = {"service_user": "fail"}
    box["user"] = None
    assert statuses(lane, box, dry_run=True)["service_user"] == "unknown"


# ---- the lane's own processes ----------------------------------------------------------------------------------------


def own(pid: int, memory: Any) -> Dict[str, Any]:
    return {"pid": pid, "name": "VLLM::Worker", "memory_mib": memory}


OWNED = {"5": {"command": "VLLM::Worker", "cgroup": given.UNIT_CGROUP}}


@pytest.mark.parametrize(
    ("processes", "used", "left", "used_after"),
    [
        ([own(5, 900)], 950, [], 50),
        ([own(5, None)], 950, [], 0),
        ([own(5, None), own(6, 10)], 950, [own(6, 10)], 950),
        ([own(6, 10)], 950, [own(6, 10)], 950),
        ([own(5, 900)], 100, [], 0),
        ([own(5, 900)], None, [], None),
        (None, 950, None, 950),
    ],
)
def test_a_running_lane_does_not_find_its_own_gpus_busy(processes: Any, used: Any, left: Any, used_after: Any) -> None:
    facts = {"gpus": [dict(given.gpu(0), processes=processes, memory_used_mib=used)]}
    before = json.dumps(facts)
    found = gather.own_processes_removed(facts, OWNED, "main")
    assert found is not None
    assert (found["gpus"][0]["processes"], found["gpus"][0]["memory_used_mib"]) == (left, used_after)
    assert json.dumps(facts) == before, "the facts of the caller stay"


def test_facts_without_gpus_pass_through() -> None:
    assert gather.own_processes_removed(None, {}, "main") is None
    assert gather.own_processes_removed({"gpus": None}, {}, "main") == {"gpus": None}


# ---- lanes on disk ---------------------------------------------------------------------------------------------------


def install(root: Path, lane: Dict[str, Any]) -> None:
    release = root / "etc/vllm-fleet/lanes" / lane["lane"] / "releases/abc"
    release.mkdir(parents=True)
    (release / "lane.json").write_text(json.dumps(lane))
    (release.parent.parent / "current").symlink_to("releases/abc")


def test_an_empty_box_fails_by_name_and_never_ends_in_a_traceback(tmp_path: Path) -> None:
    lane = given.cpu_lane()
    install(tmp_path, lane)
    found = {item["check"]: item["reason"] for item in run.run_lane("main", root=str(tmp_path))}
    assert found["engine_installed"] == "engine_missing"
    assert found["service_user"] == "user_missing"
    assert found["checkpoint_path"] == "checkpoint_absent"
    assert found["workdir"] == "workdir_missing"
    assert found["log"] == "log_directory_missing"
    assert found["port"] == "port_unknown"
    assert found["shared_memory"] == "shm_unknown"
    assert not {"compiler", "gpus_readable", "nouveau", "products"} & set(found)


def test_facts_and_decision_of_the_caller_are_used(tmp_path: Path) -> None:
    install(tmp_path, given.lane())
    facts = given.box()["topology"]
    decision = {"status": "refused", "reason": "too_few_gpus", "message": "2 of 4 GPUs. Fix: add two."}
    results = run.run_lane("main", facts=facts, decision=decision, root=str(tmp_path), hashing=False)
    assert given.of(results, "topology")[0]["message"] == "too_few_gpus: 2 of 4 GPUs."
    assert given.of(results, "topology")[0]["fix"] == "add two."
    assert given.of(results, "driver_match")[0]["status"] == "pass"


@pytest.mark.parametrize("route", ["git", "wheel"])
def test_an_engine_without_a_record_of_its_products_fails(tmp_path: Path, route: str) -> None:
    """A source tree keeps its products in the tree, a wheel where it was installed."""
    lane = given.cpu_lane()
    tree = given.LANE["engine"]["tree"] if route == "git" else None
    lane["engine"].update(route=route, products="sha256", tree=tree)
    (tmp_path / (tree or given.SITE).lstrip("/")).mkdir(parents=True)
    results = run.run_lane("main", lane_data=lane, root=str(tmp_path))
    assert [(item["status"], item["reason"]) for item in given.of(results, "products")] == [("fail", "unrecorded")]
    assert given.of(run.run_lane("main", lane_data=lane, root=str(tmp_path), hashing=False), "products") == []


@pytest.mark.parametrize(("content", "status"), [(None, "fail"), ("", "fail"), ("key", "warn")])
def test_an_api_key_file_has_to_hold_a_key(tmp_path: Path, content: Any, status: str) -> None:
    lane = given.cpu_lane()
    lane.update(host="0.0.0.0", api_key_file="/etc/vllm-fleet/key")
    install(tmp_path, lane)
    if content is not None:
        (tmp_path / "etc/vllm-fleet/key").write_text(content)
    assert given.of(run.run_lane("main", root=str(tmp_path)), "exposure")[0]["status"] == status


def test_unknown_lanes_and_broken_files(tmp_path: Path) -> None:
    for name in ("nothing", "", "../etc"):
        with pytest.raises(UsageError) as caught:
            run.load(name, str(tmp_path))
        assert caught.value.reason == "unknown_lane"
    install(tmp_path, {"lane": "half", "engine": {}})
    with pytest.raises(UsageError) as caught:
        run.load("half", str(tmp_path))
    assert caught.value.reason == "bad_lane" and "port" in caught.value.message
    assert run.names(str(tmp_path)) == ["half"]


@pytest.mark.parametrize(
    ("overrides", "reason"), [({"ports": "warn"}, "unknown_check"), ({"port": "off course"}, "bad_severity")]
)
def test_overrides_are_validated(overrides: Dict[str, str], reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        run.validated(dict(given.lane(), checks=overrides), "x")
    assert caught.value.reason == reason


# ---- what is told ----------------------------------------------------------------------------------------------------


RESULTS = [
    checks.result("port", "fail", "port_occupied", "port 8000 is held by pid 7", "stop it"),
    checks.result("memory", "pass", "memory_ok", "188 GiB"),
    checks.result("nouveau", "unknown", "nouveau_unknown", "no list"),
    checks.result("display", "warn", "display_attached", "a display", "move it"),
]


def test_the_json_object() -> None:
    found = report.as_object("main", RESULTS)
    assert found["lane"] == "main" and found["results"] == RESULTS
    assert found["summary"] == {"pass": 1, "warn": 1, "fail": 1, "unknown": 1}
    assert found["status"] == "fail"


@pytest.mark.parametrize(
    ("given_statuses", "expected"),
    [
        ([], "pass"),
        (["pass"], "pass"),
        (["pass", "warn"], "warn"),
        (["warn", "unknown"], "unknown"),
        (["unknown", "fail"], "fail"),
    ],
)
def test_the_worst_status_names_the_whole(given_statuses: List[str], expected: str) -> None:
    assert checks.overall([checks.result("x", status, "r", "m") for status in given_statuses]) == expected


def test_a_boot_stores_the_result_and_tells_the_journal_what_did_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: List[Any] = []
    monkeypatch.setattr(journal, "say", lambda line, level="info": said.append((level, line)))
    report.publish("main", RESULTS, str(tmp_path))
    stored = tmp_path / "var/lib/vllm-fleet/preflight/main.json"
    data = json.loads(stored.read_text())
    assert abs(data.pop("time") - time.time()) < 60
    assert data == report.as_object("main", RESULTS)
    assert stored.stat().st_mode & 0o777 == 0o644
    assert said == [
        ("error", "preflight main: fail port port_occupied: port 8000 is held by pid 7 Fix: stop it"),
        ("warning", "preflight main: unknown nouveau nouveau_unknown: no list"),
        ("warning", "preflight main: warn display display_attached: a display Fix: move it"),
    ]
    report.publish("main", RESULTS[1:2], str(tmp_path))
    assert json.loads(stored.read_text())["status"] == "pass"
    assert [entry.name for entry in stored.parent.iterdir()] == ["main.json"]


def test_a_state_directory_that_cannot_be_written_is_said_and_changes_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: List[str] = []
    monkeypatch.setattr(journal, "say", lambda line, level="info": said.append(line))
    (tmp_path / "var").write_text("a file where the state directory should be")
    report.publish("main", RESULTS[1:2], str(tmp_path))
    assert len(said) == 1 and "not stored" in said[0]


def test_the_table_is_worst_first_with_fixes() -> None:
    text = report.table("main", RESULTS)
    assert text.splitlines() == [
        "lane main: fail",
        "fail    port     port 8000 is held by pid 7 [port_occupied]",
        "                 fix: stop it",
        "unknown nouveau  no list [nouveau_unknown]",
        "warn    display  a display [display_attached]",
        "                 fix: move it",
        "pass    memory   188 GiB",
        "1 pass, 1 warn, 1 unknown, 1 fail",
    ]
    assert "\x1b[31mfail" in report.table("main", RESULTS, colour=True)


# ---- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> List[Dict[str, str]]:
    """The commands get these results instead of this machine's."""
    results = [dict(item) for item in RESULTS]
    monkeypatch.setattr("vllm_fleet.commands.preflight.run_lane", lambda lane, **options: results)
    monkeypatch.setattr("vllm_fleet.commands.doctor.run_lane", lambda lane, **options: results)
    monkeypatch.setattr("vllm_fleet.commands.doctor.load", lambda lane: given.cpu_lane())
    monkeypatch.setattr("vllm_fleet.commands.doctor.names", lambda: ["main", "second"])
    return results


def test_preflight_json(canned: List[Dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["preflight", "main", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "fail"
    canned.pop(0)
    assert cli.main(["preflight", "main", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["unknown"] == 1


def test_preflight_lines(canned: List[Dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["preflight", "main"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[-1] == "preflight main: 1 pass, 1 warn, 1 fail, 1 unknown"


def test_doctor_shows_every_lane_without_colour_in_a_pipe(
    canned: List[Dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "lane main: fail" in out and "lane second: fail" in out and "\x1b" not in out
    assert cli.main(["doctor", "second"]) == 1
    assert "lane main" not in capsys.readouterr().out


def test_doctor_colours_a_terminal(
    canned: List[Dict[str, str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    doctor.run(argparse.Namespace(lane="main"))
    assert "\x1b[31m" in capsys.readouterr().out


def test_a_lane_that_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["preflight", "no-such-lane"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and "unknown_lane" in error


# ---- the documentation -----------------------------------------------------------------------------------------------


def test_the_page_of_the_checks_is_current() -> None:
    path = REPOSITORY / "docs/generate_checks.py"
    loader = importlib.util.spec_from_file_location("generate_checks", path)
    assert loader is not None and loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    current = (REPOSITORY / "docs/checks.md").read_text(encoding="utf-8")
    assert current == module.page(), "run: python3 docs/generate_checks.py"
    for name in [*CHECKS, *DELEGATED]:
        assert f"### {name}\n" in current


def test_codes_of_other_modules_are_theirs() -> None:
    """What the page lists for another module is what that module can say, in both directions."""
    texts = set()
    named: Dict[str, set[str]] = {}
    for name in ("checkpoint.py", "checkpoint_pass.py", "products.py", "products_pass.py"):
        tree = ast.parse((REPOSITORY / "module_utils/vllm_fleet" / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "result":
                check, _status, reason = (*node.args, None, None)[:3]
                if isinstance(check, ast.Constant) and isinstance(reason, ast.Constant):
                    named.setdefault(check.value, set()).add(reason.value)
    for check, reasons in named.items():
        if check != "checkpoint_free_space":  # the preflight has a check of its own for room
            assert reasons <= set(DELEGATED[check].codes), check
    for name, item in DELEGATED.items():
        for reason in item.codes:
            # the path's codes are put together from the state of the directory
            assert reason in texts or reason in ("checkpoint_not_a_directory", "checkpoint_unreadable"), name
    assert set(products.PROBLEMS) <= set(DELEGATED["products"].codes)
