#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: where a box's lanes stand, proven by a completion where they are up."""

from __future__ import annotations

DOCUMENTATION = r"""
module: lane_probe
short_description: Say where the lanes of a box stand
description:
  - Reads each lane's unit, its phase from the engine's log, and, once the unit is active, asks it for a completion.
  - A member of a lane that spans boxes is ready when its head has answered and is joined with this very process; the
    head's watchdog says so.
  - Changes nothing. M(lane_ready) calls it until every lane is ready.
version_added: "0.1.0"
options:
  lanes:
    description: Names of the lanes.
    type: list
    elements: str
    required: true
  restarted:
    description:
      - What M(lane_activate) returned for the lanes that it restarted. The answer must come from a process started
        after that, and the log is read from where it stood.
    type: list
    elements: dict
    default: []
  wait_s:
    description: Seconds to wait for a lane to become ready, to fail, or to change its phase, before answering.
    type: int
    default: 0
  seen:
    description: Phase of each lane at the last call, by lane; a change ends the wait.
    type: dict
    default: {}
  concurrent:
    description: Completions that must come at once, if that is more than the lane's own readiness asks for.
    type: int
    default: 1
attributes:
  check_mode:
    description: Reads only.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Where do the lanes stand
  lane_probe:
    lanes: [main]
"""

RETURN = r"""
lanes:
  description: One row for each lane.
  returned: always
  type: list
  elements: dict
  sample:
    - {lane: main, state: ready, phase: answering HTTP, elapsed_s: 31, pid: 4242, release: 8c0e1f2ab34d,
       engine: vllm-0.32.0-cpu, address: "10.0.0.2:8000", gpus: "0,2,1,3", message: 1 token(s) by tiny}
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import checks, readiness, release, runtime_env, wide
from ansible.module_utils.vllm_fleet.commands import wait_ready
from ansible.module_utils.vllm_fleet.errors import FleetError
from ansible.module_utils.vllm_fleet.facts import host, peer_link, units
from ansible.module_utils.vllm_fleet.files import read_json


def monotonic_age(microseconds):
    return max(0, int(time.clock_gettime(time.CLOCK_MONOTONIC) - microseconds / 1e6)) if microseconds else 0


def runtime_value(name, variable):
    """Return what the last start decided for a variable; empty when it did not, or left no file that can be read."""
    text = host.read_text(os.path.join(release.RUNTIME, name, "runtime.env")) or ""
    try:
        return runtime_env.parse(text).get(variable, "")
    except FleetError:
        return ""


def member(lane, row, state, started):
    """Return the row of a headless part whose own unit is up: the head's proof counts, if joined with this one."""
    place = lane["part"]
    head, here = place["boxes"][0], place["boxes"][place["rank"]]
    answer = peer_link.ask(place["addresses"][0], place["peer_port"], lane["lane"])
    told = answer.get("record")
    if told is None:
        return dict(row, state="starting", phase=f"waiting for a word of the watchdog on {head}")
    if told["state"] == "failed" or (started and told["restarts"] > 1):
        return dict(row, state="failed", message=f"the head on {head} failed; see there", errors=[], journal=[])
    if told["state"] != "active" or told["partners"].get(here) != state["InvocationID"]:
        return dict(row, state="starting", phase=f"waiting for the head on {head}")
    return dict(row, state="ready", message=f"joined with {head}, which answered a completion")


def stand(name, restarted, concurrent=1):
    """Return the lane's row; ``state`` is ready, starting or failed."""
    unit = f"vllm@{name}.service"
    state = units.unit_state(unit)
    row = {"lane": name, "unit": state["ActiveState"] + "/" + state["SubState"], "pid": state["MainPID"], "message": ""}
    try:
        lane = read_json(os.path.join(release.LANES, name, "current", "lane.json"), "lane")
    except FleetError as error:
        return dict(row, state="failed", phase="no release", elapsed_s=0, message=error.message)
    started = restarted.get(name)
    log = (
        units.read_log(lane["log"], int(started["log_offset"]) if started else 0)
        if lane["log"]
        else units.journal(unit)
    )
    row.update(
        phase=readiness.phase(log),
        elapsed_s=monotonic_age(state["InactiveExitTimestampMonotonic"]),
        release=os.path.basename(os.path.realpath(os.path.join(release.LANES, name, "current"))),
        engine=lane["engine"]["id"],
        address="{}:{}".format(lane["host"], lane["port"]) if wide.has_api(lane) else "none, a headless part",
        gpus=runtime_value(name, "CUDA_VISIBLE_DEVICES") or lane["rendered"]["env"].get("CUDA_VISIBLE_DEVICES", ""),
    )
    waiting_for_new = started and started["invocation_before"] and state["InvocationID"] == started["invocation_before"]
    if state["ActiveState"] == "active" and not waiting_for_new and not wide.has_api(lane):
        return member(lane, row, state, started)
    if state["ActiveState"] == "active" and not waiting_for_new:
        key = host.first_line(lane["api_key_file"]) if lane.get("api_key_file") else None
        bad = [
            item["message"]
            for item in wait_ready.prove(lane, key or None, 60.0, concurrent)
            if item["status"] == checks.FAIL
        ]
        return dict(row, state="failed" if bad else "ready", message="; ".join(bad) or "answered a completion")
    starting = state["ActiveState"] in ("activating", "reloading", "deactivating") or waiting_for_new
    # One part of a lane that spans boxes may be ended because another one was; that is how they come back whole.
    forgiven = 0 if not wide.is_wide(lane) else 1 if started else state["NRestarts"]
    if starting and (forgiven or state["SubState"] != "auto-restart") and state["NRestarts"] <= forgiven:
        if state["SubState"] == "start-pre":
            row["phase"] = "checking the box"
        elif state["ActiveState"] == "deactivating":
            row["phase"] = "stopping the old process"
        return dict(row, state="starting")
    said = [
        line
        for line in units.journal(unit, lines=40).splitlines()
        if line.startswith(("vllm-fleet", "refused", "not_"))
    ]
    return dict(
        row,
        state="failed",
        errors=readiness.last_errors(log),
        journal=units.journal(unit, lines=25).splitlines()[-12:],
        message="unit {} ({})".format(row["unit"], state["Result"]) + ("; " + said[-1] if said else ""),
    )


def main():
    module = AnsibleModule(
        argument_spec={
            "lanes": {"type": "list", "elements": "str", "required": True},
            "restarted": {"type": "list", "elements": "dict", "default": []},
            "wait_s": {"type": "int", "default": 0},
            "seen": {"type": "dict", "default": {}},
            "concurrent": {"type": "int", "default": 1},
        },
        supports_check_mode=True,
    )
    restarted = {row["lane"]: row for row in module.params["restarted"] if row.get("restarted") and "log_offset" in row}
    deadline = time.monotonic() + module.params["wait_s"]
    while True:
        rows = [stand(name, restarted, module.params["concurrent"]) for name in module.params["lanes"]]
        moved = any(module.params["seen"].get(row["lane"]) != row["phase"] for row in rows)
        if moved or all(row["state"] != "starting" for row in rows) or any(row["state"] == "failed" for row in rows):
            break
        if time.monotonic() >= deadline:
            break
        time.sleep(1)
    module.exit_json(changed=False, lanes=rows)


if __name__ == "__main__":
    main()
