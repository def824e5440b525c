"""Constant load on the lab's balancer: real requests of a client library, streaming and not, each of them counted."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field

import httpx

#: clients at the same time, and the pause of each between two requests: enough to have requests in flight at every
#: moment, few enough to leave a small machine room to start engines
CLIENTS, PAUSE_S = 2, 0.5
TIMEOUT_S = 180.0


@dataclass
class Report:
    """What the clients saw."""

    requests: int = 0
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class Load:
    """Clients that ask until they are stopped; use as a context manager, then read :attr:`report`."""

    def __init__(self, url: str, key: str, model: str = "tiny", clients: int = CLIENTS) -> None:
        self._client = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT_S, trust_env=False
        )
        self._model, self._stop, self._lock = model, threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]
        self.report = Report()

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def _run(self, number: int) -> None:
        turn = number
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                wrong = self._streamed(turn) if turn % 2 else self._whole(turn)
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                wrong = f"{type(error).__name__}: {error}"
            took = time.monotonic() - began
            with self._lock:
                self.report.requests += 1
                self.report.slowest_s = max(self.report.slowest_s, took)
                if wrong:
                    self.report.failures.append(f"{time.strftime('%H:%M:%S')} after {took:.1f} s: {wrong}")
            turn += 1
            self._stop.wait(PAUSE_S)

    def _body(self, turn: int) -> dict[str, object]:
        # Long and short ones, so that a drain meets requests of every age.
        return {"model": self._model, "max_tokens": 8 + 32 * (turn % 3), "temperature": 0, "ignore_eos": True}

    def _whole(self, turn: int) -> str:
        """Ask for a completion in one piece; return what is wrong with the answer."""
        body = self._body(turn)
        answer = self._client.post("/v1/completions", json={**body, "prompt": f"Request {turn}"})
        if answer.status_code != 200:
            return f"HTTP {answer.status_code} {answer.text[:200]}"
        tokens = answer.json()["usage"]["completion_tokens"]
        return "" if tokens == body["max_tokens"] else f"{tokens} tokens of {body['max_tokens']}"

    def _streamed(self, turn: int) -> str:
        """Ask for a chat completion as a stream; it must reach its end."""
        body = {**self._body(turn), "messages": [{"role": "user", "content": f"Request {turn}"}], "stream": True}
        finish, done = None, False
        with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                return f"HTTP {answer.status_code} {answer.read()[:200]!r}"
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return f"error in the stream: {event['error']}"
                    finish = event["choices"][0]["finish_reason"] or finish
        return "" if done and finish == "length" else f"the stream was cut: finish_reason {finish}, end seen: {done}"
