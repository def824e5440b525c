"""What a new user is promised of the lab. The tests run in order and leave the lab as `make lab` made it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time

import pytest
import yaml
from conftest import BIN, ROOT, SITE, Box, play

# An engine starts in half a minute on an idle machine; a test may start it several times.
pytestmark = pytest.mark.timeout(1200)


SITE_PACKAGES = "/opt/vllm-fleet/engines/vllm-0.32.0-cpu/venv/lib/python3.11/site-packages"
SHADOW = "/var/lib/vllm-fleet/lanes/main/vllm"
CACHE = "/var/cache/vllm-fleet/main"


def journal_names(box: Box, codes: set[str]) -> set[str]:
    """Wait until the unit's journal of the last start names the reason codes; return those that it named in time."""
    since = box.run("date +%s")
    deadline = time.monotonic() + 120
    named: set[str] = set()
    while time.monotonic() < deadline and named != codes:
        journal = box.run(f"journalctl -u vllm@main --since=@{since} --no-pager -o cat")
        named = {code for code in codes if code in journal}
        time.sleep(1)
    return named


def test_systemd_is_pid_1_and_the_lane_runs_as_vllm(box1: Box, box2: Box) -> None:
    for box in (box1, box2):
        assert box.run("cat /proc/1/comm") == "systemd"
        assert box.show("ActiveState") == "active"
        assert box.run(f"ps -o user= -p {box.pid()}") == "vllm"
        score = re.search(
            r"Overall exposure level.*?: ([\d.]+)", box.run("systemd-analyze security --no-pager vllm@main")
        )
        assert score and float(score[1]) <= 2.0
        assert box.run("systemd-analyze verify vllm@main.service 2>&1") == ""


def test_lanes_answer_with_their_key_only(box1: Box, box2: Box) -> None:
    for box in (box1, box2):
        answer = box.complete()
        assert answer["model"] == "tiny"
        assert answer["usage"]["completion_tokens"] >= 1
        refused = box.run(
            f"curl -s -o /dev/null -w '%{{http_code}}' http://{box.address}:8000/v1/models || true", check=False
        )
        if refused:  # a box need not have curl; the engine's own client library is asked below all the same
            assert refused == "401"
        key = (ROOT / "lab/.state/keys" / f"{box.name}-main.key").read_text().strip()
        assert key not in box.run(f"tr '\\0' ' ' < /proc/{box.pid()}/cmdline")
        assert box.run("stat -c '%a %U' /etc/vllm-fleet/secrets/main.key") == "600 root"


def test_gpus_are_in_the_order_of_their_links(box1: Box, box2: Box) -> None:
    for box, order in ((box1, "0,2,1,3"), (box2, "0,1,2,3")):
        environ = box.run(f"tr '\\0' '\\n' < /proc/{box.pid()}/environ").splitlines()
        assert f"CUDA_VISIBLE_DEVICES={order}" in environ
        assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in environ


def test_second_run_changes_nothing_and_is_cheap() -> None:
    done = subprocess.run(
        [str(BIN / "python"), "-m", "lab", "converge-cost"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    last = done.stdout.strip().splitlines()[-1]
    cost = re.fullmatch(r"calls_per_box=(\d+) changed=(\d+) wall_s=([\d.]+)", last)
    assert cost, done.stdout[-2000:] + done.stderr[-2000:]
    print(last)
    assert int(cost[1]) <= 25
    assert int(cost[2]) == 0


def test_check_mode_tells_the_truth_on_a_finished_box() -> None:
    done = play(*SITE, "--check", "--diff")
    assert done.status == 0, done.text[-3000:]
    assert done.changed == {"box1": 0, "box2": 0}


def test_one_change_patches_the_checkpoint_and_restarts_one_lane_once(box1: Box, box2: Box, overlay, tmp_path) -> None:
    """An argument and a key that the checkpoint lacks, in one run: the key is set exactly once, one lane restarts."""
    catalog = tmp_path / "catalog"
    shutil.copytree(ROOT / "catalog", catalog)
    path = catalog / "profiles" / "tiny-cpu.yml"
    profile = yaml.safe_load(path.read_text())
    wanted = {"file": "config.json", "key": "fleet_test.mark", "value": "here"}
    profile["checkpoint"] = {**profile.get("checkpoint", {}), "patch": [wanted]}
    path.write_text(yaml.safe_dump(profile, sort_keys=False))
    config = "/srv/models/tiny/config.json"
    box1.run(f"cp -p {config} /root/config.json && sed -i '1s/{{/{{\\n \"fleet_test\": {{}},/' {config}")
    box1.run(f"python3 -m json.tool {config}")
    changed = [*overlay(args={"--max-model-len": 256}), "-e", f"lane_plan_catalog={catalog}"]
    old, other = box1.pid(), box2.pid()
    done = play(*changed, *SITE, "-l", "box1")
    assert done.status == 0, done.text[-3000:]
    assert json.loads(box1.run(f"cat {config}"))["fleet_test"] == {"mark": "here"}
    assert box1.run(f"ls {config}.vllm-fleet-orig")
    assert box1.pid() != old
    assert box1.show("NRestarts") == "0"
    assert box2.pid() == other
    assert box1.request("/v1/models")["data"][0]["max_model_len"] == 256
    pid = box1.pid()
    again = play(*changed, *SITE, "-l", "box1")
    assert again.changed == {"box1": 0}
    assert box1.pid() == pid
    box1.run(f"mv /root/config.json {config} && rm {config}.vllm-fleet-orig")
    back = play(*SITE)
    assert back.status == 0, back.text[-3000:]
    assert back.changed["box2"] == 0
    assert box2.pid() == other
    assert box1.request("/v1/models")["data"][0]["max_model_len"] == 512


def test_unknown_names_end_before_anything_is_touched(box1: Box, overlay) -> None:
    pid = box1.pid()
    done = play(*overlay(profile="tiny-cqu"), *SITE)
    assert done.status != 0
    assert "tiny-cpu" in done.text  # the suggestion
    done = play(*overlay(checkpoint="/srv/models/none"), *SITE)
    assert done.status != 0
    assert "/srv/models/none" in done.text
    assert "box1" in done.text
    assert box1.pid() == pid


def test_killed_controller_leaves_nothing_that_a_rerun_does_not_mend(box1: Box, overlay) -> None:
    changed = overlay(args={"--max-model-len": 384})
    for moment in ("Render the releases beside", "Flip and start the lanes", "Wait until every lane"):
        play(*changed, *SITE, kill_after=moment)
    done = play(*changed, *SITE)
    assert done.status == 0, done.text[-3000:]
    assert box1.request("/v1/models")["data"][0]["max_model_len"] == 384
    again = play(*changed, *SITE)
    assert again.changed == {"box1": 0, "box2": 0}
    assert play(*SITE).status == 0


def test_restarted_box_decides_again_without_a_play(box1: Box) -> None:
    box1.run("rm -rf /run/vllm-fleet")
    subprocess.run(["podman", "restart", "-t", "20", box1.container], check=True, capture_output=True, timeout=120)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            box1.run("true")
            break
        except (AssertionError, subprocess.TimeoutExpired):
            time.sleep(2)
    assert box1.wait_answer()["model"] == "tiny"
    assert "CUDA_VISIBLE_DEVICES=0,2,1,3" in box1.run("cat /run/vllm-fleet/main/runtime.env")


def test_missing_gpu_refuses_the_start_and_a_returned_one_lets_it_in(box1: Box) -> None:
    facts = json.loads(box1.run("cat /etc/nvml-sim/facts.json"))
    whole = json.dumps(facts)
    facts["gpus"] = facts["gpus"][:3]
    facts["pairs"] = [pair for pair in facts["pairs"] if 3 not in pair["gpus"]]
    box1.run(f"cat > /etc/nvml-sim/facts.json <<'EOF'\n{json.dumps(facts)}\nEOF")
    try:
        box1.run("systemctl restart --no-block vllm@main")
        assert journal_names(box1, {"too_few_gpus"})
        assert box1.show("ActiveState") != "active"
    finally:
        box1.run(f"cat > /etc/nvml-sim/facts.json <<'EOF'\n{whole}\nEOF")
    assert box1.wait_answer()["model"] == "tiny"  # its own next try


#: reason code by which a damage has to be named: what does it, and what mends it
DAMAGE = {
    "changed": (
        f"cp -a {SITE_PACKAGES}/vllm/version.py /root/ && printf '#' >> {SITE_PACKAGES}/vllm/version.py",
        f"mv /root/version.py {SITE_PACKAGES}/vllm/version.py",
    ),
    "import_shadowed": (f"mkdir -p {SHADOW} && touch {SHADOW}/__init__.py", f"rm -rf {SHADOW}"),
    "shm_too_small": ("mount -o remount,size=32m /dev/shm", "mount -o remount,size=1g /dev/shm"),
    "headers_missing": (
        "mv /usr/include/python3.11/Python.h /root/",
        "mv /root/Python.h /usr/include/python3.11/",
    ),
    "disk_full": (
        f"mount -t tmpfs -o size=80m,uid=$(id -u vllm) lab {CACHE} && fallocate -l 60m {CACHE}/x",
        f"umount {CACHE}",
    ),
}


def test_verify_changes_nothing_and_names_box_check_and_fix(box1: Box) -> None:
    """Each damage is named by verify.yml, stops a play before the running lane, and refuses the unit's next start."""
    good = play("playbooks/verify.yml")
    assert good.status == 0, good.text[-3000:]
    assert good.changed == {"box1": 0, "box2": 0}
    pid = box1.pid()
    for harm, _ in DAMAGE.values():
        box1.run(harm)
    try:
        bad = play("playbooks/verify.yml")
        assert bad.status != 0
        for code in DAMAGE:
            assert re.search(rf"box1\s+main\s+fail\s+\w+\s+{code}\b", bad.text), (code, bad.text[-4000:])
        assert "apt-get install python3.11-dev" in bad.text  # the fix, here of the missing header
        assert bad.changed["box1"] == 0
        assert play(*SITE).failed["box1"] == 1
        assert box1.pid() == pid
        assert box1.complete()["model"] == "tiny"
        # The starts of the tests before count towards the unit's limit.
        box1.run("systemctl reset-failed vllm@main; systemctl restart --no-block vllm@main")
        assert journal_names(box1, {*DAMAGE}) == {*DAMAGE}
        assert box1.show("ActiveState") != "active"
    finally:
        box1.run("systemctl stop vllm@main")
        box1.run("; ".join(mend for _, mend in DAMAGE.values()))
        box1.run("systemctl reset-failed vllm@main; systemctl restart --no-block vllm@main")
    assert box1.wait_answer()["model"] == "tiny"
    assert play("playbooks/verify.yml").status == 0


def test_links_are_proven_by_play(box1: Box) -> None:
    """With the lane stopped for it and started again; the transfers are real, between processes instead of cards."""
    proof = ("playbooks/prove_p2p.yml", "-l", "box1", "-e", "prove_p2p_backend=gloo")
    box1.run("rm -f /var/lib/vllm-fleet/verdicts/p2p.json")  # of a run that was interrupted
    pid = box1.pid()
    try:
        done = play(*proof, "-e", "prove_p2p_stop=true")
        assert done.status == 0, done.text[-3000:]
        for pair in ("0-2", "1-3"):
            assert re.search(rf"^box1 pass +values_equal: GPUs {pair}", done.text, re.M), done.text[-3000:]
        assert box1.pid() != pid
        assert box1.complete()["model"] == "tiny"
        again = play(*proof)
        assert again.changed == {"box1": 0}
        assert "still_valid" in again.text
    finally:
        box1.run("rm -f /var/lib/vllm-fleet/verdicts/p2p.json")


def test_occupied_port_refuses_the_start(box2: Box) -> None:
    box2.run("systemctl stop vllm@main")
    box2.run(f"cd / && systemd-run -q --unit=squatter python3 -m http.server 8000 --bind {box2.address}")
    try:
        box2.run("systemctl start --no-block vllm@main")
        assert journal_names(box2, {"port_occupied"})
    finally:
        box2.run("systemctl stop squatter; systemctl reset-failed vllm@main; systemctl restart --no-block vllm@main")
    assert box2.wait_answer()["model"] == "tiny"
