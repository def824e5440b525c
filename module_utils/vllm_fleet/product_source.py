"""Putting build products into a source tree: out of a stock wheel or out of a pinned tarball."""

from __future__ import annotations

import os
import shutil
import tarfile
import zipfile
from typing import Iterable, List, Mapping, Sequence

from . import engines
from .errors import RefusedError
from .source_files import sha256


def _place(tree: str, name: str) -> str:
    """Return where a member goes; its directory is made.

    :raises RefusedError: ``escapes_tree``.
    """
    path = os.path.join(tree, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    top = os.path.realpath(tree)
    if not os.path.realpath(os.path.dirname(path)).startswith(top) or ".." in name.split("/") or name.startswith("/"):
        raise RefusedError("escapes_tree", f"the product {name} leads out of the tree")
    if os.path.islink(path):
        os.unlink(path)
    return path


def from_wheel(wheel: str, tree: str, paths: Sequence[str], leave: Iterable[str] = ()) -> List[str]:
    """Extract the products that a wheel holds, with the permissions that it records; return their names.

    :param leave: products that are compiled here instead.
    :raises RefusedError: ``product_missing`` or ``products_damaged``.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names, missing = engines.selected(archive.namelist(), paths, leave)
            _refuse_missing(wheel, missing)
            for name in names:
                info = archive.getinfo(name)
                path = _place(tree, name)
                with archive.open(info) as source, open(path, "wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)
                os.chmod(path, 0o755 if (info.external_attr >> 16) & 0o100 else 0o644)
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise RefusedError("products_damaged", f"{wheel} cannot be read: {error}") from None
    return names


def from_tarball(tarball: str, tree: str, paths: Sequence[str], files: int = 0) -> List[str]:
    """Extract a tarball's products and return their names.

    :param files: how many files it must hold; 0 for any number.
    :raises RefusedError: ``product_missing``, ``products_differ`` or ``products_damaged``.
    """
    try:
        with tarfile.open(tarball) as archive:
            members = {member.name[2:] if member.name.startswith("./") else member.name: member for member in archive}
            regular = [name for name, member in members.items() if member.isreg()]
            if files and len(regular) != files:
                raise RefusedError("products_differ", f"{tarball} holds {len(regular)} files, expected {files}")
            names, missing = engines.selected(regular, paths)
            _refuse_missing(tarball, missing)
            for name in names:
                source = archive.extractfile(members[name])
                path = _place(tree, name)
                if source is not None:
                    with source, open(path, "wb") as out:
                        shutil.copyfileobj(source, out, 1 << 20)
                os.chmod(path, 0o755 if members[name].mode & 0o100 else 0o644)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise RefusedError("products_damaged", f"{tarball} cannot be read: {error}") from None
    return names


def check_own(tree: str, own: Mapping[str, str]) -> None:
    """Compare the products whose hashes the catalog names.

    :raises RefusedError: ``product_differs``, naming the file.
    """
    for name, expected in own.items():
        found = sha256(os.path.join(tree, name))
        if found != expected:
            raise RefusedError("product_differs", f"{name} has SHA-256 {found}, expected {expected}")


def _refuse_missing(archive: str, missing: Sequence[str]) -> None:
    if missing:
        raise RefusedError(
            "product_missing", f"{os.path.basename(archive)} does not hold {', '.join(missing)}",
            "correct products.paths of the catalog entry",
        )  # fmt: skip
