"""The whole box out of nothing: its lane answers for its key, its GPUs are decided, and check mode tells the truth."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from tests.testinfra_helpers import assert_active, converge, owned, property_of

UNIT = "vllm@main.service"
KEY = "key-of-the-scenario"
SECRET = "/etc/vllm-fleet/secrets/main.key"
LANE = {
    "name": "main", "profile": "tiny-cpu", "port": 8000, "host": "{{ lab_ip }}", "checkpoint": "/srv/models/tiny",
    "served_names": ["tiny"], "api_key_file": SECRET,
    "topology": {"mode": "auto", "tensor_parallel": 2, "pipeline_parallel": 2},
}  # fmt: skip

ASK = """
import json, sys, urllib.error, urllib.request
address, key = sys.argv[1:]
body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
request = urllib.request.Request(f"http://{address}:8000/v1/chat/completions", body, headers)
try:
    print(urllib.request.urlopen(request, timeout=60).read().decode())
except urllib.error.HTTPError as error:
    print(json.dumps({"status": error.code}))
"""


def ask(host, key):
    """Ask for a chat completion at the box's address and return the answer, or ``{"status": n}`` of a refusal."""
    address = host.check_output("hostname -I").split()[0]
    return json.loads(host.check_output(f"/usr/bin/python3 -c {shlex.quote(ASK)} {address} {shlex.quote(key)}"))


def changed_count(played):
    return int(re.search(r"^t-default .*changed=(\d+)", played.stdout, re.MULTILINE).group(1))


@pytest.fixture(scope="module")
def process(host):
    assert_active(host, UNIT)
    return int(property_of(host, UNIT, "MainPID"))


def test_the_lane_answers_for_its_key_only(host, process):
    answer = ask(host, KEY)
    assert answer["model"] == "tiny"
    assert answer["usage"]["completion_tokens"] >= 1
    assert ask(host, "another-key") == {"status": 401}


def test_the_key_is_read_from_a_closed_file_and_stands_nowhere_else(host, process):
    assert owned(host, SECRET) == {SECRET: "0600 root:root"}
    found = host.run(f"grep -rlF {KEY} /etc /var/lib/vllm-fleet /var/log/vllm-fleet /opt/vllm-fleet/bin")
    assert found.stdout.split() == [SECRET]
    assert KEY not in host.check_output(f"tr '\\0' ' ' < /proc/{process}/cmdline")
    assert KEY not in host.check_output(f"systemctl show {UNIT}")
    assert KEY not in host.check_output(f"journalctl --no-pager -u {UNIT}")


def test_the_gpus_are_decided_on_the_box(host, process):
    """The scenario's four cards are linked 0 with 2 and 1 with 3."""
    environment = host.check_output(f"tr '\\0' '\\n' < /proc/{process}/environ").splitlines()
    assert "CUDA_VISIBLE_DEVICES=0,2,1,3" in environment
    runtime = host.check_output("cat /run/vllm-fleet/main/runtime.env")
    assert "0,2,1,3" in runtime


def test_the_doctor_finds_nothing(host, process):
    found = host.run("/opt/vllm-fleet/bin/vllm-fleet doctor main")
    assert found.rc == 0, found.stdout


def test_check_mode_on_the_finished_box_says_that_nothing_would_change(host, process):
    played = converge("--check", "--diff")
    assert played.returncode == 0, played.stdout
    assert changed_count(played) == 0


def test_check_mode_tells_what_a_change_would_do_and_does_not_do_it(host, process):
    before = host.check_output(
        "find /etc/vllm-fleet /etc/systemd/system -type f -o -type l | sort | xargs stat -c '%n %i'"
    )
    played = converge("--check", "--diff", vllm_lanes=[{**LANE, "max_seqs": 5}])
    assert played.returncode == 0, played.stdout
    assert changed_count(played) == 2, "the release and the flip"
    assert re.search(r'^\+ +"5" ', played.stdout, re.MULTILINE), "the diff shows the new argument"
    assert (
        host.check_output("find /etc/vllm-fleet /etc/systemd/system -type f -o -type l | sort | xargs stat -c '%n %i'")
        == before
    )
    assert int(property_of(host, UNIT, "MainPID")) == process


def test_a_changed_key_restarts_the_lane(host, process):
    """The process holds the key that it was started with, so another one is a change of the lane."""
    foreseen = converge("--check", serve_api_keys={"main": "another-key"})
    assert (foreseen.returncode, changed_count(foreseen)) == (0, 2), "the key file and the restart"
    played = converge(serve_api_keys={"main": "another-key"})
    assert (played.returncode, changed_count(played)) == (0, 2), played.stdout
    assert int(property_of(host, UNIT, "MainPID")) != process
    assert ask(host, "another-key")["model"] == "tiny"
    assert ask(host, KEY) == {"status": 401}
    assert "another-key" not in played.stdout
