#!/usr/bin/python
"""Check a box for its lanes before anything on it is touched."""

# Copyright: the vllm-fleet contributors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: lane_preflight
short_description: Check a box for its lanes before anything on it is touched
version_added: "0.1.0"
description:
  - Runs every check of C(vllm-fleet preflight) for resolved lanes that need not be on the box's disk yet.
  - It changes nothing, with and without check mode.
  - The task fails when at least one result is C(fail); C(warn) and C(unknown) are returned and do not stop the play.
  - In check mode on a fresh box, what an earlier task would have installed is C(unknown) with the reason
    C(not_yet_installed).
options:
  lanes:
    description: Resolved lanes, as the catalog's filter gives them.
    type: list
    elements: dict
    required: true
  defer:
    description:
      - Names of checks that are not run here, because a later task of the same play provides for them.
      - They run at every start of the unit all the same.
    type: list
    elements: str
    default: []
  user:
    description: System user that runs the engine.
    type: str
    default: vllm
  hashing:
    description: Read and verify the build products of engines that have a recorded tree.
    type: bool
    default: true
  remembered:
    description:
      - Leave build products unread that were as recorded and have the size, time of change and inode of then.
        A start of the unit always reads them.
    type: bool
    default: true
  box:
    description: Name of the box for messages; the inventory's name reads best.
    type: str
  fail_on_fail:
    description: Fail the task on a C(fail). Without it the results are only returned, for a report over a fleet.
    type: bool
    default: true
  driver_timeout:
    description: Seconds that the accelerator's driver has to answer.
    type: float
    default: 20.0
attributes:
  check_mode:
    support: full
    description: The module never changes anything.
  diff_mode:
    support: none
    description: There is no change to show.
author: vllm-fleet (@vllm-fleet)
"""

EXAMPLES = r"""
- name: Check the box for its lanes
  lane_preflight:
    lanes: "{{ vllm_serve_lanes }}"
    box: "{{ inventory_hostname }}"

- name: Collect the results of every box without stopping the play
  lane_preflight:
    lanes: "{{ vllm_serve_lanes }}"
    fail_on_fail: false
  register: verify_results
"""

RETURN = r"""
lanes:
  description: One entry a lane, with C(lane), C(results), C(summary) and C(status).
  returned: always
  type: list
  elements: dict
  sample:
    - lane: main
      status: fail
      summary: {pass: 20, warn: 0, fail: 1, unknown: 0}
      results:
        - check: port
          status: fail
          reason: port_occupied
          message: "port 8000 is held by pid 4242 (python3 -m http.server 8000); needed: a free port"
          fix: stop that process or give the lane another port
status:
  description: The worst status over all lanes, C(fail), C(unknown), C(warn) or C(pass).
  returned: always
  type: str
  sample: fail
deferred:
  description: The checks that were left out.
  returned: always
  type: list
  elements: str
  sample: []
reason:
  description: The reason code of the first fail.
  returned: when something fails
  type: str
  sample: port_occupied
"""

import socket

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import checks, start
from ansible.module_utils.vllm_fleet.errors import FleetError
from ansible.module_utils.vllm_fleet.preflight import gather, report
from ansible.module_utils.vllm_fleet.preflight import run as preflight


def explain(box, failures):
    """Return the message of the failed task: box, check, found, needed and fix of each fail, each on its own line."""
    blocks = []
    for lane, verdict in failures:
        lines = [f"box: {box}", f"lane: {lane}", f"check: {verdict.result['check']} ({verdict.result['reason']})"]
        lines.append(f"found: {verdict.found}")
        if verdict.needed:
            lines.append(f"needed: {verdict.needed}")
        if verdict.result["fix"]:
            lines.append(f"fix: {verdict.result['fix']}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def examine(module):
    """Return ``[(lane name, [verdicts])]`` for every lane."""
    params = module.params
    lanes = [preflight.validated(lane, f"lanes[{index}]") for index, lane in enumerate(params["lanes"])]
    unheard_of = sorted(set(params["defer"]) - set(preflight.known_checks()))
    if unheard_of:
        module.fail_json(msg=f"defer names no check: {', '.join(unheard_of)}", reason="unknown_check")
    facts, decisions = None, {}
    if preflight.gpus_wanted(lanes):
        facts = start.live_facts([lane["lane"] for lane in lanes], timeout=params["driver_timeout"])
        decisions = start.decide_all(lanes, facts)
    common = gather.read_box(facts)
    outcome = []
    for lane in lanes:
        box = gather.read_lane(
            lane,
            common,
            decision=decisions.get(lane["lane"]),
            user=params["user"],
            hashing=params["hashing"],
            remembered=params["remembered"],
            dry_run=module.check_mode,
        )
        verdicts = preflight.evaluate(lane, box, skip=params["defer"], dry_run=module.check_mode)
        outcome.append((lane["lane"], verdicts))
    return outcome


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "lanes": {"type": "list", "elements": "dict", "required": True},
            "defer": {"type": "list", "elements": "str", "default": []},
            "user": {"type": "str", "default": "vllm"},
            "hashing": {"type": "bool", "default": True},
            "remembered": {"type": "bool", "default": True},
            "box": {"type": "str"},
            "fail_on_fail": {"type": "bool", "default": True},
            "driver_timeout": {"type": "float", "default": 20.0},
        },
        supports_check_mode=True,
    )
    try:
        outcome = examine(module)
    except FleetError as error:
        module.fail_json(msg=error.one_line(), reason=error.reason)
    everything = [verdict.result for _lane, verdicts in outcome for verdict in verdicts]
    answer = {
        "changed": False,
        "lanes": [report.as_object(lane, [verdict.result for verdict in verdicts]) for lane, verdicts in outcome],
        "status": checks.overall(everything),
        "deferred": sorted(module.params["defer"]),
    }
    failures = [
        (lane, verdict) for lane, verdicts in outcome for verdict in verdicts if verdict.result["status"] == checks.FAIL
    ]
    if failures and module.params["fail_on_fail"]:
        box = module.params["box"] or socket.gethostname()
        module.fail_json(msg=explain(box, failures), reason=failures[0][1].result["reason"], **answer)
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
