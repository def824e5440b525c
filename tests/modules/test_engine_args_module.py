"""The module ``engine_args`` and the lane filters through Ansible: the engine's words, check mode, what is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict

import pytest

from tests.unit import test_engine_check as given

REPOSITORY = Path(__file__).resolve().parents[2]
ANSIBLE = Path(sys.executable).parent / "ansible-playbook"


def play(place: Path, lane: Dict[str, Any], *options: str) -> Dict[str, Any]:
    """Run the module for one lane of the tiny profile and return the result of its task."""
    tasks = [
        {
            "name": "Ask",
            "engine_args": {
                "lanes": "{{ lanes | vllm_fleet_resolve_lanes(catalog, {'engines_root': engines}) }}",
                "user": "",
                "memory": str(place / "state" / "engine-args.json"),
            },
        }
    ]
    variables = {
        "lanes": [{"name": "main", "profile": "tiny-cpu", "checkpoint": "/m", **lane}],
        "catalog": str(REPOSITORY / "catalog"),
        "engines": str(place / "engines"),
        "ansible_python_interpreter": sys.executable,
    }
    book = place / "play.json"
    book.write_text(json.dumps([{"hosts": "localhost", "gather_facts": False, "vars": variables, "tasks": tasks}]))
    done = subprocess.run(
        [str(ANSIBLE), "-i", "localhost,", "-c", "local", str(book), *options],
        cwd=REPOSITORY,
        env={**os.environ, "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json", "ANSIBLE_DEPRECATION_WARNINGS": "false"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    try:
        return json.loads(done.stdout)["plays"][0]["tasks"][0]["hosts"]["localhost"]
    except (ValueError, LookupError):
        raise AssertionError(done.stdout + done.stderr) from None


def test_accepted_then_remembered(tmp_path: Path) -> None:
    given.engine(tmp_path)
    first, second = play(tmp_path, {}), play(tmp_path, {})
    assert [item["reason"] for item in first["lanes"] + second["lanes"]] == ["accepted", "remembered"]
    assert not first["changed"] and not second["changed"]
    assert given.calls(tmp_path) == 1


def test_refused_in_the_engines_own_words(tmp_path: Path) -> None:
    given.engine(tmp_path)
    result = play(tmp_path, {"args": {"--no-such": 1}})
    assert result["failed"] and result["reason"] == "refused"
    assert "lane main, engine vllm-0.32.0-cpu: " in result["msg"]
    assert "error: unrecognized arguments: --no-such 1" in result["msg"]


@pytest.mark.parametrize(("options", "failed"), [((), True), (("--check",), False)])
def test_an_absent_engine_stops_a_play_but_not_a_check(tmp_path: Path, options: tuple, failed: bool) -> None:
    result = play(tmp_path, {}, *options)
    assert bool(result.get("failed")) is failed
    assert result["lanes"][0]["reason"] == "engine_absent"
    assert result["status"] == "unknown"


def test_check_mode_asks_and_writes_nothing(tmp_path: Path) -> None:
    given.engine(tmp_path)
    assert play(tmp_path, {}, "--check")["lanes"][0]["reason"] == "accepted"
    assert not (tmp_path / "state").exists()
    assert play(tmp_path, {"args": {"--no-such": 1}}, "--check")["reason"] == "refused"


def test_a_misspelt_key_is_one_readable_line(tmp_path: Path) -> None:
    result = play(tmp_path, {"prot": 1})
    assert "unknown_key: lane main: unknown name 'prot'" in result["msg"]
    assert "Did you mean port?" in result["msg"]
    assert "Traceback" not in result["msg"]
