#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: prove the links between a box's GPUs with real transfers."""

from __future__ import annotations

DOCUMENTATION = r"""
module: p2p_proof
short_description: Prove the links between a box's GPUs with real transfers, and keep the verdict
description:
  - A lane whose policy says C(p2p=proven) or C(p2p=required) uses peer-to-peer links only after a transfer over them
    has been right. This module runs that check for the pairs that the driver grants and that have no valid verdict,
    on the engine's own Python, each pair under a time limit.
  - Only GPUs that nobody uses are checked; a pair in use stays unproven and is no failure.
  - A link that fails is no failure of the task either, the decision about the lane's GPUs takes it into account.
version_added: "0.1.0"
options:
  lanes:
    description: Resolved lanes of the box, as the filter P(vllm_fleet_resolve_lanes#filter) gives them.
    type: list
    elements: dict
    required: true
  pairs:
    description: Which pairs to check; V(new) those without a valid verdict, V(open) also those whose check gave no
      answer, V(all) every one.
    type: str
    choices: [new, open, all]
    default: new
  backend:
    description: What moves the data; V(gloo) runs on the CPU, for boxes whose GPUs are simulated.
    type: str
    choices: [nccl, gloo]
    default: nccl
  driver_timeout:
    description: Seconds for the driver to answer.
    type: float
    default: 20.0
attributes:
  check_mode:
    description: Says whether pairs would be checked, and checks none.
    support: full
  diff_mode:
    description: Shows the verdict of each pair before and after.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Prove the links between the GPUs
  p2p_proof:
    lanes: "{{ lane_plan_resolved }}"
"""

RETURN = r"""
results:
  description: One check result a pair, C({check, status, reason, message, fix}).
  returned: always
  type: list
  elements: dict
lines:
  description: The same as lines for a person.
  returned: always
  type: list
  elements: str
before:
  description: Valid verdict of each pair before.
  returned: always
  type: dict
  sample: {}
after:
  description: Valid verdict of each pair after; in check mode the one before.
  returned: always
  type: dict
  sample: {0-1: pass}
reason:
  description:
    - C(proven) when pairs were checked, C(still_valid) when all had a verdict, C(gpus_busy) when pairs are in use,
      C(nothing_to_prove) without a granted link or without a lane that asks for a proof, C(not_yet_installed) in check
      mode on a box that has no engine or no driver.
  returned: always
  type: str
  sample: proven
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import checks, engine_python, p2p_proof, verdict, verdict_store
from ansible.module_utils.vllm_fleet.errors import FleetError
from ansible.module_utils.vllm_fleet.facts import collect

#: which valid verdicts are left as they are
SETTLED = {"new": verdict.STATUSES, "open": p2p_proof.DECIDED, "all": ()}


def wants_proof(lane):
    """Whether the lane has links, and uses them only when they are proven."""
    policy = lane["policy"]
    ranks = policy["tensor_parallel"] * policy["pipeline_parallel"]
    return policy.get("enabled", True) and policy["p2p"] in ("proven", "required") and ranks > 1


def verdicts(facts):
    """Return the valid verdicts by pair."""
    return (verdict.for_facts(verdict_store.load(), facts) or {"pairs": {}})["pairs"]


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "lanes": {"type": "list", "elements": "dict", "required": True},
            "pairs": {"type": "str", "choices": list(SETTLED), "default": "new"},
            "backend": {"type": "str", "choices": ["nccl", "gloo"], "default": "nccl"},
            "driver_timeout": {"type": "float", "default": 20.0},
        },
        supports_check_mode=True,
    )
    params = module.params
    answer = {"changed": False, "results": [], "lines": [], "before": {}, "after": {}}
    lanes = [lane for lane in params["lanes"] if wants_proof(lane)]
    if not lanes:
        module.exit_json(reason="nothing_to_prove", **answer)
    engine = lanes[0]["engine"]
    facts = collect.read(timeout=params["driver_timeout"])
    if module.check_mode and (facts["gpus"] is None or not os.access(engine["python"], os.X_OK)):
        module.exit_json(reason="not_yet_installed", **answer)
    try:
        plan = p2p_proof.plan(facts, settled=SETTLED[params["pairs"]])
        answer.update(before=verdicts(facts), after=verdicts(facts), changed=bool(plan.ready))
        if not module.check_mode:
            python = engine_python.use(engine["python"], lanes[0]["env"])
            outcome = p2p_proof.prove(facts, plan, python, backend=params["backend"])
            answer.update(results=outcome["results"], after=verdicts(facts))
            answer["changed"] = answer["before"] != answer["after"]
    except FleetError as error:
        module.fail_json(msg=error.one_line(), reason=error.reason)
    except OSError as error:
        module.fail_json(msg=f"cannot keep the verdict in {error.filename}: {error.strerror}", reason="write_failed")
    for item in answer["results"]:
        if item["status"] == "fail":
            module.warn(f"{item['reason']}: {item['message']}. Fix: {item['fix']}")
    answer["lines"] = checks.lines(answer["results"])
    reasons = [(plan.ready, "proven"), (plan.unfit, "gpus_busy"), (plan.held, "still_valid")]
    reason = next((reason for pairs, reason in reasons if pairs), "nothing_to_prove")
    module.exit_json(reason=reason, diff={"before": answer["before"], "after": answer["after"]}, **answer)


if __name__ == "__main__":
    main()
