#!/usr/bin/python
"""Ansible module: set one key in a checkpoint's JSON file."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: checkpoint_config
short_description: Set one key in a JSON file of a checkpoint and nothing else
version_added: "0.1.0"
description:
  - Sets a nested key and keeps layout, key order, number spelling, line ends, byte order mark and the end of the file.
  - Follows a symlink to its file, keeps mode, owner and extended attributes, and keeps the first original beside the
    file as C(<file>.vllm-fleet-orig). A crash at any point leaves the old file or the new one.
  - A key of the same name at the top of the file is a stale copy and is moved.
  - Needs a whole checkpoint (see M(checkpoint)). Weights are never opened.
options:
  path:
    description: The checkpoint directory.
    type: path
    required: true
  file:
    description: The JSON file inside O(path).
    type: str
    default: config.json
  key:
    description: Dotted path of the key from the top of the file.
    type: str
    required: true
  value:
    description: The wanted value, of any JSON type.
    type: raw
    required: true
  force:
    description: Overwrite a different value, and drop a stale top-level copy whose value differs.
    type: bool
    default: false
  absent_ok_in_check_mode:
    description:
      - In check mode, report C(changed) with reason C(checkpoint_absent) instead of failing when the directory is not
        there. Set it where an earlier task creates the checkpoint.
    type: bool
    default: false
author: vllm-fleet (@vllm-fleet)
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
"""

EXAMPLES = r"""
- name: The n-gram table is read as FP8
  checkpoint_config:
    path: /models/qwen3.8-flash-next
    key: text_config.ple_embedding_dtype
    value: float8_e4m3fn
"""

RETURN = r"""
reason:
  description:
    - C(already_set), C(added), C(replaced), C(moved) or C(stale_copy_removed); on failure the code of the refusal. All
      are listed in docs/checkpoint.md.
  returned: always
  type: str
before:
  description: JSON text of the nested value before, null when it was not there.
  returned: success
  type: str
after:
  description: JSON text of the wanted value.
  returned: success
  type: str
target:
  description: The file behind all links.
  returned: success
  type: str
backup:
  description: Where the first original is kept, null when there never was an edit.
  returned: success
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import checkpoint_edit
from ansible.module_utils.vllm_fleet.errors import FleetError


def main():
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "file": {"type": "str", "default": "config.json"},
            "key": {"type": "str", "required": True, "no_log": False},
            "value": {"type": "raw", "required": True},
            "force": {"type": "bool", "default": False},
            "absent_ok_in_check_mode": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        result = checkpoint_edit.set_key(
            params["path"],
            params["key"],
            params["value"],
            file=params["file"],
            force=params["force"],
            check=module.check_mode,
        )
    except FleetError as error:
        if error.reason == "checkpoint_absent" and module.check_mode and params["absent_ok_in_check_mode"]:
            module.exit_json(changed=True, reason=error.reason, before=None, after=None, target=None, backup=None)
        module.fail_json(msg=error.one_line(), reason=error.reason)
    for item in result["warnings"]:
        module.warn(item["message"])
    diff = {"before_header": result["file"], "after_header": result["file"]}
    diff.update(before=result["text_before"], after=result["text_after"])
    module.exit_json(
        changed=result["changed"],
        reason=result["reason"],
        before=result["before"],
        after=result["after"],
        target=result["target"],
        backup=result["backup"],
        diff=diff if module._diff else {},
    )


if __name__ == "__main__":
    main()
