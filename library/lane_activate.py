#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: make a release the current one and start it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: lane_activate
short_description: Flip lanes to their release and start them
description:
  - Points C(current) at the wanted release in one step, reads the units again, enables the unit and restarts it, for
    each lane that needs it; a lane whose running process already comes from the wanted release is left alone.
  - Returns at once after the start was asked for; M(lane_ready) waits for the proof.
  - A member of a lane that spans boxes ends after its head has answered what it had.
  - Enables and starts the lane's watchdog, or ends it where the lane turned it off.
  - With O(state=previous) the last good release comes back, or the one that the lane's C(back_to) names.
version_added: "0.1.0"
options:
  lanes:
    description:
      - Lanes to activate, with C(lane) and, for O(state=current), C(release) or, for O(state=previous), optionally
        C(back_to); optionally C(api_key_file), whose key the process must have been started with, and C(key_changed),
        for check mode, where the file is still the old one.
      - C(peers_flip) says that the lane spans boxes and changes on another one; all of its parts start again together.
    type: list
    elements: dict
    required: true
  state:
    description: V(current) makes the given release run; V(previous) goes back to the release before it.
    type: str
    choices: [current, previous]
    default: current
  drained:
    description:
      - The lanes have left rotation and have no request in flight. They are then stopped at once instead of after the
        engine's whole shutdown time.
    type: bool
    default: false
attributes:
  check_mode:
    description: Can say which lanes would be flipped or restarted without doing it.
    support: full
  diff_mode:
    description: Shows the release of each lane before and after.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Make the staged releases run
  lane_activate:
    lanes: "{{ staged.lanes }}"

- name: Go back
  lane_activate:
    lanes: [{lane: main}]
    state: previous
"""

RETURN = r"""
lanes:
  description: For each lane what was done, and what the wait for readiness needs to know.
  returned: always
  type: list
  elements: dict
  sample:
    - {lane: main, before: 0f11aa22bb33, after: 8c0e1f2ab34d, restarted: true, reason: release_changed,
       log_offset: 4711}
before:
  description: Release that was current, by lane.
  returned: always
  type: dict
  sample: {main: 0f11aa22bb33}
after:
  description: Release that is current now, by lane.
  returned: always
  type: dict
  sample: {main: 8c0e1f2ab34d}
reason:
  description: Reason of the first lane that was restarted, V(as_wanted) when none was.
  returned: always
  type: str
  sample: release_changed
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import files, release, runtime_env, watchdog, wide
from ansible.module_utils.vllm_fleet.errors import FleetError
from ansible.module_utils.vllm_fleet.facts import host, peer_link, units


def started_release(name):
    """Return the release that the running process was started from, as start-check left it."""
    return host.first_line(os.path.join(release.RUNTIME, name, "release"))


def key_is_stale(name, key_file):
    """Whether the process was started with another API key than the file holds now."""
    if not key_file:
        return False
    used = runtime_env.parse_key(host.read_text(os.path.join(release.RUNTIME, name, "secret.env")) or "")
    return used != host.first_line(key_file)


def why_restart(state, current, wanted, name, entry):
    """Return the reason to restart the lane, or None to leave it alone."""
    if current != wanted:
        return "release_changed"
    if state["ActiveState"] not in ("active", "activating"):
        return "not_running"
    if started_release(name) != wanted:
        return "runs_another_release"
    if entry.get("key_changed") or key_is_stale(name, entry.get("api_key_file")):
        return "key_changed"
    if entry.get("peers_flip"):
        return "peers_changed"
    return None


def stop_idle(unit, systemctl):
    """Stop a unit that has nothing in flight.

    The unit's SIGTERM goes to the API server alone, which waits for its whole shutdown time even when it is idle. The
    workers get theirs here, once the unit is on its way down, so that none of them counts as a crash.
    """
    systemctl("stop", "--no-block", unit)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        state = units.unit_state(unit)["ActiveState"]
        if state == "deactivating":
            # It may be gone by now, which is as good.
            units.run(["systemctl", "kill", "--signal=SIGTERM", unit])
        if state not in ("active", "activating"):
            break
        time.sleep(0.1)
    systemctl("stop", unit)


def wait_for_head(name, lane, told=peer_link.ask):
    """Let the head of a lane that spans boxes answer what it has before this member of it ends.

    It is over when the process that this one is joined with is gone; a head that does not end is not waited for longer
    than its requests may take.
    """
    place = lane.get("part")
    if wide.has_api(lane):
        return
    try:
        joined = files.read_json(os.path.join(release.RUNTIME, name, "peers.json"), "state")["partners"]
    except (FleetError, KeyError, TypeError):
        return
    partner = joined.get(place["boxes"][0])
    deadline = time.monotonic() + release.shutdown_timeout(lane["rendered"]["argv"]) + 5
    while partner and time.monotonic() < deadline:
        said = told(place["addresses"][0], place["peer_port"], name).get("record")
        if said is None or not said["alive"] or said["invocation"] != partner:
            return
        time.sleep(0.5)


def watchdog_wanted(home, wanted):
    """Return whether the release wants a watchdog; in check mode a new one may not be there to say."""
    path = os.path.join(home, "releases", wanted, "lane.json")
    lane = files.read_json(path, "lane") if os.path.exists(path) else {}
    return bool(watchdog.limits(lane)["enabled"])


def main():
    module = AnsibleModule(
        argument_spec={
            "lanes": {"type": "list", "elements": "dict", "required": True},
            "state": {"type": "str", "choices": ["current", "previous"], "default": "current"},
            "drained": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    rows, todo, enable, watch, unwatch = [], [], [], [], []
    for entry in module.params["lanes"]:
        name = entry["lane"]
        home = os.path.join(release.LANES, name)
        current, previous = (host.link_name(os.path.join(home, link)) for link in ("current", "previous"))
        wanted = entry.get("release") if module.params["state"] == "current" else entry.get("back_to") or previous
        if not wanted:
            module.fail_json(
                msg=f"lane {name} has no previous release to go back to; its current one is {current}",
                reason="no_previous_release",
            )
        unit = f"vllm@{name}.service"
        state = units.unit_state(unit)
        reason = why_restart(state, current, wanted, name, entry)
        row = {
            "lane": name,
            "before": current,
            "after": wanted,
            "restarted": reason is not None,
            "reason": reason or "as_wanted",
            "invocation_before": state["InvocationID"],
        }
        rows.append(row)
        if state["UnitFileState"] != "enabled":
            enable.append(unit)
        beside = f"vllm-watchdog@{name}.service"
        watching = units.unit_state(beside)
        if not watchdog_wanted(home, wanted):
            if watching["UnitFileState"] == "enabled" or watching["ActiveState"] == "active":
                unwatch.append(beside)
        elif watching["UnitFileState"] != "enabled" or watching["ActiveState"] not in ("active", "activating"):
            watch.append(beside)
        if reason:
            todo.append((row, home, unit, state))
    changed = bool(todo or enable or watch or unwatch)

    def systemctl(*words):
        done = units.run(["systemctl", *words], timeout=300.0)
        if done.returncode:
            module.fail_json(
                msg="systemctl {} failed: {}".format(" ".join(words), done.stderr.strip() or done.stdout.strip()),
                reason="systemctl_failed",
            )

    if changed and not module.check_mode:
        for row, home, _unit, state in todo:
            if row["before"] != row["after"]:
                # The release that ran until now is the good one to go back to; one that never ran is not.
                if state["ActiveState"] == "active" and module.params["state"] == "current" and row["before"]:
                    files.link_atomic(os.path.join("releases", row["before"]), os.path.join(home, "previous"))
                files.link_atomic(os.path.join("releases", row["after"]), os.path.join(home, "current"))
        systemctl("daemon-reload")
        if enable:
            systemctl("enable", "--quiet", *enable)
        if unwatch:
            systemctl("disable", "--quiet", "--now", *unwatch)
        if watch:
            systemctl("enable", "--quiet", "--now", *watch)
        for row, home, unit, _state in todo:
            lane = files.read_json(os.path.join(home, "current", "lane.json"), "lane")
            row["log_offset"] = units.log_size(lane.get("log") or "")
            wait_for_head(row["lane"], lane)
            if module.params["drained"]:
                stop_idle(unit, systemctl)
            systemctl("reset-failed", unit)
            systemctl("restart", "--no-block", unit)
    module.exit_json(
        changed=changed,
        lanes=rows,
        before={row["lane"]: row["before"] for row in rows},
        after={row["lane"]: row["after"] for row in rows},
        reason=next((row["reason"] for row in rows if row["restarted"]), "enabled" if changed else "as_wanted"),
        diff={
            "before": {row["lane"]: row["before"] for row in rows if row["restarted"]},
            "after": {row["lane"]: row["after"] for row in rows if row["restarted"]},
        },
    )


if __name__ == "__main__":
    main()
