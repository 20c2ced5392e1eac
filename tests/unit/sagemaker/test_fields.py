"""Header rules held against the service model that AWS's SDKs are made from."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import botocore.session
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixroute.errors import RequestError
from prefixroute.sagemaker.fields import InvocationFields, check_endpoint_name, read_fields, session_of

OPERATIONS = {False: "InvokeEndpoint", True: "InvokeEndpointWithResponseStream"}
MODEL = botocore.session.get_session().get_service_model("sagemaker-runtime")
# HTTP's own, which pass as they were sent.
NOT_READ = {"Content-Type", "Accept"}
# What Java's regular expressions have and Python's have not, or not so. No header has an end of a line in it.
JAVA = {r"\p{ASCII}": r"[\x00-\x7f]", r"[\p{Print}]": "[ -~]", r"\z": r"\Z", r"\S": "[!-~]"}
NO_LINE_END = {".*": r"[^\r\n]*"}


def header_shapes(streaming: bool) -> dict[str, Any]:
    """By header name: what the model says of it."""
    members = MODEL.operation_model(OPERATIONS[streaming]).input_shape.members
    return {
        shape.serialization["name"]: shape
        for shape in members.values()
        if shape.serialization.get("location") == "header" and shape.serialization["name"] not in NOT_READ
    }


def pattern_of(shape: Any) -> re.Pattern[str]:
    pattern = NO_LINE_END.get(shape.metadata["pattern"], shape.metadata["pattern"])
    for java, python in JAVA.items():
        pattern = pattern.replace(java, python)
    return re.compile(pattern)


ALL = [
    pytest.param(streaming, name, shape, id=f"{OPERATIONS[streaming]}-{name}")
    for streaming in (False, True)
    for name, shape in header_shapes(streaming).items()
]


def fields_of(streaming: bool, *headers: tuple[str, str]) -> InvocationFields:
    return read_fields([(name.encode(), value.encode("latin-1")) for name, value in headers], streaming=streaming)


def said(fields: InvocationFields) -> set[str]:
    return {str(value) for name in InvocationFields.__slots__ if (value := getattr(fields, name)) is not None}


def is_refused(streaming: bool, name: str, value: str) -> bool:
    try:
        fields_of(streaming, (name, value))
    except RequestError as error:
        return str(error).startswith(name)
    return False


@pytest.mark.parametrize("streaming", [False, True])
def test_every_header_of_the_operation_is_read(streaming: bool) -> None:
    """A newer service model may have more: this fails, and `fields` is to follow."""
    values = {name: f"value-{n}" for n, name in enumerate(header_shapes(streaming))}
    fields = fields_of(streaming, *values.items())
    assert said(fields) == set(values.values())


def test_each_header_is_read_into_the_field_of_its_name() -> None:
    names = {
        "Custom-Attributes": "custom_attributes",
        "Enable-Explanations": "enable_explanations",
        "Inference-Component": "inference_component",
        "Inference-Id": "inference_id",
        "Prefix-Aware-Id": "prefix_aware_id",
        "Session-Id": "session_id",
        "Target-Container-Hostname": "target_container_hostname",
        "Target-Model": "target_model",
        "Target-Variant": "target_variant",
    }
    for header, field in names.items():
        for spelled in (header, header.lower(), header.upper()):
            assert getattr(fields_of(False, (f"x-amzn-sagemaker-{spelled}", "a1")), field) == "a1"
    assert fields_of(True, ("X-Amzn-SageMaker-Accept", "text/csv")).accept == "text/csv"


@pytest.mark.parametrize(("streaming", "name", "shape"), ALL)
def test_bounds_are_the_service_models(streaming: bool, name: str, shape: Any) -> None:
    """A newer service model may have others: this fails, and `fields` is to follow."""
    most, least = shape.metadata["max"], shape.metadata.get("min", 0)
    assert not is_refused(streaming, name, "a" * most)
    assert is_refused(streaming, name, "a" * (most + 1))
    assert not is_refused(streaming, name, "a")
    assert is_refused(streaming, name, "") == (least > 0 or pattern_of(shape).fullmatch("") is None)


@given(st.sampled_from([parameter.values for parameter in ALL]), st.data())
@settings(max_examples=500)
def test_patterns_are_the_service_models(header: tuple[bool, str, Any], data: st.DataObject) -> None:
    """A newer service model may have others: this fails, and `fields` is to follow."""
    streaming, name, shape = header
    pattern = pattern_of(shape)
    value = data.draw(
        st.text("aZ9-_ ;.é\x7f~!", min_size=1, max_size=12)
        | st.text(st.characters(max_codepoint=255), min_size=1, max_size=12)
        | st.text("aZ9-", min_size=1).map(lambda text: text.strip("-") or "a")
        | st.just("NEW_SESSION")
    )
    fits = pattern.fullmatch(value) is not None and len(value) <= shape.metadata["max"]
    assert is_refused(streaming, name, value) is not fits


@pytest.mark.parametrize(("streaming", "name", "shape"), ALL)
def test_a_header_sent_twice_is_refused(streaming: bool, name: str, shape: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name} may be sent once only$"):
        fields_of(streaming, (name, "a"), ("Accept", "*/*"), (name.lower(), "a"))


def test_a_stream_cannot_begin_a_session() -> None:
    assert fields_of(False, ("X-Amzn-SageMaker-Session-Id", "NEW_SESSION")).session_id == "NEW_SESSION"
    assert is_refused(True, "X-Amzn-SageMaker-Session-Id", "NEW_SESSION")
    assert is_refused(False, "X-Amzn-SageMaker-Session-Id", "NEW_SESSIONS")


def test_what_the_operation_does_not_have_is_let_be() -> None:
    headers = [
        ("X-Amzn-SageMaker-Target-Model", " " * 2000),
        ("X-Amzn-SageMaker-Enable-Explanations", ""),
        ("X-Amzn-SageMaker-Of-Tomorrow", "ü"),
        ("Content-Type", "text/csv"),
    ]
    assert fields_of(True, *headers) == InvocationFields()
    assert fields_of(False, ("X-Amzn-SageMaker-Accept", "ü")) == InvocationFields()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "Target-Variant",
            "x" * 64,
            "must be 1 to 63 letters, digits, and hyphens between them (it has 64 characters)",
        ),
        ("Target-Variant", "secret-", "must be 1 to 63 letters, digits, and hyphens between them"),
        ("Prefix-Aware-Id", " secret", "must be 1 to 64 printable characters, the first of them no space"),
        ("Custom-Attributes", "sécret", "must be at most 1024 ASCII characters"),
        ("Session-Id", "se_cret", "must be 1 to 256 letters, digits, and hyphens between them, or NEW_SESSION"),
    ],
)
def test_a_refusal_says_what_the_header_takes_and_not_what_it_held(name: str, value: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        fields_of(False, (f"X-Amzn-SageMaker-{name}", value))
    assert str(caught.value) == f"X-Amzn-SageMaker-{name} {words}"


ENDPOINT_NAME = MODEL.operation_model("InvokeEndpoint").input_shape.members["EndpointName"]


@given(st.text("aZ9-_. é", max_size=8) | st.from_regex(pattern_of(ENDPOINT_NAME), fullmatch=True))
def test_endpoint_names_are_the_service_models(name: str) -> None:
    fits = pattern_of(ENDPOINT_NAME).fullmatch(name) is not None and len(name) <= ENDPOINT_NAME.metadata["max"]
    assert _raises(lambda: check_endpoint_name(name)) is not fits


@pytest.mark.parametrize("name", ["a" * (ENDPOINT_NAME.metadata["max"] + 1), "", "-a", "a-", "a_b", "a\n", "é"])
def test_what_no_endpoint_can_be_called_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="the endpoint's name in the path must be 1 to 63 letters"):
        check_endpoint_name(name)


def _raises(call: Callable[[], None]) -> bool:
    try:
        call()
    except RequestError:
        return True
    return False


# Sessions

NEW_SESSION_SHAPE = MODEL.shape_for("NewSessionResponseHeader")
AT = datetime(2026, 2, 28, 23, 59, 59, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("value", "session"),
    [
        (b"abc-1; Expires=2026-02-28T23:59:59Z", ("abc-1", AT)),
        (b"abc-1;Expires=2026-02-28T23:59:59Z", ("abc-1", AT)),
        (b" abc-1; Expires=2026-02-28T23:59:59Z ", ("abc-1", AT)),
        (b"abc-1", ("abc-1", None)),
        (b"a" * 256, ("a" * 256, None)),
    ],
)
def test_a_session_and_its_end_are_read(value: bytes, session: tuple[str, float | None]) -> None:
    assert session_of(value) == session


@given(st.from_regex(re.compile(NEW_SESSION_SHAPE.metadata["pattern"], re.ASCII), fullmatch=True))
def test_whatever_the_service_model_calls_a_session_is_read(value: str) -> None:
    found = session_of(value.encode())
    try:
        ends = datetime.strptime(value.rpartition("=")[2].strip(), "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        assert found is None
        return
    if len(value) <= NEW_SESSION_SHAPE.metadata["max"]:
        assert found == (value.partition(";")[0], ends.timestamp())


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"a" * 257,
        b"a_b; Expires=2026-02-28T23:59:59Z",
        b"a; Expires=2026-13-01T00:00:00Z",
        b"a; Expires=2026-02-29T00:00:00Z",
        b"a; Expires=2026-02-28T23:59:59",
        b"a; Expires=2026-02-28 23:59:59Z",
        b"a; Expires=",
        b"a; Path=/",
        b"a; Expires=2026-02-28T23:59:59Z; more",
        b"NEW_SESSION",
        "é".encode(),
    ],
)
def test_what_names_no_session_is_none(value: bytes) -> None:
    assert session_of(value) is None


@given(st.binary(max_size=300))
def test_whatever_a_container_says_is_read_or_none(value: bytes) -> None:
    found = session_of(value)
    assert found is None or found[0].encode() in value
