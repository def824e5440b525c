"""An existing .env becomes a lane; what changes with it is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_fleet import catalog, import_env
from vllm_fleet.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
PROFILE = catalog.load(str(ROOT / "catalog")).profile("qwen38-flash-next-w4a16-4x3090")


def lane(text: str) -> tuple:
    found, notes = import_env.to_lane(import_env.parse(text, "x.env"), PROFILE, "main")
    del found["name"], found["profile"]
    return found, " ".join(notes)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=b", "b"),
        ("export A=b", "b"),
        ("  A=b  # comment", "b"),
        ("A=b#c", "b#c"),
        ("A='b # c'", "b # c"),
        ('A="b \\"c\\" \\n"', 'b "c" \\n'),
        ("A='it'\"'\"'s'", "it's"),
        ("A=a\\ b", "a b"),
        ("A='$x `y`'", "$x `y`"),
        ("A=", ""),
        ("A=1\nA=2", "2"),
        ("A=x=y", "x=y"),
    ],
)
def test_values_as_a_shell_reads_them(text: str, value: str) -> None:
    assert import_env.parse(text, "x.env") == {"A": value}


@pytest.mark.parametrize("text", ["A", "1A=b", "A B=c", "A=$HOME", "A=`x`", 'A="b', "A=b c", "A='", "=b"])
def test_what_cannot_be_read_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        import_env.parse("# one\n" + text, "x.env")
    assert refused.value.reason == "bad_env_file"
    assert "x.env, line 2" in refused.value.message


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("PORT=8010\nMODEL_NAME='a b'", {"port": 8010, "served_names": ["a", "b"]}),
        ("CKPT=/m\nMODEL_MOUNT_PATH=/n", {"checkpoint": "/m"}),
        ("MODEL_MOUNT_PATH=/n", {"checkpoint": "/n"}),
        ("LOG=", {"log": ""}),
        (
            "LOG=/x.log\nCACHE_ROOT=/c\nCUDA_HOME=/usr/local/cuda",
            {"log": "/x.log", "cache_root": "/c", "cuda_home": "/usr/local/cuda"},
        ),
        (
            "AUTO_TOPO=strict\nAUTO_TOPO_BIND=1\nLANE_CPUS=0-7",
            {"topology": {"mode": "strict", "bind": True, "cpus": "0-7"}},
        ),
        ("AUTO_TOPO=0\nAUTO_TOPO_BIND=1\nTOPO_TIMEOUT=5", {}),
        (
            "AUTO_TOPO=1\nAUTO_TOPO_NCCL=default\nLANE_GPUS=auto\nTOPO_TIMEOUT=60",
            {"topology": {"mode": "auto", "nccl_proto": "default", "lane_gpus": "auto"}, "topology_timeout_s": 60},
        ),
        ("CUDA_VISIBLE_DEVICES=3,2", {"gpus": ["3", "2"]}),
        ("FOO=1\nHF_HUB_OFFLINE=0\nMERLIN_X=1", {"env": {"FOO": "1"}}),
        ("NCCL_PROTO=x", {}),
        ("AUTO_TOPO=1\nNCCL_PROTO=x", {"topology": {"mode": "auto"}, "env": {"NCCL_PROTO": "x"}}),
    ],
)
def test_names_become_keys(text: str, keys: dict) -> None:
    assert lane(text)[0] == keys


def test_what_changes_is_said() -> None:
    found, notes = lane("VLLM_API_KEY=hunter2\nHOST=0.0.0.0")
    assert found == {"host": "0.0.0.0", "api_key_file": "/etc/vllm-fleet/secrets/main.key"}
    assert "hunter2" not in notes and "api_key_file" in notes
    found, notes = lane("HOST=0.0.0.0")
    assert found["allow_open_bind"] is True and "everybody" in notes
    assert "is not 0, 1 or strict" in lane("AUTO_TOPO=yes")[1]
    assert "takes 20" in lane("AUTO_TOPO=1\nTOPO_TIMEOUT=0.5")[1]
    assert "TREE is not taken over" in lane("TREE=/x")[1]


def test_a_misspelt_name_is_refused() -> None:
    with pytest.raises(UsageError) as refused:
        lane("MAX_SEQ=8")
    assert "Did you mean MAX_SEQS?" in refused.value.one_line()
