"""The shapes of the catalog's files and of a lane in the inventory."""

from __future__ import annotations

import re
from typing import Any, Dict, Mapping

from . import topology
from .engine_schema import check_install
from .errors import UsageError
from .schema import Boolean, Choice, Integer, ListOf, MapOf, Nullable, Record, Shape, Text, Where

LANE_NAME = r"[a-z0-9][a-z0-9-]{0,31}"
CATALOG_ID = r"[a-z0-9][a-z0-9._-]{0,79}"
FLAG = r"-[a-zA-Z]{1,3}|--[A-Za-z][A-Za-z0-9_.-]*"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
GPU = r"[A-Za-z0-9._:-]+"

_NUMBER = re.compile(r"(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?", re.ASCII)

_sha256 = Text(r"[0-9a-f]{64}", "a sha256 in 64 lower-case hexadecimal digits")
_path = Text(r"/.*", "an absolute path")
_id = Text(CATALOG_ID, "a name of lower-case letters, digits and ._-")
_variable = Text(VARIABLE, "the name of a variable: letters, digits and _")
_clear = ListOf(Text(VARIABLE + r"\*?", "the name of a variable, or its beginning followed by *"))
_cpus = Text(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*", 'a CPU list such as "0-15,32-47"')


class Scalar(Shape):
    """A text, number or truth value."""

    def check(self, value: Any, where: Where) -> Any:
        """Return the value."""
        if isinstance(value, (dict, list, tuple)) or value is None:
            raise where.error(value, "a text, number or truth value")
        return value


class Argument(Shape):
    """The value of a flag: true for a bare flag, a scalar, a list of words, a mapping for JSON."""

    def check(self, value: Any, where: Where) -> Any:
        """Return the value."""
        if value is False:
            raise where.error(
                value, "true (a bare flag), a value, a list of words or a mapping; null removes a flag in an inventory"
            )
        if isinstance(value, (list, tuple)):
            return ListOf(Scalar()).check(value, where)
        return value


class Gpu(Shape):
    """A GPU by its index in bus order (number or text), its UUID or a unique prefix of that."""

    def check(self, value: Any, where: Where) -> str:
        """Return it as text."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return str(value)
        return Text(GPU, "a GPU: an index, a UUID or a unique prefix of one").check(value, where)


_gpus = ListOf(Gpu(), minimum=1)
_arguments = MapOf(Nullable(Argument()), FLAG, "a flag such as --max-model-len")
_environment = MapOf(Nullable(Scalar()), VARIABLE, "the name of a variable: letters, digits and _")

_policy_keys: Dict[str, Shape] = {
    "enabled": Boolean(),
    "mode": Choice("auto", "fixed", "strict"),
    "tensor_parallel": Integer(1, 64),
    "pipeline_parallel": Integer(1, 64),
    "gpus": Nullable(_gpus),
    "lane_gpus": Nullable(Choice("auto")),
    "exclude": ListOf(Gpu()),
    "min_memory_mib": Integer(0),
    "identical": Boolean(),
    "allow_busy": Boolean(),
    "p2p": Choice("proven", "required", "trusted"),
    "nccl_proto": Choice("LL", "default"),
    "layer_partition": Nullable(ListOf(Integer(1), minimum=1)),
    "bind": Boolean(),
    "cpus": Nullable(_cpus),
    "host_resident_kib": Integer(0),
    "caller_env": MapOf(Text(allowed="a text", empty=True), VARIABLE, "the name of a variable"),
}

#: the topology policy of a lane that says nothing: the selection's defaults, switched off
POLICY_DEFAULTS: Dict[str, Any] = {"enabled": False, **topology.POLICY_DEFAULTS}

_needs = Record(
    {
        "memory_floor_kib": Nullable(Integer(1)),
        "memory_recommended_kib": Nullable(Integer(1)),
        "shm_kib": Nullable(Integer(1)),
        "disk_kib": Nullable(Integer(1)),
        "driver_cuda": Nullable(ListOf(Integer(0), minimum=2, maximum=2)),
        "gpu_memory_mib": Nullable(Integer(1)),
        "toolchain": Boolean(),
    },
    defaults={
        "memory_floor_kib": None,
        "memory_recommended_kib": None,
        "shm_kib": None,
        "disk_kib": None,
        "driver_cuda": None,
        "gpu_memory_mib": None,
        "toolchain": False,
    },
)

_golden = Record(
    {"prompt": Text(), "max_tokens": Integer(1, 1024), "answer": Text(empty=True)}, required=("prompt", "answer")
)
_readiness = Record(
    {
        "deadline_s": Integer(1, 86400),
        "log_lines": ListOf(Text()),
        "concurrent": Integer(1, 1024),
        "golden": ListOf(_golden),
    },
)
READINESS_DEFAULTS: Dict[str, Any] = {"deadline_s": 1800, "log_lines": [], "concurrent": 1}

_watchdog = Record(
    {
        "enabled": Boolean(),
        "interval_s": Integer(1, 600),
        "stall_s": Integer(5, 86400),
        "silent_s": Integer(5, 86400),
        "probe_every_s": Integer(5, 86400),
        "probe_s": Integer(1, 3600),
    },
)

_checkpoint = Record(
    {
        "path": Nullable(_path),
        "patch": ListOf(
            Record(
                {"file": Text(r"[A-Za-z0-9._-]+", "a file name"), "key": Text(), "value": Shape()},
                required=("file", "key", "value"),
            )
        ),
        "sidecars": ListOf(Record({"path": Text(), "sha256": Nullable(_sha256)}, required=("path",))),
        "manifest": Nullable(Text()),
    },
    defaults={"path": None, "patch": [], "sidecars": [], "manifest": None},
)

#: the kinds of knobs and what each of them takes
_knob = Record(
    {
        "type": Choice("integer", "number", "choice", "text", "path"),
        "default": Nullable(Scalar()),
        "minimum": Integer(0),
        "maximum": Integer(0),
        "choices": ListOf(Text(), minimum=1),
        "seed": _variable,
        "help": Text(),
    },
    required=("type", "default", "help"),
)

PROFILE = Record(
    {
        "schema": Integer(1, 1),
        "id": _id,
        "summary": Text(),
        "engine": _id,
        "accelerator": Choice("nvidia", "corex", "cpu"),
        "entry": ListOf(Text(), minimum=1),
        "served_names": ListOf(Text(), minimum=1),
        "topology": Record(_policy_keys),
        "checkpoint": _checkpoint,
        "needs": _needs,
        "shape": Record(
            {"context_tokens": Integer(1), "pool_tokens": Integer(1), "draft_tokens": Integer(1, 16)},
            required=("context_tokens", "pool_tokens", "draft_tokens"),
        ),
        "knobs": MapOf(_knob, r"[a-z][a-z0-9_]*", "a name of lower-case letters, digits and _"),
        "args": _arguments,
        "json_with_spaces": ListOf(Text(FLAG, "a flag")),
        "env": _environment,
        "when": ListOf(
            Record({"knob": Text(), "equals": Scalar(), "env": _environment}, required=("knob", "equals", "env"))
        ),
        "clear": _clear,
        "readiness": _readiness,
        "checks": MapOf(Choice("fail", "warn", "off"), r"[a-z][a-z0-9_]*", "the name of a check"),
        "notes": ListOf(Text()),
    },
    required=("schema", "id", "summary", "engine", "accelerator", "served_names"),
    defaults={
        "entry": ["${venv}/bin/vllm", "serve", "${checkpoint}"],
        "topology": {},
        "shape": None,
        "knobs": {},
        "args": {},
        "json_with_spaces": [],
        "env": {},
        "when": [],
        "clear": [],
        "readiness": {},
        "checks": {},
        "notes": [],
    },
)

ENGINE = Record(
    {
        "schema": Integer(1, 1),
        "id": _id,
        "summary": Text(),
        "version": Text(r"[0-9]+(\.[0-9]+)*([.+a-z0-9]*)", 'a version as text, such as "0.32.0" (in quotes)'),
        "route": Choice("wheel", "git", "vendor"),
        "accelerator": Choice("nvidia", "corex", "cpu"),
        "python_version": Text(r"3\.[0-9]+", 'a Python version as text, such as "3.11" (in quotes)'),
        "root": _path,
        "venv": Nullable(Text()),
        "python": Text(),
        "tree": Text(),
        "site_packages": Text(),
        "products": Choice("sha256", "none"),
        "trust_read_only": Boolean(),
        "cuda_home": Text(),
        "paths": MapOf(ListOf(Text(), minimum=1), VARIABLE, "the name of a search path such as PATH"),
        "env": _environment,
        "install": Shape(),  # by route: engine_schema
        "notes": ListOf(Text()),
    },
    required=("schema", "id", "summary", "version", "route", "accelerator", "python_version"),
    defaults={"products": "none", "trust_read_only": False, "paths": {}, "env": {}, "install": {}, "notes": []},
)

#: keys of a lane in the inventory; knobs of its profile come in addition
LANE_KEYS: Dict[str, Shape] = {
    "name": Text(LANE_NAME, "a lane name: lower-case letters, digits and -, at most 32, not beginning with -"),
    "profile": _id,
    "profile_source": Text(),
    "engine": _id,
    "port": Integer(1, 65535),
    "host": Text(r"[A-Za-z0-9.:_-]+", "an address or a host name"),
    "allow_open_bind": Boolean(),
    "boxes": ListOf(Text(r"[A-Za-z0-9._-]+", "the name of a box in the inventory"), minimum=2),
    "master_port": Integer(1, 65535),
    "peer_port": Integer(1, 65535),
    "checkpoint": _path,
    "manifest": Nullable(_path),
    "sidecars": ListOf(Record({"path": Text(), "sha256": Nullable(_sha256)}, required=("path",))),
    "served_names": ListOf(Text(), minimum=1),
    "gpus": Nullable(_gpus),
    "topology": Record(_policy_keys),
    "topology_timeout_s": Integer(1, 600),
    "args": _arguments,
    "extra_args": ListOf(Scalar()),
    "env": _environment,
    "clear": _clear,
    "checks": MapOf(Choice("fail", "warn", "off"), r"[a-z][a-z0-9_]*", "the name of a check"),
    "needs": Record(_needs.keys),
    "readiness": _readiness,
    "watchdog": _watchdog,
    "api_key_file": Nullable(_path),
    "cache_root": Nullable(_path),
    "cuda_home": _path,
    "log": Text(r"(/.*)?", "an absolute path, or an empty text for the journal", empty=True),
}


def check_knob(spec: Mapping[str, Any], value: Any, where: Where) -> str:
    """Return a knob's value as the text that the engine gets.

    :raises UsageError: ``bad_schema`` with the allowed range.
    """
    kind = spec["type"]
    if kind == "integer":
        return str(Integer(spec.get("minimum", 0), spec.get("maximum")).check(value, where))
    if kind == "number":
        text = value if isinstance(value, str) else repr(value)
        if isinstance(value, bool) or not _NUMBER.fullmatch(text):
            raise where.error(value, "a decimal number of 0 or more, such as 1 or 0.5")
        return text
    if kind == "choice":
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        return Choice(*spec["choices"]).check(value, where)
    if kind == "path":
        return _path.check(value, where)
    return Text(empty=True).check(value, where)


def check_profile(data: Any, source: str) -> Dict[str, Any]:
    """Validate one profile.

    :param source: the file's name, for messages.
    :raises UsageError: ``bad_schema`` or ``unknown_key``.
    """
    where = Where(source)
    profile: Dict[str, Any] = PROFILE.check(data, where)
    for key, shape in (("checkpoint", _checkpoint), ("needs", _needs)):
        profile[key] = shape.check(profile.get(key, {}), where.at(key))
    for name, spec in profile["knobs"].items():
        at = where.at("knobs").at(name)
        if name in LANE_KEYS:
            raise UsageError("bad_schema", f"{at}: the name belongs to a lane's own key.")
        if spec["type"] == "choice" and "choices" not in spec:
            raise UsageError("bad_schema", f"{at}: found no key 'choices', which a choice needs.")
        if spec["default"] is not None and "${" not in str(spec["default"]):
            check_knob(spec, spec["default"], at.at("default"))
    for index, rule in enumerate(profile["when"]):
        if rule["knob"] not in profile["knobs"]:
            raise (
                where.at("when")
                .at(index)
                .at("knob")
                .error(rule["knob"], "a knob of this profile: " + ", ".join(profile["knobs"]))
            )
    return profile


def check_engine(data: Any, source: str) -> Dict[str, Any]:
    """Validate one engine.

    :param source: the file's name, for messages.
    :raises UsageError: ``bad_schema`` or ``unknown_key``.
    """
    where = Where(source)
    engine: Dict[str, Any] = ENGINE.check(data, where)
    engine["install"] = check_install(engine, where)
    return engine
