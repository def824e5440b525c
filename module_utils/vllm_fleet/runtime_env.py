"""The runtime environment file of a lane: ``NAME=value`` lines from fixed names and a whitelisted grammar.

``ExecStartPre`` writes it, the unit's ``EnvironmentFile=`` reads it. A value is either bare, made of
``A-Z a-z 0-9 _ @ % + = : , . / -``, or (only in :data:`LIST_NAMES`) words of these characters between single quotes.
Nothing in it means anything to a shell or to systemd. Everything else is refused before systemd sees it.
"""

from __future__ import annotations

from .errors import UsageError

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without the time that importing it takes
if TYPE_CHECKING:
    from typing import Any, Dict, List, Mapping


#: names that the topology decision sets, in the order in which they are written
DECISION_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "VLLM_SKIP_P2P_CHECK",
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
)
#: the engine arguments that the decision adds; the unit appends the words of this variable to the command line
ENGINE_ARGS = "VLLM_FLEET_ENGINE_ARGS"
#: every name that the file may hold, in the order in which they are written
NAMES = (
    *DECISION_NAMES,
    "VLLM_CACHE_ROOT",
    "TRITON_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    ENGINE_ARGS,
)
#: the engine reads its API key from this variable; it stands in a file of its own, which only root reads
API_KEY = "VLLM_API_KEY"
#: names whose value is a list of words
LIST_NAMES = (ENGINE_ARGS,)

BARE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_@%+=:,./-")


def is_bare(value: str) -> bool:
    """Return whether ``value`` (which may be empty) has only the characters of the grammar."""
    return BARE.issuperset(value)


def _check_name(name: str) -> None:
    if name not in NAMES:
        raise UsageError(
            "unknown_variable", f"{name!a} is not allowed in a runtime environment; allowed: {', '.join(NAMES)}"
        )


def _check_value(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise UsageError("bad_value", f"the value of {name} is {type(value).__name__}, expected a string")
    if name not in LIST_NAMES:
        if not is_bare(value):
            raise UsageError(
                "bad_value", f"the value of {name} is {value!a}, expected only letters, digits and _@%+=:,./-"
            )
    elif value and not all(word and is_bare(word) for word in value.split(" ")):
        raise UsageError(
            "bad_value",
            f"the value of {name} is {value!a}, expected words of letters, digits and _@%+=:,./- with single"
            " spaces between them",
        )


def format_lines(values: Mapping[str, str]) -> str:
    """Return the text of a file with ``values``, one ``NAME=value`` a line in the order of :data:`NAMES`.

    :raises UsageError: ``unknown_variable`` or ``bad_value``.
    """
    for name, value in values.items():
        _check_name(name)
        _check_value(name, value)
    lines: List[str] = []
    for name in NAMES:
        if name in values:
            value = values[name]
            lines.append(f"{name}='{value}'\n" if " " in value else f"{name}={value}\n")
    return "".join(lines)


def render(decision: Mapping[str, Any], extra: Mapping[str, str]) -> str:
    """Return the text of the runtime environment of a decision that was not refused.

    A variable whose value is ``null`` is left out: the unit sets none of these names itself, so this unsets it.

    :param decision: what :func:`topology.decide` returned.
    :param extra: further variables, such as the cache directories; names that the decision sets are not allowed.
    :raises UsageError: ``refused_decision``, ``unknown_variable`` or ``bad_value``.
    """
    if decision.get("status") not in ("selected", "fixed"):
        raise UsageError("refused_decision", "a refused decision has no runtime environment")
    values: Dict[str, str] = {}
    for name, entry in decision["env"].items():
        if name not in DECISION_NAMES:
            raise UsageError("unknown_variable", f"a decision does not set {name!a}")
        if entry["value"] is not None:
            values[name] = entry["value"]
    arguments = decision["engine_args"]
    for word in arguments:
        if not isinstance(word, str) or not word or not is_bare(word):
            raise UsageError("bad_value", f"the engine argument {word!a} has characters outside the grammar")
    values[ENGINE_ARGS] = " ".join(arguments)
    for name, value in extra.items():
        if name in DECISION_NAMES or name == ENGINE_ARGS:
            raise UsageError("unknown_variable", f"{name} comes from the decision and can't be given as an extra")
        values[name] = value
    return format_lines(values)


def render_key(key: str) -> str:
    """Return the text of the file beside it that hands the engine its API key; the caller has checked the key."""
    return f"{API_KEY}={key}\n"


def parse_key(text: str) -> str:
    """Return the key in such a file, empty when there is none."""
    name, _, value = text.partition("=")
    return value.rstrip("\n") if name == API_KEY else ""


def parse(text: str) -> Dict[str, str]:
    """Return the variables of a runtime environment file.

    :raises UsageError: ``bad_line`` (with its number; also for a last line without newline, which is how a torn write
        looks), ``unknown_variable``, ``duplicate_variable`` or ``bad_value``.
    """
    if not text:
        return {}
    if not text.endswith("\n"):
        raise UsageError("bad_line", "the last line of the runtime environment has no newline; the file is incomplete")
    values: Dict[str, str] = {}
    for number, line in enumerate(text[:-1].split("\n"), 1):
        name, separator, value = line.partition("=")
        if not separator:
            raise UsageError("bad_line", f"line {number} of the runtime environment is {line!a}, not NAME=value")
        _check_name(name)
        if name in values:
            raise UsageError("duplicate_variable", f"line {number} of the runtime environment sets {name} again")
        if name in LIST_NAMES and len(value) >= 2 and value[0] == value[-1] == "'":
            value = value[1:-1]
        elif " " in value:
            raise UsageError("bad_line", f"line {number} of the runtime environment has a space outside quotes")
        _check_value(name, value)
        values[name] = value
    return values
