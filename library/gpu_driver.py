#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: how the NVIDIA driver of a box stands."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_driver
short_description: Say how the NVIDIA driver of a box stands
description:
  - Reads the versions that are installed, loaded and found by the next boot, the flavour of the module, whether a
    reboot is due, and what C(vllm-fleet driver) checks besides. Changes nothing, with and without check mode.
  - What can't be read is null, never a guess.
version_added: "0.2.0"
options:
  version:
    description: Driver version that the box should have.
    type: str
  gpus:
    description: How many GPUs the box should have; what the PCI bus shows when left out.
    type: int
  p2p_module:
    description: Also report what a P2P-patched module depends on.
    type: bool
    default: false
  fail_on:
    description:
      - Names of checks whose C(fail) fails the task; the others are only returned. V(["all"]) takes every one.
    type: list
    elements: str
    default: []
  require:
    description:
      - Names of checks that must have been made and not have failed. Here C(unknown) fails the task too.
    type: list
    elements: str
    default: []
  driver_timeout:
    description: Seconds that the driver has to answer.
    type: float
    default: 20.0
attributes:
  check_mode:
    description: The module never changes anything.
    support: full
  diff_mode:
    description: There is no change to show.
    support: none
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Read how the driver stands
  gpu_driver:
  register: nvidia_driver_state

- name: Prove the driver after a reboot
  gpu_driver:
    version: "580.159.04"
    gpus: 4
    require: [driver_versions, driver_wanted, gpu_count]
"""

RETURN = r"""
installed:
  description: Version of the libraries on disk.
  returned: always
  type: str
  sample: 580.159.04
loaded:
  description: Version of the module in the kernel; null when none is loaded or it can't be read.
  returned: always
  type: str
  sample: 580.159.04
next_boot:
  description: Version of the module that the next boot will find; null when there is none or it can't be told.
  returned: always
  type: str
  sample: 580.159.04
flavour:
  description: V(open) or V(proprietary), of the loaded module, else of the next boot's; null when it can't be told.
  returned: always
  type: str
  sample: open
reboot_required:
  description: True when a reboot is due, false when not, null when that can't be told.
  returned: always
  type: bool
  sample: false
reasons:
  description: Reason codes of a reboot that is due, or of why something can't be told.
  returned: always
  type: list
  elements: str
  sample: [loaded_differs]
reboot_blocked:
  description: Why a reboot would not bring the installed driver up; don't reboot for it while there is one.
  returned: always
  type: list
  elements: str
  sample: [next_boot_module_missing]
running_kernel:
  description: Release of the running kernel.
  returned: always
  type: str
  sample: 6.1.0-57-amd64
next_kernel:
  description: Release of the kernel that boots next; null when the boot loader does not say.
  returned: always
  type: str
  sample: 6.1.0-57-amd64
results:
  description: Results of the checks, each with C(check), C(status), C(reason), C(message) and C(fix).
  returned: always
  type: list
  elements: dict
  sample:
    - {check: gpu_count, status: pass, reason: gpu_count_ok, message: "4 GPUs answer, 4 expected", fix: ""}
status:
  description: The worst status of the results.
  returned: always
  type: str
  sample: pass
reason:
  description: The reason code of the first fail that failed the task.
  returned: when the task fails
  type: str
  sample: loaded_differs
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import checks
from ansible.module_utils.vllm_fleet.driver import codes, state, verify
from ansible.module_utils.vllm_fleet.facts import driver_live


def main():
    module = AnsibleModule(
        argument_spec={
            "version": {"type": "str"},
            "gpus": {"type": "int"},
            "p2p_module": {"type": "bool", "default": False},
            "fail_on": {"type": "list", "elements": "str", "default": []},
            "require": {"type": "list", "elements": "str", "default": []},
            "driver_timeout": {"type": "float", "default": 20.0},
        },
        supports_check_mode=True,
    )
    params = module.params
    known = {code.check for code in codes.CODES.values()} | {"all"}
    unheard_of = sorted({*params["fail_on"], *params["require"]} - known)
    if unheard_of:
        module.fail_json(
            msg=f"fail_on and require name no check: {', '.join(unheard_of)}; known: {', '.join(sorted(known))}",
            reason="unknown_check",
        )
    facts, topology = driver_live.read(params["driver_timeout"])
    results = verify.evaluate(
        facts, topology, version=params["version"], gpus=params["gpus"], p2p_module=params["p2p_module"]
    )
    answer = {"changed": False, **state.assess(facts), "results": results, "status": checks.overall(results)}
    named = [
        item
        for item in results
        if (item["status"] == checks.FAIL and {"all", item["check"]} & {*params["fail_on"], *params["require"]})
        or (item["status"] == checks.UNKNOWN and {"all", item["check"]} & set(params["require"]))
    ]
    if named:
        lines = [f"{item['reason']}: {item['message']}\n  fix: {item['fix']}" for item in named]
        module.fail_json(msg="\n".join(lines), reason=named[0]["reason"], **answer)
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
