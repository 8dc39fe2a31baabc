"""
The cursor of `/v1/steps`: opaque text that holds, for each rank, the last step that need not be sent again.

It holds everything, so an exporter that was restarted understands the cursors that its predecessor gave out.
"""

import base64
import binascii
import hashlib
import struct
import zlib
from collections.abc import Mapping

_VERSION = 1
_HEAD = struct.Struct("<BI")
_ENTRY = struct.Struct("<8sQ")


class CursorError(ValueError):
    """
    A cursor that is damaged, or of another version of this exporter.
    """

    def __init__(self) -> None:
        super().__init__(
            "this cursor is damaged or of another version: ask again without it, and use the one in the answer"
        )


def rank_token(key: str) -> bytes:
    """
    A rank's key in the eight bytes that a cursor has for it.
    """
    return hashlib.blake2s(key.encode(), digest_size=8).digest()


def encode_cursor(steps: Mapping[bytes, int]) -> str:
    """
    The cursor for the steps by rank token.
    """
    body = b"".join(_ENTRY.pack(token, step) for token, step in steps.items())
    return base64.urlsafe_b64encode(_HEAD.pack(_VERSION, zlib.crc32(body)) + body).decode().rstrip("=")


def decode_cursor(text: str) -> dict[bytes, int]:
    """
    The steps by rank token in a cursor.

    Raises:
        CursorError: it is not a cursor of this version, or damaged.

    """
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        version, checksum = _HEAD.unpack_from(raw)
        body = raw[_HEAD.size :]
        if version != _VERSION or zlib.crc32(body) != checksum:
            raise CursorError
        return dict(_ENTRY.iter_unpack(body))
    except (binascii.Error, ValueError, struct.error) as error:
        raise CursorError from error
