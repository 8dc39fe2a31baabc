"""
The worker's side of control: one machine word, looked at once per step, acted on at the step that it names.

The exporter process stores the word; every rank of an engine gets the same one, so that all act at the same step
ordinal. A word whose step has passed already is acted on at once and reported as late: ranks that want the same
thing a few steps apart are better than ranks that want different things for good.
"""

from collections.abc import Callable

from rankscope_exporter.contract.words import ControlOutcome, Mitigation, MitigationState
from rankscope_exporter.flight import layout
from rankscope_exporter.mitigations.trim import TrimFix

_AVAILABLE = (MitigationState.AVAILABLE, MitigationState.APPLIED)


class Control:
    """
    Follows the control word in `words` (the control area of a flight file) and sets the trim fix by it.

    `on_change` is called after the state of the mitigation may have changed.
    """

    __slots__ = ("_fix", "_on_change", "_seen", "generation", "settled", "state", "words")

    def __init__(self, words: "memoryview[int]", fix: TrimFix | None, on_change: Callable[[], None]) -> None:
        self.words = words
        self._fix = fix
        self._on_change = on_change
        self._seen = 0
        self.settled = 0
        """The word that was acted on last; while the control word equals it there is nothing to do."""
        self.generation = 0
        self.state = fix.state if fix else MitigationState.NOT_APPLICABLE
        words[layout.ACK_STATE] = self.state

    def follow(self, word: int, step: int) -> None:
        """
        Take notice of a control word that is not settled, at the beginning of `step`; act once its step has come.
        """
        mitigation, generation, effective_step, desired = layout.decode_control(word)
        words = self.words
        if word != self._seen:
            self._seen = word
            words[layout.ACK_OBSERVED] = word
            if generation <= self.generation:  # an older command that came late; what we do stays as it is
                self.settled = word
                return
            words[layout.ACK_OUTCOME] = ControlOutcome.PENDING
        if step < effective_step:
            return
        self.settled = word
        self.generation = generation
        outcome = self._act(mitigation, desired=desired, on_time=effective_step in (0, step))
        words[layout.ACK_STATE] = self.state
        words[layout.ACK_STEP] = step
        words[layout.ACK_WORD] = word
        words[layout.ACK_OUTCOME] = outcome  # last, as readers look at it first: what it speaks of is there then
        self._on_change()

    def _act(self, mitigation: int, *, desired: bool, on_time: bool) -> ControlOutcome:
        fix = self._fix
        if fix is None or mitigation != Mitigation.TRIM or fix.state not in _AVAILABLE:
            return ControlOutcome.REFUSED
        try:
            self.state = fix.set(applied=desired)
        except Exception:  # noqa: BLE001  the host goes on; the acknowledgement tells
            self.state = fix.state
            return ControlOutcome.FAILED
        return ControlOutcome.APPLIED if on_time else ControlOutcome.APPLIED_LATE
