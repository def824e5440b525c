"""The engines of a box: which are there, which are in use, and how one appears or goes as a whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from typing import Any, Dict, List, Mapping, Optional, Set

from . import engines, files, release
from .errors import FleetError, RefusedError
from .facts import engine_dir, host
from .source_files import verified

PARTIAL = ".partial-"
#: an engine on its way out is renamed first, so that none is ever half removed under its own name
GONE = ".gone-"


def manifest_of(path: str) -> Optional[Dict[str, Any]]:
    """Return the manifest of an installed engine, or None when there is no whole engine."""
    try:
        manifest = files.read_json(os.path.join(path, "manifest.json"), "manifest")
    except FleetError:
        return None
    return manifest if isinstance(manifest, dict) and "id" in manifest else None


def look(root: str, entry: Mapping[str, Any]) -> Optional[str]:
    """Return the version of an installed engine, None when it is absent.

    :raises RefusedError: ``engine_differs``, ``foreign_directory``, ``vendor_engine_missing`` or
        ``vendor_version_differs``.
    """
    if entry.get("route") == "vendor":
        return _look_vendor(entry)
    path = os.path.join(root, entry["id"])
    manifest = manifest_of(path)
    if not manifest:
        if os.path.isdir(path) and os.listdir(path):
            raise RefusedError(
                "foreign_directory",
                f"{path} is there, has no manifest and was not installed by this project",
                "move it away; it was left as it is",
            )
        return None
    wanted = entry.get("accepts") or [entry.get("digest")]
    if entry.get("digest") and manifest.get("digest") not in wanted:
        raise RefusedError(
            "engine_differs",
            f"engine {entry['id']} is installed, but from other inputs (digest {manifest.get('digest')}, the catalog "
            f"gives {entry['digest']}); an installed engine is never edited",
            "give the catalog entry a new id",
        )
    version: str = manifest["version"]
    return version


def _look_vendor(entry: Mapping[str, Any]) -> str:
    """A vendor's engine is used where its SDK put it, if it is what the catalog says; nothing is installed over it."""
    site = entry["site_packages"]
    if not os.path.isdir(site):
        raise RefusedError(
            "vendor_engine_missing", f"engine {entry['id']}: there is no {site}", "install the vendor's SDK on the box"
        )
    found = engine_dir.distributions(site, list(entry["versions"]))
    for name, wanted in entry["versions"].items():
        if found.get(name) != wanted:
            raise RefusedError(
                "vendor_version_differs",
                f"engine {entry['id']}: {name} in {site} is {found.get(name) or 'absent'}, the catalog wants {wanted}",
                "install the SDK release that the catalog names, or name the engine that is there",
            )
    return str(found.get("vllm", entry["version"]))


def in_use(lanes_root: str = release.LANES, runtime: str = release.RUNTIME) -> Set[str]:
    """Return the ids of the engines that a lane runs, would start, or would go back to."""
    used: Set[str] = set()
    for lane in _listing(lanes_root):
        home = os.path.join(lanes_root, lane)
        started = (host.read_text(os.path.join(runtime, lane, "release")) or "").strip()
        for name in ("current", "previous", *([os.path.join("releases", started)] if started else [])):
            with contextlib.suppress(OSError):
                used.add(os.path.basename(os.readlink(os.path.join(home, name, "engine"))))
    return used


def clear_leftovers(root: str) -> None:
    """Remove what an interrupted installation or pruning left behind."""
    for name in _listing(root):
        if name.startswith((PARTIAL, GONE)):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)


def prunable(root: str, wanted: List[str], keep: int, used: Optional[Set[str]] = None) -> List[str]:
    """Return the ids of the engines that may go, oldest first."""
    ages = {}
    for name in _listing(root):
        if not name.startswith(".") and manifest_of(os.path.join(root, name)):
            ages[name] = os.stat(os.path.join(root, name)).st_mtime
    used = in_use() if used is None else used
    return engines.removable(sorted(ages, key=lambda name: ages[name]), [*wanted, *used], keep)


def remove(root: str, name: str) -> None:
    """Take an engine away: first its name, then its files."""
    away = os.path.join(root, GONE + name)
    os.rename(os.path.join(root, name), away)
    files.fsync_directory(root)
    shutil.rmtree(away)


def install(root: str, entry: Mapping[str, Any]) -> str:
    """Unpack a verified archive beside the other engines and let the engine appear by one rename; return its version.

    :param entry: ``id``, ``digest``, ``archive``, ``sha256``, optionally ``unpacked_bytes`` and ``accepts``.
    :raises RefusedError: ``archive_damaged``, ``disk_too_small``, ``unpack_failed``, ``wrong_archive``, ``no_python``.
    """
    archive, name = entry["archive"], entry["id"]
    verified(archive, entry["sha256"], "archive_damaged", own=True)
    needed = int(int(entry.get("unpacked_bytes") or 0) * 1.05)
    engines.check_room(needed, shutil.disk_usage(root).free, f"engine {name}", root)
    partial = tempfile.mkdtemp(prefix=PARTIAL, dir=root)
    try:
        # zstd writes into tar's pipe: the unpacked tar never lies on the disk
        argv = ["tar", "--extract", "--use-compress-program=zstd -T0 -q", "--file", archive, "--directory", partial]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RefusedError("unpack_failed", f"archive {archive} does not unpack: {done.stderr.strip()[-400:]}")
        manifest = manifest_of(partial)
        accepted = entry.get("accepts") or [entry["digest"]]
        if not manifest or manifest["digest"] not in accepted or manifest["id"] != name:
            raise RefusedError("wrong_archive", f"archive {archive} holds {manifest}, expected engine {name}")
        if not os.access(manifest["interpreter"], os.X_OK):
            raise RefusedError(
                "no_python",
                f"engine {name} was built for {manifest['interpreter']}, which is not on this box",
                "install it (toolchain_python), or name another (engine_interpreters)",
            )
        os.chmod(partial, 0o755)
        files.fsync_directory(partial)
        os.rename(partial, os.path.join(root, name))
        files.fsync_directory(root)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    forget_archive(archive)
    return str(manifest["version"])


def forget_archive(archive: str) -> None:
    """Remove the archive of an engine that is installed; the builder has its description beside it."""
    for path in (archive, archive + ".json"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _listing(directory: str) -> List[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
