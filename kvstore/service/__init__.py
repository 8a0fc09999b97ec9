"""What a node does for its callers: the calls, the data plane, commits and restores."""
