#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: bring together, on the controller, everything that an engine is built from."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_wheelhouse
short_description: Collect an engine's wheels on the controller
description:
  - Downloads every wheel of a hash-locked requirements file into one directory and packs it, with the lock and the
    C(uv) program, as one tar file for the builder. Runs on the controller; the boxes need no index.
  - A wheel that is there already with the right hash is not downloaded again.
version_added: "0.1.0"
options:
  lock:
    description: Requirements file with hashes; its first-level package is the engine.
    type: path
    required: true
  cache:
    description: Directory that keeps the wheels and the packed file.
    type: path
    required: true
  digest:
    description: Name of the packed file, from the engine's inputs.
    type: str
    required: true
  python:
    description: Python version of the boxes, such as V(3.11).
    type: str
    required: true
  glibc:
    description: Minor version of the boxes' glibc; 31 for Ubuntu 20.04, 36 for Debian 12, 39 for Ubuntu 24.04.
    type: int
    default: 36
  find_links:
    description: Further directories or pages that hold wheels.
    type: list
    elements: str
    default: []
  disk_gib:
    description: GiB that the finished engine takes; half of it must be free in O(cache). 0 asks for none.
    type: int
    default: 0
attributes:
  check_mode:
    description: Collects nothing in check mode.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Collect the wheels
  engine_wheelhouse:
    lock: catalog/engines/vllm-0.32.0-cpu.lock
    cache: ~/.cache/vllm-fleet
    digest: 1f2e3d4c5b6a
    python: "3.11"
  delegate_to: localhost
"""

RETURN = r"""
path:
  description: The packed file.
  returned: always
  type: str
  sample: /root/.cache/vllm-fleet/wheelhouse/1f2e3d4c5b6a.tar
bytes:
  description: Its size.
  returned: always
  type: int
  sample: 912345678
reason:
  description: V(collected) or V(present).
  returned: always
  type: str
  sample: present
"""

import glob
import os
import shutil
import sys

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import engines, locks, tars, wheel_download
from ansible.module_utils.vllm_fleet.errors import FleetError


def find_uv():
    beside = os.path.join(os.path.dirname(sys.executable), "uv")
    return beside if os.access(beside, os.X_OK) else shutil.which("uv")


def collect(params, packed, uv):
    """Download what is missing and pack it; a folder of its own keeps what an interrupted run has fetched."""
    own = os.path.join(params["cache"], "wheelhouse", params["digest"] + ".d")
    os.makedirs(own, exist_ok=True)
    if params["disk_gib"]:
        engines.check_room(params["disk_gib"] << 29, shutil.disk_usage(own).free, params["digest"], params["cache"])
    links = [os.path.join(params["cache"], "wheels"), *params["find_links"]]
    wheel_download.download(params["lock"], own, params["python"], params["glibc"], links)
    with tars.atomic(packed) as archive:
        for wheel in sorted(glob.glob(os.path.join(own, "*.whl"))):
            archive.add(wheel, os.path.join("wheels", os.path.basename(wheel)))
        archive.add(params["lock"], "requirements.lock")
        archive.add(os.path.realpath(uv), "uv")
        tars.add_marker(archive, ".wheels")
    shutil.rmtree(own)


def main():
    module = AnsibleModule(
        argument_spec={
            "lock": {"type": "path", "required": True},
            "cache": {"type": "path", "required": True},
            "digest": {"type": "str", "required": True},
            "python": {"type": "str", "required": True},
            "glibc": {"type": "int", "default": 36},
            "find_links": {"type": "list", "elements": "str", "default": []},
            "disk_gib": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    params = module.params
    folder = os.path.join(params["cache"], "wheelhouse")
    packed = os.path.join(folder, params["digest"] + ".tar")
    there = os.path.exists(packed)
    if not there and module.check_mode:
        module.exit_json(changed=True, path=packed, bytes=0, reason="collected")
    if not there:
        uv = find_uv()
        if not uv:
            module.fail_json(msg=f"uv is neither beside {sys.executable} nor on PATH; run make env", reason="no_uv")
        os.makedirs(folder, exist_ok=True)
        try:
            # Two plays of one user share the cache; the second finds what the first collected.
            with locks.hold(os.path.join(folder, ".lock"), "collecting " + params["digest"], 3600):
                there = os.path.exists(packed)
                if not there:
                    collect(params, packed, uv)
        except FleetError as error:
            module.fail_json(msg=error.one_line(), reason=error.reason)
    reason = "present" if there else "collected"
    module.exit_json(changed=not there, path=packed, bytes=os.stat(packed).st_size, reason=reason)


if __name__ == "__main__":
    main()
