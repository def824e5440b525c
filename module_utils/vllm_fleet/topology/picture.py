"""A lane as a person sees it: a table for a terminal and an SVG picture. Pure; both take what :func:`decide` takes."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional

from .inputs import validate_facts, validate_policy
from .links import ANCESTOR_LABELS, Links, all_pairs

#: link class -> colour and width of its line, best first
_STROKES = ((6.0, "#2e7d32", 5), (5.0, "#1565c0", 4), (4.0, "#1e88e5", 3), (3.0, "#64b5f6", 2.5), (0.0, "#9e9e9e", 1.2))


class _View:
    def __init__(self, facts: Dict[str, Any], policy: Dict[str, Any], decision: Dict[str, Any]) -> None:
        self.facts = validate_facts(facts)
        self.policy = validate_policy(policy)
        self.links = Links(self.facts, self.policy["p2p"])
        self.gpus: List[Dict[str, Any]] = self.facts["gpus"] or []
        self.order: List[int] = decision["order"]
        self.decision = decision

    def cell(self, one: int, other: int) -> str:
        """Return a link as ``topo -m`` names it, with ``+`` for usable, ``?`` for granted, ``!`` for failed P2P."""
        pair = self.links.pair(one, other)
        if pair is None:
            return "?"
        lanes = pair["nvlink_lanes"]
        label = f"NV{lanes}" if lanes else ANCESTOR_LABELS[pair["ancestor"]]
        if self.links.failed(one, other):
            return label + "!"
        if self.links.usable(one, other):
            return label + "+"
        return label + "?" if self.links.granted(one, other) else label

    def rank(self, index: int) -> str:
        """Return the place of a GPU in the lane: stage and rank."""
        if index not in self.order:
            return "-"
        stage, rank = divmod(self.order.index(index), self.policy["tensor_parallel"])
        return f"pp{stage} tp{rank}"


def _known(value: Optional[Any]) -> str:
    return "?" if value is None else str(value)


def table(facts: Dict[str, Any], policy: Dict[str, Any], decision: Dict[str, Any]) -> str:
    """Return the GPUs, the link matrix and the decision as text with a final newline."""
    view = _View(facts, policy, decision)
    rows = [["GPU", "bus id", "name", "NUMA", "width", "gen max", "MiB used/total", "lane"]]
    for gpu in view.gpus:
        pcie = gpu["pcie"]
        rows.append(
            [
                str(gpu["index"]),
                _known(gpu["bus_id"]),
                _known(gpu["name"]),
                _known(gpu["numa_node"]),
                f"x{_known(pcie['width_current'])}/x{_known(pcie['width_max'])}",
                _known(pcie["gen_max"]),
                f"{_known(gpu['memory_used_mib'])}/{_known(gpu['memory_total_mib'])}",
                view.rank(gpu["index"]),
            ]
        )
    matrix = [["link"] + [str(gpu["index"]) for gpu in view.gpus]]
    for gpu in view.gpus:
        one = gpu["index"]
        cells = ["X" if one == other["index"] else view.cell(one, other["index"]) for other in view.gpus]
        matrix.append([str(one), *cells])
    host = view.facts["host"]
    lines = [*_columns(rows), "", *_columns(matrix)]
    lines += ["links: + P2P usable, ? P2P granted but not proven (alone: unknown), ! P2P failed its check", ""]
    lines.append(f"host: IOMMU {host['iommu']}, virtualization {host['virtualization']}")
    lines.append(f"{decision['status']} ({decision['reason']}): {decision['message']}")
    if decision["order"]:
        lines.append(f"order: {','.join(map(str, decision['order']))}")
        for name, entry in decision["env"].items():
            value = "(unset)" if entry["value"] is None else entry["value"]
            lines.append(f"  {name}={value}  [{entry['source']}]")
        if decision["engine_args"]:
            lines.append("  " + " ".join(decision["engine_args"]))
        binding = decision["binding"]
        bound = binding.get("skipped")
        lines.append(f"binding: {'none, ' + bound if bound else 'CPUs ' + binding['cpus']}")
    lines += [f"warning {warning['code']}: {warning['message']}" for warning in decision["warnings"]]
    return "\n".join(lines) + "\n"


def _columns(rows: List[List[str]]) -> List[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _escape(text: str) -> str:
    cleaned = "".join(character if character.isprintable() else "?" for character in text)
    return cleaned.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _text(x: float, y: float, size: int, text: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" {extra}>{_escape(text)}</text>'


def svg(facts: Dict[str, Any], policy: Dict[str, Any], decision: Dict[str, Any]) -> str:
    """Return a self-contained SVG: GPUs in a ring, links by class, lane members with stage and rank, warnings below."""
    view = _View(facts, policy, decision)
    count = max(1, len(view.gpus))
    radius = max(150.0, 26.0 * count)
    width = max(760.0, 2 * radius + 300)
    centre_x, centre_y = width / 2, radius + 130
    notes = [f"warning {warning['code']}: {warning['message']}" for warning in decision["warnings"]]
    height = 2 * radius + 270 + 18 * len(notes)
    places = {}
    for number, gpu in enumerate(view.gpus):
        angle = 2 * math.pi * number / count - math.pi / 2
        places[gpu["index"]] = (centre_x + radius * math.cos(angle), centre_y + radius * math.sin(angle))
    title = f"{decision['status']} ({decision['reason']}): {decision['message']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"'
        f' height="{height:.0f}" font-family="sans-serif" role="img">',
        f"<title>{_escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        _text(16, 28, 15, title[:160], 'font-weight="bold"'),
        _text(16, 50, 12, "line: link class (green NVLink, blue PCIe P2P, grey without P2P or unknown)"),
    ]
    for one, other in all_pairs(list(places)):
        value = view.links.link_class(one, other)
        colour, stroke = next((tone, wide) for least, tone, wide in _STROKES if (value or 0.0) >= least)
        faint = not (one in view.order and other in view.order)
        (x1, y1), (x2, y2) = places[one], places[other]
        parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{stroke}"'
            f"{' stroke-opacity=' + chr(34) + '0.35' + chr(34) if faint else ''}>"
            f"<title>{_escape(f'{one}-{other}: {view.cell(one, other)}')}</title></line>"
        )
        if count <= 8:
            parts.append(
                _text(x1 * 0.62 + x2 * 0.38, y1 * 0.62 + y2 * 0.38, 10, view.cell(one, other), 'text-anchor="middle"')
            )
    for gpu in view.gpus:
        x, y = places[gpu["index"]]
        chosen = gpu["index"] in view.order
        fill = "#c8e6c9" if chosen else "#eeeeee"
        pcie = gpu["pcie"]
        parts += [
            f'<rect x="{x - 62:.1f}" y="{y - 34:.1f}" width="124" height="68" rx="8" fill="{fill}" stroke="#424242"/>',
            _text(x, y - 17, 12, f"GPU {gpu['index']}  {view.rank(gpu['index'])}", 'text-anchor="middle"'),
            _text(x, y - 1, 10, _known(gpu["name"])[:24], 'text-anchor="middle"'),
            _text(x, y + 13, 10, _known(gpu["bus_id"]), 'text-anchor="middle"'),
            _text(
                x,
                y + 27,
                10,
                f"node {_known(gpu['numa_node'])}  x{_known(pcie['width_current'])}/x{_known(pcie['width_max'])}",
                'text-anchor="middle"',
            ),
        ]
    base = 2 * radius + 220
    if decision["order"]:
        parts.append(_text(16, base, 13, "order: " + ",".join(map(str, decision["order"]))))
    parts += [_text(16, base + 22 + 18 * place, 11, note[:200]) for place, note in enumerate(notes)]
    return "\n".join([*parts, "</svg>"]) + "\n"
