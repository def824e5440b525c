"""Making an engine's lock: every wheel that it needs, by name, version and hash."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from .settings import ROOT
from .shell import LabError, phase, run

CATALOG = ROOT / "catalog" / "engines"


def make(
    engine: str, uv: str, requirements: Path | None = None, find_links: Sequence[Path] = (), glibc: int = 34
) -> Path:
    """Write ``catalog/engines/<engine>.lock`` anew and return its path.

    Without ``requirements`` the index's newest fitting versions are taken. A file of exact versions without hashes, as
    releases often have, is kept as it is, and only the hashes and the entry's build tools are added.

    :param uv: path of the uv program.
    :param glibc: minor version of the oldest glibc that the wheels have to run on.
    :raises LabError: there is no such entry, it has no wheels, or uv failed.
    """
    entry_file, target = CATALOG / f"{engine}.yml", CATALOG / f"{engine}.lock"
    if not entry_file.is_file():
        known = ", ".join(sorted(path.stem for path in CATALOG.glob("*.yml")))
        raise LabError(f"no engine {engine!r} in the catalog; there are {known}")
    entry = yaml.safe_load(entry_file.read_text())
    install = entry.get("install", {})
    if entry["route"] == "vendor":
        raise LabError(f"engine {engine} is its vendor's; nothing is installed, so there is nothing to lock")
    if requirements is None and "requirement" not in install:
        raise LabError(
            f"engine {engine} names no requirement. Fix: give the versions of its release: R=requirements.txt"
        )
    wanted = requirements.read_text() if requirements else install["requirement"] + "\n"
    wanted = wanted.rstrip("\n") + "\n" + "".join(line + "\n" for line in install.get("build_tools", []))
    argv = [uv, "pip", "compile", "--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--quiet"]
    argv += ["--no-emit-find-links", "--only-binary=:all:", "--upgrade", f"--python-version={entry['python_version']}"]
    argv += [f"--python-platform=x86_64-manylinux_2_{glibc}", *(f"--find-links={path}" for path in find_links)]
    if requirements:
        argv.append("--no-deps")
    with tempfile.TemporaryDirectory() as folder, phase(f"locking {engine}"):
        (Path(folder) / "in.txt").write_text(wanted)
        (Path(folder) / "overrides.txt").write_text("".join(line + "\n" for line in install.get("overrides", [])))
        output = Path(folder) / "out.lock"
        argv += [f"--overrides={folder}/overrides.txt", f"--output-file={output}", f"{folder}/in.txt"]
        run(argv, timeout=900)
        target.write_text(
            f"# Every wheel of {engine} with its hashes. Made by `make engine-lock E={engine}`; don't edit.\n"
            + output.read_text()
        )
    return target
