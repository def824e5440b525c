"""Version numbers as tools print them, compared as numbers (12.10 is newer than 12.9)."""

from __future__ import annotations

import re
from typing import Optional, Sequence, Tuple

Release = Tuple[int, int]

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# The header row starts with the tool's name and its own version; sentences ("NVIDIA-SMI has failed …") do not.
_HEADER = re.compile(r"^\W*(?:NVIDIA-SMI\s+\d|IX-ML:?\s+\d)")
_DRIVER = re.compile(r"\b(?:Driver|KMD) Version:\s*(\d+(?:\.\d+)+)")
_CUDA = re.compile(r"\bCUDA (?:UMD )?Version:\s*(\d+)\.(\d+)")
_NVCC = re.compile(r"\brelease\s+(\d+)\.(\d+)\b")
_NVCC_BUILD = re.compile(r"\bV(\d+)\.(\d+)\.\d+")
_GCC_LIMIT = re.compile(r"__GNUC__\s*>\s*(\d+)")
_RELEASE = re.compile(r"^\s*[vV]?(\d+)\.(\d+)(?:\.\d+)*\s*$")


class SmiHeader:
    """What the header row of ``nvidia-smi`` or ``ixsmi`` says; a field that is absent or ``N/A`` is ``None``."""

    def __init__(self, driver: Optional[str], cuda: Optional[Release]) -> None:
        self.driver = driver
        self.cuda = cuda


def parse_smi_header(text: str) -> SmiHeader:
    """Read driver version and CUDA release from the table header of ``nvidia-smi`` or ``ixsmi``.

    The text is the fallback; NVML is asked first. Drivers from 610 on print ``KMD Version`` and ``CUDA UMD Version``
    where older ones print ``Driver Version`` and ``CUDA Version``.
    """
    for line in _ESCAPES.sub("", text).splitlines():
        if _HEADER.match(line):
            driver = _DRIVER.search(line)
            cuda = _CUDA.search(line)
            return SmiHeader(
                driver.group(1) if driver else None,
                (int(cuda.group(1)), int(cuda.group(2))) if cuda else None,
            )
    return SmiHeader(None, None)


def parse_nvcc(text: str) -> Optional[Release]:
    """Return the CUDA release from ``nvcc --version``, or ``None`` when the text names none."""
    found = _NVCC.search(text) or _NVCC_BUILD.search(text)
    return (int(found.group(1)), int(found.group(2))) if found else None


def parse_release(text: str) -> Optional[Release]:
    """Return ``(major, minor)`` of a plain version such as ``13.0`` or ``13.0.88``, else ``None``."""
    found = _RELEASE.match(text)
    return (int(found.group(1)), int(found.group(2))) if found else None


def parse_compiler(text: str) -> Tuple[str, Optional[int]]:
    """Return ``(family, major version)`` from ``cc --version``; family is ``gcc``, ``clang`` or ``unknown``.

    Distributions put their package version in parentheses; the compiler's own is the first one outside them.
    """
    first = text.strip().splitlines()[0] if text.strip() else ""
    plain = re.sub(r"\([^)]*\)", " ", first)
    number = re.search(r"\b(\d+)\.\d+", plain)
    family = "clang" if "clang" in first.lower() else "gcc" if "Free Software Foundation" in text else "unknown"
    return family, int(number.group(1)) if number else None


def parse_gcc_limit(host_config: str) -> Optional[int]:
    """Return the newest gcc major version that ``crt/host_config.h`` of a CUDA toolkit accepts, if it names one."""
    found = _GCC_LIMIT.findall(host_config)
    return max(int(value) for value in found) if found else None


def show(release: Optional[Sequence[int]]) -> str:
    """Return ``13.0`` for ``(13, 0)`` and ``unknown`` for ``None``."""
    return ".".join(str(part) for part in release) if release else "unknown"


def newer(left: Sequence[int], right: Sequence[int]) -> bool:
    """Return whether ``left`` is a newer release than ``right``, compared as numbers."""
    return tuple(left) > tuple(right)
