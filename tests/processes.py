"""Ends of processes, as tests need them."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from pathlib import Path


def kill_tree(pid: int) -> None:
    """SIGKILL a process of ours and all that descend from it.

    The workers of ansible-playbook have sessions of their own, so the process group is not all of a play: what it
    leaves would go on with the task at hand, as if the controller were still there.
    """
    os.kill(pid, signal.SIGSTOP)
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "pid (name) state ppid …", and a name may hold anything
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children[parent].append(int(stat.parent.name))
    todo = [pid]
    while todo:
        one = todo.pop()
        todo += children[one]
        try:
            os.kill(one, signal.SIGKILL)
        except ProcessLookupError:
            continue
