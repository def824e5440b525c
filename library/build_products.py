#!/usr/bin/python
"""Ansible module: record or verify the build products of an engine tree."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: build_products
short_description: Record or verify the build products of an engine tree
version_added: "0.1.0"
description:
  - Records the SHA-256 of every file below the product paths in C(.build-products.sha256), which
    C(sha256sum -c --strict) reads as well, then writes the marker C(.build-products).
  - Verifies a tree against that record, in parallel. Files that are missing, changed, unreadable or lead out of the
    tree fail, files that were added are a warning.
options:
  tree:
    description: The engine tree.
    type: path
    required: true
  state:
    description: V(recorded) makes the record, V(verified) compares with it and changes nothing.
    type: str
    choices: [recorded, verified]
    default: verified
  route:
    description: How the engine came here, one word. Needed for O(state=recorded).
    type: str
  engine:
    description: The engine's id. Needed for O(state=recorded). With O(state=verified) the record must name it.
    type: str
  paths:
    description: Files and directories inside O(tree) that the build makes. Needed for O(state=recorded).
    type: list
    elements: str
  exclude:
    description: Shell patterns or directories that are no products. C(__pycache__) never is one.
    type: list
    elements: str
    default: []
  trust_read_only:
    description: With O(state=verified), do not read the files of a tree on a read-only mount.
    type: bool
    default: false
  absent_ok_in_check_mode:
    description:
      - In check mode, report C(unknown) (or C(changed) for O(state=recorded)) instead of failing when the tree or its
        record is not there. Set it where an earlier task creates them.
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
- name: Remember what the build made
  build_products:
    tree: /opt/vllm-fleet/engines/flash-next/tree
    state: recorded
    route: own
    engine: flash-next
    paths: [vllm]
    exclude: [vllm/_version.py]

- name: Nothing changed since
  build_products:
    tree: /opt/vllm-fleet/engines/flash-next/tree
    engine: flash-next
"""

RETURN = r"""
reason:
  description:
    - C(recorded) or C(already_recorded), or the code of the first check that is not a pass; C(products_ok) or
      C(read_only_mount) when all are. All of them are listed in docs/products.md.
  returned: always
  type: str
results:
  description: Check results, C({check, status, reason, message, fix}).
  returned: when O(state=verified)
  type: list
  elements: dict
problems:
  description: Every file with a problem, C({reason, file, detail}).
  returned: when O(state=verified)
  type: list
  elements: dict
files:
  description: How many files were hashed.
  returned: always
  type: int
before:
  description: Number of recorded files before.
  returned: when O(state=recorded)
  type: int
after:
  description: Number of recorded files after.
  returned: when O(state=recorded)
  type: int
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import checks, products_pass
from ansible.module_utils.vllm_fleet.errors import FleetError


def record(module):
    """Make the record; the diff is that of the sums file."""
    params = module.params
    try:
        outcome = products_pass.record(
            params["tree"],
            route=params["route"],
            engine=params["engine"],
            paths=params["paths"],
            exclude=params["exclude"],
            check=module.check_mode,
        )
    except FleetError as error:
        absent = error.reason in ("not_a_tree", "missing", "nothing_to_record")
        if absent and module.check_mode and params["absent_ok_in_check_mode"]:
            module.exit_json(changed=True, reason=error.reason, files=0, before=0, after=0)
        module.fail_json(msg=error.one_line(), reason=error.reason)
    before, after = outcome["before"], outcome["after"]
    diff = {"before": before, "after": after, "before_header": "recorded", "after_header": "found"}
    module.exit_json(
        changed=outcome["changed"],
        reason=outcome["reason"],
        files=outcome["files"],
        before=before.count("\n"),
        after=after.count("\n"),
        diff=diff if module._diff else {},
    )


def verify(module):
    """Compare with the record."""
    params = module.params
    report = products_pass.verify(params["tree"], engine=params["engine"], trust_read_only=params["trust_read_only"])
    if module.check_mode and params["absent_ok_in_check_mode"]:
        for item in report["results"]:
            if item["reason"] == "unrecorded":
                item["status"] = checks.UNKNOWN
    failed = checks.failed(report["results"])
    noted = [item for item in report["results"] if item["status"] != checks.PASS]
    facts = {"results": report["results"], "problems": report["problems"], "files": report["files"]}
    if failed:
        module.fail_json(msg=checks.sentence(failed), reason=failed[0]["reason"], **facts)
    for item in noted:
        module.warn(item["message"])
    module.exit_json(changed=False, reason=(noted or report["results"])[0]["reason"], **facts)


def main():
    module = AnsibleModule(
        argument_spec={
            "tree": {"type": "path", "required": True},
            "state": {"type": "str", "choices": ["recorded", "verified"], "default": "verified"},
            "route": {"type": "str"},
            "engine": {"type": "str"},
            "paths": {"type": "list", "elements": "str"},
            "exclude": {"type": "list", "elements": "str", "default": []},
            "trust_read_only": {"type": "bool", "default": False},
            "absent_ok_in_check_mode": {"type": "bool", "default": False},
        },
        required_if=[("state", "recorded", ("route", "engine", "paths"))],
        supports_check_mode=True,
    )
    if module.params["state"] == "recorded":
        record(module)
    else:
        verify(module)


if __name__ == "__main__":
    main()
