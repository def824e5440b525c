"""A BI-V100 lane on a box with the vendor's tree: its unit, its environment, and an untouched engine.

The cards, their driver and the engine's model are simulated; what systemd, the roles and the on-box program do is real.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.testinfra_helpers import assert_active, converge, property_of

UNIT = "vllm@main.service"
PROGRAM = "/opt/vllm-fleet/bin/vllm-fleet"
COREX = "/usr/local/corex"
SITE = f"{COREX}/lib64/python3/dist-packages"
PROFILE = Path(__file__).resolve().parents[2] / "catalog/profiles/qwen36-35b-a3b-4xbiv100.yml"


@pytest.fixture(scope="module")
def process(host):
    assert_active(host, UNIT)
    return property_of(host, UNIT, "MainPID")


@pytest.fixture(scope="module")
def environ(host, process):
    """Return the environment that the kernel gave the engine."""
    lines = host.check_output(f"tr '\\0' '\\n' < /proc/{process}/environ").splitlines()
    return dict(line.split("=", 1) for line in lines)


def flat(played):
    """Return a play's output on one line, as messages are wrapped."""
    return " ".join(played.stdout.split())


def test_the_engine_got_the_profiles_command_line(host, process):
    """Word for word as the profile has it, under the name that the platform's file gives the program."""
    words = host.check_output(f"tr '\\0' '\\n' < /proc/{process}/cmdline").splitlines()
    profile = yaml.safe_load(PROFILE.read_text())
    known = {
        "${checkpoint}": "/srv/models/tiny", "${served_names}": "llm", "${tensor_parallel}": "4",
        "${host}": "127.0.0.1", "${port}": "8000",
    }  # fmt: skip
    wanted = list(profile["entry"])
    for flag, value in profile["args"].items():
        wanted += [flag] if value is True else [flag, known.get(value, value)]
    # peer-to-peer was not proven, so the decision may add a word for the engine's own all-reduce
    assert [word for word in words if word != "--disable-custom-all-reduce"] == wanted
    assert host.check_output(f"readlink /proc/{process}/exe").startswith("/usr/bin/python3")


def test_the_environment_is_what_the_vendors_engine_needs(environ):
    assert environ["PATH"].split(":")[:3] == [f"{COREX}/bin", f"{COREX}-3.2.3/bin", "/usr/local/openmpi/bin"]
    assert environ["LD_LIBRARY_PATH"].split(":") == [
        f"{COREX}/lib", f"{COREX}/lib64", f"{COREX}-3.2.3/lib", f"{COREX}-3.2.3/lib64", "/usr/local/openmpi/lib",
    ]  # fmt: skip
    assert environ["PYTHONPATH"].split(":") == [SITE, f"{COREX}/lib/python3/dist-packages"]
    assert environ["VLLM_ENGINE_ITERATION_TIMEOUT_S"] == "3600"
    assert environ["TRITON_PRINT_AUTOTUNING"] == "0"
    assert environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_the_engine_loaded_the_vendors_modules_and_openmpi(host, process):
    """The environment works, it is not only set: the stub's kernels are linked against a library of OpenMPI."""
    assert "/usr/local/openmpi/lib/libmpi.so.40" in host.check_output(f"cat /proc/{process}/maps")


def test_the_lane_is_ready_and_runs_as_the_service_user(host, process):
    assert host.check_output(f"ps -o user= -p {process}").strip() == "vllm"
    assert "ready: 1 token(s) by llm" in host.check_output(f"journalctl --no-pager -o cat -u {UNIT}")


def test_the_unit_is_clean_and_tight_and_opens_the_cards(host):
    verified = host.run(f"systemd-analyze verify {UNIT}")
    assert (verified.rc, verified.stderr) == (0, "")
    text = host.check_output(f"systemd-analyze security --no-pager {UNIT} | tail -1")
    assert float(re.search(r": ([0-9.]+) ", text).group(1)) <= 2.0, text
    assert property_of(host, UNIT, "DevicePolicy") == "closed"
    assert "char-iluvatar rw" in property_of(host, UNIT, "DeviceAllow")


def test_nothing_was_installed_over_the_vendors_wheels(host):
    now = "find /usr/local/corex-3.2.3 /usr/local/openmpi -type f -exec sha256sum {} + | sort"
    assert host.check_output(now) == host.check_output("cat /root/vendor.sha256")
    assert host.check_output("ls -A /opt/vllm-fleet/engines") == ""
    packages = host.check_output("find / -xdev -name '*.dist-info' -not -path '/usr/lib/python3/*'").split()
    assert packages == [f"{COREX}-3.2.3/lib64/python3/dist-packages/vllm-0.6.3+corex.3.2.3.dist-info"]


def test_the_doctor_shows_no_fail_and_says_what_it_cannot_know(host):
    found = json.loads(host.check_output(f"{PROGRAM} preflight main --json"))
    said = [f"{item['status']} {item['check']}: {item['message']}" for item in found["results"]]
    assert "pass gpus_readable: 4 GPUs, driver 3.2.1" in said
    assert f"pass import_origin: import vllm lands in {SITE}/vllm" in said
    assert [line for line in said if line.startswith("warn topology: facts_unknown: ")], said
    assert "fail" not in {item["status"] for item in found["results"]}


def test_a_stock_engine_refuses_the_profile_before_the_lane_is_touched(host, process):
    """Stock 0.6.3 has no --reasoning-parser; only patched images take the platform's file."""
    adds = f"{SITE}/vllm/entrypoints/openai/adds-reasoning-parser"
    host.check_output(f"mv {adds} /root/ && rm /var/lib/vllm-fleet/engine-args.json")
    try:
        played = converge()
    finally:
        host.check_output(f"mv /root/adds-reasoning-parser {adds}")
    assert played.returncode != 0
    assert "unrecognized arguments: --reasoning-parser qwen3" in flat(played)
    assert property_of(host, UNIT, "MainPID") == process


def test_a_missing_card_refuses_the_start_and_names_it(host, process):
    """The decision is made on what the vendor's tool shows."""
    tool = f"{COREX}/bin/ixsmi"
    host.check_output(f"cp -p {tool} /root/ixsmi && sed -i '/^| 3    Iluvatar/,+2d' {tool}")
    try:
        refused = host.run(f"{PROGRAM} start-check main")
    finally:
        host.check_output(f"mv /root/ixsmi {tool}")
    assert refused.rc == 3
    assert "too_few_gpus" in refused.stdout + refused.stderr
    assert property_of(host, UNIT, "MainPID") == process
