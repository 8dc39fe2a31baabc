"""
The lab's V2 part without vLLM: requests, facts, what its processes find on their path, and the trace on a made runner.
"""

import importlib.metadata
import json
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope_exporter.contract import Guard, Lengths, Phase, Role
from rankscope_exporter.flight import layout
from rankscope_lab.v2 import distributions, plugin
from rankscope_lab.v2.launch import find_facts
from rankscope_lab.v2.trace import Trace, read
from rankscope_lab.v2.workload import draw, scheduled_tokens

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from agreement import assess_agreement, compare_ranks


@given(st.integers(0, 40), st.integers(0, 1 << 32), st.integers(32, 512), st.floats(0, 1))
def test_requests_fit_the_context_and_repeat(count: int, seed: int, context: int, aborted: float) -> None:
    """Whatever is drawn fits, ends before it is whole where it is aborted, and is the same for the same seed."""
    requests = draw(count, seed=seed, context=context, aborted=aborted)
    assert requests == draw(count, seed=seed, context=context, aborted=aborted)
    assert len({request.name for request in requests}) == count
    for request in requests:
        assert request.prompt
        assert len(request.prompt) + request.tokens < context
        assert request.abort_after is None or 0 < request.abort_after < request.tokens


def test_the_last_token_of_a_request_is_never_scheduled() -> None:
    """A prompt of 3 with 2 tokens to come is scheduled for 4 tokens."""
    (request,) = draw(1, seed=1, context=64, aborted=0.0, answer=2)
    assert scheduled_tokens([request]) == len(request.prompt) + 1


def test_facts_are_the_last_object_of_a_log() -> None:
    """What vLLM prints before and after, braces or not, is no fact."""
    assert find_facts('INFO {\n{"a": 1}\n{"tokens": 2}\n{broken\nbye') == {"tokens": 2}
    assert find_facts("nothing") is None


def test_the_backend_is_found_on_the_path_of_the_lab_only(tmp_path: Path) -> None:
    """Metadata below a run's own directory names the backend and a distribution called vllm; without it neither is there."""
    assert not [entry for entry in importlib.metadata.entry_points(group="triton.backends") if entry.name == "cpu"]
    distributions.write(tmp_path, "0.30.0")
    found = {d.name: d for d in importlib.metadata.distributions(path=[str(tmp_path)])}
    assert [entry.value for entry in found["rankscope-lab-triton"].entry_points] == [distributions.BACKEND]
    assert found["vllm"].version == "0.30.0+cpu"


@pytest.mark.parametrize("value", [None, "1", "0"])
def test_the_plugin_does_nothing_unless_the_lab_says_so(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without RANKSCOPE_LAB=stock it returns before it looks for vLLM, which is not installed here."""
    monkeypatch.delenv("RANKSCOPE_LAB", raising=False)
    if value is not None:
        monkeypatch.setenv("RANKSCOPE_LAB", value)
    plugin.register()


class MadeHandler:
    """A pipeline handler of a first rank: a queue with two slots, and the guard's answer as it is told."""

    broadcast_group = "pp"

    def __init__(self, wire: Any, ask: Any) -> None:
        self.queue: deque[Any] = deque([None, None])
        self._wire, self._ask = wire, ask

    def get_prev_sampled_outputs(self) -> None:
        """Use the slot at the head."""
        self.queue.popleft()
        self.queue.append(None)

    def on_req_idx_freed(self, index: int) -> None:
        """A request index was freed."""

    def receive(self, batch: Any) -> None:
        """Receive two messages for a batch that needs them."""
        mask = self._ask.compute_need_sampled_mask(batch)
        if mask is None:
            return
        for columns in (4, 2):
            self._wire.broadcast(np.zeros((len(mask), columns)), group="pp")
        self._wire.broadcast(np.zeros(1), group="another")
        self.queue[-1] = SimpleNamespace(need_sampled_mask=mask)

    def broadcast(self) -> None:
        """The other side."""

    def broadcast_drafts(self) -> None:
        """The other side."""


class MadeRunner:
    """A runner of a first rank: one cached request at index 3."""

    def __init__(self, handler: MadeHandler) -> None:
        self.pp_handler = handler
        self.batch: Any = None
        tensor = SimpleNamespace(gpu=np.full(8, 5))
        self.req_states = SimpleNamespace(
            num_computed_tokens_np=np.full(8, 5),
            req_id_to_index={"a": 3},
            num_computed_tokens=tensor,
            total_len=tensor,
        )

    def execute_model(self, scheduler_output: Any) -> None:
        """One step up to the batch."""
        self.pp_handler.get_prev_sampled_outputs()
        self.update_requests(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            self.batch = self.prepare_inputs()

    def update_requests(self, scheduler_output: Any) -> None:
        """Nothing changes."""

    def prepare_inputs(self) -> Any:
        """The batch: one row."""
        return SimpleNamespace(idx_mapping_np=np.array([3]), req_ids=["a"])

    def sample_tokens(self) -> None:
        """The exchange."""
        self.pp_handler.receive(self.batch)


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A made runner under a trace; `answers` is what the guard says, `lines()` what the trace has written."""
    group = SimpleNamespace(get_pp_group=lambda: SimpleNamespace(rank_in_group=0))
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", group)
    answers: deque[Any] = deque()
    wire = SimpleNamespace(broadcast=lambda tensor, **_: None)
    ask = SimpleNamespace(compute_need_sampled_mask=lambda input_batch: answers.popleft())
    trace = Trace(tmp_path)
    trace.wrap_mask(ask)
    trace.wrap_broadcast(wire)
    runner = MadeRunner(MadeHandler(wire, ask))
    trace.wrap_handler(runner.pp_handler)
    trace.wrap_runner(runner)
    yield SimpleNamespace(runner=runner, answers=answers, lines=lambda: read(tmp_path)[0])
    trace.close()


def scheduled(tokens: int = 1) -> Any:
    """What a scheduler says of a step with one cached request, or of an empty one."""
    ids, computed = (["a"], [5]) if tokens else ([], [])
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        scheduled_cached_reqs=SimpleNamespace(req_ids=ids, num_computed_tokens=computed),
        scheduled_new_reqs=[],
        finished_req_ids=set(),
        preempted_req_ids=None,
        scheduled_spec_decode_tokens={},
    )


def test_the_trace_counts_rows_that_were_freed_before_they_were_used(traced: Any) -> None:
    """A row whose index is freed between receive and use, two steps later, is a dropped one; shapes and masks are those of the step."""
    traced.answers.extend([np.array([True]), None])
    for tokens in (1, 1, 0):
        traced.runner.execute_model(scheduled(tokens))
        if tokens:
            traced.runner.sample_tokens()
            traced.runner.pp_handler.on_req_idx_freed(3)
    first, second, third = traced.lines()
    assert first["masks"] == [[1]]
    assert [shape for shape, _ in first["wire"]] == [[1, 4], [1, 2]]
    assert second["masks"] == [None]
    assert second["wire"] == []
    assert second["queue"] == [2, 1]
    assert third["consumed"] == {"rows": 1, "dropped": 1, "dropped_needed": 1}
    assert (first["dropped_total"], third["dropped_total"]) == (0, 1)


def test_the_trace_notes_an_error_of_a_step(traced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error goes through, and its step says which it was."""
    monkeypatch.setattr(traced.runner.pp_handler, "receive", lambda batch: 1 / 0)
    traced.runner.execute_model(scheduled())
    with pytest.raises(ZeroDivisionError):
        traced.runner.sample_tokens()
    (line,) = traced.lines()
    assert line["error"] == "ZeroDivisionError: division by zero"


def record(**fields: int) -> Any:
    """A whole record of a step, as it should be for `LINE`."""
    records = np.zeros(1, layout.STEP_DTYPE)
    right = {
        "step": 1, "cached": 1, "scheduled_tokens": 1, "lengths": Lengths.COMPUTED_TOKENS, "state_sum": 5, "scheduler_sum": 5,
        "queue_depth": 2, "queue_filled": 1, "posted": 2, "posted_total": 2, "guard": Guard.BROADCAST, "phase": Phase.DONE,
        "requests": 1, "mask_known": 1, "width": 4, "role": Role.RECEIVER,
    }  # fmt: skip
    for field, value in {**right, **fields}.items():
        records[field] = value
    return records


LINE = {
    "step": 1, "new": [], "cached": {"a": 5}, "finished": [], "tokens": 1, "drafting": 0, "host": {"a": 5}, "queue": [2, 1],
    "dropped_total": 0, "masks": [[1]], "rows": ["a"], "wire": [[[1, 4], "int64"], [[2, 1], "int32"]],
}  # fmt: skip


def test_a_record_that_says_what_the_trace_says_has_no_difference() -> None:
    """Lines come as JSON, and the same step on both sides is the same in every field."""
    line = json.loads(json.dumps(LINE))
    assert assess_agreement(record(), [line], last_rank=False) == []


@pytest.mark.parametrize(
    "field", ["width", "masked", "guard", "posted", "queue_filled", "dropped_total", "state_sum", "role"]
)
def test_each_field_that_differs_is_named(field: str) -> None:
    """One wrong field is one difference, with the step and both values."""
    (difference,) = assess_agreement(record(**{field: 7}), [LINE], last_rank=False)
    assert (difference.step, difference.field, difference.flight) == (1, field, 7)


def test_a_step_that_only_one_side_has_is_a_difference() -> None:
    """Neither a lost record nor an invented one goes unnoticed."""
    assert [d.field for d in assess_agreement(record()[:0], [LINE], last_rank=False)] == ["step"]
    assert [d.field for d in assess_agreement(record(), [], last_rank=False)] == ["step"]


def test_ranks_are_compared_in_the_steps_that_both_have() -> None:
    """A rank that is a step ahead has not parted; other decisions, widths and batches have."""
    ahead = np.concatenate([record(), record(step=2)])
    assert compare_ranks(record(), ahead).steps == 1
    parted = compare_ranks(record(), record(guard=Guard.SKIP, posted=0, batch_hash=9))
    assert (parted.guards, parted.collectives, parted.batches, parted.masks) == (1, 1, 1, 0)
