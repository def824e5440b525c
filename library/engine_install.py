#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: unpack a verified engine archive on a box."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_install
short_description: Install engines on a box from verified archives
description:
  - An engine is complete or absent. The archive's hash is checked, it is unpacked beside the other engines, its
    manifest is compared, and then one rename makes it appear. An installed engine is never edited.
  - Without an archive only says which of the engines are missing. A vendor's engine is compared with the versions that
    the catalog names, and never touched.
  - Old engines beyond O(keep) are pruned, never one that a lane runs, would start, or would go back to.
version_added: "0.1.0"
options:
  engines:
    description:
      - The engines, as the filter P(vllm_fleet_engine_inputs#filter) gives them, with at least C(id) and C(digest);
        and, to install, C(archive) (path on the box), C(sha256) and C(unpacked_bytes).
    type: list
    elements: dict
    required: true
  root:
    description: Directory of the engines.
    type: path
    default: /opt/vllm-fleet/engines
  install:
    description: Install the missing ones; otherwise only look, and prune.
    type: bool
    default: true
  keep:
    description: Engines to keep on the box; 0 keeps all.
    type: int
    default: 0
  lock_wait:
    description: Seconds to wait for another run that changes the engines of this box.
    type: int
    default: 120
attributes:
  check_mode:
    description: Says what would be installed and pruned.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Which engines are missing
  engine_install:
    engines: [{id: vllm-0.32.0-cpu, digest: 1f2e3d4c5b6a7089}]
    install: false
    keep: 3

- name: Install one
  engine_install:
    engines:
      - id: vllm-0.32.0-cpu
        digest: 1f2e3d4c5b6a7089
        archive: /opt/vllm-fleet/build/vllm-0.32.0-cpu.tar.zst
        sha256: 3f1c0f3a
"""

RETURN = r"""
missing:
  description: Ids of the engines that are (in check mode or before the installation were) not on the box.
  returned: always
  type: list
  elements: str
  sample: [vllm-0.32.0-cpu]
pruned:
  description: Ids of the engines that were, or in check mode would be, removed.
  returned: always
  type: list
  elements: str
  sample: [vllm-0.31.0-cpu]
before:
  description: Version of each engine before, V(absent) when there was none.
  returned: always
  type: dict
  sample: {vllm-0.32.0-cpu: absent}
after:
  description: Version of each engine afterwards.
  returned: always
  type: dict
  sample: {vllm-0.32.0-cpu: 0.32.0+cpu}
reason:
  description: V(installed), V(missing), V(pruned) or V(as_wanted).
  returned: always
  type: str
  sample: as_wanted
"""

import contextlib
import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import engine_store, locks
from ansible.module_utils.vllm_fleet.errors import FleetError


def work(module, root):
    """Look, install and prune; return the result."""
    params = module.params
    writes = not module.check_mode
    before, after, missing = {}, {}, []
    with contextlib.ExitStack() as stack:
        if params["install"] and writes:
            os.makedirs(root, exist_ok=True)
            names = ", ".join(entry["id"] for entry in params["engines"])
            stack.enter_context(locks.hold(os.path.join(root, ".lock"), "installing " + names, params["lock_wait"]))
            engine_store.clear_leftovers(root)
        for entry in params["engines"]:
            name, version = entry["id"], engine_store.look(root, entry)
            before[name] = version or "absent"
            if not version:
                missing.append(name)
                if entry.get("archive") and params["install"] and writes:
                    version = engine_store.install(root, entry)
            elif entry.get("archive") and params["install"] and writes:
                engine_store.forget_archive(entry["archive"])  # another play was faster
            after[name] = version or "absent"
    pruned = []
    if params["keep"]:
        pruned = engine_store.prunable(root, list(before), params["keep"])
        if pruned and writes:
            with locks.hold(os.path.join(root, ".lock"), "pruning " + ", ".join(pruned), params["lock_wait"]):
                for name in pruned:
                    engine_store.remove(root, name)
    reason = "as_wanted"
    if before != after:
        reason = "installed"
    elif missing:
        reason = "missing"
    elif pruned:
        reason = "pruned"
    return {
        "changed": before != after or bool(pruned) or bool(missing and params["install"] and module.check_mode),
        "missing": missing,
        "pruned": pruned,
        "before": before,
        "after": after,
        "reason": reason,
        "diff": {
            "before": {**before, **dict.fromkeys(pruned, "installed")},
            "after": {**after, **dict.fromkeys(pruned, "pruned")},
        },
    }


def main():
    module = AnsibleModule(
        argument_spec={
            "engines": {"type": "list", "elements": "dict", "required": True},
            "root": {"type": "path", "default": "/opt/vllm-fleet/engines"},
            "install": {"type": "bool", "default": True},
            "keep": {"type": "int", "default": 0},
            "lock_wait": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    try:
        result = work(module, module.params["root"])
    except FleetError as error:
        module.fail_json(msg=error.message + (f". Fix: {error.fix}" if error.fix else ""), reason=error.reason)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
