"""A lane on this machine's GPUs, from the live facts to the stop: ``make test-gpu``."""
