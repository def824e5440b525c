#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: how the CoreX driver of a box stands."""

from __future__ import annotations

DOCUMENTATION = r"""
module: corex_driver
short_description: Say how the CoreX (Iluvatar) driver of a box stands
description:
  - Reads what the vendor's installer needs and what it has left, and judges both. Installs nothing.
  - With O(installed_sha256) it records that an installer has run to its end for the running kernel.
version_added: "0.2.0"
options:
  sha256:
    description: SHA-256 of the installer that the box should have run; empty to verify only.
    type: str
    default: ""
  installed_sha256:
    description: SHA-256 of the installer that has just run to its end.
    type: str
    default: ""
  gcc:
    description: Major versions of gcc to accept instead of those that the vendor names for the kernel.
    type: list
    elements: int
    default: []
  cards:
    description: How many cards the box should have. Left out, those that the PCI bus shows.
    type: int
  sdk:
    description: Version of the SDK that will be used. Left out, the installed one.
    type: str
  compatible:
    description:
      - Driver versions that are known to work with an SDK, by its version. An SDK without an entry is judged by the
        major version.
    type: dict
    default: {}
  judge:
    description:
      - V(install) fails when an installation is needed and can't be made. V(driver) fails when the driver does not
        stand, except while a reboot is due, whose own proof follows.
    type: str
    choices: [install, driver, nothing]
    default: nothing
  driver_timeout:
    description: Seconds that the driver has to answer.
    type: float
    default: 20.0
attributes:
  check_mode:
    description: Reads only, except for the record.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Prove the driver
  corex_driver:
    cards: 4
    sdk: 3.2.3
    judge: driver
"""

RETURN = r"""
needed:
  description: Whether the installer has to run.
  returned: always
  type: bool
  sample: false
driver:
  description: Driver version as the vendor's tool says it; null when it does not answer.
  returned: always
  type: str
  sample: 3.2.1
installed:
  description: Version, or checksum of the sources, of the module on disk; null without one.
  returned: always
  type: str
  sample: 4.3.000
loaded:
  description: The same of the loaded module.
  returned: always
  type: str
  sample: 4.3.000
reboot_required:
  description: True when another module is loaded than is installed; null when that can't be told.
  returned: always
  type: bool
  sample: false
reasons:
  description: Why a reboot is needed, or can't be told.
  returned: always
  type: list
  elements: str
  sample: []
results:
  description: Check results, of what O(judge) asks for; of the driver otherwise.
  returned: always
  type: list
  elements: dict
  sample: [{check: module, status: pass, reason: module_loaded, message: "iluvatar 4.3.000 for kernel 6.1.0", fix: ""}]
reason:
  description: The first fail's reason code; V(as_wanted) without one.
  returned: always
  type: str
  sample: as_wanted
"""

import json
import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import checks, corex_driver, files
from ansible.module_utils.vllm_fleet.facts import corex_live


def main():
    module = AnsibleModule(
        argument_spec={
            "sha256": {"type": "str", "default": ""},
            "installed_sha256": {"type": "str", "default": ""},
            "gcc": {"type": "list", "elements": "int", "default": []},
            "cards": {"type": "int"},
            "sdk": {"type": "str"},
            "compatible": {"type": "dict", "default": {}},
            "judge": {"type": "str", "choices": ["install", "driver", "nothing"], "default": "nothing"},
            "driver_timeout": {"type": "float", "default": 20.0},
        },
        supports_check_mode=True,
    )
    params = module.params
    facts = corex_live.read(params["driver_timeout"])
    changed = False
    if params["installed_sha256"] and not module.check_mode:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        made = corex_driver.record(params["installed_sha256"], facts["kernel"], stamp)
        os.makedirs(os.path.dirname(corex_live.RECORD), mode=0o755, exist_ok=True)
        changed = files.write_atomic(corex_live.RECORD, (json.dumps(made, sort_keys=True) + "\n").encode(), 0o644)
        facts["record"] = made
    needed = corex_driver.needed(facts, params["sha256"])
    if params["judge"] == "install":
        results = corex_driver.before_install(facts, params["gcc"]) if needed else []
    else:
        results = corex_driver.verify(facts, params["cards"], params["sdk"], params["compatible"])
    due, reasons = corex_driver.reboot(facts)
    bad = checks.failed(results)
    answer = {
        "changed": changed,
        "needed": needed,
        "driver": facts["driver"],
        "installed": facts["module"]["installed"],
        "loaded": facts["module"]["loaded"],
        "reboot_required": due,
        "reasons": reasons,
        "results": results,
        "reason": bad[0]["reason"] if bad else "as_wanted",
    }
    if bad and params["judge"] != "nothing" and not (params["judge"] == "driver" and due):
        lines = ["{reason}: {message}{dot} Fix: {fix}".format(dot=".", **item) for item in bad]
        module.fail_json(msg="\n".join(lines), **answer)
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
