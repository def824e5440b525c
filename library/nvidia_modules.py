#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: the driver's module for every installed kernel, and nouveau kept out, in that order."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_modules
short_description: Have the NVIDIA module for every installed kernel, then keep nouveau out
description:
  - Builds with DKMS what a kernel lacks, and fails with the box's own nouveau still in place when a kernel stays
    without a module. A box that could come up with no driver at all is never made.
  - Only then writes the file that blocks nouveau, and rebuilds each initramfs that is older than that file. Early boot
    would load nouveau out of an old one. An interrupted run is taken up where it ended.
version_added: "0.2.0"
options:
  version:
    description: Driver version that every module must have; any version when left out.
    type: str
  path:
    description: File that blocks nouveau.
    type: path
    default: /etc/modprobe.d/vllm-fleet-nvidia.conf
  text:
    description: Content of the file.
    type: str
    required: true
  build_timeout:
    description: Seconds for one kernel's build; it takes some minutes.
    type: int
    default: 1800
attributes:
  check_mode:
    description: Can say what would change without changing it.
    support: full
  diff_mode:
    description: Shows the modules, the file and the initramfs that would change.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Have the module for every kernel, then keep nouveau out
  nvidia_modules:
    version: "535.309.01"
    text: |
      blacklist nouveau
      options nouveau modeset=0
"""

RETURN = r"""
kernels:
  description: Version of the module by kernel; null for none.
  returned: always
  type: dict
  sample: {"6.1.0-57-amd64": "535.309.01"}
before:
  description: State of what was changed, before.
  returned: always
  type: dict
  sample: {"/etc/modprobe.d/vllm-fleet-nvidia.conf": "absent"}
after:
  description: State of the same afterwards.
  returned: always
  type: dict
  sample: {"/boot/initrd.img-6.1.0-57-amd64": "rebuilt"}
reason:
  description: V(built) or V(blocked) when something was changed, V(as_wanted) otherwise.
  returned: always
  type: str
  sample: as_wanted
"""

import glob
import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet.facts import driver
from ansible.module_utils.vllm_fleet.facts.host import read_text, run
from ansible.module_utils.vllm_fleet.files import write_atomic


def lacking(version):
    """Return the installed kernels whose module is missing or of another version, with what they have."""
    found = {release: driver.module_on_disk(release) for release in driver.kernel_releases()}
    have = {release: (item or {}).get("version") for release, item in found.items()}
    wrong = [release for release, item in have.items() if item is None or (version and item != version)]
    return have, wrong


def last_errors():
    """Return the end of the newest build log of DKMS."""
    logs = sorted(glob.glob("/var/lib/dkms/nvidia*/*/build/make.log"), key=os.path.getmtime)
    return "\n".join((read_text(logs[-1]) or "").splitlines()[-12:]) if logs else ""


def build(module, wrong):
    """Build the module for each kernel; return what DKMS said where it failed."""
    said = []
    for release in wrong:
        status, output = run(["dkms", "autoinstall", "-k", release], timeout=module.params["build_timeout"])
        if status != 0:
            said.append(f"{release}: {output.strip()[-400:]}")
    return said


def stale_initramfs(path, rewritten):
    """Return the initramfs images that were made before the file, or all of them when it is about to be written."""
    images = [f"/boot/initrd.img-{release}" for release in driver.kernel_releases()]
    images = [image for image in images if os.path.exists(image)]
    if rewritten:
        return images
    return [image for image in images if os.path.getmtime(image) < os.path.getmtime(path)]


def main():
    module = AnsibleModule(
        argument_spec={
            "version": {"type": "str"},
            "path": {"type": "path", "default": "/etc/modprobe.d/vllm-fleet-nvidia.conf"},
            "text": {"type": "str", "required": True},
            "build_timeout": {"type": "int", "default": 1800},
        },
        supports_check_mode=True,
    )
    params, before, after = module.params, {}, {}
    have, wrong = lacking(params["version"])
    for release in wrong:
        before[f"module of {release}"], after[f"module of {release}"] = have[release] or "absent", "built"
    if wrong and not module.check_mode:
        said = build(module, wrong)
        have, still = lacking(params["version"])
        if still:
            wanted = params["version"] or "any version"
            found = ", ".join(f"{release} has {have[release] or 'none'}" for release in still)
            module.fail_json(
                msg=(
                    f"dkms_incomplete: no module of {wanted} for every installed kernel: {found}. Nothing of nouveau "
                    f"was touched. {' '.join(said)}\n{last_errors()}\nFix: install the headers of that kernel "
                    "(linux-headers-KERNEL), or remove a kernel that is no longer used, and run again."
                ),
                reason="dkms_incomplete", kernels=have, before=before, after={},
            )  # fmt: skip
    path, text = params["path"], params["text"]
    old = read_text(path)
    if old != text:
        before[path], after[path] = old or "absent", text
        if not module.check_mode:
            write_atomic(path, text.encode(), mode=0o644, uid=0, gid=0)
    for image in stale_initramfs(path, old != text):
        before[image], after[image] = "older than the file", "rebuilt"
        if module.check_mode:
            continue
        release = image[len("/boot/initrd.img-") :]
        status, output = run(["update-initramfs", "-u", "-k", release], timeout=600)
        if status != 0:
            module.fail_json(
                msg=f"initramfs_failed: {image} could not be rebuilt: {output.strip()[-400:]}. Fix: update-initramfs "
                f"-u -k {release}; until then early boot may load nouveau.",
                reason="initramfs_failed", kernels=have, before=before, after=after,
            )  # fmt: skip
    module.exit_json(
        changed=bool(after),
        kernels=have,
        before=before,
        after=after,
        reason="built" if wrong else "blocked" if after else "as_wanted",
        diff={"before": before, "after": after},
    )


if __name__ == "__main__":
    main()
