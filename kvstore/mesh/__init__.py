"""Nodes together: who they are, who has which block, how blocks travel between them, and where a request should go.

Nothing here is ever needed for a correct answer. A directory that is wrong or gone, a peer that is slow, dead or corrupt: each is a
miss, and the next origin is asked.
"""
