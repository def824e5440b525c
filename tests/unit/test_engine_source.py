"""Sources of an engine: pinned files, the git tree, build products, locks. With real git, tar and zip files."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import os
import re
import subprocess
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_fleet import engine_store, git_source, locks, product_source, source_files
from vllm_fleet.errors import FleetError

WHO = {"NAME": "t", "EMAIL": "t@example.invalid", "DATE": "2026-01-01T00:00:00Z"}
GIT = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in WHO.items()}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def refused(reason: str, call: Callable[..., Any], *args: Any, **more: Any) -> str:
    """Return the message of a call that has to be refused with this reason."""
    with pytest.raises(FleetError) as caught:
        call(*args, **more)
    assert caught.value.reason == reason, caught.value.one_line()
    return caught.value.one_line()


# ---- pinned files ----------------------------------------------------------------------------------------------------


def test_a_persons_wrong_file_is_left_and_our_own_is_deleted(tmp_path: Path) -> None:
    item = {"file": "x.bundle", "sha256": sha(b"good")}
    given, cache = tmp_path / "given", tmp_path / "cache"
    given.mkdir()
    (given / "x.bundle").write_bytes(b"bad")
    text = refused("bundle_damaged", source_files.provide, item, [str(given)], str(cache), "bundle_damaged")
    assert str(given / "x.bundle") in text
    assert "left as it is" in text
    assert (given / "x.bundle").read_bytes() == b"bad"
    (given / "x.bundle").write_bytes(b"good")
    assert source_files.provide(item, [str(given)], str(cache), "bundle_damaged") == str(given / "x.bundle")
    (given / "x.bundle").unlink()
    refused("source_missing", source_files.provide, item, [str(given)], str(cache), "bundle_damaged")
    (cache / "x.bundle").write_bytes(b"bad")
    assert "deleted" in refused("bundle_damaged", source_files.provide, item, [], str(cache), "bundle_damaged")
    assert not (cache / "x.bundle").exists()


def test_a_compressed_file_serves_too(tmp_path: Path) -> None:
    item = {"file": "x.bundle", "sha256": sha(b"good")}
    packed = tmp_path / "x.bundle.gz"
    packed.write_bytes(gzip.compress(b"good"))
    cache = tmp_path / "cache"
    assert source_files.provide(item, [str(tmp_path)], str(cache), "r") == str(cache / "x.bundle")
    packed.write_bytes(gzip.compress(b"good")[:-6])
    refused("r", source_files.provide, item, [str(tmp_path)], str(cache), "r")
    assert packed.exists()


class Server(http.server.BaseHTTPRequestHandler):
    """Serve ``content``, with ranges; the first answer ends after ``cut`` bytes."""

    content, cut, ranges = b"", 0, []  # type: ignore[var-annotated]

    def do_GET(self) -> None:
        wanted = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(wanted.group(1)) if wanted else 0
        type(self).ranges.append(start)
        body = self.content[start:]
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut, type(self).cut = self.cut, 0
        self.wfile.write(body[:cut] if cut else body)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    Server.content, Server.cut, Server.ranges = os.urandom(300_000), 0, []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def test_an_interrupted_download_goes_on(server: str, tmp_path: Path) -> None:
    Server.cut = 100_000
    item = {"file": "a.tar", "sha256": sha(Server.content), "url": f"{server}/a.tar"}
    text = refused("download_failed", source_files.provide, item, [], str(tmp_path), "products_damaged")
    assert "ended early" in text
    assert source_files.provide(item, [], str(tmp_path), "products_damaged") == str(tmp_path / "a.tar")
    assert Server.ranges == [0, 100_000]
    # and what came wrong is not kept
    (tmp_path / "a.tar").unlink()
    item["sha256"] = sha(b"other")
    refused("products_damaged", source_files.provide, item, [], str(tmp_path), "products_damaged")
    assert list(tmp_path.iterdir()) == []


def test_nobody_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    item = {"file": "a", "sha256": sha(b""), "url": "http://127.0.0.1:9/a"}
    assert "http://127.0.0.1:9/a" in refused("download_failed", source_files.provide, item, [], str(tmp_path), "r")


# ---- the git tree ----------------------------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> str:
    env = {**os.environ, **GIT, "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, env=env, check=True)
    return done.stdout.strip()


class Upstream:
    """A repository with a tagged base, and a bundle and a patch with one change on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.repository, self.bundle = folder, folder / "mirror", folder / "x.bundle"
        self.repository.mkdir()
        git(self.repository, "init", "-q", "-b", "main")
        for text in ("old history", "release"):
            (self.repository / "a.py").write_text(text + "\n")
            (self.repository / "run").write_text("#!/bin/sh\n")
            (self.repository / "run").chmod(0o755)
            git(self.repository, "add", "-A")
            git(self.repository, "commit", "-qm", text)
        self.base = git(self.repository, "rev-parse", "HEAD")
        git(self.repository, "tag", "v1")
        git(self.repository, "checkout", "-qb", "public")
        (self.repository / "a.py").write_text("changed\n")
        git(self.repository, "commit", "-qam", "change")
        self.commit = git(self.repository, "rev-parse", "HEAD")
        self.tree = git(self.repository, "rev-parse", "HEAD^{tree}")
        git(self.repository, "bundle", "create", "-q", str(self.bundle), "v1..refs/heads/public")
        self.patch = folder / "x.patch"
        self.patch.write_text(git(self.repository, "diff", "v1", "public") + "\n")
        git(self.repository, "checkout", "-q", "main")
        git(self.repository, "branch", "-qD", "public")

    def install(self, **more: Any) -> dict[str, Any]:
        return {
            "repository": f"file://{self.repository}", "base": {"commit": self.base, "tag": "v1"}, "patches": [],
            "bundle": {"file": "x.bundle", "ref": "refs/heads/public"}, "commit": self.commit, "tree": self.tree,
            **more,
        }  # fmt: skip

    def prepare(self, where: str = "tree", mirror: str = "", **more: Any) -> git_source.Checkout:
        files = {"x.bundle": str(self.bundle), "x.patch": str(self.patch)}
        return git_source.prepare(str(self.folder / where), "x", self.install(**more), files, mirror)


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    return Upstream(tmp_path)


def test_the_pinned_tree_without_history(upstream: Upstream, tmp_path: Path) -> None:
    checkout = upstream.prepare()
    assert (tmp_path / "tree" / "a.py").read_text() == "changed\n"
    assert git(tmp_path / "tree", "rev-list", "--count", "HEAD") == "2", "the base and the change, no history"
    packs = []
    for name in ("one.tar", "two.tar"):
        with tarfile.open(tmp_path / name, "w") as archive:
            assert checkout.pack(archive, "source/tree") == 2
        packs.append((tmp_path / name).read_bytes())
    assert packs[0] == packs[1], "the same tree is the same bytes"
    with tarfile.open(tmp_path / "one.tar") as archive:
        assert [(item.name, item.mode) for item in archive] == [("source/tree/a.py", 0o644), ("source/tree/run", 0o755)]


def test_a_rerun_needs_neither_mirror_nor_bundle(upstream: Upstream) -> None:
    upstream.prepare()
    upstream.repository.rename(upstream.folder / "gone")
    upstream.bundle.unlink()
    upstream.prepare()


def test_patches_are_asserted_by_their_tree(upstream: Upstream, tmp_path: Path) -> None:
    more: dict[str, Any] = {"bundle": None, "patches": [{"file": "x.patch"}]}
    for _ in range(2):
        upstream.prepare(**more)
        assert (tmp_path / "tree" / "a.py").read_text() == "changed\n"
    upstream.patch.write_text(upstream.patch.read_text().replace("-release", "-other"))
    assert "x.patch" in refused("patch_failed", upstream.prepare, "other", **more)


def test_wrong_pins_are_refused(upstream: Upstream) -> None:
    refused("tree_differs", upstream.prepare, tree="c" * 40)
    assert "v1 is commit" in refused("base_differs", upstream.prepare, "b", base={"commit": "c" * 40, "tag": "v1"})
    refused("base_unreachable", upstream.prepare, "c", base={"commit": "c" * 40})
    assert "engine_mirror" in refused("base_unreachable", upstream.prepare, "d", mirror="/no/such/mirror")
    refused("bundle_differs", upstream.prepare, "e", commit="c" * 40)


def test_a_mirror_takes_the_place_of_the_repository(upstream: Upstream) -> None:
    upstream.prepare(repository="https://unreachable.invalid/x.git", mirror=f"file://{upstream.repository}")


def test_a_foreign_checkout_is_left_alone(upstream: Upstream, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    git(foreign, "init", "-q")
    assert "left as it is" in refused("foreign_checkout", upstream.prepare, "foreign")
    assert not (foreign / "a.py").exists()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "mine").touch()
    refused("foreign_checkout", upstream.prepare, "files")
    upstream.prepare("ours")
    (tmp_path / "ours" / ".git" / git_source.MARKER).write_text("another-engine\n")
    refused("foreign_checkout", upstream.prepare, "ours")


def test_modified_files_are_named(upstream: Upstream, tmp_path: Path) -> None:
    upstream.prepare()
    (tmp_path / "tree" / "a.py").write_text("edited\n")
    assert "a.py" in refused("modified_files", upstream.prepare)
    assert (tmp_path / "tree" / "a.py").read_text() == "edited\n"


def test_a_checkout_that_was_cut_off_is_completed(upstream: Upstream, tmp_path: Path) -> None:
    checkout = git_source.Checkout(str(tmp_path / "tree"), "x")
    checkout.begin()
    upstream.prepare()
    assert (tmp_path / "tree" / "a.py").read_text() == "changed\n"


# ---- products --------------------------------------------------------------------------------------------------------


def make_wheel(path: Path, names: dict[str, bytes]) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in names.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            archive.writestr(info, data)
    return str(path)


def make_tarball(path: Path, names: dict[str, bytes], link: str = "") -> str:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in names.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
        if link:
            entry = tarfile.TarInfo("vllm/link")
            entry.type, entry.linkname = tarfile.SYMTYPE, link
            archive.addfile(entry)
    return str(path)


FILES = {"vllm/_C.so": b"c", "vllm/own.so": b"stock", "vllm/cute/a.py": b"a", "vllm/other.py": b"o"}


def test_products_of_a_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "x.whl", FILES)
    tree = tmp_path / "tree"
    found = product_source.from_wheel(wheel, str(tree), ["vllm/_C.so", "vllm/own.so", "vllm/cute"], ["vllm/own.so"])
    assert sorted(found) == ["vllm/_C.so", "vllm/cute/a.py"]
    assert (tree / "vllm/_C.so").stat().st_mode & 0o777 == 0o755
    assert (tree / "vllm/cute/a.py").stat().st_mode & 0o777 == 0o644
    text = refused("product_missing", product_source.from_wheel, wheel, str(tree), ["vllm/_C.so", "vllm/gone.so"])
    assert "vllm/gone.so" in text
    assert "vllm/_C.so" not in text
    Path(wheel).write_bytes(Path(wheel).read_bytes()[:-30])
    assert wheel in refused("products_damaged", product_source.from_wheel, wheel, str(tree), ["vllm/_C.so"])


def test_products_of_a_tarball(tmp_path: Path) -> None:
    tarball = make_tarball(tmp_path / "x.tar.gz", FILES)
    tree = tmp_path / "tree"
    assert len(product_source.from_tarball(tarball, str(tree), ["vllm/_C.so", "vllm/cute"], 4)) == 2
    assert "holds 4 files" in refused(
        "products_differ", product_source.from_tarball, tarball, str(tree), ["vllm/_C.so"], 5
    )
    product_source.check_own(str(tree), {"vllm/_C.so": sha(b"c")})
    assert "vllm/_C.so" in refused("product_differs", product_source.check_own, str(tree), {"vllm/_C.so": sha(b"d")})
    Path(tarball).write_bytes(Path(tarball).read_bytes()[:-20])
    refused("products_damaged", product_source.from_tarball, tarball, str(tree), ["vllm/_C.so"])


def test_products_stay_inside_the_tree(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "vllm").mkdir(parents=True)
    (tree / "vllm" / "cute").symlink_to(tmp_path)
    wheel = make_wheel(tmp_path / "x.whl", {"vllm/cute/a.py": b"a"})
    refused("escapes_tree", product_source.from_wheel, wheel, str(tree), ["vllm/cute"])
    assert not (tmp_path / "a.py").exists()


# ---- locks and the store ---------------------------------------------------------------------------------------------


def test_a_lock_says_who_holds_it(tmp_path: Path) -> None:
    path = str(tmp_path / ".lock")
    with locks.hold(path, "building x"):
        text = refused("locked", lambda: locks.hold(path, "other").__enter__())
        assert f"process {os.getpid()} of" in text
        assert "(building x)" in text
    with locks.hold(path, "next"):
        assert "(next)" in locks.holder(path)


def make_engine(root: Path, name: str, age: int) -> None:
    (root / name).mkdir(parents=True)
    (root / name / "manifest.json").write_text(f'{{"id": "{name}", "version": "1", "digest": "d"}}')
    os.utime(root / name, (1000 - age, 1000 - age))


def test_engines_in_use_are_never_pruned(tmp_path: Path) -> None:
    root, lanes, run = tmp_path / "engines", tmp_path / "lanes", tmp_path / "run"
    for age, name in enumerate(("new", "spare", "started", "previous", "running", "oldest")):
        make_engine(root, name, age)
    (root / ".partial-1").mkdir()
    (root / "foreign").mkdir()
    for release in ("running", "previous", "started"):
        (lanes / "main" / "releases" / release).mkdir(parents=True)
        (lanes / "main" / "releases" / release / "engine").symlink_to(root / release)
    (lanes / "main" / "current").symlink_to("releases/running")
    (lanes / "main" / "previous").symlink_to("releases/previous")
    (run / "main").mkdir(parents=True)
    (run / "main" / "release").write_text("started\n")
    used = engine_store.in_use(str(lanes), str(run))
    assert used == {"running", "previous", "started"}
    assert engine_store.prunable(str(root), ["new"], 5, used) == ["oldest"]
    assert engine_store.prunable(str(root), ["new"], 1, used) == ["oldest", "spare"]
    engine_store.remove(str(root), "oldest")
    assert sorted(path.name for path in root.iterdir()) == [
        ".partial-1", "foreign", "new", "previous", "running", "spare", "started",
    ]  # fmt: skip
    engine_store.clear_leftovers(str(root))
    assert not (root / ".partial-1").exists()


def test_what_is_installed_is_judged_by_its_manifest(tmp_path: Path) -> None:
    make_engine(tmp_path, "x", 0)
    assert engine_store.look(str(tmp_path), {"id": "x", "digest": "d"}) == "1"
    assert engine_store.look(str(tmp_path), {"id": "x", "digest": "new", "accepts": ["d", "new"]}) == "1"
    assert engine_store.look(str(tmp_path), {"id": "absent", "digest": "d"}) is None
    assert "new id" in refused("engine_differs", engine_store.look, str(tmp_path), {"id": "x", "digest": "e"})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "bin").mkdir()
    refused("foreign_directory", engine_store.look, str(tmp_path), {"id": "mine", "digest": "d"})


def test_a_vendors_engine_is_only_compared(tmp_path: Path) -> None:
    entry = {"id": "v", "route": "vendor", "version": "0.6.3", "site_packages": str(tmp_path / "site"),
             "versions": {"vllm": "0.6.3+corex"}}  # fmt: skip
    assert str(tmp_path / "site") in refused("vendor_engine_missing", engine_store.look, "/none", entry)
    (tmp_path / "site" / "vllm-0.6.3+corex.dist-info").mkdir(parents=True)
    assert engine_store.look("/none", entry) == "0.6.3+corex"
    (tmp_path / "site" / "vllm-0.6.3+corex.dist-info").rename(tmp_path / "site" / "vllm-0.8.3.dist-info")
    text = refused("vendor_version_differs", engine_store.look, "/none", entry)
    assert "vllm" in text
    assert "0.8.3" in text
