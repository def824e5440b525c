"""``python3 -m vllm_fleet`` and the entry point of the zipapp."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
