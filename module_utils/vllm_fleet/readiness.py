"""When is a lane ready, and what is it doing until then. Pure: over HTTP answers and log text that adapters bring.

Ready means a real completion by the served name. ``/health`` and ``/v1/models`` answer 200 on a dead engine
(vllm-project/vllm#39863), so they are steps on the way, never the proof.
"""

from __future__ import annotations

import re
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from . import checks

#: What the engine prints on its way up -> the phase that has begun. The last match in the log is where it is.
_PHASES: Tuple[Tuple[str, str], ...] = (
    (r"vLLM API server version|non-default args", "starting the engine"),
    (r"Initializing a V\d LLM engine", "starting the engine core"),
    (r"init_process_group|vLLM is using nccl|distributed_init_method=", "connecting the ranks"),
    (r"Starting to load model|Loading (safetensors|weights)|Model loading", "loading weights"),
    (r"Dynamo bytecode|Compiling a graph|torch\.compile (takes|took)|for vLLM's torch\.compile", "compiling kernels"),
    (r"[Mm]emory profiling|Available KV cache memory|KV cache size", "sizing the KV cache"),
    (r"Capturing CUDA graph", "capturing CUDA graphs"),
    (r"Warming up|[Ww]arm-?up (of|for|took)", "warming up"),
    (
        r"init engine \(|Starting vLLM|Started server process|Waiting for application startup",
        "starting the HTTP server",
    ),
    (r"Application startup complete", "answering HTTP"),
)
#: Telling words stand at the beginning; further on in a line the engine prints its whole configuration.
_TELLING = 120
_PHASE_PATTERNS = tuple((re.compile(pattern), phase) for pattern, phase in _PHASES)

#: Lines that name the cause, in the engine's own words; Python's traceback frames and banners are not among them.
_CAUSE = re.compile(r"(\b\w*(Error|Exception)\b: |\bERROR\b|\berror: |CUDA error|out of memory|Killed|Bus error)")
#: What pydantic says below its headline; the headline alone only counts the errors.
_DETAIL = re.compile(r"^\s+(Value error|Assertion failed|Input should be|Field required)\b")
_FRAME = re.compile(r'^\s*(File "|Traceback|\^+|~|During handling|The above exception)|^\s{2,}')
#: One blank ends the prefix; further ones are the indentation that tells a traceback's frames.
_PREFIX = re.compile(r"^(\([^)]*\) ?)?((INFO|ERROR|WARNING|DEBUG) \S+ \S+ \[[^\]]*\] ?)?")


def phase(log: str) -> str:
    """Return the phase that the log's last telling line belongs to; ``importing`` before the first one."""
    for line in reversed(log.splitlines()):
        text = _PREFIX.sub("", line)[:_TELLING]
        for pattern, name in reversed(_PHASE_PATTERNS):
            if pattern.search(text):
                return name
    return "importing"


def last_errors(log: str, limit: int = 5) -> List[str]:
    """Return the engine's own last error lines (newest last), without traceback frames and log prefixes."""
    found: List[str] = []
    for line in reversed(log.splitlines()):
        prefix = _PREFIX.match(line)
        text = line[prefix.end() if prefix else 0 :].rstrip()
        if prefix and prefix.group(3) in ("INFO", "WARNING", "DEBUG"):
            continue
        telling = _DETAIL.match(text) or (_CAUSE.search(line) and not _FRAME.match(text))
        text = text.strip()[:400]
        if text and telling and text not in found:
            found.append(text)
            if len(found) == limit:
                break
    if not found:
        found = [line.rstrip()[:400] for line in reversed(log.splitlines()) if line.strip()][:limit]
    return list(reversed(found))


def stall_hint(log: str, p2p_env: Mapping[str, str]) -> Optional[str]:
    """Name P2P as the suspect when the log ends at NCCL's start with P2P on (club-3090#873: a false grant blocks)."""
    if phase(log) == "connecting the ranks" and p2p_env.get("NCCL_P2P_LEVEL"):
        return (
            "stopped at NCCL's start with peer-to-peer on: granted but not functional? Prove it: vllm-fleet p2p-check"
        )
    return None


def judge_models(status: Optional[int], body: Any, names: Sequence[str]) -> checks.Result:
    """Judge ``GET /v1/models``: every served name must be listed."""
    check = "served_name"
    if status != 200 or not isinstance(body, dict):
        return checks.result(check, checks.FAIL, "models_unavailable", f"/v1/models answered {status}")
    listed = [entry.get("id") for entry in body.get("data", []) if isinstance(entry, dict)]
    missing = [name for name in names if name not in listed]
    if missing:
        return checks.result(
            check, checks.FAIL, "wrong_model", f"serves {', '.join(map(str, listed))}; expected {', '.join(missing)}"
        )
    return checks.result(check, checks.PASS, "listed", f"serves {', '.join(names)}")


def judge_completion(status: Optional[int], body: Any, name: str) -> checks.Result:
    """Judge one completion: status 200, the right model id, at least one generated token."""
    check = "completion"
    if status != 200 or not isinstance(body, dict):
        detail = body.get("error", body.get("message", "")) if isinstance(body, dict) else ""
        return checks.result(
            check, checks.FAIL, "completion_failed", f"/v1/completions answered {status} {detail}".strip()
        )
    if body.get("model") != name:
        return checks.result(
            check, checks.FAIL, "wrong_model", f"answered as {body.get('model')!r}, asked for {name!r}"
        )
    usage = body.get("usage") or {}
    if not body.get("choices") or int(usage.get("completion_tokens") or 0) < 1:
        return checks.result(check, checks.FAIL, "empty_completion", "the completion holds no generated token")
    return checks.result(check, checks.PASS, "answered", f"{usage['completion_tokens']} token(s) by {name}")


def judge_golden(status: Optional[int], body: Any, name: str, prompt: str, answer: str) -> checks.Result:
    """Judge a completion whose text is known: a wrong kernel or a stale cache answers fluently, and wrongly."""
    judged = judge_completion(status, body, name)
    if judged["status"] == checks.FAIL:
        return judged
    text = str((body["choices"][0] or {}).get("text"))
    if text != answer:
        return checks.result(
            "golden", checks.FAIL, "golden_differs", f"asked {prompt!r}: answered {text!r}; expected {answer!r}"
        )
    return checks.result("golden", checks.PASS, "golden_answered", f"asked {prompt!r}: the known answer")


def judge_log(log: str, expected: Sequence[str]) -> List[checks.Result]:
    """Judge the identity lines of a profile, such as ``GPU KV cache size: 924,993 tokens``.

    A line of the same kind with another value says that another build or command is running.
    """
    results = []
    for text in expected:
        kind = re.sub(r"[\d,.]+", "", text).split(":")[0].strip()
        like = [line.strip() for line in log.splitlines() if kind and kind in line]
        if text in log:
            results.append(checks.result("identity_line", checks.PASS, "found", text))
        elif like:
            results.append(
                checks.result(
                    "identity_line", checks.FAIL, "identity_differs", f"found {like[-1]!r}; expected {text!r}"
                )
            )
        else:
            results.append(
                checks.result("identity_line", checks.FAIL, "identity_missing", f"{text!r} is not in the log")
            )
    return results
