"""Requests as keyed hashes, lengths and times, in files of bounded size: `serve` writes them, `replay` reads them.

`form` is the format, `key` the secret, `prefixes` the hashes, `row` the line of a request, `files` the disk, and
`recorder` the thread that does all of it away from the event loop.
"""
