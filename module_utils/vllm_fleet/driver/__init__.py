"""The accelerator's driver: which module a box needs, how it stands, what an installation would do. Pure functions."""
