"""Checks of a lane that spans boxes: its own address, and the ports between its boxes."""

from __future__ import annotations

from typing import List, Optional

from .registry import Box, Finding, Lane, check, fail, ok, spans_boxes, unknown
from .serving import holders_named, in_unit, same_address


@check(
    "box_address",
    {
        "address_here": ok("an interface of this box has the address"),
        "address_not_here": fail("no interface of this box has the address"),
        "interfaces_unknown": unknown("the interfaces could not be read"),
    },
    spans_boxes,
)
def box_address(lane: Lane, box: Box) -> List[Finding]:
    """The address by which the lane's other boxes know this one is an address of this box."""
    address = lane["part"]["addresses"][lane["part"]["rank"]]
    if box["interface"] is None:
        return [Finding("interfaces_unknown", "the interfaces could not be read")]
    if not box["interface"]:
        fix = "set vllm_box_address of this box to its address in the network between the boxes"
        return [Finding("address_not_here", f"no interface has {address}", "the box's own address", fix)]
    return [Finding("address_here", f"{address} is on {box['interface']}")]


@check(
    "rendezvous",
    {
        "rendezvous_free": ok("nothing else listens on the ports between the boxes"),
        "rendezvous_occupied": fail("another process listens on the lane's master_port or peer_port"),
        "rendezvous_unknown": unknown("the kernel's socket table could not be read"),
    },
    spans_boxes,
)
def rendezvous(lane: Lane, box: Box) -> List[Finding]:
    """The ports between the lane's boxes are free or the lane's own: at the head ``master_port``, where the ranks meet;
    on every box ``peer_port``, where its watchdog says how it stands."""
    place, listeners = lane["part"], box["rendezvous"]
    if any(found is None for found in listeners.values()):
        return [Finding("rendezvous_unknown", "the kernel's socket table could not be read")]
    findings = []
    for key, found in listeners.items():
        # the ranks' meeting point binds every address
        address = "0.0.0.0" if key == "master_port" else place["addresses"][place["rank"]]  # noqa: S104 - compared
        others = [item for item in found if same_address(address, item["address"]) and not _own(lane, item["cgroup"])]
        if others:
            fix = f"stop that process or give the lane another {key}, on all of its boxes"
            text = f"{key} {place[key]} is held by {holders_named(others)}"
            findings.append(Finding("rendezvous_occupied", text, "a free port", fix))
    names = " and ".join(f"{key} {place[key]}" for key in listeners)
    return findings or [Finding("rendezvous_free", f"{names}: nobody else listens")]


def _own(lane: Lane, cgroup: Optional[str]) -> bool:
    watchdog = f"vllm-watchdog@{lane['lane']}.service"
    return in_unit(cgroup, lane["lane"]) or watchdog in (cgroup or "").split("/")
