#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: the box's half of a reboot."""

from __future__ import annotations

DOCUMENTATION = r"""
module: box_boot
short_description: Decide about a reboot, ask for it, prove it
description:
  - The box's half of M(box_reboot), which waits between the phases and which plays use.
  - Keeps one record on the box, so that an interrupted run goes on with the proof, and so that a cause which survives
    its reboot fails instead of looping.
version_added: "0.1.0"
options:
  phase:
    description:
      - V(plan) decides and changes nothing. V(request) records what is so before the reboot and has systemd reboot the
        box in two seconds. V(prove) compares and closes the record.
    type: str
    choices: [plan, request, prove]
    required: true
  allowed:
    description: Whether a reboot may be made. Left out, nobody has decided, and a needed one fails.
    type: bool
  required:
    description: Whether a reboot is needed. Left out, that is unknown, which is reported.
    type: bool
  reasons:
    description: Codes of why a reboot is needed.
    type: list
    elements: str
    default: []
  blocked:
    description: Codes of why a reboot would not help; any refuses one.
    type: list
    elements: str
    default: []
  again:
    description: Reboot although the last one for the same cause did not help.
    type: bool
    default: false
  module:
    description: Kernel module whose loaded version must be the installed one afterwards; empty for none.
    type: str
    default: ""
  by:
    description: What asks for the reboot, for the record.
    type: str
    default: reboot
  final:
    description: With V(prove), whether a fail counts. Otherwise it is only returned, and the record stays open.
    type: bool
    default: true
  path:
    description: The record.
    type: path
    default: /var/lib/vllm-fleet/reboot.json
attributes:
  check_mode:
    description: V(plan) and V(prove) only look; V(request) can say that it would reboot.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: See whether the box would be rebooted
  box_boot:
    phase: plan
    allowed: true
    required: true
    reasons: [driver_mismatch]
    module: nvidia
"""

RETURN = r"""
action:
  description: V(none), V(report), V(refuse), V(reboot) or V(prove) for the phase V(plan); otherwise the phase.
  returned: always
  type: str
  sample: reboot
reason:
  description:
    - For V(plan) V(not_required), V(reboot_unknown), V(reboot_pending), V(reboot_undecided), V(survived_reboot),
      V(container), V(reboot_blocked), V(reboot_required) or V(resumed); then V(requested); for V(prove) V(proven), or
      the first fail's, V(boot_id_unchanged), V(module_not_installed), V(module_not_loaded), V(module_mismatch),
      V(gpu_count_changed) or V(gpus_unreadable).
  returned: always
  type: str
  sample: reboot_required
message:
  description: The same in words.
  returned: always
  type: str
lanes:
  description: Lanes that run; after the reboot those that ran before it.
  returned: always
  type: list
  elements: str
  sample: [main]
results:
  description: Check results of the proof.
  returned: always
  type: list
  elements: dict
  sample: [{check: reboot, status: pass, reason: rebooted, message: "boot 1f0c…, kernel 6.1.0", fix: ""}]
before:
  description: Boot id, kernel, module versions and GPU counts, before the reboot where there is a record of them.
  returned: always
  type: dict
  sample: {boot_id: 9c88, kernel: 6.1.0, module: {name: nvidia, loaded: "550.1", installed: "550.2"}}
after:
  description: The same now.
  returned: always
  type: dict
  sample: {boot_id: c4de, kernel: 6.1.0, module: {name: nvidia, loaded: "550.2", installed: "550.2"}}
"""

import json
import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import checks, files, reboot
from ansible.module_utils.vllm_fleet.errors import FleetError
from ansible.module_utils.vllm_fleet.facts import boot, units


def write(path, record):
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    files.write_atomic(path, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode(), 0o644)


def main():
    module = AnsibleModule(
        argument_spec={
            "phase": {"type": "str", "choices": ["plan", "request", "prove"], "required": True},
            "allowed": {"type": "bool"},
            "required": {"type": "bool"},
            "reasons": {"type": "list", "elements": "str", "default": []},
            "blocked": {"type": "list", "elements": "str", "default": []},
            "again": {"type": "bool", "default": False},
            "module": {"type": "str", "default": ""},
            "by": {"type": "str", "default": "reboot"},
            "final": {"type": "bool", "default": True},
            "path": {"type": "path", "default": reboot.PATH},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        there = os.path.exists(params["path"])
        record = reboot.well_formed(files.read_json(params["path"], "reboot record")) if there else None
    except FleetError as error:
        module.fail_json(msg=error.one_line(), reason=error.reason)
    now = boot.snapshot(params["module"])
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    open_record = record if record and record["phase"] == "requested" else None
    answer = {
        "action": params["phase"],
        "before": open_record["before"] if open_record else now,
        "after": now,
        "results": [],
        "lanes": open_record["lanes"] if open_record else boot.active_lanes(),
    }

    if params["phase"] == "plan":
        answer.update(
            reboot.plan(*(params[name] for name in ("allowed", "required", "reasons", "blocked", "again")), record, now)
        )
        module.exit_json(changed=answer["action"] == reboot.REBOOT, **answer)

    if params["phase"] == "request":
        if not module.check_mode:
            write(params["path"], reboot.request(params["by"], params["reasons"], answer["lanes"], now, stamp))
            # In two seconds, so that this answer still gets out.
            done = units.run(["systemd-run", "--quiet", "--collect", "--on-active=2", "systemctl", "reboot"])
            if done.returncode:
                module.fail_json(msg=f"systemd does not take the reboot: {done.stderr.strip()}", reason="not_requested")
        module.exit_json(changed=True, reason="requested", message="the box reboots in two seconds", **answer)

    if open_record is None:
        module.fail_json(msg=f"{params['path']} holds no open reboot to prove", reason="no_record")
    answer["results"] = reboot.judge(open_record["before"], now)
    bad = checks.failed(answer["results"])
    answer["reason"] = bad[0]["reason"] if bad else "proven"
    answer["message"] = "; ".join(item["message"] for item in bad or answer["results"])
    if (params["final"] or not bad) and not module.check_mode:
        write(params["path"], reboot.close(open_record, answer["results"], now, stamp))
    module.exit_json(changed=False, **answer)


if __name__ == "__main__":
    main()
