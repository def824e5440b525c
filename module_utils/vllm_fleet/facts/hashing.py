"""SHA-256 of many files at once, with one small buffer a thread."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

#: Bytes a read. It fits the second-level cache, so read plus hash was measured faster than hashing a mapped file.
CHUNK = 512 * 1024


class Digest(NamedTuple):
    """The hash of one file, or why there is none.

    ``sha256`` is empty when ``error`` says why. ``stamp`` is ``(size, mtime_ns, inode)`` of what was hashed.
    """

    sha256: str
    stamp: Optional[Tuple[int, int, int]] = None
    error: str = ""


def stamp_of(status: os.stat_result) -> Tuple[int, int, int]:
    """Return what a hash is remembered by: ``(size in bytes, mtime in ns, inode)``."""
    return (status.st_size, status.st_mtime_ns, status.st_ino)


def hash_file(path: str, buffer: Optional[bytearray] = None) -> Digest:
    """Hash one regular file; a problem becomes ``Digest.error``."""
    view = memoryview(buffer if buffer is not None else bytearray(CHUNK))
    try:
        # O_NONBLOCK: opening a fifo that took a file's name must not hang a start.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        return Digest("", error=getattr(error, "strerror", None) or str(error))
    try:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            return Digest("", error="not a regular file")
        digest = hashlib.sha256()
        left = before.st_size  # a file that grows meanwhile shows in its stamp, so no read just to meet the end
        while left > 0:
            count = os.readv(descriptor, [view])
            if not count:
                break
            digest.update(view[:count])
            left -= count
        if stamp_of(before) != stamp_of(os.fstat(descriptor)):
            return Digest("", error="changed while it was read")
        return Digest(digest.hexdigest(), stamp_of(before))
    except OSError as error:
        return Digest("", error=error.strerror or str(error))
    finally:
        os.close(descriptor)


def hash_files(
    files: Iterable[Tuple[str, str]],
    workers: Optional[int] = None,
    done: Optional[Callable[[str, Digest], None]] = None,
) -> Dict[str, Digest]:
    """Hash ``(key, path)`` pairs in parallel and return ``{key: Digest}``.

    hashlib lets go of the interpreter lock for each chunk, so threads use all cores. Memory is one buffer a worker.

    :param workers: threads; by default one for each CPU that this process may use, 16 at most.
    :param done: called after each file, one call at a time.
    """
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)), 16)
    pending = iter(files)
    lock = threading.Lock()
    results: Dict[str, Digest] = {}
    failures: List[BaseException] = []

    def work() -> None:
        buffer = bytearray(CHUNK)
        try:
            while not failures:
                with lock:
                    item = next(pending, None)
                if item is None:
                    return
                digest = hash_file(item[1], buffer)
                with lock:
                    results[item[0]] = digest
                    if done is not None:
                        done(item[0], digest)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt: let the threads end after their file
        failures.append(error)
        raise
    if failures:
        raise failures[0]
    return results
