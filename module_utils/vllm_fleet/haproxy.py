"""What HAProxy's runtime socket says, as plain data, and what may be asked of it. Pure; the socket is an adapter's.

Sources: HAProxy management guide, "Statistics and monitoring" (CSV) and "Unix Socket commands".
"""

from __future__ import annotations

import csv
import io
import re
from typing import Any, Dict, List, Mapping, Sequence

from .errors import RefusedError, UsageError
from .wide import has_api

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

    A row is ``{"pool", "server", "admin": "ready|drain|maint", "up": bool, "in_flight": n, "errors": n,
    "in_rotation": bool}``; ``in_flight`` counts requests that the server has or that wait for it, ``errors`` the 5xx
    answers and the broken ones that clients got since HAProxy started.

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
                # What clients got from it: 5xx answers, and answers that broke off.
                "errors": _number(entry["hrsp_5xx"]) + _number(entry["eresp"]),
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


def quoted(text: str) -> str:
    """Return ``text`` as one word of HAProxy's configuration, in strong quotes, in which nothing is expanded.

    :raises UsageError: ``bad_character`` for control characters.
    """
    if any(character < " " or character == "\x7f" for character in text):
        raise UsageError("bad_character", f"{text!r} holds a control character, which HAProxy's configuration cannot.")
    return "'" + text.replace("'", "'\\''") + "'"


def _pool_name(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", model)


_LOOPBACK = re.compile(r"127\.|::1$|localhost$")
_EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104 - compared, not bound


def pools(
    boxes: Mapping[str, Mapping[str, Any]],
    ports: Mapping[str, int],
    port: int,
    exclude: Sequence[str] = (),
    balancer: str = "",
) -> List[Dict[str, Any]]:
    """Group the fleet's lanes by the model that they serve: one pool, with a port of its own, for each model.

    The port tells which model is meant, so that no request body is read before it is passed on.

    :param boxes: box name to ``{"address", "lanes": resolved lanes, "keys": {lane: API key}}``.
    :param ports: model to port; :param port: what the only model gets without an entry.
    :param exclude: servers (``box:lane``) that are in no rotation.
    :param balancer: the balancer's own name in the inventory; lanes on loopback can be reached from there alone.
    :returns: ``[{"name", "model", "port", "key", "servers": [{"name", "address", "port"}]}]``, sorted.
    :raises RefusedError: ``no_lanes``, ``lane_on_loopback``, ``pool_keys_differ``, ``pool_key_missing``,
        ``pool_port_missing``, ``pool_port_taken``, ``pool_name_taken``, ``unknown_exclude``.
    """
    found: Dict[str, Dict[str, Any]] = {}
    known = set()
    for box in sorted(boxes):
        for lane in boxes[box]["lanes"]:
            name = server_name(box, lane["lane"])
            known.add(name)
            if name in exclude or not has_api(lane):
                continue
            host = boxes[box]["address"] if lane["host"] in _EVERYWHERE else lane["host"]
            if _LOOPBACK.match(host) and box != balancer:
                raise RefusedError(
                    "lane_on_loopback",
                    f"lane {lane['lane']} of {box} listens on {host}, where the balancer cannot reach it",
                    f"give the lane a host that it can reach, or list {name} in balancer_exclude",
                )
            key = boxes[box].get("keys", {}).get(lane["lane"]) if lane.get("api_key_file") else None
            if lane.get("api_key_file") and not key:
                raise RefusedError(
                    "pool_key_missing", f"no API key for lane {name} in the inventory", "put it into serve_api_keys"
                )
            model = lane["served_names"][0]
            pool = found.setdefault(model, {"model": model, "key": key, "servers": []})
            if pool["key"] != key:
                raise RefusedError(
                    "pool_keys_differ",
                    f"{name} has another API key than {pool['servers'][0]['name']}, and both serve {model}",
                    "a balancer writes the key before it chooses the server: give the lanes of a model one key",
                )
            pool["servers"].append({"name": name, "address": host, "port": int(lane["port"])})
    unknown = sorted(set(exclude) - known)
    if unknown:
        raise RefusedError("unknown_exclude", f"{', '.join(unknown)} in balancer_exclude: no such box and lane")
    if not found:
        raise RefusedError("no_lanes", "no lane of the inventory is to be balanced")
    made = []
    for model in sorted(found):
        chosen = ports.get(model, port if len(found) == 1 else None)
        if chosen is None:
            raise RefusedError(
                "pool_port_missing",
                f"the fleet serves {', '.join(sorted(found))}; {model} has no port of its own",
                "set balancer_ports, model to port",
            )
        made.append(dict(found[model], name=_pool_name(model), port=int(chosen)))
    for what, reason in (("port", "pool_port_taken"), ("name", "pool_name_taken")):
        values = [pool[what] for pool in made]
        twice = sorted({str(value) for value in values if values.count(value) > 1})
        if twice:
            raise RefusedError(reason, f"two models share the {what} {', '.join(twice)}")
    return made
