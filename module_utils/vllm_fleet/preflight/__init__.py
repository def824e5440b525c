"""Every check that a lane must pass before it serves, in a play and at every boot."""

from .run import run_lane as run_lane
