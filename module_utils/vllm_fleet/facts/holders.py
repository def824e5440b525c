"""Who holds the accelerators' device nodes open: what has to end before a driver can be changed."""

from __future__ import annotations

import os
import re
from typing import Any, Dict, List

from .host import read_text, under

_NODE = re.compile(r"/dev/(?:nvidia(?:\d+|ctl|-uvm|-modeset|-caps/.*)?|iluvatar\d+|itrctl)\Z")


def read(root: str = "/") -> List[Dict[str, Any]]:
    """Return ``[{"pid", "name", "unit", "nodes": ["/dev/nvidia0", …]}]``, by pid. Root sees every process.

    A process in another PID namespace is not visible; what such a one holds shows as a busy card only.
    """
    found = []
    for pid in sorted(int(name) for name in os.listdir(under(root, "/proc")) if name.isdigit()):
        base = under(root, f"/proc/{pid}")
        nodes = set()
        try:
            for name in os.listdir(f"{base}/fd"):
                try:
                    target = os.readlink(f"{base}/fd/{name}")
                except OSError:
                    continue  # closed meanwhile
                if _NODE.match(target):
                    nodes.add(target)
        except OSError:
            continue  # ended meanwhile
        if nodes:
            unit = re.findall(r"([^/\n]+\.(?:service|scope))", read_text(f"{base}/cgroup") or "")
            name = (read_text(f"{base}/comm") or "?").strip()
            found.append({"pid": pid, "name": name, "unit": unit[-1] if unit else "", "nodes": sorted(nodes)})
    return found
