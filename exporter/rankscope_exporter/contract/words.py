"""
The enumerations of Rankscope. Numbers are written into flight files: never renumber, only add.
"""

import enum

DEFAULT_PORT = 9610
"""
Where an exporter process listens unless told otherwise.
"""


class Phase(enum.IntEnum):
    """
    How far a rank has come in a step: the last phase it entered. A rank that hangs stays in the phase it never left.
    """

    WRITING = 0
    """The record is being begun; readers skip it."""
    SCHEDULED = 1
    """`execute_model` was entered: the scheduler's output is known."""
    STATE_UPDATED = 2
    """`_update_states` has returned: request-state lengths and drift are known."""
    DECIDED = 3
    """The guard of the sampled-token collective was evaluated; if it said `broadcast`, the collective is posted next."""
    DONE = 4
    """The step has left the runner."""


class Guard(enum.IntEnum):
    """
    What a rank decided about the sampled-token collective of a step.
    """

    NONE = 0
    """No decision (yet): the step never came to a collective, or the hook that would see it is off."""
    BROADCAST = 1
    SKIP = 2


class Lengths(enum.IntEnum):
    """
    What the lengths of a step record count.
    """

    UNKNOWN = 0
    """They were not read."""
    OUTPUT_TOKENS = 1
    """V1: output tokens of a request as the rank caches them, against the scheduler's."""
    COMPUTED_TOKENS = 2
    """V2: computed tokens of a request as the rank keeps them on the host, against the scheduler's."""


class Detail(enum.IntEnum):
    """
    What a rank still records, as its own time per step allows.
    """

    FULL = 0
    REDUCED = 1
    """Over the budget: no request table and no histograms of lengths."""
    CUT = 2
    """Over the budget all the same: the hook that cost most took itself out."""


class RequestIds(str, enum.Enum):
    """
    How request ids are recorded.
    """

    SHOWN = "shown"
    HASHED = "hashed"
    """As a keyed hash that is the same on all ranks of an engine."""
    OMITTED = "omitted"


class Role(enum.IntEnum):
    """
    Which side of the sampled-token collective a rank is on.
    """

    NONE = 0
    SENDER = 1
    RECEIVER = 2


class Mitigation(enum.IntEnum):
    """
    The mitigations that Rankscope can turn on at run time.
    """

    TRIM = 1
    """Trim optimistic draft tokens on every pipeline rank, not on the last one only (vLLM issue 54260)."""


class MitigationState(enum.IntEnum):
    """
    Where a mitigation stands on one rank.
    """

    UNKNOWN_CODE = 0
    """The loaded code is not what the mitigation knows; nothing is touched."""
    AVAILABLE = 1
    """It can be applied, and is not."""
    APPLIED = 2
    NOT_APPLICABLE = 3
    """The code has nothing to mitigate: it is fixed already, or another runner."""

    @property
    def label(self) -> str:
        """The state in words, as metrics and pages show it."""
        return self.name.lower().replace("_", " ")


class ControlOutcome(enum.IntEnum):
    """
    What a rank did with the last control word that it saw.
    """

    NONE = 0
    """No control word yet: generation 0."""
    PENDING = 1
    """Seen; waits for its effective step."""
    APPLIED = 2
    """Acted at the effective step."""
    APPLIED_LATE = 3
    """Acted, but the word came after its effective step: ranks may have acted at different steps."""
    REFUSED = 4
    """The mitigation is not available on this rank."""
    FAILED = 5
    """Acting raised an error; the state says what holds now."""


class HookState(str, enum.Enum):
    """
    Whether a hook sees anything.
    """

    ON = "on"
    ABSENT = "absent"
    """The code that it would hook is not there."""
    OFF = "off"
    """Its probe failed or a setting turned it off; the reason says which."""
    REMOVED = "removed"
    """It failed too often and took itself out."""


class RankLife(str, enum.Enum):
    """
    What the exporter process can tell of a rank's process.
    """

    RUNNING = "running"
    STOPPED = "stopped"
    """Stopped by a signal (state T); it will not take a step until it is continued."""
    GONE = "gone"
    """No such process, or a zombie: the flight file is what is left."""
    UNKNOWN = "unknown"
    """It runs in another process namespace, whose processes this one cannot see."""
