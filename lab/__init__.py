"""The embedded lab: systemd containers on this machine that stand for real boxes.

Run it from the repository root as ``python3 -m lab …``. Everything here is the standard library, because the first
thing it does on a fresh machine is to make the environment that has more.
"""
