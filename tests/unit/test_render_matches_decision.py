"""In the mode ``fixed`` the unit says what the decision at the start says too: one rule, two places."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_fleet import catalog, profile, render
from vllm_fleet.topology import decide

from tests.unit.topology_boxes import box

CATALOG = catalog.load(str(Path(__file__).resolve().parents[2] / "catalog"))
RTX = {"name": "main", "profile": "qwen38-flash-next-w4a16-4x3090"}


@pytest.mark.parametrize(
    ("cards", "lane"),
    [
        (4, {}),
        (8, {}),
        (4, {"gpus": [3, 2, 1, 0]}),
        (8, {"topology": {"exclude": ["0", "2", "5"]}}),
        (4, {"env": {"NCCL_PROTO": "Simple", "VLLM_SKIP_P2P_CHECK": "0"}}),
        (8, {"env": {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}}),
        (8, {"env": {"CUDA_VISIBLE_DEVICES": "7,5, 3,1"}}),
    ],
)
def test_fixed_is_the_same_in_both(cards: int, lane: dict) -> None:
    resolved = profile.resolve({**RTX, **lane}, CATALOG)
    policy = {key: value for key, value in resolved["policy"].items() if key != "enabled"}
    decision = decide(box(cards), policy)
    assert decision["status"] == "fixed"
    env = {name: item["value"] for name, item in decision["env"].items() if item["value"] is not None}
    rendered = render.render(resolved)
    assert {name: rendered["env"].get(name) for name in env} == env
    assert decision["engine_args"] == []


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_what_a_decision_sets_is_named_as_coming_at_run_time(mode: str) -> None:
    resolved = profile.resolve({**RTX, "topology": {"mode": mode}}, CATALOG)
    policy = {key: value for key, value in resolved["policy"].items() if key != "enabled"}
    decision = decide(box(4), policy)
    rendered = render.render(resolved)
    assert set(decision["env"]) <= set(rendered["runtime_env"])
    assert not set(decision["env"]) & set(rendered["env"])
