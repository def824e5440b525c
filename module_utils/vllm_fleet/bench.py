"""How fast a release serves: the engine's own benchmark, its result in few numbers, and what changed. Pure.

Document (``/var/lib/vllm-fleet/bench/<lane>/<release>.json``)::

    {"schema": 1, "lane": "main", "release": "8c0e1f2ab34d", "engine": "vllm-0.33.0-cuda",
     "time": "2026-11-30T20:00:00Z", "seconds": 12.3,
     "load": {"prompts": 32, "input_tokens": 64, "output_tokens": 64, "concurrency": 8},
     "requests_per_s": 2.6, "output_tokens_per_s": 166.4, "ttft_ms": {"p50": …, "p90": …, "p99": …}, "itl_ms": {…}}

``ttft`` is the time to the first token, ``itl`` the time between two tokens of one answer.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import checks
from .errors import FleetError

Result = Dict[str, Any]

PERCENTILES = (50, 90, 99)

#: a run below this is no measure of anything: on fast cards half a second gave results a quarter apart
SHORT_S = 2.0

#: what is compared: name, path in the document, whether more is better, whether a loss is a warning. The outer
#: percentiles of some dozens of requests jump from run to run, so they are shown and decide nothing.
METRICS: Tuple[Tuple[str, Tuple[str, ...], bool, bool], ...] = (
    ("requests/s", ("requests_per_s",), True, True),
    ("output tokens/s", ("output_tokens_per_s",), True, True),
    ("TTFT p50 ms", ("ttft_ms", "p50"), False, True),
    ("TTFT p90 ms", ("ttft_ms", "p90"), False, False),
    ("TTFT p99 ms", ("ttft_ms", "p99"), False, False),
    ("ITL p50 ms", ("itl_ms", "p50"), False, True),
    ("ITL p90 ms", ("itl_ms", "p90"), False, False),
    ("ITL p99 ms", ("itl_ms", "p99"), False, False),
)


class Load(NamedTuple):
    """What is asked of the lane: random prompts, answers of a fixed length, so many at once."""

    prompts: int = 32
    input_tokens: int = 64
    output_tokens: int = 64
    concurrency: int = 8


def arguments(lane: Mapping[str, Any], address: str, load: Load, directory: str) -> List[str]:
    """Return the words behind ``vllm``; the result lands in ``result.json`` of ``directory``. No key is among them.

    :param address: host to ask, in brackets for IPv6.
    """
    return [
        "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions",
        "--base-url", f"http://{address}:{lane['port']}",
        "--model", lane["checkpoint"]["path"], "--served-model-name", lane["served_names"][0],
        "--dataset-name", "random", "--seed", "0", "--ignore-eos", "--disable-tqdm",
        "--num-prompts", str(load.prompts), "--max-concurrency", str(load.concurrency),
        "--random-input-len", str(load.input_tokens), "--random-output-len", str(load.output_tokens),
        "--percentile-metrics", "ttft,itl", "--metric-percentiles", ",".join(map(str, PERCENTILES)),
        "--save-result", "--result-dir", directory, "--result-filename", "result.json",
    ]  # fmt: skip


def condense(raw: Mapping[str, Any], load: Load) -> Result:
    """Return the numbers that are kept of the engine's result file.

    :raises FleetError: ``requests_failed`` when not every request was answered, ``bad_result`` for another shape.
    """
    done = raw.get("completed")
    if done != load.prompts:
        raise FleetError(
            "requests_failed",
            f"{done} of {load.prompts} requests were answered",
            "look at the lane's log; a prompt and its answer must fit into the model's context",
        )
    try:
        return {
            "load": load._asdict(),
            "seconds": round(float(raw["duration"]), 2),
            "requests_per_s": round(float(raw["request_throughput"]), 3),
            "output_tokens_per_s": round(float(raw["output_throughput"]), 1),
            **{
                f"{name}_ms": {f"p{number}": round(float(raw[f"p{number}_{name}_ms"]), 3) for number in PERCENTILES}
                for name in ("ttft", "itl")
            },
        }
    except (KeyError, TypeError, ValueError) as error:
        raise FleetError("bad_result", f"the engine's result lacks or garbles {error}") from None


def _value(result: Mapping[str, Any], path: Sequence[str]) -> float:
    value: Any = result
    for key in path:
        value = value[key]
    return float(value)


def compare(now: Result, before: Optional[Result], share: float) -> Tuple[List[List[str]], checks.Result]:
    """Return a table of both releases (rows of texts, header first) and the check result ``bench``.

    :param before: an earlier release's result under the same load, if there is one.
    :param share: loss of a metric, as a share of its earlier value, beyond which it is a warning (0.2 is a fifth).
    """
    rows = [["metric", before["release"] if before else "-", now["release"], "change", "warning"]]
    slower = []
    for name, path, more_is_better, decides in METRICS:
        new = _value(now, path)
        if before is None:
            rows.append([name, "-", f"{new:g}", "-", ""])
            continue
        old = _value(before, path)
        change = (new - old) / old if old else 0.0
        lost = decides and (-change if more_is_better else change) > share
        rows.append([name, f"{old:g}", f"{new:g}", f"{change:+.0%}", "slower" if lost else ""])
        if lost:
            slower.append(f"{name} {old:g} -> {new:g} ({change:+.0%})")
    if before is None:
        message = f"{now['output_tokens_per_s']:g} tokens/s; no earlier release was measured under this load"
        return rows, checks.result("bench", checks.PASS, "nothing_to_compare", message)
    brief = min(float(now["seconds"]), float(before["seconds"]))
    if brief < SHORT_S:
        message = f"a run of {brief:g} s says little; release {before['release']} can't be compared"
        prompts = int(now["load"]["prompts"] * 10 / max(brief, 0.1))
        fix = f"measure both with more requests, for example --prompts {prompts}"
        return rows, checks.result("bench", checks.UNKNOWN, "too_short", message, fix)
    if slower:
        message = f"slower than release {before['release']} by more than {share:.0%}: {', '.join(slower)}"
        fix = "repeat it on an idle box; if it stays, look at what the release changed, or roll back"
        return rows, checks.result("bench", checks.WARN, "slower", message, fix)
    message = f"{now['output_tokens_per_s']:g} tokens/s, within {share:.0%} of release {before['release']}"
    return rows, checks.result("bench", checks.PASS, "as_fast", message)


def choose_earlier(
    results: Sequence[Result], release: str, previous: Optional[str], load: Mapping[str, Any]
) -> Optional[Result]:
    """Return the result to compare with: the previous release's, else the newest of another one; same load only."""
    fit = [result for result in results if result["release"] != release and result["load"] == dict(load)]
    fit.sort(key=lambda result: (result["release"] == previous, str(result["time"])))
    return fit[-1] if fit else None
