#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: build an engine once, on one box, into an archive for all of them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_build
short_description: Build an engine into an archive
description:
  - Makes a venv from hash-locked wheels without an index; on the route C(git) adds the source tree, its build products
    and a metadata-only editable install; asserts the versions that the catalog names, records the hashes of the
    package's files, and packs everything with a manifest.
  - Runs on the builder, once for a fleet. M(engine_install) unpacks the archive on each box. A run that was cut off
    goes on after the last step that it had finished; a second run on the same builder waits for the first.
version_added: "0.1.0"
options:
  engine:
    description: The engine, as the filter P(vllm_fleet_engine_inputs#filter) gives it.
    type: dict
    required: true
  workdir:
    description: Directory with C(wheels/), C(requirements.lock), C(uv) and, for C(git), C(source/); removed when the
      archive is made. C(progress) in it says what is being done.
    type: path
    required: true
  dest:
    description: Archive to write.
    type: path
    required: true
  keep:
    description: Where the controller keeps the archive; compared with the builder's after its way.
    type: path
    required: true
  signing_key:
    description:
      - File on the controller of the key that signs the kept archive's description, C(KEEP.json.sig); empty for none.
        It is tried before the build begins.
    type: path
    default: ""
  timeout_s:
    description: Seconds that the build may take, the wait for another build on this machine included.
    type: int
    default: 3600
attributes:
  action:
    description: Runs the build as a job of the builder and shows its steps; a dropped connection does not end it.
    support: full
  check_mode:
    description: Builds nothing in check mode.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Build the engine
  engine_build:
    engine: "{{ wanted }}"
    workdir: /opt/vllm-fleet/build/vllm-0.32.0-cpu-1f2e3d4c5b6a7089
    dest: /opt/vllm-fleet/build/vllm-0.32.0-cpu-1f2e3d4c5b6a7089.tar.zst
    keep: ~/.cache/vllm-fleet/engines/vllm-0.32.0-cpu-1f2e3d4c5b6a7089.tar.zst
"""

RETURN = r"""
archive:
  description: Path, size and hash of the archive.
  returned: success
  type: dict
  sample: {path: /opt/vllm-fleet/build/vllm-0.32.0-cpu.tar.zst, bytes: 612345678, sha256: 3f1c0f3a}
manifest:
  description: What was built from what, with which tools, where and when.
  returned: success
  type: dict
  sample: {id: vllm-0.32.0-cpu, version: 0.32.0+cpu, digest: 1f2e3d4c5b6a7089, python: 3.11.2}
reason:
  description: V(built) or V(present).
  returned: success
  type: str
  sample: built
"""

import os
import shutil

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import engines, files, locks
from ansible.module_utils.vllm_fleet.engine_steps import Build
from ansible.module_utils.vllm_fleet.errors import FleetError


def described(dest, digest):
    """Return the description of the archive that is there from the same inputs, or None."""
    try:
        sidecar = files.read_json(dest + ".json", "archive")
    except FleetError:
        return None
    return sidecar if os.path.exists(dest) and sidecar["manifest"]["digest"] == digest else None


def build(module):
    """Build unless another run has done so meanwhile; return the description and what was done."""
    params = module.params
    engine, workdir, dest = params["engine"], params["workdir"], params["dest"]
    lock = os.path.join(os.path.dirname(dest), ".build.lock")
    with locks.hold(lock, "building " + engine["id"], params["timeout_s"], remove=True):
        sidecar = described(dest, engine["digest"])
        if sidecar:
            return sidecar, "present"
        if not os.access(engine["interpreter"], os.X_OK):
            module.fail_json(
                msg="the builder has no {}; the role toolchain installs it (toolchain_python), or name another "
                "(engine_interpreters)".format(engine["interpreter"]),
                reason="no_python",
            )
        if not os.path.isdir(os.path.join(workdir, "stage")):
            needed = engine["install"]["disk_gib"] << 30
            engines.check_room(needed, shutil.disk_usage(workdir).free, "building " + engine["id"], workdir)
        return Build(engine, workdir, dest).run(), "built"


def main():
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "dict", "required": True},
            "workdir": {"type": "path", "required": True},
            "dest": {"type": "path", "required": True},
            "keep": {"type": "path", "required": True},
            "signing_key": {"type": "path", "default": ""},
            "timeout_s": {"type": "int", "default": 3600},
        },
        supports_check_mode=True,
    )
    dest = module.params["dest"]
    sidecar, reason = described(dest, module.params["engine"]["digest"]), "present"
    if not sidecar:
        if module.check_mode:
            module.exit_json(changed=True, reason="built")
        try:
            sidecar, reason = build(module)
        except FleetError as error:
            module.fail_json(msg=error.message + (f" Fix: {error.fix}" if error.fix else ""), reason=error.reason)
    module.exit_json(
        changed=reason == "built",
        archive={"path": dest, "bytes": sidecar["bytes"], "sha256": sidecar["sha256"]},
        manifest=sidecar["manifest"],
        reason=reason,
    )


if __name__ == "__main__":
    main()
