"""Public reports about units that start for ever, or are never given the time to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from vllm_fleet import catalog, profile, release

ROOT = Path(__file__).resolve().parents[2]
CATALOG = catalog.load(str(ROOT / "catalog"))
#: the longest healthy cold start, in seconds
COLD_START_S = 1800


def units(name):
    """Return the settings of a profile's unit, in seconds where they are times: the template, and its drop-in."""
    lane = profile.resolve({"name": "main", "profile": name, "checkpoint": "/m"}, CATALOG)
    text = (ROOT / "roles/serve/files/vllm@.service").read_text() + release.unit_conf(lane, [], None)
    return {key: int(value) for key, value in re.findall(r"^(\w+)=(\d+)$", text, re.M)}


@pytest.mark.parametrize("name", sorted(name for name in CATALOG.profiles if name != "tiny-cpu"))
def test_077_a_load_that_needs_minutes_is_given_them(name):
    """The distribution's 90 s kill a load of minutes, and each kill throws away a part of the compile."""
    assert units(name)["TimeoutStartSec"] >= COLD_START_S


@pytest.mark.parametrize("name", sorted(CATALOG.profiles))
def test_079_a_failure_of_minutes_reaches_the_limit_of_starts(name):
    """Five starts in ten seconds never happen when each takes a minute to fail, so it goes on for ever."""
    found = units(name)
    one = found["TimeoutStartSec"] + found["TimeoutStopSec"] + found["RestartSec"]
    assert found["StartLimitBurst"] == 3
    assert found["RestartSec"] >= 10, "no tight loop"
    assert found["StartLimitIntervalSec"] > found["StartLimitBurst"] * one
