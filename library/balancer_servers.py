#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: take lanes out of a balancer's rotation, put them back, and count what they still have."""

from __future__ import annotations

DOCUMENTATION = r"""
module: balancer_servers
short_description: Take lanes out of HAProxy's rotation and put them back
description:
  - Runs on the balancer. Sets servers to drain or ready over the runtime socket, so that no configuration changes and
    no request is cut, and returns how many requests each still has.
  - States are kept in HAProxy's server state file, so that a reload or a reboot of the balancer keeps a drained lane
    drained.
  - A server that the balancer does not know is no error; it has nothing to drain.
version_added: "0.1.0"
options:
  servers:
    description: Names of the servers, C(box:lane).
    type: list
    elements: str
    required: true
  state:
    description: V(drain) sends them nothing new; V(ready) puts them back; V(present) only looks.
    type: str
    choices: [drain, ready, present]
    default: present
  min_left:
    description: Servers that must stay in rotation in each pool that is touched; fewer refuse the drain.
    type: int
    default: 0
  wait_s:
    description:
      - Seconds to wait before answering. With O(state=drain) or O(state=present) the wait ends when the servers have no
        request left, with O(state=ready) when the balancer's own check finds them up; that it does not is a failure.
    type: int
    default: 0
  socket:
    description: HAProxy's runtime socket.
    type: path
    default: /run/haproxy/admin.sock
  state_file:
    description: File in which the states survive a reload.
    type: path
    default: /var/lib/haproxy/vllm-fleet-servers
attributes:
  check_mode:
    description: Can say what would be set without setting it; does not wait.
    support: full
  diff_mode:
    description: Shows each server's state before and after.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Send box1 nothing new
  balancer_servers:
    servers: ["box1:main"]
    state: drain
    min_left: 1
  delegate_to: edge1
"""

RETURN = r"""
servers:
  description: One row for each server that the balancer knows.
  returned: always
  type: list
  elements: dict
  sample:
    - {pool: tiny, server: "box1:main", admin: drain, up: true, in_flight: 2, errors: 0, in_rotation: false}
in_flight:
  description: Requests of all those servers.
  returned: always
  type: int
  sample: 2
errors:
  description: Answers with an error, or broken off, that clients got from those servers since HAProxy started.
  returned: always
  type: int
  sample: 0
unknown:
  description: Names that the balancer does not know.
  returned: always
  type: list
  elements: str
  sample: []
before:
  description: State of each server before.
  returned: always
  type: dict
  sample: {"box1:main": ready}
after:
  description: State of each server now.
  returned: always
  type: dict
  sample: {"box1:main": drain}
reason:
  description: V(drained), V(in_flight), V(in_rotation), V(not_up_yet), V(as_wanted), or on failure V(balancer_down),
    V(balancer_refused), V(rotation_minimum).
  returned: always
  type: str
  sample: drained
"""

import fcntl
import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import haproxy
from ansible.module_utils.vllm_fleet.errors import FleetError
from ansible.module_utils.vllm_fleet.facts import haproxy_socket

PROGRAM = "/usr/sbin/haproxy"


def rows_of(params):
    """Return the rows of the wanted servers, and all rows."""
    rows = haproxy_socket.servers(params["socket"])
    return [row for row in rows if row["server"] in params["servers"]], rows


def apply(params, check_mode):
    """Set what differs; return the rows before."""
    # One at a time: two boxes that leave together must not each count the other as staying.
    handle = os.open(os.path.dirname(params["socket"]), os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        mine, rows = rows_of(params)
        todo = [row for row in mine if params["state"] not in ("present", row["admin"])]
        if params["state"] == "drain" and todo:
            haproxy.check_minimum(rows, params["servers"], params["min_left"])
        if todo and not check_mode:
            for row in todo:
                haproxy_socket.set_state(params["socket"], row["pool"], row["server"], params["state"])
            haproxy_socket.keep_state(params["socket"], params["state_file"])
        return mine, todo
    finally:
        os.close(handle)


def settled(params, rows):
    """Whether there is nothing more to wait for."""
    if params["state"] == "ready":
        return all(row["in_rotation"] for row in rows)
    return not any(row["in_flight"] for row in rows)


def reason_of(params, rows):
    """Return the word for how the servers stand."""
    if params["state"] == "present":
        return "as_wanted"
    if params["state"] == "ready":
        return "in_rotation" if settled(params, rows) else "not_up_yet"
    return "drained" if settled(params, rows) else "in_flight"


def main():
    module = AnsibleModule(
        argument_spec={
            "servers": {"type": "list", "elements": "str", "required": True},
            "state": {"type": "str", "choices": ["drain", "ready", "present"], "default": "present"},
            "min_left": {"type": "int", "default": 0},
            "wait_s": {"type": "int", "default": 0},
            "socket": {"type": "path", "default": haproxy_socket.SOCKET},
            "state_file": {"type": "path", "default": haproxy_socket.STATE_FILE},
        },
        supports_check_mode=True,
    )
    params = module.params
    if not os.path.exists(params["socket"]) and not os.path.exists(PROGRAM):
        # What is not there sends requests to nobody.
        nothing = {
            "servers": [],
            "in_flight": 0,
            "errors": 0,
            "unknown": sorted(params["servers"]),
            "before": {},
            "after": {},
        }
        module.exit_json(changed=False, reason="not_installed", diff={"before": {}, "after": {}}, **nothing)
    try:
        before, todo = apply(params, module.check_mode)
        rows, _ = rows_of(params)
        deadline = time.monotonic() + (0 if module.check_mode else params["wait_s"])
        while not settled(params, rows) and time.monotonic() < deadline:
            time.sleep(0.2)
            rows, _ = rows_of(params)
    except FleetError as error:
        module.fail_json(msg=error.one_line(), reason=error.reason)
    if params["state"] == "ready" and params["wait_s"] and not module.check_mode and not settled(params, rows):
        late = ", ".join(row["server"] for row in rows if not row["in_rotation"])
        module.fail_json(
            msg="{} not up by the balancer's own check after {} s; it gets no requests. Look: the lane answers at its "
            "address from the balancer?".format(late, params["wait_s"]),
            reason="not_up_yet",
            servers=rows,
        )
    after = {row["server"]: row["admin"] for row in rows}
    if module.check_mode:
        after.update({row["server"]: params["state"] for row in todo})
    earlier = {row["server"]: row["admin"] for row in before}
    module.exit_json(
        changed=bool(todo),
        servers=rows,
        in_flight=sum(row["in_flight"] for row in rows),
        errors=sum(row["errors"] for row in rows),
        unknown=sorted(set(params["servers"]) - set(after)),
        before=earlier,
        after=after,
        reason=reason_of(params, rows),
        diff={"before": earlier, "after": after},
    )


if __name__ == "__main__":
    main()
