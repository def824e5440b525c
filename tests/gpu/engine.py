"""The lane's process, started as its unit starts it, asked as a client asks it, and stopped as systemd stops it."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import http.client
import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from vllm_fleet import files, journal, release, runtime_env, start
from vllm_fleet.commands import wait_ready
from vllm_fleet.facts import host, units

from .place import KEY_FILE, LANE
from .report import StepError

_PR_SET_CHILD_SUBREAPER = 36
#: systemd kills what is left of the group at once; a worker that ends by itself within this is no orphan
GRACE_S = 5.0


def adopt_orphans() -> None:
    """Make this process the parent of whatever its children leave behind, so that they can be seen."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> dict[int, str]:
    """Return the living processes below this one: pid to command line."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
                if fields[0] not in "ZX":
                    parents[int(entry)] = int(fields[1])
    below, grown = {os.getpid()}, True
    while grown:
        grown = False
        for pid, parent in parents.items():
            if parent in below and pid not in below:
                below.add(pid)
                grown = True
    found = {}
    for pid in below - {os.getpid()}:
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    return found


class Engine:
    """One start of the lane's current release."""

    def __init__(self) -> None:
        self.lane: dict[str, Any] = files.read_json(f"{release.LANES}/{LANE}/current/lane.json", "lane")
        self.argv, self.env = self._as_the_unit()
        self.process: subprocess.Popen[bytes] | None = None
        self.offset = 0

    def _as_the_unit(self) -> tuple[list[str], dict[str, str]]:
        """Return the command line and the whole environment that the unit's files give the process."""
        rendered = self.lane["rendered"]
        runtime = runtime_env.parse(Path(f"{start.RUN}/{LANE}/runtime.env").read_text())
        name, _, key = Path(f"{start.RUN}/{LANE}/secret.env").read_text().strip().partition("=")
        env = {**rendered["env"], **runtime, name: key}
        for unset in rendered["unset"]:
            env.pop(unset, None)
        account = host.user(start.SERVICE_USER)
        # what systemd adds for a service with a user, and its locale
        env.setdefault("LANG", "C.UTF-8")
        env.setdefault("HOME", account["home"] if account else self.lane["workdir"])
        env.setdefault("USER", account["name"] if account else "root")
        return [*rendered["argv"], *runtime[runtime_env.ENGINE_ARGS].split()], env

    def start(self) -> dict[str, Any]:
        """Start the engine and wait until it has answered completions; return seconds and what its log says of them.

        :raises StepError: it ended or did not answer; the text is what the product says of it.
        """
        account = host.user(start.SERVICE_USER)
        said: list[str] = []
        with open(self.lane["log"], "ab") as log:
            self.offset = log.tell()
            began = time.monotonic()
            self.process = subprocess.Popen(
                self.argv, env=self.env, cwd=self.lane["workdir"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
                preexec_fn=host.demote(account) if account else None,  # noqa: PLW1509 - no threads here
            )  # fmt: skip
        original, journal.say = journal.say, lambda line, level="info": said.append(line)
        os.environ["VLLM_API_KEY"] = self.env["VLLM_API_KEY"]  # the unit's ExecStartPost has it too
        try:
            status = wait_ready.run(argparse.Namespace(lane=LANE, pid=self.process.pid))
        finally:
            journal.say = original
            del os.environ["VLLM_API_KEY"]
        figures = {"ready_s": round(time.monotonic() - began, 2), **self.log_figures()}
        if status:
            raise StepError(" ".join(said), {**figures, "log": self.log()[-6000:]})
        return figures

    def log(self) -> str:
        """Return what this start has written to the lane's log."""
        return units.read_log(self.lane["log"], self.offset, 4 << 20)

    def log_figures(self) -> dict[str, Any]:
        """Return the seconds that the engine itself gives to the parts of its start."""
        figures: dict[str, Any] = {}
        for name, pattern in (
            ("engine_init_s", r"init engine \([^)]*\) took ([\d.]+) s"),
            ("compile_s", r"torch\.compile (?:takes|took) ([\d.]+) s"),
            ("graph_capture_s", r"Graph capturing finished in ([\d.]+) sec"),
        ):
            found = re.findall(pattern, self.log())
            if found:
                figures[name] = max(float(value) for value in found)
        return figures

    def stop(self, limit: float) -> dict[str, Any]:
        """End the lane as its unit does: SIGTERM to the main process, then wait, then look what is left.

        :raises StepError: it took longer than ``limit`` seconds, or left processes behind.
        """
        if self.process is None:
            raise StepError("the engine was not started")
        began = time.monotonic()
        os.kill(self.process.pid, signal.SIGTERM)
        try:
            status = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            raise StepError(f"still running {limit:g} s after SIGTERM") from None
        figures: dict[str, Any] = {"stop_s": round(time.monotonic() - began, 2), "status": status}
        while descendants() and time.monotonic() - began < figures["stop_s"] + GRACE_S:
            time.sleep(0.05)
        figures["all_gone_s"] = round(time.monotonic() - began, 2)
        left = descendants()
        self.kill()
        if left:
            raise StepError(f"left behind: {'; '.join(f'{pid} {line}' for pid, line in left.items())}", figures)
        return figures

    def kill(self) -> None:
        """End everything that this start began."""
        for pid in descendants():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(30)

    # ---- as a client ----

    def _connect(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        key = Path(KEY_FILE).read_text().strip()
        connection = http.client.HTTPConnection(self.lane["host"], self.lane["port"], timeout=120)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
        return connection.getresponse()

    def counters(self) -> dict[str, float]:
        """Return the engine's own counters that show whether it moves."""
        text = self._connect("/metrics").read().decode()
        return {
            name: sum(
                float(value) for value in re.findall(rf"^vllm:{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
            )
            for name in ("generation_tokens_total", "num_requests_running", "request_success_total")
        }


class Stream(threading.Thread):
    """One streamed completion of exactly ``tokens`` tokens."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        super().__init__(daemon=True)
        self.engine, self.tokens = engine, tokens
        self.first_s: float | None = None
        self.seconds: float | None = None
        self.received = 0
        self.finish, self.error = "", ""
        self.begun = threading.Event()

    def run(self) -> None:
        began = time.monotonic()
        body = {
            "model": self.engine.lane["served_names"][0], "prompt": "Once upon a time", "max_tokens": self.tokens,
            "ignore_eos": True, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        try:
            response = self.engine._connect("/v1/completions", body)
            if response.status != 200:
                raise OSError(f"status {response.status}: {response.read(300)!r}")
            for raw in response:
                line = raw.strip()
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise OSError(str(event["error"])[:300])
                if event.get("usage"):
                    self.received = event["usage"]["completion_tokens"]
                for choice in event.get("choices") or []:
                    if self.first_s is None:
                        self.first_s = round(time.monotonic() - began, 4)
                        self.begun.set()
                    self.finish = choice.get("finish_reason") or self.finish
            self.seconds = round(time.monotonic() - began, 3)
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.begun.set()

    def whole(self) -> bool:
        """Return whether all of the answer arrived."""
        return not self.error and self.received == self.tokens and self.finish == "length"
