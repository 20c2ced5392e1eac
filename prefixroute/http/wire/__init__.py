"""HTTP/1 as bytes: heads and body framings, without I/O."""
