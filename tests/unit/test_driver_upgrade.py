"""What an upgrade of drivers shows: who holds the cards, and which box is stuck for how long."""

from __future__ import annotations

import calendar
import os
import time

import pytest
from vllm_fleet import standing
from vllm_fleet.facts import holders

NOW = calendar.timegm(time.strptime("2026-01-31T12:00:00Z", "%Y-%m-%dT%H:%M:%SZ"))


@pytest.mark.parametrize(
    ("since", "expected"),
    [
        ("2026-01-31T11:59:30Z", "0 min 30 s"),
        ("2026-01-31T11:45:00Z", "15 min 0 s"),
        ("2026-01-31T08:48:00Z", "3 h 12 min"),
        ("2026-01-29T09:00:00Z", "2 d 3 h"),
        ("2026-02-01T00:00:00Z", "?"),
        ("yesterday", "?"),
        (None, "?"),
    ],
)
def test_age(since, expected):
    assert standing.age(since, NOW) == expected


def record(phase, since="2026-01-31T11:00:00Z", reason="driver_upgrade"):
    return {"schema": 1, "phase": phase, "since": since, "reason": reason, "by": "upgrade_driver", "lanes": {}}


def test_what_is_stuck_stands_on_top_with_its_age():
    text = standing.text(
        {
            "a": record("done"),
            "b": {},
            "c": record("rebooting"),
            "d": None,
            "e": record("verifying", "2026-01-30T11:00:00Z", ""),
        },
        NOW,
    )
    rows = [line.split() for line in text.splitlines()[2:]]
    assert [row[0] for row in rows] == ["e", "c", "d", "a", "b"]
    assert rows[0][1:] == [
        "verifying",
        "upgrade_driver",
        "2026-01-30T11:00:00Z",
        "-",
        "unfinished",
        "for",
        "1",
        "d",
        "1",
        "h",
    ]
    assert "unfinished for 1 h 0 min" in text
    assert rows[2] == ["d", "unknown", "-", "-", "unreachable", "not", "reached"]
    assert rows[4] == ["b", "untouched", "-", "-", "-"]


def test_who_holds_the_cards(tmp_path):
    def process(pid, name, cgroup, *targets):
        base = tmp_path / "proc" / str(pid)
        (base / "fd").mkdir(parents=True)
        (base / "comm").write_text(name + "\n")
        (base / "cgroup").write_text(cgroup)
        for number, target in enumerate(targets):
            os.symlink(target, base / "fd" / str(number))

    process(40, "python3", "0::/user.slice/session-3.scope\n", "/dev/null", "/dev/nvidia0", "/dev/nvidia-uvm")
    process(7, "VLLM::Worker", "0::/system.slice/system-vllm.slice/vllm@main.service\n", "/dev/iluvatar3")
    process(8, "sh", "0::/init.scope\n", "/dev/nvme0", "/tmp/dev/nvidia0", "/dev/nvidiafake")
    (tmp_path / "proc/self").mkdir()
    assert holders.read(str(tmp_path)) == [
        {"pid": 7, "name": "VLLM::Worker", "unit": "vllm@main.service", "nodes": ["/dev/iluvatar3"]},
        {"pid": 40, "name": "python3", "unit": "session-3.scope", "nodes": ["/dev/nvidia-uvm", "/dev/nvidia0"]},
    ]
