#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: the directories of a box, in one call."""

from __future__ import annotations

DOCUMENTATION = r"""
module: box_layout
short_description: Create the directories of a box in one call
description:
  - Creates each directory with its mode, owner and group, and corrects the ones that differ. Nothing below them is
    touched.
  - One call for all of them, because every remote task costs a round trip.
version_added: "0.1.0"
options:
  directories:
    description: The directories, parents before children.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Absolute path.
        type: path
        required: true
      mode:
        description: Octal mode as a string, such as V("0755").
        type: str
        default: "0755"
      owner:
        description: Name of the owner.
        type: str
        default: root
      group:
        description: Name of the group.
        type: str
        default: root
attributes:
  check_mode:
    description: Can say what would change without changing it.
    support: full
  diff_mode:
    description: Shows each directory's state before and after.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Lay out the box
  box_layout:
    directories:
      - {path: /opt/vllm-fleet, mode: "0755"}
      - {path: /var/log/vllm-fleet, mode: "0750", group: vllm}
"""

RETURN = r"""
before:
  description: State of each directory that differed, by path; V(absent) or V(mode owner:group).
  returned: always
  type: dict
  sample: {"/opt/vllm-fleet": "absent"}
after:
  description: State of the same directories afterwards.
  returned: always
  type: dict
  sample: {"/opt/vllm-fleet": "0755 root:root"}
reason:
  description: V(laid_out) when something was changed, V(as_wanted) otherwise.
  returned: always
  type: str
  sample: as_wanted
"""

import grp
import os
import pwd
import stat

from ansible.module_utils.basic import AnsibleModule


def state_of(path):
    """Return ``"0755 root:root"``, or ``"absent"``, or ``"not a directory"``."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return "absent"
    if not stat.S_ISDIR(found.st_mode):
        return "not a directory"
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = str(found.st_uid)
    try:
        group = grp.getgrgid(found.st_gid).gr_name
    except KeyError:
        group = str(found.st_gid)
    return f"{stat.S_IMODE(found.st_mode):04o} {owner}:{group}"


def main():
    module = AnsibleModule(
        argument_spec={
            "directories": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "path": {"type": "path", "required": True},
                    "mode": {"type": "str", "default": "0755"},
                    "owner": {"type": "str", "default": "root"},
                    "group": {"type": "str", "default": "root"},
                },
            }
        },
        supports_check_mode=True,
    )
    before, after = {}, {}
    for entry in module.params["directories"]:
        path = entry["path"]
        found, wanted = state_of(path), "{} {}:{}".format(entry["mode"], entry["owner"], entry["group"])
        if found == wanted:
            continue
        if found == "not a directory":
            module.fail_json(
                msg=f"{path} exists and is not a directory; expected {wanted}. Move it away and run again.",
                reason="not_a_directory",
            )
        before[path], after[path] = found, wanted
        if module.check_mode:
            continue
        try:
            if found == "absent":
                os.mkdir(path, 0o700)
            os.chown(path, pwd.getpwnam(entry["owner"]).pw_uid, grp.getgrnam(entry["group"]).gr_gid)
            os.chmod(path, int(entry["mode"], 8))
        except (OSError, KeyError) as error:
            module.fail_json(msg=f"{path}: wanted {wanted}, found {found}: {error}", reason="layout_failed")
    module.exit_json(
        changed=bool(after),
        before=before,
        after=after,
        reason="laid_out" if after else "as_wanted",
        diff={"before": before, "after": after},
    )


if __name__ == "__main__":
    main()
