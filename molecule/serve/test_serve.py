"""A served lane from the outside and from systemd's side: who runs, what it may do, and that it survives what happens.

The tests run in the order of the file, against one lane; each leaves it answering.
"""

from __future__ import annotations

import json
import re
import shlex
import time

import pytest

from tests.testinfra_helpers import as_vllm, assert_active, converge, owned, property_of

UNIT = "vllm@main.service"
HOME = "/etc/vllm-fleet/lanes/main"
LOG = "/var/log/vllm-fleet/main.log"
ENGINE_PYTHON = "/opt/vllm-fleet/engines/vllm-0.32.0-cpu/venv/bin/python"
LANE = {
    "name": "main", "profile": "tiny-cpu", "port": 8000, "host": "127.0.0.1", "checkpoint": "/srv/models/tiny",
    "served_names": ["tiny"],
}  # fmt: skip

ASK = """
import json, sys, urllib.request
body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


def python(host, program, *arguments):
    """Run a Python program on the box and return its stdout."""
    return host.check_output(f"/usr/bin/python3 -c {shlex.quote(program)} {shlex.join(map(str, arguments))}")


def main_pid(host):
    return int(property_of(host, UNIT, "MainPID"))


def argument(host, name):
    """Return the value that the running engine got for an argument."""
    words = host.check_output(f"tr '\\0' '\\n' < /proc/{main_pid(host)}/cmdline").splitlines()
    return words[words.index(name) + 1]


def current(host):
    return host.check_output(f"readlink {HOME}/current").rpartition("/")[2]


def assert_answers(host):
    """Ask for a chat completion and check that it is the lane's model that generated something."""
    assert_active(host, UNIT)
    answer = json.loads(python(host, ASK))
    assert answer["model"] == "tiny"
    assert answer["usage"]["completion_tokens"] >= 1
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")


def flat(played):
    """Return a play's output on one line, as messages are wrapped."""
    return " ".join(played.stdout.split())


def test_the_lane_answers_as_its_model(host):
    assert_answers(host)


def test_the_lane_runs_as_the_service_user_and_starts_at_boot(host):
    assert host.check_output(f"ps -o user= -p {main_pid(host)}").strip() == "vllm"
    group = property_of(host, UNIT, "ControlGroup")
    pids = host.check_output(
        f"find /sys/fs/cgroup -path '*{group}/*' -name cgroup.procs -exec cat {{}} + ; "
        f"find /sys/fs/cgroup -path '*{group}/cgroup.procs' -exec cat {{}} +"
    ).split()
    users = set(host.check_output(f"ps -o user= -p {','.join(pids)}").split())
    assert users == {"vllm"}, "the engine's workers too"
    assert host.service(UNIT).is_enabled


def test_nothing_of_the_lane_listens_for_others(host):
    """Neither its API nor the ports that the engine's workers open for one another."""
    listening = host.check_output("ss -Hltn | awk '{print $4}'").split()
    assert "127.0.0.1:8000" in listening
    assert {address.rpartition(":")[2] for address in listening if not address.startswith("127.")} == {"22"}


def test_the_unit_is_clean_and_tight(host):
    verified = host.run(f"systemd-analyze verify {UNIT}")
    assert (verified.rc, verified.stderr) == (0, "")
    text = host.check_output(f"systemd-analyze security --no-pager {UNIT} | tail -1")
    score = float(re.search(r": ([0-9.]+) ", text).group(1))
    assert score <= 2.0, text


def test_what_is_on_disk_belongs_to_root_and_keys_stay_closed(host):
    unit, drop_in = "/etc/systemd/system/vllm@.service", "/etc/systemd/system/vllm@main.service.d/50-release.conf"
    assert owned(host, unit, drop_in, f"{HOME}/current/environment", LOG, "/etc/vllm-fleet/secrets") == {
        unit: "0644 root:root",
        drop_in: "0644 root:root",
        f"{HOME}/current/environment": "0644 root:root",
        LOG: "0640 root:vllm",
        "/etc/vllm-fleet/secrets": "0700 root:root",
    }
    assert as_vllm(host, f"find {HOME} -writable ! -type l").stdout == ""


def test_one_argument_a_line(host):
    shown = host.check_output(f"sed -n '/^ExecStart=.../,$p' {HOME}/current/unit.conf")
    assert re.search(r'^    "--max-model-len" \\\n    "512" \\$', shown, re.MULTILINE), shown


def test_what_the_lane_may_not_do(host):
    """From inside the running unit's namespaces: no home, no writes but its own places."""
    enter = f"nsenter --target {main_pid(host)} --mount --setuid=$(id -u vllm) --setgid=$(id -g vllm)"
    for path in ("/usr/x", "/etc/x", "/opt/vllm-fleet/x", "/srv/models/tiny/x", "/var/log/x"):
        assert host.run(f"{enter} touch {path}").rc != 0, path
    assert host.run(f"{enter} touch /var/lib/vllm-fleet/lanes/main/x").rc == 0
    assert host.run(f"{enter} ls /home/ops").rc != 0


def test_logrotate_while_a_client_loads_it(host):
    """Every request leaves a line with its number: none may be missing over the old and the new file."""
    run = time.time_ns()
    load = (
        "import time, urllib.request\n"
        "for number in range(600):\n"
        f"    url = f'http://127.0.0.1:8000/version?run={run}&number={{number}}-'\n"
        "    urllib.request.urlopen(url, timeout=20).read()\n"
        "    time.sleep(0.01)\n"
    )
    host.check_output(f"systemd-run --quiet --collect --unit=load /usr/bin/python3 -c {shlex.quote(load)}")
    deadline = time.monotonic() + 120
    while host.run(f"grep -qF 'run={run}&number=100-' {LOG}").rc:
        assert time.monotonic() < deadline, "the client's requests do not reach the log"
    forced = host.run("logrotate --force /etc/logrotate.d/vllm-fleet")
    assert (forced.rc, forced.stderr) == (0, "")
    while host.run("systemctl is-active load").stdout.strip() == "active":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    numbers = []
    for path in (f"{LOG}.1", LOG):
        pattern = f"run={run}&number=\\K[0-9]+(?=-)"
        found = [int(text) for text in host.check_output(f"grep -oP '{pattern}' {path}").split()]
        assert found, f"{path} has no request of the client"
        numbers += found
    assert numbers == list(range(600))
    assert host.check_output(f"tr -dc '\\000' < {LOG} | wc -c").strip() == "0", "a hole at the start of the new file"
    assert "number=" in host.check_output(f"head -n 1 {LOG}"), "the new file begins where the old one ended"
    assert owned(host, LOG) == {LOG: "0640 root:vllm"}


def test_an_occupied_port_is_refused_before_anything_is_touched(host):
    listen = "import socket, time; s = socket.create_server(('127.0.0.1', 8123)); time.sleep(600)"
    host.check_output(f"systemd-run --quiet --collect --unit=squatter /usr/bin/python3 -c {shlex.quote(listen)}")
    before = main_pid(host), current(host)
    try:
        played = converge(vllm_lanes=[{**LANE, "port": 8123}])
    finally:
        host.check_output("systemctl stop squatter")
    assert played.returncode != 0
    assert "port_occupied" in flat(played)
    assert "8123" in flat(played)
    assert (main_pid(host), current(host)) == before


def test_an_argument_that_the_engine_does_not_know_is_refused_with_its_own_words(host):
    before = main_pid(host), current(host)
    played = converge(vllm_lanes=[{**LANE, "extra_args": ["--no-such-argument", "7"]}])
    assert played.returncode != 0
    assert "unrecognized arguments: --no-such-argument 7" in flat(played)
    assert (main_pid(host), current(host)) == before
    assert_answers(host)


def test_a_killed_engine_comes_back_by_itself(host):
    before = main_pid(host)
    host.check_output(f"kill -9 {before}")
    deadline = time.monotonic() + 240
    while property_of(host, UNIT, "ActiveState") != "active" or main_pid(host) == before:
        assert time.monotonic() < deadline, "not back within 240 s"
        assert property_of(host, UNIT, "ActiveState") != "failed", assert_active(host, UNIT)
        time.sleep(1)
    assert_answers(host)


@pytest.fixture(scope="module")
def second(host):
    """Change one engine argument in the inventory; give (release before, process before, its new value, output)."""
    before = current(host), main_pid(host)
    sequences = int(argument(host, "--max-num-seqs")) + 1
    played = converge(vllm_lanes=[{**LANE, "max_seqs": sequences}])
    assert played.returncode == 0, played.stdout
    return *before, sequences, played.stdout


def test_one_changed_argument_restarts_the_lane_once(host, second):
    release, pid, sequences, _ = second
    assert current(host) != release
    assert host.check_output(f"readlink {HOME}/previous").rpartition("/")[2] == release
    assert main_pid(host) != pid
    assert property_of(host, UNIT, "NRestarts") == "0"
    assert_answers(host)
    assert argument(host, "--max-num-seqs") == str(sequences)


def test_the_wait_says_what_the_engine_does(second):
    assert re.search(r"t-serve main: [a-z ]+, \d+ s", second[3])


def test_a_release_that_does_not_answer_is_taken_back(host, second):
    """The parser takes the length, the engine finds out at its start that the model has less."""
    good, pid = current(host), main_pid(host)
    played = converge(vllm_lanes=[{**LANE, "max_seqs": second[2], "args": {"--max-model-len": 4096}}])
    assert played.returncode != 0
    output = flat(played)
    assert "User-specified max_model_len (4096) is greater than the derived max_model_len" in output
    assert "Traceback" not in output
    assert "The last good release is back and answers: main" in output
    assert current(host) == good
    assert main_pid(host) != pid
    assert_answers(host)
