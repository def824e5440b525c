"""Locks between processes: one holder at a time, also where the file goes away with its holder."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
from vllm_fleet import locks


def enter(path, trace, number):
    """Hold the lock a while, and note when."""
    with locks.hold(path, f"process {number}", wait=30, remove=True):
        with open(trace, "a") as handle:
            handle.write(f"in {number}\n")
        time.sleep(0.25)
        with open(trace, "a") as handle:
            handle.write(f"out {number}\n")


def test_a_removed_lock_has_one_holder_at_a_time_and_leaves_nothing(tmp_path):
    path, trace = tmp_path / "lock", tmp_path / "trace"
    people = [
        multiprocessing.get_context("spawn").Process(target=enter, args=(str(path), str(trace), n)) for n in range(5)
    ]
    for person in people:
        person.start()
        time.sleep(0.05)
    for person in people:
        person.join(60)
        assert person.exitcode == 0
    lines = trace.read_text().split("\n")[:-1]
    assert len(lines) == 10
    assert all(a.replace("in", "out") == b for a, b in zip(lines[::2], lines[1::2], strict=True)), lines
    assert not path.exists()


def test_one_who_waited_for_a_removed_file_does_not_hold_it(tmp_path, monkeypatch):
    path = str(tmp_path / "lock")
    opened = locks._open

    def stale(name):
        """Open the file, and have its holder remove it before it can be locked; the second time all is well."""
        monkeypatch.setattr(locks, "_open", opened)
        descriptor = opened(name)
        os.unlink(name)
        return descriptor

    monkeypatch.setattr(locks, "_open", stale)
    with locks.hold(path, "first"), pytest.raises(locks.RefusedError, match="first"), locks.hold(path, "second"):
        pass


def test_a_failure_removes_it_too(tmp_path):
    path = tmp_path / "lock"
    with pytest.raises(ZeroDivisionError), locks.hold(str(path), "x", remove=True):
        assert path.exists()
        raise ZeroDivisionError
    assert not path.exists()
