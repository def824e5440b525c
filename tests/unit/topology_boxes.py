"""Topology facts for tests: small boxes described by their links."""

from __future__ import annotations

import copy
import itertools

from vllm_fleet.topology import decide

RTX = "NVIDIA GeForce RTX 3090"


def gpu(index, **changes):
    """Return a healthy idle card."""
    return {
        "index": index,
        "bus_id": f"0000:{index * 16 + 1:02x}:00.0",
        "uuid": f"GPU-{index:x}{index:x}00000{index:x}-1111-2222-3333-444444444444",
        "name": RTX,
        "numa_node": 0,
        "health": "ok",
        "memory_total_mib": 24576,
        "memory_used_mib": 1,
        "bar1_total_mib": 32768,
        "compute_capability": [8, 6],
        "pcie": {"gen_max": 4, "gen_current": 1, "width_max": 16, "width_current": 16},
        "mig": False,
        "display": False,
        "processes": [],
        **changes,
    }


def link(text):
    """Return a pair's facts from ``PHB ok``, ``NV4 PHB``, ``SYS GNS`` …"""
    words = text.split()
    lanes = int(words.pop(0)[2:]) if words[0].startswith("NV") else 0
    ancestors = {"PIX": "single", "PXB": "multiple", "PHB": "hostbridge", "NODE": "node", "SYS": "system"}
    ancestors.update({"INT": "internal", "?": "unknown"})
    states = {"ok": "ok", "CNS": "chipset_not_supported", "GNS": "gpu_not_supported", "?": "unknown"}
    ancestor = ancestors[words[0]] if words else "hostbridge"
    state = states[words[1]] if len(words) > 1 else ("ok" if lanes else "chipset_not_supported")
    return {"ancestor": ancestor, "p2p_read": state, "p2p_write": state, "nvlink_lanes": lanes, "acs": False}


def box(count, default="NODE CNS", links=None, gpus=None, verdict=None, nodes=1, **changes):
    """Return facts.

    :param links: ``{(0, 1): "NV4"}``, the others are ``default``.
    :param gpus: ``{index: {changes}}``.
    :param verdict: ``{"0-1": "pass"}``.
    """
    links = links or {}
    pairs = [
        {"gpus": [one, other], **link(links.get((one, other), default))}
        for one, other in itertools.combinations(range(count), 2)
    ]
    status = None if verdict is None else "fail" if "fail" in verdict.values() else "pass"
    facts = {
        "schema": 1,
        "vendor": "nvidia",
        "driver": {"loaded": "580.1", "userland": "580.1", "cuda": [13, 0]},
        "host": {
            "numa_nodes": {
                str(node): {
                    "cpus": f"{node * 16}-{node * 16 + 15}",
                    "memory_total_kib": 1_000_000,
                    "memory_available_kib": 900_000,
                }
                for node in range(nodes)
            },
            "allowed_cpus": f"0-{nodes * 16 - 1}",
            "allowed_mems": "0" if nodes == 1 else f"0-{nodes - 1}",
            "iommu": "off",
            "virtualization": "none",
        },
        "gpus": [gpu(index, **(gpus or {}).get(index, {})) for index in range(count)],
        "pairs": pairs,
        "p2p_verdict": None if verdict is None else {"status": status, "pairs": verdict},
    }
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(facts.get(key), dict):
            facts[key] = {**facts[key], **value}
        else:
            facts[key] = value
    return copy.deepcopy(facts)


def shape(tensor=1, stages=1, **more):
    """Return a policy."""
    return {"tensor_parallel": tensor, "pipeline_parallel": stages, **more}


def codes(decision):
    """Return the warning codes of a decision."""
    return [warning["code"] for warning in decision["warnings"]]


def values(decision):
    """Return the environment of a decision without the sources."""
    return {name: entry["value"] for name, entry in decision["env"].items()}


def refused(facts, policy):
    """Return the reason of a refusal; the decision must be one."""
    decision = decide(facts, policy)
    assert decision["status"] == "refused", decision
    assert decision["order"] == decision["lane"] == decision["engine_args"] == [] and decision["env"] == {}
    assert decision["message"]
    return decision["reason"]
