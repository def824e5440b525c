"""Action: print a text as it is. Options: library/show_text.py."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display


class ActionModule(ActionBase):
    """Print ``text``, which a task's own result would quote and fold."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp: Any = None, task_vars: Any = None) -> dict[str, Any]:
        """Print, and return nothing new."""
        result = super().run(tmp, task_vars)
        Display().display(str(self._task.args["text"]).rstrip("\n"))
        return {**result, "changed": False, "reason": "shown"}
