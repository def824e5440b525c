"""Tar files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tarfile
from typing import Iterator


@contextlib.contextmanager
def atomic(path: str) -> Iterator[tarfile.TarFile]:
    """Write ``path`` beside its place and rename it there when the block has ended well."""
    partial = path + ".part"
    try:
        with tarfile.open(partial, "w") as archive:
            yield archive
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def add_marker(archive: tarfile.TarFile, name: str) -> None:
    """Add an empty file as the last member: where it is, all before it was unpacked."""
    entry = tarfile.TarInfo(name)
    entry.mode = 0o644
    archive.addfile(entry)
