"""The table of flag lifetimes and the findings that it gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_fleet import engine_args
from vllm_fleet.arguments import group_words
from vllm_fleet.commands import lint_args
from vllm_fleet.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
CATALOG = str(ROOT / "catalog")
SEED = ROOT.parent / "shared" / "seeds" / "000_65d5fc2bc909415f.txt"
BI_V100 = ROOT / "catalog" / "profiles" / "qwen36-35b-a3b-4xbiv100.yml"
RTX = ROOT / "catalog" / "profiles" / "qwen38-flash-next-w4a16-4x3090.yml"
TABLE = engine_args.load_table()
VERSIONS = [item["version"] for item in TABLE["snapshots"]]


def codes(words: str, version: str, **more: object) -> set:
    return {(item["code"], item["flag"]) for item in engine_args.lint(group_words(words.split()), version, **more)}


def lint_file(path: Path, version: str) -> set:
    source = lint_args.read(str(path), CATALOG)
    concurrency = source.document.get("concurrency")
    found = engine_args.lint(
        source.groups, version, source.env, source.bare_env, int(concurrency) if concurrency else None
    )
    return {(item["code"], item["flag"]) for item in found}


ENGINE_OF_ITS_TIME = {
    ("conflict", "--num-scheduler-steps"),
    ("unknown", "--reasoning-parser"),
    ("unknown_value", "--reasoning-parser"),
    ("unknown_value", "--tool-call-parser"),
    ("inert", "--max-seq-len-to-capture"),
    ("inert", "--preemption-mode"),
    ("inert", "TRITON_CACHE_DIR"),
    ("inert", "TRITON_PRINT_AUTOTUNING"),
}
AFTER_V0 = {
    ("removed", "--num-scheduler-steps"),
    ("removed", "--preemption-mode"),
    ("removed", "--max-seq-len-to-capture"),
    ("inert", "TRITON_CACHE_DIR"),
    ("inert", "TRITON_PRINT_AUTOTUNING"),
}
EXPECTED = {
    "0.6.3+corex.3.2.3": ENGINE_OF_ITS_TIME,
    "0.11.0": AFTER_V0
    | {
        ("deprecated", "--disable-log-requests"),
        ("deprecated", "--disable-frontend-multiprocessing"),
        ("inert", "VLLM_ENGINE_ITERATION_TIMEOUT_S"),
    },
    "0.33.0": AFTER_V0
    | {
        ("inert", "--disable-log-requests"),
        ("removed", "--disable-frontend-multiprocessing"),
        ("removed", "VLLM_ENGINE_ITERATION_TIMEOUT_S"),
    },
}
#: what only the file itself shows: how it is written, and its concurrency
FILE_ONLY = {("env_not_text", "VLLM_ENGINE_ITERATION_TIMEOUT_S"), ("inert", "--max-num-seqs")}


@pytest.mark.parametrize("version", EXPECTED)
def test_the_bi_v100_profile(version: str) -> None:
    assert lint_file(BI_V100, version) == EXPECTED[version]


@pytest.mark.skipif(not SEED.is_file(), reason="the seed systems are not beside this checkout")
@pytest.mark.parametrize("version", EXPECTED)
def test_the_public_bi_v100_file(version: str) -> None:
    assert lint_file(SEED, version) == EXPECTED[version] | FILE_ONLY


def test_both_multi_step_conflicts_are_said() -> None:
    source = lint_args.read(str(BI_V100), CATALOG)
    found = engine_args.lint(source.groups, "0.6.3+corex.3.2.3", source.env)
    messages = [item["message"] for item in found if item["code"] == "conflict"]
    assert len(messages) == 2
    assert "XFormers" in messages[0]
    assert "8192" in messages[1] and "100000" in messages[1]


def test_the_rtx_profile_on_the_stock_engine() -> None:
    assert lint_file(RTX, "0.33.0") == {("unknown", "--offload-towers"), ("abbreviation", "--kv-cache-memory")}


OUTSIDE = ("table_uncertain", "")


@pytest.mark.parametrize(
    ("words", "version", "expected"),
    [
        ("--max-model-len 1 -tp 2 --max_num_seqs=3", "0.33.0", set()),
        ("--no-enable-prefix-caching --compilation-config.mode 3 -O3", "0.33.0", set()),
        ("--max-model-length 1", "0.33.0", {("unknown", "--max-model-length")}),
        ("--max-model 1", "0.33.0", {("abbreviation", "--max-model")}),
        ("--max 1", "0.33.0", {("ambiguous", "--max")}),
        ("--swap-space 4", "0.18.0", {("removed", "--swap-space")}),
        ("--swap-space 4", "0.17.0", set()),
        ("--async-scheduling", "0.9.2", {("unknown", "--async-scheduling")}),
        ("--disable-log-requests", "0.16.0", {("deprecated", "--disable-log-requests")}),
        ("--disable-log-requests", "0.20.0", {("removed", "--disable-log-requests")}),
        ("--num-scheduler-steps 8 --enable-chunked-prefill", "0.6.2", {("conflict", "--num-scheduler-steps"), OUTSIDE}),
        ("--num-scheduler-steps 1 --enable-chunked-prefill", "0.6.3", set()),
        ("--num-scheduler-steps 8 -pp 2", "0.6.3", {("conflict", "--num-scheduler-steps")}),
        ("--max-num-batched-tokens 2 --max-num-seqs 3", "0.33.0", {("conflict", "--max-num-batched-tokens")}),
        ("--max-num-batched-tokens 2048 --max-model-len 4096", "0.6.3", {("conflict", "--max-num-batched-tokens")}),
        ("--max-num-batched-tokens 2048 --max-model-len 4096", "0.33.0", set()),
        ("--enable-auto-tool-choice", "0.33.0", {("conflict", "--enable-auto-tool-choice")}),
        ("--tool-call-parser qwen3_coder", "0.33.0", set()),
        ("--tool-call-parser qwen9", "0.33.0", {("unknown_value", "--tool-call-parser")}),
        ("--tool-call-parser mine --tool-parser-plugin x.py", "0.33.0", set()),
        ("--quantization aqlm", "0.6.3", set()),
        ("-q aqlm", "0.33.0", {("unknown_value", "--quantization")}),
        ("--reasoning-parser deepseek_r1", "0.9.2", {("conflict", "--reasoning-parser")}),
        ("--enforce-eager --enforce-eager", "0.33.0", {("inert", "--enforce-eager")}),
        ("--async-scheduling --no-async-scheduling", "0.33.0", {("conflict", "--async-scheduling")}),
        ("--port 1", "9.0.0", {OUTSIDE}),
        ("--port 1", "0.1.0", {OUTSIDE}),
    ],
)
def test_findings(words: str, version: str, expected: set) -> None:
    found = codes(words, version)
    # between snapshots the table may be unsure of names that it has no lifetime for
    assert {item for item in found if item[0] != "table_uncertain" or not item[1]} == expected


def test_between_two_snapshots_that_disagree_nothing_is_claimed() -> None:
    assert codes("--use-replayssm", "0.20.0") == {("table_uncertain", "--use-replayssm")}


def test_every_finding_has_a_source_and_a_known_status() -> None:
    for version in EXPECTED:
        source = lint_args.read(str(BI_V100), CATALOG)
        for item in engine_args.lint(source.groups, version, source.env):
            assert item["source"] and item["message"] and item["status"] in ("fail", "warn")


@pytest.mark.parametrize("version", ["", "x", "v0.33.0", "0.33.x", "0..1", "0.33."])
def test_no_version(version: str) -> None:
    with pytest.raises(UsageError) as refused:
        engine_args.lint([], version)
    assert refused.value.reason == "bad_version"


def test_the_table_is_whole() -> None:
    for kind in ("flags", "tool_parsers", "reasoning_parsers", "quantization"):
        for name, marks in TABLE[kind].items():
            assert len(marks) == len(VERSIONS) and set(marks) <= set("x-") and "x" in marks, name
    for flag, record in TABLE["lifetimes"]["flags"].items():
        assert record["source"]
        # a lifetime and the snapshots never contradict each other
        for version, mark in zip(VERSIONS, TABLE["flags"].get(flag, "-----")):
            know = engine_args.Knowledge(version)
            assert know.has("flags", flag) == (mark == "x"), (flag, version)
    counted = {version: sum(marks[i] == "x" for marks in TABLE["flags"].values()) for i, version in enumerate(VERSIONS)}
    assert counted["0.32.0"] > 400 and counted["0.33.0"] > 450


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(VERSIONS), st.lists(st.sampled_from(sorted(TABLE["flags"])), max_size=5))
def test_a_migrated_command_line_is_taken(version: str, flags: list) -> None:
    groups, env, changes = engine_args.migrate([[flag] for flag in flags], version, {"VLLM_USE_V1": "1"})
    bad = {"unknown", "removed", "deprecated", "abbreviation"}
    assert not {item["code"] for item in engine_args.lint(groups, version, env)} & bad
    assert len(changes) >= len(flags) - len(groups)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=12), max_size=6), st.sampled_from(VERSIONS))
def test_any_words_are_judged_without_a_traceback(words: list, version: str) -> None:
    engine_args.lint(group_words(words), version)
    engine_args.migrate(group_words(words), version, {})
