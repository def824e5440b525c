"""Engine adapter: what an engine directory holds, and where ``import vllm`` would land, without importing anything."""

from __future__ import annotations

import ast
import glob
import os
import re
from typing import Any, Dict, List, Optional, Sequence, Tuple

from .host import read_text, under

#: extensions that make a single file importable
_MODULE_SUFFIXES = (".py", ".pyc", ".so")


def read(engine: Dict[str, Any], root: str = "/") -> Dict[str, Any]:
    """Describe an installed engine.

    Returns ``{"root", "python", "package", "tree_package"}`` (whether each is there; ``python`` means an executable),
    ``{"console_script": {"exists", "executable", "interpreter"}}``, ``{"venv_version": "3.11"}`` from ``pyvenv.cfg``
    and ``{"distributions": {name: version}}`` for the packages that matter to the checks.
    """
    script = os.path.join(engine["venv"], "bin/vllm")
    real_script = under(root, script)
    first = (_first_line(real_script) or "")[:512]
    site = engine["site_packages"]
    tree = engine.get("tree")
    config = read_text(under(root, os.path.join(engine["venv"], "pyvenv.cfg"))) or ""
    version = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+)", config, re.MULTILINE)
    return {
        "root": os.path.isdir(under(root, engine["root"])),
        "python": _executable(under(root, engine["python"])),
        "site_packages": os.path.isdir(under(root, site)),
        "package": os.path.isfile(under(root, os.path.join(site, "vllm/__init__.py"))),
        "tree_package": os.path.isfile(under(root, os.path.join(tree, "vllm/__init__.py"))) if tree else None,
        "console_script": {
            "path": script,
            "exists": os.path.isfile(real_script),
            "executable": _executable(real_script),
            "interpreter": first[2:].split()[0] if first.startswith("#!") and first[2:].split() else None,
        },
        "venv_version": version.group(1) if version else None,
        "system_site_packages": "include-system-site-packages = true" in config.lower(),
        "distributions": distributions(site, ("vllm", "torch", "pynvml", "nvidia-ml-py"), root),
    }


def distributions(site_packages: str, names: Sequence[str], root: str = "/") -> Dict[str, str]:
    """Return the installed version of each named distribution, read from the names of its metadata directories."""
    wanted = {_normal(name): name for name in names}
    result: Dict[str, str] = {}
    for entry in _listing(under(root, site_packages)):
        found = re.match(r"^(.+?)-([^-]+)\.(?:dist-info|egg-info)$", entry)
        if found and _normal(found.group(1)) in wanted:
            result[wanted[_normal(found.group(1))]] = found.group(2)
    return result


def import_origin(
    package: str,
    engine: Dict[str, Any],
    *,
    workdir: str,
    env: Dict[str, str],
    home: Optional[str],
    root: str = "/",
) -> Dict[str, Any]:
    """Resolve ``import package`` as the unit's Python would, over directories and names only.

    The order is Python's: the working directory (the engine also starts helpers with ``python -m``, so it counts even
    when the entry is the console script), PYTHONPATH, the venv's site-packages with what its ``.pth`` files and
    editable finders add, the user's site directory when the venv lets it in, the system's ``dist-packages`` likewise.

    :returns: ``{"origin": path or None, "source": "workdir|pythonpath|site_packages|editable|user_site|system",
        "shadowing": [names in the working directory that hide a module of the venv]}``. A directory without
        ``__init__.py`` hides nothing: Python only takes it when no real package follows.
    """
    search = [("workdir", [workdir])] if env.get("PYTHONSAFEPATH", "") == "" else []
    search.append(("pythonpath", [entry or workdir for entry in _path_entries(env.get("PYTHONPATH", ""))]))
    search.append(("site_packages", [engine["site_packages"]]))
    added, mapping = _path_files(engine["site_packages"], root)
    search.append(("editable", added))
    for source, directories in search:
        for directory in directories:
            absolute = directory if os.path.isabs(directory) else os.path.join(workdir, directory)
            origin = _locate(absolute, package, root)
            if origin:
                return {"origin": origin, "source": source, "shadowing": _shadowing(engine, workdir, env, root)}
    origin, source = mapping.get(package), "editable"
    if origin is None or not os.path.exists(under(root, os.path.join(origin, "__init__.py"))):
        origin, source = _outside(package, engine, env, home, root)
    return {
        "origin": origin,
        "source": source if origin else None,
        "shadowing": _shadowing(engine, workdir, env, root),
    }


def _outside(
    package: str, engine: Dict[str, Any], env: Dict[str, str], home: Optional[str], root: str
) -> Tuple[Optional[str], str]:
    """Look where a venv only looks when it was made with system site-packages."""
    config = (read_text(under(root, os.path.join(engine["venv"], "pyvenv.cfg"))) or "").lower()
    if "include-system-site-packages = true" not in config:
        return None, ""
    version = os.path.basename(os.path.dirname(engine["site_packages"]))
    base = env.get("PYTHONUSERBASE") or (os.path.join(home, ".local") if home else "")
    places: List[Tuple[str, str]] = []
    if base and env.get("PYTHONNOUSERSITE", "") == "":
        places.append(("user_site", os.path.join(base, "lib", version, "site-packages")))
    places += [("system", f"/usr/local/lib/{version}/dist-packages"), ("system", "/usr/lib/python3/dist-packages")]
    for source, directory in places:
        origin = _locate(directory, package, root)
        if origin:
            return origin, source
    return None, ""


def _shadowing(engine: Dict[str, Any], workdir: str, env: Dict[str, str], root: str) -> List[str]:
    """Return the modules in the working directory that would be imported in place of the venv's own."""
    if env.get("PYTHONSAFEPATH", "") != "":
        return []
    installed = {entry.split(".")[0] for entry in _listing(under(root, engine["site_packages"]))}
    names = {entry.split(".")[0] for entry in _listing(under(root, workdir))}
    return sorted(name for name in names & installed if name.isidentifier() and _locate(workdir, name, root))


def _locate(directory: str, package: str, root: str) -> Optional[str]:
    """Return the package's directory or module file inside ``directory``, or ``None``."""
    real = under(root, os.path.join(directory, package))
    if os.path.isfile(os.path.join(real, "__init__.py")):
        return os.path.join(directory, package)
    for suffix in _MODULE_SUFFIXES:
        if os.path.isfile(real + suffix):
            return os.path.join(directory, package) + suffix
    for name in glob.glob(glob.escape(real) + ".*.so"):
        return os.path.join(directory, os.path.basename(name))
    return None


def _path_entries(value: str) -> List[str]:
    """Split PYTHONPATH; an empty element means the working directory, an empty value means nothing."""
    return value.split(":") if value else []


def _path_files(site_packages: str, root: str) -> Tuple[List[str], Dict[str, str]]:
    """Return what ``.pth`` files add to the path, and the package directories that editable finders map."""
    added: List[str] = []
    mapping: Dict[str, str] = {}
    for entry in sorted(_listing(under(root, site_packages))):
        if entry.endswith(".pth"):
            for line in (read_text(under(root, os.path.join(site_packages, entry))) or "").splitlines():
                text = line.strip()
                if text and not text.startswith(("#", "import ", "import\t")):
                    added.append(text if os.path.isabs(text) else os.path.join(site_packages, text))
        elif entry.startswith("__editable__") and entry.endswith("_finder.py"):
            source = read_text(under(root, os.path.join(site_packages, entry))) or ""
            found = re.search(r"^MAPPING\b[^=]*=\s*(\{.*\})\s*$", source, re.MULTILINE)
            try:
                table = ast.literal_eval(found.group(1)) if found else {}
            except (ValueError, SyntaxError):
                table = {}
            mapping.update({str(name): str(path) for name, path in table.items()})
    return added, mapping


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _listing(directory: str) -> List[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _executable(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def _first_line(path: str) -> Optional[str]:
    try:
        with open(path, "rb") as handle:
            return handle.readline(1024).decode("utf-8", "replace")
    except OSError:
        return None
