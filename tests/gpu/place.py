"""Puts the lane of the test on this machine, where the product puts its lanes, and takes every trace away again."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import secrets
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

from vllm_fleet import catalog, files, profile, release, start, verdict_store
from vllm_fleet.profile_schema import check_engine

from lab import checkpoint

ROOT = Path(__file__).resolve().parents[2]
LANE = "gpu-test"
KEY_FILE = f"/etc/vllm-fleet/secrets/{LANE}.key"
CHECKPOINT = Path("/var/lib/vllm-fleet/gpu-test/tiny")
#: what the test and the product's own steps leave of this lane
TRACES = (
    f"{release.LANES}/{LANE}", KEY_FILE, str(CHECKPOINT.parent), f"/var/lib/vllm-fleet/lanes/{LANE}",
    f"{start.DECISIONS}/{LANE}.json", f"{start.DECISIONS}/{LANE}.history.json",
    f"/var/lib/vllm-fleet/preflight/{LANE}.json", f"/var/lib/vllm-fleet/bench/{LANE}", f"{start.CACHE}/{LANE}",
    f"{start.RUN}/{LANE}", f"/var/log/vllm-fleet/{LANE}.log",
)  # fmt: skip

_ASK = """
import json, sys, sysconfig
from importlib.metadata import version
names = {}
for name in ("vllm", "torch"):
    try:
        names[name] = version(name)
    except Exception as error:
        names[name] = None
print(json.dumps({"prefix": sys.prefix, "site": sysconfig.get_paths()["purelib"],
                  "python": "%d.%d" % sys.version_info[:2], **names}))
"""


def installed_engine(venv: str, entries: profile.Catalog) -> dict[str, Any]:
    """Return the catalog entry of the vLLM that is installed in ``venv``: the catalog's own where the fleet put it
    there, else one made from what the installation says of itself.

    :raises SystemExit: there is no vLLM.
    """
    python = f"{venv}/bin/python"
    done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=False, cwd="/")
    if done.returncode:
        raise SystemExit(f"{python} does not run: {done.stderr.strip()[-300:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["vllm"]:
        raise SystemExit(f"{python} has no vLLM; name the venv of an installed one with ENGINE=")
    for known in entries.engines.values():
        if profile.engine_paths(known)["venv"] == venv:
            return known
    cuda = "+cpu" not in found["vllm"]
    paths = {"PATH": ["${venv}/bin"]}  # ninja, which vLLM brings along, for what it compiles at its first start
    libraries = [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    if libraries:  # where this machine keeps its driver's libraries
        paths["LD_LIBRARY_PATH"] = libraries
    engine: dict[str, Any] = {
        "schema": 1, "id": f"vllm-{found['vllm']}-installed".replace("+", "-").lower(), "version": found["vllm"],
        "summary": f"vLLM {found['vllm']} as it is installed in {venv}", "route": "wheel",
        "install": {"requirement": f"vllm=={found['vllm']}"}, "accelerator": "nvidia" if cuda else "cpu",
        "python_version": found["python"], "root": venv, "venv": venv, "paths": paths,
    }  # fmt: skip
    toolkits = ("/usr/local/cuda", f"{found['site']}/nvidia/cu13")
    toolkit = next((path for path in toolkits if os.path.exists(f"{path}/bin/nvcc")), None)
    if cuda and toolkit:
        engine["cuda_home"] = toolkit
        paths["PATH"].append("${cuda_home}/bin")
    return check_engine(engine, "the installed engine")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def service_user() -> bool:
    try:
        pwd.getpwnam(start.SERVICE_USER)
    except KeyError:
        return False
    return True


def resolve(venv: str, tensor_parallel: int, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the resolved lane: ``tiny-cuda`` on a CUDA engine, ``tiny-cpu`` on vLLM's CPU build.

    :param overrides: further keys of the lane.
    """
    entries = catalog.load(str(ROOT / "catalog"))
    engine = installed_engine(venv, entries)
    entries.engines[engine["id"]] = engine
    lane: dict[str, Any] = {
        "name": LANE, "profile": "tiny-cuda" if engine["accelerator"] == "nvidia" else "tiny-cpu",
        "engine": engine["id"], "checkpoint": str(CHECKPOINT), "port": free_port(), "api_key_file": KEY_FILE,
        "topology": {"mode": "auto", "tensor_parallel": tensor_parallel, "p2p": "proven"},
    }  # fmt: skip
    if not service_user():
        # A machine that the fleet has not prepared: the lane runs as who runs the test, and these two have no answer.
        lane["checks"] = {"service_user": "off", "checkpoint_readable": "off"}
    return profile.resolve({**lane, **overrides}, entries)


class Place:
    """The lane's files on this machine; a context that leaves the machine as it was."""

    def __init__(self) -> None:
        self._verdicts = Path(verdict_store.DIRECTORY)
        self._before: dict[str, bytes] | None = None
        self._made: list[str] = []

    def __enter__(self) -> Place:
        self._remove()
        if self._verdicts.is_dir():
            self._before = {path.name: path.read_bytes() for path in self._verdicts.iterdir() if path.is_file()}
        for parent in (*(os.path.dirname(path) for path in TRACES), str(self._verdicts)):
            self._make(parent)
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()
        for file in self._verdicts.glob("*"):
            if self._before is None or file.name not in self._before:
                file.unlink()
        for name, content in (self._before or {}).items():
            files.write_atomic(str(self._verdicts / name), content)
        if start.RUN in self._made:
            Path(start.RUN, "start.lock").unlink(missing_ok=True)
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def _make(self, path: str) -> None:
        if not os.path.isdir(path):
            self._make(os.path.dirname(path))
            os.mkdir(path, 0o755)
            self._made.append(path)

    def _remove(self) -> None:
        for path in map(Path, TRACES):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def prepare(self, lane: dict[str, Any]) -> None:
        """Make what a lane finds on a box before its release: checkpoint, working directory, key."""
        heads = max(checkpoint.HEADS, int(lane["policy"]["tensor_parallel"]))
        checkpoint.generate(CHECKPOINT, heads)
        for path in (CHECKPOINT.parent, CHECKPOINT):
            path.chmod(0o755)
        Path(lane["workdir"]).mkdir(parents=True, exist_ok=True)
        with open(os.open(KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as handle:
            handle.write(secrets.token_urlsafe(32) + "\n")
        if service_user():
            account = pwd.getpwnam(start.SERVICE_USER)
            os.chown(lane["workdir"], account.pw_uid, account.pw_gid)

    def install(self, lane: dict[str, Any], binding: dict[str, Any] | None) -> str:
        """Write the lane's release, make it the current one, and return its id."""
        contents = release.files(lane, [], binding)
        name = release.release_id(contents)
        directory = Path(release.LANES, LANE, "releases", name)
        directory.mkdir(parents=True, exist_ok=True)
        for file, text in contents.items():
            files.write_atomic(str(directory / file), text.encode(), 0o644)
        files.link_atomic(f"releases/{name}", f"{release.LANES}/{LANE}/current")
        return name
