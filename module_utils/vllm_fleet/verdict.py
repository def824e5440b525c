"""Stored results of real transfers between GPUs, and what they stay valid for. Pure.

A verdict belongs to one driver (version, flavour, settings), one mainboard and BIOS, one IOMMU mode, and for each pair
to two cards in two slots. Driver, firmware and slot each decide whether peer-to-peer data arrives whole, so a change
of any of them makes the link unproven again.

Document (``/var/lib/vllm-fleet/verdicts/p2p.json``)::

    {"schema": 1, "bound": {…}, "pairs": [{"gpus": [{"uuid", "bus_id"}, {"uuid", "bus_id"}], "status": "pass | fail |
     inconclusive", "reason": "…", "message": "…", "arms": {…}, "time": "2026-11-30T20:00:00Z"}]}
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"

#: worst first
STATUSES = (FAIL, INCONCLUSIVE, PASS)

#: settings of the NVIDIA module that change how peers reach each other
_MODULE_SETTINGS = ("RegistryDwords", "RegistryDwordsPerDevice", "EnableResizableBar", "GrdmaPciTopoCheckOverride")

Facts = Mapping[str, Any]
Verdict = Dict[str, Any]


def bound(facts: Facts) -> Optional[Dict[str, Any]]:
    """Return what a verdict made on these facts is bound to; ``None`` when the driver's version is not known."""
    loaded = facts["driver"]["loaded"]
    if loaded is None:
        return None
    extra = facts.get("extra") or {}
    module = extra.get("module") or {}
    settings = module.get("parameters") or {}
    return {
        "vendor": facts["vendor"],
        "driver": loaded,
        "flavour": module.get("flavour"),
        "settings": {name: settings[name] for name in _MODULE_SETTINGS if settings.get(name)},
        "iommu": facts["host"]["iommu"],
        "board": dict(extra.get("board") or {}),
    }


def is_valid(verdict: Mapping[str, Any], bound_now: Optional[Mapping[str, Any]]) -> bool:
    """Return whether the machine is the one that the verdict was made on; its pairs are judged by :func:`for_facts`."""
    return bound_now is not None and verdict.get("schema") == 1 and verdict.get("bound") == bound_now


def changed(verdict: Mapping[str, Any], bound_now: Optional[Mapping[str, Any]]) -> List[str]:
    """Return the names of what is no longer as it was when the verdict was made."""
    then: Mapping[str, Any] = verdict.get("bound") or {}
    now: Mapping[str, Any] = bound_now or {}
    return sorted(name for name in {*then, *now} if then.get(name) != now.get(name))


def _card(gpu: Mapping[str, Any]) -> Tuple[Any, Any]:
    return gpu.get("uuid"), gpu.get("bus_id")


def _pair_key(pair: Mapping[str, Any]) -> Tuple[Tuple[Any, Any], ...]:
    return tuple(sorted((_card(gpu) for gpu in pair["gpus"]), key=str))


def worst(statuses: Sequence[str]) -> str:
    """Return the worst of some statuses; ``inconclusive`` for none."""
    return next((status for status in STATUSES if status in statuses), INCONCLUSIVE)


def for_facts(verdict: Optional[Mapping[str, Any]], facts: Facts) -> Optional[Dict[str, Any]]:
    """Return the contract's ``p2p_verdict`` for these facts, from the pairs that are still valid; ``None`` without any.

    A pair is valid while both cards (by UUID) sit in the slots (bus ids) that they were tested in.
    """
    if not verdict or not facts.get("gpus") or not is_valid(verdict, bound(facts)):
        return None
    places = {_card(gpu): gpu["index"] for gpu in facts["gpus"] if None not in _card(gpu)}
    pairs = {}
    for pair in verdict["pairs"]:
        found = sorted(places[card] for card in map(_card, pair["gpus"]) if card in places)
        if len(found) == 2:
            pairs[f"{found[0]}-{found[1]}"] = pair["status"]
    return {"status": worst(list(pairs.values())), "pairs": pairs} if pairs else None


def merge(old: Optional[Mapping[str, Any]], new: Verdict) -> Verdict:
    """Return the new verdict with the old one's other pairs, as far as those are bound to the same machine."""
    if not old or not is_valid(old, new["bound"]):
        return new
    fresh = {_pair_key(pair) for pair in new["pairs"]}
    kept = [pair for pair in old["pairs"] if _pair_key(pair) not in fresh]
    return {**new, "pairs": sorted(kept + new["pairs"], key=_pair_key)}


def judge(control: Mapping[str, Any], found: Optional[Mapping[str, Any]]) -> Tuple[str, str, str]:
    """Judge one pair by its two arms; return ``(status, reason, message)``.

    :param control: what came of the arm with P2P off: ``{"outcome", "detail"}`` with
        the outcome ``equal``, ``wrong_data``, ``hang``, ``error``, ``killed`` or ``not_started``.
    :param found: the same of the arm with P2P as the driver grants it; ``None`` when it was not run.

    A control arm that fails says nothing about the link: then the machine, or the engine's Python, is at fault.
    """
    if control["outcome"] != "equal":
        detail = control.get("detail") or control["outcome"]
        return INCONCLUSIVE, "control_failed", f"the transfer without P2P failed: {detail}"
    if found is None:
        return INCONCLUSIVE, "not_run", "the transfer with P2P was not run"
    outcome = found["outcome"]
    if outcome == "not_started":
        return INCONCLUSIVE, "not_started", f"the test did not start: {found.get('detail') or 'no reason given'}"
    if outcome == "killed":
        return INCONCLUSIVE, "killed", f"the transfer with P2P was ended from outside: {found['detail']}"
    if outcome == "equal":
        return PASS, "values_equal", "the same values arrive with P2P and without it"
    if outcome == "wrong_data":
        return (
            FAIL,
            "wrong_data",
            f"P2P delivers wrong data: {found.get('detail') or 'values differ from the exact sum'}",
        )
    if outcome == "hang":
        return FAIL, "hang", "P2P is granted but the transfer does not end"
    if "out of memory" in str(found.get("detail", "")).lower():
        return INCONCLUSIVE, "out_of_memory", f"no room for the test on the card: {found['detail']}"
    return FAIL, "error", f"P2P is granted but the transfer fails: {found.get('detail') or outcome}"
