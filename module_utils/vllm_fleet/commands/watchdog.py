"""``vllm-fleet watchdog LANE``: what ``vllm-watchdog@LANE.service`` runs beside a lane for as long as the box is up."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

from .. import journal, peers, release, start, watchdog, wide
from ..errors import FleetError
from ..facts import engine_http, peer_link, units
from ..files import read_json, write_atomic

STATE = "/var/lib/vllm-fleet/watchdog"
#: seconds between two looks at the other boxes of a lane, and at the unit
TICK_S = 2.0
#: a unit that was ended and is still the same process after this time is ended again
RETRY_S = 60.0
#: an unchanged state is written again this often, so that its age says whether anybody is watching
HEARTBEAT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("lane", help="the lane's name")


def run(args: argparse.Namespace) -> int:
    """Watch until the program itself is replaced; systemd starts the new one."""
    program = os.path.realpath(sys.argv[0])
    installed = _identity(program)
    watcher = Watcher(args.lane)
    while _identity(program) == installed:
        watcher.tick(time.monotonic())
        time.sleep(TICK_S)
    journal.say(f"lane {args.lane}: the program was replaced; the new one goes on")
    return 0


def _identity(path: str) -> Tuple[int, int]:
    """Return what changes when a file is replaced."""
    try:
        found = os.stat(path)
        return found.st_ino, found.st_mtime_ns
    except OSError:
        return 0, 0


class Watcher:
    """One lane's watchdog: looks, lets the pure rules judge, acts, and says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.unit = f"vllm@{name}.service"
        self.release = ""
        self.lane: Dict[str, Any] = {}
        self.engine = watchdog.empty_memory()
        self.looked_at = float("-inf")
        self.ended: Tuple[float, str] = (float("-inf"), "")
        self.teller = peer_link.Teller()
        self.peers_file = os.path.join(release.RUNTIME, name, "peers.json")
        self.peers = {**peers.empty_memory(), **_read(self.peers_file)}
        past = _read(os.path.join(STATE, f"{name}.json"))
        self.restarts: List[Dict[str, str]] = list(past.get("restarts") or [])
        self.total = int(past.get("restarts_total") or 0)
        self.written: Tuple[float, Any] = (float("-inf"), None)
        self.verdict = watchdog.Verdict("unknown", "not_looked", "")
        self.row: Dict[str, Any] = {}

    def tick(self, now: float) -> None:
        """Look once; errors of one look are said and end with it."""
        try:
            self._load()
            if not self.lane:
                self._note(now, watchdog.Verdict("unknown", "no_release", "the lane has no current release"))
                return
            state = units.unit_state(self.unit)
            if wide.is_wide(self.lane):
                self._look_at_peers(state, now)
            else:
                self.teller.close()
                self.row = {}
            self._look_at_engine(state, now)
        except (FleetError, OSError) as error:
            text = error.one_line() if isinstance(error, FleetError) else str(error)
            self._note(now, watchdog.Verdict("unknown", "cannot_look", text))

    def _load(self) -> None:
        current = os.path.realpath(os.path.join(release.LANES, self.name, "current"))
        if current == self.release:
            return
        path = os.path.join(current, "lane.json")
        self.lane = read_json(path, "lane") if os.path.exists(path) else {}
        self.release = current if self.lane else ""

    # ---- the other boxes ---------------------------------------------------------------------------------------------

    def _look_at_peers(self, state: Dict[str, Any], now: float) -> None:
        place = self.lane["part"]
        box, address = place["boxes"][place["rank"]], dict(zip(place["boxes"], place["addresses"]))
        own = peers.record(self.name, box, state, self.peers["partners"])
        self.teller.say(own)
        self.teller.listen(address[box], place["peer_port"])
        asked = {other: address[other] for other in peers.watched(place)}
        seen = peer_link.ask_all(asked, place["peer_port"], self.name)
        memory, action = peers.judge(self.peers, own, seen, now, leads=place["rank"] == 0)
        if memory != self.peers:
            for other in sorted(set(memory["partners"]) - set(self.peers["partners"])):
                journal.say(f"joined: lane {self.name} with its part on {other}")
            self.peers = memory
            os.makedirs(os.path.dirname(self.peers_file), exist_ok=True)
            write_atomic(self.peers_file, json.dumps(memory, sort_keys=True).encode() + b"\n", mode=0o644)
            self.teller.say({**own, "partners": memory["partners"]})
        self.row = {
            other: {
                "status": answer["status"],
                "state": (answer.get("record") or {}).get("state"),
                "joined": other in memory["partners"],
            }
            for other, answer in seen.items()
        }
        if action is not None and not self._just_ended(state, now):
            self._act(action, state, now)

    # ---- the engine --------------------------------------------------------------------------------------------------

    def _look_at_engine(self, state: Dict[str, Any], now: float) -> None:
        given = watchdog.limits(self.lane)
        if self._just_ended(state, now):
            return
        if state["ActiveState"] != "active":
            self.engine = watchdog.empty_memory()
            self.looked_at = float("-inf")
            reason = {"failed": state["Result"].replace("-", "_") or "failed"}.get(
                state["ActiveState"], state["SubState"]
            )
            status = "down" if state["ActiveState"] in ("failed", "inactive") else "starting"
            self._note(now, watchdog.Verdict(status, reason.replace("-", "_"), f"unit {state['ActiveState']}"))
            return
        if not wide.has_api(self.lane):
            self._note(now, watchdog.Verdict("ok", "member", "the head is watched for the whole lane"))
            return
        if state["InvocationID"] != self.engine["invocation"]:
            self.engine = watchdog.empty_memory(state["InvocationID"])
        elif now - self.looked_at < given["interval_s"]:
            return
        self.looked_at = now
        host, port = self.lane["host"], int(self.lane["port"])
        code, text = engine_http.fetch(host, port, "/metrics", timeout=max(5.0, min(15.0, given["silent_s"] / 2)))
        found = watchdog.engines(text if code == 200 else None)
        probe = self._probe(given["probe_s"]) if watchdog.wants_probe(self.engine, found, now, given) else None
        self.engine, verdict = watchdog.judge(self.engine, found, probe, time.monotonic(), given)
        if verdict.status == "dead":
            self._act(peers.Action("kill", verdict.reason, verdict.message), state, now)
            return
        if verdict.status == "suspect" and self.verdict.reason != verdict.reason:
            journal.say(f"{verdict.reason}: lane {self.name}: {verdict.message}", "warning")
        self._note(now, verdict)

    def _probe(self, timeout: float) -> str:
        host, port, name = self.lane["host"], int(self.lane["port"]), self.lane["served_names"][0]
        answered, _ = engine_http.complete(host, port, name, start.api_key(self.lane), timeout)
        if answered is None or answered >= 500:
            return "failed"
        return "answered" if answered == 200 else "refused"

    # ---- acting and telling ------------------------------------------------------------------------------------------

    def _just_ended(self, state: Dict[str, Any], now: float) -> bool:
        """Return whether this is a process that was ended a moment ago and is not gone yet."""
        return state["InvocationID"] == self.ended[1] and now - self.ended[0] < RETRY_S

    def _act(self, action: peers.Action, seen: Dict[str, Any], now: float) -> None:
        """Do it, unless the unit has moved on since it was looked at."""
        state = units.unit_state(self.unit)
        if (state["InvocationID"], state["ActiveState"]) != (seen["InvocationID"], seen["ActiveState"]):
            return
        level = "info" if action.verb == "start" else "error"
        done = {"kill": "ended, systemd starts it again", "stop": "stopped", "start": "started"}[action.verb]
        journal.say(f"{action.reason}: lane {self.name} {done}: {action.message}", level)
        if action.verb == "kill":
            # What hangs does not drain; systemd starts it again, within the unit's limit of starts.
            command = [["systemctl", "kill", "--signal=SIGKILL", self.unit]]
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self.restarts = watchdog.restarts_kept(self.restarts, when, action.reason)
            self.total += 1
            self.ended = (now, seen["InvocationID"])
            self._note(now, watchdog.Verdict("dead", action.reason, action.message))
        elif action.verb == "stop":
            command = [["systemctl", "stop", "--no-block", self.unit]]
        else:
            command = [["systemctl", "reset-failed", self.unit], ["systemctl", "start", "--no-block", self.unit]]
        for argv in command:
            failed = units.run(argv)
            if failed.returncode and argv[1] != "reset-failed":
                journal.say(f"systemctl_failed: {' '.join(argv)}: {failed.stderr.strip()}", "error")
        self.engine = watchdog.empty_memory()

    def _note(self, now: float, verdict: watchdog.Verdict) -> None:
        """Keep how the lane stands on disk, when it changed and now and then."""
        self.verdict = verdict
        row = {
            "schema": 1,
            "lane": self.name,
            "status": verdict.status,
            "reason": verdict.reason,
            "message": verdict.message,
            "restarts_total": self.total,
            "restarts": self.restarts,
            "peers": self.row,
        }
        unchanged = self.written[1] is not None and {**row, "message": ""} == {**self.written[1], "message": ""}
        if unchanged and now - self.written[0] < HEARTBEAT_S:
            return
        os.makedirs(STATE, mode=0o755, exist_ok=True)
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        text = json.dumps({**row, "time": when}, indent=1, sort_keys=True) + "\n"
        write_atomic(os.path.join(STATE, f"{self.name}.json"), text.encode(), mode=0o644)
        self.written = (now, row)


def _read(path: str) -> Dict[str, Any]:
    """Return a JSON object of the watchdog's own; an absent or damaged one is as good as none."""
    data: Optional[Any] = None
    with contextlib.suppress(FleetError):
        data = read_json(path, "state") if os.path.exists(path) else None
    return data if isinstance(data, dict) else {}
