"""
Hooks and recorder on a stand-in runner: what they record, and that the host never notices.
"""

from pathlib import Path
from types import ModuleType

import pytest
from loading import load_module

from rankscope_exporter.contract import ControlOutcome, Guard, HookState, MitigationState, Phase, Role
from rankscope_exporter.flight import FlightFile, layout
from rankscope_exporter.hooks.install import Installation, install
from rankscope_exporter.recorder.base import SAMPLE_STEPS
from rankscope_exporter.settings import WorkerSettings


@pytest.fixture
def standin(tmp_path: Path) -> ModuleType:
    """
    A fresh copy of the stand-in's module for each test: the fix changes the code of its class.
    """
    source = Path(__file__).parents[1] / "support" / "standin.py"
    copy = tmp_path / "standin_copy.py"
    copy.write_text(source.read_text())
    return load_module(copy, "standin_copy")


@pytest.fixture
def settings(tmp_path: Path) -> WorkerSettings:
    return WorkerSettings(flight_dir=tmp_path / "flight")


def read(installation: Installation) -> FlightFile:
    assert installation.flight is not None
    return FlightFile(installation.flight.path)


def test_a_healthy_step_is_recorded_whole(standin, settings):
    """A healthy step leaves one record, done, with equal lengths and a broadcast decision."""
    runner = standin.StandInRunner()
    installation = install(runner, standin.identity(), settings, completes=True)
    standin.take_step(runner, standin.schedule(runner))
    with read(installation) as flight:
        (record,) = flight.records()
    assert (record["step"], record["phase"], record["guard"], record["role"]) == (
        1,
        Phase.DONE,
        Guard.BROADCAST,
        Role.RECEIVER,
    )
    assert (record["state_sum"], record["scheduler_sum"], record["drift_max"], record["drifting"]) == (30, 30, 0, 0)
    assert (record["requests"], record["masked"], record["mask_known"], record["mask_hash"]) == (3, 0, 1, 0)
    assert (record["posted_total"], record["completed_total"], record["broadcasts_total"], record["skips_total"]) == (
        1,
        1,
        1,
        0,
    )
    assert record["begin_ns"] <= record["decide_ns"] <= record["end_ns"]


def test_completion_is_never_claimed_where_a_call_only_enqueues(standin, settings):
    """On a device backend, posted collectives are counted and completed ones are not."""
    runner = standin.StandInRunner()
    installation = install(runner, standin.identity(), settings, completes=False)
    standin.take_step(runner, standin.schedule(runner))
    with read(installation) as flight:
        (record,) = flight.records()
    assert (record["posted_total"], record["completed_total"]) == (1, 0)


def test_drift_is_recorded_with_the_requests_that_drift(standin, settings):
    """Requests longer than the scheduler's lengths are counted, and listed worst first with margin and first step."""
    runner = standin.StandInRunner()
    installation = install(runner, standin.identity(), settings)
    standin.take_step(runner, standin.schedule(runner, lengths=[10, 8, 5]))
    standin.take_step(runner, standin.schedule(runner, lengths=[10, 8, 4]))
    with read(installation) as flight:
        record = flight.records()[-1]
        drifting, rows = flight.requests()
    assert (record["drift_max"], record["drift_sum"], record["drifting"]) == (6, 8, 2)
    assert drifting == 2
    assert [(r.request_id, r.drift, r.state_length, r.scheduler_length, r.first_drift_step, r.step) for r in rows] == [
        ("r2", 6, 10, 4, 1, 2),
        ("r1", 2, 10, 8, 1, 2),
    ]
    assert [r.margin for r in rows] == [3, 3]


def test_the_table_empties_once_nothing_drifts(standin, settings):
    """A request that no longer drifts leaves the table, and starts anew if it drifts again."""
    runner = standin.StandInRunner(1)
    installation = install(runner, standin.identity(), settings)
    for lengths in ([8], [10], [9]):
        standin.take_step(runner, standin.schedule(runner, lengths=lengths))
    with read(installation) as flight:
        assert [(r.drift, r.first_drift_step) for r in flight.requests()[1]] == [(1, 3)]
    standin.take_step(runner, standin.schedule(runner))
    with read(installation) as flight:
        assert flight.requests() == (0, [])


def test_negative_drift_is_recorded_as_such(standin, settings):
    """A list shorter than the scheduler's is negative drift, and no request counts as drifting."""
    runner = standin.StandInRunner()
    installation = install(runner, standin.identity(), settings)
    standin.take_step(runner, standin.schedule(runner, lengths=[12, 12, 12]))
    with read(installation) as flight:
        (record,) = flight.records()
    assert (record["drift_max"], record["drift_sum"], record["drifting"]) == (-2, -6, 0)


def test_a_skip_is_told_from_a_broadcast(standin, settings):
    """When all requests are masked the guard says skip, and no collective is posted."""
    runner = standin.StandInRunner()
    installation = install(runner, standin.identity(), settings)
    runner.discard_request_mask.np[:3] = True
    standin.take_step(runner, standin.schedule(runner))
    with read(installation) as flight:
        (record,) = flight.records()
    assert (record["guard"], record["masked"], record["skips_total"], record["posted_total"]) == (Guard.SKIP, 3, 1, 0)


def test_masked_requests_hash_alike_whatever_their_rows(standin, settings, tmp_path):
    """Two ranks with the same masked requests in other rows have the same mask hash; other requests give another."""
    hashes = []
    for pp_rank, order, masked in (
        (0, ["a", "b", "c"], {"a", "c"}),
        (1, ["c", "b", "a"], {"a", "c"}),
        (2, ["a", "b", "c"], {"a", "b"}),
    ):
        runner = standin.StandInRunner()
        runner.input_batch.req_ids = order
        for row, name in enumerate(order):
            runner.discard_request_mask.np[row] = name in masked
        installation = install(runner, standin.identity(pp_rank=pp_rank), settings)
        standin.take_step(runner, standin.schedule(runner))
        with read(installation) as flight:
            hashes.append(int(flight.records()[0]["mask_hash"]))
    assert hashes[0] == hashes[1] != hashes[2]
    assert 0 not in hashes


def test_a_rank_that_hangs_in_the_collective_shows_it(standin, settings):
    """A record of a collective that never returned stays in the phase `decided`, with the decision."""
    runner = standin.StandInRunner()

    class HungError(Exception):
        pass

    def hang(self):
        self._is_all_reqs_chunked_prefill()
        raise HungError

    type(runner)._pp_receive_prev_sampled_token_ids_to_input_batch = hang
    installation = install(runner, standin.identity(), settings)
    with pytest.raises(HungError):
        standin.take_step(runner, standin.schedule(runner))
    with read(installation) as flight:
        (record,) = flight.records()
    assert (record["phase"], record["guard"], record["end_ns"]) == (Phase.DECIDED, Guard.BROADCAST, 0)


def test_a_step_without_tokens_ends_with_execute_model(standin, settings):
    """An empty step has no decision, is done, and carries the totals on."""
    runner = standin.StandInRunner()
    installation = install(runner, standin.identity(), settings)
    standin.take_step(runner, standin.schedule(runner))
    standin.take_step(runner, standin.schedule(runner, tokens=0))
    with read(installation) as flight:
        record = flight.records()[-1]
    assert (record["step"], record["phase"], record["guard"], record["broadcasts_total"]) == (
        2,
        Phase.DONE,
        Guard.NONE,
        1,
    )


def test_the_batch_hash_tells_batches_apart(standin, settings):
    """Ranks that saw the same steps have the same rolling hash; one different step separates them for good."""
    hashes = []
    for pp_rank, second in ((0, ("x",)), (1, ("x",)), (2, ("y",))):
        runner = standin.StandInRunner()
        installation = install(runner, standin.identity(pp_rank=pp_rank), settings)
        for new in (("w",), second, ("z",)):
            standin.take_step(runner, standin.schedule(runner, new=new, finished=("p", "q", "r")))
        with read(installation) as flight:
            hashes.append([int(h) for h in flight.records()["batch_hash"]])
    assert hashes[0] == hashes[1]
    assert hashes[0][0] == hashes[2][0]
    assert hashes[0][1] != hashes[2][1]
    assert hashes[0][2] != hashes[2][2]


def test_a_dummy_run_is_no_step(standin, settings):
    """A call with dummy_run=True passes through and is not counted."""
    runner = standin.StandInRunner()
    type(runner).execute_model = lambda self, scheduler_output, intermediate_tensors=None, dummy_run=False: "dummy"
    installation = install(runner, standin.identity(), settings)
    assert runner.execute_model(None, dummy_run=True) == "dummy"
    assert installation.recorder is not None
    assert installation.recorder.step == 0


def test_a_release_without_a_guard_always_broadcasts(standin, settings):
    """Where vLLM has no guard, coming to the collective is recorded as a broadcast, and the hook says why it is absent."""
    cls = standin.StandInRunner
    del cls._is_all_reqs_chunked_prefill
    cls._pp_receive_prev_sampled_token_ids_to_input_batch = lambda self: None
    runner = cls()
    installation = install(runner, standin.identity(), settings)
    standin.take_step(runner, standin.schedule(runner))
    assert installation.hooks["_is_all_reqs_chunked_prefill"].state == HookState.ABSENT
    with read(installation) as flight:
        assert flight.records()[0]["guard"] == Guard.BROADCAST


def test_a_method_with_other_parameters_is_not_hooked(standin, settings):
    """A method that takes something else is left alone and reported as off, with what is unknown without it."""
    standin.StandInRunner._update_states = lambda self, batch: None
    runner = standin.StandInRunner()
    installation = install(runner, standin.identity(), settings)
    report = installation.hooks["_update_states"]
    assert report.state == HookState.OFF
    assert "drift" in report.reason
    standin.take_step(runner, standin.schedule(runner))
    with read(installation) as flight:
        assert flight.records()[0]["lengths"] == 0


@pytest.mark.parametrize(
    "hook", ["all", "execute_model", "_update_states", "sample_tokens", "_is_all_reqs_chunked_prefill"]
)
def test_failing_hooks_never_reach_the_host_and_take_themselves_out(standin, tmp_path, hook):
    """Hooks that always fail change nothing of what the runner does, are counted, and are gone after the limit."""
    plain, runner = standin.StandInRunner(), standin.StandInRunner()
    settings = WorkerSettings(flight_dir=tmp_path / "flight", fault_injection=hook, fault_limit=3)
    installation = install(runner, standin.identity(), settings)
    for _ in range(8):
        standin.take_step(runner, standin.schedule(runner))
        standin.take_step(plain, standin.schedule(plain))
    assert runner.log == plain.log
    assert runner.posted == plain.posted
    failed = [name for name, report in installation.hooks.items() if report.state == HookState.REMOVED]
    assert failed
    assert all(name not in runner.__dict__ for name in failed)
    with read(installation) as flight:
        assert flight.faults() >= 3
        reported = {h["hook"]: h["state"] for h in flight.report()["hooks"]}
    assert all(reported[name] == "removed" for name in failed)


def test_a_failed_begin_leaves_no_invented_record(standin, settings):
    """When a step could not be begun, what other hooks see of it is not written into an older step's record."""
    runner = standin.StandInRunner()
    installation = install(runner, standin.identity(), settings)
    standin.take_step(runner, standin.schedule(runner))
    broken = standin.schedule(runner, lengths=[1, 1, 1])
    del broken.scheduled_new_reqs
    standin.take_step(runner, broken)
    with read(installation) as flight:
        (record,) = flight.records()
        assert (record["step"], record["drift_max"]) == (1, 0)


def test_an_error_of_the_host_passes_through(standin, settings):
    """An error of vLLM's own method reaches its caller unchanged."""
    runner = standin.StandInRunner()
    installation = install(runner, standin.identity(), settings)
    output = standin.schedule(runner)
    output.scheduled_cached_reqs.req_ids = ["unknown"]
    with pytest.raises(KeyError, match="unknown"):
        runner.execute_model(output)
    with read(installation) as flight:
        assert flight.records()[-1]["phase"] == Phase.SCHEDULED


def test_uninstall_restores_what_was_there(standin, settings):
    """After uninstall the instance has no attribute of ours, a wrapper that was there before is back, and the fix is undone."""
    runner = standin.StandInRunner()
    before = runner.execute_model
    runner.execute_model = before
    original = type(runner)._update_states.__code__
    installation = install(runner, standin.identity(), WorkerSettings(flight_dir=settings.flight_dir, trim_fix="on"))
    assert type(runner)._update_states.__code__ is not original
    installation.uninstall()
    assert runner.__dict__["execute_model"] is before
    assert not [name for name in installation.hooks if name.startswith("_") and name in runner.__dict__]
    assert type(runner)._update_states.__code__ is original


def test_uninstall_leaves_a_wrapper_that_came_after_us(standin, settings):
    """Somebody who wrapped our wrapper keeps theirs."""
    runner = standin.StandInRunner()
    installation = install(runner, standin.identity(), settings)
    ours = runner.sample_tokens

    def theirs(grammar):
        return ours(grammar)

    runner.sample_tokens = theirs
    installation.uninstall()
    assert runner.sample_tokens is theirs
    assert runner.sample_tokens(None) == "sampled"


@pytest.mark.parametrize("case", ["file in the way", "no room"])
def test_without_a_flight_file_the_host_runs_and_one_warning_is_given(standin, tmp_path, caplog, monkeypatch, case):
    """A directory that cannot be used makes the rank blind, with one warning that names the remedy; the fix still applies."""
    directory = tmp_path / "flight"
    if case == "file in the way":
        directory.write_text("")
    else:
        monkeypatch.setattr(
            "os.posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
    runner = standin.StandInRunner()
    installation = install(runner, standin.identity(), WorkerSettings(flight_dir=directory, trim_fix="on"))
    assert installation.recorder is None
    assert not [name for name in runner.__dict__ if callable(runner.__dict__[name])]
    assert len(caplog.records) == 1
    assert "RANKSCOPE_FLIGHT_DIR" in caplog.text
    assert installation.fix_report.state == MitigationState.APPLIED
    assert not list(tmp_path.glob("flight/*"))


def test_the_fix_follows_the_control_word_at_its_step(standin, settings):
    """The word is acknowledged when seen, acted on at its step and not before, and drift is 0 in that very step."""
    runner = standin.StandInRunner(1)
    installation = install(runner, standin.identity(), settings)
    state = runner.requests["r0"]
    drift = []
    for step in range(1, 7):
        state.prev_num_draft_len = 3
        if step == 3:
            with FlightFile(installation.flight.path, writable=True) as flight:
                flight.request_control(layout.encode_control(1, 7, 5, desired=True))
        standin.take_step(runner, standin.schedule(runner, lengths=[10]))
        with read(installation) as flight:
            control = flight.control()
            drift.append(int(flight.records()[-1]["drift_max"]))
        if step in (3, 4):
            assert (control.outcome, control.acted_step) == (ControlOutcome.PENDING, 0)
    assert drift == [3, 6, 9, 12, 0, 0]
    assert (control.outcome, control.acted_step, control.mitigation_state) == (
        ControlOutcome.APPLIED,
        5,
        MitigationState.APPLIED,
    )
    with read(installation) as flight:
        assert [int(t) for t in flight.records()["trimmed_total"]] == [0, 0, 0, 0, 15, 18]
        assert [int(g) for g in flight.records()["generation"]] == [0, 0, 0, 0, 7, 7]
        assert flight.report()["mitigations"][0]["state"] == MitigationState.APPLIED


def test_a_late_or_older_control_word_is_told(standin, settings):
    """A word whose step has passed is acted on and called late; an older generation changes nothing."""
    runner = standin.StandInRunner(1)
    installation = install(runner, standin.identity(), settings)
    for _ in range(4):
        standin.take_step(runner, standin.schedule(runner))
    with FlightFile(installation.flight.path, writable=True) as flight:
        flight.request_control(layout.encode_control(1, 2, 3, desired=True))
    standin.take_step(runner, standin.schedule(runner))
    with read(installation) as flight:
        assert (flight.control().outcome, flight.control().acted_step) == (ControlOutcome.APPLIED_LATE, 5)
    with FlightFile(installation.flight.path, writable=True) as flight:
        flight.request_control(layout.encode_control(1, 1, 0, desired=False))
    standin.take_step(runner, standin.schedule(runner))
    assert installation.fix is not None
    assert installation.fix.state == MitigationState.APPLIED


def test_a_control_word_is_refused_where_the_fix_is_not_available(standin, settings):
    """Unknown code stays untouched, and the acknowledgement says refused."""
    standin.StandInRunner._update_states = lambda self, scheduler_output: None
    runner = standin.StandInRunner(1)
    installation = install(runner, standin.identity(), settings)
    with FlightFile(installation.flight.path, writable=True) as flight:
        flight.request_control(layout.encode_control(1, 1, 0, desired=True))
    standin.take_step(runner, standin.schedule(runner))
    with read(installation) as flight:
        assert flight.control().outcome == ControlOutcome.REFUSED
        assert flight.control().mitigation_state == MitigationState.UNKNOWN_CODE


def test_lengths_are_sampled_into_histograms(standin, settings):
    """Every few steps each request's lengths are counted in power-of-two buckets."""
    runner = standin.StandInRunner(2)
    installation = install(runner, standin.identity(), settings)
    for _ in range(SAMPLE_STEPS):
        standin.take_step(runner, standin.schedule(runner, lengths=[10, 0]))
    with read(installation) as flight:
        histograms = flight.histograms()
    bucket = layout.BUCKET_BOUNDS.index(16.0)
    assert histograms.samples == 1
    assert (histograms.state[bucket], histograms.state_sum) == (2, 20)
    assert (histograms.scheduler[0], histograms.scheduler[bucket], histograms.scheduler_sum) == (1, 1, 10)
