"""``engine_source``, ``engine_build``, ``engine_bundle`` and pruning through Ansible: what they say and leave alone."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleError
from test_install_modules import DRY, ROOT, play, start
from vllm_fleet import engine_signature
from vllm_fleet.errors import FleetError

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
    (Path(bundle["cache"]) / "engines/a-d1.tar.zst.json.sig").write_text("signature")
    (signed,) = play(tmp_path, {"engine_bundle": bundle})
    assert signed["added"] == ["engines/a-d1.tar.zst.json.sig"]
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
        "signing_key": str(signer(tmp_path)),
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
        f"tiny.tar.zst{end}" for end in ("", ".json", ".json.sig", ".lock")
    ]
    engine_signature.check_archive(str(keep), bench.entry, str(tmp_path / "allowed_signers"))


def signer(tmp_path):
    """Make a key, and the file that allows it; return the key."""
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    (tmp_path / "allowed_signers").write_text("fleet " + Path(f"{key}.pub").read_text())
    return key


def test_a_key_that_cannot_sign_costs_no_build(tmp_path, monkeypatch):
    monkeypatch.setenv("ANSIBLE_ACTION_PLUGINS", str(ROOT / "action_plugins"))
    keep = tmp_path / "kept" / "x.tar.zst"
    task = {"engine": ENTRY, "workdir": str(tmp_path / "work"), "dest": str(tmp_path / "x"), "keep": str(keep)}
    (result,) = play(tmp_path, {"engine_build": {**task, "signing_key": str(tmp_path / "none")}})
    assert (result["failed"], result["reason"]) == (True, "signing_failed"), result
    assert str(tmp_path / "none") in result["msg"]
    assert not (tmp_path / "work").exists()


class Builder:
    """A connection to a builder; ``fetch_file`` does what ``sftp`` does with these options, and is cut when told to."""

    def __init__(self, transport):
        self.transport, self.options, self.cut, self.sent = transport, {"sftp_extra_args": "-p"}, None, []

    def get_option(self, name):
        return self.options[name]

    def set_option(self, name, value):
        self.options[name] = value

    def fetch_file(self, source, target):
        resumes = "-a" in self.options["sftp_extra_args"].split() and Path(target).exists()
        rest = Path(source).read_bytes()[Path(target).stat().st_size if resumes else 0 :][: self.cut]
        self.sent.append(rest)
        with open(target, "ab" if resumes else "wb") as out:
            out.write(rest)
        if self.cut:
            self.cut = None
            raise AnsibleError("connection reset")


@pytest.fixture
def keep(tmp_path):
    """Return a function that keeps a builder's archive ``made``, signed with a key, as ``kept/x``."""
    spec = importlib.util.spec_from_file_location("engine_build", ROOT / "action_plugins" / "engine_build.py")
    action = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(action)
    (tmp_path / "kept").mkdir()
    made = tmp_path / "made"
    made.write_bytes(b"archive")

    def run(key, builder=None):
        about = {"path": str(made), "sha256": sha(made), "bytes": made.stat().st_size}
        done = {"archive": about, "manifest": {"id": "x", "digest": "d1"}}
        task = SimpleNamespace(args={"signing_key": str(key)})
        plugin = action.ActionModule(task, builder or Builder("local"), None, None, None)
        plugin._keep(done, tmp_path / "kept" / "x")

    return run


def test_an_archive_is_kept_with_its_own_signature_or_none(tmp_path, keep):
    """What counts as kept is one with a description, so that comes last, and never before the signature."""
    kept, entry = tmp_path / "kept", {"id": "x", "digest": "d1"}
    key = signer(tmp_path)
    with pytest.raises(FleetError, match="none"):
        keep(tmp_path / "none")
    assert not (kept / "x.json").exists()
    keep(key)
    engine_signature.check_archive(str(kept / "x"), entry, str(tmp_path / "allowed_signers"))
    (tmp_path / "made").write_bytes(b"another")
    keep("")
    assert sorted(path.name for path in kept.iterdir()) == ["x", "x.json"], "the signature of another archive is gone"


def test_an_interrupted_fetch_goes_on_with_the_same_bytes_only(tmp_path, keep):
    kept, builder = tmp_path / "kept", Builder("ssh")
    builder.cut = 3
    with pytest.raises(FleetError, match="connection reset"):
        keep("", builder)
    assert [path.read_bytes() for path in kept.iterdir()] == [b"arc"]
    (tmp_path / "made").write_bytes(b"rebuilt")
    builder.cut = 2
    with pytest.raises(FleetError, match="connection reset"):
        keep("", builder)
    keep("", builder)
    assert builder.sent == [b"arc", b"re", b"built"], "a part of other bytes is not continued"
    assert (kept / "x").read_bytes() == b"rebuilt"
    assert sorted(path.name for path in kept.iterdir()) == ["x", "x.json"]
    assert "-p" in builder.options["sftp_extra_args"], "the site's own options stay"
