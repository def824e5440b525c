#!/usr/bin/env python3
"""Write docs/checks.md from the registered checks: ``python3 docs/generate_checks.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/checks.md"

if str(ROOT / "module_utils") not in sys.path:
    sys.path.insert(0, str(ROOT / "module_utils"))

from vllm_fleet.preflight.delegated import DELEGATED  # noqa: E402
from vllm_fleet.preflight.registry import CHECKS, Code  # noqa: E402
from vllm_fleet.preflight.run import NOT_YET  # noqa: E402

INTRODUCTION = f"""# The checks of a lane

`vllm-fleet preflight LANE` runs them on a box, the unit runs them before each start, the module `lane_preflight` runs
them before a play touches anything, and `vllm-fleet doctor` shows them to a person with what to do. This page is
generated from the checks themselves by `docs/generate_checks.py`; edit those.

Each result is `{{check, status, reason, message, fix}}`. Match the reason codes, read the messages. `fail` forbids the
start; `warn` and `unknown` (could not be checked) are shown and do not. A check that does not apply to a lane, such as
a GPU check of a lane without GPUs, gives no result at all.

The status below is the default, that of a fleet. A profile or the inventory changes it by the check's name:
`checks: {{memory: warn, persistence: fail, display: "off"}}`. `warn` softens a fail, `fail` hardens a warning, `off`
leaves the check out; `unknown` stays what it is.

Codes marked ¹ mean that an earlier step of an installation has not run. In a dry run on a fresh box they are `unknown`
with the reason `{NOT_YET}`.
"""

GROUPS = {
    "engine": "The engine",
    "checkpoint": "The checkpoint",
    "toolchain": "The toolchain of the first start",
    "host": "The host",
    "gpu": "The GPUs",
    "serving": "Serving",
    "wide": "Lanes that span boxes",
}

SECTIONS = {"checkpoint": "checkpoint", "products": "engine"}


def page() -> str:
    """Return the text of docs/checks.md."""
    sections: Dict[str, List[str]] = {group: [] for group in GROUPS}
    for name, item in CHECKS.items():
        sections[item.group] += entry(name, item.about, item.codes)
    for name, other in DELEGATED.items():
        sections[SECTIONS[other.module]] += entry(name, other.about, other.codes)
    parts = [INTRODUCTION]
    for group, title in GROUPS.items():
        parts.append("\n".join([f"## {title}", "", *sections[group]]))
    return "\n".join(parts).rstrip() + "\n"


def entry(name: str, about: str, codes: Dict[str, Code]) -> List[str]:
    """Return the lines of one check: what it asserts, and a table of its reason codes."""
    lines = [f"### {name}", "", about.replace("``", "`"), "", "| reason | status | meaning |", "|---|---|---|"]
    lines += [
        f"| `{reason}`{'¹' if code.absent else ''} | {code.status} | {code.meaning} |" for reason, code in codes.items()
    ]
    return [*lines, ""]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
