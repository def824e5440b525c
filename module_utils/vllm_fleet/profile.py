"""From an inventory's lane and the catalog to the one description that everything else works with: ``lane.json``.

Pure: data in, data out. The catalog's files are read by :mod:`.catalog`, the platform's own format by
:mod:`.platform_format`.
"""

from __future__ import annotations

import copy
import ipaddress
import json
import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from .arguments import Group, argument_group, argument_value, canonical_flag, group_words, is_flag, override, to_text
from .errors import UsageError
from .profile_schema import LANE_KEYS, POLICY_DEFAULTS, READINESS_DEFAULTS, check_knob
from .runtime_env import DECISION_NAMES
from .schema import Where, unknown
from .topology import validate_policy
from .wide import PLACE_FLAGS, part, ports

ENGINES_ROOT = "/opt/vllm-fleet/engines"
STATE_ROOT = "/var/lib/vllm-fleet"
LOG_ROOT = "/var/log/vllm-fleet"

#: flags that a lane's own keys set, and the key
_RESERVED = {
    "--host": "host",
    "--port": "port",
    "--served-model-name": "served_names",
    "--model": "checkpoint",
    "--api-key": "api_key_file",
    **dict.fromkeys(PLACE_FLAGS, "boxes"),
}

_REFERENCE = re.compile(r"\$\{([a-z][a-z0-9_]*)\}", re.ASCII)


class Catalog:
    """The validated catalog: profiles and engines by their id."""

    def __init__(self, profiles: Mapping[str, Dict[str, Any]], engines: Mapping[str, Dict[str, Any]]) -> None:
        self.profiles = dict(profiles)
        self.engines = dict(engines)

    def profile(self, name: str) -> Dict[str, Any]:
        """Return a profile.

        :raises UsageError: ``unknown_key`` with the closest name.
        """
        if name not in self.profiles:
            raise unknown(Where("catalog", "profiles"), name, self.profiles)
        return self.profiles[name]

    def engine(self, name: str) -> Dict[str, Any]:
        """Return an engine.

        :raises UsageError: ``unknown_key`` with the closest name.
        """
        if name not in self.engines:
            raise unknown(Where("catalog", "engines"), name, self.engines)
        return self.engines[name]


def fill(value: Any, variables: Mapping[str, Any], where: Where) -> Any:
    """Replace ``${name}`` in texts, also inside lists and mappings; a text that is one reference takes its type.

    :raises UsageError: ``unknown_key`` for a name that is not defined.
    """
    if isinstance(value, Mapping):
        return {key: fill(item, variables, where.at(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [fill(item, variables, where.at(index)) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def lookup(match: Any) -> Any:
        if match.group(1) not in variables:
            raise unknown(where, match.group(1), variables)
        return variables[match.group(1)]

    whole = _REFERENCE.fullmatch(value)
    if whole:
        return lookup(whole)
    return _REFERENCE.sub(lambda match: to_text(lookup(match)), value)


def cudagraph_sizes(max_seqs: int, draft_tokens: int) -> List[int]:
    """Return the batch sizes to capture: small ones, then every width of ``max_seqs`` requests with their drafts.

    A decode step of one request is ``draft_tokens + 1`` tokens wide, and a batch above the largest captured size
    runs without a graph.
    """
    step = draft_tokens + 1
    return [1, 2, 4] + [size for size in range(step, max_seqs * step + 1, step) if size > 4]


def _shape_notes(shape: Mapping[str, int], max_seqs: int, sizes: Sequence[int]) -> List[str]:
    notes = []
    wanted = max_seqs * shape["context_tokens"]
    if wanted > shape["pool_tokens"]:
        notes.append(
            f"{max_seqs} requests of the full {shape['context_tokens']} tokens want {wanted} tokens of KV cache; the "
            f"pool holds {shape['pool_tokens']}, so requests of full length preempt each other."
        )
    graphs = 2 + max_seqs
    if graphs > 8:
        notes.append(
            f"{graphs} CUDA graphs for {max_seqs} requests (up to {sizes[-1]} tokens): capture time and graph memory "
            "grow with their number."
        )
    return notes


def engine_paths(engine: Mapping[str, Any], engines_root: str = ENGINES_ROOT) -> Dict[str, Any]:
    """Return where an engine lives on a box: the ``engine`` part of ``lane.json``."""
    root = engine.get("root") or f"{engines_root}/{engine['id']}"
    places = {"root": root}
    venv = fill(engine.get("venv", "${root}/venv"), places, Where(engine["id"], "venv"))
    if venv is not None:
        places["venv"] = venv
    library = f"{venv}/lib/python{engine['python_version']}/site-packages"
    tree = engine.get("tree", "${root}/tree" if engine["route"] == "git" else None)
    places["site_packages"] = fill(engine.get("site_packages", library), places, Where(engine["id"], "site_packages"))
    # a vendor's engine lies in its SDK and runs on the distribution's Python: no venv
    return {
        "id": engine["id"],
        "version": engine["version"],
        "route": engine["route"],
        "accelerator": engine["accelerator"],
        "root": root,
        "venv": venv,
        "python": fill(engine.get("python", "${venv}/bin/python"), places, Where(engine["id"], "python")),
        "tree": fill(tree, places, Where(engine["id"], "tree")),
        "site_packages": places["site_packages"],
        "products": engine["products"],
        "trust_read_only": engine["trust_read_only"],
        "cuda_home": fill(engine.get("cuda_home"), places, Where(engine["id"], "cuda_home")),
    }


def _check_lane(lane: Any, profile: Mapping[str, Any], where: Where) -> Tuple[Dict[str, Any], Dict[str, str]]:
    """Split a lane into its own keys and its profile's knobs, both validated."""
    checked: Dict[str, Any] = {}
    knobs: Dict[str, str] = {}
    for key, value in lane.items():
        if key in LANE_KEYS:
            checked[key] = LANE_KEYS[key].check(value, where.at(key))
        elif key in profile["knobs"]:
            if value is not None:
                knobs[key] = check_knob(profile["knobs"][key], value, where.at(key))
        else:
            raise unknown(where, key, [*LANE_KEYS, *profile["knobs"]])
    return checked, knobs


def lane_place(lane: Any) -> Where:
    """Return the place of a lane in the inventory, by its name where it has one.

    :raises UsageError: ``bad_schema`` when the lane is no mapping.
    """
    if not isinstance(lane, Mapping):
        raise Where("vllm_lanes").error(lane, "a mapping with at least name, profile and checkpoint")
    return Where(f"lane {lane.get('name', '?')}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_bind(lane: Mapping[str, Any], host: str, where: Where) -> None:
    if _is_loopback(host) or lane.get("api_key_file") or lane.get("allow_open_bind"):
        return
    raise UsageError(
        "open_bind",
        f"{where}: host {host} is reachable by others and there is no API key.",
        "Set api_key_file, bind to 127.0.0.1, or say allow_open_bind: true.",
    )


def _check_reserved(words: Iterable[str], where: Where) -> None:
    """Refuse flags that a lane's keys set, and their beginnings, which the engine's parser completes."""
    for word in words:
        flag = canonical_flag(word)
        if not is_flag(word) or len(flag) < 3:
            continue
        for reserved, key in _RESERVED.items():
            if reserved.startswith(flag):
                raise UsageError(
                    "reserved_flag", f"{where}: {flag} is set by the lane's key {key}.", f"Set {key} instead."
                )


def _policy(profile: Mapping[str, Any], lane: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the complete topology policy; a lane that names a topology or GPUs owns GPUs."""
    given = dict(lane.get("topology", {}))
    if lane.get("gpus") is not None:
        given["gpus"] = lane["gpus"]
    policy: Dict[str, Any] = json.loads(json.dumps({**POLICY_DEFAULTS, **profile["topology"], **given}))
    if "topology" in lane or "gpus" in given:
        policy["enabled"] = given.get("enabled", True)
    return policy


def _check_policy(policy: Mapping[str, Any], where: Where) -> None:
    """Let the selection's own rules judge the policy here, not only at the first start."""
    try:
        validate_policy({key: value for key, value in policy.items() if key != "enabled"})
    except UsageError as error:
        raise UsageError(error.reason, f"{where}: {error.message}", error.fix) from None


def _path_value(directories: Sequence[str], tail: str) -> str:
    return ":".join([*directories, tail] if tail else directories)


#: what systemd gives a system service when nobody says otherwise (systemd.exec(5))
BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _environment(
    profile: Mapping[str, Any], engine: Mapping[str, Any], lane: Mapping[str, Any], variables: Mapping[str, Any]
) -> Dict[str, str]:
    """Return the environment: the engine's, then the profile's, then the lane's; null takes a variable out."""
    env: Dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if value is None:
            env.pop(name, None)
        elif isinstance(value, list):
            env[name] = ",".join(to_text(item) for item in value)
        else:
            env[name] = to_text(value)

    at_engine, at_profile = Where(f"engine {engine['id']}"), Where(f"profile {profile['id']}")
    paths = {"PATH": [], **engine["paths"]}
    if "/" not in profile["entry"][0] and variables.get("venv"):
        paths["PATH"] = [
            f"{variables['venv']}/bin",
            *paths["PATH"],
        ]  # a bare "python3" finds its libraries through PATH
    for name, directories in paths.items():
        add(name, _path_value(fill(directories, variables, at_engine.at(name)), BASE_PATH if name == "PATH" else ""))
    if variables.get("cuda_home"):
        add("CUDA_HOME", variables["cuda_home"])
    for name, value in engine["env"].items():
        add(name, fill(value, variables, at_engine.at("env").at(name)))
    for name, value in profile["env"].items():
        add(name, value if is_as_written(profile) else fill(value, variables, at_profile.at("env").at(name)))
    for rule in profile["when"]:
        if to_text(variables[rule["knob"]]) == to_text(rule["equals"]):
            for name, value in rule["env"].items():
                add(name, fill(value, variables, at_profile.at("when").at(name)))
    for name, value in lane.get("env", {}).items():
        add(name, value)
    return env


def _check_environment(env: Mapping[str, str], where: Where) -> None:
    if "VLLM_API_KEY" in env:
        raise UsageError(
            "secret_in_environment",
            f"{where}: VLLM_API_KEY would stand readable in the unit.",
            "Put the key into a file and name it with api_key_file.",
        )


def _check_parallel(policy: Mapping[str, Any], groups: Sequence[Group], where: Where) -> None:
    """Refuse a command line whose parallel sizes are not those of the GPU decision."""
    for flag, key in (("--tensor-parallel-size", "tensor_parallel"), ("--pipeline-parallel-size", "pipeline_parallel")):
        found = argument_value(groups, flag)
        if (found or "1") != str(policy[key]):
            raise UsageError(
                "parallel_mismatch",
                f"{where}: the arguments say {flag} {found or '1 (the default)'}, the topology {key} {policy[key]}.",
                f"Set topology.{key}, and leave {flag} to the profile.",
            )


def resolve(
    lane: Mapping[str, Any],
    catalog: Catalog,
    defaults: Optional[Mapping[str, Any]] = None,
    platform_profile: Optional[Mapping[str, Any]] = None,
) -> Dict[str, Any]:
    """Return the complete description of a lane, ready for the box.

    :param lane: one entry of ``vllm_lanes``.
    :param defaults: ``engines_root``, ``log_root``, ``profile``, ``checkpoint``: what a lane leaves out.
    :param platform_profile: takes the place of the catalog's profile, see :mod:`.platform_format`.
    :raises UsageError: ``unknown_key``, ``bad_schema``, ``open_bind``, ``reserved_flag``, ``parallel_mismatch``,
        ``secret_in_environment`` or ``batch_below_sequences``; the message names the lane, the key and what is allowed.
    """
    where = lane_place(lane)
    known = dict(defaults or {})
    name = LANE_KEYS["name"].check(lane.get("name"), where.at("name"))
    if platform_profile is None:
        wanted = lane.get("profile", known.get("profile"))
        profile = catalog.profile(LANE_KEYS["profile"].check(wanted, where.at("profile")))
    else:
        profile = dict(platform_profile)
    own, knobs = _check_lane(lane, profile, where)
    engine = catalog.engine(own.get("engine", profile["engine"]))
    if engine["accelerator"] != profile["accelerator"]:
        raise UsageError(
            "accelerator_mismatch",
            f"{where}: profile {profile['id']} is for {profile['accelerator']}, engine {engine['id']} for "
            f"{engine['accelerator']}.",
        )
    paths = engine_paths(engine, known.get("engines_root", ENGINES_ROOT))
    checkpoint = own.get("checkpoint") or profile["checkpoint"]["path"] or known.get("checkpoint")
    if not checkpoint:
        raise UsageError("bad_schema", f"{where}: found no key 'checkpoint', the directory of the model.")
    policy = _policy(profile, own)

    variables: Dict[str, Any] = {key: value for key, value in paths.items() if value is not None}
    if own.get("cuda_home"):
        variables["cuda_home"] = paths["cuda_home"] = own["cuda_home"]
    variables.update(
        checkpoint=checkpoint,
        tensor_parallel=policy["tensor_parallel"],
        pipeline_parallel=policy["pipeline_parallel"],
        layer_partition=policy["layer_partition"],
        served_names=own.get("served_names") or profile["served_names"],
        host=own.get("host") or profile.get("host", "127.0.0.1"),
        port=own.get("port") or profile.get("port", 8000),
    )
    at_profile = Where(f"profile {profile['id']}")
    for key, spec in profile["knobs"].items():
        value = knobs[key] if key in knobs else fill(spec["default"], variables, at_profile.at("knobs").at(key))
        variables[key] = None if value is None else to_text(value)
    notes = list(profile["notes"])
    if profile["shape"]:
        sizes = cudagraph_sizes(int(variables["max_seqs"]), profile["shape"]["draft_tokens"])
        variables["cudagraph_sizes"] = sizes
        notes += _shape_notes(profile["shape"], int(variables["max_seqs"]), sizes)

    groups = _arguments(profile, own, variables, where)
    _check_bind(own, variables["host"], where)
    if policy["enabled"] and profile["accelerator"] != "cpu":
        _check_parallel(policy, groups, where)
    _check_batch(groups, where)
    env = _environment(profile, engine, own, variables)
    _check_environment(env, where)
    if policy["enabled"]:
        # a lane's own values for what a GPU decision sets are the caller's wish, and the decision judges it
        caller = {key: env.pop(key) for key in DECISION_NAMES if key in env}
        policy["caller_env"] = {**caller, **policy["caller_env"]}
        _check_policy(policy, where)

    sidecars = own.get("sidecars", profile["checkpoint"]["sidecars"])
    described: Dict[str, Any] = {
        "schema": 1,
        "lane": name,
        "profile": profile["id"],
        "engine": paths,
        "entry": _entry(profile, variables),
        "checkpoint": {
            "path": checkpoint,
            "patch": profile["checkpoint"]["patch"],
            "sidecars": [
                {"path": fill(item["path"], variables, at_profile), "sha256": item.get("sha256")} for item in sidecars
            ],
            "manifest": own.get("manifest", fill(profile["checkpoint"]["manifest"], variables, at_profile)),
        },
        "served_names": list(variables["served_names"]),
        "host": variables["host"],
        "port": variables["port"],
        "api_key_file": own.get("api_key_file"),
        "args": groups,
        "env": env,
        "clear": [*profile["clear"], *own.get("clear", [])],
        "policy": policy,
        "needs": {**profile["needs"], **own.get("needs", {})},
        "checks": {**profile["checks"], **own.get("checks", {})},
        "readiness": {**READINESS_DEFAULTS, **profile["readiness"], **own.get("readiness", {})},
        "cache_root": own.get("cache_root"),
        "topology_timeout_s": own.get("topology_timeout_s", 20),
        "log": own.get("log", f"{known.get('log_root', LOG_ROOT)}/{name}.log"),
        "workdir": f"{STATE_ROOT}/lanes/{name}",
        "notes": notes,
        **({"watchdog": own["watchdog"]} if "watchdog" in own else {}),
    }
    return copy.deepcopy(described)  # nothing of the catalog's own data leaves


def _profile_groups(profile: Mapping[str, Any], variables: Mapping[str, Any]) -> List[Group]:
    if "groups" in profile:
        return [list(group) for group in profile["groups"]]
    filled = fill(profile["args"], variables, Where(f"profile {profile['id']}", "args"))
    spaced = profile["json_with_spaces"]
    return [argument_group(flag, value, flag in spaced) for flag, value in filled.items() if value is not None]


def _arguments(
    profile: Mapping[str, Any], lane: Mapping[str, Any], variables: Mapping[str, Any], where: Where
) -> List[Group]:
    """Return the final arguments after the entry.

    Names, address and port stand where the profile has them. Where it has none they come first; behind a command in the
    platform's format they come last, and its model stays unnamed.
    """
    overrides = lane.get("args", {})
    extra = [to_text(word) for word in lane.get("extra_args", [])]
    _check_reserved([*overrides, *extra], where.at("args"))
    groups = _profile_groups(profile, variables)
    placed = [
        ("--served-model-name", variables["served_names"]),
        ("--host", [variables["host"]]),
        ("--port", [str(variables["port"])]),
    ]
    if is_as_written(profile):
        placed = [("--model", [variables["checkpoint"]]), *placed]
    missing: List[Group] = []
    for flag, words in placed:
        present = argument_value(groups, flag)
        if present is None:
            missing.append([flag, *words])
        elif present != " ".join(words):
            groups = override(groups, flag, [flag, *words])
    if is_as_written(profile):
        # without these flags the engine serves the model of its entry under its own path
        groups += [group for group in missing if group[0] in ("--host", "--port")]
    else:
        groups = missing + groups
    for flag, value in overrides.items():
        spaced = flag in profile["json_with_spaces"]
        groups = override(groups, flag, None if value is None else argument_group(flag, value, spaced))
    return groups + group_words(extra)


def is_as_written(profile: Mapping[str, Any]) -> bool:
    """Return whether a profile came from the platform's format: its texts are taken literally, ``${…}`` included."""
    return "groups" in profile


def _entry(profile: Mapping[str, Any], variables: Mapping[str, Any]) -> List[str]:
    """Return the words before the arguments; those of the platform's format are kept, but for another checkpoint."""
    entry: List[str] = list(profile["entry"])
    if not is_as_written(profile):
        return [to_text(word) for word in fill(entry, variables, Where(f"profile {profile['id']}", "entry"))]
    if len(entry) > 1 and entry[-1] == profile["checkpoint"]["path"]:
        entry[-1] = variables["checkpoint"]
    return entry


def _check_batch(groups: Sequence[Group], where: Where) -> None:
    """Refuse a prefill chunk smaller than the number of sequences, as vLLM's scheduler does."""
    sequences = argument_value(groups, "--max-num-seqs")
    tokens = argument_value(groups, "--max-num-batched-tokens")
    if sequences and tokens and sequences.isdigit() and tokens.isdigit() and int(tokens) < int(sequences):
        raise UsageError(
            "batch_below_sequences",
            f"{where}: --max-num-batched-tokens {tokens} is below --max-num-seqs {sequences}; a step takes at "
            "least one token of each sequence.",
        )


def resolve_all(
    lanes: Any,
    catalog: Catalog,
    defaults: Optional[Mapping[str, Any]] = None,
    platform: Any = None,
    box: str = "",
    addresses: Optional[Mapping[str, str]] = None,
) -> List[Dict[str, Any]]:
    """Resolve every lane of a box, and tell each which GPUs are named by the others.

    A lane that spans boxes gives this box's part; one that spans other boxes is left out.

    :param platform: ``platform(lane) -> profile or None``, the adapter for lanes with a ``profile_source``.
    :param box: this box's name in the inventory.
    :param addresses: address of each box that a lane names in ``boxes``.
    :raises UsageError: as :func:`resolve` and :func:`.wide.part`; ``duplicate_lane``, ``duplicate_port`` or
        ``gpu_named_twice``.
    """
    if not isinstance(lanes, (list, tuple)):
        raise Where("vllm_lanes").error(lanes, "a list of lanes")
    resolved = []
    for lane in lanes:
        whole = resolve(lane, catalog, defaults, platform(lane) if platform else None)
        here = part(lane, whole, box, addresses or {})
        if here is not None:
            resolved.append(here)
    taken: Dict[int, str] = {}
    for index, lane in enumerate(resolved):
        name = lane["lane"]
        if any(other["lane"] == name for other in resolved[:index]):
            raise UsageError("duplicate_lane", f"two lanes of this box are called {name}.")
        for port in ports(lane):
            if port in taken:
                raise UsageError("duplicate_port", f"lanes {taken[port]} and {name} both have the port {port}.")
            taken[port] = name
    for lane in resolved:
        others = [other for other in resolved if other is not lane and other["policy"]["enabled"]]
        theirs = {gpu: other["lane"] for other in others for gpu in other["policy"]["gpus"] or []}
        for gpu in lane["policy"]["gpus"] or []:
            if gpu in theirs:
                raise UsageError("gpu_named_twice", f"lanes {lane['lane']} and {theirs[gpu]} both name the GPU {gpu}.")
        listed = lane["policy"]["exclude"]
        lane["policy"]["exclude"] = listed + [gpu for gpu in theirs if gpu not in listed]
    return resolved
