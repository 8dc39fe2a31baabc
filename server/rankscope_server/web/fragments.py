"""
Parts of a live page, and what a stream has sent of them.
"""

from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Fragment:
    """
    A part of a page that is replaced when it changes.
    """

    id: str
    """Id of its outermost element."""
    html: str
    fingerprint: bytes
    pace_seconds: float = 0.0
    covers: tuple[str, ...] = ()
    """Fragments that are inside this one: sent with it."""


def make_fragment(identity: str, html: str, pace_seconds: float = 0.0) -> Fragment:
    """
    A fragment that is sent whenever its markup has changed.
    """
    return Fragment(identity, html, digest(html), pace_seconds)


class Outbox:
    """
    Remembers what one stream has sent, and picks what has to be sent now.
    """

    def __init__(self) -> None:
        self._sent: dict[str, tuple[bytes, float]] = {}

    def due(self, fragments: tuple[Fragment, ...], now_seconds: float) -> list[Fragment]:
        """
        Fragments that differ from what was sent last, less those that were sent too short a time ago.

        What is returned counts as sent. `now_seconds` is any clock that does not go back.
        """
        covered: set[str] = set()
        due: list[Fragment] = []
        for fragment in fragments:
            if fragment.id in covered:
                self._sent[fragment.id] = (fragment.fingerprint, now_seconds)
                continue
            sent = self._sent.get(fragment.id)
            if sent is not None:
                fingerprint, at = sent
                if fingerprint == fragment.fingerprint or now_seconds - at < fragment.pace_seconds:
                    continue
            self._sent[fragment.id] = (fragment.fingerprint, now_seconds)
            covered.update(fragment.covers)
            due.append(fragment)
        return due


def digest(text: str) -> bytes:
    """
    What tells one text from another.
    """
    return blake2b(text.encode(), digest_size=12).digest()
