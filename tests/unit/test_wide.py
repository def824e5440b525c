"""Lanes that span boxes: each box's part, what is refused, who changes together."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_fleet import arguments, catalog, profile, render, wide
from vllm_fleet.errors import UsageError
from vllm_fleet.schema import Where

CATALOG = catalog.load(str(Path(__file__).resolve().parents[2] / "catalog"))
ADDRESSES = {"box1": "10.0.0.11", "box2": "10.0.0.12", "box3": "10.0.0.13"}
TINY = {
    "name": "main", "profile": "tiny-cpu", "checkpoint": "/models/tiny", "host": "10.0.0.11",
    "api_key_file": "/etc/vllm-fleet/secrets/main.key", "boxes": ["box1", "box2"],
    "args": {"--tensor-parallel-size": 2},
}  # fmt: skip


def resolved(box, *lanes, addresses=None):
    return profile.resolve_all(list(lanes), CATALOG, box=box, addresses=addresses or ADDRESSES)


def part(box, **changes):
    (lane,) = resolved(box, {**TINY, **changes})
    return lane


def refusal(box="box1", addresses=None, **changes):
    with pytest.raises(UsageError) as refused:
        resolved(box, {**TINY, **changes}, addresses=addresses)
    return refused.value


def test_the_head_has_rank_0_and_the_http_server():
    lane = part("box1")
    assert lane["part"] == {
        "rank": 0, "boxes": ["box1", "box2"], "addresses": ["10.0.0.11", "10.0.0.12"],
        "master_port": 29501, "peer_port": 29502,
    }  # fmt: skip
    words = render.render(lane)["argv"]
    assert words[-8:] == ["--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.11", "--master-port", "29501"]
    assert words[words.index("--port") + 1] == "8000"
    assert lane["api_key_file"] == TINY["api_key_file"]
    assert wide.has_api(lane)


def test_a_member_is_headless_and_has_no_port_no_name_and_no_key():
    lane = part("box2", args={"--tensor-parallel-size": 2, "--api-server-count": 2})
    words = render.render(lane)["argv"]
    assert words[-1] == "--headless"
    assert arguments.argument_value(lane["args"], "--node-rank") == "1"
    assert not {"--port", "--host", "--served-model-name", "--api-server-count"} & set(words)
    assert lane["api_key_file"] is None
    assert not wide.has_api(lane)


def test_parts_differ_in_nothing_else():
    """The engine's ranks must agree on the model, the sizes and everything that shapes memory."""
    own = {"--node-rank", "--headless", "--host", "--port", "--served-model-name"}
    rest = [[group for group in part(box)["args"] if group[0] not in own] for box in ("box1", "box2")]
    assert rest[0] == rest[1]
    assert part("box1")["env"].keys() == part("box2")["env"].keys()


def test_connections_are_bound_to_this_boxs_address():
    lane = part("box2")
    assert lane["env"]["VLLM_HOST_IP"] == "10.0.0.12"
    assert "GLOO_SOCKET_IFNAME" not in lane["env"], "the profile's loopback is for a lane on one box"
    assert {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} <= set(render.render(lane)["runtime_env"])
    assert wide.interface_variables(lane, "eth1") == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}


def test_a_lanes_own_interface_stays():
    lane = part("box2", env={"GLOO_SOCKET_IFNAME": "ib0"})
    assert lane["env"]["GLOO_SOCKET_IFNAME"] == "ib0"
    assert wide.interface_variables(lane, "eth1") == {"NCCL_SOCKET_IFNAME": "=eth1"}
    assert "GLOO_SOCKET_IFNAME" not in render.render(lane)["runtime_env"]


def test_a_box_that_is_not_listed_does_not_have_the_lane():
    other = {"name": "own", "profile": "tiny-cpu", "checkpoint": "/models/tiny", "port": 8001}
    assert [lane["lane"] for lane in resolved("box3", TINY, other)] == ["own"]


def test_a_lane_on_one_box_is_what_it_was():
    """Otherwise every lane of a fleet would restart when this came."""
    lane = {key: value for key, value in TINY.items() if key != "boxes"}
    (with_box,) = resolved("box1", lane)
    assert with_box == profile.resolve(lane, CATALOG)
    assert "part" not in with_box
    assert "watchdog" not in with_box
    assert not wide.is_wide(with_box)
    assert "--nnodes" not in render.render(with_box)["argv"]
    assert with_box["env"]["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        ({"boxes": ["box1"]}, "bad_schema", "boxes"),
        ({"boxes": ["box1", "box1"]}, "duplicate_box", "box1"),
        ({"boxes": ["box1", "box9"]}, "address_needed", "box9"),
        ({"boxes": ["box1", "box2", "box3"]}, "wide_shape", "3 boxes"),
        ({"args": {}}, "wide_shape", "tensor parallel 1"),
        ({"args": {"--tensor-parallel-size": 2, "--data-parallel-size": 2}}, "wide_data_parallel", "data parallel"),
        ({"args": {"--tensor-parallel-size": "two"}}, "wide_shape", "'two'"),
        ({"args": {"--tensor-parallel-size": 0}}, "wide_shape", "'0'"),
        ({"args": {"--nnodes": 2}}, "reserved_flag", "boxes"),
        ({"args": {"--master-addr": "10.0.0.1"}}, "reserved_flag", "boxes"),
        ({"extra_args": ["--headless"]}, "reserved_flag", "boxes"),
        ({"watchdog": {"enabled": False}}, "watchdog_needed", "watchdog"),
        ({"master_port": 8000}, "duplicate_port", "three different"),
        ({"peer_port": 29501}, "duplicate_port", "three different"),
        ({"boxes": None}, "bad_schema", "boxes"),
    ],
)
def test_refusals(changes, reason, text):
    error = refusal(**changes)
    assert error.reason == reason
    assert text in error.message
    assert "main" in error.message


def test_a_host_name_is_no_address():
    error = refusal(addresses={"box1": "10.0.0.11", "box2": "box2.example"})
    assert error.reason == "address_needed"
    assert "vllm_box_address" in error.fix


@pytest.mark.parametrize("key", ["master_port", "peer_port"])
def test_ports_between_boxes_need_boxes(key):
    lane = {name: value for name, value in TINY.items() if name != "boxes"}
    with pytest.raises(UsageError) as refused:
        resolved("box1", {**lane, key: 29600})
    assert refused.value.reason == "boxes_missing"


def test_two_lanes_do_not_meet_on_one_port():
    second = {**TINY, "name": "second", "port": 8001, "api_key_file": "/k"}
    with pytest.raises(UsageError) as refused:
        resolved("box1", TINY, second)
    assert (refused.value.reason, "29501" in refused.value.message) == ("duplicate_port", True)
    assert len(resolved("box1", TINY, {**second, "master_port": 29511})) == 2


@pytest.mark.parametrize(
    ("tensor", "pipeline", "boxes", "expected"),
    [
        (8, 2, 2, (8, 1)),  # a stage a box
        (4, 4, 2, (4, 2)),  # two stages a box
        (16, 1, 2, (8, 1)),  # half of the only stage a box
        (8, 2, 4, (4, 1)),  # half a stage a box
        (2, 1, 2, (1, 1)),
    ],
)
def test_the_shape_inside_a_box(tensor, pipeline, boxes, expected):
    found = wide.shape(tensor, pipeline, boxes, Where("lane x"))
    assert (found["tensor_parallel"], found["pipeline_parallel"]) == expected
    assert found["tensor_parallel"] * found["pipeline_parallel"] * boxes == tensor * pipeline


@pytest.mark.parametrize(("tensor", "pipeline", "boxes"), [(4, 3, 2), (3, 1, 2), (1, 1, 2), (4, 2, 3)])
def test_shapes_that_do_not_fall_into_boxes(tensor, pipeline, boxes):
    with pytest.raises(UsageError) as refused:
        wide.shape(tensor, pipeline, boxes, Where("lane x"))
    assert refused.value.reason == "wide_shape"


def test_the_gpu_decision_of_a_box_is_about_its_own_share():
    lane = part("box2", topology={"tensor_parallel": 4, "pipeline_parallel": 2, "layer_partition": [25, 23]},
                args={"--tensor-parallel-size": 4, "--pipeline-parallel-size": 2})  # fmt: skip
    assert (lane["policy"]["tensor_parallel"], lane["policy"]["pipeline_parallel"]) == (4, 1)
    assert lane["policy"]["layer_partition"] is None, "it counts the stages of all boxes"
    assert arguments.argument_value(lane["args"], "--tensor-parallel-size") == "4"


# ---- who changes together --------------------------------------------------------------------------------------------


def spans(*boxes):
    return {"lane": "-".join(boxes), "part": {"boxes": list(boxes)}}


def test_boxes_that_share_a_lane_change_together():
    lanes = {
        "a": [spans("a", "c")], "b": [{"lane": "own"}], "c": [spans("a", "c"), spans("c", "d")], "d": [spans("c", "d")],
    }  # fmt: skip
    assert wide.together(["a", "b", "c", "d"], lanes) == [["a", "c", "d"], ["b"]]
    assert wide.together(["b"], lanes) == [["b"]]
    assert wide.together([], {}) == []


def test_who_is_left_out():
    lanes = [part("box1"), {"lane": "own"}]
    assert wide.left_out(lanes, ["box1", "box2", "box3"]) == {}
    assert wide.left_out(lanes, ["box1"]) == {"main": ["box2"]}


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ([{"lane": "main", "flip": True}], True),
        ([{"lane": "main", "flip": False, "key_changed": True}], True),
        ([{"lane": "main", "flip": False}], False),
        ([{"lane": "other", "flip": True}], False),
        (None, False),
    ],
)
def test_a_part_hears_of_a_change_on_another_box(theirs, told):
    rows = [{"lane": "main", "flip": False, "release": "1"}]
    staged = {"box1": [{"lane": "main", "flip": True}], "box2": theirs}
    (row,) = wide.joint(rows, [part("box1")], staged, "box1")
    assert row.get("peers_flip", False) is told
