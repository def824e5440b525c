"""What only a real NVIDIA machine can show: live facts against nvidia-smi, a decision, the probe, and both P2P arms.

    PYTHONPATH=module_utils python3 tests/gpu/check_real_gpu.py --python /path/to/python-with-torch

It needs nvidia-ml-py for this interpreter and torch for the other, prints one JSON object, and exits 1 when something
differs from what it should be. It stores nothing on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any, Dict, List

from vllm_fleet import engine_python, p2p_runner, verdict
from vllm_fleet.commands import p2p_check, probe
from vllm_fleet.facts import collect, smi
from vllm_fleet.topology import decide

#: what both sources must agree on, where nvidia-smi tells it
SAME = ("bus_id", "uuid", "name", "memory_total_mib", "compute_capability", "mig")


def compare(facts: Dict[str, Any], tables: Dict[str, Any]) -> List[str]:
    """Return where NVML and nvidia-smi disagree."""
    found = []
    for gpu, other in zip(facts["gpus"], tables["gpus"] or []):
        for key in SAME:
            if other[key] is not None and gpu[key] != other[key]:
                found.append(f"GPU {gpu['index']} {key}: NVML {gpu[key]!r}, nvidia-smi {other[key]!r}")
    if len(facts["gpus"]) != len(tables["gpus"] or []):
        found.append(f"NVML shows {len(facts['gpus'])} GPUs, nvidia-smi {len(tables['gpus'] or [])}")
    for pair, other in zip(facts["pairs"], tables["pairs"]):
        for key in ("p2p_read", "p2p_write", "nvlink_lanes", "ancestor"):
            if other[key] not in (None, "unknown") and pair[key] != other[key]:
                found.append(f"pair {pair['gpus']} {key}: NVML {pair[key]!r}, nvidia-smi {other[key]!r}")
    for key in ("userland", "cuda"):
        if facts["driver"][key] != tables["driver"][key]:
            found.append(f"driver {key}: NVML {facts['driver'][key]!r}, nvidia-smi {tables['driver'][key]!r}")
    return found


def main() -> int:
    """Run everything and print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="an interpreter that has torch with CUDA")
    args = parser.parse_args()
    wrong: List[str] = []
    started = time.monotonic()
    facts = collect.read()
    seconds = round(time.monotonic() - started, 3)
    if not facts["gpus"]:
        print(json.dumps({"wrong": ["no GPU could be read"], "facts": facts}, indent=1))
        return 1
    wrong += compare(facts, smi.read())
    if facts["driver"]["loaded"] != facts["driver"]["userland"]:
        wrong.append(f"driver: {facts['driver']}")
    # a reader with a CUDA context would show as a process on the card
    again = collect.read()
    if any(entry["pid"] == os.getpid() for gpu in again["gpus"] for entry in gpu["processes"] or []):
        wrong.append("reading the facts made a CUDA context")
    decision = decide(facts, {"tensor_parallel": 1})
    if decision["status"] == "refused":
        wrong.append(f"decision: {decision['reason']}: {decision['message']}")
    engine = engine_python.EnginePython(args.python, {}, None, None)
    probed = probe.probe(facts, engine, "cuda", 180.0)
    wrong += [item["message"] for item in probed if item["status"] != "pass"]
    pairs = p2p_check.choose(facts, "")
    transfers: Dict[str, Any] = {}
    if pairs:
        transfers = p2p_check.run_pairs(p2p_runner.Launcher(engine, engine_python.devices(facts)), pairs)
        wrong += [f"GPUs {pair}: {item['message']}" for pair, item in transfers.items() if item["status"] != "pass"]
        proven = verdict.for_facts(p2p_check.document(verdict.bound(facts) or {}, facts, transfers), facts)
        decision = decide({**facts, "p2p_verdict": proven}, {"tensor_parallel": len(facts["gpus"])})
    outcome = {
        "wrong": wrong,
        "seconds": seconds,
        "facts": facts,
        "decision": decision,
        "probe": probed,
        "p2p": transfers,
    }
    print(json.dumps(outcome, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
