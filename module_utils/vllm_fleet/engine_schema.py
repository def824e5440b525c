"""The shape of a catalog entry's ``install`` section: what an engine is made of, by its route."""

from __future__ import annotations

from typing import Any, Dict, Mapping

from .errors import UsageError
from .schema import Choice, Integer, ListOf, MapOf, Record, Shape, Text, Where

_sha256 = Text(r"[0-9a-f]{64}", "a SHA-256 in 64 lower-case hexadecimal digits")
_commit = Text(r"[0-9a-f]{40}", "a full git hash in 40 lower-case hexadecimal digits; a tag or a short hash can move")
_file = Text(r"[A-Za-z0-9][A-Za-z0-9._+-]*", "a file name without directories")
_url = Text(r"https://.+", "an address that begins with https://")
_inside = Text(r"(?!/)(?!.*(^|/)\.\.(/|$)).+", "a path inside the tree")
_exact = Text(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+_-]+", "an exact requirement such as setuptools==80.10.2")
_version = Text(r"[0-9]+(\.[0-9]+)*([.+a-z0-9]*)", 'a version as text, such as "2.13.0" (in quotes)')
_release = Text(r"[0-9]+\.[0-9]+", 'a CUDA release as text, such as "13.0" (in quotes)')

#: keys of every route that has a venv
_common: Dict[str, Shape] = {
    "torch": _version,
    "torch_cuda": _release,
    "nvcc": _release,
    "pins": MapOf(_version, r"[A-Za-z0-9._-]+", "the name of a package"),
    "overrides": ListOf(Text()),
    "system_packages": ListOf(Text()),
    "disk_gib": Integer(1, 1024),
}
_defaults: Dict[str, Any] = {"pins": {}, "overrides": [], "system_packages": [], "disk_gib": 4}

_products = Record(
    {
        "route": Choice("tarball", "wheel", "compile"),
        "paths": ListOf(_inside, minimum=1),
        "tarball": Record(
            {"file": _file, "sha256": _sha256, "url": _url, "files": Integer(1)}, required=("file", "sha256")
        ),
        "wheel": Record({"requirement": _exact, "sha256": _sha256}, required=("requirement", "sha256")),
        "own": MapOf(_sha256, r"(?!/)[^\0]+", "a path inside the tree"),
        "compile": Record(
            {
                "targets": MapOf(_inside, r"[A-Za-z0-9_.-]+", "the name of a CMake target"),
                "architectures": ListOf(Text(r"[0-9]+\.[0-9]+a?", 'a compute capability such as "8.6"'), minimum=1),
                "definitions": MapOf(Text(), r"[A-Z][A-Za-z0-9_]*", "the name of a CMake variable"),
                "cmake": _release,
                "gib_per_job": Integer(1, 64),
            },
            required=("targets",),
            defaults={"architectures": [], "definitions": {}, "cmake": "3.26", "gib_per_job": 4},
        ),
    },
    required=("route", "paths"),
    defaults={"own": {}},
)

_routes: Dict[str, Record] = {
    "wheel": Record(
        {**_common, "requirement": _exact},
        required=("requirement",),
        defaults=_defaults,
    ),
    "git": Record(
        {
            **_common,
            "repository": Text(r"(https|ssh|file)://.+|/.+", "an address of a git repository, or its path"),
            "base": Record({"tag": Text(), "commit": _commit}, required=("commit",)),
            "bundle": Record(
                {
                    "file": _file,
                    "sha256": _sha256,
                    "ref": Text(r"refs/.+", "a full ref such as refs/heads/x"),
                    "url": _url,
                },
                required=("file", "sha256", "ref"),
            ),
            "patches": ListOf(Record({"file": _file, "sha256": _sha256, "url": _url}, required=("file", "sha256"))),
            "commit": _commit,
            "tree": _commit,
            "products": _products,
            "editable": MapOf(Text(), r"[A-Z][A-Z0-9_]*", "the name of a variable"),
            "build_tools": ListOf(_exact),
        },
        required=("repository", "base", "tree", "products"),
        defaults={**_defaults, "patches": [], "editable": {}, "build_tools": [], "disk_gib": 12},
    ),
    "vendor": Record(
        {"versions": MapOf(_version, r"[A-Za-z0-9._-]+", "the name of a package")}, required=("versions",)
    ),
}


def check_install(engine: Mapping[str, Any], where: Where) -> Dict[str, Any]:
    """Return the ``install`` section of a validated entry with its defaults.

    :raises UsageError: ``bad_schema`` or ``unknown_key``, naming the place.
    """
    install: Dict[str, Any] = _routes[engine["route"]].check(engine.get("install") or {}, where.at("install"))
    if engine["route"] == "git":
        _check_source(install, where.at("install"))
        _check_products(install["products"], where.at("install").at("products"))
    return install


def _check_source(install: Mapping[str, Any], where: Where) -> None:
    """A bundle brings a commit, patches bring only a tree; both at once would leave open which comes first."""
    if bool(install.get("bundle")) == bool(install["patches"]):
        raise UsageError("bad_schema", f"{where}: give either a bundle or patches.")
    if install.get("bundle") and "commit" not in install:
        raise UsageError("bad_schema", f"{where}: found no key 'commit', which a bundle needs.")
    if install["patches"] and "commit" in install:
        raise UsageError("bad_schema", f"{where}: commit belongs to a bundle; patches are asserted by the tree alone.")


def _check_products(products: Mapping[str, Any], where: Where) -> None:
    route = products["route"]
    needed = ["wheel", "compile"] if route == "compile" else [route]
    for key in needed:
        if key not in products:
            raise UsageError("bad_schema", f"{where}: found no key {key!r}, which the route {route} needs.")
