"""Checks of the installed engine: it is there, whole, and nothing else answers to its name."""

from __future__ import annotations

import os
from typing import List

from .registry import Box, Finding, Lane, check, denied, fail, ok, shorten, unknown


def _absent(lane: Lane) -> Finding:
    """One missing engine is one fail, of ``engine_installed``; what depends on it can't be checked."""
    return Finding("engine_absent", f"there is no engine in {lane['engine']['root']}")


@check(
    "engine_installed",
    {
        "engine_ok": ok("interpreter, package and console script are there"),
        "engine_missing": fail("the engine's directory does not exist", absent=True),
        "python_missing": fail("the venv has no executable bin/python", absent=True),
        "package_missing": fail("neither the tree nor the venv holds the vllm package", absent=True),
        "console_script_missing": fail("the lane's entry is bin/vllm and it is absent or not executable", absent=True),
    },
)
def engine_installed(lane: Lane, box: Box) -> List[Finding]:
    """The engine's venv has an executable interpreter, the tree or the wheel holds the package, and the console
    script exists. A marker file alone proves none of this: the editable install comes after it."""
    engine, found = lane["engine"], box["engine"]
    fix = f"install the engine {engine['id']}"
    if not found["root"]:
        return [Finding("engine_missing", f"no directory {engine['root']}", f"the engine {engine['id']}", fix)]
    if not found["python"]:
        return [Finding("python_missing", f"no executable {engine['python']}", "the venv's interpreter", fix)]
    if engine.get("tree"):
        if not found["tree_package"]:
            needed = "the engine's source tree with its build products"
            return [Finding("package_missing", f"no {engine['tree']}/vllm/__init__.py", needed, fix)]
    elif not found["package"]:
        return [
            Finding(
                "package_missing", f"no vllm package in {engine['site_packages']}", f"vLLM {engine['version']}", fix
            )
        ]
    script = found["console_script"]
    if lane["entry"] and lane["entry"][0] == script["path"] and not script["executable"]:
        state = "is not executable" if script["exists"] else "does not exist"
        return [Finding("console_script_missing", f"{script['path']} {state}", "the engine's console script", fix)]
    return [Finding("engine_ok", f"{engine['id']} in {engine['root']}")]


@check(
    "interpreter",
    {
        "interpreter_ok": ok("the entry runs under the engine's own interpreter"),
        "interpreter_not_executable": fail(
            "the service user cannot run the interpreter, or the program that the unit starts"
        ),
        "entry_missing": fail("the entry's program is not found on the unit's PATH", absent=True),
        "interpreter_outside_venv": fail("the entry runs under another Python than the engine's"),
        "engine_absent": unknown("there is no engine to look at", absent=True),
        "python_version_differs": fail("the venv's Python is of another minor version than the engine's packages"),
    },
)
def interpreter(lane: Lane, box: Box) -> List[Finding]:
    """The program that the unit starts runs under the venv's Python, and the venv is of the version that its packages
    were installed for. A box used for AI has several Pythons; the first on a PATH is usually the wrong one."""
    engine, found = lane["engine"], box["engine"]
    if not found["root"]:
        return [_absent(lane)]
    program, runs, venv = box["entry_program"], box["entry_interpreter"], engine.get("venv")
    if program is None:
        text = f"{lane['entry'][0]} is not found in the unit's PATH"
        return [Finding("entry_missing", text, "the program that the unit starts", "install the engine")]
    closed = [path for path in dict.fromkeys([program, engine["python"]]) if denied(box, path, "x")]
    if closed:
        text = f"{box['user_name']} cannot run {shorten(closed)}"
        needed = "an interpreter outside private directories such as /root"
        return [Finding("interpreter_not_executable", text, needed, f"install the engine {engine['id']} again")]
    right = (
        runs.startswith(os.path.join(venv, "bin") + "/")
        if venv
        else box["entry_interpreter_real"] == box["python_real"]
    )
    if not right:
        text = f"{program} runs under {runs}" if runs != program else f"the entry runs under {runs}"
        fix = "put the engine's bin first on the lane's PATH, or name the program by its path"
        return [Finding("interpreter_outside_venv", text, engine["python"], fix)]
    version = os.path.basename(os.path.dirname(engine["site_packages"]))
    if found["venv_version"] and version.startswith("python") and version != f"python{found['venv_version']}":
        text = f"the venv is Python {found['venv_version']}, its packages lie in lib/{version}"
        return [Finding("python_version_differs", text, "one version", f"install the engine {engine['id']} again")]
    return [Finding("interpreter_ok", f"{program} runs under the engine's Python")]


@check(
    "import_origin",
    {
        "origin_ok": ok("import vllm lands in the engine"),
        "engine_absent": unknown("there is no engine to look at", absent=True),
        "import_missing": fail("nothing that import vllm would find", absent=True),
        "import_shadowed": fail("import vllm would take another copy than the engine's"),
        "workdir_shadows_packages": fail("modules in the working directory hide packages of the venv"),
    },
)
def import_origin(lane: Lane, box: Box) -> List[Finding]:
    """``import vllm`` in the unit's environment and working directory lands in the engine's tree or venv, and nothing
    in the working directory hides another package of the venv. The engine also starts helpers with ``python -m``,
    which put the working directory before everything else."""
    engine, found = lane["engine"], box["import_origin"]
    if not box["engine"]["root"]:
        return [_absent(lane)]
    if found["origin"] is None:
        return [
            Finding("import_missing", "no vllm on the import path", f"the engine {engine['id']}", "install the engine")
        ]
    expected = box["import_expected"]
    where = {"workdir": "the working directory", "pythonpath": "PYTHONPATH", "user_site": "the user's site directory"}
    place = where.get(found["source"], found["source"].replace("_", " "))
    if expected and found["origin_real"] not in expected:
        text = f"import vllm lands in {found['origin']}, by {place}"
        fix = f"remove {found['origin']}" if found["source"] in ("workdir", "user_site") else f"correct {place}"
        return [Finding("import_shadowed", text, shorten(sorted(expected)), fix)]
    if found["shadowing"]:
        text = f"{lane['workdir']} holds {shorten(found['shadowing'])}"
        return [Finding("workdir_shadows_packages", text, "an empty working directory", f"empty {lane['workdir']}")]
    return [Finding("origin_ok", f"import vllm lands in {found['origin']}")]


@check(
    "pynvml_package",
    {
        "pynvml_ok": ok("no package overwrites the NVML bindings"),
        "engine_absent": unknown("there is no engine to look at", absent=True),
        "pynvml_clash": fail("a pynvml package older than 12 overwrites the module of nvidia-ml-py"),
    },
)
def pynvml_package(lane: Lane, box: Box) -> List[Finding]:
    """The venv holds no ``pynvml`` package older than 12. Such a package installs its own, older ``pynvml.py`` over the
    module that ``nvidia-ml-py`` brings, and the engine then fails to see its GPUs."""
    if not box["engine"]["root"]:
        return [_absent(lane)]
    version = box["engine"]["distributions"].get("pynvml")
    major = version.split(".")[0] if version else ""
    if major.isdigit() and int(major) < 12:
        pip = f"{lane['engine']['python']} -m pip"
        fix = f"{pip} uninstall -y pynvml && {pip} install --force-reinstall nvidia-ml-py"
        return [Finding("pynvml_clash", f"the package pynvml {version} is in the venv", "nvidia-ml-py alone", fix)]
    return [Finding("pynvml_ok", "no old pynvml package in the venv")]
