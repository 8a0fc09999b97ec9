"""Explicit-state model of the session protocol: every interleaving of small instances, exhausted.

One step is one request to the store. The store offers strong reads and lists, conditional PUT, and an unconditional DELETE. Four
abstractions keep the space small; each only *adds* behaviour, so what is safe here is safe with less:

- Any block of any generation up to the epoch may exist at any time: anonymous writers, crashed writers and PUTs that arrive late
  can all create it. So a probe may always hit, and a block is just (generation, prefix).
- A collector that decides to delete an object *dooms* it: the DELETE may arrive at once, next week, or twice. Safety is then
  "no head names a doomed object", which does not depend on when it arrives.
- A register's ETag never repeats, so a process that holds one is either up to date or bound to get 412: a swap sends every other
  holder back to its first step.
- Every wait is unbounded, so a crash is a process that takes no further step.

``rules`` holds the MUSTs of docs/ordering.md, one field each; a mutant is the protocol with one of them broken, and has to fail.
"""
