#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Documentation of the action ``lane_ready``; the work is in ``action_plugins/lane_ready.py`` and M(lane_probe)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: lane_ready
short_description: Wait until the lanes of a box have answered a completion
description:
  - Asks M(lane_probe) until each lane is ready, and prints the engine's phase and the time whenever the phase changes
    and every ten seconds. Fails as soon as a lane has failed, with the engine's own last error lines.
  - Runs on the controller; one remote call when everything is ready already.
version_added: "0.1.0"
options:
  lanes:
    description: Names of the lanes.
    type: list
    elements: str
    required: true
  restarted:
    description: What M(lane_activate) returned; answers must come from the processes that it started.
    type: list
    elements: dict
    default: []
  deadline_s:
    description: Seconds until a lane that is still starting counts as failed.
    type: int
    default: 1860
  concurrent:
    description: Completions that must come at once, if that is more than the lane's own readiness asks for.
    type: int
    default: 1
  hold_s:
    description: Seconds for which the lanes must stay ready, each by the same process.
    type: int
    default: 0
attributes:
  check_mode:
    description: Says nothing in check mode, because a lane that would be started cannot answer yet.
    support: partial
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Wait for the proof
  lane_ready:
    lanes: [main]
    restarted: "{{ activated.lanes }}"
"""

RETURN = r"""
lanes:
  description: The last rows of M(lane_probe).
  returned: always
  type: list
  elements: dict
  sample:
    - {lane: main, state: ready, elapsed_s: 31}
reason:
  description: V(ready), or V(lane_failed), V(deadline) or V(did_not_last).
  returned: always
  type: str
  sample: ready
"""
