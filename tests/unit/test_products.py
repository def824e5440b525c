"""Build products: a record that coreutils accepts, and a verification that names every problem."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_fleet import cli, products, products_pass, sums
from vllm_fleet.errors import RefusedError, UsageError


@pytest.fixture
def tree(tmp_path):
    path = tmp_path / "tree"
    (path / "vllm" / "ops").mkdir(parents=True)
    (path / "vllm" / "_C.abi3.so").write_bytes(b"one")
    (path / "vllm" / "ops" / "k.so").write_bytes(b"two")
    (path / "vllm" / "_version.py").write_bytes(b"generated")
    (path / "setup.py").write_bytes(b"source, not a product")
    return path


def record(tree, **arguments):
    arguments = {"route": "own", "engine": "e-1", "paths": ["vllm"], "exclude": ["vllm/_version.py"], **arguments}
    return products_pass.record(str(tree), **arguments)


def verify(tree, **arguments):
    return products_pass.verify(str(tree), **arguments)


def found(report):
    return {(problem["reason"], problem["file"]) for problem in report["problems"]}


def statuses(report):
    return {item["reason"]: item["status"] for item in report["results"]}


def sha256sum(tree):
    command = ["sha256sum", "-c", "--quiet", "--strict", products.SUMS]
    return subprocess.run(command, cwd=tree, capture_output=True, check=False)


def test_record_and_verify(tree):
    assert record(tree)["reason"] == "recorded"
    assert (tree / ".build-products").read_text() == "own e-1\n"
    lines = (tree / ".build-products.sha256").read_text().splitlines()
    assert [line.split("  ")[1] for line in lines] == ["vllm/_C.abi3.so", "vllm/ops/k.so"]
    assert sha256sum(tree).returncode == 0
    report = verify(tree)
    assert statuses(report) == {"products_ok": "pass"}
    assert (report["route"], report["engine"], report["files"]) == ("own", "e-1", 2)


def test_recording_again_changes_nothing(tree):
    record(tree)
    before = {entry.name: entry.stat() for entry in tree.iterdir()}
    assert record(tree)["changed"] is False
    assert {entry.name: entry.stat() for entry in tree.iterdir()} == before
    (tree / "vllm" / "ops" / "k.so").write_bytes(b"three")
    assert record(tree, check=True)["changed"] is True
    assert {entry.name: entry.stat() for entry in tree.iterdir()} == before
    assert record(tree)["changed"] is True
    assert statuses(verify(tree)) == {"products_ok": "pass"}


def test_a_different_engine_or_route_is_recorded(tree):
    record(tree)
    assert record(tree, engine="e-2")["changed"] is True
    assert (tree / ".build-products").read_text() == "own e-2\n"
    assert statuses(verify(tree, engine="e-1")) == {"engine_differs": "fail", "products_ok": "pass"}
    assert statuses(verify(tree, engine="e-2")) == {"products_ok": "pass"}


def remove(tree):
    (tree / "vllm" / "ops" / "k.so").unlink()


def tamper(tree):
    (tree / "vllm" / "ops" / "k.so").write_bytes(b"twO")


def add(tree):
    (tree / "vllm" / "ops" / "new.so").write_bytes(b"")


def fifo(tree):
    (tree / "vllm" / "ops" / "k.so").unlink()
    os.mkfifo(tree / "vllm" / "ops" / "k.so")


def to_directory(tree):
    (tree / "vllm" / "ops" / "k.so").unlink()
    (tree / "vllm" / "ops" / "k.so").mkdir()


def file_to_outside(tree):
    outside = tree.parent / "k.so"
    outside.write_bytes(b"two")  # even with the right content
    (tree / "vllm" / "ops" / "k.so").unlink()
    (tree / "vllm" / "ops" / "k.so").symlink_to("../../../k.so")


def directory_to_outside(tree):
    (tree / "vllm" / "ops").replace(tree.parent / "ops")
    (tree / "vllm" / "ops").symlink_to(tree.parent / "ops")


def added_link_to_outside(tree):
    (tree / "vllm" / "new").symlink_to("/etc")


def line(text):
    def change(tree):
        with open(tree / products.SUMS, "ab") as handle:
            handle.write(text)

    return change


ZERO = b"0" * 64


@pytest.mark.parametrize(
    ("change", "reason", "file"),
    [
        (remove, "missing", "vllm/ops/k.so"),
        (tamper, "changed", "vllm/ops/k.so"),
        (add, "extra", "vllm/ops/new.so"),
        (fifo, "unreadable", "vllm/ops/k.so"),
        (to_directory, "unreadable", "vllm/ops/k.so"),
        (file_to_outside, "escapes_tree", "vllm/ops/k.so"),
        (directory_to_outside, "escapes_tree", "vllm/ops/k.so"),
        (added_link_to_outside, "escapes_tree", "vllm/new"),
        (line(ZERO + b"  ../outside\n"), "escapes_tree", "../outside"),
        (line(ZERO + b"  /etc/passwd\n"), "escapes_tree", "/etc/passwd"),
        (line(ZERO + b"  vllm/gone\n"), "missing", "vllm/gone"),
        (line(b"garbage\n"), "malformed_line", "line 3"),
        (line(b"\n"), "malformed_line", "line 3"),
        (line(b"\\" + ZERO + b"  a\\tb\n"), "malformed_line", "line 3"),
        (line(ZERO[1:] + b"  vllm/x\n"), "malformed_line", "line 3"),
        (line(ZERO + b"  vllm/_C.abi3.so\n"), "malformed_line", "line 3"),
    ],
)
def test_every_problem_is_named(tree, change, reason, file):
    record(tree)
    change(tree)
    report = verify(tree)
    assert reason in {problem["reason"] for problem in report["problems"]}
    assert any(problem["reason"] == reason and file in problem["file"] for problem in report["problems"])
    (result,) = [item for item in report["results"] if item["reason"] == reason]
    assert result["status"] == ("warn" if reason == "extra" else "fail")
    assert file in result["message"]
    assert result["fix"]


def test_all_problems_are_reported_at_once(tree):
    record(tree)
    tamper(tree)
    add(tree)
    (tree / "vllm" / "_C.abi3.so").unlink()
    assert found(verify(tree)) == {
        ("changed", "vllm/ops/k.so"),
        ("extra", "vllm/ops/new.so"),
        ("missing", "vllm/_C.abi3.so"),
    }


@pytest.mark.skipif(os.geteuid() == 0 and not hasattr(os, "setresuid"), reason="needs to become another user")
def test_unreadable(tree):
    record(tree)
    (tree / "vllm" / "ops" / "k.so").chmod(0)
    for parent in [tree, *tree.parents]:
        if not parent.stat().st_mode & 0o001:
            parent.chmod(0o755)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            os.write(writer, json.dumps(verify(tree)["problems"]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as handle:
        problems = json.loads(handle.read())
    os.waitpid(child, 0)
    assert problems == [{"reason": "unreadable", "file": "vllm/ops/k.so", "detail": "Permission denied"}]


def test_bytecode_and_exclusions_are_ignored(tree):
    record(tree)
    (tree / "vllm" / "__pycache__").mkdir()
    (tree / "vllm" / "__pycache__" / "x.pyc").write_bytes(b"")
    (tree / "vllm" / "_version.py").write_bytes(b"generated again")
    (tree / "elsewhere.py").write_bytes(b"not in a product path")
    assert statuses(verify(tree)) == {"products_ok": "pass"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda tree: (tree / ".build-products").unlink(), "no .build-products,"),
        (lambda tree: (tree / ".build-products.sha256").unlink(), "no .build-products.sha256"),
        (lambda tree: (tree / ".build-products.sha256").write_bytes(b""), "no .build-products.sha256"),
        (lambda tree: (tree / ".build-products").write_bytes(b"one two three\n"), "route engine-id"),
        (lambda tree: (tree / ".build-products").write_bytes(b"\xff\xff e\n"), "route engine-id"),
    ],
)
def test_unrecorded(tree, change, text):
    record(tree)
    change(tree)
    report = verify(tree)
    assert statuses(report) == {"unrecorded": "fail"}
    assert text in report["results"][0]["message"]


def test_no_tree_is_unrecorded(tree):
    assert statuses(verify(tree / "none")) == {"unrecorded": "fail"}


def test_without_the_list_additions_are_unknown(tree):
    record(tree)
    (tree / ".build-products.json").write_text("{}")
    assert statuses(verify(tree)) == {"products_ok": "pass", "paths_unknown": "unknown"}


def test_a_read_only_mount_is_trusted_only_on_request(tree, monkeypatch):
    record(tree)
    tamper(tree)
    assert "changed" in statuses(verify(tree, trust_read_only=True))
    real = products_pass.product_tree.read_record
    monkeypatch.setattr(products_pass.product_tree, "read_record", lambda path: dict(real(path), read_only=True))
    assert "changed" in statuses(verify(tree))
    assert statuses(verify(tree, trust_read_only=True)) == {"read_only_mount": "pass"}


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ({"paths": ["none"]}, RefusedError, "missing"),
        ({"paths": ["../x"]}, UsageError, "bad_path"),
        ({"paths": ["/etc"]}, UsageError, "bad_path"),
        ({"paths": []}, UsageError, "bad_path"),
        ({"route": "two words"}, UsageError, "bad_route"),
        ({"engine": ""}, UsageError, "bad_engine"),
        ({"exclude": ["vllm"]}, RefusedError, "nothing_to_record"),
    ],
)
def test_what_cannot_be_recorded(tree, arguments, error, reason):
    with pytest.raises(error) as caught:
        record(tree, **arguments)
    assert caught.value.reason == reason
    assert not (tree / products.MARKER).exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [(file_to_outside, "escapes_tree"), (added_link_to_outside, "escapes_tree"), (fifo, "unreadable")],
)
def test_a_tree_that_could_not_be_verified_is_not_recorded(tree, change, reason):
    change(tree)
    with pytest.raises(RefusedError) as caught:
        record(tree)
    assert caught.value.reason == reason


def test_links_inside_the_tree_are_products(tree):
    (tree / "vllm" / "libx.so").symlink_to("ops/k.so")
    record(tree)
    assert sha256sum(tree).returncode == 0
    assert statuses(verify(tree)) == {"products_ok": "pass"}
    tamper(tree)
    assert found(verify(tree)) == {("changed", "vllm/libx.so"), ("changed", "vllm/ops/k.so")}


def test_an_interrupted_record_leaves_no_marker(tree, monkeypatch):
    record(tree)
    tamper(tree)

    def fail(path, *_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(products_pass.product_tree, "write_atomic", fail)
    with pytest.raises(RefusedError) as caught:
        record(tree)
    assert caught.value.reason == "write_failed"
    assert statuses(verify(tree)) == {"unrecorded": "fail"}


ODD_NAMES = ["new\nline", "back\\slash", "car\rriage", "both\\\n", " lead", "trail ", "*star", "quote'\"", "\u00e4"]
ODD_NAMES += ["\udcff", "Z", "a", "-dash", "#hash", "tab\t", "\\n", "\u2028"]


def test_odd_names_as_coreutils_has_them(tree):
    for name in ODD_NAMES:
        (tree / "vllm" / name).write_bytes(os.fsencode(name))
    record(tree)
    checked = sha256sum(tree)
    assert (checked.returncode, checked.stderr) == (0, b"")
    assert statuses(verify(tree)) == {"products_ok": "pass"}
    command = "find vllm -type f ! -name _version.py -print0 | LC_ALL=C sort -z | xargs -0 sha256sum"
    by_coreutils = subprocess.run(["bash", "-c", command], cwd=tree, capture_output=True, check=True).stdout
    assert (tree / products.SUMS).read_bytes() == by_coreutils
    for name in ODD_NAMES:
        (tree / "vllm" / name).write_bytes(b"changed")
    report = verify(tree)
    assert len(found(report)) == len(ODD_NAMES)
    json.dumps(report).encode("utf-8")
    assert all("\n" not in item["message"] for item in report["results"])


NAMES = st.binary(min_size=1, max_size=12).filter(lambda name: b"\0" not in name).map(os.fsdecode)
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(NAMES, DIGESTS, max_size=6))
def test_sums_read_back(entries):
    raw = sums.render(entries)
    assert sums.parse(raw) == (entries, [])
    lines = raw.split(b"\n")[:-1]
    assert len(lines) == len(entries)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_malformed_and_never_a_traceback(raw):
    parsed = sums.parse(raw)
    assert len(parsed.malformed) + len(parsed.entries) <= raw.count(b"\n") + 1
    "".join(parsed.malformed).encode("utf-8")


def test_binary_mode_and_upper_case_are_accepted():
    digest = "AB" * 32
    assert sums.parse(f"{digest} *a b\n{digest}  c".encode()).entries == {"a b": "ab" * 32, "c": "ab" * 32}


def test_program(tree, capsys):
    command = ["products", "record", str(tree), "--route", "own", "--engine", "e", "--path", "vllm"]
    assert cli.main([*command, "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"changed": True, "reason": "recorded", "files": 3}
    assert not (tree / products.MARKER).exists()
    assert cli.main(["products", "verify", str(tree)]) == 1
    assert "unrecorded" in capsys.readouterr().out
    assert cli.main(command) == 0
    capsys.readouterr()
    assert cli.main(["products", "verify", str(tree), "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    add(tree)
    assert cli.main(["products", "verify", str(tree), "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("warn    extra: ")
    tamper(tree)
    assert cli.main(["products", "verify", str(tree), "--json"]) == 1
    assert found(json.loads(capsys.readouterr().out)) == {("changed", "vllm/ops/k.so"), ("extra", "vllm/ops/new.so")}
    assert cli.main(["products", "record", str(tree / "none"), "--route", "o", "--engine", "e", "--path", "x"]) == 3
    assert "not_a_tree" in capsys.readouterr().err


# --- what is remembered for a play ------------------------------------------------------------------------------------


def test_what_was_as_recorded_is_not_read_again_in_a_play(tree, tmp_path):
    memory = str(tmp_path / "state" / "e-1.json")
    record(tree)
    assert verify(tree, memory=memory, remember=False)["files"] == 2
    assert not os.path.exists(memory), "a dry run writes nothing"
    assert verify(tree, memory=memory)["files"] == 2
    again = verify(tree, memory=memory)
    assert again["files"] == 0
    assert statuses(again) == {"products_ok": "pass"}
    assert verify(tree)["files"] == 2, "a start reads every file"


def test_a_change_is_seen_and_not_remembered(tree, tmp_path):
    memory = str(tmp_path / "e-1.json")
    record(tree)
    verify(tree, memory=memory)
    product = tree / "vllm" / "_C.abi3.so"
    before = product.stat()
    product.write_bytes(b"two")
    os.utime(product, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    for _ in range(2):
        assert found(verify(tree, memory=memory)) == {("changed", "vllm/_C.abi3.so")}
    (tree / "vllm" / "ops" / "k.so").unlink()
    assert ("missing", "vllm/ops/k.so") in found(verify(tree, memory=memory))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sums": "x", "files": {}}', '{"sums": 1, "files": 2}'])
def test_a_damaged_memory_is_no_memory(tree, tmp_path, text):
    (tmp_path / "e-1.json").write_text(text)
    record(tree)
    assert verify(tree, memory=str(tmp_path / "e-1.json"))["files"] == 2


def test_another_record_forgets_what_was_remembered(tree, tmp_path):
    memory = str(tmp_path / "e-1.json")
    record(tree)
    verify(tree, memory=memory)
    (tree / "vllm" / "ops" / "new.so").write_bytes(b"three")
    record(tree)
    assert verify(tree, memory=memory)["files"] == 3
