"""What a store's answers mean: one table from HTTP status and S3 error code to kvtier's errors, for every client here.

Sources: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, and codes seen from SeaweedFS and MinIO.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from kvstore.errors import KINDS, KVTierError, Unavailable
from kvstore.objects.base import REFUSED, Create, PutMode, Refused, Update

_BY_CODE: Final = {
    "SlowDown": "store_busy",
    "SlowDownRead": "store_busy",
    "SlowDownWrite": "store_busy",
    "ServiceUnavailable": "store_busy",
    "Throttling": "store_busy",
    "ThrottlingException": "store_busy",
    "TooManyRequests": "store_busy",
    "RequestLimitExceeded": "store_busy",
    "ConditionalRequestConflict": "store_conflict",
    "OperationAborted": "store_conflict",
    "RequestTimeout": "timeout",
    "RequestTimeTooSkewed": "clock_skew",
    "ExpiredToken": "expired_credentials",
    "ExpiredTokenException": "expired_credentials",
    "TokenRefreshRequired": "expired_credentials",
    "InvalidAccessKeyId": "bad_credentials",
    "InvalidClientTokenId": "bad_credentials",
    "InvalidToken": "bad_credentials",
    "SignatureDoesNotMatch": "bad_credentials",
    "AccessDenied": "access_denied",
    "AllAccessDisabled": "access_denied",
    "NoSuchBucket": "no_bucket",
    "AuthorizationHeaderMalformed": "wrong_region",
    "IllegalLocationConstraintException": "wrong_region",
    "PermanentRedirect": "wrong_region",
    "TemporaryRedirect": "wrong_region",
    "NotImplemented": "unsupported",
    "XNotImplemented": "unsupported",
    "MethodNotAllowed": "unsupported",
    "InternalError": "unavailable",
    "UntrustedCertificate": "untrusted_certificate",  # a word of ours, where no answer came
}
_BY_STATUS: Final = {
    401: "bad_credentials",
    403: "access_denied",
    408: "timeout",
    409: "store_conflict",
    429: "store_busy",
    501: "unsupported",
    503: "store_busy",
    504: "timeout",
}
_CODE: Final = re.compile(r"<Code>([^<]{1,80})</Code>")
_MESSAGE: Final = re.compile(r"<Message>([^<]{1,300})")


class Refusal(msgspec.Struct, frozen=True):
    """An answer that is not the one asked for. `status` 0: none came; 200 with a code: an error inside a success."""

    status: int
    code: str = ""
    message: str = ""

    @classmethod
    def parse(cls, status: int, body: str) -> Refusal:
        """From a status and an S3 error document, or whatever else a gateway put there."""
        code, message = _CODE.search(body), _MESSAGE.search(body)
        return cls(status, code[1] if code else "", message[1].strip() if message else "")

    def error(self, what: str) -> KVTierError:
        """The error to raise; `what` names the request, such as `GET heads/a/b`."""
        kind = _BY_CODE.get(self.code) or _BY_STATUS.get(self.status) or self._by_class()
        said = f"the store answered {self.status} {self.code}".strip() if self.status else "no answer"
        said += f" ({self.message})" if self.message else ""
        return KINDS[kind].error(f"{what}: {said}", kind=kind, status=self.status)

    @property
    def key_absent(self) -> bool:
        """A 404 about the key. Anything else that answers 404 is no bucket, or no S3 service at all."""
        return self.status == 404 and self.code == "NoSuchKey"

    def _by_class(self) -> str:
        if 300 <= self.status < 400:
            return "wrong_region"
        if self.status == 404 or self.status < 300 or self.status >= 500:
            return "unavailable"
        return "invalid"


def put_outcome(refusal: Refusal, mode: PutMode, what: str) -> Refused:
    """`REFUSED` if the condition did not hold; any other refusal is raised, a 409 as `Unavailable`: it decides nothing."""
    if refusal.status == 412:
        return REFUSED
    if refusal.status == 304 and isinstance(mode, Create):  # what some servers say to If-None-Match
        return REFUSED
    if refusal.key_absent and isinstance(mode, Update):  # AWS's answer to If-Match where nothing is
        return REFUSED
    raise refusal.error(what)


_OBSTORE_STATUS: Final = re.compile(r"Server returned non-2xx status code: (\d{3})[^:\n]*:?(.*)", re.DOTALL)
_UNTRUSTED: Final = re.compile(r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)")
_OBSTORE_200: Final = "Server returned error response:"


def refusal_in(error: Exception) -> Refusal:
    """What obstore's exception is about.

    Its types do not tell: a 409 and a 412 both come as `AlreadyExistsError`, and everything else as `GenericError`.
    """
    said, _, debug = str(error).partition("\n\nDebug source:")
    if found := _OBSTORE_STATUS.search(said):
        return Refusal.parse(int(found[1]), found[2])
    if _OBSTORE_200 in said:
        return Refusal.parse(200, said.partition(_OBSTORE_200)[2])
    if "redirect without LOCATION" in said:
        return Refusal(301, "PermanentRedirect")
    if found := _UNTRUSTED.search(debug):
        return Refusal(0, "UntrustedCertificate", f"{found[1]} certificate")
    if "kind: Timeout" in debug:
        return Refusal(0, "RequestTimeout", "no answer in time")
    return Refusal(0, "", said.rpartition(" - ")[2][:200])


def no_answer(what: str, reason: str, *, kind: str = "unavailable") -> Unavailable:
    """The request got no usable answer; a write may or may not have landed."""
    return Unavailable(f"{what}: {reason}", kind=kind)
