"""The grammar of the runtime environment file."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topology_boxes import box, refused, shape
from vllm_fleet.errors import UsageError
from vllm_fleet.runtime_env import BARE, LIST_NAMES, NAMES, format_lines, parse, render
from vllm_fleet.topology import decide

TEXT = """\
CUDA_VISIBLE_DEVICES=0,1
CUDA_DEVICE_ORDER=PCI_BUS_ID
VLLM_SKIP_P2P_CHECK=0
NCCL_P2P_DISABLE=1
NCCL_PROTO=LL
VLLM_CACHE_ROOT=/var/cache/vllm-fleet/main/k1
VLLM_FLEET_ENGINE_ARGS=--disable-custom-all-reduce
"""


def test_render():
    text = render(decide(box(2), shape(2)), {"VLLM_CACHE_ROOT": "/var/cache/vllm-fleet/main/k1"})
    assert text == TEXT  # NCCL_P2P_LEVEL is to be unset and so is left out
    assert parse(text)["NCCL_P2P_DISABLE"] == "1"


def test_no_engine_arguments_is_an_empty_value():
    text = render(decide(box(1), shape()), {})
    assert text.endswith("\nVLLM_FLEET_ENGINE_ARGS=\n")
    assert parse(text)["VLLM_FLEET_ENGINE_ARGS"] == ""


def test_several_engine_arguments_are_quoted():
    text = format_lines({"VLLM_FLEET_ENGINE_ARGS": "--one --two=3"})
    assert text == "VLLM_FLEET_ENGINE_ARGS='--one --two=3'\n"
    assert parse(text) == {"VLLM_FLEET_ENGINE_ARGS": "--one --two=3"}


def test_a_refused_decision_has_none():
    assert refused(box(1), shape(2)) == "too_few_gpus"
    with pytest.raises(UsageError, match="refused decision"):
        render(decide(box(1), shape(2)), {})


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "VLLM_FLEET_ENGINE_ARGS", "LD_PRELOAD", "", "A\nB"])
def test_extra_names(name):
    with pytest.raises(UsageError) as error:
        render(decide(box(1), shape()), {name: "x"})
    assert error.value.reason == "unknown_variable"


def test_a_hostile_decision_is_refused():
    decision = decide(box(1), shape())
    for env, arguments in (({"LD_PRELOAD": {"value": "x"}}, []), ({}, ["a b"]), ({}, [""]), ({}, ["$(x)"]), ({}, [1])):
        with pytest.raises(UsageError):
            render({**decision, "env": env, "engine_args": arguments}, {})


BAD_VALUES = [
    "a b",
    "a;b",
    "$HOME",
    "`id`",
    "'a'",
    '"a"',
    "a\\b",
    "a\tb",
    "a\rb",
    "a\x00b",
    "é",
    "٣",
    "a\nNCCL_PROTO=x",
    "~",
]


@pytest.mark.parametrize("value", BAD_VALUES)
def test_bad_values_are_never_written(value):
    with pytest.raises(UsageError):
        format_lines({"NCCL_PROTO": value})
    if value != "a b":
        with pytest.raises(UsageError):
            format_lines({"VLLM_FLEET_ENGINE_ARGS": f"--ok {value}"})


@pytest.mark.parametrize("value", [" a", "a ", "a  b", " "])
def test_lists_have_single_blanks(value):
    with pytest.raises(UsageError):
        format_lines({"VLLM_FLEET_ENGINE_ARGS": value})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("NCCL_PROTO=LL", "bad_line"),
        ("\n", "bad_line"),
        ("# comment\n", "bad_line"),
        ("NCCL_PROTO\n", "bad_line"),
        ("NCCL_PROTO=a b\n", "bad_line"),
        ("NCCL_PROTO=LL\n\nNCCL_P2P_LEVEL=SYS\n", "bad_line"),
        ("export NCCL_PROTO=LL\n", "unknown_variable"),
        (" NCCL_PROTO=LL\n", "unknown_variable"),
        ("LD_PRELOAD=/x\n", "unknown_variable"),
        ("NCCL_PROTO=LL\nNCCL_PROTO=LL\n", "duplicate_variable"),
        ("NCCL_PROTO=$(id)\n", "bad_value"),
        ("NCCL_PROTO=LL\r\n", "bad_value"),
        ("NCCL_PROTO='LL'\n", "bad_value"),
        ("VLLM_FLEET_ENGINE_ARGS='a;b'\n", "bad_value"),
        ("VLLM_FLEET_ENGINE_ARGS='a\n", "bad_value"),
        ("VLLM_FLEET_ENGINE_ARGS=a b\n", "bad_line"),
    ],
)
def test_parse_refuses(text, reason):
    with pytest.raises(UsageError) as error:
        parse(text)
    assert error.value.reason == reason


def test_parse_empty():
    assert parse("") == {}


BARE_TEXT = st.text(alphabet=sorted(BARE), max_size=20)


@settings(deadline=None, max_examples=100)
@given(
    st.dictionaries(st.sampled_from([name for name in NAMES if name not in LIST_NAMES]), BARE_TEXT), st.lists(BARE_TEXT)
)
def test_round_trip(values, words):
    values = {**values, "VLLM_FLEET_ENGINE_ARGS": " ".join(word for word in words if word)}
    assert parse(format_lines(values)) == values


@settings(deadline=None, max_examples=200)
@given(st.text() | st.builds("{}={}\n".format, st.sampled_from(NAMES), st.text(max_size=8)))
def test_what_is_parsed_is_harmless(text):
    try:
        values = parse(text)
    except UsageError as error:
        assert "\n" not in error.one_line()
        return
    for name, value in values.items():
        assert name in NAMES
        assert BARE.issuperset(value.replace(" ", "") if name in LIST_NAMES else value)
