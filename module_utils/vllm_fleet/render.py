"""A lane's process as systemd will start it: command line, environment, and what the boot decides."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping

from .runtime_env import DECISION_NAMES, ENGINE_ARGS
from .systemd import CONTINUED, environment_file, exec_line, unset_names
from .wide import INTERFACE_NAMES, is_wide

#: the settings of a box whose links are trusted without asking, see "Rules of the decision" in docs/architecture.md
_FIXED = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "VLLM_SKIP_P2P_CHECK": "1", "NCCL_P2P_LEVEL": "SYS", "NCCL_PROTO": "LL"}

_CACHES = {"VLLM_CACHE_ROOT": "", "FLASHINFER_WORKSPACE_BASE": "/flashinfer", "TRITON_CACHE_DIR": "/triton"}


def fixed_environment(policy: Mapping[str, Any]) -> Dict[str, str]:
    """Return the five topology variables of the mode ``fixed``: known without looking at the hardware."""
    wanted = policy["tensor_parallel"] * policy["pipeline_parallel"]
    gpus: List[str] = list(policy["gpus"] or [])
    if not gpus:
        named = policy["caller_env"].get("CUDA_VISIBLE_DEVICES", "").split(",")
        gpus = [word.strip() for word in named if word.strip()]
    if not gpus:
        free = (str(index) for index in range(wanted + len(policy["exclude"])) if str(index) not in policy["exclude"])
        gpus = list(free)[:wanted]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), **_FIXED}


def render(lane: Mapping[str, Any]) -> Dict[str, Any]:
    """Return ``{"argv", "env", "unset", "runtime_env"}`` of a resolved lane.

    ``env`` is what the unit sets; ``runtime_env`` names what the start check decides at every boot and hands over in
    the runtime environment file; ``unset`` holds names and patterns that the process must not inherit.
    """
    env: Dict[str, str] = dict(lane["env"])
    runtime: List[str] = []
    policy = lane["policy"]
    if policy["enabled"] and policy["mode"] == "fixed":
        env.update(fixed_environment(policy))
    elif policy["enabled"]:
        runtime += [*DECISION_NAMES, ENGINE_ARGS]
    if is_wide(lane):
        runtime += [name for name in INTERFACE_NAMES if name not in env]
    for name, below in _CACHES.items():
        if name in env:
            continue
        if lane["cache_root"] is None:
            runtime.append(name)
        else:
            env[name] = lane["cache_root"] + below
    argv = [*lane["entry"], *(word for group in lane["args"] for word in group)]
    unset = [name for name in lane["clear"] if name not in env and name not in runtime]
    return {"argv": argv, "env": env, "unset": unset, "runtime_env": sorted(runtime)}


def unit(lane: Mapping[str, Any]) -> Dict[str, Any]:
    """Return what of the unit depends on the lane's profile, quoted for systemd.

    ``exec_start`` is the value of ``ExecStart=``, ``environment`` the text of its ``EnvironmentFile=``,
    ``unset_environment`` the names for ``UnsetEnvironment=``.

    :raises UsageError: ``bad_program``, ``bad_character`` or ``bad_variable_name``.
    """
    rendered = render(lane)
    argv = rendered["argv"]
    executable = "" if argv[0].startswith("/") else _program(lane, argv[0])
    line = exec_line(argv, executable)
    if ENGINE_ARGS in rendered["runtime_env"]:
        # unquoted and unbraced: systemd splits it into words, and drops it when the decision adds none
        line += f"{CONTINUED}${ENGINE_ARGS}"
    return {
        "exec_start": line,
        "environment": environment_file(rendered["env"]),
        "unset_environment": unset_names(rendered["unset"], rendered["env"]),
    }


def _program(lane: Mapping[str, Any], word: str) -> str:
    """Return the absolute path behind a bare program name: systemd does not search the unit's own PATH."""
    engine = lane["engine"]
    if word.startswith("python"):
        return str(engine["python"])
    return f"{engine['venv']}/bin/{word}"
