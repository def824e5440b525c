"""The lab's pure parts: what it makes of a host, of a network, of an answer."""

from __future__ import annotations

import hashlib
import http.server
import ipaddress
import json
import threading

import pytest

from lab import ask, converge, environment, host, image, network, registry
from lab.ask import Lane
from lab.registry import Box
from lab.settings import BoxSpec
from lab.shell import LabError

ALL_CAPS = (1 << 41) - 1
NO_RESOURCE = ALL_CAPS & ~(1 << 24)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Name:\tx\nCapBnd:\t000001fffeffffff\n", NO_RESOURCE),
        ("CapBnd:\t0000000000000000\n", 0),
        ("Name:\tx\n", 0),
    ],
)
def test_capabilities(text, expected):
    assert host.capabilities(text) == expected


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        ("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", "unified"),
        (
            "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n"
            "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n",
            "hybrid",
        ),
        ("cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n", "legacy"),
        ("proc /proc proc rw 0 0\n\nbroken\n", "none"),
    ],
)
def test_cgroup_mode(mounts, expected):
    assert host.cgroup_mode(mounts) == expected


@pytest.mark.parametrize(
    ("mode", "crun", "runc", "expected"),
    [
        ("unified", True, True, "crun"),
        ("unified", False, True, "runc"),
        ("hybrid", True, True, "runc"),
        ("hybrid", True, False, None),
        ("legacy", False, True, "runc"),
        ("unified", False, False, None),
    ],
)
def test_runtime(mode, crun, runc, expected):
    assert host.choose_runtime(mode, crun, runc) == expected


@pytest.mark.parametrize(
    ("caps", "nofile", "nproc", "pid_max", "expected"),
    [
        (ALL_CAPS, 1024, 1024, 32768, []),
        (NO_RESOURCE, 20000, 96365, 32768, ["--ulimit=nofile=20000:20000", "--ulimit=nproc=32768:32768"]),
        (NO_RESOURCE, 20000, 4000, 4194304, ["--ulimit=nofile=20000:20000", "--ulimit=nproc=4000:4000"]),
        (NO_RESOURCE, -1, -1, 32768, ["--ulimit=nproc=32768:32768"]),
    ],
)
def test_ulimits(caps, nofile, nproc, pid_max, expected):
    assert host.ulimit_args(caps, nofile, nproc, pid_max) == expected


def test_problems_are_words(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    problems = host._problems(0, "none")
    text = "\n".join(problems)
    for word in ("aarch64", "CAP_SYS_ADMIN", "CAP_NET_ADMIN", "/sys/fs/cgroup"):
        assert word in text


def test_apt_settings_take_the_proxy_of_the_environment(monkeypatch):
    dump = 'Acquire::http::Proxy "http://cache:3142";\nAcquire::Languages "none";\nAcquire::Check-Date "false";\n'
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(host, "run", lambda argv: type("Done", (), {"stdout": dump}))
    monkeypatch.setenv("http_proxy", "http://other:1")
    monkeypatch.setenv("https_proxy", "http://tls:2")
    assert host.apt_settings() == {
        "Acquire::http::Proxy": "http://cache:3142",
        "Acquire::Check-Date": "false",
        "Acquire::https::Proxy": "http://tls:2",
    }


def _nets(*names):
    return [ipaddress.IPv4Network(name) for name in names]


def test_free_subnet_avoids_what_is_taken():
    assert str(network.free_subnet([])) == "10.89.64.0/24"
    assert str(network.free_subnet(_nets("10.89.64.0/24", "10.89.65.128/25", "192.0.2.0/24"))) == "10.89.66.0/24"
    assert str(network.free_subnet([], first=6)) == "10.89.70.0/24"
    assert str(network.free_subnet(_nets("10.89.250.0/24"), first=186)) == "10.89.64.0/24"
    with pytest.raises(LabError, match="no free network"):
        network.free_subnet(_nets("10.0.0.0/8"))


def test_addresses():
    subnet = ipaddress.IPv4Network("10.89.70.0/24")
    spec, beside = BoxSpec("box1", host_number=11), BoxSpec("extra")
    assert network.address_for(spec, subnet, {}) == "10.89.70.11"
    known = {"box1": Box("box1", "c", "10.89.70.150", True)}
    assert network.address_for(spec, subnet, known) == "10.89.70.150"
    elsewhere = {"box1": Box("box1", "c", "10.89.71.150", True)}
    assert network.address_for(spec, subnet, elsewhere) == "10.89.70.11"
    taken = {f"b{n}": Box(f"b{n}", "c", f"10.89.70.{n}", False) for n in range(100, 249)}
    assert network.address_for(beside, subnet, taken) == "10.89.70.249"


def test_registry_survives_a_torn_file(monkeypatch, tmp_path):
    path = tmp_path / "lab.json"
    monkeypatch.setattr(registry, "REGISTRY", path)
    assert registry.registry() == {}
    for text in ("", "{", "[]", '{"boxes": {"a": {"wrong": 1}}}'):
        path.write_text(text)
        assert registry.registry() == {}


def test_ssh_reads_what_is_registered(monkeypatch, tmp_path):
    for name, file in (("REGISTRY", "lab.json"), ("SSH_CONFIG", "ssh_config"), ("KNOWN_HOSTS", "known_hosts")):
        monkeypatch.setattr(registry, name, tmp_path / file)
    monkeypatch.setattr(registry, "STATE", tmp_path)
    key = tmp_path / "boxes" / "box1" / "ssh_host_ed25519_key.pub"
    key.parent.mkdir(parents=True)
    key.write_text("ssh-ed25519 AAAA root@box1\n")
    box = Box("box1", "vf-box1", "10.89.70.11", True)
    registry.register({"box1": box})
    assert registry.registry() == {"box1": box}
    assert (tmp_path / "known_hosts").read_text() == "box1,10.89.70.11 ssh-ed25519 AAAA\n"
    config = (tmp_path / "ssh_config").read_text()
    assert "Host box1\n  HostName 10.89.70.11\n" in config
    assert "StrictHostKeyChecking yes" in config
    assert config.index("Host box1") < config.index("Host *")


def test_api_keys_are_private_and_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "STATE", tmp_path)
    registry.make_api_keys({"box1": ("main",)})
    path = registry.api_key_file("box1", "main")
    first = path.read_text()
    assert len(first.strip()) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    registry.make_api_keys({"box1": ("main",)})
    assert path.read_text() == first


def test_image_name_follows_the_recipe():
    one = image.image_name({"suite": "bookworm", "apt": {}})
    assert one == image.image_name({"apt": {}, "suite": "bookworm"})
    assert one != image.image_name({"suite": "bookworm", "apt": {"Acquire::http::Proxy": "http://cache"}})


def test_environment_is_stamped_with_lock_and_interpreter():
    assert environment.fingerprint(b"a", "3.11") != environment.fingerprint(b"b", "3.11")
    assert environment.fingerprint(b"a", "3.11") != environment.fingerprint(b"a", "3.12")
    assert environment.fingerprint(b"a", "3.11") == hashlib.sha256(b"a3.11").hexdigest()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], (0, 0)),
        (
            ["call box1 stat", "call box2 stat", "call box2 ansible.legacy.copy", "changed box1 0", "changed box2 0"],
            (2, 0),
        ),
        (["call box1 stat", "call ? stat", "changed box1 2", "changed box2 1"], (2, 3)),
    ],
)
def test_cost_counts(lines, expected):
    assert converge.count(lines) == expected


def test_table_aligns():
    assert ask.table([("box", "lane"), ("b1", "main-lane")]) == "box  lane\n---  ---------\nb1   main-lane"


class _Engine(http.server.BaseHTTPRequestHandler):
    """A stand-in for an engine's HTTP side."""

    model = "tiny"
    status = 200

    def _send(self, body):
        data = json.dumps(body).encode()
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self._send({"version": "0.32.0"})

    def do_POST(self):
        self.server.seen.append(self.headers.get("Authorization"))
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send(
            {
                "model": self.model,
                "choices": [
                    {"message": {"content": f"re: {asked['messages'][0]['content']}"}, "finish_reason": "length"}
                ],
                "usage": {"completion_tokens": 8},
            }
        )

    def log_message(self, *args):
        pass


@pytest.fixture
def engine(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "STATE", tmp_path)
    registry.make_api_keys({"box1": ("main",)})

    class Handler(_Engine):
        pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server, Handler, Lane("box1", "main", f"127.0.0.1:{server.server_address[1]}", "tiny")
    server.shutdown()
    server.server_close()


def test_ask_a_lane_with_its_key(engine):
    server, _, lane = engine
    answer = ask.ask(lane, "Who?")
    assert answer.ok
    assert answer.engine == "vllm 0.32.0"
    assert "re: Who?" in answer.text
    assert server.seen == [f"Bearer {registry.api_key_file('box1', 'main').read_text().strip()}"]


def test_an_answer_of_another_model_is_none(engine):
    _, handler, lane = engine
    handler.model = "other"
    answer = ask.ask(lane)
    assert not answer.ok
    assert "'other'" in answer.text


def test_a_refused_request_is_shown(engine):
    _, handler, lane = engine
    handler.status = 401
    answer = ask.ask(lane)
    assert (answer.ok, answer.text[:8]) == (False, "HTTP 401")


def test_a_dead_lane_is_an_answer_too(engine):
    server, _, lane = engine
    server.shutdown()
    server.server_close()
    answer = ask.ask(lane)
    assert not answer.ok
    assert "refused" in answer.text
