"""What an engine is built from: the schema of its entry, its lock, its digest and plan, and the rules of a build."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from vllm_fleet import catalog, engines
from vllm_fleet.errors import FleetError, UsageError
from vllm_fleet.profile_schema import check_engine

ROOT = Path(__file__).resolve().parents[2]
SHA, HEX40 = "a" * 64, "b" * 40
LOCK = f"torch==2.13.0+cpu \\\n    --hash=sha256:{SHA}\nvllm==0.32.0+cpu --hash=sha256:{SHA}\n"
GIT = {
    "schema": 1, "id": "x", "summary": "s", "version": "0.30.0", "route": "git", "accelerator": "cpu",
    "python_version": "3.11",
    "install": {
        "repository": "https://example.invalid/vllm.git", "base": {"commit": HEX40},
        "bundle": {"file": "x.bundle", "sha256": SHA, "ref": "refs/heads/x"}, "commit": HEX40, "tree": HEX40,
        "products": {
            "route": "wheel", "paths": ["vllm/_C.so"], "wheel": {"requirement": "vllm==0.30.0", "sha256": SHA},
        },
    },
}  # fmt: skip


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the entry with one value at a dotted path changed; None removes it."""
    entry = copy.deepcopy(GIT)
    *parents, last = path.split(".")
    at: Any = entry
    for key in parents:
        at = at[key]
    if value is None:
        at.pop(last)
    else:
        at[last] = value
    return entry


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("install.base.commit", "v0.30.0", "install.base.commit: found the text 'v0.30.0', allowed: a full git hash"),
        ("install.tree", None, "found no key 'tree'"),
        ("install.bundle.sha256", "deadbeef", "install.bundle.sha256"),
        ("install.bundle.file", "../x.bundle", "a file name without directories"),
        ("install.bundle", None, "give either a bundle or patches"),
        ("install.patches", [{"file": "a.patch", "sha256": SHA}], "give either a bundle or patches"),
        ("install.commit", None, "found no key 'commit', which a bundle needs"),
        ("install.repository", "github.com/x", "an address of a git repository"),
        ("install.products.route", "own", "one of tarball, wheel, compile"),
        ("install.products.route", "tarball", "found no key 'tarball', which the route tarball needs"),
        ("install.products.route", "compile", "found no key 'compile', which the route compile needs"),
        ("install.products.paths", [], "a list of 1 or more items"),
        ("install.products.paths", ["../../etc/passwd"], "a path inside the tree"),
        ("install.products.wheel.requirement", "vllm>=0.30", "an exact requirement"),
        ("install.bundel", {}, "Did you mean bundle?"),
        ("install.nvcc", 13.0, "a CUDA release as text"),
        ("route", "vendor", "unknown name"),
        ("route", "pip", "one of wheel, git, vendor"),
    ],
)
def test_a_bad_entry_is_told_with_its_place(path: str, value: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_engine(changed(path, value), "engines/x.yml")
    assert "engines/x.yml" in caught.value.one_line()
    assert words in caught.value.one_line()


def test_patches_take_the_place_of_a_bundle() -> None:
    entry = changed("install.bundle", None)
    entry["install"].pop("commit")
    entry["install"]["patches"] = [{"file": "a.patch", "sha256": SHA}]
    assert check_engine(entry, "x")["install"]["patches"][0]["file"] == "a.patch"


def test_lock_lines() -> None:
    pins = engines.parse_lock(
        "# head\n" + LOCK + "A_b.c[extra]==1 ; python_version > '3' \\\n  --hash=sha256:0 --hash=sha256:1\n"
    )
    assert pins == [("torch", "2.13.0+cpu", 1), ("vllm", "0.32.0+cpu", 1), ("a-b-c", "1", 2)]


def entry_of(**install: Any) -> dict[str, Any]:
    return {"id": "x", "version": "0.32.0", "route": "wheel", "python_version": "3.11",
            "install": {"requirement": "vllm==0.32.0", "pins": {}, "disk_gib": 4, **install}}  # fmt: skip


def test_lock_agrees_with_the_entry_up_to_a_local_part() -> None:
    assert len(engines.check_lock(entry_of(torch="2.13.0"), "x.lock", LOCK)) == 2
    assert len(engines.check_lock(entry_of(torch="2.13.0+cpu"), "x.lock", LOCK)) == 2


@pytest.mark.parametrize(
    ("install", "lock", "reason", "name"),
    [
        ({"torch": "2.12.0"}, LOCK, "lock_differs", "torch is 2.13.0+cpu"),
        ({"torch": "2.13.0+cu130"}, LOCK, "lock_differs", "torch"),
        ({"pins": {"triton": "3.7.1"}}, LOCK, "lock_differs", "triton is absent"),
        ({"build_tools": ["setuptools==80.1"]}, LOCK, "lock_differs", "setuptools"),
        ({}, LOCK + "numpy==2.4.6\n", "lock_without_hashes", "numpy"),
        ({}, "# nothing\n", "lock_without_hashes", "no package"),
    ],
)
def test_a_lock_that_does_not_fit_is_refused(install: dict[str, Any], lock: str, reason: str, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        engines.check_lock(entry_of(**install), "x.lock", lock)
    assert caught.value.reason == reason
    assert "x.lock" in caught.value.message
    assert name in caught.value.message
    assert "make engine-lock E=x" in caught.value.fix


def test_digest_is_of_what_the_engine_is_made_of_and_not_of_where_it_comes_from() -> None:
    first = check_engine(GIT, "x")
    for path, value in (("install.repository", "https://mirror.invalid/v.git"), ("summary", "other"),
                        ("install.bundle.url", "https://example.invalid/x")):  # fmt: skip
        assert engines.digest(check_engine(changed(path, value), "x"), LOCK) == engines.digest(first, LOCK), path
    for path, value in (("install.tree", "c" * 40), ("version", "0.31.0"), ("install.editable", {"A": "b"}),
                        ("install.products.wheel.sha256", "c" * 64)):  # fmt: skip
        assert engines.digest(check_engine(changed(path, value), "x"), LOCK) != engines.digest(first, LOCK), path
    assert engines.digest(first, LOCK + "#") != engines.digest(first, LOCK)


def test_an_engine_of_an_older_recipe_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed works, and is never edited; a newer way of building counts for the next engine."""
    old = engines.inputs(entry_of(), "x.lock", LOCK)["digest"]
    monkeypatch.setattr(engines, "RECIPE", engines.RECIPE + 1)
    now = engines.inputs(entry_of(), "x.lock", LOCK)
    assert now["digest"] != old
    assert now["accepts"] == [old, now["digest"]]


def test_plan_of_the_public_release_names_every_pin() -> None:
    entry = catalog.load(str(ROOT / "catalog")).engine("vllm-0.30.0-flash-next-2.5.1")
    lock = ROOT / "catalog" / "engines" / f"{entry['id']}.lock"
    found = engines.inputs(entry, str(lock), lock.read_text())
    text = "\n".join(found["plan"])
    for pin in (
        "ced6857afa0ea7b2e3f0846a62e1394e90f15607", "v0.30.0", "96a0d13b6e98ad4ef86e66a3f6ddb5dd9199a591",
        "0df6d7ef38f8ac927bb8feb7dc9887c2c94e3901", "d904e4685877e56b57c9a23a621b537239ba6316ad238c3848c5f03437d03d7c",
        "cdca5ffcb3003d15e00896f0969134e16d7bfbe0a3c6dfe10698bec32573f592", "201 wheels", "Python 3.13", "torch 2.13.0",
        "CUDA 13.0", "nvcc 13.0",
    ):  # fmt: skip
        assert pin in text, pin
    assert len(entry["install"]["products"]["paths"]) == 23
    assert found["interpreter"] == "/usr/bin/python3.13"


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "catalog" / "engines").glob("*.yml")))
def test_every_engine_of_the_catalog_can_be_built_from_its_lock(name: str) -> None:
    entry = catalog.load(str(ROOT / "catalog")).engine(name)
    lock = ROOT / "catalog" / "engines" / f"{name}.lock"
    if entry["route"] == "vendor":
        assert not lock.exists()
    else:
        assert engines.inputs(entry, str(lock), lock.read_text())["digest"]


def test_interpreter_that_was_given() -> None:
    given = {"3.11": "/opt/python/bin/python3.11"}
    assert engines.inputs(entry_of(), "x.lock", LOCK, given)["interpreter"] == given["3.11"]
    assert engines.inputs(entry_of(), "x.lock", LOCK)["interpreter"] == "/usr/bin/python3.11"


def test_vendor_engine_has_nothing_to_build() -> None:
    entry = catalog.load(str(ROOT / "catalog")).engine("vllm-0.6.3-corex-3.2.3")
    found = engines.inputs(entry, "", "", None, {"root": "/usr/local/corex", "site_packages": "/site"})
    assert found["versions"] == {"vllm": "0.6.3+corex.3.2.3"}
    assert found["root"] == "/usr/local/corex"
    assert "digest" not in found
    assert "install nothing" in found["plan"][0]


@pytest.mark.parametrize(
    ("gib", "cores", "each", "jobs"), [(64, 64, 4, 16), (16, 2, 4, 2), (3, 8, 4, 1), (0, 8, 4, 1), (256, 8, 4, 8)]
)
def test_jobs_fit_memory_and_cores(gib: int, cores: int, each: int, jobs: int) -> None:
    assert engines.max_jobs(gib << 20, cores, each) == jobs


def test_toolkit_links() -> None:
    libraries = ["libcudart.so.13", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libx.so", "libx.so.1", "notes.txt"]
    assert engines.toolkit_links(libraries, ["bin", "lib"]) == [
        ("lib64", "lib"),
        ("lib/libcudart.so", "libcudart.so.13"),
        ("lib/libnvrtc-builtins.so", "libnvrtc-builtins.so.13.0"),
        ("lib/libnvrtc.so", "libnvrtc.so.13"),
    ]
    assert engines.toolkit_links(["libcudart.so.13", "libcudart.so"], ["lib", "lib64"]) == []


def test_selected_products() -> None:
    names = ["vllm/_C.so", "vllm/cute/", "vllm/cute/a.py", "vllm/cutest.py", "vllm/own.so"]
    assert engines.selected(names, ["vllm/_C.so", "vllm/cute/", "vllm/none.so", "vllm/own.so"], ["vllm/own.so"]) == (
        ["vllm/_C.so", "vllm/cute/a.py"],
        ["vllm/none.so"],
    )


def test_room() -> None:
    engines.check_room(5, 5, "x", "/srv")
    with pytest.raises(FleetError) as caught:
        engines.check_room(12 << 30, 3 << 30, "building x", "/srv")
    assert caught.value.reason == "disk_too_small"
    assert "building x needs 12.0 GiB in /srv, 3.0 GiB are free" in caught.value.message


@pytest.mark.parametrize(
    ("used", "keep", "gone"),
    [
        ((), 2, ["a", "b"]),
        (("a",), 2, ["b", "c"]),
        (("a", "b", "c"), 1, ["d"]),
        (("a", "b", "c", "d"), 1, []),
        ((), 4, []),
        ((), 9, []),
    ],
)
def test_pruning_keeps_what_is_used(used: tuple[str, ...], keep: int, gone: list[str]) -> None:
    assert engines.removable(["a", "b", "c", "d"], used, keep) == gone
