"""What everything stands on: files, errors, check results, the program's frame, the journal, engine digests."""

from __future__ import annotations

import io
import os
import stat
import sys
import syslog

import pytest
from vllm_fleet import checks, cli, engines, files, journal
from vllm_fleet.errors import FleetError, RefusedError, UsageError


def names(directory):
    """Return what lies in a directory."""
    return sorted(path.name for path in directory.iterdir())


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_new_file_gets_the_mode_and_an_old_one_keeps_its_own(tmp_path):
    path = tmp_path / "a"
    assert files.write_atomic(str(path), b"one")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"one", 0o644)
    path.chmod(0o600)
    assert files.write_atomic(str(path), b"two")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nothing_is_written_when_everything_is_right(tmp_path):
    path = tmp_path / "a"
    files.write_atomic(str(path), b"one", 0o640)
    before = path.stat()
    assert not files.write_atomic(str(path), b"one", 0o640)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert files.write_atomic(str(path), b"one", 0o600), "another mode is a change"


def test_a_reader_of_the_old_file_keeps_it(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        files.write_atomic(str(path), b"new")
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"


def test_a_failure_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomic(str(path), b"new")
    assert (path.read_bytes(), names(tmp_path)) == (b"old", ["a"])


def test_content_and_name_reach_the_disk_before_and_after_the_rename(tmp_path, monkeypatch):
    steps = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda handle: (steps.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle))
    )
    monkeypatch.setattr(os, "replace", lambda source, target: (steps.append("rename"), replace(source, target)))
    files.write_atomic(str(tmp_path / "a"), b"new")
    assert [os.path.basename(step).split(".")[0] for step in steps[:1]] == [""], "the temporary file, which has a dot"
    assert steps[1:] == ["rename", str(tmp_path)]


def test_another_owner_is_a_change_and_is_given(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"one")
    given = []
    monkeypatch.setattr(os, "fchown", lambda handle, uid, gid: given.append((uid, gid)))
    own = path.stat()
    assert not files.write_atomic(str(path), b"one", 0o644, own.st_uid, own.st_gid)
    assert files.write_atomic(str(path), b"one", 0o644, own.st_uid, own.st_gid + 1)
    assert given == [(own.st_uid, own.st_gid + 1)]


def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    files.write_atomic(str(tmp_path / "link"), b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


def test_a_link_moves_in_one_step(tmp_path, monkeypatch):
    link = str(tmp_path / "current")
    assert files.link_atomic("releases/1", link)
    assert not files.link_atomic("releases/1", link)
    seen = []
    replace = os.replace

    def watched(source, target):
        seen.append((os.readlink(source), os.readlink(target)))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    assert files.link_atomic("releases/2", link)
    assert seen == [("releases/2", "releases/1")], "the old one is there until the new one is"
    assert (os.readlink(link), names(tmp_path)) == ("releases/2", ["current"])


def test_what_a_killed_run_left_does_not_stop_the_next(tmp_path):
    (tmp_path / f".current.{os.getpid()}").symlink_to("nowhere")
    assert files.link_atomic("releases/1", str(tmp_path / "current"))
    assert names(tmp_path) == ["current"]


@pytest.mark.parametrize("raw", [b"{", b'{"a": NaN}', b'{"a": Infinity}', b'"\xff"', b"[" * 100_000, b""])
def test_bad_json_is_one_line(raw):
    with pytest.raises(UsageError) as caught:
        files.parse_json(raw, "facts", "/x/facts.json")
    assert caught.value.reason == "bad_json"
    assert "the facts in /x/facts.json" in caught.value.message
    assert "\n" not in caught.value.one_line()


def test_an_unreadable_file_is_named(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(UsageError) as caught:
            files.read_json(str(path), "lane")
        assert caught.value.reason == "unreadable_file"
        assert str(path) in caught.value.message


# --- errors, checks -------------------------------------------------------------------------------------------------


def test_errors_say_reason_message_and_fix_on_one_line():
    assert FleetError("some_code", "found\n  this", "do that").one_line() == "some_code: found this. Fix: do that"
    assert FleetError("some_code", "found").one_line() == "some_code: found"
    assert (UsageError("a", "b").exit_code, RefusedError("a", "b").exit_code) == (2, 3)


def test_check_results():
    results = [checks.result("c", status, "r", "m") for status in checks.STATUSES]
    assert results[0] == {"check": "c", "status": "pass", "reason": "r", "message": "m", "fix": ""}
    assert checks.summary(results) == {"pass": 1, "warn": 1, "fail": 1, "unknown": 1}
    assert [item["status"] for item in checks.failed(results)] == ["fail"]
    assert checks.exit_code(results) == 1
    assert checks.exit_code([item for item in results if item["status"] != "fail"]) == 0
    with pytest.raises(ValueError, match="ok"):
        checks.result("c", "ok", "r", "m")


# --- cli ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_of_the_table_is_there_and_shows_its_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"vllm-fleet {command}" in capsys.readouterr().out


def test_only_the_command_that_is_asked_for_is_loaded():
    parser = cli.build_parser("render")
    assert parser.parse_args(["render"]).run.__module__.endswith(".commands.render")


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["start-check"]])
def test_bad_usage_is_exit_2(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UsageError("some_code", "found\nthis"), 2, "some_code: found this"),
        (RefusedError("some_code", "found\nthis"), 3, "some_code: found this"),
        (OSError(28, "No space left on device", "/x"), 2,
         "disk_full: nothing more can be written to /x. Fix: free some space"),
        (PermissionError(13, "Permission denied", "/x"), 2, "io_failed: Permission denied: /x"),
    ],
)  # fmt: skip
def test_errors_become_one_line_and_a_status(error, status, line, monkeypatch, capsys):
    module = cli.importlib.import_module("vllm_fleet.commands.start_check")

    def refuse(_args):
        raise error

    monkeypatch.setattr(module, "run", refuse)
    assert cli.main(["start-check", "main"]) == status
    assert capsys.readouterr().err == f"vllm-fleet start-check: {line}\n"


def test_ctrl_c_has_its_status(monkeypatch):
    def interrupt(_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib.import_module("vllm_fleet.commands.start_check"), "run", interrupt)
    assert cli.main(["start-check", "main"]) == 130


# --- journal --------------------------------------------------------------------------------------------------------


def test_at_a_terminal_it_says_one_line_on_stderr(monkeypatch, capsys):
    monkeypatch.delenv("INVOCATION_ID", raising=False)
    journal.say("two\nlines", "error")
    assert capsys.readouterr().err == "two lines\n"


def test_in_a_unit_it_goes_to_the_journal_and_not_to_the_lanes_log(monkeypatch, capsys):
    said = []
    monkeypatch.setenv("INVOCATION_ID", "1")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(syslog, "syslog", lambda *words: said.append(words))
    journal.say("two\nlines", "warning")
    assert said == [(syslog.LOG_WARNING, "two lines")]
    assert sys.stderr.getvalue() == ""
    assert capsys.readouterr().out == ""


# --- engines --------------------------------------------------------------------------------------------------------

LOCK = "a==1 --hash=sha256:0"
ENGINE = {
    "id": "e1",
    "version": "1.0",
    "python_version": "3.11",
    "route": "wheel",
    "install": {"pins": {}, "disk_gib": 4},
}


def test_the_digest_is_of_everything_that_the_engine_is_built_from():
    first = engines.inputs(ENGINE, "/c/e1.lock", LOCK)
    assert first["interpreter"] == "/usr/bin/python3.11"
    assert engines.inputs(ENGINE, "/elsewhere/e1.lock", LOCK)["digest"] == first["digest"]
    others = [
        engines.inputs(ENGINE, "/c/e1.lock", LOCK.replace("a==1", "a==2")),
        *(engines.inputs({**ENGINE, key: "3.12"}, "/c/e1.lock", LOCK) for key in ("id", "version", "python_version")),
    ]
    assert len({first["digest"], *(other["digest"] for other in others)}) == 5
