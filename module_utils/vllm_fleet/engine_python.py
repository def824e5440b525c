"""The engine's own Python on this box: which one, with which environment, as which user."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional

from .errors import UsageError
from .facts import host
from .preflight.run import load, names

SERVICE_USER = "vllm"


class EnginePython(NamedTuple):
    """``become`` gives a child the service user's identity; ``None`` when there is no such user, or no right to."""

    python: str
    env: Mapping[str, str]
    account: Optional[Mapping[str, Any]]
    become: Optional[Callable[[], None]]


def find(lane: Optional[str], python: Optional[str], root: str = "/") -> EnginePython:
    """Return the Python of a lane's engine, or the one that was named; the box's only lane when neither is given.

    :raises UsageError: ``unknown_lane``, ``which_engine`` or ``no_python``.
    """
    if python is None:
        installed = names(root)
        if lane is None and len(installed) != 1:
            raise UsageError(
                "which_engine",
                f"the lanes of this box are {', '.join(installed) or 'none'}",
                "name one with --lane, or an interpreter with --python",
            )
        data = load(lane or installed[0], root)
        return use(data["engine"]["python"], data["env"], root)
    return use(python, {}, root)


def use(python: str, env: Mapping[str, str], root: str = "/") -> EnginePython:
    """Return an interpreter with the variables that it is to run under, as the service user where that can be.

    :raises UsageError: ``no_python``.
    """
    if not os.access(python, os.X_OK):
        raise UsageError("no_python", f"{python} can't be executed", "install the engine, or name another --python")
    account = host.user(SERVICE_USER, root)
    become = host.demote(account) if account is not None and host.can_act_as(account) else None
    return EnginePython(python, env, account if become else None, become)


def devices(facts: Mapping[str, Any]) -> List[str]:
    """Return the cards as ``CUDA_VISIBLE_DEVICES`` takes them, in bus order: UUIDs.

    Indices for CoreX, which takes nothing else, and for all cards when the UUID of one could not be read: the two kinds
    don't mix.
    """
    uuids = [gpu["uuid"] for gpu in facts["gpus"]]
    if facts["vendor"] == "corex" or None in uuids:
        return [str(gpu["index"]) for gpu in facts["gpus"]]
    return uuids


def environment(engine: EnginePython) -> Dict[str, str]:
    """Return what a process of the engine's Python gets: the search paths of this one, and the lane's own variables."""
    keep = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH")
    env = {name: os.environ[name] for name in keep if name in os.environ}
    env.update(engine.env)
    env["HOME"] = str((engine.account or {}).get("home") or os.environ.get("HOME", "/"))
    return env
