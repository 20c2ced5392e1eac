"""The proxy itself."""
