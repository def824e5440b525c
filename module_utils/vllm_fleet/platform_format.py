"""The serving platform's own file: ``concurrency``, ``command`` (a list of words) and ``env`` (names and values).

Read with every scalar as it is written, so ``010`` stays ``010`` and an empty value stays empty; a profile gives the
same file back. There is no published schema: the shape is that of the public files in this format.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any, Dict, List, Mapping, Tuple

from .arguments import argument_value, group_words
from .profile import is_as_written
from .profile_schema import VARIABLE, check_profile
from .schema import Integer, ListOf, Record, Shape, Text, Where

#: the engine that such files are written for
DEFAULT_ENGINE = "vllm-0.6.3-corex-3.2.3"

_word = Text(allowed="a text", empty=True)
_SHAPE = Record(
    {
        "concurrency": Text(r"[0-9]+", "a whole number"),
        "command": ListOf(_word, minimum=1),
        "env": ListOf(
            Record(
                {"name": Text(VARIABLE, "the name of a variable: letters, digits and _"), "value": _word},
                required=("name", "value"),
            )
        ),
    },
    required=("command",),
)


class _Unique(Shape):
    """A list of variables in which no name stands twice: which of them counts would depend on the reader."""

    def check(self, value: Any, where: Where) -> Any:
        """Return the list."""
        seen = set()
        for index, item in enumerate(value):
            if item["name"] in seen:
                raise where.at(index).at("name").error(item["name"], "each variable once")
            seen.add(item["name"])
        return value


def split_command(words: List[str]) -> Tuple[List[str], List[str]]:
    """Split a command into what is started and its arguments: ``python3 -m MODULE | …``, ``vllm serve MODEL | …``."""
    end = 1
    if "-m" in words[1:4]:
        end = words.index("-m", 1) + 2
    while end < len(words) and not words[end].startswith("-"):
        end += 1
    return words[:end], words[end:]


def to_profile(data: Any, source: str, engine: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the profile that a file in the platform's format means.

    :param data: the file's content, every scalar a text.
    :param source: the file's name, for messages.
    :param engine: the catalog's entry of the engine that will run it.
    :raises UsageError: ``bad_schema`` or ``unknown_key`` with file, key and what is allowed.
    """
    where = Where(source)
    if isinstance(data, Mapping) and data.get("env") == "":
        data = {**data, "env": []}
    document = _SHAPE.check(data, where)
    variables = _Unique().check(document.get("env", []), where.at("env"))
    entry, arguments = split_command(document["command"])
    groups = group_words(arguments)
    model = argument_value(groups, "--model")
    if model is None and entry[-2:-1] == ["serve"]:
        model = entry[-1]
    if not model:
        raise where.at("command").error(document["command"], "a command with --model DIRECTORY or vllm serve DIRECTORY")
    names = argument_value(groups, "--served-model-name")
    profile = check_profile(
        {
            "schema": 1,
            "id": re.sub(r"[^a-z0-9._-]+", "-", PurePath(source).stem.lower()).strip("._-")[:80] or "platform-file",
            "summary": f"as written in {source}",
            "engine": engine["id"],
            "accelerator": engine["accelerator"],
            "served_names": names.split(" ") if names else [model],
            "checkpoint": {"path": model},
            "topology": _topology(groups, engine, where),
            "readiness": {"concurrent": min(max(int(document.get("concurrency", "1")), 1), 1024)},
        },
        source,
    )
    profile.update(entry=entry, groups=groups, env={item["name"]: item["value"] for item in variables})
    host, port = argument_value(groups, "--host"), argument_value(groups, "--port")
    if host:
        profile["host"] = host
    if port:
        profile["port"] = Integer(1, 65535).check(port, where.at("command"))
    profile["platform"] = {"keys": list(document), "concurrency": document.get("concurrency")}
    return profile


def _topology(groups: List[List[str]], engine: Mapping[str, Any], where: Where) -> Dict[str, Any]:
    """Return the policy that the command's parallel sizes ask for; a CPU engine owns no GPU."""
    policy: Dict[str, Any] = {"enabled": engine["accelerator"] != "cpu"}
    if engine["accelerator"] == "corex":
        policy["p2p"] = "trusted"
    for flag, key in (("--tensor-parallel-size", "tensor_parallel"), ("--pipeline-parallel-size", "pipeline_parallel")):
        size = argument_value(groups, flag)
        if size is not None:
            if not size.isdigit() or not 1 <= int(size) <= 64:
                raise where.at("command").error(size, f"after {flag}, a whole number, 1 to 64")
            policy[key] = int(size)
    return policy


def from_lane(profile: Mapping[str, Any], lane: Mapping[str, Any]) -> Dict[str, Any]:
    """Return what a lane runs in the platform's format, every value a text.

    A profile that came from such a file gives that file's content back, whatever the lane adds on a box. One from the
    catalog gives the lane's command and the variables that the profile sets; the engine's paths stay out, they are the
    platform image's own.
    """
    if is_as_written(profile):
        document = {
            "concurrency": profile["platform"]["concurrency"],
            "command": [*profile["entry"], *(word for group in profile["groups"] for word in group)],
            "env": [{"name": name, "value": value} for name, value in profile["env"].items()],
        }
        return {key: document[key] for key in profile["platform"]["keys"]}
    return {
        "concurrency": str(lane["readiness"]["concurrent"]),
        "command": [*lane["entry"], *(word for group in lane["args"] for word in group)],
        "env": [{"name": name, "value": lane["env"][name]} for name in profile["env"] if name in lane["env"]],
    }
