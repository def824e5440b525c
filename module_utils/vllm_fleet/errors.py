"""Errors that a person is meant to read: each carries a stable reason code and the way out."""

from __future__ import annotations

import errno


class FleetError(Exception):
    """Something that stops the work, with a reason code that tests and alerts can match.

    :param reason: stable snake_case code.
    :param message: what was found and what was expected.
    :param fix: what to do about it; may be empty when the message already says it.
    """

    #: exit status of the program: 1 a check failed, 2 usage or internal error, 3 a refused decision or edit
    exit_code = 2

    def __init__(self, reason: str, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.fix = fix

    def one_line(self) -> str:
        """Return ``reason: message. fix`` on one line, for stderr and the journal."""
        text = f"{self.reason}: {self.message}"
        if self.fix:
            text = text.rstrip()
            text += f"{'' if text.endswith('.') else '.'} Fix: {self.fix}"
        return " ".join(text.split())


class UsageError(FleetError):
    """Bad input: garbled JSON, wrong types, unknown names."""

    exit_code = 2


class RefusedError(FleetError):
    """The input is understood and the answer is no; nothing was changed."""

    exit_code = 3


def from_os(error: OSError) -> FleetError:
    """Return an error of the operating system as one of ours: ``disk_full``, else ``io_failed``."""
    where = f" {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FleetError("disk_full", f"nothing more can be written{where and ' to'}{where}", "free some space")
    return FleetError("io_failed", f"{error.strerror or error}{where and ':'}{where}")
