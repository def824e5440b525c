"""Files that an engine is made from: found where a person put them, or downloaded, and never used unverified."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import os
import shutil
import urllib.error
import urllib.request
from typing import Mapping, Optional, Sequence

from .errors import RefusedError
from .facts.hashing import hash_file

#: seconds without a byte after which a download is given up
TIMEOUT_S = 60.0


def sha256(path: str) -> str:
    """Return a file's SHA-256.

    :raises RefusedError: ``unreadable_file``.
    """
    digest = hash_file(path)
    if digest.error:
        raise RefusedError("unreadable_file", f"cannot read {path}: {digest.error}")
    return digest.sha256


def verified(path: str, expected: str, reason: str, own: bool) -> str:
    """Return ``path`` if it has the expected hash.

    :param own: we downloaded or unpacked it ourselves, so a wrong one is deleted; a person's file is left as it is.
    :raises RefusedError: ``reason``.
    """
    found = sha256(path)
    if found == expected:
        return path
    if own:
        os.unlink(path)
    raise RefusedError(
        reason,
        f"{path} has SHA-256 {found}, expected {expected}",
        "it was deleted; run again" if own else "replace the file and run again; it was left as it is",
    )


def provide(item: Mapping[str, str], folders: Sequence[str], cache: str, reason: str) -> str:
    """Return the path of a pinned file: from a person's folders, from the cache, or downloaded into the cache.

    A compressed ``FILE.gz`` serves as well, unpacked into the cache; the pin is that of the plain file.

    :param item: ``file``, ``sha256`` and optionally ``url``.
    :raises RefusedError: ``reason`` for a wrong hash, ``source_missing``, ``download_failed``.
    """
    os.makedirs(cache, exist_ok=True)
    name = item["file"]
    for folder in folders:
        plain = os.path.join(os.path.expanduser(folder), name)
        if os.path.isfile(plain):
            return verified(plain, item["sha256"], reason, own=False)
        if os.path.isfile(plain + ".gz"):
            return verified(_unpacked(plain + ".gz", cache, name, reason), item["sha256"], reason, own=True)
    kept = os.path.join(cache, name)
    if os.path.isfile(kept):
        return verified(kept, item["sha256"], reason, own=True)
    url = item.get("url")
    if not url:
        where = ", ".join(folders) or "no folder is given"
        raise RefusedError("source_missing", f"{name} is not there ({where})", "put it into a folder of engine_sources")
    download(url, os.path.join(cache, os.path.basename(url)))
    if url.endswith(".gz") and not name.endswith(".gz"):
        _unpacked(os.path.join(cache, os.path.basename(url)), cache, name, reason)
        os.unlink(os.path.join(cache, os.path.basename(url)))
    return verified(kept, item["sha256"], reason, own=True)


def _unpacked(packed: str, cache: str, name: str, reason: str) -> str:
    target = os.path.join(cache, name)
    try:
        with gzip.open(packed, "rb") as source, open(target + ".part", "wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (OSError, EOFError) as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target + ".part")
        raise RefusedError(reason, f"{packed} does not unpack: {error}", "replace the file and run again") from None
    os.replace(target + ".part", target)
    return target


def download(url: str, target: str, timeout: float = TIMEOUT_S) -> None:
    """Fetch ``url`` into ``target``; what an interrupted run has fetched already is kept and continued.

    :raises RefusedError: ``download_failed``.
    """
    partial = target + ".part"
    have = os.path.getsize(partial) if os.path.exists(partial) else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})  # noqa: S310
    failure: Optional[str] = None
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310 - the catalog allows https alone
            resumed = answer.status == 206
            length = answer.headers.get("Content-Length")
            with open(partial, "ab" if resumed else "wb") as out:
                shutil.copyfileobj(answer, out, 1 << 20)
                size = out.tell()
            if length is not None and size < int(length) + (have if resumed else 0):
                failure = "the connection ended early"
    except urllib.error.HTTPError as error:
        if error.code != 416:  # the part is whole already: nothing is left of that range
            failure = f"{error.code} {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        failure = str(getattr(error, "reason", error)) or type(error).__name__
    if failure:
        raise RefusedError(
            "download_failed",
            f"{url}: {failure}",
            "run again, it goes on from here; or put the file into engine_sources",
        )
    os.replace(partial, target)
