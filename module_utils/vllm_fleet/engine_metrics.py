"""Numbers out of the text that an engine gives at ``/metrics``. Pure."""

from __future__ import annotations

import re
from typing import Dict, List, Optional

#: name, labels (whose values are quoted and may hold braces), value
_LINE = re.compile(r'^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?\s+(\S+)')
_ENGINE = re.compile(r'[{,]engine="([^"]*)"')

#: requests that an engine works on or has accepted
_IN_FLIGHT = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def sums(text: str) -> Dict[str, float]:
    """Return each metric's value, summed over its labels; lines that are no sample are left out."""
    found: Dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match:
            try:
                value = float(match.group(2))
            except ValueError:
                continue
            found[match.group(1)] = found.get(match.group(1), 0.0) + value
    return found


def by_engine(text: str) -> Dict[str, Dict[str, float]]:
    """Return the same for each engine behind the server, by its label; ``0`` where the metrics know only one."""
    lines: Dict[str, List[str]] = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            label = _ENGINE.search(line)
            lines.setdefault(label.group(1) if label else "0", []).append(line)
    return {engine: sums("\n".join(found)) for engine, found in lines.items()}


def in_flight(text: str) -> Optional[int]:
    """Return how many requests the engine has, running and waiting; None when the text does not say."""
    values = sums(text)
    if any(name not in values for name in _IN_FLIGHT):
        return None
    return int(sum(values[name] for name in _IN_FLIGHT))
