"""PrefixRoute: a prefix-aware reverse proxy for self-hosted LLM servers."""

__version__ = "0.1.0"
