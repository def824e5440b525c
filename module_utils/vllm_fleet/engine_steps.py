"""Building one engine on the builder, step by step; a rerun goes on after the last step that was finished.

The engine is made in ``<workdir>/stage`` and will live in ``root``: what names its own place is made to name that one.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import re
import shutil
import subprocess
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from . import engines, files, git_source, product_source, products_pass, versions
from .errors import RefusedError, UsageError
from .facts import host
from .source_files import sha256, verified

#: what is asked of the new engine, from a directory that holds no package
_VERSIONS = (
    "import importlib.metadata as m, json, os, sys\n"
    "import vllm\n"
    "print('\\n' + json.dumps([vllm.__version__, m.version('vllm'), os.path.dirname(vllm.__file__)]))"
)
_TORCH = (
    "import importlib.metadata as m, importlib.util as u, json, os, runpy\n"
    "at = os.path.dirname(u.find_spec('torch').origin)\n"
    "about = runpy.run_path(os.path.join(at, 'version.py'))\n"
    "print(json.dumps([about['__version__'], about.get('cuda')]))"
)


class Build:
    """One build. ``entry`` is what :func:`engines.inputs` gives."""

    def __init__(self, entry: Mapping[str, Any], workdir: str, dest: str) -> None:
        self.entry = entry
        self.workdir = workdir
        self.dest = dest
        self.root: str = entry["root"]
        self.stage = os.path.join(workdir, "stage")
        self.venv = os.path.join(self.stage, "venv")
        self.tree = os.path.join(self.stage, "tree")
        self.python = os.path.join(self.venv, "bin", "python")
        self.uv = os.path.join(workdir, "uv")
        self.lock = os.path.join(workdir, "requirements.lock")
        self.source = os.path.join(workdir, "source")
        self.tools: Dict[str, str] = {}
        # Only what a build needs: an inherited PYTHONDONTWRITEBYTECODE would leave every start compiling for minutes.
        self.env = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": workdir,
            "LC_ALL": "C.UTF-8",
            "PYC_INVALIDATION_MODE": "TIMESTAMP",
        }

    # ---- running -----------------------------------------------------------------------------------------------------

    def steps(self) -> List[Tuple[str, Callable[[], None]]]:
        """Return the steps of this engine's route, by name."""
        git = self.entry["route"] == "git"
        chain: List[Tuple[str, Callable[[], None]]] = [("venv", self.make_venv), ("install", self.install)]
        if git:
            chain.append(("tree", self.place_tree))
        chain += [("toolkit", self.link_toolkit), ("torch", self.assert_torch)]
        if git:
            chain.append(("products", self.place_products))
            if self.entry["install"]["products"]["route"] == "compile":
                chain.append(("compile", self.compile))
            chain.append(("editable", self.install_tree))
        return [*chain, ("version", self.assert_version), ("relocate", self.relocate), ("record", self.record)]

    def run(self) -> Dict[str, Any]:
        """Do what is left of the build and return the archive's description: ``{sha256, bytes, manifest}``.

        :raises RefusedError: the code of what is wrong, or ``<step>_failed``; the message names engine and step.
        """
        os.makedirs(self.stage, exist_ok=True)
        noted = os.path.join(self.stage, ".steps.json")
        done: List[str] = []
        with contextlib.suppress(RefusedError, UsageError):
            earlier = files.read_json(noted, "notes")
            done, self.tools = earlier["done"], earlier["tools"]
        chain = [*self.steps(), ("pack", self.pack)]
        for number, (name, step) in enumerate(chain, 1):
            if name in done:
                continue
            self.say(f"step {number} of {len(chain)}: {name}")
            try:
                step()
            except RefusedError as error:
                text = f"engine {self.entry['id']}, step {name}: {error.message}"
                raise RefusedError(error.reason, text, error.fix) from None
            except OSError as error:
                text = f"engine {self.entry['id']}, step {name}: {error.filename}: {error.strerror}"
                raise RefusedError(f"{name}_failed", text) from None
            done.append(name)
            if name != "pack":
                files.write_atomic(noted, json.dumps({"done": done, "tools": self.tools}).encode())
        sidecar: Dict[str, Any] = files.read_json(self.dest + ".json", "archive")
        shutil.rmtree(self.workdir)
        return sidecar

    def say(self, text: str) -> None:
        """Note what is being done, for whoever looks: one line in ``<workdir>/progress``."""
        files.write_atomic(os.path.join(self.workdir, "progress"), f"{int(time.time())} {text}\n".encode(), 0o644)

    def call(self, step: str, argv: Sequence[str], env: Optional[Mapping[str, str]] = None) -> str:
        """Run a tool from a neutral directory and return what it printed.

        :raises RefusedError: ``<step>_failed`` with the tool's own last lines.
        """
        environment = {**self.env, **(env or {})}
        try:
            done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment, cwd="/")
        except OSError as error:
            raise RefusedError(f"{step}_failed", f"{argv[0]} cannot be run: {error.strerror}") from None
        if done.returncode:
            tail = "\n".join((done.stdout + "\n" + done.stderr).strip().splitlines()[-12:])
            raise RefusedError(f"{step}_failed", f"{os.path.basename(argv[0])} says:\n{tail}")
        return done.stdout.strip()

    def site_packages(self) -> str:
        """Return the venv's library directory."""
        return glob.glob(os.path.join(self.venv, "lib", "python3*", "site-packages"))[0]

    # ---- the steps ---------------------------------------------------------------------------------------------------

    def make_venv(self) -> None:
        """Make an empty venv of the boxes' Python."""
        shutil.rmtree(self.venv, ignore_errors=True)
        argv = [self.uv, "venv", "--quiet", "--no-project", "--python", self.entry["interpreter"], self.venv]
        self.call("venv", argv, {"UV_PYTHON_DOWNLOADS": "never"})

    def install(self) -> None:
        """Install the wheels of the lock, by their hashes and from nowhere else."""
        argv = [self.uv, "pip", "install", "--quiet", "--python", self.python, "--no-index", "--no-deps"]
        argv += ["--require-hashes", "--find-links", os.path.join(self.workdir, "wheels"), "--requirement", self.lock]
        self.call("install", [*argv, "--link-mode", "copy", "--no-cache", "--compile-bytecode"])

    def place_tree(self) -> None:
        """Copy the source tree, with its times, so that a compile that was cut off goes on."""
        shutil.rmtree(self.tree, ignore_errors=True)
        shutil.copytree(os.path.join(self.source, "tree"), self.tree, symlinks=True)

    def toolkit(self) -> Optional[str]:
        """Return the directory of the CUDA toolkit that came as wheels, if it did."""
        found = sorted(glob.glob(os.path.join(self.site_packages(), "nvidia", "cu[0-9]*")))
        return found[-1] if found else None

    def link_toolkit(self) -> None:
        """Give a toolkit of wheels the names that compilers look for, and assert its release.

        :raises RefusedError: ``nvcc_differs``.
        """
        home = self.toolkit()
        if home and os.path.isdir(os.path.join(home, "lib")):
            for link, target in engines.toolkit_links(os.listdir(os.path.join(home, "lib")), os.listdir(home)):
                with contextlib.suppress(FileExistsError):
                    os.symlink(target, os.path.join(home, link))
        wanted = self.entry["install"].get("nvcc")
        if wanted:
            nvcc = os.path.join(home or "/usr/local/cuda", "bin", "nvcc")
            found = versions.show(versions.parse_nvcc(self.call("toolkit", [nvcc, "--version"])))
            if found != wanted:
                raise RefusedError("nvcc_differs", f"{nvcc} is of release {found}, the catalog wants {wanted}")
            self.tools["nvcc"] = found

    def assert_torch(self) -> None:
        """Compare torch and the CUDA release that it was built for with the catalog.

        :raises RefusedError: ``torch_differs``.
        """
        install = self.entry["install"]
        if "torch" not in install:
            return
        version, cuda = json.loads(self.call("torch", [self.python, "-I", "-c", _TORCH]))
        if version != install["torch"] and version.split("+")[0] != install["torch"]:
            raise RefusedError("torch_differs", f"torch is {version}, the catalog wants {install['torch']}")
        if "torch_cuda" in install and cuda != install["torch_cuda"]:
            raise RefusedError(
                "torch_differs", f"torch {version} is built for CUDA {cuda}, the catalog wants {install['torch_cuda']}"
            )

    def place_products(self) -> None:
        """Put the stock wheel's or the tarball's products into the tree.

        :raises RefusedError: ``products_damaged``, ``product_missing``, ``product_differs`` and the like.
        """
        wanted = self.entry["install"]["products"]
        if wanted["route"] == "tarball":
            tarball = os.path.join(self.source, "files", wanted["tarball"]["file"])
            verified(tarball, wanted["tarball"]["sha256"], "products_damaged", own=False)
            product_source.from_tarball(tarball, self.tree, wanted["paths"], wanted["tarball"].get("files", 0))
            product_source.check_own(self.tree, wanted["own"])
            return
        wheel = glob.glob(os.path.join(self.source, "files", "*.whl"))[0]
        verified(wheel, wanted["wheel"]["sha256"], "products_damaged", own=False)
        compiled = wanted["compile"]["targets"].values() if wanted["route"] == "compile" else ()
        product_source.from_wheel(wheel, self.tree, wanted["paths"], compiled)

    def compile(self) -> None:
        """Compile the tree's own extensions; what an interrupted run has compiled is kept.

        :raises RefusedError: ``tool_missing``, ``cmake_too_old``, ``compile_failed``.
        """
        made = self.entry["install"]["products"]["compile"]
        bin_directory = os.path.join(self.venv, "bin")
        cuda = self.toolkit()
        path = ":".join([bin_directory, *([os.path.join(cuda, "bin")] if cuda else []), self.env["PATH"]])
        for tool in ("cmake", "ninja", "cc", "c++"):
            if not shutil.which(tool, path=path):
                raise RefusedError("tool_missing", f"{tool} is not on {path}", "install it on the builder")
        found = self.call("compile", [str(shutil.which("cmake", path=path)), "--version"]).split()[2]
        wanted = versions.parse_release(made["cmake"])
        if wanted and versions.newer(wanted, versions.parse_release(found) or (0, 0)):
            raise RefusedError(
                "cmake_too_old", f"cmake is {found}, {made['cmake']} or newer is needed",
                "add cmake to the engine's lock, or install a newer one on the builder",
            )  # fmt: skip
        self.tools["cmake"] = found
        jobs = engines.max_jobs(_memory_kib(), len(os.sched_getaffinity(0)), made["gib_per_job"])
        env = {"PATH": path, "MAX_JOBS": str(jobs), "TORCH_CUDA_ARCH_LIST": ";".join(made["architectures"])}
        if cuda:
            env["CUDA_HOME"] = cuda
        build = os.path.join(self.workdir, "compile")
        definitions = {"CMAKE_BUILD_TYPE": "Release", "VLLM_PYTHON_EXECUTABLE": self.python, **made["definitions"]}
        if cuda:
            definitions.setdefault("CMAKE_CUDA_COMPILER", os.path.join(cuda, "bin", "nvcc"))
        argv = ["cmake", "-S", self.tree, "-B", build, "-G", "Ninja"]
        argv += [f"-D{name}={value}" for name, value in definitions.items()]
        argv[0] = str(shutil.which("cmake", path=path))
        self.call("compile", argv, env)
        for target, product in made["targets"].items():
            self.say(f"compiling {target} with {jobs} jobs")
            self.call("compile", [argv[0], "--build", build, "--target", target, "--parallel", str(jobs)], env)
            results = glob.glob(os.path.join(build, "**", os.path.basename(product)), recursive=True)
            if not results:
                raise RefusedError("compile_failed", f"the target {target} made no {os.path.basename(product)}")
            destination = os.path.join(self.tree, product)
            os.makedirs(os.path.dirname(destination), exist_ok=True)
            shutil.copy2(results[0], destination)

    def install_tree(self) -> None:
        """Install the tree in editable mode: metadata and the console script; it compiles nothing."""
        argv = [self.uv, "pip", "install", "--quiet", "--python", self.python, "--no-index", "--no-deps"]
        argv += ["--no-build-isolation", "--no-cache", "--editable", self.tree]
        bin_first = os.path.join(self.venv, "bin") + ":" + self.env["PATH"]
        self.call("editable", argv, {"PATH": bin_first, **self.entry["install"]["editable"]})
        shutil.rmtree(os.path.join(self.tree, "build"), ignore_errors=True)

    def assert_version(self) -> None:
        """Ask the new engine who it is; a tree's one is imported, from a directory that holds no package.

        :raises RefusedError: ``version_differs``, ``import_differs`` or ``console_script_missing``.
        """
        wanted = self.entry["version"].split("+")[0]
        if self.entry["route"] == "git":
            said = json.loads(self.call("version", [self.python, "-I", "-c", _VERSIONS]).splitlines()[-1])
            found, origin = said[:2], said[2]
            if origin != os.path.join(self.tree, "vllm"):
                raise RefusedError("import_differs", f"import vllm lands in {origin}, expected the engine's own tree")
        else:
            code = "import importlib.metadata as m; print(m.version('vllm'))"
            found = [self.call("version", [self.python, "-I", "-c", code])]
        for version in found:
            if version.split("+")[0] != wanted:
                text = f"the installed vllm says version {version}, the catalog wants {self.entry['version']}"
                raise RefusedError("version_differs", text)
        script = os.path.join(self.venv, "bin", "vllm")
        if not os.access(script, os.X_OK):
            raise RefusedError("console_script_missing", "the venv has no executable bin/vllm")
        self.tools["vllm"] = found[-1]

    def relocate(self) -> None:
        """Let scripts and the editable install name the place where the engine will live, not where it was built."""
        site = self.site_packages()
        texts = [os.path.join(self.venv, "bin", name) for name in os.listdir(os.path.join(self.venv, "bin"))]
        for pattern in ("*.pth", "__editable__*", "*.dist-info/direct_url.json"):
            texts += glob.glob(os.path.join(site, pattern))
        for path in texts:
            if os.path.islink(path) or not os.path.isfile(path):
                continue
            with open(path, "rb") as handle:
                text = handle.read()
            if self.stage.encode() in text:
                files.write_atomic(path, text.replace(self.stage.encode(), self.root.encode()))
        # uv leaves its lock there, writable by all
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.venv, ".lock"))
        if self.entry["route"] == "git":
            # without byte code every start compiles the whole library: 156 s instead of 30 s until it answers
            jobs = ["-m", "compileall", "-q", "-j", "0", "-s", self.stage, "-p", self.root]
            finders = glob.glob(os.path.join(site, "__editable__*.py"))
            # files that are templates and no Python make it exit with 1
            subprocess.run(
                [self.python, *jobs, os.path.join(self.tree, "vllm"), *finders],
                env=self.env, cwd="/", check=False, capture_output=True,
            )  # fmt: skip

    def record(self) -> None:
        """Record the hashes of every file of the package, which each start compares."""
        route, top = self.entry["route"], self.site_packages()
        if route == "git":
            route, top = self.entry["install"]["products"]["route"], self.tree
        products_pass.record(top, route=route, engine=self.entry["id"], paths=["vllm"])

    def pack(self) -> None:
        """Write the manifest, and one archive of everything beside its description."""
        top = self.tree if self.entry["route"] == "git" else self.site_packages()
        python = "import platform; print(platform.python_version())"
        manifest: Dict[str, Any] = {
            "schema": 1,
            "id": self.entry["id"],
            "version": self.call(
                "version", [self.python, "-I", "-c", "import importlib.metadata as m; print(m.version('vllm'))"]
            ),
            "digest": self.entry["digest"],
            "route": self.entry["route"],
            "python": self.call("python", [self.python, "-I", "-c", python]),
            "interpreter": self.entry["interpreter"],
            "lock_sha256": sha256(self.lock),
            "products_sha256": sha256(os.path.join(top, ".build-products.sha256")),
            "uv": self.call("uv", [self.uv, "--version"]),
            "tools": self.tools,
            "builder": platform.node(),
            "system": platform.platform(),
            "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "bytes": sum(
                os.lstat(os.path.join(folder, name)).st_size
                for folder, _, names in os.walk(self.stage)
                for name in names
            ),
        }
        if self.entry["route"] == "git":
            manifest["source"] = git_source.described(self.entry["install"])
            manifest["products"] = self.entry["install"]["products"]["route"]
        text = (json.dumps(manifest, indent=1) + "\n").encode()
        files.write_atomic(os.path.join(self.stage, "manifest.json"), text, 0o644)
        partial = self.dest + ".part"
        argv = ["tar", "--create", "--sort=name", "--owner=0", "--group=0", "--numeric-owner"]
        argv += ["--use-compress-program=zstd -1 -T0 -q", "--file", partial, "--directory", self.stage, "manifest.json"]
        self.call("pack", [*argv, "venv", *(["tree"] if self.entry["route"] == "git" else [])])
        sidecar = {"sha256": sha256(partial), "bytes": os.stat(partial).st_size, "manifest": manifest}
        os.chmod(partial, 0o644)
        os.replace(partial, self.dest)
        files.write_atomic(self.dest + ".json", (json.dumps(sidecar, indent=1) + "\n").encode(), 0o644)


def _memory_kib() -> int:
    """Return the memory that compilers may take: what is available, within this process's own limit."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", host.read_text("/proc/meminfo") or "", re.MULTILINE)
    limit = host.memory()["limit_kib"]
    available = int(found.group(1)) if found else 0
    return min(available, limit) if limit else available
