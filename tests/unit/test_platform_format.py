"""The platform's own file becomes a lane and comes back without loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_fleet import catalog, platform_format, profile, render
from vllm_fleet.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
SEED = ROOT.parent / "shared" / "seeds" / "000_65d5fc2bc909415f.txt"
CATALOG = catalog.load(str(ROOT / "catalog"))

FILE = """\
concurrency: 1
command:
  - python3
  - -m
  - vllm.entrypoints.openai.api_server
  - --model
  - /model
  - -tp
  - 4
  - --max-num-seqs
  - 010
  - --seed
  - -1
  - --trust-remote-code
  - --flag=true
  - --empty
  -
  - --text
  - "a ${checkpoint} $HOME %i"
env:
  - name: A
    value: 3600
  - {name: B, value: "0"}
  - name: C
    value: true
  - name: D
    value:
  - name: E
    value: 1e3
  - name: F
    value: ${nothing}
"""


def load(tmp_path: Path, text: str, **lane: object) -> tuple:
    path = tmp_path / "computility-run.yaml"
    path.write_text(text, encoding="utf-8")
    read = catalog.platform_reader(CATALOG, {"base_dir": str(tmp_path)})
    keys = {"name": "main", "profile_source": path.name, **lane}
    found = read(keys)
    return found, profile.resolve(keys, CATALOG, None, found)


def test_every_value_is_what_stands_in_the_file(tmp_path: Path) -> None:
    found, lane = load(tmp_path, FILE)
    rendered = render.render(lane)
    command = [str(word) for word in yaml.load(FILE, Loader=yaml.BaseLoader)["command"]]
    assert rendered["argv"] == [*command, "--host", "127.0.0.1", "--port", "8000"]
    assert "010" in rendered["argv"] and "-1" in rendered["argv"] and "" in rendered["argv"]
    values = {name: rendered["env"][name] for name in "ABCDEF"}
    assert values == {"A": "3600", "B": "0", "C": "true", "D": "", "E": "1e3", "F": "${nothing}"}
    assert lane["policy"]["tensor_parallel"] == 4
    assert lane["checkpoint"]["path"] == "/model"
    assert found["id"] == "computility-run"


def test_the_file_comes_back(tmp_path: Path) -> None:
    found, lane = load(tmp_path, FILE, port=9000, args={"--x": 1})
    document = platform_format.from_lane(found, lane)
    assert document == catalog.parse_yaml(FILE, "x", as_written=True)
    again = catalog.dump_platform(document)
    assert catalog.parse_yaml(again, "x", as_written=True) == document
    plain = yaml.safe_load(again)
    assert all(isinstance(word, str) for word in plain["command"])
    assert all(isinstance(item["value"], str) for item in plain["env"])


@pytest.mark.skipif(not SEED.is_file(), reason="the seed systems are not beside this checkout")
def test_the_public_file_and_the_catalogs_profile_are_the_same() -> None:
    read = catalog.platform_reader(CATALOG, {})
    lane = {"name": "main", "profile_source": str(SEED)}
    found = read(lane)
    ours = profile.resolve({"name": "main", "profile": "qwen36-35b-a3b-4xbiv100"}, CATALOG)
    theirs = profile.resolve(lane, CATALOG, None, found)
    assert render.render(ours) == render.render(theirs)
    seed = yaml.load(SEED.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    assert render.render(theirs)["argv"][: len(seed["command"])] == seed["command"]
    assert platform_format.from_lane(found, theirs) == seed


def test_corex_paths_are_in_the_unit(tmp_path: Path) -> None:
    _, lane = load(tmp_path, FILE)
    env = render.render(lane)["env"]
    assert env["PATH"].split(":")[:3] == [
        "/usr/local/corex/bin",
        "/usr/local/corex-3.2.3/bin",
        "/usr/local/openmpi/bin",
    ]
    assert "/usr/local/openmpi/lib" in env["LD_LIBRARY_PATH"].split(":")
    assert env["PYTHONPATH"].split(":")[0] == "/usr/local/corex/lib64/python3/dist-packages"
    unit = render.unit(lane)["exec_start"]
    assert unit.startswith("@/usr/bin/python3 ")


def test_on_an_engine_with_a_venv_the_bare_python_is_the_venvs(tmp_path: Path) -> None:
    _, lane = load(tmp_path, FILE.replace("  - -tp\n  - 4\n", ""), engine="vllm-0.32.0-cpu")
    venv = lane["engine"]["venv"]
    assert lane["env"]["PATH"].startswith(f"{venv}/bin:")
    assert render.unit(lane)["exec_start"].startswith(f"@{venv}/bin/python ")
    assert lane["policy"]["enabled"] is False


def test_a_lane_overrides_the_file(tmp_path: Path) -> None:
    text = FILE.replace("  - --trust-remote-code\n", "  - --port\n  - '1234'\n  - --served-model-name\n  - a\n  - b\n")
    _, lane = load(tmp_path, text)
    assert (lane["port"], lane["served_names"]) == (1234, ["a", "b"])
    _, lane = load(
        tmp_path, text, port=8001, checkpoint="/other", served_names=["c"], env={"A": None}, args={"--seed": None}
    )
    words = render.render(lane)["argv"]
    assert words[words.index("--port") + 1] == "8001" and words.count("--port") == 1
    assert words[words.index("--model") + 1] == "/other"
    assert words[words.index("--served-model-name") + 1 :][0] == "c" and "b" not in words
    assert "A" not in lane["env"] and "--seed" not in words


def test_vllm_serve_is_an_entry_too(tmp_path: Path) -> None:
    text = "command: [vllm, serve, /model, --max-num-seqs, 2]\n"
    found, lane = load(tmp_path, text, engine="vllm-0.32.0-cpu")
    assert lane["entry"] == ["vllm", "serve", "/model"]
    assert render.unit(lane)["exec_start"].startswith(f"@{lane['engine']['venv']}/bin/vllm ")
    assert platform_format.from_lane(found, lane) == catalog.parse_yaml(text, "x", as_written=True)
    _, lane = load(tmp_path, text, engine="vllm-0.32.0-cpu", checkpoint="/other")
    assert lane["entry"] == ["vllm", "serve", "/other"]


@pytest.mark.parametrize(
    ("text", "reason", "parts"),
    [
        ("command: vllm serve /m\n", "bad_schema", ["command", "a list"]),
        ("command: []\n", "bad_schema", ["command"]),
        ("concurrency: 1\n", "bad_schema", ["'command'"]),
        ("comand: [a]\ncommand: [vllm, serve, /m]\n", "unknown_key", ["Did you mean command?"]),
        ("command: [vllm, serve, /m]\ncommand: [x]\n", "bad_yaml", ["twice"]),
        ("command: [vllm, serve, /m, {a: b}]\n", "bad_schema", ["command[3]"]),
        ("command: [vllm, serve, /m]\nenv: {A: 1}\n", "bad_schema", ["env", "a list"]),
        ("command: [vllm, serve, /m]\nenv: [{name: A}]\n", "bad_schema", ["env[0]", "'value'"]),
        ("command: [vllm, serve, /m]\nenv: [{name: A, value: 1}, {name: A, value: 2}]\n", "bad_schema", ["once"]),
        ("command: [vllm, serve, /m]\nenv: [{name: A B, value: 1}]\n", "bad_schema", ["env[0].name"]),
        ("command: [vllm, serve, /m]\nconcurrency: two\n", "bad_schema", ["concurrency", "'two'"]),
        ("command: [vllm, serve, /m, -tp, four]\n", "bad_schema", ["'four'"]),
        ("command: [python3, -m, x]\n", "bad_schema", ["--model"]),
        ("- a\n", "bad_schema", ["a mapping"]),
        ("a: [\n", "bad_yaml", []),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: str, reason: str, parts: list) -> None:
    with pytest.raises(UsageError) as refused:
        load(tmp_path, text)
    assert refused.value.reason == reason
    assert "computility-run.yaml" in refused.value.message
    for part in parts:
        assert part in refused.value.one_line()


def test_profile_and_source_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        load(tmp_path, FILE, profile="tiny-cpu")
    assert "not both" in refused.value.message


WORD = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(WORD, max_size=8), st.dictionaries(st.from_regex("[A-Z][A-Z0-9_]{0,5}", fullmatch=True), WORD, max_size=4)
)
def test_any_words_and_values_come_back(words: list, env: dict) -> None:
    document = {
        "command": ["vllm", "serve", "/model", "--first", *words],
        "env": [{"name": name, "value": value} for name, value in env.items()],
    }
    text = catalog.dump_platform(document)
    read = catalog.parse_yaml(text, "x", as_written=True)
    assert read == document
    try:
        found = platform_format.to_profile(read, "x.yaml", CATALOG.engines["vllm-0.32.0-cpu"])
    except UsageError as error:
        assert "-tensor-parallel-size" in error.message or "-pipeline-parallel-size" in error.message
        return
    lane = {"readiness": {"concurrent": 1}}
    assert platform_format.from_lane(found, lane) == document
