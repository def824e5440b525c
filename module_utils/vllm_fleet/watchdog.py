"""Is an engine alive? Told by forward progress, never by ``/health``. Pure: over counters that an adapter brings.

``/health`` answers 200 on a dead engine (vllm-project/vllm#39863), and a busy engine may be slow to answer anything.
What tells them apart is whether the engine's own counters move while it has requests. An engine that says it has none
is asked for one token now and then: counters of an engine that hangs before a request reaches them say "idle" for ever.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from . import engine_metrics

#: what a lane's ``watchdog`` leaves out, in seconds
DEFAULTS: Dict[str, Any] = {
    "enabled": True,
    # between two looks
    "interval_s": 10,
    # requests and no counter moves: longer than compiling a kernel that a request was the first to need
    "stall_s": 180,
    # no answer to /metrics
    "silent_s": 60,
    # an engine without requests is asked for one token this often, and has this long to give it
    "probe_every_s": 60,
    "probe_s": 30,
}
#: looks that must agree, however long ago the first one was: a suspended machine is not a hung engine
MISSES = 3

#: the engine's own work, in the words of its metrics; which of them there are depends on its version
_PROGRESS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_count",
    "vllm:request_success_total",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
)
_REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")

Memory = Dict[str, Any]
Engines = Dict[str, Dict[str, Any]]


class Verdict(NamedTuple):
    """How the lane stands. ``status`` is ``ok``, ``suspect``, ``dead`` or ``unknown``; ``reason`` a stable code."""

    status: str
    reason: str
    message: str


def limits(lane: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the lane's limits, defaults filled in."""
    return {**DEFAULTS, **(lane.get("watchdog") or {})}


def engines(text: Optional[str]) -> Optional[Engines]:
    """Return by engine ``{"requests": n, "progress": [...]}`` out of ``/metrics``; None when nothing answered.

    An engine that does not count its requests is left out.
    """
    if text is None:
        return None
    found: Engines = {}
    for name, values in engine_metrics.by_engine(text).items():
        if all(metric in values for metric in _REQUESTS):
            found[name] = {
                "requests": int(sum(values[metric] for metric in _REQUESTS)),
                "progress": [values.get(metric) for metric in _PROGRESS],
            }
    return found


def empty_memory(invocation: str = "") -> Memory:
    """Return the memory of a watchdog that has seen nothing of this start of the unit."""
    return {"invocation": invocation, "silent": None, "engines": {}, "asked_at": None, "probe_failures": 0}


def wants_probe(memory: Memory, found: Optional[Engines], now: float, given: Mapping[str, Any]) -> bool:
    """Return whether to ask the engine for one token: it says that it has no request, and nothing moved for a while."""
    if not found or any(engine["requests"] for engine in found.values()):
        return False
    if memory["probe_failures"]:
        return True
    moved = [engine["moved_at"] for engine in memory["engines"].values()]
    last = max([*moved, *([memory["asked_at"]] if memory["asked_at"] is not None else [])], default=None)
    return last is not None and bool(now - last >= given["probe_every_s"])


def judge(
    memory: Memory, found: Optional[Engines], probe: Optional[str], now: float, given: Mapping[str, Any]
) -> Tuple[Memory, Verdict]:
    """Return the new memory and how the engine stands.

    :param found: what :func:`engines` returned; None when nothing answered.
    :param probe: ``answered``, ``failed`` (an error of the engine, or no answer in time), ``refused`` (an answer that
        says nothing about the engine) or None when it was not asked.
    :param now: seconds of a clock that never goes back.
    :param given: the lane's limits, complete.
    """
    kept: Memory = {**memory, "engines": {name: dict(entry) for name, entry in memory["engines"].items()}}
    if found is None:
        return _silent(kept, now, given)
    kept["silent"] = None
    if not found:
        return kept, Verdict("unknown", "no_counters", "the engine gives no counters; it is not watched")
    stuck = _stuck(kept, found, now)
    if probe is not None:
        kept["asked_at"] = now
        kept["probe_failures"] = kept["probe_failures"] + 1 if probe == "failed" else 0
    requests = sum(engine["requests"] for engine in found.values())
    for name, entry in stuck.items():
        age, count = now - entry["moved_at"], found[name]["requests"]
        text = f"{count} request(s) and no progress for {age:.0f} s" + (f" in engine {name}" if len(found) > 1 else "")
        if age >= given["stall_s"] and entry["misses"] >= MISSES:
            return kept, Verdict("dead", "no_progress", text)
        if entry["misses"] >= MISSES:
            return kept, Verdict("suspect", "no_progress", text)
    if kept["probe_failures"]:
        text = f"no request, and {kept['probe_failures']} question(s) for one token without an answer"
        return kept, Verdict("dead" if kept["probe_failures"] >= MISSES else "suspect", "no_answer_when_idle", text)
    if probe == "refused":
        return kept, Verdict("unknown", "probe_refused", "the question for one token was refused; is the key right?")
    return kept, Verdict("ok", "progress" if requests else "idle", f"{requests} request(s)")


def _silent(kept: Memory, now: float, given: Mapping[str, Any]) -> Tuple[Memory, Verdict]:
    since, misses = kept["silent"] or (now, 0)
    kept["silent"] = [since, misses + 1]
    dead = now - since >= given["silent_s"] and misses + 1 >= MISSES
    return kept, Verdict("dead" if dead else "suspect", "no_metrics", f"no answer to /metrics for {now - since:.0f} s")


def _stuck(kept: Memory, found: Engines, now: float) -> Dict[str, Dict[str, Any]]:
    """Note what moved; return the engines that have requests and stand still."""
    stuck: Dict[str, Dict[str, Any]] = {}
    for name, engine in found.items():
        entry = kept["engines"].setdefault(name, {"progress": None, "moved_at": now, "misses": 0})
        if entry["progress"] != engine["progress"]:
            if entry["progress"] is not None:
                kept["probe_failures"] = 0  # it works: what was asked while it was busy may just have waited
            entry.update(progress=engine["progress"], moved_at=now, misses=0)
        elif engine["requests"]:
            entry["misses"] += 1
            stuck[name] = entry
        else:
            entry["misses"] = 0
    return stuck


def restarts_kept(past: List[Dict[str, str]], when: str, reason: str, limit: int = 20) -> List[Dict[str, str]]:
    """Return the list of restarts with one more, newest last."""
    return [*past, {"time": when, "reason": reason}][-limit:]
