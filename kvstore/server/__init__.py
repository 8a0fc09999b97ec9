"""The faces of a node: HTTP on loopback, and the Unix socket with shared memory for engines on this host."""
