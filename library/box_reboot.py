#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Documentation of the action ``box_reboot``; the work is in ``action_plugins/box_reboot.py`` and M(box_boot)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: box_reboot
short_description: Reboot a box if that is needed and allowed, wait for it, and prove what the reboot was for
description:
  - Refuses a local connection, and a box that is the controller itself under another name.
  - Says what the box does while it is away, and proves the reboot when it is back, that is, another boot id, the loaded
    kernel module is the installed one, and as many GPUs as before.
  - A run that was interrupted goes on with the proof; a cause that survives its reboot fails without another one.
version_added: "0.1.0"
options:
  plan_only:
    description: Decide and refuse, and stop there.
    type: bool
    default: false
  allowed:
    description: Whether a reboot may be made. Left out, nobody has decided, and a needed one fails.
    type: bool
  required:
    description: Whether a reboot is needed. Left out, that is unknown, which is reported.
    type: bool
  reasons:
    description: Codes of why a reboot is needed.
    type: list
    elements: str
    default: []
  blocked:
    description: Codes of why a reboot would not help; any refuses one.
    type: list
    elements: str
    default: []
  again:
    description: Reboot although the last one for the same cause did not help.
    type: bool
    default: false
  module:
    description: Kernel module whose loaded version must be the installed one afterwards; empty for none.
    type: str
    default: ""
  by:
    description: What asks for the reboot, for the record.
    type: str
    default: reboot
  deadline_s:
    description: Seconds from the request until the box must answer over SSH. The firmware of GPU servers takes minutes.
    type: int
    default: 1200
  settle_s:
    description: Seconds after that for the driver to come up with its GPUs.
    type: int
    default: 120
attributes:
  check_mode:
    description: Decides and refuses, and does not reboot.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Reboot for the new driver
  box_reboot:
    allowed: true
    required: true
    reasons: [driver_mismatch]
    module: nvidia
"""

RETURN = r"""
action:
  description: V(none), V(report), V(reboot) or V(prove), what was decided.
  returned: always
  type: str
  sample: reboot
reason:
  description: See M(box_boot); besides V(local_connection), V(controller_itself), V(did_not_go_down), V(not_back) and
    V(host_key_changed).
  returned: always
  type: str
  sample: proven
results:
  description: Check results of the proof.
  returned: when there was one
  type: list
  elements: dict
lanes:
  description: Lanes that ran before.
  returned: always
  type: list
  elements: str
  sample: [main]
elapsed_s:
  description: Seconds from the request to the answer.
  returned: when this run rebooted the box
  type: int
  sample: 311
"""
