"""A release: one immutable rendering of a lane, as file names and bytes. Pure; ``library/lane_release.py`` writes it.

Layout on the box::

    /etc/vllm-fleet/lanes/<lane>/releases/<id>/{lane.json,environment,unit.conf,engine -> /opt/vllm-fleet/engines/<id>}
    /etc/vllm-fleet/lanes/<lane>/current  -> releases/<id>      what the unit runs at its next start
    /etc/vllm-fleet/lanes/<lane>/previous -> releases/<id>      the last good one
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Dict, List, Mapping, Optional, Sequence

from .render import render, unit

LANES = "/etc/vllm-fleet/lanes"
RUNTIME = "/run/vllm-fleet"

#: The engine's own shutdown must end before systemd loses patience (vllm serve --shutdown-timeout, seconds).
STOP_MARGIN_S = 30

#: Character devices a lane may open, by accelerator: names as they appear in /proc/devices, then node patterns.
#: The NVIDIA group is called nvidia-frontend by older drivers and nvidia by newer ones, so what is there counts.
_DEVICE_GROUPS = {
    "nvidia": ("nvidia", "nvidia-frontend", "nvidiactl", "nvidia-uvm", "nvidia-caps", "nvidia-nvswitch"),
    "corex": ("iluvatar", "itrctl"),
    "cpu": (),
}
#: what the ranks of a lane that spans boxes open to talk over InfiniBand or RoCE
_FABRIC_GROUPS = ("infiniband_verbs",)


def device_allow(accelerator: str, proc_devices: str, wide: bool = False) -> List[str]:
    """Return the ``DeviceAllow=`` values of an accelerator, from the text of ``/proc/devices``.

    :param wide: the lane spans boxes, and may use a fabric between them.
    """
    present = {line.split()[1] for line in proc_devices.splitlines() if len(line.split()) == 2}
    groups = (*_DEVICE_GROUPS[accelerator], *(_FABRIC_GROUPS if wide else ()))
    return [f"char-{name} rw" for name in groups if name in present]


def shutdown_timeout(argv: Sequence[str]) -> int:
    """Return the seconds that the engine gives its requests when it is told to end."""
    for index, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name == "--shutdown-timeout":
            text = value or (argv[index + 1] if index + 1 < len(argv) else "")
            if text.isdigit():
                return int(text)
    return 0


def unit_conf(lane: Mapping[str, Any], devices: Sequence[str], binding: Optional[Mapping[str, Any]]) -> str:
    """Render the lane's unit drop-in: what differs from lane to lane; the template unit holds the rest.

    :param devices: ``DeviceAllow=`` values.
    :param binding: the decision's ``binding`` (``{"cpus", "node"}``), or None for no binding.
    """
    name = lane["lane"]
    deadline = int(lane["readiness"]["deadline_s"])
    lines_of = unit(lane)
    stop = shutdown_timeout(render(lane)["argv"]) + STOP_MARGIN_S
    lines = [
        f"# Lane {name}: profile {lane['profile']}, engine {lane['engine']['id']}. "
        "Written by vllm-fleet; edits are lost.",
        "[Unit]",
        f"Description=vLLM lane {name} ({lane['profile']})",
        # Three starts, each of which may take the whole deadline and the whole stop, then the unit stays down.
        f"StartLimitIntervalSec={3 * (deadline + 60 + stop + 60)}",
        "",
        "[Service]",
        f"WorkingDirectory={lane['workdir']}",
        f"EnvironmentFile={LANES}/{name}/current/environment",
        f"EnvironmentFile=-{RUNTIME}/{name}/runtime.env",
        f"EnvironmentFile=-{RUNTIME}/{name}/secret.env",
    ]
    lines += [f"UnsetEnvironment={item}" for item in lines_of["unset_environment"]]
    if lane["log"]:
        # Append mode: after copytruncate the next line starts the file again instead of leaving a hole.
        lines += [f"StandardOutput=append:{lane['log']}", f"StandardError=append:{lane['log']}"]
    lines += [f"DeviceAllow={device}" for device in devices]
    if binding and "cpus" in binding:
        lines += [f"CPUAffinity={binding['cpus']}", "NUMAPolicy=preferred", f"NUMAMask={binding['node']}"]
    lines += [
        f"TimeoutStartSec={deadline + 60}",
        f"TimeoutStopSec={stop}",
        "ExecStart=",
    ]
    lines.append("ExecStart=" + lines_of["exec_start"])
    return "\n".join(lines) + "\n"


def files(lane: Mapping[str, Any], devices: Sequence[str], binding: Optional[Mapping[str, Any]]) -> Dict[str, str]:
    """Return the release's files: name to text."""
    return {
        "lane.json": json.dumps(dict(lane, rendered=render(lane)), indent=1, sort_keys=True) + "\n",
        "environment": unit(lane)["environment"],
        "unit.conf": unit_conf(lane, devices, binding),
    }


def release_id(contents: Mapping[str, str]) -> str:
    """Return the release's name: 12 hex digits over every file's name and text; equal content is the same release."""
    digest = hashlib.sha256()
    for name in sorted(contents):
        for part in (name, contents[name]):
            raw = part.encode("utf-8", "surrogateescape")
            digest.update(f"{len(raw)}:".encode())
            digest.update(raw)
    return digest.hexdigest()[:12]


def removable(existing: Sequence[str], keep: Sequence[Optional[str]], limit: int) -> List[str]:
    """Return the releases to prune, oldest first, so that at most ``limit`` stay; never one in ``keep``.

    :param existing: release ids, oldest first.
    """
    spare = [name for name in existing if name not in keep]
    surplus = len(existing) - limit
    return spare[:surplus] if surplus > 0 else []
