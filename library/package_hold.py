#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: hold packages by pattern, and fence them from unattended upgrades."""

from __future__ import annotations

DOCUMENTATION = r"""
module: package_hold
short_description: Hold packages by pattern, and fence them from unattended upgrades
description:
  - Holds every installed package whose name matches a pattern, in one call, and writes a list that keeps unattended
    upgrades away from them and from packages of the same names that come later. The updater itself stays as it is.
  - Waits for dpkg's lock while another package manager run has it.
version_added: "0.2.0"
options:
  patterns:
    description: Patterns of package names, with V(*) and V(?).
    type: list
    elements: str
    required: true
  except:
    description: Patterns of packages that are left alone although they match.
    type: list
    elements: str
    default: []
  fence:
    description:
      - Name of the fence, as the file C(/etc/apt/apt.conf.d/52NAME) carries it. It sorts behind Debian's own
        C(50unattended-upgrades), whose list it adds to.
    type: str
    required: true
  lock_timeout:
    description: Seconds to wait for dpkg's lock.
    type: int
    default: 600
attributes:
  check_mode:
    description: Can say what would change without changing it.
    support: full
  diff_mode:
    description: Shows the packages that would be held, and the file.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Hold the driver
  package_hold:
    patterns: ["*nvidia*", libcuda1]
    except: ["nvidia-container*"]
    fence: vllm-fleet-nvidia
"""

RETURN = r"""
held:
  description: Every package that is held now because of the patterns.
  returned: always
  type: list
  elements: str
  sample: [libcuda1, nvidia-kernel-dkms]
before:
  description: State of what was changed, before; C(held) or C(free) by package, and the old text of the fence.
  returned: always
  type: dict
  sample: {"libcuda1": "free"}
after:
  description: State of the same afterwards.
  returned: always
  type: dict
  sample: {"libcuda1": "held"}
reason:
  description: V(held) when something was changed, V(as_wanted) otherwise.
  returned: always
  type: str
  sample: as_wanted
"""

import os
import re
import subprocess
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet.driver.names import matching
from ansible.module_utils.vllm_fleet.facts import packages
from ansible.module_utils.vllm_fleet.facts.host import read_text
from ansible.module_utils.vllm_fleet.files import write_atomic


def regular_expression(pattern, exceptions):
    """Return the pattern as unattended-upgrades reads one: a regular expression matched from the start of a name."""

    def body(text):
        return (
            "".join({"*": ".*", "?": "."}.get(letter) or re.escape(letter).replace("\\-", "-") for letter in text) + "$"
        )

    return "".join(f"(?!{body(item)})" for item in exceptions) + body(pattern)


def fence_text(patterns, exceptions):
    """Return the settings file that keeps unattended upgrades away."""
    lines = [f'  "{regular_expression(item, exceptions)}";' for item in patterns]
    return "\n".join(
        [
            "// Written by vllm-fleet: these packages move only when a play moves them.",
            "Unattended-Upgrade::Package-Blacklist {",
            *lines,
            "};",
            "",
        ]
    )


def hold(names, lock_timeout):
    """Hold the packages in one transaction; return an error text, or None. Waits while another has dpkg's lock."""
    deadline = time.monotonic() + lock_timeout
    selections = "".join(f"{name} hold\n" for name in names)
    while True:
        done = subprocess.run(
            ["dpkg", "--set-selections"], input=selections, capture_output=True, text=True, check=False,
            env=dict(os.environ, LC_ALL="C"),
        )  # fmt: skip
        if done.returncode == 0:
            return None
        if not re.search(r"\block\b|locked", done.stderr) or time.monotonic() >= deadline:
            return done.stderr.strip() or f"dpkg --set-selections ended with {done.returncode}"
        time.sleep(2)


def main():
    module = AnsibleModule(
        argument_spec={
            "patterns": {"type": "list", "elements": "str", "required": True},
            "except": {"type": "list", "elements": "str", "default": []},
            "fence": {"type": "str", "required": True},
            "lock_timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )
    params = module.params
    patterns, exceptions = params["patterns"], params["except"]
    if not re.match(r"[a-z0-9][a-z0-9-]*\Z", params["fence"]):
        module.fail_json(msg=f"fence is {params['fence']!r}; expected a-z, 0-9 and dashes", reason="bad_name")
    installed = packages.installed()
    if installed is None:
        module.fail_json(msg="dpkg-query does not answer: this box has no dpkg", reason="no_dpkg")
    left_alone = {item["name"] for item in matching(installed, exceptions)}
    found = [item for item in matching(installed, patterns) if item["name"] not in left_alone]
    free = [item["name"] for item in found if not item["held"]]
    path, text = f"/etc/apt/apt.conf.d/52{params['fence']}", fence_text(patterns, exceptions)
    old = read_text(path)
    before, after = dict.fromkeys(free, "free"), dict.fromkeys(free, "held")
    if old != text:
        before[path], after[path] = old or "absent", text
    if after and not module.check_mode:
        if old != text:
            write_atomic(path, text.encode(), mode=0o644, uid=0, gid=0)
        error = hold(free, params["lock_timeout"]) if free else None
        if error:
            module.fail_json(msg=f"could not hold {', '.join(free)}: {error}", reason="hold_failed")
    module.exit_json(
        changed=bool(after),
        held=sorted(item["name"] for item in found),
        before=before,
        after=after,
        reason="held" if after else "as_wanted",
        diff={"before": before, "after": after},
    )


if __name__ == "__main__":
    main()
