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
  - Without an archive only says which of the engines are missing.
version_added: "0.1.0"
options:
  engines:
    description:
      - The engines, with C(id), C(digest) and, to install, C(archive) (path on the box), C(sha256) and
        C(unpacked_bytes).
    type: list
    elements: dict
    required: true
  root:
    description: Directory of the engines.
    type: path
    default: /opt/vllm-fleet/engines
  install:
    description: Install the missing ones; otherwise only look.
    type: bool
    default: true
attributes:
  check_mode:
    description: Says what would be installed.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Which engines are missing
  engine_install:
    engines: [{id: vllm-0.32.0-cpu, digest: 1f2e3d4c5b6a}]
    install: false

- name: Install one
  engine_install:
    engines:
      - id: vllm-0.32.0-cpu
        digest: 1f2e3d4c5b6a
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
  description: V(installed), V(missing) or V(as_wanted).
  returned: always
  type: str
  sample: as_wanted
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import files
from ansible.module_utils.vllm_fleet.errors import FleetError


def manifest_of(path):
    try:
        return files.read_json(os.path.join(path, "manifest.json"), "manifest")
    except FleetError:
        return None


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        for block in iter(lambda: handle.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def install(module, root, entry):
    """Unpack one archive; the engine appears by a rename or not at all."""
    archive, target = entry["archive"], os.path.join(root, entry["id"])
    found = sha256_of(archive)
    if found != entry["sha256"]:
        os.unlink(archive)
        module.fail_json(
            msg="archive {} is damaged: sha256 {}, expected {}. The copy was deleted; run again.".format(
                archive, found, entry["sha256"]
            ),
            reason="archive_damaged",
        )
    free = shutil.disk_usage(root).free
    needed = int(entry.get("unpacked_bytes") or 0)
    if free < needed * 1.05:
        module.fail_json(
            msg="engine {} needs {:.1f} GiB in {}, {:.1f} GiB are free. Free some space or prune old engines.".format(
                entry["id"], needed / 2**30, root, free / 2**30
            ),
            reason="disk_too_small",
        )
    partial = tempfile.mkdtemp(prefix=".partial-", dir=root)
    try:
        done = subprocess.run(
            ["tar", "--extract", "--use-compress-program=zstd -T0 -q", "--file", archive, "--directory", partial],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            module.fail_json(
                msg=f"archive {archive} does not unpack: {done.stderr.strip()[-400:]}", reason="unpack_failed"
            )
        manifest = manifest_of(partial)
        if not manifest or manifest["digest"] != entry["digest"] or manifest["id"] != entry["id"]:
            module.fail_json(
                msg="archive {} holds {}, expected engine {}".format(archive, manifest, entry["id"]),
                reason="wrong_archive",
            )
        if not os.access(manifest["interpreter"], os.X_OK):
            module.fail_json(
                msg="engine {} was built for {}, which is not on this box; the role toolchain installs it".format(
                    entry["id"], manifest["interpreter"]
                ),
                reason="no_python",
            )
        os.chmod(partial, 0o755)
        files.fsync_directory(partial)
        os.rename(partial, target)
        files.fsync_directory(root)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for path in (archive, archive + ".json"):  # the builder has the description beside its archive
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return manifest


def main():
    module = AnsibleModule(
        argument_spec={
            "engines": {"type": "list", "elements": "dict", "required": True},
            "root": {"type": "path", "default": "/opt/vllm-fleet/engines"},
            "install": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    root = module.params["root"]
    before, after, missing = {}, {}, []
    lock = None
    if module.params["install"] and not module.check_mode:
        os.makedirs(root, exist_ok=True)
        lock = open(os.path.join(root, ".lock"), "w")  # noqa: SIM115 - held until the module ends
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in (name for name in os.listdir(root) if name.startswith(".partial-")):
            shutil.rmtree(os.path.join(root, leftover), ignore_errors=True)
    for entry in module.params["engines"]:
        name = entry["id"]
        manifest = manifest_of(os.path.join(root, name))
        before[name] = manifest["version"] if manifest else "absent"
        if manifest and entry.get("digest") and manifest["digest"] != entry["digest"]:
            module.fail_json(
                msg="engine {} is installed, but from other inputs (digest {}, the catalog gives {}). An installed "
                "engine is never edited: give the catalog entry a new id.".format(
                    name, manifest["digest"], entry["digest"]
                ),
                reason="engine_differs",
            )
        if not manifest:
            missing.append(name)
            if entry.get("archive") and module.params["install"] and not module.check_mode:
                manifest = install(module, root, entry)
        after[name] = manifest["version"] if manifest else "absent"
    if lock:
        lock.close()
    changed = before != after or bool(missing and module.params["install"] and module.check_mode)
    module.exit_json(
        changed=changed,
        missing=missing,
        before=before,
        after=after,
        reason="installed" if before != after else ("missing" if missing else "as_wanted"),
        diff={"before": before, "after": after},
    )


if __name__ == "__main__":
    main()
