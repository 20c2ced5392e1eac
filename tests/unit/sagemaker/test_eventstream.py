"""Frames as AWS's own parser reads them."""

import json
from collections.abc import Iterable, Iterator

import botocore.session
import pytest
from botocore import eventstream as aws
from botocore.exceptions import EventStreamError
from botocore.parsers import create_parser
from hypothesis import example, given
from hypothesis import strategies as st

from prefixroute.sagemaker.eventstream import (
    MAX_PIECE_BYTES,
    StreamErrorCode,
    internal_stream_failure,
    model_stream_error,
    payload_part,
)

PART = {":message-type": "event", ":event-type": "PayloadPart", ":content-type": "application/octet-stream"}


def messages(data: bytes, splits: Iterable[int] = ()) -> list[aws.EventStreamMessage]:
    """What a client makes of a stream that comes cut at `splits`. All of it is whole frames."""
    buffer = aws.EventStreamBuffer()
    found = []
    start = 0
    for end in [*sorted(splits), len(data)]:
        buffer.add_data(data[start:end])
        found += list(buffer)
        start = end
    assert sum(message.prelude.total_length for message in found) == len(data)
    return found


class Raw:
    """An answer's body, as botocore is given it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.is_closed = False

    def stream(self) -> Iterator[bytes]:
        yield self._data

    def close(self) -> None:
        self.is_closed = True


def client_events(data: bytes) -> aws.EventStream:
    """What `invoke_endpoint_with_response_stream` gives as Body, from the model of the service."""
    model = botocore.session.get_session().get_service_model("sagemaker-runtime")
    operation = model.operation_model("InvokeEndpointWithResponseStream")
    parser = create_parser(model.metadata["protocol"])
    shape = operation.output_shape.members[operation.output_shape.serialization["payload"]]
    return aws.EventStream(Raw(data), shape, parser._event_stream_parser, operation.name)


@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(0, 5000), max_size=20))
@example([b"", b"a", b""], [1, 2, 3])
def test_any_bytes_in_any_pieces_come_out_as_they_were(pieces: list[bytes], splits: list[int]) -> None:
    data = b"".join(map(payload_part, pieces))
    found = messages(data, [min(split, len(data)) for split in splits])
    assert [message.payload for message in found] == [piece for piece in pieces if piece]
    assert all(message.headers == PART for message in found)


def test_the_service_model_reads_parts_as_payload_parts() -> None:
    data = payload_part(b"data: {}\n\n") + payload_part(bytes(range(256)))
    assert list(client_events(data)) == [
        {"PayloadPart": {"Bytes": b"data: {}\n\n"}},
        {"PayloadPart": {"Bytes": bytes(range(256))}},
    ]


@pytest.mark.parametrize(
    ("n_bytes", "n_frames"),
    [
        (MAX_PIECE_BYTES - 1, 1),
        (MAX_PIECE_BYTES, 1),
        (MAX_PIECE_BYTES + 1, 2),
        (25 * 2**20, 25),
    ],
)
def test_a_long_piece_becomes_frames_that_every_client_takes(n_bytes: int, n_frames: int) -> None:
    piece = (bytes(range(251)) * (n_bytes // 251 + 1))[:n_bytes]
    found = messages(payload_part(piece))
    assert b"".join(message.payload for message in found) == piece
    assert len(found) == n_frames
    # AWS's C library: the whole frame.
    assert max(message.prelude.total_length for message in found) < 16 * 2**20


def test_one_changed_byte_is_noticed() -> None:
    good = payload_part(b"some bytes of an answer")
    assert len(messages(good)) == 1
    for at in range(len(good)):
        changed = bytearray(good)
        changed[at] ^= 1
        with pytest.raises(aws.ParserError):
            messages(bytes(changed))


@pytest.mark.parametrize("code", ["ModelInvocationTimeExceeded", "StreamBroken"])
def test_a_stream_that_the_container_did_not_end_is_raised_as_its_error(code: StreamErrorCode) -> None:
    words = 'the instance "gpu-a" broke off — after 3 parts\n'
    data = payload_part(b"first") + model_stream_error(code, words)
    events = iter(client_events(data))
    assert next(events) == {"PayloadPart": {"Bytes": b"first"}}
    with pytest.raises(EventStreamError) as caught:
        next(events)
    assert caught.value.response["Error"] == {"Code": "ModelStreamError", "Message": words}
    # botocore leaves the error's other field out; SDKs with classes of their own for it do not.
    fields = json.loads(messages(data)[1].payload)
    model = botocore.session.get_session().get_service_model("sagemaker-runtime")
    assert fields.keys() == model.shape_for("ModelStreamError").members.keys()
    assert fields["ErrorCode"] == code
    assert caught.value.operation_name == "InvokeEndpointWithResponseStream"


def test_a_fault_of_the_router_is_raised_as_its_error() -> None:
    with pytest.raises(EventStreamError) as caught:
        list(client_events(internal_stream_failure("cannot go on")))
    assert caught.value.response["Error"] == {"Code": "InternalStreamFailure", "Message": "cannot go on"}


@pytest.mark.parametrize("made", [internal_stream_failure("x" * 5000), model_stream_error("StreamBroken", "x" * 5000)])
def test_a_message_is_as_long_as_the_model_allows(made: bytes) -> None:
    shape = botocore.session.get_session().get_service_model("sagemaker-runtime").shape_for("Message")
    (message,) = messages(made)
    assert message.headers[":content-type"] == "application/json"
    assert len(json.loads(message.payload)["Message"]) == shape.metadata["max"]
