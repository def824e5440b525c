"""Filters that turn an inventory's lanes into what the boxes get. They run on the controller only."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

from ansible.errors import AnsibleFilterError

_PACKAGE = str(Path(__file__).resolve().parent.parent / "module_utils")
if _PACKAGE not in sys.path:
    sys.path.insert(0, _PACKAGE)

from vllm_fleet import (  # noqa: E402
    catalog,
    engines,
    fleet_report,
    haproxy,
    profile,
    render,
    rollout,
    standing,
    wide,
)
from vllm_fleet.errors import FleetError  # noqa: E402
from vllm_fleet.schema import Where, unknown  # noqa: E402


def _plain(value: Any) -> Any:
    """Return Ansible's tagged containers and texts as plain Python, so that JSON and comparisons see no wrappers."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _readable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Show the project's own errors as one line instead of a traceback."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*[_plain(item) for item in args], **{key: _plain(item) for key, item in kwargs.items()})
        except FleetError as error:
            raise AnsibleFilterError(error.one_line()) from None

    return wrapped


def resolve_lanes(
    lanes: Any, catalog_dir: str, defaults: Any = None, box: str = "", addresses: Any = None
) -> List[Dict[str, Any]]:
    """Return every lane resolved; what cannot be rendered for systemd is refused here, before any box is touched."""
    entries = catalog.load(catalog_dir)
    platform = catalog.platform_reader(entries, defaults or {})
    resolved = profile.resolve_all(lanes, entries, defaults, platform, box, addresses)
    for lane in resolved:
        render.unit(lane)
    return resolved


def box_addresses(lanes: Any, hostvars: Any) -> Dict[str, str]:
    """Return the address of each box that lanes name in ``boxes``: its ``vllm_box_address``, else ``ansible_host``."""
    found = {}
    for lane in lanes if isinstance(lanes, list) else []:
        boxes = lane.get("boxes") if isinstance(lane, dict) else None
        for box in boxes if isinstance(boxes, list) else []:
            if box not in hostvars:
                raise unknown(Where(f"lane {lane.get('name', '?')}").at("boxes"), str(box), list(hostvars))
            known = hostvars[box]
            found[box] = str(known.get("vllm_box_address") or known.get("ansible_host") or "")
    return found


def joint_rows(rows: Any, lanes: Any, hostvars: Any, box: str) -> List[Dict[str, Any]]:
    """Return what ``lane_release`` staged on a box, each row told whether its lane changes on another box too."""
    boxes = {other for lane in lanes if wide.is_wide(lane) for other in lane["part"]["boxes"]}
    staged = {other: _plain(hostvars[other].get("__serve_staged", {}).get("lanes")) for other in boxes}
    return wide.joint(rows, lanes, staged, box)


def engine_inputs(lanes: Any, catalog_dir: str, interpreters: Any = None) -> List[Dict[str, Any]]:
    """Return what each engine of the resolved lanes is built from, each engine once."""
    entries = catalog.load(catalog_dir)
    inputs = {}
    for lane in lanes:
        name = lane["engine"]["id"]
        if name not in inputs:
            lock = str(Path(catalog_dir) / "engines" / f"{name}.lock")
            vendor = lane["engine"]["route"] == "vendor"
            text = "" if vendor else catalog.read_lock(lock, name)
            inputs[name] = engines.inputs(entries.engine(name), lock, text, interpreters, lane["engine"])
    return list(inputs.values())


def verify_rows(lanes: Any, box: str, probes: Any) -> List[Dict[str, str]]:
    """Return the rows of a fleet's report for one box."""
    return fleet_report.verify_rows(box, lanes, probes)


def standing_text(results: Any) -> str:
    """Return where each box of a rollout stands, out of a loop of ``rollout_state`` over the boxes."""
    records = {
        str(found["item"]): None if found.get("unreachable") or found.get("failed") else found["after"]
        for found in results
    }
    return standing.text(records, time.time())


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> Dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "vllm_fleet_resolve_lanes": _readable(resolve_lanes),
            "vllm_fleet_box_addresses": _readable(box_addresses),
            "vllm_fleet_joint_rows": _readable(joint_rows),
            "vllm_fleet_left_out": _readable(wide.left_out),
            "vllm_fleet_engine_inputs": _readable(engine_inputs),
            "vllm_fleet_verify_rows": _readable(verify_rows),
            "vllm_fleet_verify_text": _readable(fleet_report.verify_text),
            "vllm_fleet_rollout_plan": _readable(rollout.plan),
            "vllm_fleet_rollout_back": _readable(rollout.way_back),
            "vllm_fleet_rollout_alone": _readable(rollout.alone),
            "vllm_fleet_rollout_batches": _readable(rollout.batches),
            "vllm_fleet_rollout_spent": _readable(rollout.spent),
            "vllm_fleet_rollout_table": _readable(rollout.table),
            "vllm_fleet_standing": _readable(standing_text),
            "vllm_fleet_pools": _readable(haproxy.pools),
            "vllm_fleet_haproxy_quoted": _readable(haproxy.quoted),
        }
