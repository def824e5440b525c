"""The installed engine's parser is asked once, under a limit, and its answer is passed on.

The engines here are a few lines each, in the layouts that vLLM has had; the lab asks a real one.
"""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vllm_fleet import catalog, engine_check, profile

ROOT = Path(__file__).resolve().parents[2]
CATALOG = catalog.load(str(ROOT / "catalog"))

PARSER = """
import argparse
class FlexibleArgumentParser(argparse.ArgumentParser):
    pass
"""
CLI = """
def make_arg_parser(parser):
    parser.add_argument("--model")
    parser.add_argument("--served-model-name", nargs="+")
    for name in ("--host", "--tool-call-parser", "--reasoning-parser", "--quantization"):
        parser.add_argument(name)
    for name in ("--port", "--max-model-len", "--max-num-seqs", "--num-gpu-blocks-override", "--shutdown-timeout"):
        parser.add_argument(name, type=int)
    for name in ("--enforce-eager", "--disable-custom-all-reduce"):
        parser.add_argument(name, action="store_true")
    return parser
def validate_parsed_serve_args(args):
    if args.max_num_seqs == 13:
        raise ValueError("thirteen sequences are refused")
"""
SERVE = """
from {cli} import make_arg_parser, validate_parsed_serve_args
class Serve:
    def subparser_init(self, commands):
        parser = commands.add_parser("serve")
        parser.add_argument("model_tag", nargs="?")
        return make_arg_parser(parser)
    def validate(self, args):
        validate_parsed_serve_args(args)
def cmd_init():
    return [Serve()]
"""
LISTED = """
class {manager}:
    @classmethod
    def list_registered(cls):
        return ["known"]
"""
TABLE = """
class {manager}:
    {table} = {{"known": None}}
"""
#: layout -> (module of the parser, of the options, of the tool parsers, registry, has a serve command)
LAYOUTS = {
    "0.33": ("vllm.utils.argparse_utils", "vllm.entrypoints.common.cli_args", "vllm.tool_parsers", LISTED, True),
    "0.32": ("vllm.utils.argparse_utils", "vllm.entrypoints.launchers.cli_args", "vllm.tool_parsers", LISTED, True),
    "0.11": ("vllm.utils", "vllm.entrypoints.openai.cli_args", "vllm.entrypoints.openai.tool_parsers", TABLE, True),
    "0.6": ("vllm.utils", "vllm.entrypoints.openai.cli_args", "vllm.entrypoints.openai.tool_parsers", TABLE, False),
}


def write(site: Path, module: str, text: str) -> None:
    *parents, name = module.split(".")
    folder = site
    for parent in parents:
        folder = folder / parent
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "__init__.py").exists() and not (folder.parent / f"{parent}.py").exists():
            (folder / "__init__.py").write_text("")
    package = folder / name / "__init__.py"
    (package if package.exists() else folder / f"{name}.py").write_text(text)


def engine(root: Path, layout: str = "0.33", init: str = "") -> Path:
    """Make an engine and return its site-packages."""
    parser, cli, tools, registry, serve = LAYOUTS[layout]
    site = root / "site"
    write(site, "vllm.entrypoints.x", "")
    write(site, parser, PARSER)
    write(site, cli, CLI)
    write(site, tools, registry.format(manager="ToolParserManager", table="tool_parsers"))
    write(site, "vllm.reasoning", registry.format(manager="ReasoningParserManager", table="reasoning_parsers"))
    write(site, "vllm.model_executor.layers.quantization", 'QUANTIZATION_METHODS = ["awq"]\n')
    if serve:
        write(site, "vllm.entrypoints.cli.serve", SERVE.format(cli=cli))
    (site / "vllm" / "__init__.py").write_text(f'print("noise on import")\n__version__ = "{layout}.0"\n{init}')
    python = root / "engines" / "vllm-0.32.0-cpu" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    calls = root / "calls"
    python.write_text(f'#!/bin/sh\necho x >> {calls}\nexport PYTHONPATH={site}\nexec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return site


def lane(root: Path, **keys: object) -> dict:
    base = {"name": "main", "profile": "tiny-cpu", "checkpoint": "/m"}
    return profile.resolve({**base, **keys}, CATALOG, {"engines_root": str(root / "engines")})


def check(root: Path, timeout: float = 60, write_memory: bool = True, **keys: object) -> dict:
    memory = str(root / "state" / "engine-args.json")
    return engine_check.check(lane(root, **keys), timeout, None, memory, write_memory)


def calls(root: Path) -> int:
    path = root / "calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_asked(tmp_path: Path, layout: str) -> None:
    engine(tmp_path, layout)
    if layout == "0.6":  # before vllm serve had a module of its own
        path = tmp_path / "run.yaml"
        path.write_text("command: [python3, -m, vllm.entrypoints.openai.api_server, --model, /m, --max-num-seqs, 4]\n")
        found = catalog.load_platform(str(path), CATALOG, "vllm-0.32.0-cpu")
        one = profile.resolve({"name": "main"}, CATALOG, {"engines_root": str(tmp_path / "engines")}, found)
        result = engine_check.check(one, 60, None, str(tmp_path / "memory.json"))
    else:
        result = check(tmp_path)
    assert (result["status"], result["reason"]) == ("pass", "accepted"), result
    assert f"vLLM {layout}.0" in result["message"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"--no-such": 1}, "unrecognized arguments: --no-such 1"),
        ({"--max-model-len": "many"}, "argument --max-model-len: invalid int value: 'many'"),
        ({"--max-num-seqs": 13}, "ValueError: thirteen sequences are refused"),
        ({"--tool-call-parser": "nope"}, "invalid tool call parser: nope (chose from { known })"),
        ({"--reasoning-parser": "nope"}, "invalid reasoning parser: nope"),
        ({"--quantization": "nope"}, "Unknown quantization method: nope. Must be one of ['awq']"),
    ],
)
def test_a_refusal_is_the_engines_own_words(tmp_path: Path, args: dict, message: str) -> None:
    engine(tmp_path)
    result = check(tmp_path, args=args)
    assert (result["status"], result["reason"]) == ("fail", "refused")
    assert message in result["message"]
    assert "usage:" not in result["message"]


@pytest.mark.parametrize(
    ("home", "status"),
    [("vllm.entrypoints.openai.reasoning_parsers", "fail"), (None, "pass")],
    ids=["0.7 to 0.8", "a vendor's 0.6.3 that only takes the flag"],
)
def test_reasoning_parsers_are_looked_for_where_older_engines_have_them(tmp_path, home, status) -> None:
    """An engine without a register of them takes any name: nothing is known to be wrong with it."""
    site = engine(tmp_path, "0.11")
    (site / "vllm" / "reasoning.py").unlink()
    if home:
        write(site, home, TABLE.format(manager="ReasoningParserManager", table="reasoning_parsers"))
    assert check(tmp_path, args={"--reasoning-parser": "qwen3"})["status"] == status


def test_what_a_start_may_add_is_asked_too(tmp_path: Path) -> None:
    site = engine(tmp_path)
    cli = site / "vllm" / "entrypoints" / "common" / "cli_args.py"
    cli.write_text(cli.read_text().replace('"--disable-custom-all-reduce"', '"--another"'))
    assert check(tmp_path)["status"] == "pass"
    result = check(tmp_path, topology={"mode": "auto"})
    assert "--disable-custom-all-reduce" in result["message"]


def test_a_good_answer_is_remembered_and_a_refusal_is_not(tmp_path: Path) -> None:
    engine(tmp_path)
    assert [check(tmp_path)["reason"] for _ in range(3)] == ["accepted", "remembered", "remembered"]
    assert calls(tmp_path) == 1
    assert [check(tmp_path, args={"--x": 1})["reason"] for _ in range(2)] == ["refused", "refused"]
    assert calls(tmp_path) == 3
    assert check(tmp_path, max_seqs=3)["reason"] == "accepted"


def test_another_build_below_the_same_id_is_asked_again(tmp_path: Path) -> None:
    engine(tmp_path)
    script = tmp_path / "engines" / "vllm-0.32.0-cpu" / "venv" / "bin" / "vllm"
    script.write_text("1")
    assert check(tmp_path)["reason"] == "accepted"
    assert check(tmp_path)["reason"] == "remembered"
    script.write_text("another")
    assert check(tmp_path)["reason"] == "accepted"


def test_check_mode_writes_nothing(tmp_path: Path) -> None:
    engine(tmp_path)
    assert check(tmp_path, write_memory=False)["reason"] == "accepted"
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 1, "good": []}', "\0"])
def test_a_broken_memory_is_no_memory(tmp_path: Path, text: str) -> None:
    engine(tmp_path)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "engine-args.json").write_text(text)
    assert check(tmp_path)["reason"] == "accepted"
    assert check(tmp_path)["reason"] == "remembered"


def test_memory_is_bounded(tmp_path: Path) -> None:
    memory = tmp_path / "state" / "m.json"
    for number in range(engine_check.KEPT + 5):
        engine_check._remember(str(memory), str(number), lane(tmp_path))
    kept = json.loads(memory.read_text())["good"]
    assert len(kept) == engine_check.KEPT
    assert str(engine_check.KEPT + 4) in kept and "0" not in kept


def test_no_engine(tmp_path: Path) -> None:
    result = check(tmp_path)
    assert (result["status"], result["reason"]) == ("unknown", "engine_absent")
    assert "vllm-0.32.0-cpu is not installed" in result["message"]


@pytest.mark.parametrize(
    ("init", "part"),
    [
        ('raise RuntimeError("no device type")', "RuntimeError: no device type"),
        ("import no_such_library", "no_such_library"),
        ("import os\nos._exit(3)", "status 3"),
    ],
)
def test_an_engine_that_cannot_be_asked_is_unknown(tmp_path: Path, init: str, part: str) -> None:
    engine(tmp_path, init=init)
    result = check(tmp_path)
    assert (result["status"], result["reason"]) == ("unknown", "engine_broken")
    assert part in result["message"]


def test_a_parser_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    lines = [
        "import subprocess",
        "child = subprocess.Popen(['sleep', '60'])",
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))",
        "child.wait()",
    ]
    engine(tmp_path, init="\n".join(lines))
    begin = time.monotonic()
    result = check(tmp_path, timeout=3)
    assert (result["status"], result["reason"]) == ("unknown", "parser_timeout")
    assert time.monotonic() - begin < 20
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", pid_file.read_text()], capture_output=True, text=True, check=False
    ).stdout.strip()
    assert state == "" or state.startswith("Z")


def test_the_parser_sees_the_lanes_environment_and_no_gpu(tmp_path: Path) -> None:
    seen = tmp_path / "env.json"
    engine(tmp_path, init=f"import json, os\njson.dump(dict(os.environ), open({str(seen)!r}, 'w'))")
    check(tmp_path, env={"MARK": "1"})
    env = json.loads(seen.read_text())
    assert env["MARK"] == "1"
    assert (env["CUDA_VISIBLE_DEVICES"], env["VLLM_TARGET_DEVICE"]) == ("", "cpu")
    assert not set(env) & {"SSH_CONNECTION", "VIRTUAL_ENV", "ANSIBLE_CONFIG"}
    assert not Path(env["HOME"]).exists()
