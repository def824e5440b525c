"""Engines from end to end: plan, refusals, one build for two boxes, a lane that serves from the tree, and the way back.

In this order; the lab must be up (`make lab`) and is left as it was.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request

import pytest
import yaml

from lab import wheels
from tests.engines.conftest import Fleet
from tests.engines.mirror import CHANGED, ENGINE, Mirror, flip
from tests.lab.conftest import BIN, ROOT, Box

pytestmark = pytest.mark.timeout(1800)
PUBLIC = "vllm-0.30.0-flash-next-2.5.1"
ROOT_ON_BOX = f"/opt/vllm-fleet/engines/{ENGINE}"


def version(box: Box) -> dict[str, str]:
    return box.request("/version")


def test_the_plan_of_the_public_release_is_told_and_nothing_is_touched(fleet: Fleet, boxes: tuple[Box, Box]) -> None:
    before = [box.run("ls -la /opt/vllm-fleet/engines /opt/vllm-fleet/build") for box in boxes]
    topology = {"mode": "auto", "tensor_parallel": 2, "pipeline_parallel": 2}
    done = fleet.play(
        "playbooks/engine.yml", "--check", engine=PUBLIC, profile="qwen38-flash-next-w4a16-4x3090", topology=topology
    )
    assert done.status == 0, done.text[-3000:]
    words = " ".join(done.text.split())
    pins = yaml.safe_load((ROOT / "catalog" / "engines" / f"{PUBLIC}.yml").read_text())["install"]
    for pin in (
        pins["base"]["commit"], pins["bundle"]["sha256"], pins["commit"], pins["tree"],
        pins["products"]["tarball"]["sha256"], "fetch 201 wheels", "need 12 GiB", "Python 3.13", "torch 2.13.0",
    ):  # fmt: skip
        assert pin in words, pin
    assert [box.run("ls -la /opt/vllm-fleet/engines /opt/vllm-fleet/build") for box in boxes] == before
    assert not (fleet.cache / "sources").exists()


def test_one_wrong_byte_stops_the_build_before_it_begins(fleet: Fleet, mirror: Mirror, boxes: tuple[Box, Box]) -> None:
    """In the lock, the products' wheel, the bundle and the tarball; each by its name, and the lanes serve on."""
    pids = [box.pid() for box in boxes]
    text = mirror.lock.read_text()
    wrong = re.sub(r"(?<=^numpy==)(.*\n\s+--hash=sha256:)(\w{64})", lambda found: found[1] + "0" * 64, text, flags=re.M)
    mirror.lock.write_text(re.sub(r"(?m)(^numpy==.*\n)(?:\s+--hash.*\n)+", rf"\1    --hash=sha256:{'0' * 64}\n", wrong))
    done = fleet.play("playbooks/engine.yml", "-l", "box1")
    assert "hash_differs" in done.text, done.text[-3000:]
    assert "numpy" in done.text
    assert f"{ENGINE}.lock" in done.text
    mirror.lock.write_text(text)

    flip(mirror.bundle)
    done = fleet.play("playbooks/engine.yml", "-l", "box1")
    assert "bundle_damaged" in done.text, done.text[-3000:]
    assert str(mirror.bundle) in done.text
    flip(mirror.bundle)

    name = f"{ENGINE}-tarball"
    mirror.write_entry(name, {
        "route": "tarball", "paths": ["vllm/fs_io_C.abi3.so"],
        "tarball": {"file": mirror.tarball.name, "sha256": wheels.sha256_of(mirror.tarball), "files": 2},
    })  # fmt: skip
    (mirror.catalog / "engines" / f"{name}.lock").write_text(text)
    flip(mirror.tarball)
    done = fleet.play("playbooks/engine.yml", "-l", "box1", engine=name)
    assert "products_damaged" in done.text, done.text[-3000:]
    assert str(mirror.tarball) in done.text
    flip(mirror.tarball)

    entry = mirror.catalog / "engines" / f"{ENGINE}.yml"
    good = entry.read_text()
    entry.write_text(good.replace(wheels.sha256_of(mirror.wheel), "f" * 64))
    done = fleet.play("playbooks/engine.yml", "-l", "box1")
    assert "hash_differs" in done.text, done.text[-3000:]
    assert wheels.WHEEL.split("-")[0] in done.text
    entry.write_text(good)
    assert [box.pid() for box in boxes] == pids


def test_a_build_that_was_killed_is_joined_and_happens_once(fleet: Fleet, boxes: tuple[Box, Box]) -> None:
    """The controller dies while box1 builds; two plays follow at once. The engine is built by one of them."""
    killed = fleet.play("playbooks/engine.yml", kill_after="of 11: install")
    assert "step 2 of 11: install" in killed.text, killed.text[-2000:]
    argv = [str(BIN / "ansible-playbook"), *fleet.arguments(ENGINE), "playbooks/engine.yml", "-l", "gpu-boxes"]
    first = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    second = fleet.play("playbooks/engine.yml")
    output = first.communicate(timeout=1200)[0]
    assert second.status == 0, second.text[-3000:]
    assert first.returncode == 0, output[-3000:]
    manifests = [json.loads(box.run(f"cat {ROOT_ON_BOX}/manifest.json")) for box in boxes]
    assert manifests[0] == manifests[1], "both boxes have the one build"
    manifest = manifests[0]
    assert manifest["source"]["commit"] == fleet.mirror.commit
    assert manifest["source"]["tree"] == fleet.mirror.tree
    assert manifest["products"] == "wheel"
    assert manifest["builder"]
    assert len(list((fleet.cache / "engines").glob("*.tar.zst"))) == 1
    for box in boxes:
        assert box.run("ls -A /opt/vllm-fleet/engines | grep -c partial || true") == "0"
        assert box.run(f"ls -d /opt/vllm-fleet/build/{ENGINE}-* 2>/dev/null || true") == ""


def test_a_box_that_comes_later_gets_the_bytes_once_from_a_bundle(
    fleet: Fleet, boxes: tuple[Box, Box], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a site without internet: one directory, one variable, and nothing is collected or built."""
    bundle = fleet.folder / "bundle"
    wanted = {"engine_bundle_dest": str(bundle), "engine_bundle_controller": False}
    done = fleet.play("playbooks/bundle.yml", "-e", json.dumps(wanted))
    assert done.status == 0, done.text[-3000:]
    subprocess.run(["sha256sum", "-c", "--strict", "--quiet", "SHA256SUMS"], cwd=bundle, check=True)
    (signature,) = (bundle / "engines").glob("*.sig")
    signed = signature.read_text()
    boxes[1].run(f"rm -rf {ROOT_ON_BOX}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    offline = {"engine_cache": str(bundle), "engine_sources": [], "engine_find_links": []}
    signature.unlink()
    unsigned = fleet.play("playbooks/engine.yml", "-e", json.dumps(offline))
    assert unsigned.status != 0
    assert "not_signed" in unsigned.text
    assert boxes[1].run(f"ls -d {ROOT_ON_BOX} 2>/dev/null || true") == ""
    signature.write_text(signed)
    done = fleet.play("playbooks/engine.yml", "-e", json.dumps(offline))
    assert done.status == 0, done.text[-3000:]
    assert "TASK [engine : Build the engine and keep" not in done.text
    brought = done.text.split("TASK [engine : Bring the archive to the box]")[1].split("TASK")[0]
    assert re.findall(r"^changed: \[(\w+)\]", brought, re.MULTILINE) == ["box2"]
    again = fleet.play("playbooks/engine.yml")
    assert again.changed == {"box1": 0, "box2": 0}


def test_the_lane_serves_from_the_tree(fleet: Fleet, boxes: tuple[Box, Box]) -> None:
    for box in boxes:
        assert "tree" not in version(box)
    done = fleet.play("site.yml")
    assert done.status == 0, done.text[-3000:]
    assert "TASK [engine : Build the engine and keep" not in done.text
    for box in boxes:
        assert box.complete()["model"] == "tiny"
        assert version(box)["tree"] == CHANGED["tree"]
        assert f"{ROOT_ON_BOX}/venv/bin/python" in box.run(f"tr '\\0' ' ' < /proc/{box.pid()}/cmdline")
        assert f"{ROOT_ON_BOX}/tree/vllm/_C" in box.run(f"grep -h -o '{ROOT_ON_BOX}/tree/vllm/_C[^ ]*' /proc/*/maps")
        assert box.run(f"find {ROOT_ON_BOX}/tree/vllm -newer {ROOT_ON_BOX}/manifest.json -type f | head -3") == ""
    again = fleet.play("site.yml")
    assert again.changed == {"box1": 0, "box2": 0}


def test_one_wrong_byte_in_a_product_is_found_before_a_flip_and_at_a_start(
    fleet: Fleet, boxes: tuple[Box, Box]
) -> None:
    box, product = boxes[0], f"{ROOT_ON_BOX}/tree/vllm/_C.abi3.so"
    pid = box.pid()
    box.run(f"cp -p {product} /root/product && cp -p {product} {product}.new")
    box.run(f"printf x >> {product}.new && mv {product}.new {product}")
    try:
        done = fleet.play("site.yml", "-l", "box1")
        assert done.failed["box1"] == 1
        assert "vllm/_C.abi3.so" in done.text
        assert box.pid() == pid, "what runs is left alone"
        refused = json.loads(box.run("/opt/vllm-fleet/bin/vllm-fleet start-check main --json", check=False))
        assert "changed" in {item["reason"] for item in refused["results"] if item["status"] == "fail"}
    finally:
        box.run(f"mv /root/product {product}")
    assert fleet.play("site.yml", "-l", "box1").status == 0


def test_rollback_puts_the_previous_engine_back(fleet: Fleet, boxes: tuple[Box, Box]) -> None:
    box = boxes[0]
    watch = Watch(box)
    done = fleet.play("playbooks/rollback.yml", "-l", "box1")
    assert done.status == 0, done.text[-3000:]
    assert box.wait_answer()["model"] == "tiny"
    gap = watch.end()
    assert "tree" not in version(box)
    assert "/opt/vllm-fleet/engines/vllm-0.32.0-cpu/" in box.run(f"tr '\\0' ' ' < /proc/{box.pid()}/cmdline")
    print(f"rollback: {gap:.0f} s without an answer")
    assert 0 < gap < 300


class Watch:
    """Ask a lane over and over, and know the longest time without an answer."""

    def __init__(self, box: Box) -> None:
        self.box, self.stop, self.longest = box, threading.Event(), 0.0
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        """Ask until told to stop."""
        last = time.monotonic()
        while not self.stop.wait(0.3):
            try:
                self.box.request("/v1/models")
            except (OSError, urllib.error.URLError):
                continue
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now

    def end(self) -> float:
        """Return the seconds of the longest gap."""
        time.sleep(1)
        self.stop.set()
        self.thread.join(90)
        return self.longest
