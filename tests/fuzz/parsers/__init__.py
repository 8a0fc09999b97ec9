"""What is fuzzed: for each parser a function that is given any bytes, and raises where the parser does what it must not.

A parser may refuse bytes by the errors that it documents. Whatever it accepts and can be written again reads as the same value.
"""

from parsers import engines, http, peers, registers, sealed, settings, socket, stored, urls
from parsers.target import Target

_OF = (urls, settings, registers, stored, sealed, socket, peers, http, engines)
TARGETS: dict[str, Target] = {target.name: target for module in _OF for target in module.TARGETS}
