#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: how many requests a box's lanes have, by the engines' own count."""

from __future__ import annotations

DOCUMENTATION = r"""
module: lane_in_flight
short_description: Count the requests that a box's lanes have
description:
  - Reads each engine's own metrics, running and waiting requests. A lane without a process has none; one whose engine
    does not say counts as unknown, never as idle.
  - Changes nothing.
version_added: "0.1.0"
options:
  lanes:
    description: Names of the lanes.
    type: list
    elements: str
    required: true
  wait_s:
    description: Seconds to wait for the lanes to become idle before answering. Idle is believed when it was seen twice.
    type: int
    default: 0
attributes:
  check_mode:
    description: Reads only.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: What is the box busy with
  lane_in_flight:
    lanes: [main]
"""

RETURN = r"""
lanes:
  description: One row for each lane; C(in_flight) is null when the engine does not say.
  returned: always
  type: list
  elements: dict
  sample:
    - {lane: main, running: true, in_flight: 2}
in_flight:
  description: Requests of all lanes; null when one of them is unknown.
  returned: always
  type: int
  sample: 2
reason:
  description: V(idle), V(in_flight) or V(unknown).
  returned: always
  type: str
  sample: idle
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import engine_metrics, release, wide
from ansible.module_utils.vllm_fleet.errors import FleetError
from ansible.module_utils.vllm_fleet.facts import engine_http, units
from ansible.module_utils.vllm_fleet.files import read_json


def count(name):
    """Return the lane's row."""
    state = units.unit_state(f"vllm@{name}.service")
    if not state["MainPID"]:
        return {"lane": name, "running": False, "in_flight": 0}
    try:
        lane = read_json(os.path.join(release.LANES, name, "current", "lane.json"), "lane")
    except FleetError:
        return {"lane": name, "running": True, "in_flight": None}
    if not wide.has_api(lane):
        return {"lane": name, "running": True, "in_flight": 0}  # its requests are the head's
    status, text = engine_http.fetch(lane["host"], int(lane["port"]), "/metrics", timeout=5)
    found = engine_metrics.in_flight(text) if status == 200 else None
    if found is None and state["ActiveState"] != "active":
        found = 0  # on its way up or down: it has answered nobody yet, or takes nobody any more
    return {"lane": name, "running": True, "in_flight": found}


def main():
    module = AnsibleModule(
        argument_spec={
            "lanes": {"type": "list", "elements": "str", "required": True},
            "wait_s": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    deadline = time.monotonic() + module.params["wait_s"]
    seen_idle = False
    while True:
        rows = [count(name) for name in module.params["lanes"]]
        idle = all(row["in_flight"] == 0 for row in rows)
        if (idle and seen_idle) or time.monotonic() >= deadline:
            break
        seen_idle = idle
        time.sleep(0.3)
    unknown = any(row["in_flight"] is None for row in rows)
    module.exit_json(
        changed=False,
        lanes=rows,
        in_flight=None if unknown else sum(row["in_flight"] for row in rows),
        reason="unknown" if unknown else "idle" if idle else "in_flight",
    )


if __name__ == "__main__":
    main()
