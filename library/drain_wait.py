#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Documentation of the action ``drain_wait``; the work is in ``action_plugins/drain_wait.py`` and the asked module."""

from __future__ import annotations

DOCUMENTATION = r"""
module: drain_wait
short_description: Wait until nothing is in flight any more
description:
  - Asks M(balancer_servers) or M(lane_in_flight) until it counts no request, and prints box, number and time meanwhile.
  - A deadline that passes is no failure; the result says what was left, and the caller decides.
version_added: "0.1.0"
options:
  probe:
    description: Module that counts.
    type: str
    choices: [balancer_servers, lane_in_flight]
    required: true
  options:
    description: What the module gets.
    type: dict
    required: true
  at:
    description: Where is counted, for the progress lines.
    type: str
    default: engine
  deadline_s:
    description: Seconds to wait at most.
    type: int
    default: 600
attributes:
  check_mode:
    description: Asks once and does not wait.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Wait for what the engines still have
  drain_wait:
    probe: lane_in_flight
    options: {lanes: [main]}
    deadline_s: 600
"""

RETURN = r"""
in_flight:
  description: Requests at the end; null when unknown.
  returned: always
  type: int
  sample: 0
drained:
  description: Whether nothing was left.
  returned: always
  type: bool
elapsed_s:
  description: Seconds that the wait took.
  returned: always
  type: int
  sample: 12
reason:
  description: V(drained), V(deadline), V(unknown), or V(check_mode).
  returned: always
  type: str
  sample: drained
"""
