"""
How wide a V2 runner's ranks post the sampled-token collective: read from the names that the code uses.

Sender and receiver must post the same width, or the collective hangs or mixes tokens up. Releases settle that
differently, and no version comparison is needed to see how: each rule leaves its names in the code.
"""

import enum
from dataclasses import dataclass
from typing import Any

from rankscope_exporter.hooks.subjects import HANDLER_ATTRIBUTE, Entry, Owner, as_subject
from rankscope_exporter.hooks.targets import is_v2


class Width(str, enum.Enum):
    """
    How many tokens per request one side posts; k is the number of draft tokens.
    """

    PADDED = "k+1"
    """Always one for each draft and one more (`max_sample_len`)."""
    AS_SAMPLED = "as sampled"
    """What the sampler gave: k+1 in a step with drafts, 1 in a step without."""
    AGREED = "agreed per step"
    """What both sides compute for the step (`_sample_len`)."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class WidthRule:
    """
    The widths that the two sides of the collective post.
    """

    sender: Width
    receiver: Width

    @property
    def differs(self) -> bool | None:
        """
        Whether the sides post different widths in a step without drafts while speculation is on; None where that is unknown.
        """
        if Width.UNKNOWN in (self.sender, self.receiver):
            return None
        return self.sender is not self.receiver


def width_rule(subject: Any) -> WidthRule | None:
    """
    How wide `subject` (a runner, its class or a `Subject`) posts; None for a V1 runner, which always posts one token.
    """
    subject = as_subject(subject)
    if not is_v2(subject):
        return None
    if subject.keeps(HANDLER_ATTRIBUTE):
        owner, send, receive = Owner.HANDLER, "broadcast", "receive"
    else:
        owner, send, receive = Owner.MODULE, "pp_broadcast", "pp_receive"
    return WidthRule(
        _assess_sender(subject.find_entry(owner, send)), _assess_receiver(subject.find_entry(owner, receive))
    )


def _assess_sender(entry: Entry | None) -> Width:
    names = entry.names if entry is not None else frozenset()
    if "_sample_len" in names:
        return Width.AGREED
    if {"pad", "max_sample_len"} <= names:
        return Width.PADDED
    if {"broadcast", "sampled_token_ids", "contiguous"} <= names and not {"pad", "max_sample_len"} & names:
        return Width.AS_SAMPLED
    return Width.UNKNOWN


def _assess_receiver(entry: Entry | None) -> Width:
    names = entry.names if entry is not None else frozenset()
    if "_sample_len" in names:
        return Width.AGREED
    if {"broadcast", "empty", "max_sample_len"} <= names:
        return Width.PADDED
    return Width.UNKNOWN
