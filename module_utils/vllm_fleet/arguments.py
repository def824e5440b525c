"""Command lines as lists of flags: splitting, comparing, overriding. Pure."""

from __future__ import annotations

import json
import re
from typing import Any, Iterable, List, Mapping, Optional, Sequence

#: short names of flags and the long ones that vLLM itself gives them
ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-asc": "--api-server-count",
}

_NEGATIVE_NUMBER = re.compile(r"-[0-9.]", re.ASCII)

Group = List[str]  #: one flag with its words


def canonical_flag(word: str) -> str:
    """Return the flag of an argument as vLLM compares it: ``--a_b=c`` is ``--a-b``, ``-tp`` its long name."""
    flag = word.split("=", 1)[0]
    if flag.startswith("--"):
        head, dot, tail = flag.partition(".")
        return head.replace("_", "-") + dot + tail
    return ALIASES.get(flag, flag)


def is_flag(word: str) -> bool:
    """Return whether a word begins a new argument; ``-1`` and a lone ``-`` are values."""
    return len(word) > 1 and word.startswith("-") and not _NEGATIVE_NUMBER.match(word)


def group_words(words: Iterable[str]) -> List[Group]:
    """Split a list of words into flags with the words that follow each; joining the groups gives the list back."""
    groups: List[Group] = []
    for word in words:
        if is_flag(word) or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def to_text(value: Any) -> str:
    """Return a scalar as the text that a process gets: ``true``, ``1``, ``0.96``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def argument_value(groups: Sequence[Group], flag: str) -> Optional[str]:
    """Return the value that the engine takes for a flag (the last one wins), None without it."""
    value = None
    for group in groups:
        if canonical_flag(group[0]) == flag:
            value = group[0].split("=", 1)[1] if "=" in group[0] else " ".join(group[1:])
    return value


def argument_group(flag: str, value: Any, spaced: bool = False) -> Group:
    """Return the words of one argument: ``true`` is a bare flag, a list several words, a mapping JSON."""
    if value is True:
        return [flag]
    if isinstance(value, Mapping):
        separators = (", ", ": ") if spaced else (",", ":")
        return [flag, json.dumps(value, separators=separators, ensure_ascii=False)]
    if isinstance(value, list):
        return [flag, *(to_text(item) for item in value)]
    return [flag, to_text(value)]


def override(groups: List[Group], flag: str, group: Optional[Group]) -> List[Group]:
    """Replace every argument of this flag by ``group`` where the first one stood; None removes, a new one is appended.

    ``--no-x`` and ``--x`` are one switch, so that turning a profile's switch the other way leaves only one of them.
    """

    def switch(name: str) -> str:
        name = canonical_flag(name)
        return "--" + name[len("--no-") :] if name.startswith("--no-") else name

    result: List[Group] = []
    placed = False
    for old in groups:
        if switch(old[0]) != switch(flag):
            result.append(old)
        elif group is not None and not placed:
            result.append(group)
            placed = True
    if group is not None and not placed:
        result.append(group)
    return result
