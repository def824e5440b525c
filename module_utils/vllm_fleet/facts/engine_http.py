"""Ask a running engine over HTTP. Answers come back as (status, parsed body); a refused connection is (None, None)."""

from __future__ import annotations

import http.client
import json
from typing import Any, Dict, Optional, Tuple

Answer = Tuple[Optional[int], Any]


def connect_host(bind: str) -> str:
    """Return the address to ask for a bind address: the wildcard addresses are reached over loopback."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(bind, bind)  # noqa: S104 - compared, not bound


def ask(
    host: str,
    port: int,
    path: str,
    body: Optional[Dict[str, Any]] = None,
    key: Optional[str] = None,
    timeout: float = 10.0,
) -> Answer:
    """GET ``path``, or POST ``body`` as JSON when there is one.

    :param timeout: seconds for connecting and for each read.
    :returns: (status, JSON body), (status, None) when the body is no JSON, (None, None) when nothing answered.
    """
    status, raw = fetch(host, port, path, None if body is None else json.dumps(body), key, timeout)
    try:
        return status, None if status is None else json.loads(raw)
    except ValueError:
        return status, None


def fetch(
    host: str, port: int, path: str, body: Optional[str] = None, key: Optional[str] = None, timeout: float = 10.0
) -> Tuple[Optional[int], str]:
    """Like :func:`ask`, with the answer's text as it came; (None, "") when nothing answered."""
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(connect_host(host), port, timeout=timeout)
    try:
        connection.request("GET" if body is None else "POST", path, body, headers)
        response = connection.getresponse()
        return response.status, response.read(4 << 20).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return None, ""
    finally:
        connection.close()


def complete(
    host: str, port: int, name: str, key: Optional[str], timeout: float, prompt: str = "Hello", max_tokens: int = 1
) -> Answer:
    """Ask for one completion by the served name, a short one unless told otherwise, without chance."""
    request = {"model": name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return ask(host, port, "/v1/completions", request, key, timeout)
