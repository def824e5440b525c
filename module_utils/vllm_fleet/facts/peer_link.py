"""Says over the network how this box's part of a lane stands, and asks the other boxes. One JSON object, then closed.

Read-only and without a secret: it names the lane and systemd's invocation, nothing that a caller could act on. It
listens at the address between the boxes alone.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import Any, Dict, Mapping, Optional

from ..peers import ANSWERED, RECORD_KEYS, REFUSED, SILENT

#: a record is a few hundred bytes
_LIMIT = 1 << 16


class Teller:
    """Answers every connection with the record of the moment."""

    def __init__(self) -> None:
        self._said = b""
        self._socket: Optional[socket.socket] = None
        self._at = ("", 0)

    def say(self, record: Mapping[str, Any]) -> None:
        """Set what is said from now on."""
        self._said = json.dumps(record).encode()

    def listen(self, address: str, port: int) -> None:
        """Listen there; does nothing when it does already.

        :raises OSError: the address is not (yet) here, or the port is taken.
        """
        if self._socket is not None and self._at == (address, port):
            return
        self.close()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(16)
        except OSError:
            listener.close()
            raise
        self._socket, self._at = listener, (address, port)
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.settimeout(2.0)
                    connection.sendall(self._said)
                except OSError:
                    pass


def ask(address: str, port: int, lane: str, timeout: float = 2.0) -> Dict[str, Any]:
    """Return ``{"status", "record"}`` of a box: see :mod:`..peers`. Who does not know this lane counts as refusing."""
    said = b""
    try:
        with socket.create_connection((address, port), timeout=timeout) as connection:
            while len(said) < _LIMIT:
                piece = connection.recv(4096)
                if not piece:
                    break
                said += piece
    except ConnectionRefusedError:
        return {"status": REFUSED}
    except OSError:
        return {"status": SILENT}
    try:
        record = json.loads(said.decode())
    except ValueError:
        return {"status": REFUSED}
    if not isinstance(record, dict) or not set(RECORD_KEYS) <= set(record):
        return {"status": REFUSED}
    if record["schema"] != 1 or record["lane"] != lane:
        return {"status": REFUSED}
    return {"status": ANSWERED, "record": record}


def ask_all(addresses: Mapping[str, str], port: int, lane: str, timeout: float = 2.0) -> Dict[str, Dict[str, Any]]:
    """Ask several boxes at the same time; the answers by box."""
    answers: Dict[str, Dict[str, Any]] = {}

    def one(box: str) -> None:
        answers[box] = ask(addresses[box], port, lane, timeout)

    threads = [threading.Thread(target=one, args=(box,)) for box in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers
