"""Signatures of engine archives, made and verified by ``ssh-keygen -Y`` on the controller.

What is signed is the archive's description: it holds the archive's SHA-256 and the engine's id and digest, so a good
signature stands for these bytes as this engine. The signature lies beside it, as ``<archive>.json.sig``.
"""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any, Dict, Mapping, Sequence

from . import files, source_files
from .errors import RefusedError, UsageError

#: what keeps a signature that the same key made for another purpose from passing as one for an engine
NAMESPACE = "vllm-fleet-engine"


def sign(data: bytes, key: str) -> bytes:
    """Return the armored signature of ``data``.

    :param key: file of a private key without passphrase, or of the public key of one that ssh-agent holds.
    :raises RefusedError: ``signing_failed`` or ``no_ssh_keygen``.
    """
    done = _keygen("sign", ["-f", key, "-n", NAMESPACE], data)
    if done.returncode:
        raise RefusedError(
            "signing_failed",
            f"ssh-keygen does not sign with {key}: {_words(done)}",
            "let engine_signing_key name a private key without passphrase, or the public key of one in ssh-agent",
        )
    return done.stdout


def read_verified(description: str, allowed_signers: str) -> bytes:
    """Return the bytes of an archive's description if an allowed signer has signed them.

    :param allowed_signers: a file as in ssh-keygen(1), ALLOWED SIGNERS.
    :raises RefusedError: ``not_signed``, ``bad_signature``, ``signer_unknown``, ``unreadable_file``, ``no_ssh_keygen``.
    """
    data, signature = _read(description), description + ".sig"
    if not os.path.isfile(signature):
        raise RefusedError(
            "not_signed",
            f"{signature} is not there; engine_allowed_signers asks for a signature",
            "set engine_signing_key where engines are built; an archive that you trust: "
            f"ssh-keygen -Y sign -n {NAMESPACE} -f KEY {description}",
        )
    _read(allowed_signers)  # ssh-keygen would report a file that it cannot read like an unknown key
    valid = _keygen("check-novalidate", ["-n", NAMESPACE, "-s", signature], data)
    if valid.returncode:
        raise RefusedError(
            "bad_signature",
            f"{signature} is no signature of {description} as it is ({_words(valid)})",
            "one of them was changed: bring archive, description and signature again from where they were made",
        )
    named = _keygen("find-principals", ["-f", allowed_signers, "-s", signature], data)
    for principal in [] if named.returncode else named.stdout.decode().splitlines():
        # only this one decides: the two before are there for the message, and for the name that it wants
        named = _keygen("verify", ["-f", allowed_signers, "-I", principal, "-n", NAMESPACE, "-s", signature], data)
        if not named.returncode:
            return data
    key = re.search(r"with (.*)", valid.stdout.decode(errors="replace"))
    raise RefusedError(
        "signer_unknown",
        f"{description} was signed with {key.group(1) if key else 'a key'}, which {allowed_signers} does not let sign "
        f"engines ({_words(named)})",
        "add the signer's public key to that file, if you trust it",
    )


def check_archive(archive: str, engine: Mapping[str, Any], allowed_signers: str) -> Dict[str, Any]:
    """Return the description of a kept archive that an allowed signer has signed, and that is true.

    :param engine: ``id``, ``digest`` and optionally ``accepts``.
    :raises RefusedError: as :func:`read_verified`; ``wrong_archive``, ``archive_damaged``.
    """
    path = archive + ".json"
    described: Dict[str, Any] = files.parse_json(read_verified(path, allowed_signers), "archive", path)
    manifest = described["manifest"]
    if manifest["id"] != engine["id"] or manifest["digest"] not in (engine.get("accepts") or [engine["digest"]]):
        raise RefusedError(
            "wrong_archive",
            f"{path} is signed for engine {manifest['id']} (digest {manifest['digest']}), expected {engine['id']} "
            f"({engine['digest']})",
            "put the archive, its description and its signature back, or delete them",
        )
    source_files.verified(archive, described["sha256"], "archive_damaged", own=False)
    return described


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as handle:
            return handle.read()
    except OSError as error:
        raise UsageError("unreadable_file", f"cannot read {path}: {error.strerror}") from None


def _keygen(action: str, options: Sequence[str], data: bytes) -> subprocess.CompletedProcess[bytes]:
    try:
        # in a session of its own it has no terminal to ask for a passphrase, which nobody would answer in a play
        return subprocess.run(
            ["ssh-keygen", "-Y", action, *options],
            input=data, capture_output=True, check=False, start_new_session=True,
            env={**os.environ, "LC_ALL": "C", "SSH_ASKPASS_REQUIRE": "never"},
        )  # fmt: skip
    except FileNotFoundError:
        raise RefusedError("no_ssh_keygen", "this controller has no ssh-keygen", "install openssh-client") from None


def _words(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").split("\n")
    return "; ".join(line.strip() for line in lines if line.strip()) or f"exit status {done.returncode}"
