#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: everything for a site without internet in one directory."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_bundle
short_description: Bundle engines, this project and its tools for a site without internet
description:
  - Fills a directory that has the layout of the controller's cache, so that the playbooks run from it when
    C(engine_cache) names it. An engine that was built is taken as its archive, with its signature if it has one; any
    other as the parts that it is built from. C(SHA256SUMS) covers every file; C(sha256sum -c --strict SHA256SUMS)
    verifies the directory.
  - A file that is there already is not copied again. Files of an earlier bundle are not removed.
version_added: "0.1.0"
options:
  dest:
    description: Directory to fill.
    type: path
    required: true
  cache:
    description: The controller's cache, in which the archives or the collected parts lie.
    type: path
    required: true
  engines:
    description: The engines, as the filter P(vllm_fleet_engine_inputs#filter) gives them.
    type: list
    elements: dict
    required: true
  project:
    description: Checkout of this project; its tracked files are packed.
    type: path
    required: true
  controller:
    description: Whether to add the wheels of the project's C(requirements.lock).
    type: bool
    default: true
attributes:
  check_mode:
    description: Says which files would be added.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Bundle
  engine_bundle:
    dest: /srv/bundle
    cache: ~/.cache/vllm-fleet
    engines: "{{ wanted }}"
    project: "{{ playbook_dir }}/.."
  delegate_to: localhost
"""

RETURN = r"""
path:
  description: The directory.
  returned: always
  type: str
  sample: /srv/bundle
added:
  description: Files that were, or in check mode would be, added.
  returned: always
  type: list
  elements: str
  sample: [engines/vllm-0.32.0-cpu-1f2e3d4c5b6a7089.tar.zst]
bytes:
  description: Size of everything in the bundle.
  returned: always
  type: int
  sample: 635307581
reason:
  description: V(bundled) or V(as_wanted).
  returned: always
  type: str
  sample: bundled
"""

import contextlib
import gzip
import os
import shutil
import subprocess
import sys
import tarfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import engines, files, source_files, sums
from ansible.module_utils.vllm_fleet.errors import FleetError, RefusedError

SUMS = "SHA256SUMS"
PROGRAM = "program/vllm-fleet.tar.gz"


def wanted_files(cache, entries):
    """Return the files of the engines, relative to the cache.

    :raises RefusedError: ``not_collected`` for an engine that has neither an archive nor all its parts.
    """
    found = []
    for entry in entries:
        name = "{}-{}.tar".format(entry["id"], entry["digest"])
        archive = [f"engines/{name}.zst", f"engines/{name}.zst.json"]
        parts = [f"wheelhouse/{name}"] + ([f"sources/{name}"] if entry["route"] == "git" else [])
        for choice in ([*archive, f"engines/{name}.zst.json.sig"], archive, parts):
            if all(os.path.isfile(os.path.join(cache, path)) for path in choice):
                found += choice
                break
        else:
            raise RefusedError("not_collected", "{} has neither archive nor parts in {}".format(entry["id"], cache))
    return found


def bring(source, target):
    """Copy a file whole or not at all; a second name for the same file where the file system allows it."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    partial = target + ".part"
    if os.path.lexists(partial):
        os.unlink(partial)
    try:
        os.link(source, partial)
    except OSError:
        shutil.copy2(source, partial)
    os.replace(partial, target)


def same(source, target):
    try:
        one, other = os.stat(source), os.stat(target)
    except OSError:
        return False
    return one.st_size == other.st_size and one.st_mtime_ns == other.st_mtime_ns


def pack_project(project, target):
    """Pack the tracked files of the checkout; the same files give the same bytes."""
    listed = subprocess.run(["git", "-C", project, "ls-files", "-z"], capture_output=True, text=True, check=False)
    if listed.returncode:
        raise RefusedError("not_a_checkout", f"{project} is no git checkout: {listed.stderr.strip()}")

    def plain(entry):
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = "root"
        return entry

    names = sorted(filter(None, listed.stdout.split("\0")))
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(open(target, "wb"))
        packed = stack.enter_context(gzip.GzipFile("", "wb", fileobj=raw, mtime=0))
        archive = stack.enter_context(tarfile.open(fileobj=packed, mode="w"))
        for name in names:
            if os.path.lexists(os.path.join(project, name)):
                archive.add(os.path.join(project, name), os.path.join("vllm-fleet", name), filter=plain)


def controller_wheels(project, target):
    """Download what `make env` installs, by the hashes of the project's lock."""
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--require-hashes"]
    argv += ["--no-deps", "--dest", target, "--requirement", os.path.join(project, "requirements.lock")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = " / ".join(done.stderr.strip().splitlines()[-4:])
        raise RefusedError("download_failed", f"the controller's wheels could not be collected: {tail}", "run again")


def write_sums(dest):
    """Hash every file and write SHA256SUMS; return the size of all."""
    entries, size = {}, 0
    for folder, _, names in os.walk(dest):
        for name in names:
            path = os.path.join(folder, name)
            if name != SUMS and not name.endswith(".part"):
                entries[os.path.relpath(path, dest)] = source_files.sha256(path)
                size += os.stat(path).st_size
    files.write_atomic(os.path.join(dest, SUMS), sums.render(entries), 0o644)
    return size


def main():
    module = AnsibleModule(
        argument_spec={
            "dest": {"type": "path", "required": True},
            "cache": {"type": "path", "required": True},
            "engines": {"type": "list", "elements": "dict", "required": True},
            "project": {"type": "path", "required": True},
            "controller": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    dest, cache, project = params["dest"], params["cache"], os.path.realpath(params["project"])
    size = 0
    try:
        # in check mode nothing was collected, so what is not there yet is only named
        names = [] if module.check_mode else wanted_files(cache, params["engines"])
        added = [name for name in names if not same(os.path.join(cache, name), os.path.join(dest, name))]
        program = os.path.join(module.tmpdir, "vllm-fleet.tar.gz")
        pack_project(project, program)
        there = os.path.join(dest, PROGRAM)
        if not os.path.exists(there) or source_files.sha256(there) != source_files.sha256(program):
            added.append(PROGRAM)
        if added and not module.check_mode:
            os.makedirs(dest, exist_ok=True)
            needed = sum(os.stat(os.path.join(cache, name)).st_size for name in added if name != PROGRAM)
            if os.stat(cache).st_dev != os.stat(dest).st_dev:
                engines.check_room(needed, shutil.disk_usage(dest).free, "the bundle", dest)
            for name in added:
                bring(program if name == PROGRAM else os.path.join(cache, name), os.path.join(dest, name))
            if params["controller"]:
                controller_wheels(project, os.path.join(dest, "program", "wheels"))
            size = write_sums(dest)
    except FleetError as error:
        module.fail_json(msg=error.one_line(), reason=error.reason)
    module.exit_json(
        changed=bool(added), path=dest, added=added, bytes=size, reason="bundled" if added else "as_wanted"
    )


if __name__ == "__main__":
    main()
