"""A whole build of a small engine, on both routes: real uv, tar and zstd; wheels and a tree of a few lines."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from vllm_fleet import engine_steps
from vllm_fleet.errors import FleetError

UV = Path(sys.executable).parent / "uv"
ROOT = "/opt/vllm-fleet/engines/tiny"
MAIN = "def main():\n    print('served')\n"
SCRIPTS = "[console_scripts]\nvllm = vllm.cli:main\n"
#: a build backend of the tree's own, so that the editable install needs no package
BACKEND = """\
import os, zipfile
def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    version = os.environ["VLLM_VERSION_OVERRIDE"]
    assert os.environ["VLLM_TARGET_DEVICE"] == "empty"
    info = f"vllm-{version}.dist-info"
    name = f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as archive:
        archive.writestr("__editable__.vllm.pth", os.getcwd() + "\\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(f"{info}/entry_points.txt", "[console_scripts]\\nvllm = vllm.cli:main\\n")
        archive.writestr(f"{info}/RECORD", "")
    return name
"""
PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "vllm"
dynamic = ["version"]
"""
CMAKE = """#!/bin/sh
# what the build asks of cmake: note the call, and let a target make its file in the build directory
echo "jobs=$MAX_JOBS arch=$TORCH_CUDA_ARCH_LIST $*" >> {log}
case "$1" in
  --version) echo "cmake version {version}";;
  --build) mkdir -p "$2/lib"; test -e {fail} && exit 1; echo "compiled $4" > "$2/lib/$4.so";;
  *) mkdir -p "$4";;
esac
"""


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wheel(folder: Path, name: str, version: str, files: dict[str, str], more: dict[str, str] | None = None) -> str:
    """Write a wheel and return its line of a lock."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        for file, text in (more or {}).items():
            archive.writestr(f"{info}/{file}", text)
        archive.writestr(f"{info}/RECORD", "")
    return f"{name}=={version} --hash=sha256:{sha(path)}\n"


class Bench:
    """A builder's working directory with the parts of one engine."""

    def __init__(self, tmp_path: Path, route: str, **products: Any) -> None:
        self.path, self.route = tmp_path, route
        self.work, self.dest = tmp_path / "work", tmp_path / "tiny.tar.zst"
        self.tools = tmp_path / "tools"
        self.tools.mkdir(parents=True, exist_ok=True)
        if not shutil.which("zstd"):
            (self.tools / "zstd").write_text("#!/bin/sh\nexec gzip -c\n")
            (self.tools / "zstd").chmod(0o755)
        torch = {"torch/__init__.py": "", "torch/version.py": "__version__ = '2.13.0+cpu'\ncuda = None\n"}
        lock = wheel(self.work / "wheels", "torch", "2.13.0+cpu", torch)
        package = {"vllm/__init__.py": "__version__ = '1.2.3'\n", "vllm/cli.py": MAIN}
        if route == "wheel":
            lock += wheel(self.work / "wheels", "vllm", "1.2.3", package, {"entry_points.txt": SCRIPTS})
        else:
            self.write_tree(package)
        (self.work / "requirements.lock").write_text(lock)
        (self.work / "uv").symlink_to(UV)
        self.entry: dict[str, Any] = {
            "id": "tiny", "version": "1.2.3", "route": route, "root": ROOT, "digest": "d1",
            "interpreter": os.path.realpath(sys.executable), "install": {"torch": "2.13.0", "disk_gib": 1, **products},
        }  # fmt: skip

    def write_tree(self, package: dict[str, str]) -> None:
        source = self.work / "source"
        for name, text in {**package, "backend.py": BACKEND, "pyproject.toml": PROJECT}.items():
            (source / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (source / "tree" / name).write_text(text)
        wheel(source / "files", "vllm", "1.2.3", {"vllm/_C.so": "stock", "vllm/own.so": "stock own"})

    def build(self) -> engine_steps.Build:
        build = engine_steps.Build(self.entry, str(self.work), str(self.dest))
        build.env["PATH"] = f"{self.tools}:/usr/local/bin:/usr/bin:/bin"
        return build

    def refused(self, reason: str) -> str:
        with pytest.raises(FleetError) as caught:
            self.build().run()
        assert caught.value.reason == reason, caught.value.one_line()
        assert "engine tiny, step " in caught.value.message
        return caught.value.message

    def unpacked(self) -> Path:
        """Unpack the archive and return the directory."""
        out = self.path / "out"
        out.mkdir()
        pack = "zstd -q" if shutil.which("zstd") else "gzip"
        argv = ["tar", "--extract", f"--use-compress-program={pack}", "--file", str(self.dest), "--directory", str(out)]
        subprocess.run(argv, check=True)
        return out


def tree_of(tmp_path: Path, products: dict[str, Any] | None = None, **more: Any) -> Bench:
    """Return a bench for the git route; products come from the wheel unless others are given."""
    made = {"route": "wheel", "paths": ["vllm/_C.so", "vllm/own.so"], "own": {}, **(products or {})}
    bench = Bench(
        tmp_path, "git", products=made, editable={"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "1.2.3"},
        repository="r", base={"commit": "b"}, tree="t", patches=[], bundle={"sha256": "s"}, commit="c", **more,
    )  # fmt: skip
    made.setdefault("wheel", {"sha256": sha(bench.work / "source/files/vllm-1.2.3-py3-none-any.whl")})
    return bench


def test_wheel_route(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "wheel")
    made = bench.build().run()
    assert made["sha256"] == sha(bench.dest)
    assert json.loads(Path(f"{bench.dest}.json").read_text()) == made
    assert not bench.work.exists(), "nothing of a build stays on the builder"
    out = bench.unpacked()
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "venv"]
    manifest = made["manifest"]
    assert (manifest["id"], manifest["version"], manifest["route"], manifest["digest"]) == (
        "tiny",
        "1.2.3",
        "wheel",
        "d1",
    )
    assert manifest["bytes"] > 0
    assert (out / "venv/bin/vllm").read_text().startswith(f"#!{ROOT}/venv/bin/python\n")
    site = next((out / "venv/lib").glob("python3*/site-packages"))
    subprocess.run(["sha256sum", "-c", "--strict", "--quiet", ".build-products.sha256"], cwd=site, check=True)
    assert sha(site / ".build-products.sha256") == manifest["products_sha256"]


def test_git_route_with_the_products_of_a_wheel(tmp_path: Path) -> None:
    bench = tree_of(tmp_path)
    manifest = bench.build().run()["manifest"]
    assert manifest["source"] == {"repository": "r", "base": "b", "tree": "t", "commit": "c", "bundle_sha256": "s"}
    out = bench.unpacked()
    assert (out / "tree/vllm/_C.so").read_text() == "stock"
    assert (out / "tree/.build-products").read_text() == "wheel tiny\n"
    assert "vllm/cli.py" in (out / "tree/.build-products.sha256").read_text(), "sources are verified too"
    assert list((out / "tree/vllm").glob("__pycache__/*.pyc")), "no start has to compile the library"
    site = next((out / "venv/lib").glob("python3*/site-packages"))
    assert (site / "__editable__.vllm.pth").read_text() == f"{ROOT}/tree\n"
    left = subprocess.run(["grep", "-rlI", str(bench.work), str(out)], capture_output=True, text=True, check=False)
    assert left.stdout == "", "nothing names the place where it was built"


def test_git_route_with_a_tarball(tmp_path: Path) -> None:
    own = hashlib.sha256(b"packed").hexdigest()
    bench = tree_of(tmp_path, {"route": "tarball", "paths": ["vllm/_C.so"], "own": {"vllm/_C.so": own}})
    plain = tmp_path / "_C.so"
    plain.write_bytes(b"packed")
    packed = bench.work / "source/files/p.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(plain, "./vllm/_C.so")
    bench.entry["install"]["products"]["tarball"] = {"file": "p.tar.gz", "sha256": sha(packed), "files": 1}
    good = packed.read_bytes()
    packed.write_bytes(good[:-1] + b"x")
    assert str(packed) in bench.refused("products_damaged")
    assert packed.exists()
    packed.write_bytes(good)
    bench.entry["install"]["products"]["own"]["vllm/_C.so"] = "0" * 64
    assert "vllm/_C.so" in bench.refused("product_differs")
    bench.entry["install"]["products"]["own"]["vllm/_C.so"] = own
    bench.build().run()
    assert (bench.unpacked() / "tree/vllm/_C.so").read_bytes() == b"packed"


def test_git_route_that_compiles_its_own_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"targets": {"own": "vllm/own.so"}, "architectures": ["8.6"], "definitions": {"VLLM_TARGET_DEVICE": "cuda"},
            "cmake": "3.26", "gib_per_job": 4}  # fmt: skip
    bench = tree_of(tmp_path, {"route": "compile", "compile": made})
    log, fail = tmp_path / "cmake.log", tmp_path / "fail"
    for tool in ("ninja", "cc", "c++"):
        (bench.tools / tool).write_text("#!/bin/sh\n")
        (bench.tools / tool).chmod(0o755)
    (bench.tools / "cmake").write_text(CMAKE.format(log=log, fail=fail, version="3.25.1"))
    (bench.tools / "cmake").chmod(0o755)
    assert "3.25.1" in bench.refused("cmake_too_old")
    (bench.tools / "cmake").write_text(CMAKE.format(log=log, fail=fail, version="3.31.0"))
    monkeypatch.setattr(engine_steps, "_memory_kib", lambda: 9 << 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    fail.touch()
    bench.refused("compile_failed")
    fail.unlink()
    log.write_text("")
    manifest = bench.build().run()["manifest"]
    calls = log.read_text()
    assert "jobs=2 arch=8.6" in calls, "9 GiB are enough for two compilers"
    assert "-DVLLM_TARGET_DEVICE=cuda" in calls
    assert f"-DVLLM_PYTHON_EXECUTABLE={bench.work}/stage/venv/bin/python" in calls
    assert manifest["tools"]["cmake"] == "3.31.0"
    out = bench.unpacked()
    assert (out / "tree/vllm/own.so").read_text() == "compiled own\n"
    assert (out / "tree/vllm/_C.so").read_text() == "stock"
    assert (out / "tree/.build-products").read_text() == "compile tiny\n"


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    made = {
        "targets": {"own": "vllm/own.so"},
        "architectures": [],
        "definitions": {},
        "cmake": "3.26",
        "gib_per_job": 4,
    }
    bench = tree_of(tmp_path, {"route": "compile", "compile": made})
    build = bench.build()
    os.makedirs(build.stage)
    build.make_venv()
    build.env["PATH"] = str(bench.tools)
    with pytest.raises(FleetError) as caught:
        build.compile()
    assert caught.value.reason == "tool_missing"
    assert "cmake" in caught.value.message


def test_a_rerun_goes_on_after_the_last_finished_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = tree_of(tmp_path)
    product = bench.work / "source/files/vllm-1.2.3-py3-none-any.whl"
    good = product.read_bytes()
    product.write_bytes(good[:100] + b"x" + good[101:])
    assert str(product) in bench.refused("products_damaged")
    assert "step 6 of 11: products" in (bench.work / "progress").read_text()
    product.write_bytes(good)
    done = []
    for name in ("make_venv", "install", "place_tree", "place_products", "install_tree"):
        monkeypatch.setattr(engine_steps.Build, name, noted(done, name, getattr(engine_steps.Build, name)))
    bench.build().run()
    assert done == ["place_products", "install_tree"]


def noted(done: list[str], name: str, step: Any) -> Any:
    def call(self: Any) -> None:
        done.append(name)
        step(self)

    return call


@pytest.mark.parametrize(
    ("change", "reason", "word"),
    [
        ({"version": "9.9"}, "version_differs", "1.2.3"),
        ({"interpreter": "/no/such/python"}, "venv_failed", "/no/such/python"),
        ({"install": {"torch": "2.12.0"}}, "torch_differs", "2.13.0+cpu"),
        ({"install": {"torch": "2.13.0", "torch_cuda": "13.0"}}, "torch_differs", "13.0"),
    ],
)
def test_what_is_not_as_the_catalog_says_stops_the_build(
    tmp_path: Path, change: dict[str, Any], reason: str, word: str
) -> None:
    bench = Bench(tmp_path, "wheel")
    bench.entry.update(change)
    assert word in bench.refused(reason)
    assert not bench.dest.exists()


def test_a_wheel_that_is_not_the_locks_stops_the_build(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "wheel")
    path = bench.work / "wheels/torch-2.13.0+cpu-py3-none-any.whl"
    path.write_bytes(path.read_bytes() + b"\0")
    assert "torch" in bench.refused("install_failed")


def test_nvcc_of_another_release(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "wheel")
    build = bench.build()
    os.makedirs(build.stage)
    build.make_venv()
    home = Path(build.site_packages()) / "nvidia/cu13"
    (home / "lib").mkdir(parents=True)
    (home / "lib/libcudart.so.13").touch()
    (home / "bin").mkdir()
    (home / "bin/nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    (home / "bin/nvcc").chmod(0o755)
    bench.entry["install"]["nvcc"] = "13.0"
    with pytest.raises(FleetError) as caught:
        build.link_toolkit()
    assert caught.value.reason == "nvcc_differs"
    assert "12.9" in caught.value.message
    assert (home / "lib64/libcudart.so").resolve() == home / "lib/libcudart.so.13"
