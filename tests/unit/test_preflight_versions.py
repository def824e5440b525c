"""Version texts as tools really print them, and those that only look like one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_fleet import versions

OLD = "| NVIDIA-SMI 552.22      Driver Version: 552.22      CUDA Version: 12.6     |"
NEW = "| NVIDIA-SMI 610.43.02   KMD Version: 610.43.02     CUDA UMD Version: 13.3 |"


@pytest.mark.parametrize(
    ("text", "driver", "cuda"),
    [
        (OLD, "552.22", (12, 6)),
        (NEW, "610.43.02", (13, 3)),
        (f"Mon Nov 30 10:00:00 2026\n+----+\n{NEW}\n+----+", "610.43.02", (13, 3)),
        (f"\x1b[4m{OLD}\x1b[0m", "552.22", (12, 6)),
        ("| NVIDIA-SMI 610.43.02   KMD Version: 610.43.02     CUDA Version: 13.10 |", "610.43.02", (13, 10)),
        ("| NVIDIA-SMI 535.183.01   Driver Version: N/A   CUDA Version: N/A |", None, None),
        ("| NVIDIA-SMI 535.183.01   Driver Version: 535.183.01   CUDA Version: ERR! |", "535.183.01", None),
        ("|  IX-ML: 4.0.0       Driver Version: 4.2.0       CUDA Version: 10.2 |", "4.2.0", (10, 2)),
        ("|  IX-ML: 3.2.3       Driver Version: 3.2.1       CUDA Version: N/A |", "3.2.1", None),
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.183", None, None),
        ("NVIDIA-SMI has failed because it needs Driver Version: 1.2 and CUDA Version: 12.4", None, None),
        ("Note: this build was made with CUDA Version: 12.4; CUDA Version: 13.0 is required", None, None),
        ("", None, None),
    ],
)
def test_smi_header(text: str, driver: str | None, cuda: tuple[int, int] | None) -> None:
    header = versions.parse_smi_header(text)
    assert (header.driver, header.cuda) == (driver, cuda)


@pytest.mark.parametrize(
    ("text", "release"),
    [
        (
            "nvcc: NVIDIA (R)\nCuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0",
            (13, 0),
        ),
        ("Cuda compilation tools, release 12.10, V12.10.1", (12, 10)),
        ("Cuda compilation tools V11.8.89", (11, 8)),
        ("nvcc: command not found", None),
        ("Copyright (c) 2005-2025 NVIDIA Corporation", None),
        ("", None),
    ],
)
def test_nvcc(text: str, release: tuple[int, int] | None) -> None:
    assert versions.parse_nvcc(text) == release


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("g++ (Debian 12.2.0-14) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc.", ("gcc", 12)),
        (
            "gcc (GCC) 14.2.1 20240912 (Red Hat 14.2.1-3)\nCopyright (C) 2024 Free Software Foundation, Inc.",
            ("gcc", 14),
        ),
        ("g++ (Ubuntu 9.4.0-1ubuntu1~20.04.2) 9.4.0\nCopyright (C) 2019 Free Software Foundation, Inc.", ("gcc", 9)),
        ("Debian clang version 14.0.6\nTarget: x86_64-pc-linux-gnu", ("clang", 14)),
        ("tcc", ("unknown", None)),
        ("", ("unknown", None)),
    ],
)
def test_compiler(text: str, expected: tuple[str, int | None]) -> None:
    assert versions.parse_compiler(text) == expected


def test_gcc_limit_is_the_toolkit_s_own_number() -> None:
    header = (
        "#if __GNUC__ < 6\n#endif\n#if __GNUC__ > 15\n#error -- unsupported GNU version! gcc versions later than 15\n"
    )
    assert versions.parse_gcc_limit(header) == 15
    assert versions.parse_gcc_limit("no limit here") is None


@pytest.mark.parametrize(("text", "release"), [("13.0", (13, 0)), ("v12.10.3", (12, 10)), ("13", None), ("13.x", None)])
def test_release(text: str, release: tuple[int, int] | None) -> None:
    assert versions.parse_release(text) == release


def test_show_and_compare() -> None:
    assert versions.show((13, 0)) == "13.0"
    assert versions.show(None) == "unknown"
    assert versions.newer((12, 10), [12, 9])
    assert not versions.newer([13, 0], (13, 0))


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_is_read_without_an_error(text: str) -> None:
    versions.parse_smi_header(text)
    versions.parse_nvcc(text)
    versions.parse_compiler(text)
    versions.parse_gcc_limit(text)


@settings(max_examples=100, deadline=None)
@given(st.tuples(st.integers(0, 99), st.integers(0, 99)), st.tuples(st.integers(0, 99), st.integers(0, 99)))
def test_releases_compare_as_numbers(left: tuple[int, int], right: tuple[int, int]) -> None:
    assert versions.newer(left, right) == (left[0] * 100 + left[1] > right[0] * 100 + right[1])
