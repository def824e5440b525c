"""The table of checks: one check is one small pure function over a lane and the facts of its box."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional

from .. import checks, wide

Lane = Dict[str, Any]
Box = Dict[str, Any]


class Code(NamedTuple):
    """One outcome of a check.

    ``absent`` marks what is wrong only because an earlier step of an installation has not run yet: a dry run on a
    fresh box reports it as unknown.
    """

    status: str
    meaning: str
    absent: bool = False


class Finding(NamedTuple):
    """One outcome as a check function returns it; the message of the result is made of ``found`` and ``needed``."""

    reason: str
    found: str
    needed: str = ""
    fix: str = ""


CheckFunction = Callable[[Lane, Box], List[Finding]]


class Check(NamedTuple):
    """A registered check. ``applies`` says for which lanes it runs; elsewhere it gives no result at all."""

    name: str
    group: str
    about: str
    codes: Dict[str, Code]
    applies: Callable[[Lane], bool]
    function: CheckFunction


CHECKS: Dict[str, Check] = {}


def ok(meaning: str) -> Code:
    """An outcome that is right."""
    return Code(checks.PASS, meaning)


def warn(meaning: str, absent: bool = False) -> Code:
    """An outcome that a person should know of; the lane starts."""
    return Code(checks.WARN, meaning, absent)


def fail(meaning: str, absent: bool = False) -> Code:
    """An outcome that forbids the start."""
    return Code(checks.FAIL, meaning, absent)


def unknown(meaning: str, absent: bool = False) -> Code:
    """The check could not look."""
    return Code(checks.UNKNOWN, meaning, absent)


def always(lane: Lane) -> bool:
    """Every lane has this."""
    return True


def with_gpu(lane: Lane) -> bool:
    """The lane owns GPUs of any maker."""
    return lane["engine"]["accelerator"] != "cpu" and bool(lane["policy"].get("enabled", True))


def with_nvidia(lane: Lane) -> bool:
    """The lane owns NVIDIA GPUs."""
    return with_gpu(lane) and bool(lane["engine"]["accelerator"] == "nvidia")


def with_toolchain(lane: Lane) -> bool:
    """The engine compiles at its first start or first request."""
    return bool(lane["needs"].get("toolchain"))


def with_cuda_toolchain(lane: Lane) -> bool:
    """The engine compiles, and for an NVIDIA GPU."""
    return with_toolchain(lane) and bool(lane["engine"]["accelerator"] == "nvidia")


def with_api(lane: Lane) -> bool:
    """This box answers for the lane: all but the headless members of a lane that spans boxes."""
    return wide.has_api(lane)


def spans_boxes(lane: Lane) -> bool:
    """The lane spans boxes."""
    return wide.is_wide(lane)


def check(
    name: str, codes: Dict[str, Code], applies: Callable[[Lane], bool] = always
) -> Callable[[CheckFunction], CheckFunction]:
    """Register a check; its docstring is its description in the documentation."""

    def register(function: CheckFunction) -> CheckFunction:
        if name in CHECKS:
            raise ValueError(f"two checks are called {name}")
        about = " ".join((function.__doc__ or "").split())
        CHECKS[name] = Check(name, function.__module__.rpartition(".")[2], about, codes, applies, function)
        return function

    return register


def severity(status: str, override: Optional[str]) -> str:
    """Return the status after a lane's override: ``fail`` hardens a warning, ``warn`` softens a fail."""
    if override == checks.FAIL and status == checks.WARN:
        return checks.FAIL
    if override == checks.WARN and status == checks.FAIL:
        return checks.WARN
    return status


def denied(box: Box, path: str, wanted: str) -> bool:
    """Return whether the service user, as far as it could be asked, lacks one of the ``wanted`` rights (``rwx``)."""
    access: Optional[Dict[str, str]] = box["access"]
    return access is not None and path in access and not set(wanted) <= set(access[path])


def shorten(items: Iterable[Any], most: int = 5) -> str:
    """Join the first items of a list for a message, with the count of the rest."""
    texts = [str(item) for item in items]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
