"""A git-route engine to be built without the internet: the CPU engine's own Python files as a repository of releases.

``mirror/`` holds the release as a tagged commit; a bundle brings one small change that a client can see. The build
products stay out of the repository and come from the stock wheel, as they do for a tree of CUDA kernels.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import yaml

from lab import wheels
from lab.settings import ROOT

ENGINE = "vllm-0.32.0-cpu-tree"
TAG = f"v{wheels.VERSION}"
#: what a client sees of the change: one more key in the answer of /version
CHANGED = {"tree": "with the change of the bundle"}
SETUP = """\
import os
from setuptools import setup

if os.environ.get("VLLM_TARGET_DEVICE") != "empty":
    raise SystemExit("this install would compile: VLLM_TARGET_DEVICE is not 'empty'")
setup(version=os.environ["VLLM_VERSION_OVERRIDE"])
"""
PROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "vllm"
dynamic = ["version"]
requires-python = ">=3.11"

[project.scripts]
vllm = "vllm.entrypoints.cli.main:main"

[tool.setuptools.packages.find]
include = ["vllm*"]
"""
#: everything that decides a commit's hash
GIT = {
    **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in (
        ("NAME", "lab"), ("EMAIL", "lab@example.invalid"), ("DATE", "2026-01-01T00:00:00Z"))},
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull,
}  # fmt: skip


def git(folder: Path, *words: str) -> str:
    """Run git, independent of the user's settings."""
    env = {**os.environ, **GIT}
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Mirror:
    """The repository, the bundle, the wheel, and a catalog that names them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repository, self.sources, self.catalog = folder / "mirror", folder / "sources", folder / "catalog"
        self.wheel = wheels.ensure() / wheels.WHEEL
        self.bundle = self.sources / "change.bundle"
        self.tarball = self.sources / "products.tar.gz"
        self.lock = self.catalog / "engines" / f"{ENGINE}.lock"
        shutil.rmtree(folder, ignore_errors=True)
        self.sources.mkdir(parents=True)
        self._make_repository()
        self._make_tarball()
        self._make_catalog()

    def _make_repository(self) -> None:
        self.repository.mkdir()
        with zipfile.ZipFile(self.wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("vllm/")]
            self.products = [name for name in names if name.endswith(".so")] + ["vllm/_version.py"]
            archive.extractall(self.repository, [name for name in names if name not in self.products])
        (self.repository / "setup.py").write_text(SETUP)
        (self.repository / "pyproject.toml").write_text(PROJECT)
        (self.repository / ".gitignore").write_text("*.so\n/vllm/_version.py\n*.egg-info/\n__pycache__/\n")
        git(self.repository, "init", "--quiet", "--initial-branch=main")
        git(self.repository, "add", "--all")
        git(self.repository, "commit", "--quiet", "--message=release")
        git(self.repository, "tag", TAG)
        self.base = git(self.repository, "rev-parse", "HEAD")
        file = self.repository / "vllm/entrypoints/serve/instrumentator/basic.py"
        text = file.read_text()
        change = re.sub(r'(ver = \{"version": VLLM_VERSION)\}', rf"\1, **{CHANGED!r}}}", text)
        assert change != text
        file.write_text(change)
        git(self.repository, "checkout", "--quiet", "-b", "public")
        git(self.repository, "commit", "--quiet", "--all", "--message=a small change")
        self.commit = git(self.repository, "rev-parse", "HEAD")
        self.tree = git(self.repository, "rev-parse", "HEAD^{tree}")
        git(self.repository, "bundle", "create", "--quiet", str(self.bundle), f"{TAG}..refs/heads/public")
        # what only the bundle has must not be had from the mirror
        git(self.repository, "checkout", "--quiet", "main")
        git(self.repository, "branch", "--quiet", "-D", "public")

    def _make_tarball(self) -> None:
        with zipfile.ZipFile(self.wheel) as wheel, tarfile.open(self.tarball, "w:gz", compresslevel=1) as archive:
            for name in ("vllm/fs_io_C.abi3.so", "vllm/_version.py"):
                entry = tarfile.TarInfo(name)
                entry.size = wheel.getinfo(name).file_size
                archive.addfile(entry, wheel.open(name))

    def _make_catalog(self) -> None:
        shutil.copytree(ROOT / "catalog", self.catalog)
        stock = self.catalog / "engines" / f"{wheels.ENGINE}.lock"
        # the same wheels but for the engine itself, which comes from the tree
        self.lock.write_text(re.sub(r"^vllm==.*\n(?: .*\n)+", "", stock.read_text(), flags=re.MULTILINE))
        self.write_entry(ENGINE, {
            "route": "wheel", "paths": self.products,
            "wheel": {"requirement": f"vllm=={wheels.VERSION}+cpu", "sha256": wheels.sha256_of(self.wheel)},
        })  # fmt: skip

    def write_entry(self, name: str, products: dict[str, Any]) -> None:
        """Write a catalog entry of the tree with these build products."""
        entry = {
            "schema": 1, "id": name, "summary": "the lab's tree", "version": wheels.VERSION, "route": "git",
            "accelerator": "cpu", "python_version": "3.11", "products": "sha256",
            "install": {
                "repository": f"file://{self.repository}",
                "base": {"tag": TAG, "commit": self.base},
                "bundle": {
                    "file": self.bundle.name, "sha256": wheels.sha256_of(self.bundle), "ref": "refs/heads/public",
                },
                "commit": self.commit, "tree": self.tree, "products": products,
                "editable": {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": f"{wheels.VERSION}+cpu"},
                "torch": wheels.TORCH, "disk_gib": 5,
            },
        }  # fmt: skip
        (self.catalog / "engines" / f"{name}.yml").write_text(yaml.safe_dump(entry, sort_keys=False))


def flip(path: Path, at: int | None = None) -> None:
    """Change one byte of a file; the same call changes it back."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2 if at is None else at] ^= 1
    path.write_bytes(bytes(raw))
