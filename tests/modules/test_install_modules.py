"""``box_layout``, ``fleet_program`` and ``engine_install`` through Ansible, in real, check and diff mode."""

from __future__ import annotations

import contextlib
import grp
import hashlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
ME = pwd.getpwuid(os.geteuid()).pw_name
MY_GROUP = grp.getgrgid(os.getegid()).gr_name
DRY = {"check_mode": True, "diff": True}
#: unpacks for a machine without zstd; the archives of this file are then gzip
ZSTD = "#!/bin/sh\nexec gzip -dc\n"


def environment(tmp_path):
    """Return the environment of a play that knows the project's modules and nothing of the user's configuration."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    if not shutil.which("zstd"):
        (tools / "zstd").write_text(ZSTD)
        (tools / "zstd").chmod(0o755)
    (tmp_path / "ansible.cfg").touch()
    return {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"),
        "ANSIBLE_LIBRARY": str(ROOT / "library"),
        "ANSIBLE_MODULE_UTILS": str(ROOT / "module_utils"),
        "ANSIBLE_LOCAL_TEMP": str(tmp_path / "local"),
        "ANSIBLE_REMOTE_TEMP": str(tmp_path / "remote"),
        "ANSIBLE_NOCOLOR": "1",
    }


def start(tmp_path, *tasks):
    """Start a play of the tasks on this machine; failed tasks don't end it."""
    plan = [dict(task, register=f"result{number}", ignore_errors=True) for number, task in enumerate(tasks)]
    content = "{{ [" + ", ".join(f"result{number}" for number in range(len(tasks))) + "] | to_json }}"
    plan.append({"ansible.builtin.copy": {"content": content, "dest": str(tmp_path / "results.json")}})
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": plan}
    play["vars"] = {"ansible_python_interpreter": sys.executable}
    (tmp_path / "play.json").write_text(json.dumps([play]))
    return subprocess.Popen(
        [str(BIN / "ansible-playbook"), "-i", "localhost,", str(tmp_path / "play.json")],
        env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def play(tmp_path, *tasks):
    """Run the tasks and return their results."""
    process = start(tmp_path, *tasks)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return json.loads((tmp_path / "results.json").read_text())


# --- box_layout -----------------------------------------------------------------------------------------------------


def test_box_layout(tmp_path):
    top, below, blocked = tmp_path / "a", tmp_path / "a" / "b", tmp_path / "file"
    blocked.touch()
    mine = {"owner": ME, "group": MY_GROUP}
    both = {"directories": [{"path": str(top), "mode": "0755", **mine}, {"path": str(below), "mode": "0700", **mine}]}
    wider = {"directories": [{"path": str(below), "mode": "0750", **mine}]}
    dry, real, again, dry_mode, mode, no_directory, no_user, no_parent = play(
        tmp_path,
        {"box_layout": both, **DRY},
        {"box_layout": both},
        {"box_layout": both},
        {"box_layout": wider, **DRY},
        {"box_layout": wider},
        {"box_layout": {"directories": [{"path": str(blocked), **mine}]}},
        {"box_layout": {"directories": [{"path": str(tmp_path / "c"), "owner": "no-such-user"}]}},
        {"box_layout": {"directories": [{"path": str(tmp_path / "d" / "e"), **mine}]}},
    )
    who = f"{ME}:{MY_GROUP}"
    for result in (dry, real):
        assert result["changed"], "check mode tells what the real run does"
        assert result["before"] == {str(top): "absent", str(below): "absent"}
        assert result["after"] == {str(top): f"0755 {who}", str(below): f"0700 {who}"}
        assert result["reason"] == "laid_out"
    assert dry["diff"] == {"before": dry["before"], "after": dry["after"]}
    assert (again["changed"], again["reason"], again["after"]) == (False, "as_wanted", {})
    for result in (dry_mode, mode):
        assert result["before"] == {str(below): f"0700 {who}"}
        assert result["after"] == {str(below): f"0750 {who}"}
    assert below.stat().st_mode & 0o7777 == 0o750
    assert (no_directory["failed"], no_directory["reason"]) == (True, "not_a_directory")
    assert str(blocked) in no_directory["msg"]
    assert (no_user["failed"], no_user["reason"]) == (True, "layout_failed")
    assert "no-such-user" in no_user["msg"]
    assert (no_parent["failed"], no_parent["reason"]) == (True, "layout_failed")


def test_box_layout_in_check_mode_writes_nothing(tmp_path):
    wanted = {"directories": [{"path": str(tmp_path / "a"), "owner": ME, "group": MY_GROUP}]}
    play(tmp_path, {"box_layout": wanted, **DRY})
    assert not (tmp_path / "a").exists()


# --- fleet_program --------------------------------------------------------------------------------------------------


def test_fleet_program(tmp_path):
    dest = tmp_path / "build" / "vllm-fleet.pyz"
    wanted = {"source": str(ROOT / "module_utils"), "dest": str(dest), "interpreter": "/usr/bin/env python3"}
    first, again = play(tmp_path, {"fleet_program": wanted, **DRY}, {"fleet_program": wanted})
    assert not first["changed"], "a build product on the controller is no change of a box"
    assert first["sha256"] == again["sha256"] == hashlib.sha256(dest.read_bytes()).hexdigest()
    assert dest.stat().st_mode & 0o777 == 0o755
    assert dest.read_bytes().startswith(b"#!/usr/bin/env python3\n")
    names = zipfile.ZipFile(dest).namelist()
    assert {"__main__.py", "pynvml.py", "vllm_fleet/cli.py"} <= set(names)
    sources = {str(path.relative_to(ROOT / "module_utils")) for path in (ROOT / "module_utils").rglob("*.py")}
    assert sources <= set(names)
    assert not [name for name in names if "__pycache__" in name]
    done = subprocess.run([str(dest), "--help"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert "start-check" in done.stdout


def test_fleet_program_repairs_a_torn_file(tmp_path):
    dest = tmp_path / "vllm-fleet.pyz"
    dest.write_bytes(b"torn")
    play(tmp_path, {"fleet_program": {"source": str(ROOT / "module_utils"), "dest": str(dest)}})
    assert zipfile.is_zipfile(dest)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tmp")] == []


# --- engine_install -------------------------------------------------------------------------------------------------


class Archive:
    """A small engine archive of ``tmp_path``, with what the role says about it."""

    def __init__(self, tmp_path, name="tiny-engine", digest="d1", interpreter=sys.executable, megabytes=0):
        self.path, self.root, self.name = tmp_path / f"{name}-{digest}.tar.zst", tmp_path / "engines", name
        self.root.mkdir(exist_ok=True)
        self.digest = digest
        stage = tmp_path / f"stage-{name}-{digest}"
        (stage / "venv" / "bin").mkdir(parents=True)
        (stage / "venv" / "bin" / "vllm").write_text("#!/bin/sh\n")
        (stage / "venv" / "big").write_bytes(os.urandom(megabytes << 20))
        manifest = {"schema": 1, "id": name, "version": "1.2.3+cpu", "digest": digest, "interpreter": interpreter}
        (stage / "manifest.json").write_text(json.dumps(manifest))
        plain = tmp_path / "plain.tar"
        with tarfile.open(plain, "w") as archive:
            archive.add(stage / "manifest.json", "manifest.json")
            archive.add(stage / "venv", "venv")
        pack = ["zstd", "-q", "-1", "-c"] if shutil.which("zstd") else ["gzip", "-1", "-c"]
        self.path.write_bytes(subprocess.run([*pack, str(plain)], capture_output=True, check=True).stdout)
        self.sha256 = hashlib.sha256(self.path.read_bytes()).hexdigest()

    def task(self, install=True, **changes):
        entry = {"id": self.name, "digest": self.digest, "archive": str(self.path), "sha256": self.sha256}
        return {"engine_install": {"root": str(self.root), "install": install, "engines": [{**entry, **changes}]}}

    def left(self):
        """Return what lies in the directory of the engines, the lock file apart."""
        return sorted(path.name for path in self.root.iterdir() if path.name != ".lock")


def test_engine_install(tmp_path):
    engine = Archive(tmp_path)
    look, dry, real, again, look_again = play(
        tmp_path,
        engine.task(install=False),
        {**engine.task(), **DRY},
        engine.task(),
        engine.task(),
        engine.task(install=False),
    )
    assert (look["changed"], look["missing"], look["reason"]) == (False, ["tiny-engine"], "missing")
    assert dry["changed"]
    assert dry["missing"] == ["tiny-engine"]
    assert (real["changed"], real["reason"]) == (True, "installed")
    assert real["before"] == {"tiny-engine": "absent"}
    assert real["after"] == {"tiny-engine": "1.2.3+cpu"}
    for result in (again, look_again):
        assert (result["changed"], result["reason"], result["missing"]) == (False, "as_wanted", [])
    assert engine.left() == ["tiny-engine"]
    assert (engine.root / "tiny-engine").stat().st_mode & 0o777 == 0o755
    assert not engine.path.exists(), "the archive goes once the engine is there"


def test_engine_install_in_check_mode_writes_nothing(tmp_path):
    engine = Archive(tmp_path)
    play(tmp_path, {**engine.task(), **DRY})
    assert engine.left() == []
    assert engine.path.exists()


def test_engine_install_refuses_what_is_not_the_archive(tmp_path):
    """Each refusal has its code, and leaves nothing behind that looks like an engine."""
    foreign, no_python = Archive(tmp_path, digest="d2"), Archive(tmp_path, digest="d3", interpreter="/no/such/python")
    full, other = Archive(tmp_path, digest="d4"), Archive(tmp_path, name="other-engine", digest="d5")
    cut, torn = Archive(tmp_path, digest="d6"), Archive(tmp_path, digest="d7")
    cut.path.write_bytes(cut.path.read_bytes()[:-20])
    torn.path.write_bytes(torn.path.read_bytes()[:-20])
    torn.sha256 = hashlib.sha256(torn.path.read_bytes()).hexdigest()
    results = play(
        tmp_path,
        cut.task(),
        torn.task(),
        foreign.task(digest="something-else"),
        other.task(id="tiny-engine"),
        no_python.task(),
        full.task(unpacked_bytes=1 << 60),
    )
    expected = ["archive_damaged", "unpack_failed", "wrong_archive", "wrong_archive", "no_python", "disk_too_small"]
    assert [result.get("reason") for result in results] == expected
    assert all(result["failed"] for result in results)
    damaged, _, _, _, python, disk = (result["msg"] for result in results)
    assert cut.sha256 in damaged
    assert "run again" in damaged
    assert "/no/such/python" in python
    assert "GiB" in disk
    assert "prune" in disk
    assert cut.left() == []
    assert not cut.path.exists(), "a damaged copy is deleted, so that the next run brings it again"
    assert full.path.exists(), "a whole archive is kept"


def test_engine_install_never_edits_an_engine(tmp_path):
    engine = Archive(tmp_path)
    play(tmp_path, engine.task())
    newer = Archive(tmp_path, digest="d9")
    (result,) = play(tmp_path, newer.task())
    assert (result["failed"], result["reason"]) == (True, "engine_differs")
    assert "give the catalog entry a new id" in result["msg"]
    assert json.loads((engine.root / "tiny-engine" / "manifest.json").read_text())["digest"] == "d1"


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "Ctrl-C"])
def test_engine_install_ended_in_the_middle_leaves_nothing_half_made(tmp_path, signal_number):
    """The engine appears by a rename or not at all, and the next run clears up and installs it."""
    engine = Archive(tmp_path, megabytes=64)
    # Unpacking stops after the first megabyte: the play is ended at a known place, not at a guessed time.
    tools = tmp_path / "tools"
    tools.mkdir()
    slow = tools / "zstd"
    slow.write_text(f"#!/bin/sh\n{shutil.which('zstd') or 'gzip'} -dc | (head -c 1000000; sleep 60)\n")
    slow.chmod(0o755)
    process = start(tmp_path, engine.task())
    deadline = time.monotonic() + 60
    while not list(engine.root.glob(".partial-*/venv/big")):
        assert time.monotonic() < deadline, process.communicate()[0]
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    os.killpg(process.pid, signal_number)
    for child in children_named(str(tmp_path)):
        with contextlib.suppress(ProcessLookupError):  # it may have ended between the listing and here
            os.kill(child, signal.SIGKILL)
    process.communicate()
    assert not (engine.root / "tiny-engine").exists()
    slow.unlink()
    (result,) = play(tmp_path, engine.task())
    assert result["reason"] == "installed"
    assert engine.left() == ["tiny-engine"]
    assert (engine.root / "tiny-engine" / "venv" / "big").stat().st_size == 64 << 20


def children_named(text):
    """Return the processes whose command line holds ``text``: what a play leaves on its box when it is killed."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


# --- engine_wheelhouse ----------------------------------------------------------------------------------------------


def wheel(folder, name="tiny_engine", version="1.0"):
    """Write a minimal wheel and return the line of a lock that wants it."""
    folder.mkdir(exist_ok=True)
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def test_engine_wheelhouse(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    lock, cache, links = tmp_path / "e1.lock", tmp_path / "cache", tmp_path / "links"
    wanted = wheel(links)
    lock.write_text(wanted)
    other = tmp_path / "e2.lock"
    other.write_text(wanted.replace("sha256:", "sha256:0")[:-2] + "\n")
    absent = tmp_path / "e3.lock"
    absent.write_text(wanted.replace("tiny_engine", "absent_engine"))

    def task(path, digest):
        collect = {
            "lock": str(path),
            "cache": str(cache),
            "digest": digest,
            "python": "3.11",
            "find_links": [str(links)],
        }
        return {"engine_wheelhouse": collect}

    dry, real, again, damaged, missing = play(
        tmp_path,
        {**task(lock, "d1"), **DRY},
        task(lock, "d1"),
        task(lock, "d1"),
        task(other, "d2"),
        task(absent, "d3"),
    )
    assert (dry["changed"], dry["bytes"], dry["path"]) == (True, 0, real["path"])
    assert (real["changed"], real["reason"]) == (True, "collected")
    assert (again["changed"], again["reason"], again["bytes"]) == (False, "present", real["bytes"])
    with tarfile.open(real["path"]) as packed:
        assert packed.getnames() == ["wheels/tiny_engine-1.0-py3-none-any.whl", "requirements.lock", "uv", ".wheels"]
        assert packed.extractfile("requirements.lock").read().decode() == wanted
    for result, reason, name in ((damaged, "hash_differs", "e2.lock"), (missing, "download_failed", "e3.lock")):
        assert (result["failed"], result["reason"]) == (True, reason)
        assert name in result["msg"]
    assert "tiny_engine" in damaged["msg"].replace("-", "_")
    assert sorted(path.name for path in (cache / "wheelhouse").glob("*.tar")) == ["d1.tar"]


@pytest.mark.parametrize("retries", ["0", "1"])
def test_engine_wheelhouse_without_a_network(tmp_path, monkeypatch, retries):
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", retries)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    lock = tmp_path / "e1.lock"
    lock.write_text("tiny_engine==1.0 --hash=sha256:" + 64 * "0" + "\n")
    collect = {"lock": str(lock), "cache": str(tmp_path / "cache"), "digest": "d1", "python": "3.11"}
    (result,) = play(tmp_path, {"engine_wheelhouse": collect})
    assert (result["failed"], result["reason"]) == (True, "no_index")
    assert "no package index answers" in result["msg"]
