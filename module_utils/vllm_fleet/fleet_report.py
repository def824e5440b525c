"""What a fleet's boxes said, as rows for a table and one exit status. Pure."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, Sequence

from . import checks

HEADER = ("box", "lane", "status", "check", "reason", "message")


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text with aligned columns; the first row is the header."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def verify_rows(
    box: str, lanes: Iterable[Mapping[str, Any]], probes: Iterable[Mapping[str, Any]]
) -> List[Dict[str, str]]:
    """Return what does not pass on a box, and one ``pass`` row for each lane of which everything does.

    :param lanes: what ``lane_preflight`` returned for the box.
    :param probes: what ``lane_probe`` returned for the box.
    """
    answers = {probe["lane"]: probe for probe in probes}
    rows = []
    for lane in lanes:
        found = [item for item in lane["results"] if item["status"] != checks.PASS]
        probe = answers.get(lane["lane"])
        if probe is None:
            found.append(checks.result("answer", checks.UNKNOWN, "not_asked", "the lane was not asked"))
        elif probe["state"] != "ready":
            status = checks.WARN if probe["state"] == "starting" else checks.FAIL
            found.append(
                checks.result(
                    "answer",
                    status,
                    probe["state"],
                    probe["message"] or probe["phase"],
                    f"journalctl -u vllm@{lane['lane']}",
                )
            )
        for item in found or [
            checks.result("all", checks.PASS, "verified", f"{lane['summary']['pass']} checks pass, and it answers")
        ]:
            rows.append({"box": box, "lane": lane["lane"], **item})
    return rows


def verify_text(rows: Sequence[Mapping[str, str]], unreached: Sequence[str]) -> str:
    """Return the table of a fleet, worst first, each fix below its row; boxes that were not reached are ``unknown``."""
    order = (checks.FAIL, checks.UNKNOWN, checks.WARN, checks.PASS)
    listed: List[Dict[str, str]] = [
        {"box": box, "lane": "-", **checks.result("reach", checks.UNKNOWN, "unreachable", "the box was not reached")}
        for box in unreached
    ]
    listed += [dict(row) for row in rows]
    listed.sort(key=lambda row: (order.index(row["status"]), row["box"], row["lane"]))
    table = columns([HEADER, *[tuple(row[name] for name in HEADER) for row in listed]]).splitlines()
    lines = table[:2]
    for line, row in zip(table[2:], listed):
        lines += [line, f"  fix: {row['fix']}"] if row["fix"] else [line]
    return "\n".join(lines)
