#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: who holds the accelerators."""

from __future__ import annotations

DOCUMENTATION = r"""
module: device_holders
short_description: Name the processes that hold the accelerators, and wait until none does
description:
  - Looks for open device nodes of NVIDIA and Iluvatar cards. Ends nothing.
  - Fails with pid, name and unit of each process that is left after O(wait_s), as what is running there may be
    somebody's work.
version_added: "0.2.0"
options:
  wait_s:
    description: Seconds for the processes to end by themselves, as those of a lane that was just stopped.
    type: int
    default: 30
  ignore:
    description: Names of processes that may stay, because a reboot ends them, such as V(nvidia-persiste).
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Reads only; in check mode it reports and does not fail.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: See that nobody uses the cards
  device_holders:
    ignore: [nvidia-persiste]
"""

RETURN = r"""
holders:
  description: The processes that are left.
  returned: always
  type: list
  elements: dict
  sample: [{pid: 4242, name: python3, unit: session-3.scope, nodes: [/dev/nvidia0]}]
reason:
  description: V(free) or V(device_held).
  returned: always
  type: str
  sample: free
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet.facts import holders


def main():
    module = AnsibleModule(
        argument_spec={
            "wait_s": {"type": "int", "default": 30},
            "ignore": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    deadline = time.monotonic() + (0 if module.check_mode else module.params["wait_s"])
    while True:
        left = [item for item in holders.read() if item["name"] not in module.params["ignore"]]
        if not left or time.monotonic() >= deadline:
            break
        time.sleep(1)
    if left and not module.check_mode:
        lines = ["pid {pid} {name} of {unit}: {held}".format(held=" ".join(item["nodes"]), **item) for item in left]
        module.fail_json(
            msg="device_held: the cards are held by\n  {}\nFix: end them, or see whose work that is".format(
                "\n  ".join(lines)
            ),
            reason="device_held",
            holders=left,
        )
    module.exit_json(changed=False, holders=left, reason="device_held" if left else "free")


if __name__ == "__main__":
    main()
