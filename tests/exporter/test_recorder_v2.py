"""
The V2 runner's recorder through its real wrappers, on a stand-in whose device tensors may not be read.
"""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import load_module

from rankscope_exporter.contract import Guard, HookState, Lengths, MitigationState, Phase, RequestIds, Role
from rankscope_exporter.flight import FlightFile
from rankscope_exporter.hooks.install import Installation, install
from rankscope_exporter.settings import WorkerSettings

SOURCE = Path(__file__).parents[1] / "support" / "standin_v2.py"


def load(name: str) -> ModuleType:
    return load_module(SOURCE, name)


@pytest.fixture
def standin() -> Iterator[ModuleType]:
    """
    A fresh copy of the stand-in for each test, as hooks are put on its functions; at the end, no device tensor was read.
    """
    module = load("standin_v2_copy")
    yield module
    assert module.touched == []


class Rank:
    """
    A runner with the hooks on, and what it recorded.
    """

    def __init__(self, module: ModuleType, directory: Path, runner: Any, *, completes: bool = False, **options: Any):
        identity = options.pop("identity", {})
        self.module, self.runner = module, runner
        self.installation: Installation = install(
            runner,
            module.identity_of(runner, **identity),
            WorkerSettings(flight_dir=directory, **options),
            completes=completes,
        )
        assert self.installation.recorder is not None

    def take(self, *outputs: Any) -> None:
        for output in outputs:
            self.module.take_step(self.runner, output)

    def open(self) -> FlightFile:
        assert self.installation.flight is not None
        return FlightFile(self.installation.flight.path)

    @property
    def records(self) -> Any:
        with self.open() as flight:
            return flight.records()

    @property
    def last(self) -> Any:
        return self.records[-1]

    def healthy(self) -> None:
        assert self.installation.faults.total == 0, self.installation.faults.kinds


@pytest.fixture
def rank(standin: ModuleType, tmp_path: Path) -> Iterator[Any]:
    """
    Makes ranks: options of the stand-in's runner, and of the settings; none of them may have had a fault at the end.
    """
    made: list[Rank] = []

    def make(*, kind: str = "StandInRunner", runner: dict[str, Any] | None = None, **options: Any) -> Rank:
        made.append(Rank(standin, tmp_path / "flight", getattr(standin, kind)(**(runner or {})), **options))
        return made[-1]

    yield make
    for each in made:
        each.healthy()


def busy(standin: ModuleType, *names: str, prompt: int = 4, **options: Any) -> Any:
    """A scheduler with requests."""
    scheduler = standin.Scheduler(**options)
    for name in names:
        scheduler.add(name, prompt)
    return scheduler


def test_every_hook_of_the_runner_goes_on(rank):
    """On a runner with a handler all hook points are hooked; the trim fix is not applicable and says why."""
    receiver = rank()
    assert {report.state for report in receiver.installation.hooks.values()} == {HookState.ON}
    assert receiver.installation.fix_report.state == MitigationState.NOT_APPLICABLE
    assert "V2" in receiver.installation.fix_report.reason


@pytest.mark.parametrize("proposes", [False, True])
@pytest.mark.parametrize("spec", [False, True])
def test_what_both_sides_agree_on_step_by_step(standin, rank, proposes, spec):
    """Where width and drafts are settled for each step, each side records what it posts, the receiver before it waits."""
    wide = {}
    for last in (False, True):
        one = rank(runner={"last": last, "drafts": 3, "handler": standin.AgreedPPHandler})
        one.runner.proposes = proposes
        one.runner.sample = lambda batch: [standin.Tensor(batch.num_reqs, 4 if spec else 1)] * 3
        output = busy(standin, "a", "b", drafts=3).schedule()
        output.scheduled_spec_decode_tokens = {"a": [1, 2, 3]} if spec else {}
        one.take(output)
        record = one.last
        assert record["width"] == one.runner.posted[0][1] == (4 if spec else 1)
        assert record["posted"] == len(one.runner.posted) == (3 if proposes else 2)
        wide[last] = int(record["width"])
    assert wide[False] == wide[True]


@pytest.mark.parametrize(
    ("last", "drafts", "role", "width", "posted"),
    [
        (False, 0, Role.RECEIVER, 1, 2),
        (True, 0, Role.SENDER, 1, 2),
        (False, 3, Role.RECEIVER, 4, 3),
        (True, 3, Role.SENDER, 4, 3),
    ],
)
def test_a_healthy_step_is_recorded_whole(standin, rank, last, drafts, role, width, posted):
    """Each side records its role, the guard, its width and as many collectives as it posted; the step is done."""
    one = rank(runner={"last": last, "drafts": drafts})
    one.take(busy(standin, "a", "b", "c", drafts=drafts).schedule())
    record = one.last
    assert (record["step"], record["phase"], record["role"], record["guard"]) == (1, Phase.DONE, role, Guard.BROADCAST)
    assert (record["width"], record["posted"], record["posted_total"]) == (width, posted, len(one.runner.posted))
    assert one.runner.posted[0] == (3, width)
    assert (record["requests"], record["masked"], record["mask_known"], record["mask_hash"]) == (3, 0, 1, 0)
    assert (record["lengths"], record["new"], record["cached"]) == (Lengths.COMPUTED_TOKENS, 3, 0)
    assert record["begin_ns"] <= record["decide_ns"] <= record["end_ns"]


@pytest.mark.parametrize("last", [False, True])
def test_a_lone_prompt_chunk_is_a_skip(standin, rank, last):
    """When vLLM's mask is None no collective is posted: a skip, with all rows masked."""
    one = rank(runner={"last": last, "drafts": 2})
    one.take(busy(standin, "long", prompt=40, drafts=2).schedule())
    record = one.last
    assert (record["guard"], record["requests"], record["masked"], record["mask_known"]) == (Guard.SKIP, 1, 1, 1)
    assert (record["posted"], record["posted_total"], record["skips_total"], record["broadcasts_total"]) == (0, 0, 1, 0)
    assert record["mask_hash"] != 0
    assert one.runner.posted == []


def test_a_mixed_mask_is_the_same_on_both_ranks(standin, rank):
    """Rows that are in the middle of their prompt are masked, and hash alike on sender and receiver."""
    scheduler = busy(standin, "short")
    scheduler.add("long", 40)
    output = scheduler.schedule()
    found = []
    for last in (False, True):
        one = rank(runner={"last": last})
        one.take(output)
        found.append([int(one.last[name]) for name in ("guard", "requests", "masked", "mask_hash", "width", "posted")])
    assert found[0] == found[1]
    assert found[0][:3] == [Guard.BROADCAST, 2, 1]
    assert found[0][3] != 0


def test_aborted_requests_show_as_dropped_rows(standin, rank):
    """Rows that were received for requests that are gone when they would be used are counted; the sender has none."""
    scheduler = busy(standin, "a", "b", "c")
    receiver, sender = rank(), rank(runner={"last": True})
    outputs = [scheduler.schedule()]
    scheduler.abort("a")
    scheduler.abort("b")
    outputs += [scheduler.schedule() for _ in range(3)]
    receiver.take(*outputs)
    sender.take(*outputs)
    assert receiver.records["dropped_total"].tolist() == [0, 0, 2, 2]
    assert sender.records["dropped_total"].tolist() == [0, 0, 0, 0]


def test_depth_and_filling_of_the_queue(standin, rank):
    """The queue is as deep as there are ranks; it fills by one per step that receives, before this step's receive."""
    scheduler = busy(standin, "a", "b")
    receiver, sender = rank(runner={"size": 3}), rank(runner={"size": 3, "last": True})
    outputs = [scheduler.schedule([name]) for name in ("a", "b", "nobody", "a", "b")]
    receiver.take(*outputs)
    sender.take(*outputs)
    assert receiver.records["queue_depth"].tolist() == [3] * 5
    # A slot is taken out before the lengths are read: the first one at the fourth step.
    assert receiver.records["queue_filled"].tolist() == [0, 1, 2, 1, 1]
    assert sender.records["queue_depth"].tolist() == [0] * 5


def test_an_empty_step_is_a_step_without_a_decision(standin, rank):
    """A step without tokens is counted, is done, has no decision, and carries the totals."""
    one = rank()
    scheduler = busy(standin, "a")
    one.take(scheduler.schedule(), scheduler.schedule([]), scheduler.schedule())
    middle = one.records[1]
    assert (middle["phase"], middle["guard"], middle["role"], middle["scheduled_tokens"]) == (Phase.DONE, 0, 0, 0)
    assert (middle["posted_total"], middle["broadcasts_total"]) == (2, 1)
    assert one.records["step"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("by", ["keyword", "position"])
def test_dummy_runs_are_not_counted(standin, rank, by):
    """VLLM's own warm-up passes through, however it says so."""
    one = rank()
    output = busy(standin, "a").schedule()
    if by == "keyword":
        one.runner.execute_model(output, dummy_run=True)
    else:
        one.runner.execute_model(output, None, True)
    assert one.runner.log == ["dummy"]
    assert one.installation.recorder.step == 0
    one.runner.execute_model(output, None, False)
    assert one.installation.recorder.step == 1


def test_host_lengths_against_the_scheduler(standin, rank):
    """Lengths are computed tokens; a runner that has more than the scheduler says drifts, with no margin to tell."""
    update = standin.StandInRunner.update_requests

    def too_far(self: Any, scheduler_output: Any) -> None:
        update(self, scheduler_output)
        if scheduler_output.scheduled_cached_reqs.req_ids:
            self.req_states.num_computed_tokens_np[self.req_states.req_id_to_index["b"]] += excess

    standin.StandInRunner.update_requests = too_far
    one = rank(runner={"last": True})
    scheduler = busy(standin, "a", "b", size=1)
    excess = 0
    one.take(scheduler.schedule(), scheduler.schedule())
    healthy = one.last
    assert (healthy["state_sum"], healthy["scheduler_sum"], healthy["state_max"], healthy["drift_max"]) == (8, 8, 4, 0)
    excess = 3
    one.take(scheduler.schedule())
    assert (one.last["drift_max"], one.last["drift_sum"], one.last["drifting"]) == (3, 3, 1)
    with one.open() as flight:
        (row,) = flight.requests()[1]
    assert (row.request_id, row.drift, row.margin, row.first_drift_step) == ("b", 3, None, 3)
    excess = 0
    one.take(scheduler.schedule())
    with one.open() as flight:
        assert flight.requests() == (0, [])


@pytest.mark.parametrize(("ids", "shown"), [(RequestIds.HASHED, False), (RequestIds.OMITTED, False), ("shown", True)])
def test_request_ids_are_written_as_the_setting_says(standin, rank, ids, shown):
    """A hashed or omitted id stands nowhere in the flight file, also not of a request that drifts."""
    update = standin.StandInRunner.update_requests

    def too_far(self: Any, scheduler_output: Any) -> None:
        update(self, scheduler_output)
        self.req_states.num_computed_tokens_np += 1

    standin.StandInRunner.update_requests = too_far
    one = rank(identity={"request_ids": ids})
    scheduler = busy(standin, "secret-request-id", size=1)
    one.take(scheduler.schedule(), scheduler.schedule())
    assert one.last["drifting"] == 1
    assert (b"secret-request-id" in one.installation.flight.path.read_bytes()) is shown


def test_an_error_of_ours_does_not_quote_a_request(standin, tmp_path):
    """What a hook's error says may be a request id: the report names its class, and the log has the rest."""
    standin.StandInRunner.update_requests = lambda self, scheduler_output: None
    one = Rank(standin, tmp_path / "flight", standin.StandInRunner(), fault_limit=2)
    output = busy(standin).schedule()
    output.scheduled_cached_reqs.req_ids = ["secret-request-id"]
    output.scheduled_cached_reqs.num_computed_tokens = [4]
    one.take(output, output)
    report = one.installation.hooks["update_requests"]
    assert (report.state, "KeyError" in report.reason) == (HookState.REMOVED, True)
    assert b"secret-request-id" not in one.installation.flight.path.read_bytes()


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_collective_of_gloo_is_complete_when_the_call_returns(standin, rank, drafts):
    """Where a call returns only at completion, completed equals posted after each step."""
    scheduler = busy(standin, "a", drafts=drafts)
    outputs = [scheduler.schedule() for _ in range(4)]
    for last in (False, True):
        one = rank(runner={"last": last, "drafts": drafts}, completes=True)
        one.take(*outputs)
        assert one.records["completed_total"].tolist() == one.records["posted_total"].tolist()
        assert one.last["posted_total"] > 0


def test_an_enqueued_receive_is_complete_once_its_event_says_so(standin, rank):
    """Completion is read from the event at a later step, by asking; without an answer nothing is claimed."""
    scheduler = busy(standin, "a", size=1)
    one = rank()
    one.take(scheduler.schedule(), scheduler.schedule())
    first = one.runner.pp_handler.queue[0].event
    assert one.records["completed_total"].tolist() == [0, 0]
    first.ready = True
    one.take(scheduler.schedule())
    assert one.last["completed_total"] == 2
    assert first.asked == 2
    assert one.last["posted_total"] == 6


def test_events_that_cannot_be_asked_claim_nothing(standin, rank):
    """Where a release's event has no query, no collective is ever called complete."""
    one = rank()
    one.runner.group.make_event = lambda: SimpleNamespace(ready=True)
    scheduler = busy(standin, "a", size=1)
    one.take(*[scheduler.schedule() for _ in range(4)])
    assert (one.last["posted_total"], one.last["completed_total"]) == (8, 0)


def test_receives_whose_end_never_comes_are_bounded(standin, rank):
    """However long events stay silent, only a fixed number of them is kept."""
    one = rank()
    scheduler = busy(standin, "a", size=1)
    one.runner.group.make_event = type("Silent", (), {"query": lambda self: False})
    one.take(*[scheduler.schedule() for _ in range(200)])
    assert len(one.installation.recorder._outstanding) == 64
    assert one.last["completed_total"] == 0


@pytest.mark.parametrize(("drafts", "sampled", "width"), [(3, 4, 4), (3, 1, 1)])
def test_a_sender_that_does_not_pad_posts_what_was_sampled(standin, rank, drafts, sampled, width):
    """Before vLLM 0.30 the sender's width is that of its tensor, and the receiver's always the full one: they may differ."""
    plain = {"handler": standin.PlainPPHandler, "drafts": drafts}
    sender, receiver = rank(runner={**plain, "last": True}), rank(runner=plain)
    sender.runner.sample = lambda batch: (standin.Tensor(batch.num_reqs, sampled), standin.Tensor(1), standin.Tensor(1))
    output = busy(standin, "a", "b", drafts=drafts).schedule()
    sender.take(output)
    receiver.take(output)
    assert (sender.last["width"], receiver.last["width"]) == (width, 4)
    assert sender.runner.posted[0] == (2, width)
    assert (sender.last["posted"], receiver.last["posted"]) == (2, 2)
    assert sender.installation.hooks["PPHandler.broadcast_drafts"].state == HookState.ABSENT


def test_a_sender_that_pads_posts_the_full_width(standin, rank):
    """From vLLM 0.30 on the width is the padded one, whatever the sampler gave."""
    sender = rank(runner={"last": True, "drafts": 3})
    sender.runner.sample = lambda batch: (standin.Tensor(batch.num_reqs, 1), standin.Tensor(1), standin.Tensor(1))
    sender.take(busy(standin, "a", drafts=3).schedule())
    assert sender.runner.posted[0] == (1, 4)
    assert sender.last["width"] == 4


@pytest.mark.parametrize("last", [False, True])
def test_the_two_functions_before_there_was_a_handler(standin, rank, last):
    """VLLM 0.22 has no guard: rows and width are recorded, the mask is unknown, and two collectives are posted."""
    one = rank(kind="ModuleRunner", runner={"last": last, "drafts": 1}, completes=True)
    scheduler = busy(standin, "a", "b", drafts=1)
    one.take(scheduler.schedule())
    record = one.last
    role = Role.SENDER if last else Role.RECEIVER
    assert (record["guard"], record["role"], record["width"], record["requests"]) == (Guard.BROADCAST, role, 2, 2)
    assert (record["mask_known"], record["masked"], record["posted"], record["completed_total"]) == (0, 0, 2, 2)
    assert standin.group_of_module.posted == [(2, 2), (2, 2)]
    before = standin.pp_receive
    one.installation.uninstall()
    assert standin.pp_receive is not before


def test_one_rank_has_nothing_to_exchange(standin, rank):
    """Without a handler steps and lengths are recorded, the exchange is absent, and no decision is invented."""
    one = rank(runner={"last": True, "size": 1})
    scheduler = busy(standin, "a", size=1)
    one.take(scheduler.schedule(), scheduler.schedule())
    assert (one.last["phase"], one.last["guard"], one.last["state_sum"]) == (Phase.DONE, Guard.NONE, 4)
    assert one.installation.hooks["PPHandler.broadcast"].state == HookState.ABSENT
    assert one.installation.hooks["update_requests"].state == HookState.ON


def test_a_step_of_a_pooling_model_ends_with_pool(standin, rank):
    """A model that pools is asked for its output by another method: that ends the step, without a decision."""
    one = rank(runner={"last": True})
    one.runner.execute_model(busy(standin, "a").schedule())
    assert one.last["phase"] == Phase.STATE_UPDATED
    one.runner.pool()
    assert (one.last["phase"], one.last["guard"]) == (Phase.DONE, Guard.NONE)


class VllmError(Exception):
    """An error of vLLM's, with text that belongs to users."""


@pytest.mark.parametrize(
    ("method", "attribute", "phase", "guard"),
    [
        ("execute_model", "forward", Phase.STATE_UPDATED, Guard.NONE),
        ("sample_tokens", "sample", Phase.STATE_UPDATED, Guard.NONE),
        ("sample_tokens", "exchange", Phase.DECIDED, Guard.BROADCAST),
    ],
)
def test_a_failed_step_keeps_its_phase_and_says_so(standin, rank, method, attribute, phase, guard):
    """The error reaches the caller as it is; the record keeps its phase, and the report names step, phase, method and class."""
    one = rank(runner={"last": True}, completes=True)
    scheduler = busy(standin, "a", size=1)
    one.take(scheduler.schedule())
    error = VllmError("what a user wrote")

    def fail(*_: Any) -> Any:
        raise error

    place = one.runner.group if attribute == "exchange" else one.runner
    name = "broadcast" if attribute == "exchange" else attribute
    setattr(place, name, fail)
    with pytest.raises(VllmError) as caught:
        one.take(scheduler.schedule())
    assert caught.value is error
    with one.open() as flight:
        record = flight.records()[-1]
        report = flight.report()
        assert flight.failed_steps() == (1, 2)
    assert (record["step"], record["failed"], record["phase"], record["guard"]) == (2, 1, phase, guard)
    assert report["failure"] == {"step": 2, "phase": phase, "method": method, "kind": "VllmError"}
    assert b"what a user wrote" not in one.installation.flight.path.read_bytes()
    assert record["end_ns"] == 0

    delattr(place, name)
    one.runner.execute_model_state = None
    one.take(scheduler.schedule())
    after = one.last
    assert (after["step"], after["failed"], after["phase"], after["guard"]) == (3, 0, Phase.DONE, Guard.BROADCAST)
    assert after["broadcasts_total"] == 2 + (attribute == "exchange")


def test_many_failed_steps_are_counted_and_told_ten_times(standin, rank):
    """Publishing a failure costs more than a step: after ten of them only the counters go on."""
    one = rank()
    one.runner.forward = lambda: 1 / 0
    published = []
    write = one.installation.publish
    one.installation.publish = lambda: (published.append(1), write())
    scheduler = busy(standin, "a", size=1)
    for _ in range(25):
        with pytest.raises(ZeroDivisionError):
            one.take(scheduler.schedule())
    with one.open() as flight:
        assert flight.failed_steps() == (25, 25)
        assert flight.report()["failure"]["step"] == 10
    assert len(published) == 10


def test_an_interrupt_is_no_different(standin, rank):
    """Whatever ends the step ends it: Ctrl-C and exits pass through, and the step is marked."""
    one = rank()

    def interrupt() -> None:
        raise KeyboardInterrupt

    one.runner.forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        one.take(busy(standin, "a").schedule())
    assert (one.last["failed"], one.last["phase"]) == (1, Phase.STATE_UPDATED)


def test_a_runner_without_lengths_on_the_host(standin, rank):
    """Before vLLM 0.20 lengths stay unknown; steps and the exchange are recorded all the same."""
    runner = standin.ModuleRunner()
    state = runner.req_states
    vars(state)["_computed"] = vars(state).pop("num_computed_tokens_np")
    type(runner).update_requests = lambda self, scheduler_output: None
    type(runner).prepare_inputs = lambda self, scheduler_output: SimpleNamespace(num_reqs=1)
    type(runner).add_requests = lambda self, scheduler_output: None
    one = Rank(standin, Path(rank().installation.flight.path).parent / "old", runner)
    one.take(busy(standin, "a").schedule())
    one.healthy()
    assert (one.last["lengths"], one.last["state_sum"], one.last["guard"]) == (Lengths.UNKNOWN, 0, Guard.BROADCAST)


requests = st.tuples(st.integers(1, 40), st.integers(1, 12))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("abort"), st.integers(0, 7)),
        st.tuples(st.just("step"), st.sets(st.integers(0, 7))),
        st.tuples(st.just("step"), st.none()),
        st.tuples(st.just("dummy"), st.none()),
    ),
    max_size=40,
)


@given(operations=operations, drafts=st.integers(0, 3), size=st.integers(2, 4), completes=st.booleans())
@settings(deadline=None, max_examples=50)
def test_ranks_that_share_a_scheduler_record_the_same(tmp_path_factory, operations, drafts, size, completes):
    """Whatever is scheduled: guard, width, mask and collectives are equal in each step, and totals never go back."""
    standin = load("standin_v2_property")
    directory = tmp_path_factory.mktemp("flight")
    scheduler = standin.Scheduler(drafts=drafts, size=size)
    ranks = [
        Rank(
            standin, directory, standin.StandInRunner(last=number == size - 1, drafts=drafts, size=size),
            completes=completes, identity={"pp_rank": number, "pp_size": size}, ring_steps=64,
        )
        for number in range(size)
    ]  # fmt: skip
    named = 0
    for operation, value in operations:
        names = list(scheduler.requests)
        if operation == "add" and len(names) < 8:
            scheduler.add(f"request-{named}", *value)
            named += 1
        elif operation == "abort" and names:
            scheduler.abort(names[value % len(names)])
        elif operation == "step":
            output = scheduler.schedule(None if value is None else [names[n] for n in value if n < len(names)])
            for one in ranks:
                one.take(output)
        elif operation == "dummy":
            for one in ranks:
                one.runner.execute_model(None, dummy_run=True)
    same = ["step", "batch_hash", "guard", "mask_hash", "masked", "requests", "width", "posted", "posted_total"]
    same += ["state_sum", "scheduler_sum", "broadcasts_total", "skips_total", "phase"]
    first = ranks[0].records
    for one in ranks:
        one.healthy()
        records = one.records
        assert records[same].tolist() == first[same].tolist()
        assert len(one.runner.posted) == (records["posted_total"][-1] if len(records) else 0)
        assert (records["phase"] == Phase.DONE).all()
        assert (records["completed_total"] <= records["posted_total"]).all()
        for total in ("posted_total", "completed_total", "broadcasts_total", "skips_total", "dropped_total"):
            assert (np.diff(records[total].astype(np.int64)) >= 0).all()
        assert (records["queue_filled"] <= records["queue_depth"]).all()
        assert one.runner.pp_handler.freed_rows == (records["dropped_total"][-1] if len(records) else 0)
    assert standin.touched == []
