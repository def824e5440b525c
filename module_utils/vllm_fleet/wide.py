"""Lanes that span boxes: one engine in vLLM's own multi-node mode, one part of it on each box. Pure.

The first of a lane's ``boxes`` is the head: it has the HTTP server and rank 0. The others are members: headless, known
to nobody but the head. All parts live and die together; :mod:`.peers` says how.
"""

from __future__ import annotations

import ipaddress
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence

from .arguments import Group, argument_value, canonical_flag
from .errors import UsageError
from .schema import Where

#: vLLM's own default for ``--master-port``
MASTER_PORT = 29501
#: the flags that a part's place sets; a lane cannot give them
PLACE_FLAGS = ("--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless")
#: variables that bind the ranks' own connections to the interface that holds the box's address
INTERFACE_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
#: keys of a lane that mean something only together with ``boxes``
_ONLY_WIDE = ("master_port", "peer_port")
#: what a headless part has no use for; the last one is refused there
_HTTP_FLAGS = ("--served-model-name", "--host", "--port", "--api-server-count")

Lane = Mapping[str, Any]


def has_api(lane: Lane) -> bool:
    """Return whether this part of the lane answers HTTP: a lane on one box does, and the head of a wider one."""
    return bool((lane.get("part") or {}).get("rank", 0) == 0)


def is_wide(lane: Lane) -> bool:
    """Return whether the lane spans boxes."""
    return bool(lane.get("part"))


def shape(tensor: int, pipeline: int, boxes: int, where: Where) -> Dict[str, int]:
    """Return the tensor and pipeline parallel sizes inside one box.

    vLLM numbers ranks through the tensor-parallel groups first and gives each box the next equal share of them, so a
    box holds whole pipeline stages, or an equal piece of one.

    :raises UsageError: ``wide_shape`` when a box would hold anything else.
    """
    if pipeline % boxes == 0:
        return {"tensor_parallel": tensor, "pipeline_parallel": pipeline // boxes}
    if boxes % pipeline == 0 and tensor % (boxes // pipeline) == 0:
        return {"tensor_parallel": tensor // (boxes // pipeline), "pipeline_parallel": 1}
    raise UsageError(
        "wide_shape",
        f"{where}: tensor parallel {tensor} by pipeline parallel {pipeline} does not fall into {boxes} boxes of whole "
        "stages or of equal pieces of one stage.",
        "Make the pipeline size a multiple of the number of boxes, or the tensor size a multiple of it.",
    )


def part(keys: Lane, lane: Dict[str, Any], box: str, addresses: Mapping[str, str]) -> Optional[Dict[str, Any]]:
    """Return a box's part of a lane; None when the lane spans boxes and this is not one of them.

    :param keys: the lane as the inventory has it, already checked.
    :param lane: the lane as :func:`.profile.resolve` describes it, for all of its ranks.
    :param addresses: box to address, for at least the boxes of this lane.
    :raises UsageError: ``boxes_missing``, ``duplicate_box``, ``duplicate_port``, ``wide_entry``, ``wide_shape``,
        ``wide_data_parallel``, ``watchdog_needed``, ``unknown_box`` or ``address_needed``.
    """
    where = Where(f"lane {lane['lane']}")
    boxes: Optional[Sequence[str]] = keys.get("boxes")
    if boxes is None:
        for key in _ONLY_WIDE:
            if key in keys:
                raise UsageError(
                    "boxes_missing", f"{where}: {key} is for a lane that spans boxes, and it has no boxes."
                )
        return lane
    _check(keys, lane, boxes, where)
    if box not in boxes:
        return None
    rank = list(boxes).index(box)
    known = [_address(name, addresses, where) for name in boxes]
    master_port = keys.get("master_port", MASTER_PORT)
    peer_port = keys.get("peer_port", master_port + 1)
    if len({lane["port"], master_port, peer_port}) < 3:
        raise UsageError("duplicate_port", f"{where}: port, master_port and peer_port must be three different ports.")
    found = dict(lane)
    found["part"] = {
        "rank": rank,
        "boxes": list(boxes),
        "addresses": known,
        "master_port": master_port,
        "peer_port": peer_port,
    }
    found["args"] = _arguments(lane["args"], found["part"])
    found["policy"] = _policy(lane, len(boxes), where)
    # The interfaces are those of this box, found at the start; only the lane's own word stands against that.
    own = keys.get("env") or {}
    found["env"] = {name: value for name, value in lane["env"].items() if name not in INTERFACE_NAMES or name in own}
    found["env"]["VLLM_HOST_IP"] = known[rank]
    if rank:
        found.update(host=known[rank], api_key_file=None)
    return found


def _check(keys: Lane, lane: Lane, boxes: Sequence[str], where: Where) -> None:
    if len(set(boxes)) < len(boxes):
        raise UsageError("duplicate_box", f"{where}: a box stands twice in boxes: {', '.join(boxes)}.")
    if lane["entry"][1:2] != ["serve"]:
        raise UsageError(
            "wide_entry",
            f"{where}: a lane that spans boxes is started with vllm serve, not with {' '.join(lane['entry'][:3])}.",
        )
    if _count(lane, "--data-parallel-size", where) > 1:
        raise UsageError(
            "wide_data_parallel",
            f"{where}: data parallel copies inside a lane that spans boxes are not supported.",
            "Give each copy a lane of its own and let the balancer spread the load.",
        )
    sizes = [_count(lane, flag, where) for flag in ("--tensor-parallel-size", "--pipeline-parallel-size")]
    shape(sizes[0], sizes[1], len(boxes), where)
    if (keys.get("watchdog") or {}).get("enabled") is False:
        raise UsageError("watchdog_needed", f"{where}: without the watchdog the boxes of a lane do not leave together.")


def _count(lane: Lane, flag: str, where: Where) -> int:
    value = argument_value(lane["args"], flag) or "1"
    if not value.isdigit() or int(value) < 1:
        raise UsageError("wide_shape", f"{where}: {flag} is {value!r}, expected a number of 1 or more.")
    return int(value)


def _address(box: str, addresses: Mapping[str, str], where: Where) -> str:
    address = str(addresses.get(box) or "")
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise UsageError(
            "address_needed",
            f"{where}: the address of {box} is {address or 'not known'!r}, expected an IP address.",
            f"Set vllm_box_address of {box} to its address in the network between the boxes.",
        ) from None
    return address


def _arguments(groups: Sequence[Group], place: Mapping[str, Any]) -> List[Group]:
    kept = [list(group) for group in groups if not (place["rank"] and canonical_flag(group[0]) in _HTTP_FLAGS)]
    kept += [
        ["--nnodes", str(len(place["boxes"]))],
        ["--node-rank", str(place["rank"])],
        ["--master-addr", place["addresses"][0]],
        ["--master-port", str(place["master_port"])],
    ]
    return [*kept, ["--headless"]] if place["rank"] else kept


def _policy(lane: Lane, boxes: int, where: Where) -> Dict[str, Any]:
    policy = dict(lane["policy"])
    if policy["enabled"]:
        here = shape(policy["tensor_parallel"], policy["pipeline_parallel"], boxes, where)
        if here["pipeline_parallel"] != policy["pipeline_parallel"]:
            policy["layer_partition"] = None  # it counts the stages of all boxes
        policy.update(here)
    return policy


def ports(lane: Lane) -> List[int]:
    """Return the ports that a lane takes on its box."""
    place = lane.get("part")
    return [lane["port"], *([place["master_port"], place["peer_port"]] if place else [])]


def interface_variables(lane: Lane, interface: str) -> Dict[str, str]:
    """Return the variables that bind a part's own connections to an interface; those that the lane sets stay.

    NCCL takes names as beginnings unless they follow a ``=``.
    """
    values = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {name: value for name, value in values.items() if name not in lane["env"]}


def left_out(lanes: Iterable[Lane], present: Iterable[str]) -> Dict[str, List[str]]:
    """Return the boxes that a change to these lanes would leave behind, by lane."""
    here = set(present)
    missing = {
        lane["lane"]: [box for box in lane["part"]["boxes"] if box not in here] for lane in lanes if is_wide(lane)
    }
    return {lane: boxes for lane, boxes in missing.items() if boxes}


def together(boxes: Sequence[str], lanes: Mapping[str, Iterable[Lane]]) -> List[List[str]]:
    """Return the boxes in groups that change together: those that share a lane, over any number of lanes.

    :param lanes: resolved lanes by box.
    :returns: groups in the order of ``boxes``, as are the boxes inside them.
    """
    group_of = {box: {box} for box in boxes}
    for box in boxes:
        for lane in lanes.get(box, []):
            for other in (lane.get("part") or {}).get("boxes", []):
                if other in group_of and group_of[other] is not group_of[box]:
                    merged = group_of[box] | group_of[other]
                    for member in merged:
                        group_of[member] = merged
    done: List[List[str]] = []
    for box in boxes:
        if not any(box in group for group in done):
            done.append([other for other in boxes if other in group_of[box]])
    return done


def joint(
    rows: Sequence[Mapping[str, Any]], lanes: Sequence[Lane], staged: Mapping[str, Any], box: str
) -> List[Dict[str, Any]]:
    """Return the staged rows of a box, each told whether its lane changes on another box (``peers_flip``).

    :param rows: the rows of ``lane_release`` on this box.
    :param staged: the rows of all boxes of its lanes, by box.
    """
    boxes = {lane["lane"]: lane["part"]["boxes"] for lane in lanes if is_wide(lane)}
    told = []
    for row in rows:
        others = [other for other in boxes.get(row["lane"], []) if other != box]
        theirs = [item for other in others for item in staged.get(other) or [] if item["lane"] == row["lane"]]
        flips = any(item["flip"] or item.get("key_changed") for item in theirs)
        told.append({**row, "peers_flip": True} if flips else dict(row))
    return told
