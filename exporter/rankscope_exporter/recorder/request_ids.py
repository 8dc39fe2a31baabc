"""
How request ids are written into the flight file: as they are, as a hash, or not at all.
"""

import hashlib
from collections.abc import Callable

from rankscope_exporter.contract.words import RequestIds
from rankscope_exporter.flight.layout import REQUEST_ID_BYTES

Name = Callable[[str], bytes]
"""
What stands for a request id in the flight file, at most `REQUEST_ID_BYTES` long.
"""

_DIGEST_BYTES = 8


def name_by(mode: RequestIds, engine: str) -> Name:
    """
    The writing of request ids in `mode`. A hash is keyed by the engine: the same on all its ranks, another elsewhere.
    """
    if mode is RequestIds.OMITTED:
        return lambda _: b""
    if mode is RequestIds.HASHED:
        key = hashlib.blake2b(engine.encode()).digest()
        return lambda request_id: (
            hashlib.blake2b(request_id.encode(), digest_size=_DIGEST_BYTES, key=key).hexdigest().encode()
        )
    return lambda request_id: request_id.encode()[:REQUEST_ID_BYTES]
