"""Has the installed engine say whether it takes a lane's command line; remembers a yes, so that asking again is free.

The adapter around :mod:`.engine_probe`: it starts the engine's own Python with the lane's environment, without a GPU,
under a time limit, as the service's user.
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
import pwd
import signal
import subprocess
import tempfile
import time
from typing import Any, Callable, Dict, List, Mapping, Optional

from . import engine_probe, files
from .errors import UsageError
from .render import render

MEMORY = "/var/lib/vllm-fleet/engine-args.json"
#: good results that are kept; a box has few lanes, and a rollback should find its own again
KEPT = 64

#: no GPU is looked at, nothing is downloaded, nothing is written beside the engine
_QUIET = {
    "VLLM_TARGET_DEVICE": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONDONTWRITEBYTECODE": "1",
}

#: what a GPU decision may add at a start
_RUNTIME_ARGS = ("--disable-custom-all-reduce",)

Result = Dict[str, Any]


def _result(status: str, reason: str, message: str, seconds: float = 0.0) -> Result:
    return {"status": status, "reason": reason, "message": message, "seconds": round(seconds, 1)}


def probe_source() -> bytes:
    """Return the program that runs on the engine's Python."""
    source = pkgutil.get_data(__package__, os.path.basename(engine_probe.__file__ or "engine_probe.py"))
    if source is None:
        raise UsageError("incomplete_program", "engine_probe.py is not part of this program.")
    return source


def question(lane: Mapping[str, Any]) -> Dict[str, Any]:
    """Return what to ask: the entry and the words after it, with those that a start may add."""
    argv: List[str] = render(lane)["argv"]
    rest = argv[1:]
    policy = lane["policy"]
    extra = list(_RUNTIME_ARGS) if policy["enabled"] and policy["mode"] != "fixed" else []
    extra = [word for word in extra if word not in rest]
    if "-m" in rest[:3]:
        return {"entry": "api_server", "argv": rest[rest.index("-m") + 2 :] + extra}
    if rest[:1] == ["serve"]:
        rest = rest[1:]
    return {"entry": "serve", "argv": rest + extra}


def key(lane: Mapping[str, Any], source: bytes) -> str:
    """Return the digest under which a good result is remembered.

    It changes with the engine's files: another build below the same id has another console script or products record.
    """
    engine = lane["engine"]
    candidates = [f"{engine['venv']}/bin/vllm" if engine["venv"] else engine["python"], engine["site_packages"]]
    if engine["tree"]:
        candidates.append(f"{engine['tree']}/.build-products.sha256")
    marks: List[Any] = []
    for path in candidates:
        try:
            found = os.stat(path)
            marks.append([path, found.st_size, found.st_mtime_ns, found.st_ino])
        except OSError:
            marks.append([path, None])
    asked = [engine["id"], engine["version"], marks, question(lane), hashlib.sha256(source).hexdigest()]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _remembered(path: str) -> Dict[str, Any]:
    """Return the good results by key; a file that cannot be used is as good as none."""
    try:
        data = files.read_json(path, "engine arguments")
    except UsageError:
        return {}
    good = data.get("good") if isinstance(data, dict) and data.get("schema") == 1 else None
    return good if isinstance(good, dict) else {}


def _remember(path: str, digest: str, lane: Mapping[str, Any]) -> None:
    good = _remembered(path)
    good.pop(digest, None)
    good[digest] = {"lane": lane["lane"], "engine": lane["engine"]["id"]}
    kept = dict(list(good.items())[-KEPT:])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    files.write_atomic(path, json.dumps({"schema": 1, "good": kept}, indent=1).encode() + b"\n", mode=0o644)


def _account(user: Optional[str]) -> Optional[pwd.struct_passwd]:
    """Return the account that the parser runs as, None when it need not or cannot be another one."""
    if not user or os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(user)
    except KeyError:
        return None


def _become(account: Optional[pwd.struct_passwd]) -> Optional[Callable[[], None]]:
    """Return what a child does to become that account."""
    if account is None:
        return None

    def become() -> None:
        os.setgroups([])
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)

    return become


def ask(lane: Mapping[str, Any], timeout: float, user: Optional[str]) -> Result:
    """Start the engine's parser and return its verdict.

    Statuses: ``pass`` (``accepted``), ``fail`` (``refused``, the message is the engine's own) and ``unknown``
    (``engine_absent``, ``engine_broken``, ``parser_timeout``).
    """
    python = lane["engine"]["python"]
    if not os.access(python, os.X_OK):
        return _result(
            "unknown", "engine_absent", f"{python} is not there; engine {lane['engine']['id']} is not installed."
        )
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vllm-fleet-args-") as home:
        account = _account(user)
        if account:
            os.chown(home, account.pw_uid, account.pw_gid)
        env = {**lane["env"], **_QUIET, "HOME": home, "VLLM_CACHE_ROOT": home, "XDG_CACHE_HOME": home, "TMPDIR": home}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as asked:
            asked.write(json.dumps(question(lane)).encode())
            asked.seek(0)
            try:
                process = subprocess.Popen(
                    [python, "-c", probe_source().decode()],
                    stdin=asked,
                    stdout=out,
                    stderr=err,
                    cwd=home,
                    env=env,
                    start_new_session=True,
                    preexec_fn=_become(account),  # noqa: PLW1509 - no threads here, and user= needs Python 3.9
                )
            except OSError as error:
                return _result("unknown", "engine_broken", f"{python} does not start: {error.strerror}.")
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                message = f"the engine's parser gave no answer within {timeout:g} s."
                return _result("unknown", "parser_timeout", message, time.monotonic() - begin)
            out.seek(0)
            err.seek(0)
            answer = _answer(out.read())
            errors = err.read().decode("utf-8", "replace").strip().splitlines()
    seconds = time.monotonic() - begin
    if answer is None:
        last = f": {errors[-1]}" if errors else ""
        message = f"the engine's parser ended with status {process.returncode} and no answer{last}"
        return _result("unknown", "engine_broken", message, seconds)
    if answer["status"] == "broken":
        return _result("unknown", "engine_broken", f"the engine cannot be asked: {answer['message']}", seconds)
    if answer["status"] == "refused":
        return _result("fail", "refused", str(answer["message"]), seconds)
    return _result("pass", "accepted", f"vLLM {answer['version']} takes the arguments.", seconds)


def _answer(raw: bytes) -> Optional[Dict[str, Any]]:
    for line in reversed(raw.decode("utf-8", "replace").splitlines()):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict) and answer.get("status") in ("accepted", "refused", "broken"):
            return answer
    return None


def check(
    lane: Mapping[str, Any],
    timeout: float = 120.0,
    user: Optional[str] = "vllm",
    memory: str = MEMORY,
    write: bool = True,
) -> Result:
    """Return whether the lane's engine takes its command line: ``{"status", "reason", "message", "seconds"}``.

    :param write: remember a good result; off in check mode.
    """
    digest = key(lane, probe_source())
    if digest in _remembered(memory):
        return _result("pass", "remembered", "this engine has taken these arguments before.")
    result = ask(lane, timeout, user)
    if result["status"] == "pass" and write:
        _remember(memory, digest, lane)
    return result
