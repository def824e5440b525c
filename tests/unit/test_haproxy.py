"""What HAProxy's socket says, as rows, and when a drain is refused. The texts are HAProxy 2.6's own."""

from __future__ import annotations

import pytest
from vllm_fleet import haproxy
from vllm_fleet.errors import RefusedError, UsageError

STATE_HEAD = (
    "1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight "
    "srv_time_since_last_change srv_check_status srv_check_result srv_check_health srv_check_state srv_agent_state "
    "bk_f_forced_id srv_f_forced_id srv_fqdn srv_port srvrecord\n"
)


def state(*servers: tuple[str, int, int]) -> str:
    """Return ``show servers state`` of one pool: (name, operational state, admin state)."""
    lines = [
        f"4 tiny {number} {name} 10.0.0.{number} {op} {admin} 1 1 9 15 3 4 6 0 0 0 - 8000 -"
        for number, (name, op, admin) in enumerate(servers, 1)
    ]
    return STATE_HEAD + "\n".join(lines)


def stat(*servers: tuple[str, int, int]) -> str:
    """Return ``show stat``: (name, queued, current requests)."""
    lines = ["# pxname,svname,qcur,qmax,scur,smax,status,eresp,hrsp_5xx", "edge,FRONTEND,,,9,9,OPEN,,5"]
    lines += [f"tiny,{name},{queued},0,{current},5,UP,1,2" for name, queued, current in servers]
    return "\n".join([*lines, "tiny,BACKEND,0,0,9,9,UP,3,3"])


def rows(**admin_of: int):
    """Return rows of servers that are up, by their admin state."""
    return haproxy.servers(
        stat(*[(name, 0, 0) for name in admin_of]), state(*[(name, 2, bits) for name, bits in admin_of.items()])
    )


def test_rows_join_what_two_commands_say():
    found = haproxy.servers(
        stat(("box1:main", 1, 2), ("box2:main", 0, 0), ("box3:main", 0, 0), ("box4:main", 0, 1)),
        state(("box1:main", 2, 0), ("box2:main", 2, 0x08), ("box3:main", 0, 0), ("box4:main", 2, 0x01)),
    )
    assert [(row["server"], row["admin"], row["up"], row["in_flight"], row["in_rotation"]) for row in found] == [
        ("box1:main", "ready", True, 3, True),
        ("box2:main", "drain", True, 0, False),
        ("box3:main", "ready", False, 0, False),
        ("box4:main", "maint", True, 1, False),
    ]
    assert {(row["pool"], row["errors"]) for row in found} == {("tiny", 3)}


@pytest.mark.parametrize(
    ("one", "two"), [("Permission denied", state()), (stat(), "Permission denied"), ("", ""), (stat(), "1\nno header")]
)
def test_other_texts_are_refused(one, two):
    with pytest.raises(UsageError) as caught:
        haproxy.servers(one, two)
    assert caught.value.reason == "bad_haproxy_answer"


def test_the_last_server_does_not_leave():
    with pytest.raises(RefusedError) as caught:
        haproxy.check_minimum(rows(a=0, b=0x08), ["a"], 1)
    assert caught.value.reason == "rotation_minimum"
    haproxy.check_minimum(rows(a=0, b=0x08), ["a"], 0)
    haproxy.check_minimum(rows(a=0, b=0), ["a"], 1)
    with pytest.raises(RefusedError):
        haproxy.check_minimum(rows(a=0, b=0), ["a", "b"], 1)


def test_who_is_out_already_lowers_nothing():
    """A rerun drains what an interrupted run had drained, also when nobody else is there."""
    haproxy.check_minimum(rows(a=0x08, b=0x08), ["a"], 1)


def test_names_that_haproxy_cannot_hold_are_refused():
    assert haproxy.server_name("rack-1.example", "main") == "rack-1.example:main"
    with pytest.raises(UsageError) as caught:
        haproxy.server_name("rack 1", "main")
    assert caught.value.reason == "bad_server_name"


# --- pools ----------------------------------------------------------------------------------------------------------


def box(*lanes: dict, address: str = "10.0.0.1", **keys: str) -> dict:
    return {"address": address, "lanes": list(lanes), "keys": keys}


def lane(name: str = "main", model: str = "tiny", **more) -> dict:
    return {
        "lane": name,
        "host": "10.0.0.1",
        "port": 8000,
        "served_names": [model, "alias"],
        "api_key_file": None,
        **more,
    }


def refusal(*args, **more) -> str:
    with pytest.raises(RefusedError) as caught:
        haproxy.pools(*args, **more)
    return caught.value.reason


def test_the_lanes_of_a_model_are_a_pool():
    boxes = {
        "b2": box(lane(host="10.0.0.2")),
        "b1": box(lane(), lane("other", "Org/Big model", port=8001)),
    }
    big, tiny = haproxy.pools(boxes, {"tiny": 81, "Org/Big model": 82}, 80)
    assert (big["name"], big["port"], [server["name"] for server in big["servers"]]) == (
        "Org-Big-model",
        82,
        ["b1:other"],
    )
    assert (tiny["name"], tiny["port"]) == ("tiny", 81)
    assert [(server["name"], server["address"]) for server in tiny["servers"]] == [
        ("b1:main", "10.0.0.1"), ("b2:main", "10.0.0.2"),
    ]  # fmt: skip


def test_one_model_needs_no_port_of_its_own_and_several_do():
    assert haproxy.pools({"b1": box(lane())}, {}, 80)[0]["port"] == 80
    two = {"b1": box(lane(), lane("x", "other"))}
    assert refusal(two, {"tiny": 81}, 80) == "pool_port_missing"
    assert refusal(two, {"tiny": 81, "other": 81}, 80) == "pool_port_taken"


def test_a_lane_that_cannot_be_reached_is_refused_or_left_out():
    boxes = {"b1": box(lane(host="127.0.0.1")), "b2": box(lane())}
    assert refusal(boxes, {}, 80) == "lane_on_loopback"
    assert [s["name"] for s in haproxy.pools(boxes, {}, 80, balancer="b1")[0]["servers"]] == ["b1:main", "b2:main"]
    assert [s["name"] for s in haproxy.pools(boxes, {}, 80, ["b1:main"])[0]["servers"]] == ["b2:main"]
    assert refusal(boxes, {}, 80, ["b1:main", "b3:main"]) == "unknown_exclude"
    assert refusal(boxes, {}, 80, ["b1:main", "b2:main"]) == "no_lanes"


def test_a_lane_that_listens_everywhere_is_reached_at_its_box():
    boxes = {"b1": box(lane(host="0.0.0.0"), address="192.0.2.7")}
    assert haproxy.pools(boxes, {}, 80)[0]["servers"][0]["address"] == "192.0.2.7"


def test_a_pool_has_one_key():
    def keyed(key: str) -> dict:
        return box(lane(api_key_file="/etc/key"), main=key)

    assert haproxy.pools({"b1": keyed("k"), "b2": keyed("k")}, {}, 80)[0]["key"] == "k"
    assert refusal({"b1": keyed("k"), "b2": keyed("other")}, {}, 80) == "pool_keys_differ"
    assert refusal({"b1": keyed("k"), "b2": box(lane())}, {}, 80) == "pool_keys_differ"
    assert refusal({"b1": box(lane(api_key_file="/etc/key"))}, {}, 80) == "pool_key_missing"


def test_quotes_hold_everything_but_control_characters():
    assert haproxy.quoted("a $b \"c\" 'd'") == "'a $b \"c\" '\\''d'\\'''"
    with pytest.raises(UsageError):
        haproxy.quoted("a\nb")
