#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: pack the on-box program on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_program
short_description: Pack the program vllm-fleet into one executable file
description:
  - Packs the package C(vllm_fleet) and C(pynvml.py) of the controller's C(nvidia-ml-py) into a zipapp. Runs on the
    controller.
  - The file depends on its inputs only, so an unchanged checkout gives the same bytes.
version_added: "0.1.0"
options:
  source:
    description: Directory that holds the package C(vllm_fleet).
    type: path
    required: true
  dest:
    description: File to write.
    type: path
    required: true
  interpreter:
    description: Interpreter on the boxes.
    type: str
    default: /usr/bin/python3
attributes:
  check_mode:
    description: The file is a build product on the controller and is made in check mode too, so that the diff on a box
      is true.
    support: none
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Pack the on-box program
  fleet_program:
    source: "{{ playbook_dir }}/../module_utils"
    dest: "{{ playbook_dir }}/../.cache/vllm-fleet.pyz"
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
path:
  description: The file.
  returned: always
  type: str
  sample: /srv/vllm-fleet/.cache/vllm-fleet.pyz
sha256:
  description: Its hash.
  returned: always
  type: str
  sample: 3f1c0f3a
"""

import hashlib
import importlib.util
import os
import tempfile
import zipfile

from ansible.module_utils.basic import AnsibleModule

STAMP = (2020, 1, 1, 0, 0, 0)


def pack(source, pynvml, interpreter):
    """Return the zipapp as bytes."""
    entries = {
        "__main__.py": b"import sys\n\nfrom vllm_fleet.cli import main\n\nsys.exit(main())\n",
        "pynvml.py": pynvml,
    }
    package = os.path.join(source, "vllm_fleet")
    for folder, folders, names in os.walk(package):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            if name.endswith((".py", ".json")):
                path = os.path.join(folder, name)
                with open(path, "rb") as handle:
                    entries[os.path.relpath(path, source)] = handle.read()
    with tempfile.TemporaryFile() as handle:
        handle.write(b"#!" + interpreter.encode() + b"\n")
        with zipfile.ZipFile(handle, "a", zipfile.ZIP_DEFLATED) as archive:
            for name in sorted(entries):
                info = zipfile.ZipInfo(name, STAMP)
                info.external_attr = 0o644 << 16
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, entries[name])
        handle.seek(0)
        return handle.read()


def main():
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "path", "required": True},
            "dest": {"type": "path", "required": True},
            "interpreter": {"type": "str", "default": "/usr/bin/python3"},
        },
        supports_check_mode=True,
    )
    spec = importlib.util.find_spec("pynvml")
    if spec is None or not spec.origin or not spec.origin.endswith("pynvml.py"):
        module.fail_json(
            msg="the controller's Python has no nvidia-ml-py (import name pynvml): found %s. Run make env, or pip "
            "install --require-hashes -r requirements.lock." % (spec.origin if spec else "nothing"),
            reason="no_nvidia_ml_py",
        )
    with open(spec.origin, "rb") as handle:
        pynvml = handle.read()
    data = pack(module.params["source"], pynvml, module.params["interpreter"])
    dest = module.params["dest"]
    os.makedirs(os.path.dirname(dest), exist_ok=True)
    try:
        with open(dest, "rb") as handle:
            old = handle.read()
    except FileNotFoundError:
        old = b""
    if old != data:
        descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(dest))
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(data)
        os.chmod(temporary, 0o755)
        os.replace(temporary, dest)
    # A build product of the controller, not a change of any box.
    module.exit_json(changed=False, path=dest, sha256=hashlib.sha256(data).hexdigest())


if __name__ == "__main__":
    main()
