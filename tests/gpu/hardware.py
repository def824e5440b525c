"""What only cards can show: NVML against nvidia-smi, a computation on each, both arms of the P2P check, its verdict."""

from __future__ import annotations

import copy
import os
import tempfile
from typing import Any

from vllm_fleet import engine_python, p2p_proof, p2p_runner, verdict, verdict_store
from vllm_fleet.commands import probe
from vllm_fleet.facts import collect, smi
from vllm_fleet.topology import decide

from .report import NotRunError, StepError

#: what NVML and nvidia-smi must agree on, where nvidia-smi tells it
SAME = ("bus_id", "uuid", "name", "memory_total_mib", "compute_capability", "mig")
SAME_OF_A_PAIR = ("p2p_read", "p2p_write", "nvlink_lanes", "ancestor")
#: more than this in use counts as busy, as in the decision
BUSY_MIB = 1024
_FAULT = "VLLM_FLEET_P2P_TEST_FAULT"

Facts = dict[str, Any]
Outcome = tuple[str, dict[str, Any]]


def is_real(facts: Facts) -> bool:
    """Return whether the cards have device nodes (WSL has others); simulated ones exist in their library alone."""
    return bool((facts.get("extra") or {}).get("nodes")) or facts["host"]["virtualization"] == "wsl"


def idle(facts: Facts, owned: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the cards that are whole, that nobody uses, and that no other lane of this machine owns."""
    found = []
    for gpu in facts["gpus"]:
        names = (str(gpu["index"]), gpu["bus_id"])
        taken = any(name in names or str(gpu["uuid"]).startswith(name) for name in owned or [])
        busy = gpu["processes"] or (gpu["memory_used_mib"] or 0) > BUSY_MIB
        if gpu["health"] == "ok" and not gpu["mig"] and not taken and not busy:
            found.append(gpu)
    return found


def require_real(facts: Facts, what: str) -> None:
    """Raise :class:`NotRunError` on simulated cards."""
    if not is_real(facts):
        raise NotRunError(f"{what} needs real cards; those of this machine are simulated")


def compare(facts: Facts, tables: Facts) -> list[str]:
    """Return where NVML and nvidia-smi disagree."""
    if len(facts["gpus"]) != len(tables["gpus"] or []):
        return [f"NVML shows {len(facts['gpus'])} GPUs, nvidia-smi {len(tables['gpus'] or [])}"]
    found = []
    for gpu, other in zip(facts["gpus"], tables["gpus"], strict=True):
        for key in SAME:
            if other[key] is not None and gpu[key] != other[key]:
                found.append(f"GPU {gpu['index']} {key}: NVML {gpu[key]!r}, nvidia-smi {other[key]!r}")
    for pair, other in zip(facts["pairs"], tables["pairs"], strict=False):
        for key in SAME_OF_A_PAIR:
            if other[key] not in (None, "unknown") and pair[key] != other[key]:
                found.append(f"pair {pair['gpus']} {key}: NVML {pair[key]!r}, nvidia-smi {other[key]!r}")
    for key in ("userland", "cuda"):
        if facts["driver"][key] != tables["driver"][key]:
            found.append(f"driver {key}: NVML {facts['driver'][key]!r}, nvidia-smi {tables['driver'][key]!r}")
    return found


def against_smi(facts: Facts) -> Outcome:
    """Read the cards with no nvidia-smi in reach, and compare with what it says."""
    require_real(facts, "nvidia-smi")
    path, os.environ["PATH"] = os.environ["PATH"], "/nonexistent"
    try:
        alone = collect.read()
    finally:
        os.environ["PATH"] = path
    wrong = (
        [] if [gpu["uuid"] for gpu in alone["gpus"] or []] == [gpu["uuid"] for gpu in facts["gpus"]] else ["no NVML"]
    )
    if any(entry["pid"] == os.getpid() for gpu in alone["gpus"] or [] for entry in gpu["processes"] or []):
        wrong.append("reading the facts made a CUDA context")
    tables = smi.read()
    if tables["gpus"] is None:
        raise NotRunError("this machine has no nvidia-smi to compare with; the facts need none")
    wrong += compare(facts, tables)
    if wrong:
        raise StepError("; ".join(wrong))
    return "NVML alone gives the facts, and nvidia-smi says the same", {}


def compute(facts: Facts, engine: engine_python.EnginePython) -> Outcome:
    """Run the product's probe on each card."""
    require_real(facts, "a computation on each card")
    results = probe.probe(facts, engine, "cuda", 180.0)
    cards = [item["message"] for item in results]
    if any(item["status"] == "fail" for item in results) or not any(item["status"] == "pass" for item in results):
        raise StepError("; ".join(item["message"] for item in results if item["status"] != "pass"))
    right = sum(item["status"] == "pass" for item in results)
    busy = f", {len(results) - right} in use and left alone" if right < len(results) else ""
    return f"right on {right} card(s){busy}", {"cards": cards}


class Links:
    """The two-arm check of this machine's pairs, and what becomes of its verdict."""

    def __init__(self, facts: Facts, engine: engine_python.EnginePython, tensor_parallel: int) -> None:
        self.facts, self.tensor_parallel = facts, tensor_parallel
        free = {str(gpu["index"]) for gpu in idle(facts)}
        self.pairs = [pair for pair in p2p_proof.choose(facts, "") if set(pair.split("-")) <= free]
        self.launcher = p2p_runner.Launcher(engine, engine_python.devices(facts), pair_s=30.0)

    def _require(self) -> None:
        require_real(self.facts, "a transfer between cards")
        if self.tensor_parallel < 2:
            raise NotRunError("a lane of one card uses no link")
        if not self.pairs:
            raise NotRunError(f"{len(self.facts['gpus'])} card(s), no idle pair with P2P or NVLink")

    def _run(self, pairs: list[str], fault: str = "") -> dict[str, Any]:
        if fault:
            os.environ[_FAULT] = fault
        try:
            return p2p_proof.run_pairs(self.launcher, pairs)
        finally:
            os.environ.pop(_FAULT, None)

    def _document(self, results: dict[str, Any]) -> verdict.Verdict:
        return p2p_proof.document(verdict.bound(self.facts) or {}, self.facts, results)

    def _decide(self, facts: Facts, p2p: str) -> dict[str, Any]:
        decision: dict[str, Any] = decide(facts, {"tensor_parallel": self.tensor_parallel, "p2p": p2p})
        return decision

    def both_arms(self) -> Outcome:
        """All pairs, values compared; the verdict is stored as `vllm-fleet p2p-check` stores it."""
        self._require()
        results = self._run(self.pairs)
        figures = {
            pair: {arm: outcome.get("milliseconds", outcome) for arm, outcome in result["arms"].items() if outcome}
            for pair, result in results.items()
        }
        wrong = [f"{pair}: {result['message']}" for pair, result in results.items() if result["status"] != "pass"]
        if wrong:
            raise StepError("; ".join(wrong), figures)
        verdict_store.save(verdict.merge(verdict_store.load(), self._document(results)))
        return f"{len(results)} pair(s): the same values with P2P and without", {"milliseconds": figures}

    def faulty(self, fault: str, status: str, reason: str) -> Outcome:
        """One pair with a fault in the arm with P2P; judged, stored elsewhere, and read by a decision."""
        self._require()
        pair = self.pairs[0]
        result = self._run([pair], fault)[pair]
        if (result["status"], result["reason"]) != (status, reason):
            raise StepError(f"{result['status']}, {result['reason']}; expected {status}, {reason}: {result['message']}")
        with tempfile.TemporaryDirectory(prefix="vllm-fleet-verdict.") as root:
            verdict_store.save(self._document({pair: result}), root)
            known = verdict.for_facts(verdict_store.load(root), self.facts)
        figures: dict[str, Any] = {"verdict": status, "reason": reason}
        if pair == "0-1":
            decision = self._decide({**self.facts, "p2p_verdict": known}, "required")
            without = self._decide({**self.facts, "p2p_verdict": None}, "required")
            figures["required"] = decision["reason"]
            if (decision["reason"] == "p2p_failed") != (status == "fail") or (status != "fail" and decision != without):
                raise StepError(f"a lane that requires P2P: {decision['reason']} after a {status}", figures)
        return result["message"], figures

    def used_and_forgotten(self) -> Outcome:
        """The next decision uses the stored verdict; it is worth nothing once a fact that it is bound to changes."""
        self._require()
        read = collect.read()
        if verdict.for_facts(verdict_store.load(), read) != read["p2p_verdict"] or not read["p2p_verdict"]:
            raise StepError("the facts do not bring the stored verdict")
        unproven, proven = (
            self._decide({**read, "p2p_verdict": known}, "proven") for known in (None, read["p2p_verdict"])
        )
        if proven["env"] == unproven["env"] or proven["env"]["NCCL_P2P_LEVEL"]["value"] != "SYS":
            raise StepError(f"the decision does not use the verdict: {proven['env']}")
        if "--disable-custom-all-reduce" in proven["engine_args"]:
            raise StepError("the custom all-reduce stays off although every pair is proven")
        changes: dict[str, tuple[str, ...]] = {
            "driver": ("driver", "loaded"), "iommu": ("host", "iommu"),
            "bios": ("extra", "board", "bios_version"), "flavour": ("extra", "module", "flavour"),
        }  # fmt: skip
        for name, (*path, last) in changes.items():
            changed = copy.deepcopy(read)
            place = changed
            for key in path:
                place = place[key]
            place[last] = "another"
            if (
                verdict.for_facts(verdict_store.load(), changed) is not None
            ):  # so the decision is the unproven one again
                raise StepError(f"the verdict outlived another {name}")
        for name in ("uuid", "bus_id"):
            changed = copy.deepcopy(read)
            changed["gpus"][0][name] = "another"
            pairs = (verdict.for_facts(verdict_store.load(), changed) or {"pairs": {}})["pairs"]
            if any("0" in pair.split("-") for pair in pairs):
                raise StepError(f"the verdict of a pair outlived another {name}")
        return "used by the next decision; void with another driver, IOMMU mode, BIOS, module, card or slot", {
            "p2p_level_unproven": unproven["env"]["NCCL_P2P_LEVEL"]["value"],
            "p2p_level_proven": proven["env"]["NCCL_P2P_LEVEL"]["value"],
        }  # fmt: skip
