"""Network adapter: which interface holds an address."""

from __future__ import annotations

from typing import Optional

from . import units


def interface_of(address: str) -> Optional[str]:
    """Return the name of the interface that holds ``address``; None when none does.

    :raises OSError: the interfaces could not be read.
    """
    done = units.run(["ip", "-oneline", "address", "show", "to", address], timeout=10.0)
    if done.returncode:
        raise OSError(f"ip address show: {done.stderr.strip() or done.stdout.strip() or done.returncode}")
    for line in done.stdout.splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[3].split("/")[0] == address:
            return fields[1].split("@")[0]
    return None
