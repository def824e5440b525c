#!/usr/bin/python
# Copyright (c) vllm-fleet contributors
# Apache-2.0 (see LICENSE)
"""Ansible module: verify who signed an engine's archive, before it leaves the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_signature
short_description: Verify the signature of an engine's archive
description:
  - Verifies with C(ssh-keygen -Y verify), namespace C(vllm-fleet-engine), that an allowed signer has signed the
    archive's description, that the description is of this engine, and that the archive has the hash that it says.
  - Runs on the controller. The box compares the archive's hash with the returned description before it unpacks it.
  - An archive is signed where it is kept after its build, by M(engine_build).
version_added: "0.2.0"
options:
  engine:
    description: The engine, as the filter P(vllm_fleet_engine_inputs#filter) gives it.
    type: dict
    required: true
  archive:
    description: The archive; its description is C(ARCHIVE.json), the signature C(ARCHIVE.json.sig).
    type: path
    required: true
  allowed_signers:
    description: File of the public keys that may sign, as in ssh-keygen(1), ALLOWED SIGNERS.
    type: path
    required: true
attributes:
  check_mode:
    description: Changes nothing, and does the same in check mode.
    support: full
author:
  - vllm-fleet contributors
"""

EXAMPLES = r"""
- name: Verify who signed the archive
  engine_signature:
    engine: "{{ wanted }}"
    archive: ~/.cache/vllm-fleet/engines/vllm-0.32.0-cpu-1f2e3d4c5b6a7089.tar.zst
    allowed_signers: /etc/vllm-fleet/allowed_signers
  delegate_to: localhost
"""

RETURN = r"""
description:
  description: What was signed.
  returned: success
  type: dict
  sample: {sha256: 3f1c0f3a, bytes: 612345678, manifest: {id: vllm-0.32.0-cpu, digest: 1f2e3d4c5b6a7089}}
reason:
  description: V(verified).
  returned: success
  type: str
  sample: verified
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_fleet import engine_signature
from ansible.module_utils.vllm_fleet.errors import FleetError


def main():
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "dict", "required": True},
            "archive": {"type": "path", "required": True},
            "allowed_signers": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        described = engine_signature.check_archive(params["archive"], params["engine"], params["allowed_signers"])
    except FleetError as error:
        module.fail_json(msg=f"engine {params['engine']['id']}: {error.one_line()}", reason=error.reason)
    module.exit_json(changed=False, description=described, reason="verified")


if __name__ == "__main__":
    main()
