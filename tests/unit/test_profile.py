"""Lanes and the catalog: what is accepted, what is refused and how the message reads."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_fleet import arguments, catalog, profile, render, runtime_env
from vllm_fleet.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
CATALOG = catalog.load(str(ROOT / "catalog"))
TINY = {"name": "main", "profile": "tiny-cpu", "checkpoint": "/models/tiny"}
RTX = {"name": "main", "profile": "qwen38-flash-next-w4a16-4x3090"}


def resolve(base: dict, **keys: object) -> dict:
    return profile.resolve({**base, **keys}, CATALOG)


def words(lane: dict) -> list:
    return render.render(lane)["argv"]


def refusal(base: dict, **keys: object) -> UsageError:
    with pytest.raises(UsageError) as refused:
        resolve(base, **keys)
    return refused.value


def test_every_profile_of_the_catalog_resolves_and_becomes_a_unit() -> None:
    assert set(CATALOG.profiles) >= {"tiny-cpu", "qwen38-flash-next-w4a16-4x3090", "qwen36-35b-a3b-4xbiv100"}
    for name in CATALOG.profiles:
        lane = resolve({"name": "main", "profile": name, "checkpoint": "/m"})
        assert render.unit(lane)["exec_start"]
        json.dumps(lane)  # what the box gets is JSON
        assert all(isinstance(word, str) for word in words(lane))
        assert all(isinstance(value, str) for value in lane["env"].values())


def test_the_tiny_lane() -> None:
    lane = resolve(TINY, port=8001, max_seqs=3)
    assert words(lane)[:3] == ["/opt/vllm-fleet/engines/vllm-0.32.0-cpu/venv/bin/vllm", "serve", "/models/tiny"]
    assert words(lane)[3:9] == ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "8001"]
    assert arguments.argument_value(lane["args"], "--max-num-seqs") == "3"
    assert lane["policy"]["enabled"] is False
    assert lane["workdir"] == "/var/lib/vllm-fleet/lanes/main"
    assert set(render.render(lane)["runtime_env"]) == {
        "VLLM_CACHE_ROOT",
        "TRITON_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
    }


@pytest.mark.parametrize(
    ("keys", "reason", "parts"),
    [
        ({"prot": 8000}, "unknown_key", ["lane main", "'prot'", "Did you mean port?"]),
        ({"max_seq": 8}, "unknown_key", ["Did you mean max_seqs?"]),
        ({"profile": "tiny"}, "unknown_key", ["tiny-cpu"]),
        ({"engine": "vllm-0.32.0"}, "unknown_key", ["vllm-0.32.0-cpu"]),
        ({"engine": "vllm-0.33.0-cuda"}, "accelerator_mismatch", ["cpu", "nvidia"]),
        ({"name": "Main"}, "bad_schema", ["name", "'Main'", "lower-case"]),
        ({"name": "a" * 33}, "bad_schema", ["32"]),
        ({"name": "-a"}, "bad_schema", ["not beginning"]),
        ({"port": 0}, "bad_schema", ["1 to 65535"]),
        ({"port": "08000"}, "bad_schema", ["'08000'", "leading zeros"]),
        ({"port": 8000.0}, "bad_schema", ["8000.0"]),
        ({"max_seqs": True}, "bad_schema", ["truth value"]),
        ({"max_seqs": 0}, "bad_schema", ["max_seqs", "1 to 64"]),
        ({"max_seqs": "1_0"}, "bad_schema", ["1_0"]),
        ({"host": "0.0.0.0"}, "open_bind", ["0.0.0.0", "allow_open_bind"]),
        ({"host": "::"}, "open_bind", ["::"]),
        ({"host": "127.evil.example"}, "open_bind", ["127.evil.example"]),
        ({"args": {"--port": 1}}, "reserved_flag", ["--port", "key port"]),
        ({"args": {"--served_model_name": "x"}}, "reserved_flag", ["served_names"]),
        ({"extra_args": ["--hos", "0.0.0.0"]}, "reserved_flag", ["key host"]),
        ({"args": {"--serv": "x"}}, "reserved_flag", ["served_names"]),
        ({"extra_args": ["--api-key=secret"]}, "reserved_flag", ["api_key_file"]),
        ({"args": {"max-model-len": 1}}, "bad_schema", ["max-model-len", "a flag"]),
        ({"args": {"--enforce-eager": False}}, "bad_schema", ["args.--enforce-eager", "null removes"]),
        ({"env": {"A B": 1}}, "bad_schema", ["'A B'", "letters"]),
        ({"env": {"VLLM_API_KEY": "secret"}}, "secret_in_environment", ["api_key_file"]),
        ({"checkpoint": "models/tiny"}, "bad_schema", ["checkpoint", "absolute"]),
        ({"topology": {"mode": "automatic"}}, "bad_schema", ["topology.mode", "auto, fixed, strict"]),
        ({"topology": {"tensor_paralel": 2}}, "unknown_key", ["Did you mean tensor_parallel?"]),
        ({"topology": {"layer_partition": [1, 2]}}, "bad_policy", ["lane main", "layer_partition"]),
        ({"topology": {"caller_env": {"FOO": "1"}}}, "unknown_variable", ["lane main", "FOO"]),
        ({"topology": {}, "env": {"NCCL_PROTO": "a b"}}, "bad_policy", ["lane main", "NCCL_PROTO"]),
        ({"checks": {"memory": "ignore"}}, "bad_schema", ["checks.memory", "fail, warn, off"]),
        ({"args": {"--max-num-batched-tokens": 1}}, "batch_below_sequences", ["below --max-num-seqs 2"]),
    ],
)
def test_refusals_say_where_what_and_what_is_allowed(keys: dict, reason: str, parts: list) -> None:
    error = refusal(TINY, **keys)
    assert error.reason == reason
    for part in parts:
        assert part in error.one_line()


def test_an_engine_may_trust_a_read_only_mount() -> None:
    """The word of the catalog entry reaches the lane, where the start's product check reads it."""
    entries = profile.Catalog(CATALOG.profiles, CATALOG.engines)
    lane = {"name": "main", "profile": "tiny-cpu", "checkpoint": "/m"}
    assert profile.resolve(lane, entries)["engine"]["trust_read_only"] is False
    entries.engines["vllm-0.32.0-cpu"] = {**entries.engines["vllm-0.32.0-cpu"], "trust_read_only": True}
    assert profile.resolve(lane, entries)["engine"]["trust_read_only"] is True


def test_no_secret_is_repeated_in_a_message() -> None:
    assert "secret" not in refusal(TINY, extra_args=["--api-key=secret"]).one_line()
    assert "hunter2" not in refusal(TINY, env={"VLLM_API_KEY": "hunter2"}).one_line()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_loopback_needs_no_key(host: str) -> None:
    assert resolve(TINY, host=host)["host"] == host


def test_an_open_bind_is_said_or_has_a_key() -> None:
    assert resolve(TINY, host="0.0.0.0", allow_open_bind=True)["host"] == "0.0.0.0"
    assert resolve(TINY, host="0.0.0.0", api_key_file="/etc/k")["api_key_file"] == "/etc/k"


def test_arguments_are_overridden_in_place_added_and_removed() -> None:
    lane = resolve(
        TINY,
        args={"--max_model_len": 256, "--enforce-eager": None, "--json": {"a": [1, True]}, "--two": ["x", 1]},
        extra_args=["--max-model-len", 128, "loose"],
    )
    assert lane["args"][3:] == [
        ["--max_model_len", "256"],
        ["--max-num-seqs", "2"],
        ["--num-gpu-blocks-override", "64"],
        ["--shutdown-timeout", "10"],
        ["--json", '{"a":[1,true]}'],
        ["--two", "x", "1"],
        ["--max-model-len", "128", "loose"],
    ]


def test_the_other_side_of_a_switch_takes_its_place() -> None:
    lane = resolve(RTX, args={"--no-enable-prefix-caching": True})
    flags = [group[0] for group in lane["args"]]
    assert "--enable-prefix-caching" not in flags
    assert "--no-enable-prefix-caching" in flags


def test_environment_is_overridden_added_and_removed() -> None:
    lane = resolve(TINY, env={"OMP_NUM_THREADS": 4, "HF_HUB_OFFLINE": None, "NEW": "a b"})
    assert lane["env"]["OMP_NUM_THREADS"] == "4"
    assert lane["env"]["NEW"] == "a b"
    assert "HF_HUB_OFFLINE" not in lane["env"]


def test_a_lanes_own_texts_are_literal() -> None:
    lane = resolve(TINY, args={"--x": "${max_seqs}"}, env={"A": "${nothing}"})
    assert ["--x", "${max_seqs}"] in lane["args"]
    assert lane["env"]["A"] == "${nothing}"


def test_naming_gpus_or_a_topology_turns_the_policy_on() -> None:
    assert resolve(TINY, gpus=[0, 1])["policy"]["gpus"] == ["0", "1"]
    assert resolve(TINY, gpus=[0, 1])["policy"]["enabled"] is True
    policy = resolve(TINY, topology={"mode": "auto", "tensor_parallel": 2, "pipeline_parallel": 2})["policy"]
    assert (policy["enabled"], policy["tensor_parallel"], policy["pipeline_parallel"]) == (True, 2, 2)


def test_the_topology_reaches_the_arguments() -> None:
    lane = resolve(RTX, topology={"tensor_parallel": 4, "pipeline_parallel": 1, "layer_partition": None})
    assert arguments.argument_value(lane["args"], "--tensor-parallel-size") == "4"
    assert "VLLM_PP_LAYER_PARTITION" not in lane["env"]
    assert refusal(RTX, args={"--tensor-parallel-size": 4}).reason == "parallel_mismatch"


def test_fixed_mode_knows_its_variables() -> None:
    rendered = render.render(resolve(RTX, cache_root="/c"))
    assert rendered["runtime_env"] == []
    assert rendered["env"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert rendered["env"]["NCCL_PROTO"] == "LL"


def test_fixed_mode_leaves_out_the_other_lanes_gpus() -> None:
    second = {**RTX, "name": "b", "port": 8001}
    lanes = profile.resolve_all([{**RTX, "gpus": [0, 2, 4, 6]}, second], CATALOG)
    assert lanes[1]["policy"]["exclude"] == ["0", "2", "4", "6"]
    assert render.render(lanes[1])["env"]["CUDA_VISIBLE_DEVICES"] == "1,3,5,7"


def test_other_modes_leave_them_to_the_start() -> None:
    lane = resolve(RTX, topology={"mode": "auto"}, env={"NCCL_PROTO": "Simple", "NCCL_DEBUG": "INFO"})
    rendered = render.render(lane)
    assert set(runtime_env.DECISION_NAMES) <= set(rendered["runtime_env"])
    assert not set(runtime_env.DECISION_NAMES) & set(rendered["env"])
    assert lane["policy"]["caller_env"] == {"NCCL_PROTO": "Simple"}
    assert rendered["env"]["NCCL_DEBUG"] == "INFO"
    assert render.unit(lane)["exec_start"].endswith(" $VLLM_FLEET_ENGINE_ARGS")


def test_a_knob_that_is_off_in_yaml_is_the_word() -> None:
    assert resolve(RTX, guard=False)["env"]["VLLM_E2_GUARD_MODE"] == "off"
    assert refusal(RTX, guard=True).reason == "bad_schema"


def test_cleared_names_that_are_set_are_set() -> None:
    rendered = render.render(resolve(RTX, counters=1))
    assert rendered["env"]["VLLM_QSA_KV_CLIP_COUNT"] == "300"
    assert "VLLM_QSA_KV_CLIP_COUNT" not in rendered["unset"]
    assert "VLLM_QSA_KV_CLIP_COUNT" in render.render(resolve(RTX))["unset"]


@pytest.mark.parametrize(
    ("sequences", "sizes"),
    [
        (1, [1, 2, 4]),
        (2, [1, 2, 4, 8]),
        (4, [1, 2, 4, 8, 12, 16]),
        (8, [1, 2, 4, 8, 12, 16, 20, 24, 28, 32]),
    ],
)
def test_graph_sizes(sequences: int, sizes: list) -> None:
    assert profile.cudagraph_sizes(sequences, 3) == sizes
    lane = resolve(RTX, max_seqs=sequences)
    value = json.loads(arguments.argument_value(lane["args"], "--compilation-config") or "")
    assert value["cudagraph_capture_sizes"] == sizes
    assert any("CUDA graphs" in note for note in lane["notes"]) == (len(sizes) > 8)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(1, 8))
def test_graphs_cover_the_widest_batch(sequences: int, drafts: int) -> None:
    sizes = profile.cudagraph_sizes(sequences, drafts)
    assert sizes == sorted(set(sizes))
    assert max(sizes) == max(4, sequences * (drafts + 1))


@pytest.mark.parametrize(
    ("lanes", "reason"),
    [
        ([TINY, {**TINY, "port": 8001}], "duplicate_lane"),
        ([TINY, {**TINY, "name": "b"}], "duplicate_port"),
        ([{**TINY, "gpus": [0, 1]}, {**TINY, "name": "b", "port": 1, "gpus": ["1"]}], "gpu_named_twice"),
        ({"main": TINY}, "bad_schema"),
        (["main"], "bad_schema"),
        ([{"profile": "tiny-cpu"}], "bad_schema"),
    ],
)
def test_lanes_of_one_box(lanes: object, reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        profile.resolve_all(lanes, CATALOG)
    assert refused.value.reason == reason


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70000) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*sorted(profile.LANE_KEYS), "max_seqs", "guard", "scales"]), JSON_LIKE)
def test_any_value_is_taken_or_refused_with_a_reason(key: str, value: object) -> None:
    try:
        lane = profile.resolve({**RTX, key: value}, CATALOG)
    except UsageError as error:
        assert error.reason and error.message
        return
    render.render(lane)


def write(folder: Path, kind: str, name: str, text: str) -> None:
    (folder / kind).mkdir(parents=True, exist_ok=True)
    (folder / kind / name).write_text(text, encoding="utf-8")


ENGINE = (ROOT / "catalog" / "engines" / "vllm-0.32.0-cpu.yml").read_text(encoding="utf-8")
PROFILE = (ROOT / "catalog" / "profiles" / "tiny-cpu.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "reason", "parts"),
    [
        (("schema: 1", "schema: 2"), "bad_schema", ["profiles/tiny-cpu.yml: schema", "the number 2", "1 to 1"]),
        (("accelerator: cpu", "accelerator: gpu"), "bad_schema", ["accelerator", "nvidia, corex, cpu"]),
        (("readiness:", "readines:"), "unknown_key", ["'readines'", "Did you mean readiness?"]),
        (("deadline_s: 300", "deadline_s: 0300"), "bad_yaml", ["0300", "ambiguous"]),
        (("deadline_s: 300", "deadline_s: 5:00"), "bad_yaml", ["5:00"]),
        (("deadline_s: 300", "deadline_s: ten"), "bad_schema", ["readiness.deadline_s", "'ten'", "1 to 86400"]),
        (("id: tiny-cpu", "id: other"), "bad_schema", ["the file's name"]),
        (("id: tiny-cpu", "id: tiny-cpu\nid: tiny-cpu"), "bad_yaml", ["stands twice"]),
        (("summary:", "summary: ]"), "bad_yaml", ["profiles/tiny-cpu.yml"]),
        (("${max_seqs}", "${max_seq}"), "unknown_key", ["args.--max-num-seqs", "Did you mean max_seqs?"]),
        (("type: integer", "type: number_of"), "bad_schema", ["knobs.max_seqs.type", "integer"]),
        (("default: 2", "default: 65"), "bad_schema", ["knobs.max_seqs.default", "1 to 64"]),
        (("  max_seqs: {", "  port: {"), "bad_schema", ["knobs.port", "lane's own key"]),
        (("--enforce-eager: true", "--enforce-eager: false"), "bad_schema", ["--enforce-eager", "bare flag"]),
    ],
)
def test_messages_about_catalog_files(tmp_path: Path, change: tuple, reason: str, parts: list) -> None:
    assert change[0] in PROFILE
    write(tmp_path, "engines", "vllm-0.32.0-cpu.yml", ENGINE)
    write(tmp_path, "profiles", "tiny-cpu.yml", PROFILE.replace(*change, 1))
    with pytest.raises(UsageError) as refused:
        profile.resolve(TINY, catalog.load(str(tmp_path)))
    assert refused.value.reason == reason
    for part in parts:
        assert part in refused.value.one_line()


def test_a_version_without_quotes_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "engines", "e.yml", ENGINE.replace('python_version: "3.11"', "python_version: 3.10"))
    write(tmp_path, "profiles", "tiny-cpu.yml", PROFILE)
    with pytest.raises(UsageError) as refused:
        catalog.load(str(tmp_path))
    assert "python_version" in refused.value.message and "in quotes" in refused.value.message


def test_resolving_changes_nothing_in_the_catalog() -> None:
    before = copy.deepcopy((CATALOG.profiles, CATALOG.engines))
    lane = resolve(RTX, args={"--zz": 1}, topology={"exclude": ["9"]}, env={"NCCL_PROTO": "x"})
    lane["policy"]["exclude"].append("7")
    lane["needs"]["shm_kib"] = 1
    lane["checkpoint"]["patch"].append({})
    assert (CATALOG.profiles, CATALOG.engines) == before
