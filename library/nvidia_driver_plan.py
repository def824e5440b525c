#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: decide what installing the NVIDIA driver would do, and refuse it before anything changes."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_driver_plan
short_description: Decide what installing the NVIDIA driver would do to a box
description:
  - Chooses the module by the PCI ids of the cards, the packages by source and system, and the headers by the installed
    kernels. Asks apt, on a private copy of its lists, what would be installed, as if the sources and pins of the
    plan were there already; so check mode on a fresh box names real versions.
  - Refuses, with the box untouched, what would end half-way. The reason codes are in docs/drivers.md.
  - It changes nothing, with and without check mode.
version_added: "0.2.0"
options:
  source:
    description: Where the driver comes from.
    type: str
    choices: [distribution, nvidia_repository, run_file]
    required: true
  version:
    description: Exact driver version, such as V(580.159.04); what the source offers when left out.
    type: str
  branch:
    description: Branch of the driver where packages are named by it (Ubuntu); that of O(version) when left out.
    type: int
  flavour:
    description: Kernel module. V(auto) chooses by the generation of the cards.
    type: str
    choices: [auto, open, proprietary]
    default: auto
  modules:
    description: V(dkms) builds the module on the box; V(signed) takes Ubuntu's modules, which Secure Boot accepts.
    type: str
    choices: [dkms, signed]
    default: dkms
  fabric_manager:
    description: V(auto) installs the fabric manager on a box with an NVSwitch.
    type: str
    choices: [auto, "off"]
    default: auto
  packages:
    description: Packages to install instead of those that the source is known to have.
    type: list
    elements: str
    default: []
  repository:
    description: NVIDIA's repository, for O(source=nvidia_repository).
    type: dict
    suboptions:
      uri:
        description: Address of the repository.
        type: str
        required: true
      suite:
        description: Suite; V(/) for a flat repository.
        type: str
        default: /
      components:
        description: Components; empty for a flat repository.
        type: str
        default: ""
      keyring:
        description: File on the box with the repository's key.
        type: path
        required: true
  mirror:
    description: Debian mirror.
    type: str
    default: http://deb.debian.org/debian
  security_mirror:
    description: Debian mirror of security updates.
    type: str
    default: http://deb.debian.org/debian-security
  lists_valid_s:
    description: Seconds for which the box's package lists count as fresh.
    type: int
    default: 86400
attributes:
  check_mode:
    description: The module never changes anything.
    support: full
  diff_mode:
    description: Shows the versions that the packages would change from and to.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Decide what the driver needs
  nvidia_driver_plan:
    source: distribution
    version: "535.309.01"
  register: driver_plan
"""

RETURN = r"""
flavour:
  description: Module that was chosen, V(open) or V(proprietary).
  returned: success
  type: str
  sample: proprietary
version:
  description: Driver version that the box has after the installation.
  returned: success
  type: str
  sample: 535.309.01
install_headers:
  description: Header packages to install, with their versions.
  returned: success
  type: list
  elements: str
  sample: ["linux-headers-amd64=6.1.192-3"]
install:
  description: Driver packages to install, with their versions.
  returned: success
  type: list
  elements: str
  sample: ["nvidia-kernel-dkms=535.309.01-0+deb12u1"]
files:
  description: Files of apt that the source and the pin need, path to text; an empty text means that there is none.
  returned: success
  type: dict
  sample: {"/etc/apt/preferences.d/vllm-fleet-nvidia": ""}
refresh:
  description: Whether the package lists have to be fetched before the installation.
  returned: success
  type: bool
  sample: true
complete:
  description: Whether the packages are all there and nothing has to be installed.
  returned: success
  type: bool
  sample: false
loaded:
  description: Version of the module that is loaded now; null for none.
  returned: success
  type: str
  sample: null
fabric_manager:
  description: Whether the box needs the fabric manager.
  returned: success
  type: bool
  sample: false
warnings_found:
  description: What a person should know, in words.
  returned: success
  type: list
  elements: str
  sample: []
before:
  description: Versions of the packages that would change, before.
  returned: success
  type: dict
  sample: {"libcuda1": "absent"}
after:
  description: Versions of the same packages afterwards.
  returned: success
  type: dict
  sample: {"libcuda1": "535.309.01-0+deb12u1"}
reason:
  description: V(planned) or V(as_wanted), or why the installation is refused.
  returned: always
  type: str
  sample: secure_boot
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet.driver import plan
from ansible.module_utils.vllm_fleet.driver.names import driver_version
from ansible.module_utils.vllm_fleet.driver.sources import RUN_FILE, SOURCE_FILE
from ansible.module_utils.vllm_fleet.errors import FleetError, RefusedError
from ansible.module_utils.vllm_fleet.facts import driver, packages
from ansible.module_utils.vllm_fleet.facts.host import read_text


def stale(valid_s):
    """Return whether the package lists of the box are too old to be believed."""
    age = packages.lists_age()
    return age is None or time.time() - age > valid_s


def make(params, check_mode):
    """Return the plan of the parameters for this box."""
    facts = driver.read()
    facts["packages"] = packages.installed()
    facts["sources"] = packages.sources(without=SOURCE_FILE)
    if facts["packages"] is None:
        raise RefusedError("no_dpkg", "dpkg does not answer: the driver is installed on Debian and Ubuntu only")
    system = packages.os_release()
    chosen = plan.choose(params, facts, system)
    files = chosen["files"]
    differ = [path for path, text in files.items() if (read_text(path) or "") != text]
    refresh = bool(chosen["ask"]) and (bool(differ) or stale(params["lists_valid_s"]))
    keyring = (params["repository"] or {}).get("keyring")
    answer = dict(packages.NOTHING)
    if keyring and not os.path.exists(keyring):
        if not check_mode:
            raise RefusedError("keyring_absent", f"no {keyring}", "set nvidia_driver_keyring and its checksum")
        chosen["warnings"].append(f"{keyring} is not there yet, so apt could not be asked for versions")
    elif chosen["ask"]:
        answer = packages.simulate(chosen["ask"], files, refresh, move=bool(params["version"]))
    by_hand = params["source"] == RUN_FILE
    if by_hand or answer == packages.NOTHING:
        final = plan.judge_headers(params, chosen, answer)
    else:
        final = plan.judge(params, chosen, facts, answer)
    before = {item["name"]: item["version"] for item in facts["packages"]}
    changes = final["installs"]
    return {
        "flavour": chosen["flavour"],
        "version": final["version"] or driver_version(before),
        "install_headers": final["install_headers"],
        "install": final["install"],
        "files": files,
        "refresh": refresh,
        "complete": not chosen["ask"] and not differ and (not by_hand or facts["userland"] == params["version"]),
        "loaded": facts["loaded"]["version"],
        "fabric_manager": facts["nvswitch"] and params["fabric_manager"] == "auto",
        "warnings_found": chosen["warnings"],
        "before": {
            **{name: before.get(name, "absent") for name in changes},
            **{path: present(path) for path in differ},
        },
        "after": {**changes, **{path: "written" if files[path] else "absent" for path in differ}},
    }


def present(path):
    return "as before" if os.path.exists(path) else "absent"


def main():
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "str", "required": True, "choices": ["distribution", "nvidia_repository", "run_file"]},
            "version": {"type": "str"},
            "branch": {"type": "int"},
            "flavour": {"type": "str", "default": "auto", "choices": ["auto", "open", "proprietary"]},
            "modules": {"type": "str", "default": "dkms", "choices": ["dkms", "signed"]},
            "fabric_manager": {"type": "str", "default": "auto", "choices": ["auto", "off"]},
            "packages": {"type": "list", "elements": "str", "default": []},
            "repository": {
                "type": "dict",
                "options": {
                    "uri": {"type": "str", "required": True},
                    "suite": {"type": "str", "default": "/"},
                    "components": {"type": "str", "default": ""},
                    "keyring": {"type": "path", "required": True},
                },
            },
            "mirror": {"type": "str", "default": "http://deb.debian.org/debian"},
            "security_mirror": {"type": "str", "default": "http://deb.debian.org/debian-security"},
            "lists_valid_s": {"type": "int", "default": 86400},
        },
        supports_check_mode=True,
    )
    try:
        answer = make(module.params, module.check_mode)
    except FleetError as error:
        module.fail_json(msg=error.one_line(), reason=error.reason, fix=error.fix)
    module.exit_json(
        changed=False,
        reason="as_wanted" if answer["complete"] else "planned",
        diff={"before": answer["before"], "after": answer["after"]},
        **answer,
    )


if __name__ == "__main__":
    main()
