"""Traces of real traffic: read here, played over HTTP by `replay`."""
