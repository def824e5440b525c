"""Stands in for the vendor's vLLM 0.6.3: its modules, its command line and its HTTP answers, without a model."""

__version__ = "0.6.3+corex.3.2.3"
