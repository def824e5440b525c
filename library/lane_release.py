#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: write the releases of a box's lanes beside the running ones."""

from __future__ import annotations

DOCUMENTATION = r"""
module: lane_release
short_description: Render the releases of a box's lanes beside the running ones
description:
  - Writes one release directory for each lane, the template unit, the drop-in links, the log files and the key files,
    and touches no process. M(lane_activate) makes a release the current one.
  - A release is named after its content, so an unchanged lane gives the release that is there already.
version_added: "0.1.0"
options:
  lanes:
    description: Resolved lanes, as the filter P(vllm_fleet_resolve_lanes#filter) gives them.
    type: list
    elements: dict
    required: true
  unit:
    description: Text of the template unit C(vllm@.service).
    type: str
    required: true
  watchdog:
    description: Text of the template unit C(vllm-watchdog@.service).
    type: str
    required: true
  logrotate:
    description: Text of the logrotate file; empty for none.
    type: str
    default: ""
  keep:
    description: Releases to keep for each lane; the current and the previous one are always kept.
    type: int
    default: 5
  keys:
    description: API key of each lane that has one, by lane name. Written to the lane's C(api_key_file), mode 0600,
      owner root.
    type: dict
    default: {}
  bindings:
    description: NUMA binding of each lane that has one, by lane name, as the decision gives it.
    type: dict
    default: {}
  group:
    description: Group that may read the lane and its log.
    type: str
    default: vllm
  user:
    description: User that the lanes run as; owns their working directories.
    type: str
    default: vllm
attributes:
  check_mode:
    description: Can say which releases would be written without writing them.
    support: full
  diff_mode:
    description: Shows the files of a new release against the current one. Keys are never shown.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Render the releases
  lane_release:
    lanes: "{{ serve_lanes }}"
    unit: "{{ lookup('ansible.builtin.file', 'vllm@.service') }}"
    watchdog: "{{ lookup('ansible.builtin.file', 'vllm-watchdog@.service') }}"
"""

RETURN = r"""
lanes:
  description: For each lane its release, the one that is current, and whether they differ.
  returned: always
  type: list
  elements: dict
  sample:
    - {lane: main, release: 8c0e1f2ab34d, current: 0f11aa22bb33, flip: true,
       path: /etc/vllm-fleet/lanes/main/releases/8c0e1f2ab34d, api_key_file: null, key_changed: false}
before:
  description: Current release of each lane, V(absent) when there is none.
  returned: always
  type: dict
  sample: {main: absent}
after:
  description: Release that the inventory asks for, by lane.
  returned: always
  type: dict
  sample: {main: 8c0e1f2ab34d}
unit_changed:
  description: Whether a unit file or drop-in changed, so that systemd has to read them again.
  returned: always
  type: bool
reason:
  description: V(rendered) when something was written, V(as_wanted) otherwise.
  returned: always
  type: str
  sample: as_wanted
"""

import grp
import os
import pwd
import shutil
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import files, release
from ansible.module_utils.vllm_fleet.errors import FleetError
from ansible.module_utils.vllm_fleet.facts import host

UNITS = "/etc/systemd/system"
LOGROTATE = "/etc/logrotate.d/vllm-fleet"


def read_text(path):
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as handle:
            return handle.read()
    except OSError:
        return None


class Writer:
    """Collect what differs, and write it unless this is a check run."""

    def __init__(self, check_mode, uid, gid):
        self.check_mode = check_mode
        self.uid = uid
        self.gid = gid
        self.changed = []
        self.diffs = []

    def directory(self, path, mode, uid, gid):
        if os.path.isdir(path):
            return
        self.changed.append(path)
        if not self.check_mode:
            os.makedirs(path, exist_ok=True)
            os.chown(path, uid, gid)
            os.chmod(path, mode)

    def text(self, path, text, mode, gid=0, secret=False):
        old = read_text(path)
        if old == text and os.stat(path).st_mode & 0o7777 == mode:
            return False
        self.changed.append(path)
        if not secret:
            self.diffs.append({"before_header": path, "after_header": path, "before": old or "", "after": text})
        if not self.check_mode:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            files.write_atomic(path, text.encode("utf-8", "surrogateescape"), mode, 0, gid)
        return True

    def link(self, target, path):
        try:
            if os.readlink(path) == target:
                return False
        except OSError:
            pass
        self.changed.append(path)
        if not self.check_mode:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            files.link_atomic(target, path)
        return True

    def release(self, path, contents, engine_root, current):
        """Write a whole release directory beside the others and rename it into place."""
        if os.path.isdir(path):
            return
        self.changed.append(path)
        for name, text in sorted(contents.items()):
            old = read_text(os.path.join(current, name)) or ""
            if old != text:
                self.diffs.append(
                    {"before_header": "current " + name, "after_header": "new " + name, "before": old, "after": text}
                )
        if self.check_mode:
            return
        parent = os.path.dirname(path)
        os.makedirs(parent, exist_ok=True)
        temporary = tempfile.mkdtemp(prefix=".new-", dir=parent)
        for name, text in contents.items():
            files.write_atomic(os.path.join(temporary, name), text.encode("utf-8", "surrogateescape"), 0o644, 0, 0)
        os.symlink(engine_root, os.path.join(temporary, "engine"))
        os.chmod(temporary, 0o755)
        files.fsync_directory(temporary)
        os.rename(temporary, path)
        files.fsync_directory(parent)


def stage(writer, lane, binding, key, keep):
    """Stage one lane; return its row of the result."""
    name = lane["lane"]
    devices = release.device_allow(
        lane["engine"]["accelerator"], read_text("/proc/devices") or "", wide=bool(lane.get("part"))
    )
    contents = release.files(lane, devices, binding)
    wanted = release.release_id(contents)
    home = os.path.join(release.LANES, name)
    releases = os.path.join(home, "releases")
    current = host.link_name(os.path.join(home, "current"))
    path = os.path.join(releases, wanted)
    writer.release(path, contents, lane["engine"]["root"], os.path.join(home, "current"))
    writer.directory(lane["workdir"], 0o750, writer.uid, writer.gid)
    units_before = len(writer.changed)
    writer.link(
        os.path.join(home, "current", "unit.conf"), os.path.join(UNITS, f"vllm@{name}.service.d", "50-release.conf")
    )
    unit_changed = len(writer.changed) > units_before
    if lane["log"] and not os.path.exists(lane["log"]):
        writer.text(lane["log"], "", 0o640, writer.gid, secret=True)
    # A member of a lane that spans boxes has no HTTP server, and so no key.
    with_key = key is not None and lane["api_key_file"] is not None
    key_changed = with_key and writer.text(lane["api_key_file"], key.strip() + "\n", 0o600, secret=True)
    if os.path.isdir(releases) and not writer.check_mode:
        ages = sorted(
            (entry for entry in os.listdir(releases) if not entry.startswith(".")),
            key=lambda entry: os.stat(os.path.join(releases, entry)).st_mtime,
        )
        kept = [wanted, current, host.link_name(os.path.join(home, "previous"))]
        for old in release.removable(ages, kept, keep):
            shutil.rmtree(os.path.join(releases, old))
        for leftover in (entry for entry in os.listdir(releases) if entry.startswith(".new-")):
            shutil.rmtree(os.path.join(releases, leftover), ignore_errors=True)
    row = {"lane": name, "release": wanted, "current": current, "flip": wanted != current, "path": path}
    return {**row, "api_key_file": lane["api_key_file"], "key_changed": key_changed}, unit_changed


def main():
    module = AnsibleModule(
        argument_spec={
            "lanes": {"type": "list", "elements": "dict", "required": True},
            "unit": {"type": "str", "required": True},
            "watchdog": {"type": "str", "required": True},
            "logrotate": {"type": "str", "default": ""},
            "keep": {"type": "int", "default": 5},
            "keys": {"type": "dict", "default": {}, "no_log": True},
            "bindings": {"type": "dict", "default": {}},
            "group": {"type": "str", "default": "vllm"},
            "user": {"type": "str", "default": "vllm"},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        gid = grp.getgrnam(params["group"]).gr_gid
        uid = pwd.getpwnam(params["user"]).pw_uid
    except KeyError as error:
        if not module.check_mode:
            module.fail_json(msg=f"there is no such user or group: {error}; the role common makes it", reason="no_user")
        uid = gid = 0
    writer = Writer(module.check_mode, uid, gid)
    rows = []
    try:
        units = {"vllm@.service": params["unit"], "vllm-watchdog@.service": params["watchdog"]}
        written = [
            writer.text(os.path.join(UNITS, name), text.rstrip("\n") + "\n", 0o644) for name, text in units.items()
        ]
        unit_changed = any(written)
        if params["logrotate"].strip():
            writer.text(LOGROTATE, params["logrotate"].rstrip("\n") + "\n", 0o644)
        for lane in params["lanes"]:
            row, lane_unit_changed = stage(
                writer, lane, params["bindings"].get(lane["lane"]), params["keys"].get(lane["lane"]), params["keep"]
            )
            rows.append(row)
            unit_changed = unit_changed or lane_unit_changed
    except FleetError as error:
        module.fail_json(msg=error.one_line(), reason=error.reason)
    except OSError as error:
        module.fail_json(msg=f"cannot write {error.filename}: {error.strerror}", reason="write_failed")
    module.exit_json(
        changed=bool(writer.changed),
        lanes=rows,
        before={row["lane"]: row["current"] or "absent" for row in rows},
        after={row["lane"]: row["release"] for row in rows},
        unit_changed=unit_changed,
        reason="rendered" if writer.changed else "as_wanted",
        paths=writer.changed,
        diff=writer.diffs,
    )


if __name__ == "__main__":
    main()
