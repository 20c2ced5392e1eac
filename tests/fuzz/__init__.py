"""Fuzzing: `python -m tests.fuzz` runs for as long as it is told, `test_fuzz.py` a few hundred cases of each target."""
