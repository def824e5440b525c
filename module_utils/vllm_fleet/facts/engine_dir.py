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
    """Describe an installed engine. A vendor's engine has no venv: it lies in its SDK and runs on the system's Python.

    Returns ``{"root", "python", "site_packages", "package", "tree_package"}`` (whether each is there; ``python`` means
    an executable), ``{"console_script": {"path", "exists", "executable", "interpreter"}}``, ``{"venv_version"}``
    from ``pyvenv.cfg`` and ``{"distributions": {name: version}}`` for the packages that matter to the checks.
    """
    site, tree, venv = engine["site_packages"], engine.get("tree"), engine.get("venv")
    script = os.path.join(venv, "bin/vllm") if venv else None
    version = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+)", _venv_config(engine, root), re.MULTILINE)
    return {
        "root": os.path.isdir(under(root, engine["root"])),
        "python": _executable(under(root, engine["python"])),
        "site_packages": os.path.isdir(under(root, site)),
        "package": os.path.isfile(under(root, os.path.join(site, "vllm/__init__.py"))),
        "tree_package": os.path.isfile(under(root, os.path.join(tree, "vllm/__init__.py"))) if tree else None,
        "console_script": {
            "path": script,
            "exists": bool(script) and os.path.isfile(under(root, str(script))),
            "executable": bool(script) and _executable(under(root, str(script))),
            "interpreter": script_interpreter(script, root) if script else None,
        },
        "venv_version": version.group(1) if version else None,
        "distributions": distributions(site, ("vllm", "torch", "pynvml", "nvidia-ml-py"), root),
    }


def script_interpreter(path: str, root: str = "/") -> Optional[str]:
    """Return the interpreter that a script names in its first line, ``None`` for what is no script.

    Installers give long paths in a second line, behind a first one for ``/bin/sh``: a kernel reads only 127 characters.
    """
    try:
        with open(under(root, path), "rb") as handle:
            lines = handle.read(4096).decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    if not lines or not lines[0].startswith("#!") or not lines[0][2:].split():
        return None
    interpreter = lines[0][2:].split()[0]
    if os.path.basename(interpreter) == "sh" and len(lines) > 1:
        found = re.match(r"""'''exec' (?:"([^"]+)"|([^" ]+)) """, lines[1])
        if found:
            return found.group(1) or found.group(2)
    return interpreter


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
    added: List[str] = []
    mapping: Dict[str, str] = {}
    if engine.get("venv"):
        added, mapping = _path_files(engine["site_packages"], root)
        search += [("site_packages", [engine["site_packages"]]), ("editable", added)]
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
    """Look where a venv only looks when it was made with system site-packages, and the system's Python always."""
    if engine.get("venv") and "include-system-site-packages = true" not in _venv_config(engine, root).lower():
        return None, ""
    version = os.path.basename(os.path.dirname(engine["site_packages"]))
    if not re.match(r"python3\.\d+\Z", version):
        version = "python3.*"
    base = env.get("PYTHONUSERBASE") or (os.path.join(home, ".local") if home else "")
    places: List[Tuple[str, str]] = []
    if base and env.get("PYTHONNOUSERSITE", "") == "":
        places += [("user_site", path) for path in _matching(os.path.join(base, "lib", version, "site-packages"), root)]
    for pattern in (f"/usr/local/lib/{version}/dist-packages", "/usr/lib/python3/dist-packages"):
        places += [("system", path) for path in _matching(pattern, root)]
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


def _venv_config(engine: Dict[str, Any], root: str) -> str:
    """Return the text of the venv's ``pyvenv.cfg``, empty without one."""
    venv = engine.get("venv")
    return (read_text(under(root, os.path.join(venv, "pyvenv.cfg"))) or "") if venv else ""


def _matching(pattern: str, root: str) -> List[str]:
    """Return the directories that match a pattern, as seen below ``root``."""
    prefix = "" if root == "/" else root.rstrip("/")
    return sorted(path[len(prefix) :] for path in glob.glob(glob.escape(prefix) + pattern))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _listing(directory: str) -> List[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _executable(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)
