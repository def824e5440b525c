"""Answers that are known: one that differs is a failed proof, whatever its form."""

from __future__ import annotations

import pytest
from vllm_fleet import readiness


def body(text: str, model: str = "tiny", tokens: int = 2) -> dict:
    return {"model": model, "choices": [{"text": text}], "usage": {"completion_tokens": tokens}}


def test_the_known_answer_passes():
    assert readiness.judge_golden(200, body("a b"), "tiny", "hi", "a b")["reason"] == "golden_answered"


@pytest.mark.parametrize(
    ("status", "said", "reason"),
    [
        (200, body("a  b"), "golden_differs"),
        (200, body("a b", model="other"), "wrong_model"),
        (500, {"error": "x"}, "completion_failed"),
        (None, None, "completion_failed"),
    ],
)
def test_everything_else_fails(status, said, reason):
    judged = readiness.judge_golden(status, said, "tiny", "hi", "a b")
    assert (judged["status"], judged["reason"]) == ("fail", reason)
