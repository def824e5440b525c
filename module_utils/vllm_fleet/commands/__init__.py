"""One file a command: its arguments, and a ``run`` that calls the logic and prints the result."""
