"""Adapters: the only code that reads NVML, CoreX, sysfs and procfs. They report; they never decide."""
