"""Public bug reports that the preflight must get right: a file each in ``preflight/``, and those that need a disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

import pytest
from vllm_fleet import checks, versions
from vllm_fleet.facts import engine_dir, toolchain
from vllm_fleet.preflight import run

from tests.unit import preflight_fixtures as given

CASES = sorted((Path(__file__).parent / "preflight").glob("*.json"))


def results_of(step: Dict[str, Any]) -> List[Dict[str, str]]:
    lane, box = given.lane(), given.box()
    for path, value in step["lane"].items():
        given.put(lane, path, value)
    for path, value in step["box"].items():
        given.put(box, path, value)
    for name, value in step["arguments"].items():
        given.set_argument(lane, name, value)
    return [verdict.result for verdict in run.evaluate(lane, box)]


def test_the_cases_are_there() -> None:
    assert len(CASES) == 12


@pytest.mark.parametrize("path", CASES, ids=[path.stem for path in CASES])
def test_case(path: Path) -> None:
    case = json.loads(path.read_text(encoding="utf-8"))
    for step in case["steps"]:
        results = results_of(step)
        for name, expected in step["expect"].items():
            found = [[item["status"], item["reason"]] for item in given.of(results, name)]
            assert found == [expected], f"{path.stem}: {step['what']}"
        if not any(item["status"] == "fail" for item in results):
            continue
        failing = {item["check"] for item in results if item["status"] == "fail"}
        meant = {name for name, expected in step["expect"].items() if expected[0] == "fail"}
        assert failing == meant, f"{path.stem}: {step['what']}: nothing else fails"


def test_040_the_header_of_driver_610_names_both_versions_anew() -> None:
    old = "| NVIDIA-SMI 552.22      Driver Version: 552.22      CUDA Version: 12.6     |"
    new = "| NVIDIA-SMI 610.43.02   KMD Version: 610.43.02     CUDA UMD Version: 13.3 |"
    header = versions.parse_smi_header(new)
    assert (header.driver, header.cuda) == ("610.43.02", (13, 3))
    header = versions.parse_smi_header(old)
    assert (header.driver, header.cuda) == ("552.22", (12, 6))


def test_048_toolkit_wheels_have_no_lib64_and_no_unversioned_library(tmp_path: Path) -> None:
    """The wheels bring lib/libcudart.so.13 alone; the check wants the very name that the linker is given."""
    library = tmp_path / given.CUDA.lstrip("/") / "lib"
    library.mkdir(parents=True)
    (library / "libcudart.so.13").touch()

    def outcome() -> str:
        box = given.box()
        tools = toolchain.read(given.lane(), None, str(tmp_path), execute=False)
        box["toolchain"]["cudart"] = tools["cudart"]
        return given.of([item.result for item in run.evaluate(given.lane(), box)], "cudart_link")[0]["reason"]

    assert outcome() == "cudart_missing"
    (library.parent / "lib64").symlink_to("lib")
    assert outcome() == "cudart_missing"
    (library / "libcudart.so").symlink_to("libcudart.so.13")
    assert outcome() == "cudart_ok"
    (library / "libcudart.so.13").rename(library / "libcudart.so.14")
    assert outcome() == "cudart_dangling"


def test_051_the_unit_s_environment_counts_and_not_the_shell_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand it worked: the login shell had CUDA on its PATH. The unit has neither."""
    toolkit = tmp_path / "opt/cuda/bin"
    toolkit.mkdir(parents=True)
    (toolkit / "nvcc").write_text("#!/bin/sh\n")
    (toolkit / "nvcc").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    monkeypatch.setenv("PATH", str(toolkit))
    lane, box = given.lane(), given.box()
    lane["env"] = {}
    box["toolchain"].update(toolchain.read(lane, None, str(tmp_path), execute=False))
    found = {item.result["check"]: item.result["reason"] for item in run.evaluate(lane, box)}
    assert (found["cuda_home"], found["nvcc"]) == ("cuda_home_missing", "nvcc_missing")
    lane["env"] = {"CUDA_HOME": "/opt/cuda"}
    box["toolchain"].update(toolchain.read(lane, None, str(tmp_path), execute=False))
    found = {item.result["check"]: item.result["reason"] for item in run.evaluate(lane, box)}
    assert found["cuda_home"] == "cuda_home_ok" and found["nvcc"] == "nvcc_unreadable"


def test_056_a_source_tree_in_the_working_directory_shadows_the_engine(tmp_path: Path) -> None:
    lane = given.lane()
    for package in (tmp_path / lane["engine"]["tree"].lstrip("/"), tmp_path / lane["workdir"].lstrip("/")):
        (package / "vllm").mkdir(parents=True)
    (tmp_path / lane["engine"]["tree"].lstrip("/") / "vllm/__init__.py").touch()
    env = {"PYTHONPATH": lane["engine"]["tree"]}

    def outcome() -> Dict[str, str]:
        box = given.box()
        found = engine_dir.import_origin(
            "vllm", lane["engine"], workdir=lane["workdir"], env=env, home=None, root=str(tmp_path)
        )
        box["import_origin"] = dict(found, origin_real=found["origin"])
        return given.of([item.result for item in run.evaluate(lane, box)], "import_origin")[0]

    assert outcome()["reason"] == "origin_ok", "a directory without __init__.py is not taken"
    (tmp_path / lane["workdir"].lstrip("/") / "vllm/__init__.py").touch()
    found = outcome()
    assert (found["status"], found["reason"]) == ("fail", "import_shadowed")
    assert lane["workdir"] + "/vllm" in found["message"] and "working directory" in found["message"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"text_config": {"num_attention_heads": 16, "ple_embedding_dtype": "float8_e4m3fn"}}, ["pass", "pass"]),
        ({"num_attention_heads": 16, "ple_embedding_dtype": "float8_e4m3fn"}, ["fail", "pass"]),
        ({"text_config": {"num_attention_heads": 15, "ple_embedding_dtype": "float8_e4m3fn"}}, ["pass", "fail"]),
    ],
)
def test_063_keys_nested_in_text_config(tmp_path: Path, config: Dict[str, Any], expected: List[str]) -> None:
    """A multimodal checkpoint is valid with nothing at the top level; the wanted key counts in its own place only."""
    lane = given.cpu_lane()
    patch = {"file": "config.json", "key": "text_config.ple_embedding_dtype", "value": "float8_e4m3fn"}
    lane["checkpoint"]["patch"] = [patch]
    directory = tmp_path / lane["checkpoint"]["path"].lstrip("/")
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(b"\0" * 4096)
    results = run.run_lane("main", lane_data=lane, root=str(tmp_path))
    found = [given.of(results, name)[0]["status"] for name in ("checkpoint_config", "checkpoint_heads")]
    assert found == expected


def test_every_result_of_a_case_is_well_formed() -> None:
    for path in CASES:
        for step in json.loads(path.read_text(encoding="utf-8"))["steps"]:
            for item in results_of(step):
                assert set(item) == {"check", "status", "reason", "message", "fix"}
                assert item["status"] in checks.STATUSES
