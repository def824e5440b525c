"""The role lets a whole checkpoint pass and stops at one that no engine could load, before anything else happens."""

from __future__ import annotations

import json

import pytest

from tests.testinfra_helpers import converge

MODEL = "/srv/models/tiny"


@pytest.fixture
def sharded(host):
    """Give the path of a copy whose weights are two shards with an index; removed afterwards."""
    path = "/srv/models/sharded"
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    host.check_output(
        f"rm -rf {path} && cp -r {MODEL} {path} && cd {path} && cp model.safetensors model-00001-of-00002.safetensors"
        f" && mv model.safetensors model-00002-of-00002.safetensors"
        f" && printf '%s' '{json.dumps(index)}' > model.safetensors.index.json"
    )
    yield path
    host.check_output(f"rm -rf {path}")


def play(path):
    """Run the role over the lane with another checkpoint; return (exit status, output on one line)."""
    lane = {"name": "main", "profile": "tiny-cpu", "port": 8000, "host": "127.0.0.1", "checkpoint": path}
    played = converge(vllm_lanes=[lane])
    return played.returncode, " ".join(played.stdout.split())


def test_the_whole_checkpoint_passes(host):
    found = host.run(f"/opt/vllm-fleet/bin/vllm-fleet checkpoint --json --user vllm {MODEL}")
    assert found.rc == 0, found.stdout + found.stderr
    statuses = {item["check"]: item["status"] for item in json.loads(found.stdout)["results"]}
    assert statuses["checkpoint_shards"] == "pass"
    assert statuses["checkpoint_readable"] == "pass"
    assert "fail" not in statuses.values()


def test_the_role_leaves_the_checkpoint_as_it_is(host):
    """A profile without patches edits nothing: no file of the checkpoint is younger than its copy into place."""
    assert host.check_output(f"find {MODEL} -name '*.vllm-fleet-orig' -o -name '.*' -type f") == ""


def test_shards_with_an_index_pass(sharded):
    status, output = play(sharded)
    assert status == 0, output


def test_a_missing_shard_is_named(host, sharded):
    host.check_output(f"rm {sharded}/model-00002-of-00002.safetensors")
    status, output = play(sharded)
    assert status != 0
    assert "shards_missing: " in output
    assert "model-00002-of-00002.safetensors" in output
    assert "model-00001-of-00002.safetensors" not in output.split("shards_missing")[1].split("results:")[0]


def test_a_directory_that_the_user_cannot_enter_comes_with_the_fix(host, sharded):
    host.check_output(f"chmod 0700 {sharded}")
    status, output = play(sharded)
    assert status != 0
    assert "not_readable_by_user: " in output
    assert "Fix: " in output.split("not_readable_by_user")[1]
    assert "vllm" in output.split("not_readable_by_user")[1].split("Fix: ")[0]


def test_a_checkpoint_that_is_not_there_is_named():
    status, output = play("/srv/models/absent")
    assert status != 0
    assert "/srv/models/absent" in output
    assert "Fix: " in output


def test_a_full_file_system_is_said_before_a_start(host):
    played = converge(checkpoint_min_free_bytes=1 << 60)
    assert played.returncode != 0
    assert "free_space_low: " in played.stdout
