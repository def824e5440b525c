"""What HAProxy's runtime socket says, as plain data, and what may be asked of it. Pure; the socket is an adapter's.

Sources: HAProxy management guide, "Statistics and monitoring" (CSV) and "Unix Socket commands".
"""

from __future__ import annotations

import csv
import io
import re
from typing import Any, Dict, List, Mapping, Sequence

from .errors import RefusedError, UsageError

#: What a name may hold inside HAProxy's configuration and on its command line.
NAME = re.compile(r"[A-Za-z0-9_.:-]+", re.ASCII)

#: bits of ``srv_admin_state``: a person's or our drain, inherited drain; and any kind of maintenance
_DRAIN, _MAINTENANCE = 0x08 | 0x10, 0x01 | 0x02 | 0x04 | 0x20

#: values of ``srv_op_state``
_STOPPED = 0


def server_name(box: str, lane: str) -> str:
    """Return the name under which a balancer knows a lane.

    :raises UsageError: ``bad_server_name``.
    """
    name = f"{box}:{lane}"
    if not NAME.fullmatch(name):
        raise UsageError("bad_server_name", f"{name!r} holds characters that HAProxy does not take in a server's name.")
    return name


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def servers(stat: str, state: str) -> List[Dict[str, Any]]:
    """Join ``show stat`` and ``show servers state`` to one row for each server.

    A row is ``{"pool", "server", "admin": "ready|drain|maint", "up": bool, "in_flight": n, "in_rotation": bool}``;
    ``in_flight`` counts requests that the server has or that wait for it.

    :raises UsageError: ``bad_haproxy_answer`` when the texts are not what HAProxy prints.
    """
    lines = [line for line in state.splitlines() if line.strip()]
    if len(lines) < 2 or not lines[1].startswith("# "):
        raise UsageError("bad_haproxy_answer", f"'show servers state' answered {state[:80]!r}")
    columns = lines[1][2:].split()
    known = {}
    for line in lines[2:]:
        row = dict(zip(columns, line.split()))
        known[(row["be_name"], row["srv_name"])] = row
    if not stat.startswith("# pxname,"):
        raise UsageError("bad_haproxy_answer", f"'show stat' answered {stat[:80]!r}")
    rows = []
    for entry in csv.DictReader(io.StringIO(stat[2:])):
        row = known.get((entry["pxname"], entry["svname"]), {})
        if not row:
            continue
        bits = _number(row["srv_admin_state"])
        admin = "maint" if bits & _MAINTENANCE else "drain" if bits & _DRAIN else "ready"
        up = _number(row["srv_op_state"]) != _STOPPED
        rows.append(
            {
                "pool": entry["pxname"],
                "server": entry["svname"],
                "admin": admin,
                "up": up,
                "in_flight": _number(entry["scur"]) + _number(entry["qcur"]),
                "in_rotation": up and admin == "ready",
            }
        )
    return rows


def check_minimum(rows: Sequence[Mapping[str, Any]], leaving: Sequence[str], minimum: int) -> None:
    """Refuse to take servers out when fewer than ``minimum`` would stay in rotation in one of their pools.

    A server that is in no rotation leaves nothing, so it never lowers the number.

    :raises RefusedError: ``rotation_minimum``.
    """
    for pool in sorted({row["pool"] for row in rows if row["server"] in leaving and row["in_rotation"]}):
        staying = [
            row["server"] for row in rows if row["pool"] == pool and row["in_rotation"] and row["server"] not in leaving
        ]
        if len(staying) < minimum:
            raise RefusedError(
                "rotation_minimum",
                f"without {', '.join(leaving)} the pool {pool} would keep {len(staying)} server(s) in rotation; "
                f"at least {minimum} must stay",
                "bring the other boxes back first, take fewer boxes at a time, or allow it by the minimum",
            )
