"""`make test-gpu` where there is no GPU: the same steps in a box of the lab, on simulated cards and the CPU engine."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile

import pytest
from conftest import ROOT, STATE, Box

pytestmark = pytest.mark.timeout(900)

SENT = (
    "module_utils",
    "catalog",
    "lab/__init__.py",
    "lab/checkpoint.py",
    "tests/gpu",
    "lab/nvml_sim/boxes/h200x2.json",
)
PLACE = "/root/gpu-test"
ENGINE = "/opt/vllm-fleet/engines/vllm-0.32.0-cpu/venv"
#: what only a card can show
HARDWARE = {
    "nvidia_smi", "probe", "p2p_corrupted", "p2p_killed", "p2p_both_arms", "p2p_verdict", "card_memory", "memory_free",
    "compile_cache",
}  # fmt: skip


def send(box: Box) -> None:
    """Put the part of the checkout that the test needs on the box."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in SENT:
            archive.add(ROOT / name, name, filter=lambda entry: None if "__pycache__" in entry.name else entry)
    subprocess.run(
        ["ssh", "-F", str(STATE / "ssh_config"), box.name, f"sudo sh -c 'mkdir -p {PLACE} && tar -xz -C {PLACE}'"],
        input=buffer.getvalue(), check=True, timeout=60,
    )  # fmt: skip


def test_a_lane_on_simulated_cards_and_the_cpu_engine(box2: Box) -> None:
    lane = box2.pid()
    state = "find /etc/vllm-fleet /var/lib/vllm-fleet /var/cache/vllm-fleet /run/vllm-fleet | sort"
    before = box2.run(state)
    send(box2)
    try:
        command = (
            f"cd {PLACE} && NVML_SIM_FACTS={PLACE}/lab/nvml_sim/boxes/h200x2.json PYTHONPATH=module_utils:. "
            f"PYTHONDONTWRITEBYTECODE=1 {ENGINE}/bin/python -m tests.gpu --engine {ENGINE} --report {PLACE}/report.json"
        )
        said = subprocess.run(
            ["ssh", "-F", str(STATE / "ssh_config"), box2.name, f"sudo sh -c '{command}'"],
            capture_output=True, text=True, check=False, timeout=800,
        )  # fmt: skip
        print(said.stdout[-9000:], said.stderr[-3000:])
        report = json.loads(box2.run(f"cat {PLACE}/report.json"))
    finally:
        box2.run(f"rm -rf {PLACE}")
    assert said.returncode == 0
    statuses = {step["step"]: step["status"] for step in report["steps"]}
    assert {name for name, status in statuses.items() if status == "not_run"} == HARDWARE
    assert {status for name, status in statuses.items() if name not in HARDWARE} == {"pass"}
    assert (report["simulated"], report["size"], report["decision"]["order"]) == (True, 2, [0, 1])
    figures = {step["step"]: step["figures"] for step in report["steps"]}
    assert figures["streams"]["ttft_worst_s"] > 0
    assert figures["second_start"]["ready_s"] > 0
    assert figures["stop_in_flight"]["request"] == "completed"
    # Nothing of the test stays on the box, and the lane that lives there has not noticed.
    assert box2.run(state) == before
    assert box2.pid() == lane
