"""`vllm-fleet bench` against a lane of the lab: the engine's own benchmark, and a release made slower on purpose."""

from __future__ import annotations

import json

import pytest
from conftest import SITE, STATE, Box, play

pytestmark = pytest.mark.timeout(900)

BENCH = "/opt/vllm-fleet/bin/vllm-fleet bench main"


def test_a_release_made_slower_on_purpose_is_flagged(box1: Box, overlay) -> None:
    box1.run("rm -rf /var/lib/vllm-fleet/bench/main")
    first = json.loads(box1.run(f"{BENCH} --json 2>/dev/null"))
    assert first["results"][0]["reason"] == "nothing_to_compare"
    release = first["result"]["release"]
    stored = box1.run(f"cat /var/lib/vllm-fleet/bench/main/{release}.json")
    assert json.loads(stored) == first["result"]
    assert first["result"]["output_tokens_per_s"] > 0
    assert {"p50", "p90", "p99"} == set(first["result"]["ttft_ms"]) == set(first["result"]["itl_ms"])
    assert (STATE / "keys" / "box1-main.key").read_text().strip() not in stored
    try:
        done = play(*overlay(max_seqs=1), *SITE, "-l", "box1")
        assert done.status == 0, done.text[-3000:]
        table = box1.run(f"{BENCH} 2>/dev/null")
        print(table)
        assert f"warn slower: slower than release {release} by more than 20%" in table
        assert [line.split()[-1] for line in table.splitlines() if line.startswith("output tokens/s")] == ["slower"]
    finally:
        back = play(*SITE, "-l", "box1")
    assert back.status == 0, back.text[-3000:]
