"""Names that tell nothing: whoever reads the bucket cannot test guessed prompts, nor read session ids, off its keys."""

from __future__ import annotations

import base64
import binascii
from typing import Final

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from kvstore.ids import NamespaceId, PrefixId

SECRET: Final = 32


class NameVeil:
    """Keyed names of one root. See :class:`kvstore.keys.Veil`; schema/FORMAT.md, section 10.3, is the specification.

    Equal names stay equal: look-ups are by name. A lane, which listings have to give back, is enciphered instead of digested.

    Args:
        secret: The root's name key, 32 bytes.
    """

    def __init__(self, secret: bytes) -> None:
        self._blocks = blake3(b"kvtier.names.blocks.1", key=secret).digest()
        self._sessions = blake3(b"kvtier.names.sessions.1", key=secret).digest()
        self._lanes = AESSIV(blake3(b"kvtier.names.lanes.1", key=secret).digest(length=64))

    def block(self, namespace: NamespaceId, shard: str, prefix_id: PrefixId) -> str:
        """64 hex digits in a PrefixId's place."""
        text = f"{namespace}/{shard}/{prefix_id}"  # parts of fixed length or alphabet: no two blocks share a text
        return blake3(text.encode(), key=self._blocks).hexdigest()

    def session(self, tenant: str, name: str) -> str:
        """A segment in a session id's place; `tenant` is its segment."""
        return "=" + blake3(f"{tenant}/{name}".encode(), key=self._sessions).hexdigest()

    def lane(self, place: str, lane: str) -> str:
        """A segment in a lane's place, below the key `place`."""
        return base64.urlsafe_b64encode(self._lanes.encrypt(lane.encode(), [place.encode()])).decode().rstrip("=")

    def lane_of(self, place: str, segment: str) -> str | None:
        """The inverse of `lane`; None for a segment that is none of ours."""
        try:
            sealed = base64.b64decode(segment + "=" * (-len(segment) % 4), altchars=b"-_", validate=True)
            return self._lanes.decrypt(sealed, [place.encode()]).decode()
        except (InvalidTag, ValueError, binascii.Error):
            return None
