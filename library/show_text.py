#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Documentation of the action ``show_text``; the work is in ``action_plugins/show_text.py``."""

from __future__ import annotations

DOCUMENTATION = r"""
module: show_text
short_description: Print a text as it is
description:
  - Prints a table or a report, line by line, without the quotes and the folding of a task's result.
  - Runs on the controller.
version_added: "0.1.0"
options:
  text:
    description: What to print.
    type: str
    required: true
attributes:
  check_mode:
    description: Prints in check mode too.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Say how the fleet stands
  show_text:
    text: "{{ report }}"
  run_once: true
"""

RETURN = r"""
reason:
  description: V(shown).
  returned: always
  type: str
  sample: shown
"""
