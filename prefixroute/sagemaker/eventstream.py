"""Frames of `application/vnd.amazon.eventstream`, as InvokeEndpointWithResponseStream answers with them.

A frame is its own length and that of its headers (4 bytes each, big-endian, as every number here), a CRC-32 of those
eight bytes, the headers, the payload, and a CRC-32 of all before it. A header is a length byte and its name, the type
7 (text), two bytes of length and the value.
"""

import json
from struct import Struct
from typing import Literal
from zlib import crc32

StreamErrorCode = Literal["ModelInvocationTimeExceeded", "StreamBroken"]

# Clients refuse what is too large for them: AWS's C library from 16 MiB a frame, its Go SDK from 16 MiB a payload,
# botocore from 24 MiB. Far below, because some keep a frame until all of it is there; 16 bytes in 1 MiB cost nothing.
MAX_PIECE_BYTES = 2**20
# Of the model's `Message` shape.
_MAX_MESSAGE_CHARS = 2048
# Lengths and three checksums: what a frame has besides headers and payload.
_FRAME_BYTES = 16
_TEXT = 7

_LENGTHS = Struct(">II")
_CHECKSUM = Struct(">I")
_VALUE = Struct(">BH")


def payload_part(piece: bytes) -> bytes:
    """A piece of the container's body, as one frame; a long one as several, an empty one as none."""
    if 0 < len(piece) <= MAX_PIECE_BYTES:
        return _frame(_PAYLOAD_PART, piece)
    view = memoryview(piece)
    return b"".join(
        [
            _frame(_PAYLOAD_PART, view[start : start + MAX_PIECE_BYTES])
            for start in range(0, len(piece), MAX_PIECE_BYTES)
        ]
    )


def model_stream_error(code: StreamErrorCode, message: str) -> bytes:
    """The last frame of a stream that the container did not end: it was too slow, or it broke off."""
    return _frame(_MODEL_STREAM_ERROR, _fault(message, ErrorCode=code))


def internal_stream_failure(message: str) -> bytes:
    """The last frame of a stream that the router could not go on with."""
    return _frame(_INTERNAL_STREAM_FAILURE, _fault(message))


def _fault(message: str, **fields: str) -> bytes:
    return json.dumps({"Message": message[:_MAX_MESSAGE_CHARS], **fields}).encode("ascii")


def _frame(headers: bytes, payload: bytes | memoryview) -> bytes:
    lengths = _LENGTHS.pack(_FRAME_BYTES + len(headers) + len(payload), len(headers))
    head = b"".join((lengths, _CHECKSUM.pack(crc32(lengths)), headers))
    # The checksum goes on over the payload, which is copied once only.
    return b"".join((head, payload, _CHECKSUM.pack(crc32(payload, crc32(head)))))


def _headers(**values: str) -> bytes:
    """Headers of a frame; keywords have _ for -, and no colon in front."""
    block = bytearray()
    for word, value in values.items():
        name = ":" + word.replace("_", "-")
        block += bytes([len(name)]) + name.encode("ascii") + _VALUE.pack(_TEXT, len(value)) + value.encode("ascii")
    return bytes(block)


_PAYLOAD_PART = _headers(event_type="PayloadPart", content_type="application/octet-stream", message_type="event")
_MODEL_STREAM_ERROR = _headers(
    exception_type="ModelStreamError", content_type="application/json", message_type="exception"
)
_INTERNAL_STREAM_FAILURE = _headers(
    exception_type="InternalStreamFailure", content_type="application/json", message_type="exception"
)
