"""Say one line to the journal from inside a unit whose output goes to a log file, or to stderr at a terminal."""

from __future__ import annotations

import os
import sys
import syslog

_PRIORITIES = {"info": syslog.LOG_INFO, "warning": syslog.LOG_WARNING, "error": syslog.LOG_ERR}


def say(line: str, level: str = "info") -> None:
    """Write ``line`` (made one line) with a level of ``info``, ``warning`` or ``error``.

    systemd files it under the unit, because the message comes from a process in the unit's control group.
    """
    text = " ".join(line.split())
    if "INVOCATION_ID" in os.environ and not sys.stderr.isatty():
        syslog.openlog("vllm-fleet", syslog.LOG_PID, syslog.LOG_DAEMON)
        syslog.syslog(_PRIORITIES[level], text)
    else:
        print(text, file=sys.stderr)
