#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: read and write where a box stands in a rollout."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rollout_state
short_description: Read and write where a box stands in a rollout
description:
  - Keeps one small file on the box with the phase, its time and its reason. A play writes a phase before it enters it,
    so that a rerun knows what an interrupted one left behind.
  - Without O(phase) it only reads.
version_added: "0.1.0"
options:
  phase:
    description:
      - Phase that the box enters, such as V(leaving). V(done) and V(rolled_back) end a rollout; after any other one the
        box counts as unfinished.
    type: str
  reason:
    description: Why, as a reason code.
    type: str
    default: ""
  by:
    description: What does the rollout, such as V(reconfigure).
    type: str
    default: reconfigure
  lanes:
    description: Releases that the rollout moves each lane between, by lane, C(from) and C(to). Left out, they stay.
    type: dict
  path:
    description: The file.
    type: path
    default: /var/lib/vllm-fleet/rollout.json
attributes:
  check_mode:
    description: Can say what would be written without writing it.
    support: full
  diff_mode:
    description: Shows the record before and after.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Say that the box is about to leave rotation
  rollout_state:
    phase: leaving
    reason: release_changed
    lanes: {main: {from: 0f11aa22bb33, to: 8c0e1f2ab34d}}

- name: Where does the box stand
  rollout_state:
  register: stand
"""

RETURN = r"""
before:
  description: The record before; empty when there was none.
  returned: always
  type: dict
  sample: {}
after:
  description: The record now.
  returned: always
  type: dict
  sample:
    {schema: 1, phase: leaving, since: "2026-01-31T03:00:00Z", reason: release_changed, by: reconfigure, lanes: {}}
unfinished:
  description: Whether a rollout was begun and not ended before this call.
  returned: always
  type: bool
reason:
  description: V(recorded), V(as_wanted) or V(read); V(unreadable_record) on failure.
  returned: always
  type: str
  sample: recorded
"""

import json
import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import files, rollout
from ansible.module_utils.vllm_fleet.errors import FleetError


def main():
    module = AnsibleModule(
        argument_spec={
            "phase": {"type": "str"},
            "reason": {"type": "str", "default": ""},
            "by": {"type": "str", "default": "reconfigure"},
            "lanes": {"type": "dict"},
            "path": {"type": "path", "default": rollout.PATH},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        before = files.read_json(params["path"], "rollout state") if os.path.exists(params["path"]) else None
        if before is not None and not isinstance(before, dict):
            raise FleetError("unreadable_record", f"{params['path']} holds no record", "look at it, then remove it")
        after = before
        if params["phase"]:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            after = rollout.advance(before, params["phase"], params["reason"], params["by"], now, params["lanes"])
    except FleetError as error:
        module.fail_json(msg=error.one_line(), reason=error.reason)
    changed = after != before
    if changed and not module.check_mode:
        os.makedirs(os.path.dirname(params["path"]), mode=0o755, exist_ok=True)
        files.write_atomic(params["path"], (json.dumps(after, indent=1, sort_keys=True) + "\n").encode(), 0o644)
    module.exit_json(
        changed=changed,
        before=before or {},
        after=after or {},
        unfinished=rollout.unfinished(before),
        reason="recorded" if changed else "as_wanted" if params["phase"] else "read",
        diff={"before": before or {}, "after": after or {}},
    )


if __name__ == "__main__":
    main()
