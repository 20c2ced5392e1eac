"""Benchmarks. They are run from a checkout, with `python -m benchmarks.NAME`, and are not installed."""
