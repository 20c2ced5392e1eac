"""AWS Signature Version 4 in the Authorization header, verified: no I/O, no clock.

In two steps, so that a head that cannot be right is refused before its body is read: `check_head` looks at who signs,
what and when; `verify` at the signature itself, which takes the body's hash.

Demanded is what AWS demands: `host` and every `x-amz-…` header that is there are signed, and the request is of the last
five minutes. Other headers may go unsigned (`X-Amzn-SageMaker-…` too: small clients sign no more than they must), and
whoever signs one is held to it. The body is always signed: `UNSIGNED-PAYLOAD` is for S3, no SageMaker client sends it,
and so nobody on the way can give a request another body. Any region is good. An unknown key and a wrong signature are
told apart, as AWS does: key ids are no secrets, they travel in the clear.
"""

import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from hashlib import sha256
from typing import Protocol
from urllib.parse import quote_from_bytes

from prefixroute.errors import ForbiddenError
from prefixroute.http.headers import RawHeaders, all_of

ALGORITHM = b"AWS4-HMAC-SHA256"
# SageMaker's runtime signs by the name of the service it belongs to.
SERVICE = "sagemaker"
# How far a request's date may be from ours, either way. AWS's own.
MAX_AGE_S = 300
# Three HMACs are saved for each. A key has two, around midnight; more only where clients name many regions.
_MAX_DERIVED = 256

_AUTHORIZATION = re.compile(
    rb"Credential=([A-Za-z0-9._-]+)/([0-9]{8})/([A-Za-z0-9-]+)/([a-z0-9-]+)/([a-z0-9_]+)\s*,\s*"
    rb"SignedHeaders=([^\s,=]+)\s*,\s*"
    rb"Signature=([0-9a-f]{64})"
)
_TIMESTAMP = re.compile(rb"[0-9]{8}T[0-9]{6}Z")
_HASH = re.compile(rb"[0-9a-f]{64}")


class SignatureError(ForbiddenError):
    """The request is not signed as it must be."""

    code = "invalid_signature"


class IncompleteSignatureError(SignatureError):
    """The signature's form is wrong, or it leaves out what must be signed."""

    status = 400
    aws_type = "IncompleteSignatureException"


class MissingAuthenticationError(SignatureError):
    """There is no signature."""

    aws_type = "MissingAuthenticationTokenException"


class UnknownAccessKeyError(SignatureError):
    """Nobody here has this access key."""

    aws_type = "UnrecognizedClientException"


class InvalidSignatureError(SignatureError):
    """The signature is of another request, time, service or secret."""

    aws_type = "InvalidSignatureException"


class SigningKey(Protocol):
    """An access key."""

    @property
    def name(self) -> str: ...
    @property
    def key_id(self) -> str: ...
    @property
    def secret(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Signature:
    """What an Authorization header says; nothing of it is proven."""

    key_id: str
    date: str
    region: str
    service: str
    terminator: str
    signed_headers: tuple[bytes, ...]
    """In lower case, in order."""
    hex: str = field(repr=False)

    @property
    def scope(self) -> str:
        """Of the key that signs."""
        return f"{self.date}/{self.region}/{self.service}/{self.terminator}"


@dataclass(frozen=True, slots=True)
class Claim:
    """A head in which nothing is wrong. Who sent it is for `Verifier.verify` to prove."""

    signature: Signature
    timestamp: str
    key: SigningKey = field(repr=False)


def read_signature(headers: RawHeaders) -> Signature | None:
    """The request's signature; None where there is none of AWS's. Raises IncompleteSignatureError."""
    values = all_of(headers, b"authorization")
    signed = [value for value in values if value.lstrip()[:3].upper() == b"AWS"]
    if not signed:
        return None
    if len(values) > 1:
        raise IncompleteSignatureError("the request has several Authorization headers (send the signature only)")
    algorithm, _, rest = signed[0].strip().partition(b" ")
    if algorithm != ALGORITHM:
        raise IncompleteSignatureError(
            f"only signatures of {ALGORITHM.decode()} are verified here (SigV4, with an access key and its secret)"
        )
    parts = _AUTHORIZATION.fullmatch(rest.strip())
    if parts is None:
        raise IncompleteSignatureError(
            f"the Authorization header must read {ALGORITHM.decode()} Credential=ACCESS_KEY_ID/YYYYMMDD/REGION/"
            f"{SERVICE}/aws4_request, SignedHeaders=NAME;NAME, Signature=64 hexadecimal digits"
        )
    names = parts[6].split(b";")
    if names != sorted(set(names)) or parts[6] != parts[6].lower() or b"" in names:
        raise IncompleteSignatureError("SignedHeaders must have each name once, in lower case and in order")
    key_id, date, region, service, terminator, signature = (
        parts[group].decode("ascii") for group in (1, 2, 3, 4, 5, 7)
    )
    return Signature(key_id, date, region, service, terminator, tuple(names), signature)


def missing_authentication(target: str) -> MissingAuthenticationError:
    """What a request to `target` that brings neither a signature nor a key is refused with."""
    if "x-amz-signature=" in target.partition("?")[2].lower():
        return MissingAuthenticationError("presigned URLs are not taken here (sign the Authorization header)")
    return MissingAuthenticationError(
        "a signature by a configured access key (AWS Signature Version 4), or a valid API key "
        "(Authorization: Bearer KEY), is required"
    )


class Verifier:
    """Knows the access keys of one reading of their file."""

    def __init__(self, keys: Iterable[SigningKey]) -> None:
        self._keys = {key.key_id: key for key in keys}
        self._derived: dict[tuple[str, str], bytes] = {}

    def check_head(self, signature: Signature, headers: RawHeaders, now_s: float) -> Claim:
        """All that can be said before the body is there. `now_s`: seconds since 1970. Raises SignatureError."""
        key = self._keys.get(signature.key_id)
        if key is None:
            raise UnknownAccessKeyError("the access key that signs this request is not known here")
        if (signature.service, signature.terminator) != (SERVICE, "aws4_request"):
            raise InvalidSignatureError(f"the signature's scope must end in /{SERVICE}/aws4_request")
        present = {name.lower() for name, _ in headers}
        _check_signed(signature.signed_headers, present)
        _check_payload_hash(headers)
        timestamp, signed_s = _signed_at(headers)
        if timestamp[:8] != signature.date:
            raise InvalidSignatureError("the day in the signature's scope is not the day of X-Amz-Date (both are UTC)")
        if abs(now_s - signed_s) > MAX_AGE_S:
            order = "older than" if signed_s < now_s else "ahead of us by more than"
            raise InvalidSignatureError(
                f"the signature is {order} {MAX_AGE_S // 60} minutes (are the clocks here and at the client right?)"
            )
        return Claim(signature, timestamp, key)

    def verify(self, claim: Claim, method: str, target: str, headers: RawHeaders, body_sha256: str) -> str:
        """The name of the key that signed. `target`: path and query, and `headers`: all of them, as sent;
        `body_sha256` in hexadecimal digits. When it was signed is not looked at again: bodies take their time.

        Raises InvalidSignatureError.
        """
        signature = claim.signature
        if any(value.strip() != body_sha256.encode() for value in all_of(headers, b"x-amz-content-sha256")):
            raise InvalidSignatureError("the body is not the one of X-Amz-Content-Sha256")
        request = canonical_request(method, target, headers, signature.signed_headers, body_sha256)
        to_sign = b"\n".join(
            (ALGORITHM, claim.timestamp.encode(), signature.scope.encode(), sha256(request).hexdigest().encode())
        )
        derived = self._derived.get((claim.key.key_id, signature.scope)) or _derive(claim.key.secret, signature)
        if not hmac.compare_digest(hmac.digest(derived, to_sign, "sha256").hex(), signature.hex):
            raise InvalidSignatureError(
                "the signature does not match this request (a wrong secret key, or something on the way has changed "
                "the path, the query, the body or a signed header such as Host)"
            )
        self._keep(claim, derived)
        return claim.key.name

    def _keep(self, claim: Claim, derived: bytes) -> None:
        """Only of those that verified: nobody else can push one out."""
        entry = claim.key.key_id, claim.signature.scope
        if entry not in self._derived and len(self._derived) >= _MAX_DERIVED:
            del self._derived[next(iter(self._derived))]
        self._derived[entry] = derived


def canonical_request(
    method: str, target: str, headers: RawHeaders, signed_headers: Sequence[bytes], body_sha256: str
) -> bytes:
    """The form in which both sides hash a request, as AWS has it for everything but S3."""
    path, _, query = target.encode("utf-8", "surrogateescape").partition(b"?")
    values: dict[bytes, list[bytes]] = {name: [] for name in signed_headers}
    for name, value in headers:
        found = values.get(name.lower())
        if found is not None:
            found.append(_trimmed(value))
    return b"\n".join(
        (
            method.encode(),
            # What comes encoded is encoded once more.
            quote_from_bytes(_normalised(path), safe="/~").encode(),
            b"&".join(b"%b=%b" % pair for pair in _pairs(query)),
            *(b"%b:%b" % (name, b",".join(found)) for name, found in values.items()),
            b"",
            b";".join(signed_headers),
            body_sha256.encode(),
        )
    )


def _pairs(query: bytes) -> list[tuple[bytes, bytes]]:
    if not query:
        return []
    return sorted((name, value) for name, _, value in (pair.partition(b"=") for pair in query.split(b"&")))


def _normalised(path: bytes) -> bytes:
    """Without dot segments and empty ones; a slash at the end stays."""
    kept: list[bytes] = []
    for segment in path.split(b"/"):
        if segment == b"..":
            del kept[-1:]
        elif segment not in (b"", b"."):
            kept.append(segment)
    return b"/" + b"/".join(kept) + (b"/" if kept and path.endswith(b"/") else b"")


def _trimmed(value: bytes) -> bytes:
    """No white space around, one space for each inside."""
    if value.isascii():
        return b" ".join(value.split())
    # Clients sign text as UTF-8, and some then send it as Latin-1.
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:
        text = value.decode("latin-1")
    return " ".join(text.split()).encode("utf-8")


def _derive(secret: bytes, signature: Signature) -> bytes:
    key = b"AWS4" + secret
    for part in (signature.date, signature.region, signature.service, signature.terminator):
        key = hmac.digest(key, part.encode("ascii"), "sha256")
    return key


def _check_signed(signed: Sequence[bytes], present: set[bytes]) -> None:
    if b"host" not in signed:
        raise IncompleteSignatureError("the Host header must be among the SignedHeaders")
    for name in present:
        if name.startswith(b"x-amz-") and name not in signed:
            raise IncompleteSignatureError("every X-Amz-… header of the request must be among the SignedHeaders")
    if any(name not in present for name in signed):
        raise InvalidSignatureError("the SignedHeaders name a header that the request does not have")


def _check_payload_hash(headers: RawHeaders) -> None:
    for value in all_of(headers, b"x-amz-content-sha256"):
        if _HASH.fullmatch(value.strip()) is None:
            raise IncompleteSignatureError(
                "X-Amz-Content-Sha256 must be the SHA-256 of the body, in lower-case hexadecimal "
                "digits (unsigned bodies and bodies signed in chunks are not taken here)"
            )


def _signed_at(headers: RawHeaders) -> tuple[str, float]:
    """When, as the signature has it and in seconds since 1970: `X-Amz-Date`, or else `Date`."""
    values = all_of(headers, b"x-amz-date") or all_of(headers, b"date")
    if len(values) != 1:
        raise IncompleteSignatureError("the request must have one X-Amz-Date header (YYYYMMDDTHHMMSSZ)")
    text = values[0].strip()
    try:
        if _TIMESTAMP.fullmatch(text):
            moment = datetime.strptime(text.decode("ascii"), "%Y%m%dT%H%M%S%z")
        else:
            moment = parsedate_to_datetime(text.decode("ascii"))
            moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise IncompleteSignatureError("X-Amz-Date cannot be read (YYYYMMDDTHHMMSSZ)") from None
    return moment.strftime("%Y%m%dT%H%M%SZ"), moment.timestamp()
