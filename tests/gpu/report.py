"""The outcome of a run: steps in order, each passed, failed or not run with its reason; as JSON and as a table."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm_fleet import fleet_report

PASS, FAIL, NOT_RUN = "pass", "fail", "not_run"


class NotRunError(Exception):
    """A step that this machine can't show; the text says why."""


class StepError(Exception):
    """A step that came out wrong; the text says what was found, and the figures what was measured until then."""

    def __init__(self, message: str, figures: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.figures = figures or {}


class Report:
    """Collects the steps."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def step(self, name: str, work: Callable[[], tuple[str, dict[str, Any]]], needs: tuple[str, ...] = ()) -> bool:
        """Do one step unless one that it needs did not pass; return whether it passed.

        :param work: returns a sentence and figures, or raises :class:`NotRunError` or :class:`StepError`.
        """
        missing = [step["step"] for step in self.steps if step["step"] in needs and step["status"] != PASS]
        began = time.monotonic()
        figures: dict[str, Any] = {}
        try:
            if missing:
                raise NotRunError(f"needs {', '.join(missing)}")
            message, figures = work()
            status = PASS
        except NotRunError as error:
            status, message = NOT_RUN, str(error)
        except StepError as error:
            status, message, figures = FAIL, str(error), error.figures
        except Exception as error:  # a step that breaks must not take the figures of the others with it
            status, message = FAIL, f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - began, 3)
        self.steps.append({"step": name, "status": status, "seconds": seconds, "message": message, "figures": figures})
        print(f"{status:7} {name} ({seconds:.1f} s): {message}", flush=True)
        return status == PASS

    def status(self) -> str:
        """Return ``fail`` when any step failed, else ``pass``; a step that was not run decides nothing."""
        return FAIL if any(step["status"] == FAIL for step in self.steps) else PASS

    def document(self) -> dict[str, Any]:
        """Return the report: ``{"schema", "status", "counts", "time", …facts, "steps"}``."""
        counts = dict.fromkeys((PASS, FAIL, NOT_RUN), 0)
        for step in self.steps:
            counts[step["status"]] += 1
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return {
            "schema": 1, "status": self.status(), "counts": counts, "time": when, **self.facts, "steps": self.steps,
        }  # fmt: skip

    def table(self) -> str:
        """Return the steps as a table for a person, with the figures that are single numbers or words."""
        rows: list[tuple[str, ...]] = [("step", "status", "seconds", "what was seen", "figures")]
        for step in self.steps:
            plain = {name: value for name, value in step["figures"].items() if isinstance(value, (int, float, str))}
            shown = ", ".join(f"{name} {value}" for name, value in plain.items())
            rows.append((step["step"], step["status"], f"{step['seconds']:.1f}", step["message"][:100], shown[:110]))
        return fleet_report.columns(rows)
