"""Signatures as botocore makes them, and everything that is nearly one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any
from urllib.parse import quote, urlsplit

import boto3
import pytest
from botocore.auth import SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from hypothesis import assume, given
from hypothesis import strategies as st

from prefixroute.config.access_keys import AccessKey
from prefixroute.errors import ForbiddenError
from prefixroute.sagemaker import sigv4
from prefixroute.sagemaker.sigv4 import (
    IncompleteSignatureError,
    InvalidSignatureError,
    SignatureError,
    UnknownAccessKeyError,
    Verifier,
    canonical_request,
    missing_authentication,
    read_signature,
)

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
ALICE = AccessKey("alice", "AKIDALICE0123456", SECRET.encode())
BOB = AccessKey("bob", "AKIDBOB012345678", b"another-secret-of-forty-characters-or-so")
PATH = "/endpoints/support-bot/invocations"
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Sent:
    """A request as it comes, and when: as its date says, plus `late_s`."""

    method: str
    target: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    late_s: float = 0.0

    def first(self, name: str) -> str:
        return next(value.decode("latin-1") for key, value in self.headers if key.lower() == name.lower().encode())

    def having(self, name: str, value: str | None) -> "Sent":
        """Another value of a header; None: without it."""
        key = name.lower().encode()
        kept = [header for header in self.headers if header[0].lower() != key]
        return replace(self, headers=(*kept, *([] if value is None else [(key, value.encode("latin-1"))])))

    def plus(self, name: str, value: str) -> "Sent":
        return replace(self, headers=(*self.headers, (name.encode(), value.encode("latin-1"))))

    def authorized(self, change: Callable[[str], str]) -> "Sent":
        return self.having("Authorization", change(self.first("Authorization")))

    @property
    def now_s(self) -> float:
        at = datetime.strptime(self.first("X-Amz-Date"), "%Y%m%dT%H%M%S%z") if self._has_date else datetime.now(UTC)
        return at.timestamp() + self.late_s

    @property
    def _has_date(self) -> bool:
        return any(key.lower() == b"x-amz-date" for key, _ in self.headers)


def signed(
    target: str = PATH,
    *,
    method: str = "POST",
    headers: Sequence[tuple[str, str]] = (("Content-Type", "application/json"),),
    body: bytes = b'{"prompt": "hi"}',
    key: AccessKey = ALICE,
    region: str = "eu-central-1",
    service: str = "sagemaker",
    token: str | None = None,
    signer: type[SigV4Auth] = SigV4Auth,
) -> Sent:
    """A request that botocore signed, as it goes out on the wire."""
    request = AWSRequest(method, "http://127.0.0.1:8080" + target, data=body)
    for name, value in headers:
        request.headers.add_header(name, value)
    signer(Credentials(key.key_id, key.secret.decode(), token), service, region).add_auth(request)
    sent = [(name.encode(), value.encode("latin-1")) for name, value in request.headers.items()]
    # Of the connection, and not signed.
    more = [(b"Host", b"127.0.0.1:8080"), (b"User-Agent", b"Boto3/1"), (b"Content-Length", b"%d" % len(body))]
    parts = urlsplit(request.url)
    return Sent(method, parts.path + ("?" + parts.query if parts.query else ""), (*more, *sent), body)


def proven(sent: Sent, verifier: Verifier | None = None) -> str:
    """Who sent it. Raises SignatureError."""
    verifier = verifier or Verifier([ALICE, BOB])
    signature = read_signature(sent.headers)
    assert signature is not None
    claim = verifier.check_head(signature, sent.headers, sent.now_s)
    return verifier.verify(claim, sent.method, sent.target, sent.headers, sha256(sent.body).hexdigest())


def refused(sent: Sent, error: type[SignatureError]) -> str:
    with pytest.raises(error) as caught:
        proven(sent)
    text = str(caught.value)
    assert SECRET not in text
    assert "\n" not in text
    assert text[-1] != "."
    return text


def test_what_botocore_signs_is_its_keys() -> None:
    assert proven(signed()) == "alice"
    assert proven(signed(key=BOB, region="us-gov-west-1")) == "bob"


@pytest.mark.parametrize("streaming", [False, True])
def test_what_the_whole_client_sends_verifies(streaming: bool) -> None:
    """boto3's `sagemaker-runtime`, up to the socket: with all the headers that it adds before and after it signs."""
    client = boto3.client(
        "sagemaker-runtime",
        region_name="eu-west-1",
        endpoint_url="http://localhost:8080",
        aws_access_key_id=ALICE.key_id,
        aws_secret_access_key=SECRET,
        aws_session_token="a token/of+some==kind",
        config=Config(retries={"max_attempts": 1}, ignore_configured_endpoint_urls=True),
    )
    caught: list[Any] = []

    def catch(request: Any, **_: object) -> Any:
        caught.append(request)
        raise ConnectionAbortedError

    client.meta.events.register("before-send", catch)
    invoke = client.invoke_endpoint_with_response_stream if streaming else client.invoke_endpoint
    with pytest.raises(ConnectionAbortedError):
        invoke(
            EndpointName="support-bot",
            Body=b'{"prompt": "hi"}',
            ContentType="application/json",
            CustomAttributes="tenant=a,  tier = gold ",
            PrefixAwareId="app 1",
            SessionId="a-session",
            TargetVariant="blue",
        )
    (request,) = caught
    headers = tuple(
        (name.encode(), value if isinstance(value, bytes) else value.encode())
        for name, value in request.headers.items()
    )
    target = urlsplit(request.url).path
    assert target == PATH + ("-response-stream" if streaming else "")
    assert proven(Sent(request.method, target, ((b"Host", b"localhost:8080"), *headers), request.body)) == "alice"


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/a%20b/%C3%A9%2F%2f/~tilde_-.",
        "/endpoints//twice///",
        "/endpoints/./a/../b/..",
        "/../up",
        "/a+b:c@d!$&'()*,;=",
        "/endpoints/a/invocations?",
        "/x?b=2&a=1&a=0&c&=&d=%20%2f&e=a=b",
        "/x?&&b&a",
        "/x?a-b=1&a=1&a%2Fb=1&A=1",
    ],
)
def test_odd_targets_verify(target: str) -> None:
    assert proven(signed(target)) == "alice"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("X-Amzn-SageMaker-Custom-Attributes", "  two  spaces\tand a tab  ")],
        [("x-twice", "b"), ("X-Twice", " a "), ("x-twice", "")],
        [("X-Empty", "")],
        [("X-Text", "café  latte"), ("X-Nbsp", "a\xa0 b")],
        [("traceparent", "00-1"), ("X-Amzn-Trace-Id", "Root=1"), ("Expect", "100-continue")],
        [("X-Amz-Content-SHA256", sha256(b'{"prompt": "hi"}').hexdigest())],
    ],
)
def test_odd_headers_verify(headers: list[tuple[str, str]]) -> None:
    assert proven(signed(headers=headers)) == "alice"


def test_text_that_is_sent_as_it_was_signed_verifies() -> None:
    """Other SDKs send UTF-8 where botocore sends Latin-1."""
    sent = signed(headers=[("X-Text", "café")])
    raw = tuple((key, value.decode("latin-1").encode()) for key, value in sent.headers)
    assert raw != sent.headers
    assert proven(replace(sent, headers=raw)) == "alice"


def test_empty_bodies_tokens_and_other_methods_verify() -> None:
    assert proven(signed(body=b"")) == "alice"
    assert proven(signed(token="FwoGZXIvYXdzE/token+of==")) == "alice"
    assert proven(signed(method="GET", body=b"")) == "alice"


def test_a_date_header_does_where_there_is_no_other() -> None:
    sent = signed(headers=[("Date", "")])
    assert not any(key.lower() == b"x-amz-date" for key, _ in sent.headers)
    assert proven(sent) == "alice"
    assert "cannot be read" in refused(sent.having("Date", "noon"), IncompleteSignatureError)


def test_white_space_between_the_parts_is_free() -> None:
    assert proven(signed().authorized(lambda text: text.replace(", ", ","))) == "alice"
    assert proven(signed().authorized(lambda text: text.replace(", ", " ,  "))) == "alice"


# Near misses


def a_second_off(date: str) -> str:
    return date[:-2] + str((int(date[-2]) + 1) % 10) + "Z"


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: replace(sent, method="PUT"),
        lambda sent: replace(sent, target=sent.target.replace("support-bot", "support-bos")),
        lambda sent: replace(sent, target=sent.target.replace("a%2Fb", "a/b")),
        lambda sent: replace(sent, target=sent.target.replace("n=1", "n=2")),
        lambda sent: replace(sent, target=sent.target + "&more=1"),
        lambda sent: replace(sent, body=b'{"prompt": "hj"}'),
        lambda sent: replace(sent, body=b""),
        lambda sent: sent.having("Host", "127.0.0.1:8081"),
        lambda sent: sent.having("Content-Type", "text/csv"),
        lambda sent: sent.having("X-Amz-Security-Token", "another"),
        lambda sent: sent.plus("Content-Type", "application/json"),
        lambda sent: sent.having("X-Amz-Date", a_second_off(sent.first("X-Amz-Date"))),
        lambda sent: sent.authorized(lambda text: text.replace("eu-central-1", "eu-central-2")),
        lambda sent: sent.authorized(lambda text: text.replace("AKIDALICE0123456", BOB.key_id)),
        lambda sent: sent.authorized(lambda text: text[:-1] + ("0" if text[-1] != "0" else "1")),
        lambda sent: sent.authorized(lambda text: text[:-64] + "0" * 64),
        lambda sent: sent.authorized(lambda text: text.replace("content-type;", "")),
    ],
)
def test_one_thing_changed_is_not_what_was_signed(change: Callable[[Sent], Sent]) -> None:
    good = signed("/endpoints/support-bot/a%2Fb?n=1", token="token")
    assert proven(good) == "alice"
    assert "does not match this request" in refused(change(good), InvalidSignatureError)


def test_another_secret_of_the_same_id_is_refused() -> None:
    other = replace(ALICE, secret=ALICE.secret[:-1] + b"Z")
    assert "a wrong secret key" in refused(signed(key=other), InvalidSignatureError)


def test_an_unknown_key_is_refused_before_the_body() -> None:
    sent = signed(key=replace(ALICE, key_id="AKIDNOBODY012345"))
    signature = read_signature(sent.headers)
    assert signature is not None
    with pytest.raises(UnknownAccessKeyError, match="not known here"):
        Verifier([ALICE]).check_head(signature, sent.headers, sent.now_s)


@pytest.mark.parametrize("service", ["sagemaker-runtime", "bedrock", "s3"])
def test_another_service_is_refused(service: str) -> None:
    assert "must end in /sagemaker/aws4_request" in refused(signed(service=service), InvalidSignatureError)


def test_another_end_of_the_scope_is_refused() -> None:
    sent = signed().authorized(lambda text: text.replace("aws4_request", "aws5_request"))
    assert "must end in /sagemaker/aws4_request" in refused(sent, InvalidSignatureError)


@pytest.mark.parametrize(("late_s", "words"), [(301, "older than 5 minutes"), (-301, "ahead of us by more than")])
def test_a_signature_is_good_for_five_minutes_either_way(late_s: float, words: str) -> None:
    near = late_s - 2 if late_s > 0 else late_s + 2
    assert proven(replace(signed(), late_s=near)) == "alice"
    assert words in refused(replace(signed(), late_s=late_s), InvalidSignatureError)


def test_the_day_of_the_scope_is_the_day_of_the_date() -> None:
    sent = signed().authorized(lambda text: text.replace(text.split("/")[1], "20200229"))
    assert "is not the day of X-Amz-Date" in refused(sent, InvalidSignatureError)


@pytest.mark.parametrize("value", ["", "20261301T000000Z", "20260101T000000", "yesterday", "2026-01-01T00:00:00Z", "é"])
def test_a_date_that_cannot_be_read_is_refused(value: str) -> None:
    sent = signed()
    signature = read_signature(sent.headers)
    assert signature is not None
    with pytest.raises(IncompleteSignatureError, match="X-Amz-Date cannot be read"):
        Verifier([ALICE]).check_head(signature, sent.having("X-Amz-Date", value).headers, sent.now_s)


def test_a_request_has_one_date() -> None:
    sent = signed()
    assert "must have one X-Amz-Date" in refused(
        sent.plus("X-Amz-Date", sent.first("X-Amz-Date")), IncompleteSignatureError
    )
    without = sent.having("X-Amz-Date", None).authorized(lambda text: text.replace(";x-amz-date", ""))
    assert "must have one X-Amz-Date" in refused(without, IncompleteSignatureError)


def test_what_aws_demands_to_be_signed_must_be() -> None:
    """Signed right, but not enough of it: someone on the way could have added or changed the rest."""
    sent = signed()
    added = sent.plus("X-Amz-Security-Token", "someone else's")
    assert "every X-Amz-… header" in refused(added, IncompleteSignatureError)
    assert "every X-Amz-… header" in refused(sent.plus("x-aMz-anything", ""), IncompleteSignatureError)
    hostless = sent.authorized(lambda text: text.replace("host;", ""))
    assert "the Host header must be" in refused(hostless, IncompleteSignatureError)
    dateless = sent.authorized(lambda text: text.replace(";x-amz-date", ""))
    assert "every X-Amz-… header" in refused(dateless, IncompleteSignatureError)


def test_what_is_not_demanded_may_be_added_unsigned() -> None:
    sent = signed().plus("X-Amzn-Trace-Id", "Root=1").plus("X-Forwarded-For", "10.0.0.1")
    assert proven(sent.plus("X-Amzn-SageMaker-Target-Variant", "blue")) == "alice"


def test_a_signed_header_that_did_not_come_is_refused() -> None:
    sent = signed(headers=[("X-Mine", "1")])
    assert "that the request does not have" in refused(sent.having("X-Mine", None), InvalidSignatureError)


# Bodies


def test_a_stated_hash_is_the_bodys() -> None:
    other = sha256(b"another body").hexdigest()
    sent = signed(headers=[("X-Amz-Content-SHA256", other)])
    assert "the body is not the one" in refused(sent, InvalidSignatureError)


@pytest.mark.parametrize(
    "value",
    ["UNSIGNED-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER", "", "0" * 63],
)
def test_unsigned_and_chunked_bodies_are_refused_before_the_body(value: str) -> None:
    sent = signed(headers=[("X-Amz-Content-SHA256", value)])
    signature = read_signature(sent.headers)
    assert signature is not None
    with pytest.raises(IncompleteSignatureError, match="must be the SHA-256 of the body"):
        Verifier([ALICE]).check_head(signature, sent.headers, sent.now_s)


# Other ways to sign


def test_what_is_not_awss_is_no_signature() -> None:
    assert read_signature([]) is None
    assert read_signature([(b"Authorization", b"Bearer sk-1"), (b"x-api-key", b"AWS4-HMAC-SHA256")]) is None


@pytest.mark.parametrize(
    "value",
    [
        "AWS4-ECDSA-P256-SHA256 Credential=a",
        "AWS AKID:c2ln",
        "AWS3-HTTPS AWSAccessKeyId=a",
        "aws4-hmac-sha256 x",
        "AWS",
    ],
)
def test_other_algorithms_are_refused(value: str) -> None:
    with pytest.raises(IncompleteSignatureError, match="only signatures of AWS4-HMAC-SHA256"):
        read_signature([(b"authorization", value.encode())])


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text + "0",
        lambda text: text.upper().replace("AWS4-HMAC-SHA256 CREDENTIAL", "AWS4-HMAC-SHA256 Credential"),
        lambda text: text.replace("Credential=", "Credential=é"),
        lambda text: text.replace("/sagemaker", ""),
        lambda text: text.replace("SignedHeaders=", "SignedHeaders"),
        lambda text: text.replace("SignedHeaders=content-type;host;x-amz-date", "SignedHeaders="),
        lambda text: text.partition(",")[0],
        lambda text: text + ", " + text,
        lambda text: "AWS4-HMAC-SHA256",
    ],
)
def test_another_form_is_refused(change: Callable[[str], str]) -> None:
    assert "the Authorization header must read" in refused(signed().authorized(change), IncompleteSignatureError)


@pytest.mark.parametrize(
    "names", ["host;content-type;x-amz-date", "content-type;host;host;x-amz-date", "Host;x-amz-date"]
)
def test_signed_headers_are_in_order(names: str) -> None:
    sent = signed().authorized(lambda text: text.replace("content-type;host;x-amz-date", names))
    assert "each name once, in lower case and in order" in refused(sent, IncompleteSignatureError)


def test_one_authorization_is_enough() -> None:
    sent = signed()
    twice = sent.plus("Authorization", sent.first("Authorization"))
    assert "several Authorization headers" in refused(twice, IncompleteSignatureError)
    assert "several Authorization headers" in refused(
        sent.plus("authorization", "Bearer sk-1"), IncompleteSignatureError
    )


def test_who_brings_nothing_is_told_what_to_bring() -> None:
    request = signed(signer=SigV4QueryAuth)
    assert read_signature(request.headers) is None
    assert "presigned URLs are not taken here" in str(missing_authentication(request.target))
    error = missing_authentication(PATH)
    assert "is required" in str(error)
    assert (error.status, error.aws_type) == (403, "MissingAuthenticationTokenException")


def test_refusals_have_awss_names() -> None:
    kinds = {kind.aws_type: kind.status for kind in SignatureError.__subclasses__()}
    assert kinds == {
        "IncompleteSignatureException": 400,
        "InvalidSignatureException": 403,
        "MissingAuthenticationTokenException": 403,
        "UnrecognizedClientException": 403,
    }
    assert all(issubclass(kind, ForbiddenError) for kind in SignatureError.__subclasses__())


# What is kept


def test_secrets_and_signatures_show_nowhere() -> None:
    sent = signed()
    signature = read_signature(sent.headers)
    assert signature is not None
    verifier = Verifier([ALICE])
    claim = verifier.check_head(signature, sent.headers, sent.now_s)
    shown = repr((ALICE, signature, claim, verifier))
    assert SECRET not in shown
    assert signature.hex not in shown


def test_derived_keys_are_kept_within_bounds_and_only_for_who_signed_right(monkeypatch: pytest.MonkeyPatch) -> None:
    derivations: list[str] = []
    derive = sigv4._derive

    def counted(secret: bytes, signature: sigv4.Signature) -> bytes:
        derivations.append(signature.region)
        return derive(secret, signature)

    monkeypatch.setattr(sigv4, "_derive", counted)
    monkeypatch.setattr(sigv4, "_MAX_DERIVED", 2)
    verifier = Verifier([ALICE])
    for region in ("a", "b", "b", "a"):
        assert proven(signed(region=region), verifier) == "alice"
    assert derivations == ["a", "b"]
    for region in ("c", "d"):
        with pytest.raises(InvalidSignatureError):
            proven(replace(signed(region=region), body=b"changed"), verifier)
    assert proven(signed(region="b"), verifier) == "alice"
    assert derivations == ["a", "b", "c", "d"]
    assert proven(signed(region="e"), verifier) == "alice"
    assert proven(signed(region="a"), verifier) == "alice"
    assert derivations == ["a", "b", "c", "d", "e", "a"]
    assert len(verifier._derived) == 2


# Properties

SEGMENTS = st.text("aZ0-._~ é/%&=+?#", max_size=8).map(lambda text: quote(text, safe="-._~/+=&"))
PATHS = st.lists(SEGMENTS, max_size=4).map(lambda segments: "/" + "/".join(segments))
WORDS = st.text("aZ0-_.~ é/", max_size=5).map(lambda text: quote(text, safe=""))
QUERIES = st.lists(WORDS | st.tuples(WORDS, WORDS).map("=".join), max_size=4).map("&".join)
NAMES = st.from_regex(r"\Ax-[a-z-]{1,8}\Z").filter(lambda name: not name.startswith("x-am"))
VALUES = st.text(' \taZ0,;="é', max_size=10).map(str.strip)
REQUESTS = st.builds(
    lambda path, query, headers, body, token: signed(
        path + ("?" + query if query else ""), headers=headers, body=body, token=token
    ),
    PATHS,
    QUERIES,
    st.lists(st.tuples(NAMES, VALUES), max_size=4),
    st.binary(max_size=40),
    st.none() | st.just("token"),
)


@given(REQUESTS)
def test_whatever_botocore_signs_verifies(sent: Sent) -> None:
    assert proven(sent) == "alice"


def botocores_form(sent: Sent) -> str:
    """The canonical request that botocore makes of what was sent."""
    request = AWSRequest(sent.method, "http://127.0.0.1:8080" + sent.target, data=sent.body)
    for name, value in sent.headers:
        if name not in (b"User-Agent", b"Authorization", b"Content-Length"):
            request.headers.add_header(name.decode(), value.decode("latin-1"))
    form: str = SigV4Auth(Credentials("a", "b"), "sagemaker", "x").canonical_request(request)
    return form


@given(REQUESTS)
def test_canonical_requests_are_botocores(sent: Sent) -> None:
    signature = read_signature(sent.headers)
    assert signature is not None
    names, body_sha256 = signature.signed_headers, sha256(sent.body).hexdigest()
    assert canonical_request(sent.method, sent.target, sent.headers, names, body_sha256).decode() == botocores_form(
        sent
    )


@given(REQUESTS, st.data())
def test_one_flipped_bit_of_body_or_signature_does_not_verify(sent: Sent, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(sent.body) * 8 + 255))
    if at < len(sent.body) * 8:
        body = bytearray(sent.body)
        body[at // 8] ^= 1 << at % 8
        sent = replace(sent, body=bytes(body))
    else:
        at -= len(sent.body) * 8
        flipped = int(sent.first("Authorization")[-64:], 16) ^ 1 << at
        sent = sent.authorized(lambda text: f"{text[:-64]}{flipped:064x}")
    with pytest.raises(InvalidSignatureError):
        proven(sent)


@given(REQUESTS, st.data())
def test_one_flipped_bit_of_target_or_a_signed_header_does_not_verify(sent: Sent, data: st.DataObject) -> None:
    """Unless it means the same to botocore, as white space and empty segments may."""
    values = [sent.target.encode(), *(value for _, value in sent.headers)]
    skipped = {b"Authorization", b"User-Agent", b"Content-Length"}
    places = [0, *(at for at, (name, value) in enumerate(sent.headers, start=1) if value and name not in skipped)]
    place = data.draw(st.sampled_from(places))
    changed = bytearray(values[place])
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 6))
    new = changed.decode("latin-1")
    assume(new.isprintable() and "#" not in new)
    values[place] = new.encode("latin-1")
    names = [name for name, _ in sent.headers]
    moved = replace(sent, target=values[0].decode("latin-1"), headers=tuple(zip(names, values[1:], strict=True)))
    assume(moved.target.startswith("/") and botocores_form(moved) != botocores_form(sent))
    signature = read_signature(moved.headers)
    assert signature is not None
    verifier = Verifier([ALICE])
    body_sha256 = sha256(moved.body).hexdigest()
    with pytest.raises(SignatureError):  # noqa: PT012 - either step may refuse it
        claim = verifier.check_head(signature, moved.headers, sent.now_s)
        verifier.verify(claim, moved.method, moved.target, moved.headers, body_sha256)


@given(st.binary(max_size=200) | st.text("AWS4-HMC256Credntial=/, ;Sgh0aédrs", max_size=200).map(str.encode))
def test_whatever_is_in_authorization_is_read_or_refused(value: bytes) -> None:
    for text in (value, b"AWS4-HMAC-SHA256 " + value):
        try:
            assert read_signature([(b"Authorization", text)]) is None or b"Credential" in text
        except IncompleteSignatureError as error:
            refusal = str(error)
            assert "\n" not in refusal


@given(st.text(max_size=30) | st.text("0123456789TZ ,:JanMo+-", max_size=30))
def test_whatever_is_in_a_date_is_read_or_refused(value: str) -> None:
    sent = signed()
    signature = read_signature(sent.headers)
    assert signature is not None
    headers: Headers = [(key, value.encode() if key == b"X-Amz-Date" else text) for key, text in sent.headers]
    with pytest.raises(SignatureError):
        Verifier([ALICE]).check_head(signature, headers, sent.now_s + 10**6)
