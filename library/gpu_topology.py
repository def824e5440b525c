#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: decide which GPUs the lanes of a box get."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_topology
short_description: Decide which GPUs the lanes of a box get, in which order, over which links
description:
  - Reads the GPUs and their links from the box, within a time limit and without a CUDA context, and makes the decision
    of each lane as the start of its unit will make it.
  - The decisions are kept in C(/var/lib/vllm-fleet/decisions), with a bounded history. No process is touched; a lane
    that runs takes up a new decision at its next start.
  - A refused decision fails the task with its reason code, and nothing is kept then.
version_added: "0.1.0"
options:
  lanes:
    description:
      - Resolved lanes, as the filter P(vllm_fleet_resolve_lanes#filter) gives them. Lanes that own no GPU are left out.
      - Lanes of one call leave each other's GPUs alone, and those of further lanes that are installed on the box.
    type: list
    elements: dict
    required: true
  driver_timeout:
    description: Seconds that the accelerator's driver has to answer.
    type: float
    default: 20.0
  fail_on_refusal:
    description: Fail the task on a refused decision. Without it the decisions are only returned, for a report.
    type: bool
    default: true
attributes:
  check_mode:
    description: Decides all the same and keeps nothing.
    support: full
  diff_mode:
    description: Shows each decision against the one that was kept.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Decide which GPUs the lanes get
  gpu_topology:
    lanes: "{{ serve_lanes }}"
  register: serve_topology

- name: Render the releases with their NUMA binding
  lane_release:
    lanes: "{{ serve_lanes }}"
    bindings: "{{ serve_topology.bindings }}"
    unit: "{{ lookup('ansible.builtin.file', 'vllm@.service') }}"
"""

RETURN = r"""
decisions:
  description: The decision of each lane, by lane name.
  returned: always
  type: dict
  sample:
    main: {status: selected, reason: reordered, order: [0, 2, 1, 3]}
bindings:
  description: C(cpus) and C(node) of each lane whose decision binds it, by lane name; what M(lane_release) takes.
  returned: always
  type: dict
  sample: {main: {cpus: 0-15, node: 0}}
before:
  description: The order of GPUs (UUIDs) in the decision that was kept, by lane name; empty when there was none.
  returned: always
  type: dict
  sample: {main: []}
after:
  description: The order of GPUs (UUIDs) in the decision now.
  returned: always
  type: dict
  sample: {main: [GPU-5d2a33f1-0000-4000-8000-000000000000]}
reason:
  description: Reason code of the first refusal, else V(decided) when a decision differs from the one that was kept,
    V(as_decided) when none does, V(no_gpu_lanes) when no lane owns GPUs, V(not_yet_installed) in check mode when the
    driver or its bindings are not there yet and nothing is decided.
  returned: always
  type: str
  sample: as_decided
facts:
  description: The topology facts (schema 1) that were read; null when no lane owns GPUs.
  returned: always
  type: dict
"""

import json

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import start
from ansible.module_utils.vllm_fleet.errors import FleetError
from ansible.module_utils.vllm_fleet.preflight.run import validated

#: what an earlier task of the same play installs, so that a check run on a fresh box can't read the cards
ABSENT = ("pynvml_missing", "library_missing", "driver_not_loaded")


def as_text(decision):
    """Return a decision as the lines of a diff."""
    return json.dumps(decision, indent=1, sort_keys=True) + "\n" if decision else ""


def gpus_of(decision):
    """Return the UUIDs of a decision in order."""
    return list((decision or {}).get("lane") or [])


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "lanes": {"type": "list", "elements": "dict", "required": True},
            "driver_timeout": {"type": "float", "default": 20.0},
            "fail_on_refusal": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    answer = {"changed": False, "decisions": {}, "bindings": {}, "before": {}, "after": {}, "facts": None}
    diffs = []
    try:
        lanes = [validated(lane, f"lanes[{index}]") for index, lane in enumerate(params["lanes"])]
        lanes = [lane for lane in lanes if lane["policy"].get("enabled", True)]
        if not lanes:
            module.exit_json(reason="no_gpu_lanes", **answer)
        facts = start.live_facts([lane["lane"] for lane in lanes], timeout=params["driver_timeout"])
        if module.check_mode and facts["gpus"] is None and facts["extra"]["status"] in ABSENT:
            answer["facts"] = facts
            module.exit_json(reason="not_yet_installed", **answer)
        decisions = start.decide_all(lanes, facts)
        kept = {name: start.stored(name) for name in decisions}
        answer.update(
            facts=facts,
            decisions=decisions,
            bindings={name: item["binding"] for name, item in decisions.items() if "cpus" in item["binding"]},
            before={name: gpus_of(kept[name]) for name in decisions},
            after={name: gpus_of(decisions[name]) for name in decisions},
        )
        refusals = {name: item for name, item in decisions.items() if start.refused(item)}
        for name, decision in decisions.items():
            if name in refusals or kept[name] == decision:
                continue
            answer["changed"] = True
            where = start.decision_path(name)
            diffs.append(
                {
                    "before_header": where,
                    "after_header": where,
                    "before": as_text(kept[name]),
                    "after": as_text(decision),
                }
            )
    except FleetError as error:
        module.fail_json(msg=error.one_line(), reason=error.reason)
    if refusals and params["fail_on_refusal"]:
        answer["changed"] = False
        name, refusal = next(iter(refusals.items()))
        module.fail_json(
            msg=f"lane {name}: {refusal['reason']}: {refusal['message']}", reason=refusal["reason"], **answer
        )
    try:
        if not module.check_mode:
            for name, decision in decisions.items():
                if name not in refusals:
                    start.keep(name, decision)
    except OSError as error:
        module.fail_json(msg=f"cannot keep a decision in {error.filename}: {error.strerror}", reason="write_failed")
    reason = "decided" if answer["changed"] else "as_decided"
    if refusals:
        reason = next(iter(refusals.values()))["reason"]
    module.exit_json(reason=reason, diff=diffs, **answer)


if __name__ == "__main__":
    main()
