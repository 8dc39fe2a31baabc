"""
The control word under any sequence of commands and steps.
"""

from array import array
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.contract import ControlOutcome, MitigationState
from rankscope_exporter.control import Control
from rankscope_exporter.flight import layout


class Fix:
    """
    A fix that can be set, as the trim fix on code that it knows.
    """

    reason = ""

    def __init__(self) -> None:
        self.state = MitigationState.AVAILABLE

    def set(self, *, applied: bool) -> MitigationState:
        self.state = MitigationState.APPLIED if applied else MitigationState.AVAILABLE
        return self.state


commands = st.lists(
    st.tuples(
        st.integers(1, 6), st.integers(0, 30), st.booleans(), st.integers(1, 8)
    ),  # generation, effective step, desired, steps until the next
    max_size=12,
)


@given(commands)
def test_a_rank_follows_the_newest_generation_and_never_acts_early(sequence: list[tuple[int, int, bool, int]]) -> None:
    """Whatever comes in whatever order: no action before its step, generations only go up, and the state is what the last one that was acted on wanted."""
    words = memoryview(array("Q", [0] * (layout.CONTROL_BYTES // 8)))
    fix = Fix()
    control = Control(words, fix, lambda: None)
    step = 0
    acted: SimpleNamespace | None = None
    for generation, effective_step, desired, steps in sequence:
        words[layout.CONTROL_REQUEST] = layout.encode_control(1, generation, effective_step, desired=desired)
        for _ in range(steps):
            step += 1
            word = words[layout.CONTROL_REQUEST]
            before = control.generation
            if word != control.settled:
                control.follow(word, step)
            assert control.generation >= before
            if control.generation != before:
                assert step >= effective_step
                assert (words[layout.ACK_STEP], words[layout.ACK_WORD]) == (step, word)
                on_time = effective_step in (0, step)
                assert words[layout.ACK_OUTCOME] == (ControlOutcome.APPLIED if on_time else ControlOutcome.APPLIED_LATE)
                acted = SimpleNamespace(generation=generation, desired=desired)
            elif word != control.settled:
                assert step < effective_step
                assert words[layout.ACK_OUTCOME] == ControlOutcome.PENDING
    wanted = acted.desired if acted else False
    assert fix.state == (MitigationState.APPLIED if wanted else MitigationState.AVAILABLE)
    assert words[layout.ACK_STATE] == fix.state


@given(st.lists(st.integers(1, 20), min_size=2, max_size=4, unique=True), st.integers(21, 60))
def test_ranks_that_see_the_word_in_time_act_at_the_same_step(seen_at: list[int], effective_step: int) -> None:
    """Ranks that see a command at different steps before its effective step all act at that step."""
    acted = []
    for first in seen_at:
        words = memoryview(array("Q", [0] * (layout.CONTROL_BYTES // 8)))
        control = Control(words, Fix(), lambda: None)
        word = layout.encode_control(1, 1, effective_step, desired=True)
        for step in range(first, 70):
            if word != control.settled:
                control.follow(word, step)
        acted.append((words[layout.ACK_STEP], ControlOutcome(words[layout.ACK_OUTCOME])))
    assert set(acted) == {(effective_step, ControlOutcome.APPLIED)}
