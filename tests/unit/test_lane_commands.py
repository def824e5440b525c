"""``render``, ``lint-args`` and ``import-env`` as a person calls them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml
from vllm_fleet import cli

ROOT = Path(__file__).resolve().parents[2]
RTX = "qwen38-flash-next-w4a16-4x3090"


def run(capsys: pytest.CaptureFixture, *words: str) -> tuple:
    status = cli.main(list(words))
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return status, said.out, said.err


def test_render_json(capsys: pytest.CaptureFixture) -> None:
    status, out, err = run(capsys, "render", "--profile", RTX, "--set", "max_seqs=8", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert set(found) == {"argv", "env", "unset", "runtime_env"}
    assert found["env"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert found["env"]["PATH"].startswith(found["env"]["CUDA_HOME"] + "/bin:")
    assert found["argv"][found["argv"].index("--max-num-seqs") + 1] == "8"


def test_render_of_a_lane_file_and_of_what_it_resolves_to(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    lane = tmp_path / "lane.yml"
    lane.write_text("{name: b, profile: tiny-cpu, checkpoint: /m, port: 8001, topology: {tensor_parallel: 2}}\n")
    _, out, _ = run(capsys, "render", "--lane", str(lane), "--json")
    from vllm_fleet.commands.render import CHECKOUT_CATALOG, load

    resolved = tmp_path / "lane.json"
    resolved.write_text(json.dumps(load(None, str(lane), [], str(CHECKOUT_CATALOG))[1]))
    assert run(capsys, "render", "--lane", str(resolved), "--json")[1] == out
    assert "NCCL_PROTO" in json.loads(out)["runtime_env"]
    status, _, err = run(capsys, "render", "--lane", str(resolved), "--set", "port=1")
    assert status == 2 and "lane_is_resolved" in err


def test_render_as_a_shell_would_start_it(capsys: pytest.CaptureFixture) -> None:
    _, out, _ = run(capsys, "render", "--profile", RTX)
    last = out.splitlines()[-1]
    _, as_json, _ = run(capsys, "render", "--profile", RTX, "--json")
    assert shlex.split(last)[1:] == json.loads(as_json)["argv"]
    assert "# note: 4 requests" in out


def test_render_in_the_platforms_format(capsys: pytest.CaptureFixture) -> None:
    _, out, _ = run(capsys, "render", "--profile", "qwen36-35b-a3b-4xbiv100", "--platform")
    document = yaml.safe_load(out)
    assert document["command"][:3] == ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    assert {"name": "VLLM_ENGINE_ITERATION_TIMEOUT_S", "value": "3600"} in document["env"]
    assert all(isinstance(word, str) for word in document["command"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--profile", "tiny-cp"], "unknown_key"),
        (["--profile", "tiny-cpu", "--set", "max_seqs=08"], "bad_schema"),
        (["--profile", "tiny-cpu", "--set", "port=010"], "bad_yaml"),
        (["--profile", "tiny-cpu", "--set", "port"], "bad_setting"),
        (["--profile", "tiny-cpu", "--set", "name.x=1"], "bad_setting"),
        (["--profile", "tiny-cpu", "--set", "host=0.0.0.0"], "open_bind"),
        (["--lane", "/no/such/lane.yml"], "unreadable_file"),
        (["--lane", "nosuchlane"], "unreadable_file"),
        ([], "profile_needed"),
        (["--profile", "tiny-cpu", "--catalog", "/no/such"], "unreadable_file"),
    ],
)
def test_render_refuses_in_one_line(capsys: pytest.CaptureFixture, words: list, reason: str) -> None:
    status, out, err = run(capsys, "render", *words)
    assert (status, out) == (2, "")
    assert f"vllm-fleet render: {reason}: " in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "vllm serve /m --max-num-seqs 2 \\\n  --offload-towers  # a comment\n"),
        ("a.json", '["--offload-towers"]'),
        ("b.json", '{"entry": ["vllm", "serve", "/m"], "args": [["--offload-towers"]], "env": {}}'),
        ("a.yaml", "command: [vllm, serve, /m, --offload-towers]\n"),
    ],
)
def test_lint_reads_every_format(capsys: pytest.CaptureFixture, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    status, out, _ = run(capsys, "lint-args", "--engine-version", "0.33.0", "--json", str(tmp_path / name))
    assert status == 1
    assert [(item["code"], item["flag"]) for item in json.loads(out)["findings"]] == [("unknown", "--offload-towers")]


def test_lint_passes_with_warnings_only(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("--kv-cache-memory 1")
    status, out, _ = run(capsys, "lint-args", "--engine-version", "0.33.0", str(tmp_path / "a"))
    assert status == 0 and "warn  abbreviation" in out and "0 fail, 1 warn" in out


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.txt", "--x 'open", "bad_arguments"),
        ("a.yml", "other: 1\n", "bad_schema"),
        ("a.yml", "command: [\n", "bad_yaml"),
        ("a.json", "3", "bad_arguments"),
        ("a.json", "{", "bad_json"),
    ],
)
def test_lint_refuses_in_one_line(
    capsys: pytest.CaptureFixture, tmp_path: Path, name: str, text: str, reason: str
) -> None:
    (tmp_path / name).write_text(text)
    status, out, err = run(capsys, "lint-args", "--engine-version", "0.33.0", str(tmp_path / name))
    assert (status, out) == (2, "") and f"lint-args: {reason}: " in err


def test_a_proposed_profile_is_one_of_the_catalog(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    source = ROOT / "catalog" / "profiles" / f"{RTX}.yml"
    status, out, _ = run(capsys, "lint-args", "--engine-version", "0.33.0", "--migrate", str(source))
    assert status == 0
    proposal = tmp_path / "proposal.yml"
    proposal.write_text(out)
    assert yaml.safe_load(out)["engine"] == "vllm-0.33.0-cuda"
    status, again, _ = run(capsys, "lint-args", "--engine-version", "0.33.0", str(proposal))
    assert status == 0 and "0 fail, 0 warn" in again


def test_a_proposed_platform_file_is_one(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "concurrency: 1\ncommand: [vllm, serve, /m, --num-scheduler-steps, 16, --max-num-seqs, '8']\n"
        "env: [{name: VLLM_ENGINE_ITERATION_TIMEOUT_S, value: 3600}, {name: A, value: 010}]\n"
    )
    status, out, _ = run(capsys, "lint-args", "--engine-version", "0.33.0", "--migrate", str(file))
    document = yaml.load(out, Loader=yaml.BaseLoader)
    assert status == 0
    assert document["command"] == ["vllm", "serve", "/m", "--max-num-seqs", "8"]
    assert document["env"] == [{"name": "A", "value": "010"}]


def test_import_env(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("PORT=8010\nMAX_SEQS=2\nGUARD=off\nMERLIN_X=1\n")
    status, out, _ = run(capsys, "import-env", str(file))
    assert status == 0 and "# MERLIN_X is not taken over" in out
    lanes = yaml.safe_load(out)["vllm_lanes"]
    assert lanes == [{"name": "main", "profile": RTX, "port": 8010, "max_seqs": "2", "guard": "off"}]
    _, as_json, _ = run(capsys, "import-env", "--json", str(file))
    assert json.loads(as_json)["vllm_lanes"] == lanes
    file.write_text("MAX_SEQS=08\n")
    status, out, err = run(capsys, "import-env", str(file))
    assert (status, out) == (2, "") and "leading zeros" in err
