"""Editing a file of a checkpoint: links, modes, backups, refusals, and a crash at every call that writes."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vllm_fleet import checkpoint, checkpoint_edit, cli
from vllm_fleet.errors import RefusedError, UsageError

KEY = "text_config.ple_embedding_dtype"
VALUE = "float8_e4m3fn"
ORIGINAL = b'{\r\n  "text_config": {\r\n    "rope": 1e6\r\n  },\r\n  "ple_embedding_dtype": "float8_e4m3fn"\r\n}'
EDITED = b'{\r\n  "text_config": {\r\n    "ple_embedding_dtype": "float8_e4m3fn",\r\n    "rope": 1e6\r\n  }\r\n}'


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"x" * 100)
    (path / "config.json").write_bytes(ORIGINAL)
    return path


def edit(path, **arguments):
    return checkpoint_edit.set_key(str(path), KEY, VALUE, **arguments)


def refused(path, **arguments):
    with pytest.raises(RefusedError) as error:
        edit(path, **arguments)
    return error.value


def listing(path):
    return sorted(entry.name for entry in path.iterdir())


def test_edits_once_and_keeps_the_original(model):
    result = edit(model)
    assert (result["changed"], result["reason"]) == (True, "moved")
    assert (result["before"], result["after"]) == (None, f'"{VALUE}"')
    assert (model / "config.json").read_bytes() == EDITED
    assert (model / "config.json.vllm-fleet-orig").read_bytes() == ORIGINAL
    assert listing(model) == ["config.json", "config.json.vllm-fleet-orig", "model.safetensors"]
    before = (model / "config.json").stat()
    assert edit(model)["changed"] is False
    assert (model / "config.json").stat() == before


def test_check_writes_nothing_and_shows_the_change(model):
    result = edit(model, check=True)
    assert result["changed"] is True
    assert result["text_after"].encode() == EDITED
    assert listing(model) == ["config.json", "model.safetensors"]
    assert (model / "config.json").read_bytes() == ORIGINAL


def test_the_first_backup_is_never_overwritten(model):
    edit(model)
    (model / "config.json").write_bytes(b'{"text_config": {}}')
    edit(model)
    assert (model / "config.json.vllm-fleet-orig").read_bytes() == ORIGINAL
    assert json.loads((model / "config.json").read_bytes()) == {"text_config": {"ple_embedding_dtype": VALUE}}


def test_a_backup_made_in_the_meantime_stays(model, monkeypatch):
    real = os.link

    def link(source, target):
        Path(target).write_bytes(b"of another run")
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    edit(model)
    assert (model / "config.json.vllm-fleet-orig").read_bytes() == b"of another run"


def test_without_hard_links_the_backup_is_renamed(model, monkeypatch):
    def link(_source, _target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    edit(model)
    assert (model / "config.json.vllm-fleet-orig").read_bytes() == ORIGINAL
    assert len(listing(model)) == 3


def test_mode_and_attributes_stay(model):
    path = model / "config.json"
    path.chmod(0o640)
    os.setxattr(path, "user.origin", b"hub")
    edit(model)
    for name in ("config.json", "config.json.vllm-fleet-orig"):
        assert stat.S_IMODE((model / name).stat().st_mode) == 0o640
        assert os.getxattr(model / name, "user.origin") == b"hub"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_owner_stays(model):
    os.chown(model / "config.json", 1234, 2345)
    edit(model)
    for name in ("config.json", "config.json.vllm-fleet-orig"):
        status = (model / name).stat()
        assert (status.st_uid, status.st_gid) == (1234, 2345)


def hub_layout(model):
    """Turn the checkpoint into a snapshot of the hub's cache: each file a link into ``blobs``."""
    blobs = model.parent / "blobs"
    blobs.mkdir()
    for entry in list(model.iterdir()):
        entry.replace(blobs / f"blob-{entry.name}")
        entry.symlink_to(f"../blobs/blob-{entry.name}")
    return blobs


def test_links_of_the_hub_cache_are_followed(model):
    blobs = hub_layout(model)
    result = edit(model)
    assert result["target"] == str(blobs / "blob-config.json")
    assert os.readlink(model / "config.json") == "../blobs/blob-config.json"
    assert (blobs / "blob-config.json").read_bytes() == EDITED
    assert (model / "config.json.vllm-fleet-orig").read_bytes() == ORIGINAL
    assert listing(blobs) == ["blob-config.json", "blob-model.safetensors"]


def test_hard_links_are_reported(model):
    os.link(model / "config.json", model / "other")
    result = edit(model)
    assert [item["reason"] for item in result["warnings"]] == ["hard_links"]
    assert (model / "other").read_bytes() == ORIGINAL


def test_left_over_temporary_files_are_removed(model):
    for name in (".config.json.abc.vllm-fleet-tmp", ".config.json.vllm-fleet-orig.abc.vllm-fleet-tmp"):
        (model / name).write_bytes(b"of a run that was killed")
    (model / ".config.json.swp").write_bytes(b"of somebody else")
    edit(model)
    assert listing(model) == [".config.json.swp", "config.json", "config.json.vllm-fleet-orig", "model.safetensors"]


def test_concurrent_edits_leave_one_good_file(model):
    program = "import sys\nfrom vllm_fleet import cli\nsys.exit(cli.main(sys.argv[1:]))"
    arguments = ["checkpoint-config", str(model), "--set", f"{KEY}={VALUE}", "--json"]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    running = [
        subprocess.Popen([sys.executable, "-c", program, *arguments], env=environment, stdout=-1, stderr=-1)
        for _ in range(6)
    ]
    outcomes = [(process.communicate(), process.returncode) for process in running]
    assert [status for _, status in outcomes] == [0] * 6
    assert [b'"changed": true' in output for (output, _), _ in outcomes].count(True) == 1
    assert (model / "config.json").read_bytes() == EDITED
    assert (model / "config.json.vllm-fleet-orig").read_bytes() == ORIGINAL
    assert len(listing(model)) == 3


def test_an_edit_waits_for_the_one_before_it(model):
    lock = os.open(model, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    child = os.fork()
    if child == 0:
        try:
            os.close(lock)  # an inherited descriptor would hold the lock as well
            edit(model)
        finally:
            os._exit(0)
    time.sleep(0.3)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    assert (model / "config.json").read_bytes() == ORIGINAL
    os.close(lock)
    os.waitpid(child, 0)
    assert (model / "config.json").read_bytes() == EDITED


def test_short_writes_are_completed(model, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    edit(model)
    assert (model / "config.json").read_bytes() == EDITED


def test_a_change_by_someone_else_is_not_lost(model, monkeypatch):
    real = checkpoint_edit._copy_attributes

    def copy(source, descriptor):
        (model / "config.json").write_bytes(b'{"text_config": {}, "new": 1}')
        real(source, descriptor)

    monkeypatch.setattr(checkpoint_edit, "_copy_attributes", copy)
    assert refused(model).reason == "changed_meanwhile"
    assert (model / "config.json").read_bytes() == b'{"text_config": {}, "new": 1}'
    assert not [name for name in listing(model) if name.endswith("-tmp")]


# --- refusals -------------------------------------------------------------------------------------------------------


def test_what_is_no_whole_checkpoint_is_refused(model):
    assert refused(model / "none").reason == "checkpoint_absent"
    assert refused(model / "config.json").reason == "checkpoint_absent"
    (model / "model.safetensors").unlink()
    assert refused(model).reason == "weights_missing"
    (model / "model-00001-of-00002.safetensors").write_bytes(b"x" * 100)
    assert refused(model).reason == "index_missing"
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / checkpoint.INDEX).write_text(json.dumps(index))
    error = refused(model)
    assert error.reason == "shards_missing"
    assert "model-00002-of-00002.safetensors" in error.message
    (model / "model-00002-of-00002.safetensors").write_bytes(b"")
    assert refused(model).reason == "shards_too_small"
    assert (model / "config.json").read_bytes() == ORIGINAL


@pytest.mark.parametrize("kind", ["absent", "dangling", "directory", "fifo"])
def test_a_file_that_cannot_be_edited(model, kind):
    path = model / "config.json"
    path.unlink()
    if kind == "dangling":
        path.symlink_to("gone")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    assert refused(model).reason == ("config_missing" if kind in ("absent", "dangling") else "unreadable_file")


def test_refusals_of_the_text_name_the_file(model):
    (model / "config.json").write_bytes(b'{"text_config": {"ple_embedding_dtype": "bfloat16"}}')
    error = refused(model)
    assert error.reason == "value_differs"
    assert str(model / "config.json") in error.message
    assert edit(model, force=True)["reason"] == "replaced"


@pytest.mark.parametrize("name", ["/etc/passwd", "../config.json", "a/../../b"])
def test_files_outside_are_no_files_of_the_checkpoint(model, name):
    with pytest.raises(UsageError):
        edit(model, file=name)


def as_user(uid, action):
    """Run ``action`` in a child with the ids of ``uid`` and return what it printed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.write(writer, action().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as handle:
        text = handle.read()
    os.waitpid(child, 0)
    return text


def outcome(model, **arguments):
    def action():
        try:
            return edit(model, **arguments)["reason"]
        except RefusedError as error:
            return error.one_line()

    return action


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_read_only_directory_says_what_to_run(model):
    for parent in [model, *model.parents]:
        if not parent.stat().st_mode & 0o001:
            parent.chmod(0o755)
    for check in (True, False):
        text = as_user(65534, outcome(model, check=check))
        assert text.startswith("read_only: ")
        assert f"vllm-fleet checkpoint-config {model} --set {KEY}={VALUE}" in text
    model.chmod(0o777)
    assert as_user(65534, outcome(model)).startswith("attributes_not_kept: ")
    os.chown(model / "config.json", 65534, 65534)
    assert as_user(65534, outcome(model)) == "moved"
    model.chmod(0o555)
    assert as_user(65534, outcome(model)) == "already_set"


# --- a crash anywhere -----------------------------------------------------------------------------------------------

CALLS = ["open", "write", "fchown", "fchmod", "setxattr", "fsync", "link", "replace", "unlink", "close"]


def crash_at(model, number, how):
    """Edit in a child that kills itself at the ``number``-th such call; return whether it got that far.

    ``before`` and ``after`` the call, or in the ``middle``: half of a write is done.
    """
    child = os.fork()
    if child == 0:
        count = 0

        def wrap(name):
            real = getattr(os, name)

            def call(*args, **kwargs):
                nonlocal count
                count += 1
                if count == number:
                    if how == "after":
                        real(*args, **kwargs)
                    elif how == "middle" and name == "write":
                        real(args[0], args[1][: len(args[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in CALLS:
            setattr(os, name, wrap(name))
        try:
            edit(model)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("how", ["before", "middle", "after"])
def test_a_crash_never_leaves_a_broken_file(tmp_path, how, hub):
    seen = set()
    for number in range(1, 200):
        model = tmp_path / str(number) / "model"
        model.mkdir(parents=True)
        (model / "model.safetensors").write_bytes(b"x" * 100)
        (model / "config.json").write_bytes(ORIGINAL)
        (model / "config.json").chmod(0o640)
        os.setxattr(model / "config.json", "user.origin", b"hub")
        if hub:
            hub_layout(model)
        crashed = crash_at(model, number, how)
        content = (model / "config.json").read_bytes()
        assert content in (ORIGINAL, EDITED), number
        seen.add(content)
        backup = model / "config.json.vllm-fleet-orig"
        if backup.exists():
            assert backup.read_bytes() == ORIGINAL
        else:
            assert content == ORIGINAL, "edited before there was a backup"
        for path in [model / "config.json", backup]:
            if path.exists():
                assert stat.S_IMODE(path.stat().st_mode) == 0o640
                assert os.getxattr(path, "user.origin") == b"hub"
        if not crashed:
            break
        edit(model)
        assert (model / "config.json").read_bytes() == EDITED
        assert backup.read_bytes() == ORIGINAL
        if content == ORIGINAL:
            assert len(listing(model)) == 3
    assert number > 15, "the calls were not counted"
    assert seen == {ORIGINAL, EDITED}


def test_a_failing_disk_leaves_the_old_file(model, monkeypatch):
    for name in ("write", "fsync", "link", "replace", "fchmod"):

        def fail(*_args, **_kwargs):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            assert refused(model).reason == "write_failed"
        assert (model / "config.json").read_bytes() == ORIGINAL
        assert not [entry for entry in listing(model) if entry.endswith("-tmp")]


# --- the program and its diff ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a\nb\n", "a\nc\n"),
        ("a\r\nb", "x\r\na\r\nb"),
        ("a", "b"),
        ("a\n", "a"),
        ("a\x0bb\u2028c\n", "a\x0bb\u2028d\n"),
        ("\ufeffa\n", "\ufeffb\n"),
    ],
)
def test_the_diff_is_a_patch_that_applies(tmp_path, before, after):
    (tmp_path / "config.json").write_bytes(before.encode())
    patch = checkpoint_edit.unified_diff(before, after, "config.json").encode()
    subprocess.run(["git", "apply", "-"], input=patch, cwd=tmp_path, check=True)
    assert (tmp_path / "config.json").read_bytes() == after.encode()


def test_program(model, capsys):
    command = ["checkpoint-config", str(model), "--set", f"{KEY}={VALUE}"]
    assert cli.main([*command, "--check", "--diff"]) == 0
    output = capsys.readouterr().out
    assert "would be changed, moved" in output
    assert '+    "ple_embedding_dtype": "float8_e4m3fn",' in output
    assert cli.main([*command, "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] is True
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] is True
    assert cli.main([*command, "--json", "--diff"]) == 0
    last = json.loads(capsys.readouterr().out)
    assert (last["changed"], last["diff"]) == (False, "")
    assert cli.main(["checkpoint-config", str(model), "--set", f"{KEY}=other"]) == 3
    assert "value_differs" in capsys.readouterr().err
    assert cli.main(["checkpoint-config", str(model), "--set-json", "text_config.n=12"]) == 0
    assert json.loads((model / "config.json").read_bytes())["text_config"]["n"] == 12
    for bad in (["--set", "novalue"], ["--set", "=x"], ["--set-json", "a=nope"], ["--set", "a..b=1"]):
        assert cli.main(["checkpoint-config", str(model), *bad]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
