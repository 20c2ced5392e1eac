"""Tests on real engines, opt-in: `make test-engines`. See docs/engines.md."""
