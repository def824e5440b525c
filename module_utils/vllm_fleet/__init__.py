"""vllm-fleet: what a GPU box must be before it serves, as pure logic and thin adapters.

The package runs in two places: inside Ansible modules (``ansible.module_utils.vllm_fleet``) and on the box as the
program ``vllm-fleet``. Imports inside it are therefore relative, and everything here runs on Python 3.8 with the
standard library (plus ``pynvml`` where NVML is read).
"""
