"""The balancer from its clients' side and from systemd's: who gets in, what passes, and that no lane joins by accident.

The tests run in the order of the file; the lane behind the balancer is a stand-in that says what it was asked.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.testinfra_helpers import PLAIN, ROOT, converge, owned

LANE_KEY = "lane-key-%-$x-'-end"

LANE = """
import http.server, json, sys
class Lane(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = {"data": [{"id": sys.argv[1]}], "path": self.path, "headers": dict(self.headers)}
        if "Content-Length" in self.headers:
            self.rfile.read(int(self.headers["Content-Length"]))
        text = json.dumps(body, separators=(",", ":")).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    do_POST = do_GET
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Lane).serve_forever()
"""

ASK = """
import json, ssl, sys, urllib.request
method, url, key = sys.argv[1:4]
body = b"{}" if method == "POST" else None
request = urllib.request.Request(url, body, {"Authorization": key} if key else {}, method=method)
context = ssl.create_default_context(cafile="/root/edge.crt") if url.startswith("https") else None
try:
    with urllib.request.urlopen(request, timeout=20, context=context) as answer:
        print(json.dumps([answer.status, answer.read().decode()]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode()]))
"""


def python(host, program, *arguments):
    """Run a Python program on the box and return its stdout."""
    return host.check_output(f"/usr/bin/python3 -c {shlex.quote(program)} {shlex.join(map(str, arguments))}")


def ask(host, path, key="Bearer secret-of-a-client", method="GET", base="http://127.0.0.1:8080"):
    """Return the status and the text of an answer of the balancer."""
    return json.loads(python(host, ASK, method, base + path, key))


def start_lane(host, model="tiny"):
    """Start the stand-in and wait until the balancer says that somebody serves."""
    host.run("systemctl stop lane")
    host.check_output(
        f"systemd-run --quiet --collect --unit=lane /usr/bin/python3 -c {shlex.quote(LANE)} {shlex.quote(model)}"
    )


def wait_health(host, status, deadline_s=30):
    """Wait until the balancer's own health has this status."""
    end = time.monotonic() + deadline_s
    while ask(host, "/health", key="")[0] != status:
        assert time.monotonic() < end, f"health is not {status}"
        time.sleep(0.5)


def server(host):
    """Return the name under which HAProxy knows the lane."""
    return host.check_output("sed -n 's/^ *server \\([^ ]*\\) 127.*/\\1/p' /etc/haproxy/haproxy.cfg")


def main_pid(host):
    return host.check_output("systemctl show --value --property=MainPID haproxy")


def module(name, **options):
    """Run one module on the box with the scenario's inventory and return its result."""
    inventory = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"], "inventory")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ansible")), "-i", str(inventory), "gpu-boxes", "-o", "-m", name,
         "-a", json.dumps(options)],
        capture_output=True, text=True, check=False, env={**os.environ, **PLAIN}, cwd=ROOT,
    )  # fmt: skip
    return json.loads(done.stdout.partition("=> ")[2])


def flat(played):
    return " ".join(played.stdout.split())


def test_without_a_lane_nobody_is_promised_anything(host):
    assert host.service("haproxy").is_running
    assert host.service("haproxy").is_enabled
    wait_health(host, 503)
    assert ask(host, "/v1/models")[0] == 503


def test_a_lane_with_another_model_gets_no_requests(host):
    start_lane(host, "another")
    time.sleep(6)
    assert ask(host, "/health", key="")[0] == 503


def test_a_serving_lane_is_found_and_gets_its_own_key(host):
    start_lane(host)
    wait_health(host, 200)
    status, text = ask(host, "/v1/completions", method="POST")
    assert status == 200
    seen = {name.lower(): value for name, value in json.loads(text)["headers"].items()}
    assert seen["authorization"] == f"Bearer {LANE_KEY}"
    assert seen["x-forwarded-for"] == "127.0.0.1"


@pytest.mark.parametrize(
    "key", ["", "Bearer wrong", "secret-of-a-client", "Basic secret-of-a-client", f"Bearer {LANE_KEY}", "Bearer "]
)
def test_without_a_client_key_only_health_answers(host, key):
    for path in ("/v1/models", "/v1/completions", "/pause"):
        assert ask(host, path, key=key)[0] == 401
    assert ask(host, "/health", key=key)[0] == 200


@pytest.mark.parametrize(
    "path", ["/pause", "/update_weights", "/invocations", "/metrics", "/v1/load_lora_adapter", "/v1/models/../../pause",
             "//v1/models", "/V1/models", "/v1/models/", "/%76%31/models"],
)  # fmt: skip
def test_only_listed_paths_pass(host, path):
    assert ask(host, path)[0] == 403
    assert ask(host, path, method="POST")[0] == 403


def test_a_query_does_not_change_the_path_and_methods_are_checked(host):
    assert ask(host, "/v1/models?x=/pause")[0] == 200
    assert ask(host, "/v1/completions")[0] == 405
    assert ask(host, "/v1/models", method="DELETE")[0] == 405


def test_statistics_are_on_loopback_alone(host):
    listening = host.check_output("ss -Hltn | awk '{print $4}'").split()
    assert "127.0.0.1:8404" in listening
    assert {address.rpartition(":")[2] for address in listening if not address.startswith("127.")} == {"22", "8080"}
    metrics = ask(host, "/metrics", base="http://127.0.0.1:8404")[1]
    assert 'haproxy_server_status{proxy="tiny"' in metrics


def test_no_secret_stands_in_what_others_can_read(host):
    assert owned(host, "/etc/haproxy/vllm-fleet", "/etc/haproxy/vllm-fleet/lane-keys", "/etc/haproxy/haproxy.cfg") == {
        "/etc/haproxy/vllm-fleet": "0700 root:root",
        "/etc/haproxy/vllm-fleet/lane-keys": "0600 root:root",
        "/etc/haproxy/haproxy.cfg": "0644 root:root",
    }
    for secret in (LANE_KEY, "secret-of-a-client"):
        assert host.run(f"grep -rF -- {shlex.quote(secret)} /etc/haproxy/haproxy.cfg").rc == 1
    assert host.run("grep -rF -- secret-of-a-client /etc/haproxy").rc == 1, "clients' keys are kept as digests"


def test_a_drained_lane_stays_drained_over_a_reload_and_a_restart(host):
    """Also one that the role itself makes: a changed setting must not put a lane back that a rollout took out."""
    name = server(host)
    played = converge(balancer_request_timeout=3601)
    assert played.returncode == 0, played.stdout
    assert module("balancer_servers", servers=[name], state="drain")["reason"] == "drained"
    pid = main_pid(host)
    assert converge(balancer_request_timeout=3602).returncode == 0
    assert main_pid(host) == pid, "a reload keeps the master process"
    assert ask(host, "/health", key="")[0] == 503
    host.check_output("systemctl restart haproxy")
    time.sleep(5)
    assert ask(host, "/health", key="")[0] == 503
    back = module("balancer_servers", servers=[name], state="ready", wait_s=30)
    assert (back["changed"], back["reason"]) == (True, "in_rotation")
    assert ask(host, "/health", key="")[0] == 200


def test_the_last_lane_does_not_leave(host):
    name = server(host)
    refused = module("balancer_servers", servers=[name], state="drain", min_left=1)
    assert refused["reason"] == "rotation_minimum"
    assert ask(host, "/health", key="")[0] == 200


def test_a_configuration_that_haproxy_refuses_changes_nothing(host):
    before = host.check_output("sha256sum /etc/haproxy/haproxy.cfg"), main_pid(host)
    played = converge(balancer_bind="300.1.1.1")
    assert played.returncode != 0
    assert "HAProxy refuses the configuration" in flat(played)
    assert (host.check_output("sha256sum /etc/haproxy/haproxy.cfg"), main_pid(host)) == before
    assert ask(host, "/health", key="")[0] == 200


def test_a_reload_that_an_interrupted_play_owes_is_made_up_for(host):
    """The file is new and the process old: the next play sees it from what runs, not from what it remembers."""
    host.check_output("cp -p /etc/haproxy/haproxy.cfg /root/haproxy.cfg")
    assert converge(balancer_request_timeout=3700).returncode == 0
    host.check_output("cp -p /etc/haproxy/haproxy.cfg /root/new.cfg; cp -p /root/haproxy.cfg /etc/haproxy/haproxy.cfg")
    host.check_output("systemctl reload haproxy; sleep 2; cp -p /root/new.cfg /etc/haproxy/haproxy.cfg")
    played = converge(balancer_request_timeout=3700)
    assert "changed=1" in flat(played)
    assert "changed=0" in flat(converge(balancer_request_timeout=3700))


def test_open_to_everybody_is_refused(host):
    played = converge(balancer_api_keys=[])
    assert played.returncode != 0
    assert "open_bind" in flat(played)


def test_with_a_certificate_clients_speak_tls(host, tmp_path):
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=edge",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", tmp_path / "key", "-out", tmp_path / "crt"],
        check=True, capture_output=True,
    )  # fmt: skip
    certificate = (tmp_path / "crt").read_text()
    played = converge(balancer_tls_pem=certificate + (tmp_path / "key").read_text())
    assert played.returncode == 0, played.stdout
    assert "PRIVATE KEY" not in played.stdout
    host.check_output(f"cat > /root/edge.crt <<'EOF'\n{certificate}\nEOF")
    assert ask(host, "/v1/models", base="https://127.0.0.1:8080")[0] == 200
    assert owned(host, "/etc/haproxy/vllm-fleet/edge.pem") == {"/etc/haproxy/vllm-fleet/edge.pem": "0600 root:root"}
    assert converge().returncode == 0
    assert not host.file("/etc/haproxy/vllm-fleet/edge.pem").exists
    assert ask(host, "/v1/models")[0] == 200
