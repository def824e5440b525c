"""The engines' acceptance in the lab: its boxes, and a git-route engine that needs no internet."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import wheels
from lab.settings import CACHE, STATE
from tests.engines.mirror import ENGINE, Mirror
from tests.lab.conftest import Box, Played, play

#: all that these tests collect and build; the user's own cache is only read
OWN_CACHE = STATE / "engines-cache"


def signing(folder: Path) -> dict[str, str]:
    """Make a key that signs archives, and return the variables that make plays sign with it and ask for it."""
    key, signers = folder / "signing", folder / "allowed_signers"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)], check=True)
    signers.write_text(f"builder@example.org {key.with_suffix('.pub').read_text()}")
    return {"engine_signing_key": str(key), "engine_allowed_signers": str(signers)}


class Fleet:
    """Plays on the lab's two boxes with a lane of one engine, and a catalog and a cache of these tests' own."""

    def __init__(self, mirror: Mirror, folder: Path) -> None:
        self.mirror, self.folder = mirror, folder
        self.cache = OWN_CACHE
        self.variables: dict[str, Any] = {
            "lane_plan_catalog": str(mirror.catalog),
            "engine_sources": [str(mirror.sources)],
            "engine_find_links": [str(folder / "links"), str(wheels.WHEELS)],
            "engine_cache": str(self.cache),
            **signing(folder),
        }

    def arguments(self, engine: str, boxes: tuple[str, ...] = ("box1", "box2"), **changes: Any) -> list[str]:
        """Return the arguments of a play in which the boxes' lanes name this engine."""
        lane = {
            "name": "main", "profile": "tiny-cpu", "port": 8000, "host": "{{ lab_ip }}",
            "checkpoint": "/srv/models/tiny", "served_names": ["tiny"], "engine": engine,
            "api_key_file": "/etc/vllm-fleet/secrets/main.key",
            "topology": {"mode": "auto", "tensor_parallel": 2, "pipeline_parallel": 2}, **changes,
        }  # fmt: skip
        if not engine:
            lane.pop("engine")
        hosts = self.folder / "hosts.json"
        hosts.write_text(json.dumps({"gpu-boxes": {"hosts": {box: {"vllm_lanes": [lane]} for box in boxes}}}))
        return ["-i", "inventories/lab", "-i", str(hosts), "-e", json.dumps(self.variables)]

    def play(self, playbook: str, *more: str, engine: str = ENGINE, kill_after: str = "", **changes: Any) -> Played:
        """Run a playbook on both boxes, or on those that a further ``-l`` names."""
        return play(*self.arguments(engine, **changes), playbook, "-l", "gpu-boxes", *more, kill_after=kill_after)


@pytest.fixture(scope="session")
def mirror() -> Mirror:
    """The repository, bundle, wheel and catalog; the same commits each time."""
    return Mirror(STATE / "engines-mirror")


@pytest.fixture(scope="session")
def fleet(mirror: Mirror, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The two boxes, which afterwards serve the lab's own engine again and have forgotten this one."""
    folder = tmp_path_factory.mktemp("engines")
    # wheels that the lab has collected for its own engine need not travel again
    for packed in sorted((CACHE / "wheelhouse").glob(f"{wheels.ENGINE}-*.tar"))[-1:]:
        with tarfile.open(packed) as archive:
            members = [member for member in archive if member.name.startswith("wheels/")]
            archive.extractall(folder, members, filter="data")
        (folder / "wheels").rename(folder / "links")
    subprocess.run(["rm", "-rf", str(OWN_CACHE)], check=True)
    forget()
    yield Fleet(mirror, folder)
    done = play("site.yml", "-l", "gpu-boxes")
    forget()
    subprocess.run(["rm", "-rf", str(OWN_CACHE), str(mirror.folder)], check=True)
    assert done.status == 0, done.text[-3000:]


def forget() -> None:
    """Take the tests' engine and what is left of its builds off the boxes; no lane uses it now."""
    for name in ("box1", "box2"):
        Box(name).run(f"rm -rf /opt/vllm-fleet/engines/{ENGINE} /opt/vllm-fleet/build/{ENGINE}-*")


@pytest.fixture(scope="session")
def boxes() -> tuple[Box, Box]:
    return Box("box1"), Box("box2")
