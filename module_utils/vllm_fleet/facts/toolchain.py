"""Toolchain adapter: the compilers, headers and CUDA toolkit that the engine's first requests compile with.

Everything is looked up in the environment of the unit, not in that of a login shell.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
from typing import Any, Dict, List, Optional, Tuple

from .. import versions
from .host import can_act_as, read_text, run, under

#: what systemd gives a service that sets no PATH of its own
SYSTEMD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_PROGRAM = """#include <Python.h>
#include <new>
{include}
int main() {{
  {body}
  return *new int(0);
}}
"""


def read(
    lane: Dict[str, Any], account: Optional[Dict[str, Any]], root: str = "/", execute: bool = True
) -> Dict[str, Any]:
    """Describe the toolchain of a lane.

    Returns ``{"cuda_home", "cuda_home_source": "environment|venv|system|none", "cc", "cxx", "ninja": path or None,
    "compiler": {"family", "major"}, "python_header": path or None, "nvcc": {"path", "release", "output"},
    "cudart": {"path", "state": "ok|missing|dangling"}, "gcc_limit", "compile": {"state", "output", "user"}}``.

    :param execute: run the tools; without it (below another root) what only they can say stays ``None``.
    """
    env = environment(lane)
    home, source = cuda_home(lane, root)
    compiler_path = env.get("CXX") or "c++"
    cxx = which(compiler_path, env["PATH"], root)
    ccbin = env.get("NVCC_CCBIN")
    host_compiler = which(ccbin, env["PATH"], root) if ccbin else cxx
    facts: Dict[str, Any] = {
        "cuda_home": home,
        "cuda_home_source": source,
        "cc": which(env.get("CC") or "cc", env["PATH"], root),
        "cxx": cxx,
        # as the started processes look, and only then where none of them would
        "ninja": which("ninja", ":".join([env["PATH"], *_venv_bin(lane)]), root),
        "host_compiler": {"path": host_compiler, "family": "unknown", "major": None},
        "python_include": None,
        "python_header": None,
        "nvcc": {"path": None, "release": None, "output": ""},
        "cudart": {"path": None, "state": "missing"},
        "gcc_limit": None,
        "compile": {"state": "not_run", "output": "", "user": None},
    }
    if home:
        nvcc = os.path.join(home, "bin/nvcc")
        if os.path.isfile(under(root, nvcc)) and os.access(under(root, nvcc), os.X_OK):
            facts["nvcc"]["path"] = nvcc
        facts["cudart"] = _cudart(home, root)
        config = read_text(under(root, os.path.join(home, "include/crt/host_config.h")))
        facts["gcc_limit"] = versions.parse_gcc_limit(config) if config else None
    if not execute:
        return facts
    runner = account if can_act_as(account) else None
    if host_compiler:
        family, major = versions.parse_compiler(run([host_compiler, "--version"], runner, env)[1])
        facts["host_compiler"].update(family=family, major=major)
    if facts["nvcc"]["path"]:
        status, output = run([facts["nvcc"]["path"], "--version"], runner, env)
        facts["nvcc"].update(release=versions.parse_nvcc(output) if status == 0 else None, output=output[-300:])
    include = _python_include(lane["engine"]["python"], runner, env)
    facts["python_include"] = include
    if include and os.path.isfile(os.path.join(include, "Python.h")):
        facts["python_header"] = os.path.join(include, "Python.h")
    if facts["cxx"] and facts["python_header"]:
        facts["compile"] = dict(_compile(facts, runner, env), user=runner["name"] if runner else None)
    return facts


def _venv_bin(lane: Dict[str, Any]) -> List[str]:
    venv = lane["engine"].get("venv")
    return [os.path.join(venv, "bin")] if venv else []


def environment(lane: Dict[str, Any]) -> Dict[str, str]:
    """Return the lane's own environment with systemd's PATH below it; nothing of the caller's leaks in."""
    env = {str(name): str(value) for name, value in lane.get("env", {}).items()}
    env.setdefault("PATH", SYSTEMD_PATH)
    env.setdefault("LANG", "C.UTF-8")
    return env


def cuda_home(lane: Dict[str, Any], root: str = "/") -> Tuple[Optional[str], str]:
    """Return the toolkit directory the engine will use and where that comes from.

    CUDA_HOME of the unit, else the newest toolkit wheel of the venv (``nvidia/cu13``), else ``/usr/local/cuda``.
    """
    given = lane.get("env", {}).get("CUDA_HOME")
    if given:
        return str(given), "environment"
    site = lane["engine"]["site_packages"]
    wheels = sorted(glob.glob(os.path.join(glob.escape(under(root, site)), "nvidia/cu[0-9]*")))
    if wheels:
        return os.path.join(site, "nvidia", os.path.basename(wheels[-1])), "venv"
    if os.path.isdir(under(root, "/usr/local/cuda")):
        return "/usr/local/cuda", "system"
    return None, "none"


def which(name: str, path: str, root: str = "/") -> Optional[str]:
    """Return the executable ``name`` on ``path``, as seen below ``root``; an absolute name stands for itself."""
    if os.path.isabs(name):
        return name if os.access(under(root, name), os.X_OK) and os.path.isfile(under(root, name)) else None
    for directory in path.split(":"):
        candidate = os.path.join(directory, name)
        real = under(root, candidate)
        if os.path.isabs(directory) and os.path.isfile(real) and os.access(real, os.X_OK):
            return candidate
    return None


def _cudart(home: str, root: str) -> Dict[str, Any]:
    """The linker is told ``-L$CUDA_HOME/lib64 -lcudart``: that very name has to resolve."""
    path = os.path.join(home, "lib64/libcudart.so")
    real = under(root, path)
    state = "ok" if os.path.exists(real) else "dangling" if os.path.lexists(real) else "missing"
    return {"path": path, "state": state}


def _python_include(python: str, account: Optional[Dict[str, Any]], env: Dict[str, str]) -> Optional[str]:
    """Ask the venv's own interpreter where its headers are; another Python's headers are of no use."""
    code = "import json, sysconfig; print(json.dumps(sysconfig.get_paths()['include']))"
    status, output = run([python, "-I", "-S", "-c", code], account, env)
    if status != 0:
        return None
    try:
        return str(json.loads(output))
    except ValueError:
        return None


def _compile(facts: Dict[str, Any], account: Optional[Dict[str, Any]], env: Dict[str, str]) -> Dict[str, str]:
    """Compile and link a few lines as the service user, against the venv's headers and the toolkit's runtime library.

    State is ``ok``, ``failed`` or ``not_run`` (no directory to work in); output holds the first error line.
    """
    home = facts["cuda_home"]
    cuda = facts["cudart"]["state"] == "ok" and os.path.isfile(os.path.join(home or "", "include/cuda_runtime_api.h"))
    program = _PROGRAM.format(
        include="#include <cuda_runtime_api.h>" if cuda else "",
        body="int version = 0; cudaRuntimeGetVersion(&version);" if cuda else "",
    )
    try:
        directory = tempfile.mkdtemp(prefix="vllm-fleet-compile-")
    except OSError as error:
        return {"state": "not_run", "output": str(error)}
    try:
        if account is not None and os.geteuid() == 0:
            os.chown(directory, account["uid"], account["gid"])
        source = os.path.join(directory, "probe.cpp")
        with open(source, "w", encoding="utf-8") as handle:
            handle.write(program)
        os.chmod(source, 0o644)
        argv = [facts["cxx"], "-O0", "-I", facts["python_include"], source, "-o", os.path.join(directory, "probe")]
        if cuda:
            argv += ["-I", os.path.join(home, "include"), "-L", os.path.join(home, "lib64"), "-lcudart"]
        status, output = run(argv, account, dict(env, TMPDIR=directory), directory, timeout=20.0)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    errors = [line for line in output.splitlines() if "error" in line.lower() or "cannot find" in line]
    first = (errors or output.splitlines() or [""])[0].strip()
    return {"state": "ok" if status == 0 else "failed", "output": "" if status == 0 else first[:300]}
