"""The rules over a checkpoint, through the whole pass on real directories."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from vllm_fleet import checkpoint, checkpoint_edit, checkpoint_pass
from vllm_fleet.errors import UsageError
from vllm_fleet.facts import checkpoint_dir, hashing

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture
def model(tmp_path):
    """A whole checkpoint: two shards of 2,048 bytes, an index and a nested configuration."""
    path = tmp_path / "model"
    path.mkdir()
    for number, shard in enumerate(SHARDS):
        (path / shard).write_bytes(bytes([number]) * 2048)
    write(path, checkpoint.INDEX, {"metadata": {"total_size": 4000}, "weight_map": {"a": SHARDS[0], "b": SHARDS[1]}})
    write(path, checkpoint.CONFIG, {"text_config": {"num_attention_heads": 16}})
    return path


def write(path: Path, name: str, document: object) -> None:
    (path / name).write_text(json.dumps(document))


def inspect(path, **arguments):
    arguments.setdefault("state_directory", str(path.parent / "state"))
    return checkpoint_pass.inspect(str(path), **arguments)


def problems(report):
    return {item["reason"] for item in report["results"] if item["status"] != "pass"}


def messages(report, reason):
    return next(item["message"] for item in report["results"] if item["reason"] == reason)


def test_whole_checkpoint_passes(model):
    report = inspect(model)
    assert problems(report) == set()
    assert report["size"] == 4096
    assert report["shards"] == [{"name": name, "size": 2048} for name in SHARDS]


def test_absent(tmp_path):
    report = inspect(tmp_path / "none")
    assert [item["status"] for item in report["results"]] == ["fail"]
    assert problems(report) == {"checkpoint_absent"}
    report = inspect(tmp_path / "none", absent_is_unknown=True)
    assert [item["status"] for item in report["results"]] == ["unknown"]


def test_a_file_is_no_checkpoint(tmp_path):
    (tmp_path / "file").write_text("x")
    assert problems(inspect(tmp_path / "file")) == {"checkpoint_not_a_directory"}


def remove(name):
    return lambda path: (path / name).unlink()


def resize(name, size):
    return lambda path: os.truncate(path / name, size)


def index(document):
    return lambda path: write(path, checkpoint.INDEX, document)


def raw(name, content):
    return lambda path: (path / name).write_bytes(content)


def dangle(name):
    def change(path):
        (path / name).unlink()
        (path / name).symlink_to("../gone")

    return change


def directory(name):
    def change(path):
        (path / name).unlink()
        (path / name).mkdir()

    return change


@pytest.mark.parametrize(
    ("change", "reason", "named"),
    [
        (remove(SHARDS[1]), "shards_missing", SHARDS[1]),
        (dangle(SHARDS[0]), "shards_missing", SHARDS[0]),
        (directory(SHARDS[0]), "shards_unusable", SHARDS[0]),
        (resize(SHARDS[0], 0), "shards_too_small", SHARDS[0]),
        (resize(SHARDS[0], 50), "shards_too_small", SHARDS[0]),
        (resize(SHARDS[0], 1900), "shards_too_small", "52 more"),
        (resize(SHARDS[0], 5_000_000), "shards_larger_than_index", "at most"),
        (remove(checkpoint.INDEX), "index_missing", "2 safetensors files"),
        (raw(checkpoint.INDEX, b"{"), "index_invalid", "not JSON"),
        (index([]), "index_invalid", "weight_map"),
        (index({"weight_map": {}}), "index_invalid", "weight_map"),
        (index({"weight_map": {"a": 1}}), "index_invalid", "a is in 1"),
        (index({"weight_map": {"a": "../../etc/passwd"}}), "index_invalid", "etc/passwd"),
        (index({"weight_map": {"a": "/etc/passwd"}}), "index_invalid", "etc/passwd"),
        (remove(checkpoint.CONFIG), "config_missing", checkpoint.CONFIG),
        (raw(checkpoint.CONFIG, b"[]"), "config_invalid", checkpoint.CONFIG),
        (raw(checkpoint.CONFIG, b"\xff"), "config_invalid", checkpoint.CONFIG),
        (raw(checkpoint.CONFIG, b"\xef\xbb\xbf{}"), "config_has_bom", checkpoint.CONFIG),
    ],
)
def test_what_is_wrong_is_named(model, change, reason, named):
    change(model)
    report = inspect(model)
    assert problems(report) == {reason}
    assert named in messages(report, reason)


def test_infinity_is_what_engines_accept(model):
    (model / checkpoint.CONFIG).write_bytes(b'{"limit": Infinity}')
    assert problems(inspect(model)) == set()


@pytest.mark.parametrize("total", [None, "4000", True, -1, 4000.5])
def test_a_useless_total_is_no_bound(model, total):
    index({"metadata": {"total_size": total}, "weight_map": {"a": SHARDS[0]}})(model)
    report = inspect(model)
    assert problems(report) == set()
    assert "no index states a total" in messages(report, "shards_present")


def test_a_float_total_counts(model):
    index({"metadata": {"total_size": 4e9}, "weight_map": {"a": SHARDS[0]}})(model)
    assert problems(inspect(model)) == {"shards_too_small"}


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["model.safetensors"], None),
        (["other.safetensors"], None),
        (["model-00001-of-00001.safetensors"], None),
        (["model.safetensors", "consolidated.safetensors"], None),
        (["model-00001-of-00003.safetensors"], "index_missing"),
        (["a.safetensors", "b.safetensors"], "index_missing"),
        ([], "weights_missing"),
    ],
)
def test_without_an_index(model, names, reason):
    for name in [*SHARDS, checkpoint.INDEX]:
        (model / name).unlink()
    for name in names:
        (model / name).write_bytes(b"x" * 100)
    assert problems(inspect(model)) == ({reason} if reason else set())


def test_weights_are_never_opened(model, monkeypatch):
    """Without a manifest no call opens a weight file, by any name."""
    opened = []
    real_open, real_os_open = open, os.open

    def spy(path, *args, **kwargs):
        opened.append(str(path))
        return real_open(path, *args, **kwargs)

    def os_spy(path, *args, **kwargs):
        opened.append(str(path))
        return real_os_open(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", spy)
    monkeypatch.setattr(os, "open", os_spy)
    inspect(model, settings=[{"file": "config.json", "key": "a", "value": 1}])
    assert any(path.endswith(checkpoint.INDEX) for path in opened)
    assert not [path for path in opened if path.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"text_config": {"dtype": "fp8"}}, "setting_ok"),
        ({"text_config": {}}, "setting_missing"),
        ({"dtype": "fp8"}, "setting_missing"),
        ({"text_config": []}, "setting_missing"),
        ({"text_config": {"dtype": None}}, "setting_differs"),
        ({"text_config": {"dtype": "bf16"}, "dtype": "fp8"}, "setting_differs"),
    ],
)
def test_settings(model, config, reason):
    write(model, checkpoint.CONFIG, config)
    report = inspect(model, settings=[{"file": "config.json", "key": "text_config.dtype", "value": "fp8"}])
    assert [item["reason"] for item in report["results"] if item["check"] == "checkpoint_config"] == [reason]


def test_a_number_is_not_a_truth_value(model):
    write(model, checkpoint.CONFIG, {"a": 1})
    assert problems(inspect(model, settings=[{"file": "config.json", "key": "a", "value": True}])) == {
        "setting_differs"
    }


@pytest.mark.parametrize(
    ("config", "parallel", "reason"),
    [
        ({"text_config": {"num_attention_heads": 16}}, 2, "heads_divisible"),  # case 063: nested only
        ({"num_attention_heads": 16}, 2, "heads_divisible"),
        ({"num_attention_heads": 15, "text_config": {"num_attention_heads": 16}}, 2, "heads_divisible"),
        ({"text_config": {"num_attention_heads": 15}}, 2, "heads_not_divisible"),
        ({"text_config": {}}, 2, "heads_unknown"),
        ({}, 1, "heads_unknown"),
    ],
)
def test_heads_are_read_from_text_config_first(model, config, parallel, reason):
    write(model, checkpoint.CONFIG, config)
    report = inspect(model, tensor_parallel=parallel)
    assert [item["reason"] for item in report["results"] if item["check"] == "checkpoint_heads"] == [reason]


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_sidecars(model, tmp_path):
    (model / "scales.json").write_bytes(b"{}")
    (tmp_path / "elsewhere").write_bytes(b"1")
    good = [
        {"path": "scales.json", "sha256": sha(b"{}").upper()},
        {"path": str(tmp_path / "elsewhere"), "sha256": None},
    ]
    assert problems(inspect(model, sidecars=good)) == set()
    assert problems(inspect(model, sidecars=[{"path": "scales.json", "sha256": sha(b"other")}])) == {"sidecar_changed"}
    assert problems(inspect(model, sidecars=[{"path": "none.json", "sha256": sha(b"{}")}])) == {"sidecar_missing"}
    (model / "folder").mkdir()
    assert problems(inspect(model, sidecars=[{"path": "folder", "sha256": None}])) == {"sidecar_unreadable"}


@pytest.fixture
def manifest(model):
    lines = [f"{sha((model / name).read_bytes())}  {name}\n" for name in SHARDS]
    (model / "checkpoint.sha256").write_text("".join(lines))
    return model


def test_manifest_is_verified_once_and_remembered(manifest):
    assert inspect(manifest, manifest="checkpoint.sha256")["hashed"] == 2
    report = inspect(manifest, manifest="checkpoint.sha256")
    assert (report["hashed"], problems(report)) == (0, set())
    assert inspect(manifest, manifest="checkpoint.sha256", hash_policy="again")["hashed"] == 2


@pytest.mark.parametrize("what", ["mtime", "inode", "size"])
def test_a_touched_file_is_read_again(manifest, what):
    inspect(manifest, manifest="checkpoint.sha256")
    path = manifest / SHARDS[0]
    status = path.stat()
    if what == "mtime":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    else:
        content = path.read_bytes() + (b"x" if what == "size" else b"")
        (manifest / "new").write_bytes(content)
        (manifest / "new").replace(path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    report = inspect(manifest, manifest="checkpoint.sha256")
    assert report["hashed"] == 1
    assert problems(report) == ({"manifest_changed"} if what == "size" else set())


def test_a_changed_byte_is_found_and_stays_found(manifest):
    content = bytearray((manifest / SHARDS[1]).read_bytes())
    content[100] ^= 1
    (manifest / SHARDS[1]).write_bytes(content)
    for hashed in (2, 0):
        report = inspect(manifest, manifest="checkpoint.sha256")
        assert (report["hashed"], problems(report)) == (hashed, {"manifest_changed"})
        assert SHARDS[1] in messages(report, "manifest_changed")


def test_a_new_manifest_is_compared_with_what_is_remembered(manifest):
    inspect(manifest, manifest="checkpoint.sha256")
    (manifest / "checkpoint.sha256").write_text(f"{sha(b'other')}  {SHARDS[0]}\n")
    report = inspect(manifest, manifest="checkpoint.sha256")
    assert (report["hashed"], problems(report)) == (0, {"manifest_changed"})


def test_a_start_reads_nothing_and_says_so(manifest):
    report = inspect(manifest, manifest="checkpoint.sha256", hash_policy="remembered")
    assert (report["hashed"], problems(report)) == (0, {"manifest_not_verified"})
    assert {item["status"] for item in report["results"]} == {"pass", "unknown"}
    inspect(manifest, manifest="checkpoint.sha256")
    assert problems(inspect(manifest, manifest="checkpoint.sha256", hash_policy="remembered")) == set()


def test_dry_run_reads_but_does_not_remember(manifest):
    assert inspect(manifest, manifest="checkpoint.sha256", remember=False)["hashed"] == 2
    assert not (manifest.parent / "state").exists()


def test_unwritable_state_is_a_warning(manifest, tmp_path):
    (tmp_path / "blocked").write_text("a file, not a directory")
    report = inspect(manifest, manifest="checkpoint.sha256", state_directory=str(tmp_path / "blocked"))
    assert problems(report) == {"digests_not_remembered"}


@pytest.mark.parametrize(
    "content", ["", "{", '{"schema": 2}', '{"schema": 1, "files": []}', '{"schema":1,"files":{"a":1}}']
)
def test_garbled_state_is_ignored(manifest, content):
    inspect(manifest, manifest="checkpoint.sha256")
    state = checkpoint_dir.state_file(str(manifest), str(manifest.parent / "state"))
    Path(state).write_text(content)
    assert inspect(manifest, manifest="checkpoint.sha256")["hashed"] == 2


def test_json_manifest_names_wrong_sizes_without_reading(model):
    files = {name: {"sha256": sha((model / name).read_bytes()), "size": 2048} for name in SHARDS}
    write(model, "manifest.json", {"revision": "abc", "files": files})
    assert problems(inspect(model, manifest="manifest.json")) == set()
    files[SHARDS[0]]["size"] = 2049
    write(model, "manifest.json", {"revision": "abc", "files": files})
    report = inspect(model, manifest="manifest.json", hash_policy="again")
    assert (report["hashed"], problems(report)) == (1, {"manifest_wrong_size"})
    assert f"{SHARDS[0]} (2048 bytes, expected 2049)" in messages(report, "manifest_wrong_size")
    assert "revision abc" in messages(report, "manifest_wrong_size")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"files": []}', {"bad_manifest"}),
        (b"{", {"bad_manifest"}),
        (b'{"files": {}}', {"manifest_empty"}),
        (b"", {"manifest_empty"}),
        (b'{"files": {"a": {"sha256": "00"}}}', {"manifest_malformed", "manifest_empty"}),
        (b"garbage\n", {"manifest_malformed", "manifest_empty"}),
        (b"0" * 64 + b"  ../outside\n", {"manifest_malformed", "manifest_empty"}),
        (b"0" * 64 + b"  gone.safetensors\n", {"manifest_missing_files"}),
        (b"0" * 64 + b"  ./config.json\n", {"manifest_changed"}),
    ],
)
def test_bad_manifests(model, content, expected):
    (model / "sums").write_bytes(content)
    assert problems(inspect(model, manifest="sums")) == expected


def test_an_edited_file_is_its_original_plus_the_settings(model):
    setting = {"file": "config.json", "key": "text_config.dtype", "value": "fp8"}
    (model / "sums").write_text(f"{sha((model / 'config.json').read_bytes())}  config.json\n")
    checkpoint_edit.set_key(str(model), setting["key"], setting["value"])
    assert problems(inspect(model, manifest="sums", settings=[setting])) == set()
    assert problems(inspect(model, manifest="sums")) == {"manifest_edited"}
    (model / "config.json").write_bytes((model / "config.json").read_bytes() + b"\n")
    assert problems(inspect(model, manifest="sums", settings=[setting])) == {"manifest_changed"}
    (model / ("config.json" + checkpoint.BACKUP_SUFFIX)).write_bytes(b"{}")
    assert problems(inspect(model, manifest="sums")) == {"manifest_changed"}


def test_missing_manifest(model):
    assert problems(inspect(model, manifest="none")) == {"manifest_missing"}


def test_free_space(model):
    assert problems(inspect(model, min_free_bytes=1)) == set()
    assert problems(inspect(model, min_free_bytes=1 << 60)) == {"free_space_low"}
    assert problems(inspect(model, min_free_bytes=1, free_space_path="/none/such")) == set()


def test_bad_policy(model):
    with pytest.raises(UsageError):
        inspect(model, hash_policy="maybe")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can test for another user")


def test_unknown_user(model):
    assert problems(inspect(model, user="no-such-user")) == {"user_unknown"}
    report = inspect(model, user="no-such-user", absent_is_unknown=True)
    assert [item["status"] for item in report["results"] if item["reason"] == "user_unknown"] == ["unknown"]


def open_to_all(model):
    for parent in [model, *model.parents]:
        if not parent.stat().st_mode & 0o001:
            parent.chmod(0o755)


@needs_root
def test_readable_by_the_service_user(model):
    open_to_all(model)
    assert problems(inspect(model, user="nobody")) == set()
    (model / SHARDS[0]).chmod(0o600)
    report = inspect(model, user="nobody")
    assert problems(report) == {"not_readable_by_user"}
    assert SHARDS[0] in messages(report, "not_readable_by_user")
    (model / SHARDS[0]).chmod(0o644)
    (model / "private.log").write_text("not for the engine")
    (model / "private.log").chmod(0o600)
    assert problems(inspect(model, user="nobody")) == set()
    model.parent.chmod(0o700)
    assert problems(inspect(model, user="nobody")) == {"not_readable_by_user"}


@needs_root
def test_links_into_a_private_directory_are_not_readable(model, tmp_path):
    open_to_all(model)
    private = tmp_path / "blobs"
    private.mkdir(mode=0o700)
    (model / SHARDS[0]).replace(private / "blob")
    (model / SHARDS[0]).symlink_to(private / "blob")
    assert problems(inspect(model, user="nobody")) == {"not_readable_by_user"}
    private.chmod(0o755)
    assert problems(inspect(model, user="nobody")) == set()


def test_hash_files_reports_errors_and_hashes_the_rest(tmp_path):
    content = os.urandom(hashing.CHUNK * 2 + 17)
    (tmp_path / "good").write_bytes(content)
    (tmp_path / "empty").write_bytes(b"")
    os.mkfifo(tmp_path / "fifo")
    names = ["good", "empty", "fifo", "gone", "."]
    found = hashing.hash_files([(name, str(tmp_path / name)) for name in names], workers=2)
    assert found["good"].sha256 == sha(content)
    assert found["good"].stamp == hashing.stamp_of((tmp_path / "good").stat())
    assert found["empty"].sha256 == sha(b"")
    assert found["gone"].error == "No such file or directory"
    assert found["fifo"].error == found["."].error == "not a regular file"


def test_a_file_that_grows_while_it_is_read_has_no_hash(tmp_path, monkeypatch):
    path = tmp_path / "growing"
    path.write_bytes(b"x" * 10)
    real = os.readv

    def readv(descriptor, buffers):
        with open(path, "ab") as handle:
            handle.write(b"y")
        return real(descriptor, buffers)

    monkeypatch.setattr(os, "readv", readv)
    found = hashing.hash_file(str(path))
    assert (found.sha256, found.error) == ("", "changed while it was read")


def test_hash_files_hands_over_what_its_callback_raises(tmp_path):
    (tmp_path / "f").write_bytes(b"x")

    def done(_name, _digest):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        hashing.hash_files([("f", str(tmp_path / "f"))] * 10, workers=2, done=done)
