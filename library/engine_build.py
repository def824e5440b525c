#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: build an engine once, on one box, into an archive for all of them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_build
short_description: Build an engine from its wheelhouse into an archive
description:
  - Makes a venv from hash-locked wheels without an index, byte-compiles it, asserts the version that it
    will report, records its build products, and packs it with a manifest.
  - Runs on the builder, once for a fleet. M(engine_install) unpacks the archive on each box.
version_added: "0.1.0"
options:
  engine:
    description: Id of the engine.
    type: str
    required: true
  version:
    description: Version that the distribution V(vllm) must report; a local part such as V(+cpu) is not compared.
    type: str
    required: true
  digest:
    description: Digest of the engine's inputs.
    type: str
    required: true
  workdir:
    description: Directory with C(wheels/), C(requirements.lock) and C(uv); emptied when the archive is made.
    type: path
    required: true
  python:
    description: Interpreter of the boxes.
    type: path
    required: true
  dest:
    description: Archive to write.
    type: path
    required: true
  root:
    description: Directory of the engine on the boxes; its console scripts name the interpreter there.
    type: path
    required: true
attributes:
  check_mode:
    description: Builds nothing in check mode.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Build the engine
  engine_build:
    engine: vllm-0.32.0-cpu
    version: 0.32.0
    digest: 1f2e3d4c5b6a
    workdir: /opt/vllm-fleet/build/vllm-0.32.0-cpu
    python: /usr/bin/python3.11
    dest: /opt/vllm-fleet/build/vllm-0.32.0-cpu.tar.zst
    root: /opt/vllm-fleet/engines/vllm-0.32.0-cpu
"""

RETURN = r"""
archive:
  description: Path, size and hash of the archive.
  returned: success
  type: dict
  sample: {path: /opt/vllm-fleet/build/vllm-0.32.0-cpu.tar.zst, bytes: 612345678, sha256: 3f1c0f3a}
manifest:
  description: What was built from what.
  returned: success
  type: dict
  sample: {id: vllm-0.32.0-cpu, version: 0.32.0+cpu, digest: 1f2e3d4c5b6a, python: 3.11.2}
reason:
  description: V(built) or V(present).
  returned: success
  type: str
  sample: built
"""

import contextlib
import glob
import hashlib
import json
import os
import platform
import shutil
import subprocess
import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import files, products_pass


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        for block in iter(lambda: handle.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


class Builder:
    """The steps of one build; each failure names the step and shows the tool's own last lines."""

    def __init__(self, module):
        self.module = module
        self.params = module.params
        self.stage = os.path.join(self.params["workdir"], "stage")
        self.venv = os.path.join(self.stage, "venv")
        # Only what a build needs: an inherited PYTHONDONTWRITEBYTECODE would leave every start compiling for minutes.
        self.env = {
            "PATH": "/usr/bin:/bin",
            "HOME": self.params["workdir"],
            "LC_ALL": "C.UTF-8",
            "PYC_INVALIDATION_MODE": "TIMESTAMP",
        }

    def call(self, step, argv, cwd="/"):
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            env=self.env,
            cwd=cwd,
        )
        if done.returncode:
            tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
            self.module.fail_json(
                msg="engine {}, step {} failed:\n{}".format(self.params["engine"], step, tail), reason=step + "_failed"
            )
        return done.stdout.strip()

    def point_scripts_at(self, final):
        """Make the console scripts name the interpreter where the engine will live, not where it was built."""
        folder = os.path.join(self.venv, "bin")
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                continue
            with open(path, "rb") as handle:
                text = handle.read()
            if self.venv.encode() in text:
                files.write_atomic(path, text.replace(self.venv.encode(), final.encode()))

    def build(self):
        params = self.params
        shutil.rmtree(self.stage, ignore_errors=True)
        os.makedirs(self.stage)
        uv = os.path.join(params["workdir"], "uv")
        self.call("venv", [uv, "venv", "--quiet", "--no-project", "--python", params["python"], self.venv])
        python = os.path.join(self.venv, "bin", "python")
        self.call(
            "install",
            [
                uv, "pip", "install", "--quiet", "--python", python, "--no-index", "--no-deps", "--require-hashes",
                "--find-links", os.path.join(params["workdir"], "wheels"),
                "--requirement", os.path.join(params["workdir"], "requirements.lock"),
                "--link-mode", "copy", "--no-cache", "--compile-bytecode",
            ],
        )  # fmt: skip
        self.point_scripts_at(os.path.join(params["root"], "venv"))
        # uv leaves its lock there, writable by all.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.venv, ".lock"))
        version = self.call("version", [python, "-c", "import importlib.metadata as m; print(m.version('vllm'))"])
        if version.split("+")[0] != params["version"].split("+")[0]:
            self.module.fail_json(
                msg="engine {}: the installed vllm says version {}; the catalog wants {}".format(
                    params["engine"], version, params["version"]
                ),
                reason="version_differs",
            )
        site = glob.glob(os.path.join(self.venv, "lib", "python3*", "site-packages"))[0]
        products_pass.record(site, route="wheel", engine=params["engine"], paths=["vllm"], exclude=[], check=False)
        manifest = {
            "schema": 1,
            "id": params["engine"],
            "version": version,
            "digest": params["digest"],
            "route": "wheel",
            "python": self.call("python", [python, "-c", "import platform; print(platform.python_version())"]),
            "interpreter": params["python"],
            "lock_sha256": sha256_of(os.path.join(params["workdir"], "requirements.lock")),
            "uv": self.call("uv", [uv, "--version"]),
            "builder": platform.node(),
            "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "bytes": sum(
                os.lstat(os.path.join(folder, name)).st_size
                for folder, _, names in os.walk(self.venv)
                for name in names
            ),
        }
        files.write_atomic(
            os.path.join(self.stage, "manifest.json"), (json.dumps(manifest, indent=1) + "\n").encode(), 0o644
        )
        partial = params["dest"] + ".part"
        self.call(
            "pack",
            [
                "tar", "--create", "--sort=name", "--owner=0", "--group=0", "--numeric-owner",
                "--use-compress-program=zstd -1 -T0 -q", "--file", partial, "--directory", self.stage,
                "manifest.json", "venv",
            ],
        )  # fmt: skip
        sidecar = {"sha256": sha256_of(partial), "bytes": os.stat(partial).st_size, "manifest": manifest}
        os.chmod(partial, 0o644)
        os.replace(partial, params["dest"])
        files.write_atomic(params["dest"] + ".json", (json.dumps(sidecar, indent=1) + "\n").encode(), 0o644)
        shutil.rmtree(params["workdir"])
        return sidecar


def main():
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "str", "required": True},
            "version": {"type": "str", "required": True},
            "digest": {"type": "str", "required": True},
            "workdir": {"type": "path", "required": True},
            "python": {"type": "path", "required": True},
            "dest": {"type": "path", "required": True},
            "root": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    sidecar_path = params["dest"] + ".json"
    reason = "present"
    sidecar = (
        files.read_json(sidecar_path, "archive")
        if os.path.exists(sidecar_path) and os.path.exists(params["dest"])
        else None
    )
    if not sidecar or sidecar["manifest"]["digest"] != params["digest"]:
        reason = "built"
        if module.check_mode:
            module.exit_json(changed=True, reason=reason)
        if not os.access(params["python"], os.X_OK):
            module.fail_json(
                msg="the builder has no {}; the role toolchain installs it (toolchain_python)".format(params["python"]),
                reason="no_python",
            )
        sidecar = Builder(module).build()
    module.exit_json(
        changed=reason == "built",
        archive={"path": params["dest"], "bytes": sidecar["bytes"], "sha256": sidecar["sha256"]},
        manifest=sidecar["manifest"],
        reason=reason,
    )


if __name__ == "__main__":
    main()
