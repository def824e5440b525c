"""The parser class of the engine."""

import argparse


class FlexibleArgumentParser(argparse.ArgumentParser):
    """The engine's own adds underscores and configuration files, which no profile uses."""
