"""`vllm-fleet bench`: what is kept of a result, what is compared, and that the key reaches no command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from vllm_fleet import bench, cli, engine_python, release, start
from vllm_fleet.commands import bench as command
from vllm_fleet.errors import FleetError

LOAD = bench.Load()
KEY = "a-secret-key"


def raw(**changes):
    numbers = {f"p{number}_{name}_ms": 10.0 + number for number in bench.PERCENTILES for name in ("ttft", "itl")}
    return {
        "completed": LOAD.prompts, "duration": 12.345, "request_throughput": 2.5, "output_throughput": 160.0,
        **numbers, **changes,
    }  # fmt: skip


def result(name="b", time="2026-11-30T20:00:00Z", load=LOAD, **changes):
    return {"lane": "main", "release": name, "time": time, "engine": "e", **bench.condense(raw(**changes), load)}


def test_few_numbers_are_kept():
    kept = bench.condense(raw(), LOAD)
    assert kept["ttft_ms"] == {"p50": 60.0, "p90": 100.0, "p99": 109.0}
    assert (kept["requests_per_s"], kept["output_tokens_per_s"], kept["seconds"]) == (2.5, 160.0, 12.35)
    assert kept["load"] == {"prompts": 32, "input_tokens": 64, "output_tokens": 64, "concurrency": 8}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"completed": 31}, "requests_failed"), ({"completed": None}, "requests_failed"),
     ({"p50_itl_ms": None}, "bad_result"), ({"output_throughput": "fast"}, "bad_result")],
)  # fmt: skip
def test_a_result_that_says_little_is_none(changes, reason):
    with pytest.raises(FleetError) as caught:
        bench.condense(raw(**changes), LOAD)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("changes", "status", "named"),
    [
        ({}, "pass", []),
        ({"output_throughput": 129.0}, "pass", []),
        ({"output_throughput": 127.0}, "warn", ["output tokens/s"]),
        ({"request_throughput": 1.0, "p50_ttft_ms": 90.0}, "warn", ["requests/s", "TTFT p50 ms"]),
        ({"p50_itl_ms": 73.0}, "warn", ["ITL p50 ms"]),
        ({"p99_itl_ms": 900.0, "p90_ttft_ms": 900.0}, "pass", []),
        ({"output_throughput": 320.0, "p50_ttft_ms": 1.0}, "pass", []),
    ],
)
def test_a_loss_beyond_the_share_is_a_warning(changes, status, named):
    rows, verdict = bench.compare(result(**changes), result("a"), 0.2)
    assert verdict["status"] == status
    assert [row[0] for row in rows if row[4] == "slower"] == named
    assert all(name in verdict["message"] for name in named)
    assert {len(row) for row in rows} == {5}


def test_a_run_of_half_a_second_decides_nothing():
    for now, before in ((result(duration=0.5), result("a")), (result(), result("a", duration=0.5))):
        _, verdict = bench.compare(now, before, 0.2)
        assert (verdict["status"], verdict["reason"]) == ("unknown", "too_short")
        assert "--prompts 640" in verdict["fix"]


def test_without_an_earlier_release_there_is_nothing_to_compare():
    rows, verdict = bench.compare(result(), None, 0.2)
    assert (verdict["status"], verdict["reason"]) == ("pass", "nothing_to_compare")
    assert rows[1] == ["requests/s", "-", "2.5", "-", ""]


def test_the_earlier_result_is_the_previous_releases_under_the_same_load():
    old, newest = result("a", "2026-11-01"), result("c", "2026-11-29")
    other = result("d", "2026-11-30", load=LOAD._replace(prompts=8), completed=8)
    stored = [old, newest, other, result("b")]
    choose = bench.choose_earlier
    assert choose(stored, "b", "a", LOAD._asdict())["release"] == "a"
    assert choose(stored, "b", None, LOAD._asdict())["release"] == "c"
    assert choose(stored, "b", "d", LOAD._asdict())["release"] == "c"
    assert choose([other], "b", "d", LOAD._asdict()) is None


def test_results_are_kept_by_release_and_the_oldest_go(tmp_path):
    for number in range(command.KEPT + 2):
        command.keep(result(f"r{number:02}", f"2026-11-{number + 1:02}"), str(tmp_path))
    command.keep(result("r05", "2026-12-01", output_throughput=1.0), str(tmp_path))
    (tmp_path / "var/lib/vllm-fleet/bench/main/torn.json").write_text("{")
    names = [entry["release"] for entry in command.stored("main", str(tmp_path))]
    assert (len(names), names[0], names[-1]) == (command.KEPT, "r02", "r05")
    assert command.stored("main", str(tmp_path))[-1]["output_tokens_per_s"] == 1.0


@pytest.fixture
def lane(tmp_path, monkeypatch):
    """A lane whose engine is a script that writes down what it got."""
    engine = tmp_path / "python"
    engine.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"json.dump([sys.argv, dict(os.environ)], open({str(tmp_path / 'seen')!r}, 'w'))\n"
        "if 'BROKEN' in os.environ:\n    sys.exit('no such dataset')\n"
        "where = sys.argv[sys.argv.index('--result-dir') + 1]\n"
        f"json.dump({raw()!r}, open(where + '/result.json', 'w'))\n"
    )
    engine.chmod(0o755)
    (tmp_path / "key").write_text(KEY + "\n")
    (tmp_path / "key").chmod(0o600)
    home = tmp_path / "lanes" / "main"
    (home / "releases" / "abc").mkdir(parents=True)
    (home / "current").symlink_to("releases/abc")
    (tmp_path / "run" / "main").mkdir(parents=True)
    (tmp_path / "run" / "main" / "release").write_text("abc\n")
    data = {
        "lane": "main", "engine": {"id": "e", "python": str(engine)}, "env": {}, "host": "0.0.0.0", "port": 8000,
        "checkpoint": {"path": "/models/tiny"}, "served_names": ["tiny"], "api_key_file": str(tmp_path / "key"),
    }  # fmt: skip
    monkeypatch.setattr(command, "load_lane", lambda name: data)
    monkeypatch.setattr(release, "LANES", str(tmp_path / "lanes"))
    monkeypatch.setattr(start, "RUN", str(tmp_path / "run"))
    monkeypatch.setattr(command, "DIRECTORY", str(tmp_path / "bench"))
    monkeypatch.setattr(command.engine_http, "ask", lambda *args, **options: (200, {}))
    found = engine_python.EnginePython(str(engine), data["env"], None, None)
    monkeypatch.setattr(command.engine_python, "find", lambda name, python: found)
    return data, tmp_path


def test_the_key_goes_to_the_benchmark_but_not_on_its_command_line(lane, capsys):
    _, place = lane
    assert cli.main(["bench", "main", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["result"]["release"], shown["results"][0]["reason"]) == ("abc", "nothing_to_compare")
    argv, env = json.loads((place / "seen").read_text())
    assert KEY not in " ".join(argv)
    assert (env["OPENAI_API_KEY"], env["CUDA_VISIBLE_DEVICES"]) == (KEY, "")
    assert argv[argv.index("--base-url") + 1] == "http://127.0.0.1:8000"
    stored = (place / "bench/main/abc.json").read_text()
    assert KEY not in stored and json.loads(stored) == shown["result"]


def test_a_slower_release_is_named_in_the_table(lane, capsys):
    command.keep({**result("older", output_throughput=320.0), "lane": "main"})
    assert cli.main(["bench", "main"]) == 0
    out = capsys.readouterr().out
    assert "output tokens/s  320    160  -50%    slower" in out
    assert "warn slower: slower than release older by more than 20%" in out


def test_what_can_not_be_measured_is_refused_with_its_reason(lane, capsys, monkeypatch):
    data, place = lane
    data["env"]["BROKEN"] = "1"
    assert cli.main(["bench", "main"]) == 2
    assert "bench_failed: the benchmark ended with 1: no such dataset" in capsys.readouterr().err
    monkeypatch.setattr(command.engine_http, "ask", lambda *args, **options: (None, None))
    assert cli.main(["bench", "main"]) == 3
    assert "not_answering" in capsys.readouterr().err
    (place / "run/main/release").write_text("another\n")
    assert cli.main(["bench", "main"]) == 3
    assert "not_current: lane main runs release another" in capsys.readouterr().err
    assert cli.main(["bench", "main", "--prompts", "0"]) == 2
    assert "bad_load" in capsys.readouterr().err
    assert not Path(command.DIRECTORY).exists()
