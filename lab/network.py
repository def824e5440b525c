"""The lab's own network and the addresses in it."""

from __future__ import annotations

import ipaddress
import json
import secrets

from .registry import Box
from .settings import LABEL, NETWORK, ROOT, BoxSpec
from .shell import LabError, podman, run


def free_subnet(taken: list[ipaddress.IPv4Network], first: int = 0) -> ipaddress.IPv4Network:
    """Return a 10.89.N.0/24 that overlaps nothing in ``taken``.

    :param first: where among the candidates to begin.
    :raises LabError: all of them are taken.
    """
    candidates = [ipaddress.IPv4Network(f"10.89.{third}.0/24") for third in range(64, 251)]
    for number in range(len(candidates)):
        subnet = candidates[(first + number) % len(candidates)]
        if not any(subnet.overlaps(other) for other in taken):
            return subnet
    raise LabError("no free network in 10.89.64.0 to 10.89.250.255 for the lab. Fix: podman network prune")


def _taken_subnets() -> list[ipaddress.IPv4Network]:
    routes = json.loads(run(["ip", "-json", "-4", "route", "show", "table", "all"]).stdout or "[]")
    taken = [
        ipaddress.IPv4Network(route["dst"], strict=False)
        for route in routes
        if route.get("dst", "default") != "default" and route.get("type", "unicast") == "unicast"
    ]
    names = podman("network", "ls", "--quiet").split()
    for network in json.loads(podman("network", "inspect", *names)) if names else []:
        taken += [
            ipaddress.IPv4Network(item["subnet"]) for item in network.get("subnets") or [] if ":" not in item["subnet"]
        ]
    return taken


def ensure_network(first: int = 0) -> ipaddress.IPv4Network:
    """Return the lab network's subnet, after making the network when it is not there or unreadable."""
    found = run(["podman", "network", "inspect", NETWORK], root=True, check=False)
    if found.returncode == 0:
        try:
            return ipaddress.IPv4Network(json.loads(found.stdout)[0]["subnets"][0]["subnet"])
        except (ValueError, KeyError, IndexError, TypeError):
            podman("network", "rm", "-f", NETWORK, check=False)
    subnet = free_subnet(_taken_subnets(), first)
    podman("network", "create", f"--subnet={subnet}", f"--label={LABEL}={ROOT}", NETWORK)
    return subnet


def address_for(spec: BoxSpec, subnet: ipaddress.IPv4Network, boxes: dict[str, Box]) -> str:
    """Return the box's address: the one it has, else its usual one, else any free one."""
    known = boxes.get(spec.name)
    if known and ipaddress.IPv4Address(known.address) in subnet:
        return known.address
    usual = str(subnet[spec.host_number]) if spec.host_number is not None else None
    return usual if usual and usual not in _used(boxes) else other_address(subnet, boxes)


def _used(boxes: dict[str, Box]) -> set[str]:
    return {box.address for box in boxes.values()}


def other_address(subnet: ipaddress.IPv4Network, boxes: dict[str, Box]) -> str:
    """Return an address that no box has, at random: podman may still hold leases of containers that were killed."""
    return secrets.choice(
        [str(subnet[number]) for number in range(100, 250) if str(subnet[number]) not in _used(boxes)]
    )
