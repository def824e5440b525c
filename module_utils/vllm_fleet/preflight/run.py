"""One pass over all checks of a lane: facts in, results out, then one verdict."""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, List, NamedTuple, Optional

from .. import checks
from ..errors import UsageError
from ..facts.host import under
from ..files import read_json
from . import engine, gather, gpu, host, serving, toolchain, wide  # noqa: F401 - importing them registers their checks
from .delegated import DELEGATED
from .registry import CHECKS, Box, Lane, severity, with_gpu

LANES = "/etc/vllm-fleet/lanes"
NOT_YET = "not_yet_installed"

_REQUIRED = (
    "lane",
    "engine",
    "entry",
    "checkpoint",
    "host",
    "port",
    "args",
    "env",
    "policy",
    "needs",
    "readiness",
    "workdir",
)


class Verdict(NamedTuple):
    """One result with the two halves of its message, for those who print them on lines of their own."""

    result: checks.Result
    found: str
    needed: str


def load(lane: str, root: str = "/") -> Lane:
    """Read the resolved lane of the current release.

    :raises UsageError: ``unknown_lane``, or ``bad_lane`` for a file that is no resolved lane.
    """
    if "/" in lane or lane in ("", ".", ".."):
        raise UsageError("unknown_lane", f"{lane!r} is no lane name")
    path = under(root, os.path.join(LANES, lane, "current/lane.json"))
    if not os.path.exists(path):
        known = ", ".join(names(root)) or "none"
        raise UsageError("unknown_lane", f"no lane {lane} on this box; lanes here: {known}")
    return validated(read_json(path, "lane"), path)


def names(root: str = "/") -> List[str]:
    """Return the lanes that have a current release on this box."""
    base = under(root, LANES)
    try:
        entries = sorted(os.listdir(base))
    except OSError:
        return []
    return [name for name in entries if os.path.exists(os.path.join(base, name, "current/lane.json"))]


def validated(data: Any, source: str) -> Lane:
    """Return the lane if it has the parts that every check relies on.

    :raises UsageError: ``bad_lane``, or ``unknown_check`` for an override of a check that does not exist.
    """
    if not isinstance(data, dict):
        raise UsageError("bad_lane", f"{source} holds no JSON object")
    missing = [name for name in _REQUIRED if name not in data]
    if missing:
        raise UsageError("bad_lane", f"{source} is no resolved lane: it lacks {', '.join(missing)}")
    for name, value in (data.get("checks") or {}).items():
        if name not in CHECKS and name not in DELEGATED:
            raise UsageError("unknown_check", f"{source} sets the severity of {name!r}, which is no check")
        if value not in (checks.FAIL, checks.WARN, "off"):
            raise UsageError("bad_severity", f"{source} sets {name} to {value!r}; it can be fail, warn or off")
    return data


def evaluate(lane: Lane, box: Box, skip: Iterable[str] = (), dry_run: bool = False) -> List[Verdict]:
    """Run every check that applies to the lane over the facts of its box. Pure.

    A check that does not apply, is off, or is in ``skip`` gives no result, so it is never shown as passed.

    :param dry_run: what is absent because an earlier step has not run is ``unknown`` with reason ``not_yet_installed``.
    """
    overrides: Dict[str, str] = lane.get("checks") or {}
    left_out = set(skip) | {name for name, value in overrides.items() if value == "off"}
    verdicts = []
    for name, item in CHECKS.items():
        if name in left_out or not item.applies(lane):
            continue
        for finding in item.function(lane, box):
            code = item.codes[finding.reason]
            message = f"{finding.found}; needed: {finding.needed}" if finding.needed else finding.found
            result = checks.result(name, code.status, finding.reason, message, finding.fix)
            if dry_run and code.absent:
                result.update(status=checks.UNKNOWN, reason=NOT_YET)
            verdicts.append(Verdict(result, finding.found, finding.needed))
    for given in box["results"]:
        if given["check"] in left_out:
            continue
        result = dict(given)
        known = DELEGATED.get(given["check"])
        if dry_run and known and given["reason"] in known.codes and known.codes[given["reason"]].absent:
            result.update(status=checks.UNKNOWN, reason=NOT_YET)
        verdicts.append(Verdict(result, given["message"], ""))
    for verdict in verdicts:
        verdict.result["status"] = severity(verdict.result["status"], overrides.get(verdict.result["check"]))
    return verdicts


def run_lane(
    lane: str,
    *,
    facts: Optional[Dict[str, Any]] = None,
    decision: Optional[Dict[str, Any]] = None,
    boot: bool = False,
    root: str = "/",
    lane_data: Optional[Lane] = None,
    hashing: bool = True,
) -> List[checks.Result]:
    """Check a lane on this box and return all results.

    :param lane: the lane's name; its current release is read unless ``lane_data`` is given.
    :param facts: topology facts (schema 1) without the lane's own processes, read from the hardware when left out.
    :param decision: the topology decision on those facts, made here when left out.
    :param boot: a start of the unit: the results are stored, and what did not pass is written to the journal.
    :param hashing: verify the engine's build products.
    :raises UsageError: for a lane that is unknown or malformed.
    """
    data = load(lane, root) if lane_data is None else validated(lane_data, f"lane {lane}")
    if with_gpu(data):
        # imported here: the start check runs this function, and owns the rules of who may use which GPU
        from .. import start

        facts = facts if facts is not None else start.live_facts([lane], root)
        if decision is None:
            decision = start.decide(data, facts, start.owned_by_others(lane, root))
    common = gather.read_box(facts, root)
    box = gather.read_lane(data, common, decision=decision, root=root, execute=root == "/", hashing=hashing)
    results = [verdict.result for verdict in evaluate(data, box)]
    if boot:
        from . import report

        report.publish(lane, results, root)
    return results


def known_checks() -> List[str]:
    """Return the names of all checks, those of other modules included."""
    return sorted([*CHECKS, *DELEGATED])


def gpus_wanted(lanes: Iterable[Lane]) -> bool:
    """Return whether any of the lanes owns GPUs."""
    return any(with_gpu(lane) for lane in lanes)
