"""What an inventory cannot say: each mistake ends on the controller, in one message with the value and the way out."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.testinfra_helpers import converge

GOOD = {"name": "main", "profile": "tiny-cpu", "port": 8000, "host": "127.0.0.1", "checkpoint": "/srv/models/tiny"}


def lane(**changes):
    """Return the good lane with some keys changed."""
    return {**GOOD, **changes}


#: name of the case: (lanes, reason code, further words of the message)
REFUSED = {
    "unknown-profile": ([lane(profile="tiny-cpuu")], "unknown_key", ["'tiny-cpuu'", "Did you mean tiny-cpu?"]),
    "unknown-key": ([lane(prot=8001)], "unknown_key", ["'prot'", "port"]),
    "one-port-twice": ([lane(), lane(name="second")], "duplicate_port", ["8000", "main", "second"]),
    "one-name-twice": ([lane(), lane(port=8001)], "duplicate_lane", ["main"]),
    "open-without-a-key": ([lane(host="0.0.0.0")], "open_bind", ["0.0.0.0", "api_key_file"]),
    "name-with-a-path": ([lane(name="../main")], "bad_schema", ["../main", "lower-case letters"]),
    "port-out-of-range": ([lane(port=70000)], "bad_schema", ["port", "70000"]),
    "port-no-number": ([lane(port="http")], "bad_schema", ["port", "'http'"]),
    "relative-checkpoint": ([lane(checkpoint="models/tiny")], "bad_schema", ["checkpoint", "models/tiny"]),
    "argument-of-the-roles": ([lane(args={"--port": 9000})], "reserved_flag", ["--port", "key port"]),
    "line-break-in-environment": ([lane(env={"NOTE": "a\nb"})], "bad_character", ["NOTE"]),
}
ACCEPTED = {
    "open-with-a-key": [lane(host="0.0.0.0", api_key_file="/etc/vllm-fleet/secrets/main.key")],
    "open-on-purpose": [lane(host="0.0.0.0", allow_open_bind=True)],
    "two-lanes": [lane(), lane(name="second", port=8001)],
}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Run the role once over a host for each case; return the outcome of each as ``ok`` or its message on one line."""
    cases = {name: case[0] for name, case in REFUSED.items()} | ACCEPTED | {"no-list": "main"}
    local = {"ansible_connection": "local", "ansible_python_interpreter": "{{ ansible_playbook_python }}"}
    hosts = {name: {"vllm_lanes": lanes} for name, lanes in cases.items()}
    inventory = tmp_path_factory.mktemp("inventory") / "hosts.yml"
    inventory.write_text(yaml.safe_dump({"gpu-boxes": {"hosts": hosts, "vars": local}}))
    output = converge(inventory=inventory).stdout
    assert "Traceback" not in output
    recap = dict(re.findall(r"^(\S+) +: .*failed=(\d)", output, re.MULTILINE))
    assert set(recap) == set(cases), output
    found = {name: "ok" for name, failed in recap.items() if failed == "0"}
    for name, text in re.findall(r"^fatal: \[(\S+?)\]: FAILED! =>\s*\n((?:[ ].*\n|\n(?=[ ]))+)", output, re.MULTILINE):
        found[name] = " ".join(text.replace("''", "'").split())
    return found


@pytest.mark.parametrize(
    ("name", "reason", "words"), [(name, *case[1:]) for name, case in REFUSED.items()], ids=REFUSED
)
def test_refused(played, name, reason, words):
    message = played[name]
    assert f" {reason}: " in message
    for word in words:
        assert word in message


def test_no_list_is_refused_by_the_arguments_of_the_role(played):
    assert "'lane_plan_lanes' is of type str" in played["no-list"]


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(played, name):
    assert played[name] == "ok"
