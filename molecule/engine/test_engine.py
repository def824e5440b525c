"""An installed engine is whole, verifiable, read-only for the lanes, and starts without compiling."""

from __future__ import annotations

import json

import pytest

from tests.testinfra_helpers import as_vllm, converge, owned

ROOT = "/opt/vllm-fleet/engines/vllm-0.32.0-cpu"
SITE = f"{ROOT}/venv/lib/python3.11/site-packages"
PROGRAM = "/opt/vllm-fleet/bin/vllm-fleet"


def test_the_engine_says_its_version_to_the_service_user(host):
    said = as_vllm(host, f"{ROOT}/venv/bin/vllm --version")
    assert said.rc == 0, said.stderr
    assert said.stdout.split()[-1] == "0.32.0+cpu"


def test_every_source_has_its_byte_code(host):
    """Without it every start would compile the library: minutes, as the lanes can't write here."""
    missing = host.check_output(
        f"cd {SITE}/vllm && find . -name '*.py' | while read -r f; do"
        ' c="${f%/*}/__pycache__/$(basename "$f" .py).cpython-311.pyc"; [ -s "$c" ] || echo "$f"; done'
    )
    assert missing == ""
    assert int(host.check_output(f"find {SITE}/torch -name '*.cpython-311.pyc' | wc -l")) > 1000


def test_the_byte_code_is_valid(host):
    """A stale one counts as none: importing may write nothing even where it could."""
    marker = host.check_output("touch /run/before && stat -c %Y /run/before")
    assert marker
    done = host.run(f"cd / && {ROOT}/venv/bin/python -c 'import vllm.engine.arg_utils'")
    assert done.rc == 0, done.stderr
    assert host.check_output(f"find {SITE}/vllm -newer /run/before -name '*.pyc' | head -3") == ""


def test_the_manifest_says_what_was_built_from_what(host):
    manifest = json.loads(host.check_output(f"cat {ROOT}/manifest.json"))
    assert manifest["id"] == "vllm-0.32.0-cpu"
    assert manifest["version"] == "0.32.0+cpu"
    assert manifest["interpreter"] == "/usr/bin/python3.11"
    assert manifest["python"] == host.check_output(
        "/usr/bin/python3.11 -c 'import platform as p; print(p.python_version())'"
    )
    assert len(manifest["digest"]) == 16
    assert len(manifest["lock_sha256"]) == 64


def test_nothing_half_made_is_left(host):
    assert host.check_output("ls -A /opt/vllm-fleet/engines").split() == [".lock", "vllm-0.32.0-cpu"]
    assert host.check_output("ls -A /opt/vllm-fleet/build") == ""


def test_the_lanes_cannot_change_it(host):
    assert owned(host, ROOT, f"{ROOT}/venv/bin/vllm") == {
        ROOT: "0755 root:root",
        f"{ROOT}/venv/bin/vllm": "0755 root:root",
    }
    assert as_vllm(host, f"find {ROOT} -writable ! -type l | head -3").stdout == ""


def test_the_products_verify_with_coreutils_alone(host):
    done = host.run(f"cd {SITE} && sha256sum --check --strict --quiet .build-products.sha256")
    assert done.rc == 0, done.stdout
    assert int(host.check_output(f"wc -l < {SITE}/.build-products.sha256")) > 1000


@pytest.fixture
def changed(host):
    """Change one byte of an extension module; put it back afterwards."""
    path = host.check_output(f"find {SITE}/vllm -maxdepth 1 -name '_C*.so' | sort | head -1")
    host.check_output(f"cp -p {path} /run/original")
    host.check_output(f"printf X | dd of={path} bs=1 seek=4096 conv=notrunc status=none")
    yield path
    host.check_output(f"cp -p /run/original {path}")


def test_the_products_verify(host):
    done = host.run(f"{PROGRAM} products verify --engine vllm-0.32.0-cpu {SITE}")
    assert done.rc == 0, done.stdout


def test_a_changed_product_is_named(host, changed):
    done = host.run(f"{PROGRAM} products verify --engine vllm-0.32.0-cpu {SITE}")
    assert done.rc == 1
    assert "changed: " in done.stdout
    assert changed.rpartition("/")[2] in done.stdout


def test_an_engine_of_other_inputs_under_the_same_id_is_refused(host):
    """An installed engine is never edited: the catalog entry needs a new id."""
    host.check_output(f'sed -i.kept \'s/"digest": "./"digest": "x/\' {ROOT}/manifest.json')
    try:
        played = converge()
    finally:
        host.check_output(f"mv {ROOT}/manifest.json.kept {ROOT}/manifest.json")
    assert played.returncode != 0
    assert "give the catalog entry a new id" in played.stdout


def test_a_second_run_moves_nothing(host):
    """The archive is neither built nor copied again."""
    before = host.check_output(f"stat -c '%i %Y' {ROOT}")
    played = converge()
    assert played.returncode == 0, played.stdout
    assert "Bring the archive to the box" not in played.stdout
    assert host.check_output(f"stat -c '%i %Y' {ROOT}") == before
