"""KV events of vLLM: what each instance's cache holds, as the instance says. Extra `kv-events` (pyzmq, msgspec).

`codec` reads messages, `tracker` decides what they prove, `stream` moves them over ZeroMQ, `sources` says where they
come from, `service` runs a stream for each. Only this package knows pyzmq and msgspec; it is imported when an
instance has events, so that nobody else needs the extra.
"""
