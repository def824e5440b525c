"""Who signed an engine's archive: with the real ssh-keygen, and every way in which a signature can be wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm_fleet import engine_signature
from vllm_fleet.errors import FleetError

from tests import in_process
from tests.unit.test_engine_steps import sha

ENGINE = {"id": "tiny", "digest": "d1"}


class Signed:
    """A kept archive with its description and signature, a key that may sign, and one that may not."""

    def __init__(self, folder: Path) -> None:
        self.archive = folder / "tiny-d1.tar.zst"
        self.description = Path(f"{self.archive}.json")
        self.signature = Path(f"{self.archive}.json.sig")
        self.allowed = folder / "allowed_signers"
        self.key, self.other = folder / "key", folder / "other"
        for key in (self.key, self.other):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)]
            subprocess.run(words, check=True)
        self.allow("fleet")
        self.archive.write_bytes(b"an engine")
        self.describe(self.key)

    def allow(self, who: str) -> None:
        self.allowed.write_text(f"{who} {Path(f'{self.key}.pub').read_text()}")

    def describe(self, key: Path, **changes: Any) -> None:
        about = {"sha256": sha(self.archive), "bytes": 9, "manifest": {**ENGINE, **changes}}
        self.description.write_text(json.dumps(about))
        self.signature.write_bytes(engine_signature.sign(self.description.read_bytes(), str(key)))

    def check(self, **engine: Any) -> dict[str, Any]:
        return engine_signature.check_archive(str(self.archive), {**ENGINE, **engine}, str(self.allowed))

    def refused(self, reason: str) -> str:
        with pytest.raises(FleetError) as caught:
            self.check()
        assert caught.value.reason == reason, caught.value.one_line()
        return caught.value.one_line()


@pytest.fixture
def signed(tmp_path: Path) -> Signed:
    return Signed(tmp_path)


@pytest.mark.parametrize(
    "who", ["fleet", "a@site,b@site", "*@site", f'fleet namespaces="{engine_signature.NAMESPACE}"']
)
def test_what_an_allowed_signer_signed_is_returned(signed: Signed, who: str) -> None:
    signed.allow(who)
    assert signed.check() == json.loads(signed.description.read_text())
    assert signed.check(digest="d2", accepts=["d1", "d2"])["manifest"] == ENGINE


def test_a_tampered_description(signed: Signed) -> None:
    """The hash of another archive in it is such a change."""
    signed.archive.write_bytes(b"another engine")
    about = json.loads(signed.description.read_text())
    signed.description.write_text(json.dumps({**about, "sha256": sha(signed.archive)}))
    text = signed.refused("bad_signature")
    assert str(signed.signature) in text
    assert "incorrect signature" in text


def test_a_tampered_archive(signed: Signed) -> None:
    signed.archive.write_bytes(b"An engine")
    text = signed.refused("archive_damaged")
    assert str(signed.archive) in text
    assert sha(signed.archive) in text
    assert signed.archive.exists(), "the evidence is left"


def test_another_key(signed: Signed) -> None:
    signed.describe(signed.other)
    words = ["ssh-keygen", "-l", "-f", f"{signed.other}.pub"]
    fingerprint = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[1]
    text = signed.refused("signer_unknown")
    assert fingerprint in text
    assert str(signed.allowed) in text


@pytest.mark.parametrize("limit", ['namespaces="git"', 'valid-before="20200101"', "cert-authority"])
def test_a_key_that_is_named_for_something_else(signed: Signed, limit: str) -> None:
    signed.allow(f"fleet {limit}")
    signed.refused("signer_unknown")


def test_a_signature_made_for_another_purpose(signed: Signed) -> None:
    signed.signature.unlink()
    words = ["ssh-keygen", "-q", "-Y", "sign", "-n", "git", "-f", str(signed.key), str(signed.description)]
    subprocess.run(words, check=True, capture_output=True)
    signed.refused("bad_signature")


def test_no_signature(signed: Signed) -> None:
    """The command in the message makes the one that is missing."""
    signed.signature.unlink()
    text = signed.refused("not_signed")
    command = text[text.index("ssh-keygen -Y") :].replace("KEY", str(signed.key)).split()
    subprocess.run(command, check=True, capture_output=True)
    assert signed.check()


@pytest.mark.parametrize("garbage", [b"", b"\0\xff", b"-----BEGIN SSH SIGNATURE-----\nAAAA\n"])
def test_a_signature_that_is_none(signed: Signed, garbage: bytes) -> None:
    signed.signature.write_bytes(garbage)
    signed.refused("bad_signature")


@pytest.mark.parametrize("what", [{"id": "small"}, {"digest": "d0"}])
def test_a_signed_archive_of_another_engine_under_this_name(signed: Signed, what: dict[str, str]) -> None:
    signed.describe(signed.key, **what)
    text = signed.refused("wrong_archive")
    assert next(iter(what.values())) in text


def test_no_file_of_allowed_signers(signed: Signed) -> None:
    signed.allowed.unlink()
    assert str(signed.allowed) in signed.refused("unreadable_file")


def test_a_key_that_cannot_sign_asks_nobody(signed: Signed, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    shutil.copy2(signed.key, locked)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(locked)], check=True, capture_output=True)
    for key in (locked, tmp_path / "none", signed.archive):
        with pytest.raises(FleetError) as caught:
            engine_signature.sign(b"x", str(key))
        assert caught.value.reason == "signing_failed"
        assert str(key) in caught.value.message


def test_without_ssh_keygen(signed: Signed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "openssh-client" in signed.refused("no_ssh_keygen")


def test_the_module_returns_what_was_signed(signed: Signed, monkeypatch: pytest.MonkeyPatch) -> None:
    module = in_process.load("engine_signature", monkeypatch)
    task = {"engine": ENGINE, "archive": str(signed.archive), "allowed_signers": str(signed.allowed)}
    result = in_process.run(module, monkeypatch, check=True, **task)
    assert (result["changed"], result["reason"], result["description"]["manifest"]) == (False, "verified", ENGINE)
    signed.signature.unlink()
    result = in_process.run(module, monkeypatch, **task)
    assert (result["failed"], result["reason"]) == (True, "not_signed")
    assert "engine tiny: " in result["msg"]
