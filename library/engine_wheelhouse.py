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

import fcntl
import glob
import os
import shutil
import subprocess
import sys
import tarfile

from ansible.module_utils.basic import AnsibleModule


def platforms(glibc):
    """Return the platform tags of wheels that run on a glibc 2.``glibc`` and later, newest first."""
    return [f"manylinux_2_{minor}_x86_64" for minor in range(glibc, 4, -1)] + [
        "manylinux2014_x86_64",
        "manylinux2010_x86_64",
        "manylinux1_x86_64",
    ]


def find_uv():
    beside = os.path.join(os.path.dirname(sys.executable), "uv")
    return beside if os.access(beside, os.X_OK) else shutil.which("uv")


def download(module, lock, wheels, python, glibc, find_links):
    argv = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--require-hashes",
    ]
    argv += [
        "--only-binary",
        ":all:",
        "--implementation",
        "cp",
        "--python-version",
        python,
        "--abi",
        "cp" + python.replace(".", ""),
    ]
    argv += ["--abi", "abi3", "--abi", "none"]
    for platform in platforms(glibc):
        argv += ["--platform", platform]
    for link in [wheels, *find_links]:
        argv += ["--find-links", link]
    argv += ["--dest", wheels, "--requirement", lock]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        text = "\n".join(lines[-6:])
        network = "Temporary failure in name resolution" in done.stderr or "Connection" in done.stderr
        module.fail_json(
            msg="the wheels of {} could not be collected: {}\n{}\nWheels that are there are kept; run again.".format(
                os.path.basename(lock), "no package index answers" if network else "pip says", text
            ),
            reason="no_index" if network else "download_failed",
        )


def main():
    module = AnsibleModule(
        argument_spec={
            "lock": {"type": "path", "required": True},
            "cache": {"type": "path", "required": True},
            "digest": {"type": "str", "required": True},
            "python": {"type": "str", "required": True},
            "glibc": {"type": "int", "default": 36},
            "find_links": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    params = module.params
    wheels = os.path.join(params["cache"], "wheels")
    packed = os.path.join(params["cache"], "wheelhouse", params["digest"] + ".tar")
    if os.path.exists(packed):
        module.exit_json(changed=False, path=packed, bytes=os.stat(packed).st_size, reason="present")
    if module.check_mode:
        module.exit_json(changed=True, path=packed, bytes=0, reason="collected")
    uv = find_uv()
    if not uv:
        module.fail_json(msg=f"uv is neither beside {sys.executable} nor on PATH; run make env", reason="no_uv")
    os.makedirs(wheels, exist_ok=True)
    os.makedirs(os.path.dirname(packed), exist_ok=True)
    # Two plays of one user share the cache; the second finds what the first collected. The lock ends with the process.
    lock = os.open(os.path.join(params["cache"], "wheelhouse", ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if os.path.exists(packed):
        module.exit_json(changed=False, path=packed, bytes=os.stat(packed).st_size, reason="present")
    own = os.path.join(params["cache"], "wheelhouse", params["digest"] + ".d")
    os.makedirs(own, exist_ok=True)
    download(module, params["lock"], own, params["python"], params["glibc"], [wheels, *params["find_links"]])
    partial = packed + ".part"
    with tarfile.open(partial, "w") as archive:
        for wheel in sorted(glob.glob(os.path.join(own, "*.whl"))):
            archive.add(wheel, os.path.join("wheels", os.path.basename(wheel)))
        archive.add(params["lock"], "requirements.lock")
        archive.add(os.path.realpath(uv), "uv")
    os.replace(partial, packed)
    shutil.rmtree(own)
    module.exit_json(changed=True, path=packed, bytes=os.stat(packed).st_size, reason="collected")


if __name__ == "__main__":
    main()
