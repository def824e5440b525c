"""From the ``.env`` of a start script for four RTX 3090 to a lane of the inventory.

The names and what an empty value means are the script's; docs/seed-rtx3090.md has the table.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, Dict, List, Mapping, Tuple

from .errors import UsageError
from .runtime_env import DECISION_NAMES
from .systemd import ENV_NAME

#: what the script reads beside the profile's own knobs (those are named by ``seed`` in the profile)
_SCRIPT_NAMES = [
    "CKPT", "MODEL_MOUNT_PATH", "PORT", "HOST", "MODEL_NAME",
    "CACHE_ROOT", "CUDA_HOME", "LOG", "AUTO_TOPO", "AUTO_TOPO_NCCL",
    "AUTO_TOPO_BIND", "LANE_GPUS", "LANE_CPUS", "TOPO_TIMEOUT", "TREE",
    "VENV", "SERVE_PRINT_ENV_AND_EXIT", "VLLM_API_KEY", "CUDA_VISIBLE_DEVICES",
]  # fmt: skip

_LINE = re.compile(r"\s*(?:export\s+)?([^\s=]+)=(.*)", re.DOTALL)


def parse(text: str, source: str) -> Dict[str, str]:
    """Return the variables of an environment file: ``NAME=value`` lines, quotes, ``#`` comments, ``export``.

    :raises UsageError: ``bad_env_file`` with the line: no assignment, an open quote, or a ``$`` or backquote that a
        shell would expand (the result would depend on the machine that reads it).
    """
    variables: Dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if not found or not ENV_NAME.fullmatch(found.group(1)):
            raise UsageError("bad_env_file", f"{source}, line {number}: found {stripped[:60]!r}, allowed: NAME=value.")
        variables[found.group(1)] = _value(found.group(2).strip(), f"{source}, line {number}")
    return variables


def _value(text: str, place: str) -> str:
    """Return a value as a shell would read it, without expansion."""
    result: List[str] = []
    quote = ""
    index = 0
    while index < len(text):
        character = text[index]
        if quote == "'" and character != "'":
            result.append(character)
        elif character == "\\" and quote != "'" and index + 1 < len(text):
            index += 1
            # inside double quotes a backslash hides only these; elsewhere it stands for itself
            keep = quote == '"' and text[index] not in '"\\$`'
            result.append(("\\" if keep else "") + text[index])
        elif character in "\"'" and quote in ("", character):
            quote = "" if quote else character
        elif character in "$`":
            raise UsageError(
                "bad_env_file",
                f"{place}: {character} would be expanded by a shell.",
                "Write the value out, or quote it with '.",
            )
        elif character.isspace() and not quote:
            rest = text[index:].strip()
            if rest and not rest.startswith("#"):
                raise UsageError(
                    "bad_env_file", f"{place}: found {rest[:40]!r} after the value.", "Quote the whole value."
                )
            break
        else:
            result.append(character)
        index += 1
    if quote:
        raise UsageError("bad_env_file", f"{place}: the quote {quote} is not closed.")
    return "".join(result)


def to_lane(variables: Mapping[str, str], profile: Mapping[str, Any], name: str) -> Tuple[Dict[str, Any], List[str]]:
    """Return ``(lane, notes)``: the lane that does what the script does with these variables, and what changes with it.

    :raises UsageError: ``unknown_key`` for a name that looks like a misspelt one of the script's.
    """
    knobs = {spec["seed"]: knob for knob, spec in profile["knobs"].items() if "seed" in spec}
    lane: Dict[str, Any] = {"name": name, "profile": profile["id"]}
    notes: List[str] = []
    # an empty variable is the same as none to the script, LOG excepted
    given = {key: value for key, value in variables.items() if value != "" or key == "LOG"}

    checkpoint = given.get("CKPT") or given.get("MODEL_MOUNT_PATH")
    if checkpoint:
        lane["checkpoint"] = checkpoint
    for variable, key in (("PORT", "port"), ("HOST", "host"), ("CACHE_ROOT", "cache_root"), ("CUDA_HOME", "cuda_home")):
        if variable in given:
            lane[key] = given[variable]
    if "port" in lane and re.fullmatch(r"[1-9][0-9]{0,4}", lane["port"]):
        lane["port"] = int(lane["port"])
    if "MODEL_NAME" in given:
        lane["served_names"] = given["MODEL_NAME"].split() or profile["served_names"]
    if "LOG" in given:
        lane["log"] = given["LOG"]
    for variable, knob in knobs.items():
        if variable in given:
            lane[knob] = given[variable]
    _bind(given, lane, notes)
    topology = _topology(given, notes)
    if topology:
        lane["topology"] = topology
        _timeout(given, lane, notes)
    gpus = [word.strip() for word in given.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if any(gpus):
        lane["gpus"] = gpus
    env = _others(given, knobs, profile, topology.get("mode", "fixed"), notes)
    if env:
        lane["env"] = env
    return lane, notes


def _bind(given: Mapping[str, str], lane: Dict[str, Any], notes: List[str]) -> None:
    if "VLLM_API_KEY" in given:
        lane["api_key_file"] = f"/etc/vllm-fleet/secrets/{lane['name']}.key"
        notes.append("VLLM_API_KEY is a secret and is not copied: store the key in the file that api_key_file names.")
    elif given.get("HOST", "127.0.0.1") not in ("127.0.0.1", "localhost", "::1"):
        lane["allow_open_bind"] = True
        notes.append(
            f"HOST={given['HOST']} without a key serves everybody: better set api_key_file than allow_open_bind."
        )


def _topology(given: Mapping[str, str], notes: List[str]) -> Dict[str, Any]:
    topology: Dict[str, Any] = {}
    mode = given.get("AUTO_TOPO", "0")
    if mode not in ("0", "1", "strict"):
        notes.append(f"AUTO_TOPO={mode} is not 0, 1 or strict; the script takes it for 0.")
        mode = "0"
    if mode == "0":
        return topology
    topology["mode"] = {"1": "auto", "strict": "strict"}[mode]
    notes.append("Links are used after a transfer test; topology.p2p: trusted takes NVML's word as the script does.")
    if given.get("AUTO_TOPO_NCCL") == "default":
        topology["nccl_proto"] = "default"
    if given.get("AUTO_TOPO_BIND") == "1":
        topology["bind"] = True
    if given.get("LANE_GPUS") == "auto":
        topology["lane_gpus"] = "auto"
    if "LANE_CPUS" in given:
        topology["cpus"] = given["LANE_CPUS"]
    return topology


def _others(
    given: Mapping[str, str], knobs: Mapping[str, str], profile: Mapping[str, Any], mode: str, notes: List[str]
) -> Dict[str, str]:
    """Return the variables that only pass through the script to the engine."""
    env: Dict[str, str] = {}
    handled = {*knobs, *_SCRIPT_NAMES}
    for name, value in given.items():
        if name in ("TREE", "VENV"):
            notes.append(f"{name} is not taken over: the engine lies below vllm_engines_root, in a folder of its own.")
        elif name == "SERVE_PRINT_ENV_AND_EXIT":
            notes.append(f"{name} is not taken over: vllm-fleet render prints the environment.")
        elif name in handled:
            continue
        elif name in DECISION_NAMES and mode == "fixed":
            notes.append(f"{name} is not taken over: while AUTO_TOPO is 0 the topology mode is fixed, and so is this.")
        elif name in profile["env"] or _cleared(name, profile["clear"]):
            notes.append(f"{name} is not taken over: the script drops or sets it itself.")
        else:
            _refuse_misspelt(name, handled)
            env[name] = value
    return env


def _cleared(name: str, patterns: List[str]) -> bool:
    return any(name.startswith(item[:-1]) if item.endswith("*") else name == item for item in patterns)


def _refuse_misspelt(name: str, known: Any) -> None:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
    if close:
        raise UsageError(
            "unknown_key", f"environment file: {name} is no name of the script.", f"Did you mean {close[0]}?"
        )


def _timeout(given: Mapping[str, str], lane: Dict[str, Any], notes: List[str]) -> None:
    text = given.get("TOPO_TIMEOUT", "")
    if re.fullmatch(r"[1-9][0-9]{0,2}", text) and int(text) <= 600:
        lane["topology_timeout_s"] = int(text)
    elif text:
        notes.append(f"TOPO_TIMEOUT={text} is no whole number from 1 to 600; the script takes 20 for it.")
