"""Checks of what the engine's first start compiles with. Without them the failure comes minutes later, in a JIT."""

from __future__ import annotations

import os
from typing import List

from .. import versions
from .registry import Box, Finding, Lane, check, fail, ok, unknown, warn, with_cuda_toolchain, with_toolchain


@check(
    "compiler",
    {
        "compiler_ok": ok("C and C++ compiler are on the unit's PATH"),
        "compiler_missing": fail("the C or the C++ compiler is not on the unit's PATH", absent=True),
    },
    applies=with_toolchain,
)
def compiler(lane: Lane, box: Box) -> List[Finding]:
    """The unit's PATH leads to a C and a C++ compiler."""
    tools = box["toolchain"]
    missing = [name for name, path in (("cc", tools["cc"]), ("c++", tools["cxx"])) if not path]
    if missing:
        text = f"no {' and no '.join(missing)} on the unit's PATH"
        return [Finding("compiler_missing", text, "a C and a C++ compiler", "apt-get install gcc g++")]
    return [Finding("compiler_ok", f"{tools['cc']}, {tools['cxx']}")]


@check(
    "ninja",
    {
        "ninja_ok": ok("ninja is in the venv or on the unit's PATH"),
        "ninja_missing": fail("ninja is neither in the venv nor on the unit's PATH", absent=True),
        "ninja_not_on_path": fail("only the venv has ninja and the unit's PATH does not include the venv's bin"),
    },
    applies=with_toolchain,
)
def ninja(lane: Lane, box: Box) -> List[Finding]:
    """The build driver ``ninja`` is found by the processes that the unit starts. They call it by its bare name
    (flashinfer 0.6 ends the engine with ``No such file or directory: 'ninja'``), so one in the venv alone is none."""
    path, venv_bin = box["toolchain"]["ninja"], os.path.join(lane["engine"].get("venv") or "/nonexistent", "bin")
    if not path:
        return [
            Finding("ninja_missing", "no ninja", "ninja for the first start's kernels", "apt-get install ninja-build")
        ]
    if os.path.dirname(path) == venv_bin and venv_bin not in box["unit_path"].split(":"):
        fix = "apt-get install ninja-build, or put the venv's bin on the lane's PATH"
        return [Finding("ninja_not_on_path", f"only {path}", "ninja on the unit's PATH", fix)]
    return [Finding("ninja_ok", path)]


@check(
    "python_headers",
    {
        "headers_ok": ok("Python.h of the venv's own version is there"),
        "headers_missing": fail("Python.h is missing for the venv's interpreter", absent=True),
        "headers_unknown": unknown("the venv's interpreter did not answer", absent=True),
    },
    applies=with_toolchain,
)
def python_headers(lane: Lane, box: Box) -> List[Finding]:
    """``Python.h`` is where the venv's own interpreter says; Triton compiles its launcher against it. The headers of
    another Python on the box do not count."""
    tools = box["toolchain"]
    if tools["python_include"] is None:
        return [Finding("headers_unknown", f"{lane['engine']['python']} did not name its include directory")]
    if tools["python_header"] is None:
        version = os.path.basename(os.path.dirname(lane["engine"]["site_packages"]))
        fix = f"apt-get install {version}-dev" if version.startswith("python3.") else "install the headers"
        return [
            Finding(
                "headers_missing", f"no {tools['python_include']}/Python.h", "the headers of the venv's Python", fix
            )
        ]
    return [Finding("headers_ok", str(tools["python_header"]))]


@check(
    "cuda_home",
    {
        "cuda_home_ok": ok("the toolkit directory exists"),
        "cuda_home_malformed": fail("CUDA_HOME is no plain absolute directory name"),
        "cuda_home_missing": fail(
            "no CUDA toolkit: neither CUDA_HOME nor wheels in the venv nor /usr/local/cuda", absent=True
        ),
        "cuda_home_not_in_unit": warn("a toolkit was found but the unit does not set CUDA_HOME"),
    },
    applies=with_cuda_toolchain,
)
def cuda_home(lane: Lane, box: Box) -> List[Finding]:
    """The unit's environment names one existing toolkit directory in CUDA_HOME. What a login shell has does not
    count: systemd starts the engine with a bare environment."""
    tools = box["toolchain"]
    home, source = tools["cuda_home"], tools["cuda_home_source"]
    if home is None:
        needed = "a CUDA toolkit for the first start's kernels"
        return [
            Finding(
                "cuda_home_missing", "no CUDA_HOME and no toolkit", needed, "install the toolkit wheels into the venv"
            )
        ]
    if not os.path.isabs(home) or ":" in home or home != home.strip() or os.path.basename(home.rstrip("/")) == "bin":
        needed = "one absolute directory that holds bin/nvcc"
        return [Finding("cuda_home_malformed", f"CUDA_HOME is {home!r}", needed, "correct CUDA_HOME in the profile")]
    if not tools["cuda_home_exists"]:
        return [
            Finding(
                "cuda_home_missing", f"no directory {home}", "the toolkit that CUDA_HOME names", "correct CUDA_HOME"
            )
        ]
    if source != "environment":
        fix = f"set CUDA_HOME={home} in the profile's environment"
        return [
            Finding("cuda_home_not_in_unit", f"{home} ({source}), CUDA_HOME is not set", "CUDA_HOME in the unit", fix)
        ]
    return [Finding("cuda_home_ok", home)]


@check(
    "nvcc",
    {
        "nvcc_ok": ok("nvcc runs and names its release"),
        "nvcc_missing": fail("no executable bin/nvcc below CUDA_HOME", absent=True),
        "nvcc_unreadable": fail("nvcc does not say which CUDA release it is"),
    },
    applies=with_cuda_toolchain,
)
def nvcc(lane: Lane, box: Box) -> List[Finding]:
    """The ``nvcc`` below CUDA_HOME, the one that the engine uses, runs and names its release."""
    tools = box["toolchain"]
    compiler_facts = tools["nvcc"]
    if compiler_facts["path"] is None:
        fix = "install nvidia-cuda-nvcc into the venv, or correct CUDA_HOME"
        return [Finding("nvcc_missing", f"no executable {tools['cuda_home'] or 'CUDA_HOME'}/bin/nvcc", "nvcc", fix)]
    if compiler_facts["release"] is None:
        text = f"{compiler_facts['path']} --version names no release: {compiler_facts['output'].strip()[-80:]!r}"
        return [Finding("nvcc_unreadable", text, "a line with the CUDA release", "install the toolkit again")]
    return [Finding("nvcc_ok", f"{compiler_facts['path']}, CUDA {versions.show(compiler_facts['release'])}")]


@check(
    "nvcc_driver",
    {
        "nvcc_not_newer": ok("the driver runs what nvcc compiles"),
        "nvcc_newer_than_driver": fail("nvcc's CUDA is newer than the driver's: its kernels would be rejected"),
        "nvcc_driver_unknown": unknown("the driver's or nvcc's CUDA release could not be read", absent=True),
    },
    applies=with_cuda_toolchain,
)
def nvcc_driver(lane: Lane, box: Box) -> List[Finding]:
    """nvcc's CUDA release is not newer than the driver's, compared as numbers; otherwise the driver rejects the
    compiled kernels (error 222, unsupported toolchain) minutes into the start."""
    release, driver = box["toolchain"]["nvcc"]["release"], box["driver_cuda"]
    if release is None or driver is None:
        return [
            Finding("nvcc_driver_unknown", f"nvcc CUDA {versions.show(release)}, driver CUDA {versions.show(driver)}")
        ]
    text = f"nvcc CUDA {versions.show(release)}, driver CUDA {versions.show(driver)}"
    if versions.newer(release, driver):
        fix = f"upgrade the driver, or use a toolkit of CUDA {versions.show(driver)} or older"
        return [Finding("nvcc_newer_than_driver", text, f"nvcc at most CUDA {versions.show(driver)}", fix)]
    return [Finding("nvcc_not_newer", text)]


@check(
    "cudart_link",
    {
        "cudart_ok": ok("lib64/libcudart.so resolves"),
        "cudart_missing": fail("lib64/libcudart.so does not exist; the toolkit wheels do not bring it", absent=True),
        "cudart_dangling": fail("lib64/libcudart.so is a link to nothing"),
    },
    applies=with_cuda_toolchain,
)
def cudart_link(lane: Lane, box: Box) -> List[Finding]:
    """``$CUDA_HOME/lib64/libcudart.so`` resolves to a file. The JIT links with exactly that name; the toolkit wheels
    have only ``lib/libcudart.so.<major>``, and an upgrade of the wheel takes added links away."""
    state, path = box["toolchain"]["cudart"]["state"], box["toolchain"]["cudart"]["path"]
    if state == "ok":
        return [Finding("cudart_ok", str(path))]
    home = box["toolchain"]["cuda_home"] or "$CUDA_HOME"
    fix = f"run the engine's install again, or: ln -sfn lib {home}/lib64; ln -sf libcudart.so.* {home}/lib/libcudart.so"
    text = f"{path or 'lib64/libcudart.so'} {'is a dangling link' if state == 'dangling' else 'does not exist'}"
    return [Finding(f"cudart_{state}", text, "a file that -lcudart finds", fix)]


@check(
    "host_compiler",
    {
        "host_compiler_ok": ok("nvcc accepts the host compiler"),
        "gcc_too_new": fail("gcc is newer than this toolkit accepts"),
        "host_compiler_unknown": unknown(
            "the compiler's version or the toolkit's limit could not be read", absent=True
        ),
    },
    applies=with_cuda_toolchain,
)
def host_compiler(lane: Lane, box: Box) -> List[Finding]:
    """The host compiler that nvcc calls is not newer than ``crt/host_config.h`` of the toolkit accepts."""
    tools = box["toolchain"]
    found, limit = tools["host_compiler"], tools["gcc_limit"]
    if found["family"] == "clang":
        return [Finding("host_compiler_ok", f"{found['path']} is clang; the gcc limit does not apply")]
    if found["major"] is None or limit is None:
        text = f"host compiler {found['path'] or 'absent'}, version {found['major']}, limit {limit}"
        return [Finding("host_compiler_unknown", text)]
    if found["major"] > limit:
        fix = f"install g++-{limit} and set NVCC_CCBIN=/usr/bin/g++-{limit} in the profile's environment"
        return [Finding("gcc_too_new", f"gcc {found['major']} ({found['path']})", f"gcc {limit} or older", fix)]
    return [Finding("host_compiler_ok", f"gcc {found['major']}, the toolkit accepts up to {limit}")]


@check(
    "compile",
    {
        "compile_ok": ok("a small program compiles and links as the service user"),
        "compile_failed": fail("a small program does not compile or link as the service user"),
        "compile_not_run": unknown("a part that the test needs is missing", absent=True),
    },
    applies=with_toolchain,
)
def compile_and_link(lane: Lane, box: Box) -> List[Finding]:
    """A five-line program compiles and links as the service user in the unit's environment, against the venv's Python
    headers and, when the toolkit is there, against the CUDA runtime library."""
    outcome = box["toolchain"]["compile"]
    who = f"as {outcome['user']}" if outcome["user"] else f"as another user ({box['user_name']} could not be used)"
    if outcome["state"] == "failed":
        return [
            Finding(
                "compile_failed",
                f"{outcome['output']} ({who})",
                "a working compiler and linker",
                "read the compiler's message",
            )
        ]
    if outcome["state"] != "ok":
        return [Finding("compile_not_run", outcome["output"] or "the compiler or the headers are missing")]
    return [Finding("compile_ok", f"a small program compiles and links {who}")]
