#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: make HAProxy run a configuration, checked before it is taken and seen to run afterwards."""

from __future__ import annotations

DOCUMENTATION = r"""
module: balancer_config
short_description: Make HAProxy run a configuration
description:
  - Has HAProxy check the configuration with its secret files before anything is replaced, writes both, and reloads
    without cutting a connection. Admin states of servers are kept over the reload.
  - What is compared is the configuration that the running process was started with, which HAProxy tells over its
    socket, so a reload that an interrupted play owed is made up for by the next one.
version_added: "0.1.0"
options:
  config:
    description: The whole configuration. Secrets don't belong in it; it names files of O(secrets) by their path.
    type: str
    required: true
  secrets:
    description: Files below C(/etc/haproxy/vllm-fleet), mode 0600, name to text; one with an empty text is absent.
    type: dict
    default: {}
attributes:
  check_mode:
    description: Can say what would change; the configuration is checked too where HAProxy is installed.
    support: full
  diff_mode:
    description: Shows the configuration before and after, never the secrets.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Make HAProxy run this configuration
  balancer_config:
    config: "{{ lookup('ansible.builtin.template', 'haproxy.cfg.j2') }}"
    secrets: {lane-keys: "tiny secret\n"}
"""

RETURN = r"""
digest:
  description: Digest of configuration and secrets, which the running HAProxy carries as its description.
  returned: always
  type: str
  sample: 3f0a51c2d4e5
before:
  description: Digest that ran before; empty when HAProxy did not run or ran something else.
  returned: always
  type: str
  sample: 11aa22bb33cc
reason:
  description: V(as_wanted), V(reloaded), V(started), or on failure V(config_refused), V(not_running_it),
    V(systemctl_failed).
  returned: always
  type: str
  sample: reloaded
"""

import hashlib
import os
import shutil
import tempfile
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import files
from ansible.module_utils.vllm_fleet.errors import FleetError
from ansible.module_utils.vllm_fleet.facts import haproxy_socket, units

PROGRAM = "/usr/sbin/haproxy"
CONFIG = "/etc/haproxy/haproxy.cfg"
SECRETS = "/etc/haproxy/vllm-fleet"
MARK = "vllm-fleet "


def read(path):
    try:
        with open(path, encoding="utf-8") as handle:
            return handle.read()
    except OSError:
        return ""


def running():
    """Return the digest that the running HAProxy carries, empty for none."""
    try:
        said = haproxy_socket.ask(haproxy_socket.SOCKET, "show info")
    except FleetError:
        return ""
    lines = dict(line.partition(": ")[::2] for line in said.splitlines())
    text = lines.get("description", "")
    return text[len(MARK) :] if text.startswith(MARK) else ""


def refused(config, secrets):
    """Let HAProxy check the configuration with its secret files, in a place of their own; return what it says."""
    place = tempfile.mkdtemp(prefix="vllm-fleet-")
    try:
        for name, text in secrets.items():
            files.write_atomic(os.path.join(place, name), text.encode(), 0o600)
        path = os.path.join(place, "haproxy.cfg")
        files.write_atomic(path, config.replace(SECRETS, place).encode(), 0o600)
        done = units.run([PROGRAM, "-c", "-f", path])
        return done.stderr.replace(place, SECRETS).strip() if done.returncode else ""
    finally:
        shutil.rmtree(place)


def main():
    module = AnsibleModule(
        argument_spec={
            "config": {"type": "str", "required": True},
            "secrets": {"type": "dict", "default": {}, "no_log": True},
        },
        supports_check_mode=True,
    )
    secrets = {name: text for name, text in module.params["secrets"].items() if text}
    parts = [module.params["config"], *[part for name in sorted(secrets) for part in (name, secrets[name])]]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    mark = f"# How the next play knows what runs.\nglobal\n    description {MARK.strip()} {digest}\n"
    config = f"{module.params['config'].rstrip()}\n\n{mark}"
    before, old = running(), read(CONFIG)
    there = {name for name in module.params["secrets"] if os.path.exists(os.path.join(SECRETS, name))}
    stale = [
        name for name in sorted(there | set(secrets)) if read(os.path.join(SECRETS, name)) != secrets.get(name, "")
    ]
    active = units.unit_state("haproxy.service")
    changed = old != config or bool(stale) or before != digest or active["UnitFileState"] != "enabled"
    result = {
        "digest": digest,
        "before": before,
        "reason": "as_wanted",
        "diff": {"before_header": CONFIG, "after_header": CONFIG, "before": old, "after": config},
    }
    if not changed:
        module.exit_json(changed=False, **result)
    said = refused(config, secrets) if os.path.exists(PROGRAM) else ""
    if said:
        module.fail_json(
            msg="HAProxy refuses the configuration; what runs stays as it is: " + said, reason="config_refused"
        )
    result["reason"] = "reloaded" if active["ActiveState"] == "active" else "started"
    if module.check_mode:
        module.exit_json(changed=True, **result)

    os.makedirs(SECRETS, mode=0o700, exist_ok=True)
    for name in stale:
        path = os.path.join(SECRETS, name)
        if name in secrets:
            files.write_atomic(path, secrets[name].encode(), 0o600, 0, 0)
        else:
            os.unlink(path)
    files.write_atomic(CONFIG, config.encode(), 0o644, 0, 0)
    if before:
        try:
            haproxy_socket.keep_state(haproxy_socket.SOCKET, haproxy_socket.STATE_FILE)
        except FleetError as error:
            module.fail_json(msg=error.one_line(), reason=error.reason)
    verb = "reload" if active["ActiveState"] == "active" else "restart"
    for words in (["enable", "--quiet"], ["reset-failed"], [verb]):
        done = units.run(["systemctl", *words, "haproxy.service"], timeout=120.0)
        if done.returncode:
            module.fail_json(
                msg=f"systemctl {words[0]} haproxy: {done.stderr.strip()}; "
                + units.journal("haproxy.service", lines=5),
                reason="systemctl_failed",
            )
    deadline = time.monotonic() + 20
    while running() != digest:
        if time.monotonic() > deadline:
            module.fail_json(
                msg=f"HAProxy does not run the new configuration {digest} after its {verb}; "
                + units.journal("haproxy.service", lines=5),
                reason="not_running_it",
            )
        time.sleep(0.2)
    module.exit_json(changed=True, **result)


if __name__ == "__main__":
    main()
