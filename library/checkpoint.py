#!/usr/bin/python
"""Ansible module: check that a checkpoint is complete and readable."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: checkpoint
short_description: Check that a model checkpoint is complete, readable and the one that was meant
version_added: "0.1.0"
description:
  - Checks a checkpoint directory without opening a weight file. Needs its C(model.safetensors.index.json), or a single
    safetensors file, and reports weight files that are missing or too small by name.
  - Verifies a manifest of hashes once and remembers each file by size, modification time and inode.
  - Never changes the checkpoint. Only the file with remembered digests is written, and not in check mode.
options:
  path:
    description: The checkpoint directory.
    type: path
    required: true
  user:
    description:
      - The service user that must be able to read the checkpoint. Tested with that user's ids, without opening a file.
    type: str
  sidecars:
    description: Files that the profile requires, such as KV scales.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: The file, relative to O(path) or absolute.
        type: str
        required: true
      sha256:
        description: Its pinned SHA-256.
        type: str
  settings:
    description: Values that JSON files of the checkpoint must already hold. The module M(checkpoint_config) sets them.
    type: list
    elements: dict
    default: []
    suboptions:
      file:
        description: The JSON file.
        type: str
        default: config.json
      key:
        description: Dotted path from the top of the file.
        type: str
        required: true
      value:
        description: The wanted value.
        type: raw
        required: true
  manifest:
    description:
      - A manifest, relative to O(path) or absolute. Either C(sha256sum) lines or JSON of the form
        C({"revision":"…","files":{"name":{"sha256":"…","size":1}}}).
    type: str
  hashing:
    description:
      - V(due) reads the files of the manifest that changed since they were verified, V(again) reads all of them, and
        V(remembered) reads none, reporting files that are due as C(unknown).
    type: str
    choices: [due, again, remembered]
    default: due
  state_directory:
    description: Where verified digests are remembered.
    type: path
    default: /var/lib/vllm-fleet/checkpoints
  tensor_parallel:
    description: A tensor-parallel size that must divide the number of attention heads.
    type: int
  min_free_bytes:
    description: Free space in bytes that O(free_space_path) must have.
    type: int
  free_space_path:
    description: Where O(min_free_bytes) is looked for. The checkpoint's own file system by default.
    type: path
  absent_ok_in_check_mode:
    description:
      - In check mode, report a missing checkpoint directory or user as C(unknown) instead of failing. Set it where an
        earlier task creates them, so that a dry run on a fresh box reaches the end.
    type: bool
    default: false
author: vllm-fleet (@vllm-fleet)
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
"""

EXAMPLES = r"""
- name: The checkpoint is complete and the service can read it
  checkpoint:
    path: /models/qwen3.8-flash-next
    user: vllm
    sidecars:
      - path: qsa_kv_scales.json
        sha256: 5cbe6ae8d1a7a9b3a2c9b3a1f7c8e9d0a1b2c3d4e5f60718293a4b5c6d7e8f90
    manifest: checkpoint.sha256
    absent_ok_in_check_mode: true
"""

RETURN = r"""
results:
  description: One entry per check, C({check, status, reason, message, fix}); reasons are listed in docs/checkpoint.md.
  returned: always
  type: list
  elements: dict
reason:
  description: Reason code of the first failed check.
  returned: failure
  type: str
checkpoint:
  description: The absolute path of the checkpoint.
  returned: always
  type: str
shards:
  description: The weight files that the checkpoint names, C({name, size}); the size in bytes is null for a missing one.
  returned: always
  type: list
  elements: dict
size:
  description: Bytes of the weight files that are there.
  returned: always
  type: int
hashed:
  description: How many files were read for their hash in this run.
  returned: always
  type: int
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import checkpoint_pass, checks
from ansible.module_utils.vllm_fleet.errors import FleetError
from ansible.module_utils.vllm_fleet.facts.checkpoint_dir import STATE_DIRECTORY


def main():
    sidecar = {"path": {"type": "str", "required": True}, "sha256": {"type": "str"}}
    setting = {
        "file": {"type": "str", "default": "config.json"},
        "key": {"type": "str", "required": True, "no_log": False},
        "value": {"type": "raw", "required": True},
    }
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "user": {"type": "str"},
            "sidecars": {"type": "list", "elements": "dict", "default": [], "options": sidecar},
            "settings": {"type": "list", "elements": "dict", "default": [], "options": setting},
            "manifest": {"type": "str"},
            "hashing": {"type": "str", "choices": list(checkpoint_pass.HASHING), "default": "due"},
            "state_directory": {"type": "path", "default": STATE_DIRECTORY},
            "tensor_parallel": {"type": "int"},
            "min_free_bytes": {"type": "int"},
            "free_space_path": {"type": "path"},
            "absent_ok_in_check_mode": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        report = checkpoint_pass.inspect(
            params["path"],
            user=params["user"],
            sidecars=params["sidecars"],
            settings=params["settings"],
            manifest=params["manifest"],
            hash_policy=params["hashing"],
            state_directory=params["state_directory"],
            remember=not module.check_mode,
            min_free_bytes=params["min_free_bytes"],
            free_space_path=params["free_space_path"],
            tensor_parallel=params["tensor_parallel"],
            absent_is_unknown=module.check_mode and params["absent_ok_in_check_mode"],
        )
    except FleetError as error:
        module.fail_json(msg=error.one_line(), reason=error.reason)
    failed = checks.failed(report["results"])
    if failed:
        module.fail_json(msg=checks.sentence(failed), reason=failed[0]["reason"], **report)
    module.exit_json(changed=False, **report)


if __name__ == "__main__":
    main()
