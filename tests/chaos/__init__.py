"""Faults under load: `python -m tests.chaos`. Real processes: the command, and instances that can be killed."""
