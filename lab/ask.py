"""Ask every lane of the lab a question over HTTP, as a client would, and show what answers."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from . import boxes, registry
from .settings import INVENTORY, VENV
from .shell import LabError, run, say

QUESTION = "Say hi."
TIMEOUT_S = 60


@dataclass(frozen=True)
class Lane:
    """A lane as the inventory describes it."""

    box: str
    name: str
    address: str
    model: str


@dataclass(frozen=True)
class Answer:
    """What a lane said: the text of its answer or, with ``ok`` false, what went wrong."""

    ok: bool
    text: str
    engine: str
    tokens: int
    seconds: float


def lanes() -> list[Lane]:
    """Return the lanes of the lab's inventory, with its variables filled in by Ansible itself."""
    env = {**os.environ, "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json", "ANSIBLE_LOAD_CALLBACK_PLUGINS": "1"}
    done = run(
        [
            str(VENV / "bin" / "ansible"),
            "-i",
            str(INVENTORY),
            "gpu-boxes",
            "-m",
            "ansible.builtin.debug",
            "-a",
            "var=vllm_lanes",
        ],
        env=env,
        timeout=120,
    )
    hosts: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["plays"][0]["tasks"][0]["hosts"]
    return [
        Lane(box, lane["name"], f"{lane['host']}:{lane['port']}", lane["served_names"][0])
        for box in sorted(hosts)
        for lane in hosts[box]["vllm_lanes"]
        if lane.get("boxes", [box])[0] == box  # of a lane that spans boxes only the head answers
    ]


def _request(lane: Lane, path: str, body: dict[str, Any] | None = None) -> Any:
    key_file = registry.api_key_file(lane.box, lane.name)
    headers = {"Content-Type": "application/json"}
    if key_file.exists():
        headers["Authorization"] = f"Bearer {key_file.read_text().strip()}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{lane.address}{path}", data=data, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the lab network is never behind a proxy
    with opener.open(request, timeout=TIMEOUT_S) as response:
        text = response.read().decode()
    return json.loads(text) if text else None


def ask(lane: Lane, question: str = QUESTION) -> Answer:
    """Ask one lane; a lane that does not answer is an answer too."""
    started = time.monotonic()
    try:
        version = _request(lane, "/version")["version"]
        reply = _request(
            lane,
            "/v1/chat/completions",
            {
                "model": lane.model,
                "max_tokens": 8,
                "temperature": 0,
                "messages": [{"role": "user", "content": question}],
            },
        )
        choice, usage = reply["choices"][0], reply["usage"]
        if reply["model"] != lane.model:
            raise ValueError(f"the answer is from model {reply['model']!r}, asked was {lane.model!r}")
        text = f"{choice['message']['content']!r} ({usage['completion_tokens']} tokens, {choice['finish_reason']})"
        return Answer(True, text, f"vllm {version}", usage["completion_tokens"], time.monotonic() - started)
    except urllib.error.HTTPError as error:
        detail = error.read().decode("utf-8", "replace")[:200]
        return Answer(False, f"HTTP {error.code} {detail}", "-", 0, time.monotonic() - started)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        reason = getattr(error, "reason", None) or error
        return Answer(False, f"{type(reason).__name__}: {reason}", "-", 0, time.monotonic() - started)


def gpus(lane: Lane) -> str:
    """Return the GPUs that the lane's decision gave it, in rank order, or ``-`` when the box keeps no decision."""
    try:
        text = boxes.ssh(lane.box, f"sudo cat /var/lib/vllm-fleet/decisions/{lane.name}.json")
        decision = json.loads(text)
        return ",".join(str(index) for index in decision["order"]) or "-"
    except (LabError, ValueError, KeyError, TypeError):
        return "-"


def table(rows: list[tuple[str, ...]]) -> str:
    """Return rows as text with aligned columns; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def report() -> bool:
    """Ask every lane, print the answers and the table, and tell whether all of them answered."""
    rows: list[tuple[str, ...]] = [("box", "lane", "engine", "GPUs", "health", "address")]
    well = True
    for lane in lanes():
        answer = ask(lane)
        well = well and answer.ok
        say(f"   {lane.box}/{lane.name} < {QUESTION}")
        say(f"   {lane.box}/{lane.name} > {answer.text}  [{answer.seconds:.2f} s]")
        rows.append(
            (
                lane.box,
                lane.name,
                answer.engine,
                gpus(lane),
                "answers" if answer.ok else "NO ANSWER",
                f"http://{lane.address}",
            )
        )
    say("\n" + table(rows))
    return well
