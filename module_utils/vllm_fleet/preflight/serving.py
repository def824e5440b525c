"""Checks of what the lane serves and how: its port, who can reach it, and numbers that the engine would refuse late."""

from __future__ import annotations

import ipaddress
import re
from typing import Any, Dict, Iterable, List, Mapping, Optional

from .registry import Box, Finding, Lane, check, fail, ok, shorten, unknown, warn, with_api, with_gpu, with_toolchain

#: a cold compile and a load of more than 100 GiB, in seconds: the longest healthy start that was measured is 17 minutes
COLD_START_S = 1800

_WHOLE = re.compile(r"[1-9][0-9]*\Z")
# vLLM reads 32k as 32,000 and 32K as 32,768
_SCALED = re.compile(r"([1-9][0-9]*)([kKmMgG]?)\Z")
_FACTORS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
_POOL = re.compile(r"GPU KV cache size:\s*([\d,]+)\s*tokens")

_COUNTS = (
    "--max-num-seqs",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--block-size",
)
_TOKENS = ("--max-num-batched-tokens", "--max-model-len")


def options(lane: Lane) -> Dict[str, str]:
    """Return the engine arguments as ``{"--long-name": value}``; the last one wins, a bare flag gives ``""``."""
    result: Dict[str, str] = {}
    for group in lane["args"]:
        name, separator, value = group[0].partition("=")
        name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        result[name] = value if separator else " ".join(group[1:])
    return result


def tokens(text: str) -> Optional[int]:
    """Return a token count such as ``2048``, ``32k`` (32,000) or ``32K`` (32,768); ``None`` when it is none."""
    found = _SCALED.match(text)
    return int(found.group(1)) * _FACTORS[found.group(2)] if found else None


@check(
    "port",
    {
        "port_free": ok("nothing listens there"),
        "port_own": ok("this lane's own unit listens there"),
        "port_occupied": fail("another process listens on the lane's port"),
        "port_unknown": unknown("the kernel's socket table could not be read"),
    },
    with_api,
)
def port(lane: Lane, box: Box) -> List[Finding]:
    """The lane's port is free at its address, or is held by the lane's own unit, told by the control group."""
    number = int(lane["port"])
    if box["listeners"] is None:
        return [Finding("port_unknown", "the kernel's socket table could not be read")]
    holders = [entry for entry in box["listeners"] if same_address(lane["host"], entry["address"])]
    others = [entry for entry in holders if not in_unit(entry["cgroup"], lane["lane"])]
    if others:
        fix = "stop that process or give the lane another port"
        return [Finding("port_occupied", f"port {number} is held by {holders_named(others)}", "a free port", fix)]
    if holders:
        return [Finding("port_own", f"port {number} is held by this lane's own unit")]
    return [Finding("port_free", f"port {number} on {lane['host']} is free")]


def holders_named(listeners: Iterable[Mapping[str, Any]]) -> str:
    """Return who listens, for a message."""
    names = [
        f"pid {entry['pid'] or 'unknown'} ({entry['command'] or 'unknown command'})"
        + (f" in {entry['cgroup']}" if entry["cgroup"] not in (None, "/") else "")
        for entry in listeners
    ]
    return shorten(dict.fromkeys(names))


def in_unit(cgroup: Optional[str], lane: str) -> bool:
    """Return whether a control group belongs to the lane's unit."""
    return cgroup is not None and f"vllm@{lane}.service" in cgroup.split("/")


def same_address(host: str, address: str) -> bool:
    """Return whether a listener at ``address`` is in the way of a bind to ``host``; a wildcard meets every address."""
    try:
        left = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host or "0.0.0.0")  # noqa: S104
        right = ipaddress.ip_address(address)
    except ValueError:
        return True
    mapped = getattr(right, "ipv4_mapped", None)
    right = mapped or right
    if left.version == 4 and right.version == 6:
        return right.is_unspecified
    if left.version == 6 and right.version == 4:
        return left.is_unspecified
    return left == right or left.is_unspecified or right.is_unspecified


@check(
    "exposure",
    {
        "loopback": ok("only this box can reach the engine"),
        "public_with_key": warn("reachable from outside with a key, which does not guard every route"),
        "public_without_key": fail("reachable from outside without a key"),
        "api_key_unusable": fail("the API key file is missing or empty", absent=True),
    },
    with_api,
)
def exposure(lane: Lane, box: Box) -> List[Finding]:
    """The engine listens on the loopback address, or outside it with an API key. The key guards only the ``/v1``
    routes: ``/tokenize``, ``/pooling``, ``/score`` and others answer without it, so a proxy with a list of allowed
    routes belongs in front."""
    key_file = lane.get("api_key_file")
    if key_file and not box["api_key_present"]:
        needed = "a file with the API key"
        return [
            Finding(
                "api_key_unusable", f"{key_file} is missing or empty", needed, f"write the key to {key_file}, mode 0600"
            )
        ]
    if _is_loopback(lane["host"]):
        return [Finding("loopback", f"bound to {lane['host']}")]
    keyed = bool(key_file or lane["env"].get("VLLM_API_KEY") or options(lane).get("--api-key"))
    if not keyed:
        fix = "bind to 127.0.0.1 behind a proxy, or set api_key_file"
        return [
            Finding("public_without_key", f"bound to {lane['host']} without an API key", "127.0.0.1, or a key", fix)
        ]
    fix = "bind to 127.0.0.1 behind a proxy that passes only the routes in use"
    text = f"bound to {lane['host']} with an API key, which guards the /v1 routes only"
    return [Finding("public_with_key", text, "127.0.0.1 behind a proxy", fix)]


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@check(
    "scheduler_numbers",
    {
        "numbers_ok": ok("the numbers are plain decimals and fit together"),
        "number_invalid": fail(
            "a number that is no plain decimal of at least 1 (a leading zero is not taken as octal)"
        ),
        "batched_tokens_below_sequences": fail("fewer batched tokens than sequences: the engine refuses it"),
    },
)
def scheduler_numbers(lane: Lane, box: Box) -> List[Finding]:
    """Counts among the engine arguments are decimal, without leading zeros, at least 1; token counts may end in k or K;
    ``--max-num-batched-tokens`` is not below ``--max-num-seqs``."""
    given = options(lane)
    findings = []
    for name in _COUNTS:
        if name in given and not _WHOLE.match(given[name]):
            findings.append(
                Finding("number_invalid", f"{name} {given[name]!r}", "a decimal number, 1 or more", f"correct {name}")
            )
    for name in _TOKENS:
        special = name == "--max-model-len" and given.get(name) in ("auto", "-1")
        if name in given and not special and tokens(given[name]) is None:
            findings.append(
                Finding("number_invalid", f"{name} {given[name]!r}", "a number of tokens, 1 or more", f"correct {name}")
            )
    if findings:
        return findings
    sequences, batched = given.get("--max-num-seqs"), tokens(given.get("--max-num-batched-tokens", ""))
    if sequences and batched and batched < int(sequences):
        text = f"--max-num-batched-tokens {batched} is below --max-num-seqs {sequences}"
        return [
            Finding("batched_tokens_below_sequences", text, f"at least {sequences}", "raise the one or lower the other")
        ]
    return [Finding("numbers_ok", "the counts among the engine arguments are plain decimals")]


@check(
    "kv_pool",
    {
        "pool_ok": ok("the pool holds all sequences at full length"),
        "pool_unnamed": ok("the profile does not pin the pool's size"),
        "pool_preempts": warn("all sequences at full length do not fit: the engine preempts and recomputes"),
        "context_exceeds_pool": fail(
            "one request of full length does not fit: the engine refuses to start or waits for ever"
        ),
    },
    applies=lambda lane: "--max-model-len" in options(lane),
)
def kv_pool(lane: Lane, box: Box) -> List[Finding]:
    """The KV pool that the profile pins (the expected log line with its size in tokens) against one request of
    ``--max-model-len`` and against ``--max-num-seqs`` of them."""
    found = [match for match in map(_POOL.search, lane["readiness"].get("log_lines") or []) if match]
    given = options(lane)
    length = tokens(given["--max-model-len"])
    if not found or length is None:
        return [Finding("pool_unnamed", "the profile names no pool size to compare with")]
    pool = int(found[0].group(1).replace(",", ""))
    count = given.get("--max-num-seqs", "1")
    sequences = int(count) if _WHOLE.match(count) else 1
    text = f"the pool holds {pool} tokens"
    if length > pool:
        return [
            Finding("context_exceeds_pool", text, f"{length} for one request of full length", "lower --max-model-len")
        ]
    if sequences * length > pool:
        needed = f"{sequences * length} for {sequences} requests of full length"
        return [Finding("pool_preempts", text, needed, "lower --max-num-seqs if long requests are the rule")]
    return [Finding("pool_ok", f"{text}, {sequences} x {length} fit")]


@check(
    "start_deadline",
    {
        "deadline_ok": ok("a cold start fits the deadline"),
        "deadline_short": warn("a cold start with its compile can exceed the deadline and be killed each time"),
    },
    applies=with_toolchain,
)
def start_deadline(lane: Lane, box: Box) -> List[Finding]:
    """The start's deadline covers a cold compile and the load: 1,800 s, or what the engine itself waits for its offload
    process if that is longer. A start that is killed half-way throws its compile away, and the next one is as long."""
    deadline = int(lane["readiness"]["deadline_s"])
    wait = lane["env"].get("VLLM_PLE_OFFLOAD_READY_TIMEOUT", "")
    need = max(COLD_START_S, int(wait) if _WHOLE.match(wait) else 0)
    if deadline < need:
        return [
            Finding(
                "deadline_short", f"deadline {deadline} s", f"{need} s for a cold start", "raise readiness.deadline_s"
            )
        ]
    return [Finding("deadline_ok", f"deadline {deadline} s")]


@check(
    "visible_devices",
    {
        "devices_ok": ok("CUDA_VISIBLE_DEVICES is absent or a list of indices"),
        "devices_not_indices": fail("CUDA_VISIBLE_DEVICES holds something that the engine cannot turn into a number"),
    },
    applies=with_gpu,
)
def visible_devices(lane: Lane, box: Box) -> List[Finding]:
    """A CUDA_VISIBLE_DEVICES in the lane's environment is a list of indices. Inventories name GPUs by UUID in the
    policy, which is resolved at each start; the engine itself ends in a ValueError on a UUID."""
    value = lane["env"].get("CUDA_VISIBLE_DEVICES")
    if value and not all(part.strip().isdigit() for part in value.split(",")):
        fix = "name the GPUs in the lane's policy instead"
        return [Finding("devices_not_indices", f"CUDA_VISIBLE_DEVICES={value}", "indices such as 0,1", fix)]
    return [Finding("devices_ok", value or "left to the decision of the start")]
