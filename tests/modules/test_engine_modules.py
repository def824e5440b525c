"""``engine_source``, ``engine_build``, ``engine_bundle`` and pruning through Ansible: what they say and leave alone."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import pytest
from test_install_modules import DRY, ROOT, play, start

from tests.unit.test_engine_steps import Bench, sha

ENTRY = {
    "id": "x", "version": "1", "route": "git", "python_version": "3.11", "interpreter": "/usr/bin/python3.11",
    "digest": "d1", "root": "/opt/vllm-fleet/engines/x", "plan": ["fetch commit b", "assert tree t"],
    "install": {
        "repository": "/no/such/mirror", "base": {"commit": "b" * 40}, "tree": "c" * 40, "commit": "d" * 40,
        "patches": [], "bundle": {"file": "x.bundle", "sha256": "0" * 64, "ref": "refs/heads/x"}, "disk_gib": 1,
        "products": {"route": "tarball", "paths": ["a"], "tarball": {"file": "p.tar.gz", "sha256": "0" * 64}},
    },
}  # fmt: skip


def test_engine_source_says_what_it_would_fetch_and_what_is_wrong(tmp_path):
    sources, cache = tmp_path / "sources", tmp_path / "cache"
    sources.mkdir()
    task = {"engine_source": {"engine": ENTRY, "cache": str(cache), "sources": [str(sources)]}}
    (dry,) = play(tmp_path, {**task, **DRY})
    assert (dry["changed"], dry["reason"], dry["plan"]) == (True, "collected", ENTRY["plan"])
    assert not cache.exists(), "check mode fetches nothing"
    (sources / "x.bundle").write_bytes(b"damaged")
    missing, damaged = play(tmp_path, {"engine_source": {**task["engine_source"], "sources": []}}, task)
    assert (missing["failed"], missing["reason"]) == (True, "source_missing")
    assert (damaged["failed"], damaged["reason"]) == (True, "bundle_damaged")
    assert str(sources / "x.bundle") in damaged["msg"]
    assert (sources / "x.bundle").read_bytes() == b"damaged"
    (cache / "sources" / "x-d1.tar").touch()
    (present,) = play(tmp_path, task)
    assert (present["changed"], present["reason"]) == (False, "present")


def test_engine_build_refuses_before_it_begins(tmp_path):
    work, dest = tmp_path / "work", tmp_path / "x.tar.zst"
    work.mkdir()
    task = {"engine": ENTRY, "workdir": str(work), "dest": str(dest), "keep": str(tmp_path / "keep.tar.zst")}
    no_python = {**ENTRY, "interpreter": "/no/such/python"}
    too_big = {**ENTRY, "interpreter": "/bin/sh", "install": {**ENTRY["install"], "disk_gib": 1 << 20}}
    dry, python, disk = play(
        tmp_path,
        {"engine_build": task, **DRY},
        {"engine_build": {**task, "engine": no_python}},
        {"engine_build": {**task, "engine": too_big}},
    )
    assert (dry["changed"], dry["reason"]) == (True, "built")
    assert (python["failed"], python["reason"]) == (True, "no_python")
    assert "/no/such/python" in python["msg"]
    assert (disk["failed"], disk["reason"]) == (True, "disk_too_small")
    assert list(work.iterdir()) == []


@pytest.fixture
def bundle(tmp_path):
    """Return the task that bundles one engine of each kind, from a cache and a project of a few bytes."""
    cache, project = tmp_path / "cache", tmp_path / "project"
    for name in ("engines/a-d1.tar.zst", "engines/a-d1.tar.zst.json", "wheelhouse/b-d2.tar", "sources/b-d2.tar"):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_text(name)
    (cache / "wheelhouse/a-d1.tar").write_text("not needed, a was built")
    project.mkdir()
    (project / "site.yml").write_text("- hosts: all\n")
    (project / "secret").write_text("not tracked")
    for words in (["init", "-q"], ["add", "site.yml"]):
        subprocess.run(["git", "-C", str(project), *words], check=True)
    entries = [{"id": "a", "digest": "d1", "route": "wheel"}, {"id": "b", "digest": "d2", "route": "git"}]
    return {
        "dest": str(tmp_path / "bundle"), "cache": str(cache), "engines": entries, "project": str(project),
        "controller": False,
    }  # fmt: skip


def test_engine_bundle(tmp_path, bundle):
    dest = Path(bundle["dest"])
    (dry,) = play(tmp_path, {"engine_bundle": bundle, **DRY})
    assert dry["changed"]
    assert not dest.exists()
    real, again = play(tmp_path, {"engine_bundle": bundle}, {"engine_bundle": bundle})
    assert (real["changed"], real["reason"]) == (True, "bundled")
    assert (again["changed"], again["reason"]) == (False, "as_wanted")
    subprocess.run(["sha256sum", "-c", "--strict", "--quiet", "SHA256SUMS"], cwd=dest, check=True)
    files = sorted(str(path.relative_to(dest)) for path in dest.rglob("*") if path.is_file())
    assert files == [
        "SHA256SUMS", "engines/a-d1.tar.zst", "engines/a-d1.tar.zst.json", "program/vllm-fleet.tar.gz",
        "sources/b-d2.tar", "wheelhouse/b-d2.tar",
    ]  # fmt: skip
    assert len((dest / "SHA256SUMS").read_text().splitlines()) == 5
    (Path(bundle["project"]) / "site.yml").write_text("- hosts: none\n")
    (newer,) = play(tmp_path, {"engine_bundle": bundle})
    assert newer["added"] == ["program/vllm-fleet.tar.gz"]
    subprocess.run(["sha256sum", "-c", "--strict", "--quiet", "SHA256SUMS"], cwd=dest, check=True)
    with tarfile.open(dest / "program/vllm-fleet.tar.gz") as archive:
        assert archive.getnames() == ["vllm-fleet/site.yml"]


def test_engine_bundle_needs_every_part(tmp_path, bundle):
    (Path(bundle["cache"]) / "sources/b-d2.tar").unlink()
    (result,) = play(tmp_path, {"engine_bundle": bundle})
    assert (result["failed"], result["reason"]) == (True, "not_collected")
    assert result["msg"].count("b has neither archive nor parts") == 1
    assert not Path(bundle["dest"]).exists()


def test_engine_install_prunes_and_says_so(tmp_path):
    root = tmp_path / "engines"
    for name in ("a", "b", "c"):
        (root / name).mkdir(parents=True)
        (root / name / "manifest.json").write_text(json.dumps({"id": name, "version": "1", "digest": "d"}))
    task = {"engines": [{"id": "a", "digest": "d"}], "root": str(root), "install": False, "keep": 1}
    dry, real, again = play(
        tmp_path, {"engine_install": task, **DRY}, {"engine_install": task}, {"engine_install": task}
    )
    for result in (dry, real):
        assert (result["changed"], result["reason"], sorted(result["pruned"])) == (True, "pruned", ["b", "c"])
    assert (again["changed"], again["reason"]) == (False, "as_wanted")
    assert sorted(path.name for path in root.iterdir() if path.name != ".lock") == ["a"]


def test_two_plays_at_once_build_once_and_keep_one_archive(tmp_path, monkeypatch):
    """Through the action: a job of the builder, whose archive is on the controller whole or not at all."""
    bench = Bench(tmp_path / "bench", "wheel")
    monkeypatch.setenv("ANSIBLE_ACTION_PLUGINS", str(ROOT / "action_plugins"))
    monkeypatch.setenv("ANSIBLE_ASYNC_DIR", str(tmp_path / "jobs"))
    keep = tmp_path / "kept" / "tiny.tar.zst"
    task = {
        "engine": bench.entry,
        "workdir": str(bench.work),
        "dest": str(bench.dest),
        "keep": str(keep),
        "timeout_s": 120,
    }
    processes = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        processes.append(start(tmp_path / name, {"engine_build": task}))
    for process in processes:
        output = process.communicate()[0]
        assert process.returncode == 0, output
    results = [json.loads((tmp_path / name / "results.json").read_text())[0] for name in ("one", "two")]
    assert sorted(result["reason"] for result in results) == ["built", "present"], results
    assert results[0]["manifest"] == results[1]["manifest"]
    assert "ansible_job_id" not in results[0]
    assert json.loads(Path(f"{keep}.json").read_text())["sha256"] == sha(keep) == results[0]["archive"]["sha256"]
    assert sorted(path.name for path in keep.parent.iterdir()) == [
        f"tiny.tar.zst{end}" for end in ("", ".json", ".lock")
    ]
