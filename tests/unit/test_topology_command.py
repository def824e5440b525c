"""The command ``vllm-fleet topology``: what it prints, writes and exits with."""

import io
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from topology_boxes import box, shape
from vllm_fleet.cli import main
from vllm_fleet.runtime_env import parse
from vllm_fleet.topology import picture

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path, capsys):
    def call(facts, policy, *more):
        paths = []
        for name, content in (("facts", facts), ("policy", policy)):
            path = tmp_path / name
            path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
            paths += [f"--{name}", str(path)]
        status = main(["topology", *paths, *more])
        output = capsys.readouterr()
        return status, output.out, output.err

    return call


def test_one_object_on_stdout(run):
    status, out, err = run(box(2), shape(2))
    assert (status, err, out.count("\n")) == (0, "", 1)
    decision = json.loads(out)
    assert set(decision) == {
        *("schema", "status", "reason", "message", "order", "lane", "score", "input_score"),
        *("candidates", "env", "engine_args", "binding", "warnings"),
    }
    assert (decision["schema"], decision["status"]) == (1, "selected")
    assert run(box(2), shape(2), "--json")[1] == out


@pytest.mark.parametrize(("policy", "status"), [(shape(2), 0), (shape(2, mode="fixed"), 0), (shape(4), 3)])
def test_exit_status(run, policy, status):
    assert run(box(2), policy)[0] == status


@pytest.mark.parametrize(
    ("facts", "policy"),
    [
        (b"{", {}),
        (b"\xff", {}),
        (b"", {}),
        (b"[" * 100000, {}),
        (b'{"schema": NaN}', {}),
        (b'{"schema": 1' + b"0" * 5000 + b"}", {}),
        ([], {}),
        (box(1), b"{"),
        (box(1), {"mode": "x"}),
        (box(1), {"tensor_paralel": 1}),
        (box(1, gpus={0: {"uuid": "GPU-;reboot"}}), {}),
    ],
)
def test_bad_input_is_one_line_on_stderr(run, facts, policy):
    status, out, err = run(facts, policy, "--table")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("vllm-fleet topology: ")


def test_missing_file(capsys):
    assert main(["topology", "--facts", "/nonexistent/facts.json"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "cannot read the facts file /nonexistent/facts.json" in output.err


def test_stdin(tmp_path, monkeypatch, capsys):
    policy = tmp_path / "policy"
    policy.write_text("{}")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(box(1)).encode())))
    assert main(["topology", "--facts", "-", "--policy", str(policy)]) == 0
    assert json.loads(capsys.readouterr().out)["order"] == [0]
    assert main(["topology", "--facts", "-", "--policy", "-"]) == 2
    assert "only one of" in capsys.readouterr().err


def test_policy_defaults_to_one_card(tmp_path, capsys):
    facts = tmp_path / "facts"
    facts.write_text(json.dumps(box(1)))
    assert main(["topology", "--facts", str(facts)]) == 0
    assert json.loads(capsys.readouterr().out)["order"] == [0]


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "601"])
def test_bad_timeout(timeout, capsys):
    assert main(["topology", "--timeout", timeout]) == 2
    assert capsys.readouterr().out == ""


def test_env_out(run, tmp_path):
    path = tmp_path / "runtime.env"
    assert run(box(2), shape(2, gpus=["1", "0"]), "--env-out", str(path))[0] == 0
    assert parse(path.read_text())["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_a_refusal_leaves_the_environment_untouched(run, tmp_path):
    path = tmp_path / "runtime.env"
    path.write_text("NCCL_PROTO=LL\n")
    assert run(box(1), shape(2), "--env-out", str(path))[0] == 3
    assert path.read_text() == "NCCL_PROTO=LL\n"


def test_unwritable_output_prints_no_decision(run):
    status, out, err = run(box(1), {}, "--env-out", "/nonexistent/runtime.env")
    assert (status, out) == (2, "")
    assert "cannot write /nonexistent/runtime.env" in err


def test_table(run):
    facts = box(4, links={(0, 2): "NV4", (1, 3): "PHB ok", (0, 1): "? ?"}, verdict={"1-3": "fail"})
    facts["gpus"][0]["pcie"].update(width_current=8)
    status, out, _ = run(facts, shape(2, gpus=["0", "2"]), "--table")
    assert status == 0
    lines = out.splitlines()
    assert lines[1].split()[:2] == ["0", "0000:01:00.0"]
    assert "x8/x16" in lines[1]
    assert lines[1].endswith("pp0 tp0")
    assert lines[3].endswith("pp0 tp1")
    assert lines[2].endswith("-")
    assert lines[7].split() == ["0", "X", "?", "NV4?", "NODE"]
    assert lines[8].split() == ["1", "?", "X", "NODE", "PHB!"]
    assert "order: 0,2" in lines
    assert any(line.startswith("warning link_width_degraded") for line in lines)


def test_table_of_a_refusal_and_of_unreadable_cards(run):
    status, out, _ = run(box(1), shape(2), "--table")
    assert status == 3
    assert "refused (too_few_gpus)" in out
    assert "order" not in out
    status, out, _ = run({**box(0), "gpus": None}, shape(2), "--table")
    assert status == 0
    assert "order: 0,1" in out


def test_svg(run, tmp_path):
    path = tmp_path / "lane.svg"
    facts = box(4, links={(0, 2): "NV4", (1, 3): "NV4"}, gpus={0: {"display": True}})
    assert run(facts, shape(2, 2), "--svg", str(path))[0] == 0
    tree = ElementTree.parse(path)
    space = "{http://www.w3.org/2000/svg}"
    texts = ["".join(element.itertext()) for element in tree.iter(f"{space}text")]
    assert "GPU 2  pp0 tp1" in texts
    assert "order: 0,2,1,3" in texts
    assert any("display_attached" in text for text in texts)
    assert len(list(tree.iter(f"{space}line"))) == 6
    assert not any("href" in key or "src" in key for element in tree.iter() for key in element.attrib)


@pytest.mark.parametrize("count", [0, 1, 16])
def test_svg_of_any_size(count):
    facts = box(count)
    from vllm_fleet.topology import decide

    ElementTree.fromstring(picture.svg(facts, {}, decide(facts, {})))


def test_svg_escapes_text():
    facts = box(1, driver={"loaded": "<script>&\"'\x1b", "userland": "1"})
    from vllm_fleet.topology import decide

    decision = decide(facts, {})
    decision["message"] += '<script>alert("&")</script>\x1b[0m'
    text = picture.svg(facts, {}, decision)
    assert "<script>" not in text
    ElementTree.fromstring(text)


def test_a_whole_process(tmp_path):
    (tmp_path / "facts").write_text(json.dumps(box(1)))
    done = subprocess.run(
        [sys.executable, "-m", "vllm_fleet", "topology", "--facts", str(tmp_path / "facts")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "module_utils")},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["order"] == [0]
