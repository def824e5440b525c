"""What a fleet's boxes said becomes rows, and a table with the worst first and the way out below each row."""

from __future__ import annotations

import pytest
from vllm_fleet import checks, fleet_report

GOOD = {"lane": "main", "results": [checks.result("port", "pass", "port_free", "free")], "summary": {"pass": 1}}
BAD = {
    "lane": "main",
    "results": [*GOOD["results"], checks.result("python_headers", "fail", "headers_missing", "no Python.h", "install")],
    "summary": {"pass": 1},
}


def probe(state, message=""):
    return [{"lane": "main", "state": state, "message": message, "phase": "loading weights"}]


def test_a_lane_with_nothing_but_passes_is_one_row():
    (row,) = fleet_report.verify_rows("box1", [GOOD], probe("ready"))
    assert (row["box"], row["status"], row["message"]) == ("box1", "pass", "1 checks pass, and it answers")


@pytest.mark.parametrize(
    ("answer", "status", "reason", "message"),
    [
        (probe("failed", "unit failed"), "fail", "failed", "unit failed"),
        (probe("starting"), "warn", "starting", "loading weights"),
        ([], "unknown", "not_asked", "the lane was not asked"),
    ],
)
def test_a_lane_that_does_not_answer_never_passes(answer, status, reason, message):
    (row,) = fleet_report.verify_rows("box1", [GOOD], answer)
    assert (row["check"], row["status"], row["reason"], row["message"]) == ("answer", status, reason, message)


def test_the_table_has_the_worst_first_and_each_fix_below_its_row():
    rows = fleet_report.verify_rows("box2", [GOOD], probe("ready")) + fleet_report.verify_rows(
        "box1", [BAD], probe("ready")
    )
    lines = fleet_report.verify_text(rows, ["box3"]).splitlines()
    assert [line.split()[:5] for line in lines if line[0] not in "- "] == [
        ["box", "lane", "status", "check", "reason"],
        ["box1", "main", "fail", "python_headers", "headers_missing"],
        ["box3", "-", "unknown", "reach", "unreachable"],
        ["box2", "main", "pass", "all", "verified"],
    ]
    assert lines[3] == "  fix: install"
    assert sum("fix:" in line for line in lines) == 1
