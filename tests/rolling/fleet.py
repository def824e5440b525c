"""The lab's fleet, as a scenario sees it: boxes and balancer over SSH, plays with another inventory on top."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import kill_tree

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / "lab" / ".state"
BIN = ROOT / ".venv" / "bin"
BOXES = ("box1", "box2")
PLAY_LIMIT_S = 1500

#: asks HAProxy again and again, or once without a pause, and prints the time and both answers as a line of JSON
_SERVERS = """
import json, socket, time
def ask(command):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect("/run/haproxy/admin.sock"); s.sendall(command.encode() + b"\\n")
        return b"".join(iter(lambda: s.recv(65536), b"")).decode()
while True:
    began = time.time()
    print(json.dumps([began, ask("show stat").strip(), ask("show servers state").strip()]), flush=True)
    if not {pause}: break
    time.sleep({pause})
"""


def address(name: str) -> str:
    """Return a lab host's address."""
    entry: dict[str, str] = json.loads((STATE / "lab.json").read_text())["boxes"][name]
    return entry["address"]


def edge_url() -> str:
    return f"http://{address('edge1')}:8080"


def edge_key() -> str:
    return (STATE / "keys" / "edge.key").read_text().strip()


def ssh(name: str, command: str, check: bool = True) -> str:
    """Run a shell command as root on a lab host and return its output."""
    done = subprocess.run(
        ["ssh", "-F", str(STATE / "ssh_config"), name, "sudo sh -s"],
        input=command, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    if check and done.returncode:
        raise AssertionError(f"{name}: {command!r} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def _rows(line: str) -> tuple[float, dict[str, dict[str, Any]]]:
    """Return the time of a sample and the balancer's servers by name, as the project's own code reads them."""
    from vllm_fleet import haproxy

    at, stat, state = json.loads(line)
    return float(at), {row["server"]: row for row in haproxy.servers(stat, state)}


def servers() -> dict[str, dict[str, Any]]:
    """Return the balancer's servers by name."""
    return _rows(ssh("edge1", f"python3 - <<'EOF'\n{_SERVERS.replace('{pause}', '0')}\nEOF"))[1]


class Watch:
    """The balancer's servers, looked at all the time; use as a context manager, then read :attr:`samples`.

    The lab's hosts share this machine's clock.
    """

    def __init__(self, pause_s: float) -> None:
        self.samples: list[tuple[float, dict[str, dict[str, Any]]]] = []
        self._process = subprocess.Popen(
            ["ssh", "-F", str(STATE / "ssh_config"), "edge1",
             "sudo python3 -c " + shlex.quote(_SERVERS.replace("{pause}", str(pause_s)))],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        for line in self._process.stdout or ():
            if line.endswith("\n"):
                self.samples.append(_rows(line))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._thread.join()

    def out(self, server: str) -> tuple[float, float]:
        """Return for how long the server was out of rotation, in seconds, and how much of it was the drain."""
        away = [(at, rows[server]) for at, rows in self.samples if not rows[server]["in_rotation"]]
        began = away[0][0]
        empty = next((at for at, row in away if not row["in_flight"]), away[-1][0])
        back = next(at for at, rows in self.samples if at > began and rows[server]["in_rotation"])
        return back - began, empty - began

    def in_flight(self, server: str, began: float, ended: float) -> int:
        """Return the most requests that the server had between two moments, from the last sample before them on."""
        counted = [(at, rows[server]["in_flight"]) for at, rows in self.samples if at <= ended]
        first = max(at for at, _ in counted if at <= began)
        return max(int(count) for at, count in counted if at >= first)


def engine_s(box: str) -> tuple[float, float]:
    """Return how long the engine of before took to end, and the new one from its start to its proof, in seconds."""
    names = ("ActiveExitTimestampMonotonic", "InactiveExitTimestampMonotonic", "ActiveEnterTimestampMonotonic")
    ends, began, ready = (int(ssh(box, f"systemctl show vllm@main -p {name} --value")) for name in names)
    return (began - ends) / 1e6, (ready - began) / 1e6


def pid(box: str) -> int:
    """Return the main process of the box's lane."""
    return int(ssh(box, "systemctl show vllm@main -p MainPID --value"))


def argument(box: str, name: str) -> str:
    """Return the value that the running engine got for an argument."""
    words = ssh(box, f"tr '\\0' '\\n' < /proc/{pid(box)}/cmdline").splitlines()
    return words[words.index(name) + 1]


def phase(box: str) -> str:
    """Return the phase of the record on the box."""
    return str(json.loads(ssh(box, "cat /var/lib/vllm-fleet/rollout.json 2>/dev/null || echo '{}'")).get("phase"))


def wait_in_rotation(*boxes: str, deadline_s: float = 240) -> None:
    """Wait until the balancer sends requests to the boxes.

    :raises AssertionError: not in time.
    """
    end = time.monotonic() + deadline_s
    while True:
        rows = servers()
        if all(rows[f"{box}:main"]["in_rotation"] for box in boxes):
            return
        if time.monotonic() > end:
            raise AssertionError(f"not in rotation after {deadline_s:.0f} s: {rows}")
        time.sleep(1)


@dataclass
class Played:
    """What one ansible-playbook run said."""

    status: int
    text: str

    def state(self, box: str) -> str:
        """Return the box's state in the report's table."""
        found = re.search(rf"^{box} {{2,}}(\w+) ", self.text, re.MULTILINE)
        return found[1] if found else "not in the table"

    def out_s(self, box: str) -> str:
        """Return the box's time out of rotation in the table."""
        found = re.search(rf"^{box} {{2,}}\w+ +([\d.]+ s)", self.text, re.MULTILINE)
        return found[1] if found else "-"


def lane(**changes: Any) -> dict[str, Any]:
    """Return the lane of the lab's inventory with changes; a mapping is merged key by key."""
    return {
        "name": "main", "profile": "tiny-cpu", "port": 8000, "host": "{{ lab_ip }}", "checkpoint": "/srv/models/tiny",
        "served_names": ["tiny"], "api_key_file": "/etc/vllm-fleet/secrets/main.key",
        "topology": {"mode": "auto", "tensor_parallel": 2, "pipeline_parallel": 2}, **changes,
    }  # fmt: skip


def play(
    *args: str, lanes: dict[str, Any] | None = None, hosts: dict[str, Any] | None = None, kill_at: str = ""
) -> Played:
    """Run ansible-playbook on the lab's inventory.

    :param lanes: changes of the lane on every box.
    :param hosts: further hosts of the group, with their variables.
    :param kill_at: SIGKILL the whole play once its output holds this text.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env.update(PATH=f"{BIN}:{env['PATH']}", ANSIBLE_NOCOLOR="1", PYTHONUNBUFFERED="1")
    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder) / "hosts.json"
        entries: dict[str, Any] = {box: {"vllm_lanes": [lane(**lanes)]} for box in BOXES} if lanes else {}
        entries.update(hosts or {})
        overlay.write_text(json.dumps({"gpu-boxes": {"hosts": entries}}))
        argv = [str(BIN / "ansible-playbook"), "-i", "inventories/lab", "-i", str(overlay), *args]
        process = subprocess.Popen(
            argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        seen, end = [], time.monotonic() + PLAY_LIMIT_S
        try:
            for line in process.stdout or ():
                seen.append(line)
                if (kill_at and kill_at in line) or time.monotonic() > end:
                    break
            else:
                process.wait(30)
        finally:
            if process.poll() is None:
                kill_tree(process.pid)
                process.wait(30)
    return Played(process.returncode, "".join(seen))


def reconfigure(*args: str, soak_s: int = 5, **more: Any) -> Played:
    """Run the rollout; with a short watch after each box, to keep the test short."""
    return play("playbooks/reconfigure.yml", "-e", json.dumps({"rollout_soak": soak_s}), *args, **more)
