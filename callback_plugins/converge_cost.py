"""Callback: count every module execution of a run, including those inside action plugins.

Only for measuring: it does nothing unless ``CONVERGE_COST_FILE`` names a file. That file then gets a line
``call HOST MODULE`` for each execution and at the end a line ``changed HOST COUNT`` for each host.
"""

from __future__ import annotations

import os
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = r"""
name: converge_cost
type: aggregate
short_description: Count module executions
description:
  - Appends a line to the file that E(CONVERGE_COST_FILE) names for every module that is executed for a host.
requirements: []
"""

_original = ActionBase._execute_module


def _note(line: str) -> None:
    """Append a line in one write: the tasks' worker processes write to the same file."""
    handle = os.open(os.environ["CONVERGE_COST_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)


def _counted(self: ActionBase, *args: Any, **kwargs: Any) -> Any:
    """Note the call, then make it. A delegated call counts for the host that it is made for."""
    name = kwargs.get("module_name") or (args[0] if args else None) or self._task.action
    task_vars = kwargs.get("task_vars") or (args[3] if len(args) > 3 else None) or {}
    _note(f"call {task_vars.get('inventory_hostname', '?')} {name}")
    return _original(self, *args, **kwargs)


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """Wraps the module call before the first worker is forked; the workers inherit it."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "converge_cost"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        if os.environ.get("CONVERGE_COST_FILE"):
            ActionBase._execute_module = _counted
        else:
            self.disabled = True

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """Write how many tasks changed each host."""
        for host in stats.processed:
            _note(f"changed {host} {stats.summarize(host)['changed']}")
