"""
Putting the hooks on a model runner instance, and taking them off again.

They are set on the instance, not on the class, so that every platform's runner is covered and no device module is
imported for it. All probes come first; then what can be hooked is hooked, and what cannot is reported as such.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope_exporter.contract.http import HookReport, MitigationReport, RankIdentity, StepFailure
from rankscope_exporter.contract.words import Detail, HookState, MitigationState
from rankscope_exporter.control import Control
from rankscope_exporter.faults import LOGGER, Faults, kind_of
from rankscope_exporter.flight import layout
from rankscope_exporter.flight.writer import FlightWriter
from rankscope_exporter.hooks import targets, wrappers
from rankscope_exporter.hooks.wiring import Make, wire_v1, wire_v2
from rankscope_exporter.identity import flight_name
from rankscope_exporter.mitigations import trim
from rankscope_exporter.recorder import Recorder, RecorderOptions, V1Recorder, V2Recorder
from rankscope_exporter.recorder.budget import Budget
from rankscope_exporter.recorder.device import DeviceSampler, Sample
from rankscope_exporter.recorder.request_ids import name_by
from rankscope_exporter.retention import remove_expired
from rankscope_exporter.settings import WorkerSettings

logger = logging.getLogger(LOGGER)


class InjectedFaultError(Exception):
    """
    Raised by hooks that a test told to fail.
    """


@dataclass(frozen=True, slots=True)
class _Place:
    """
    Where a wrapper was put, and what lay there itself (None: the owner's class has it).
    """

    point: targets.HookPoint
    owner: Any
    name: str
    before: Any
    in_class: Any
    """What lay in the owner's class under this name, and so is called through the wrapper; None if it is `before`."""
    make: Make


DEVICE_LENGTHS = "device_lengths"
"""
What the sampling of V2's device-side lengths is called among the hooks.
"""
REASON_LENGTH = 300
"""
Most characters of a reason in the report.
"""
FAILURES_TOLD = 10
"""
Failed steps that are written into the report; later ones are counted only.
"""


class Installation:
    """
    The hooks of one rank. `flight` and `recorder` are None where there is no flight file: the rank is blind then.
    """

    def __init__(self, runner: Any, identity: RankIdentity, settings: WorkerSettings) -> None:
        self.runner = runner
        self.identity = identity
        self.hooks: dict[str, HookReport] = {}
        self.flight: FlightWriter | None = None
        self.recorder: Recorder | None = None
        self.fix: trim.TrimFix | None = None
        self.fix_report = MitigationReport(
            mitigation=trim.NAME, state=MitigationState.UNKNOWN_CODE, reason="not examined"
        )
        self.failure: StepFailure | None = None
        self.faults = Faults(settings.fault_limit, self.remove)
        self._settings = settings
        self.wrappers: dict[str, Callable[..., Any]] = {}
        """What was put in place, by the name of the hook."""
        self._places: dict[str, _Place] = {}

    def start_fix(self) -> None:
        """
        Examine the trim fix, and apply it if the settings say so.
        """
        ruled = trim.rule_out(self.identity.runner)
        if ruled is not None:
            self.fix_report = MitigationReport(mitigation=trim.NAME, state=ruled.state, reason=ruled.reason)
            return
        fix = self.fix = trim.fix_of(type(self.runner))
        if self._settings.trim_fix == "on" and fix.set(applied=True) != MitigationState.APPLIED:
            logger.warning("rankscope: RANKSCOPE_TRIM_FIX=on, but the trim fix is %s: %s", fix.state.label, fix.reason)
        self.fix_report = MitigationReport(mitigation=trim.NAME, state=fix.state, reason=fix.reason)

    def start_hooks(self, *, completes: bool) -> None:
        """
        Make the flight file and put the hooks on.

        Raises:
            OSError: there is no flight file to be had; nothing was hooked.

        """
        points = targets.points_of(self.runner)
        reports = [targets.probe(self.runner, point) for point in points]
        identity = self.identity = self.identity.model_copy(update={"completes": completes or self._asks_events()})
        self.flight = FlightWriter(
            Path(self._settings.flight_dir),
            flight_name(identity),
            identity.model_dump(mode="json"),
            capacity=self._settings.ring_steps,
        )
        control = Control(self.flight.words, self.fix, self._after_control)
        options = RecorderOptions(
            completes=completes,
            last_rank=identity.pp_rank == identity.pp_size - 1,
            name=name_by(identity.request_ids, identity.engine),
            budget=Budget(self._settings.budget_microseconds * 1000, self._reduce),
            failed=self._failed,
            look_around=self._look_around,
        )
        usable = {report.hook for report in reports if report.state == HookState.ON}
        self.hooks = {report.hook: report for report in reports}
        if targets.is_v2(self.runner):
            v2 = self._record_v2(self.flight, control, options)
            self.recorder, made = v2, wire_v2(self.runner, v2, self._body, self._note)
        else:
            mask = targets.probe_mask(self.runner)
            self.hooks[mask.hook] = mask
            reads_mask = mask.state == HookState.ON
            v1 = V1Recorder(self.runner, self.flight, control, options, reads_mask=reads_mask)
            self.recorder, made = v1, wire_v1(self.runner, v1, self._body, self._note)
        for point in points:  # execute_model is the first
            if point.name in usable:
                self._put_safely(point, made[point.name])
            if "execute_model" not in self.wrappers:  # without steps, nothing else can be placed
                usable.discard(point.name)
                self._turn_off(usable, "execute_model is not hooked, so nothing can be told from a step")
                break
        self.publish()

    def _asks_events(self) -> bool:
        """
        Whether the recorder comes to know of completed collectives by events: those of V2's receives.
        """
        receives = self.identity.pp_rank < self.identity.pp_size - 1
        return receives and targets.is_v2(self.runner) and getattr(self.runner, "pp_handler", None) is not None

    def _record_v2(self, flight: FlightWriter, control: Control, options: RecorderOptions) -> V2Recorder:
        handler = getattr(self.runner, "pp_handler", None)
        drafts = hasattr(handler, "broadcast_drafts") and getattr(handler, "num_speculative_steps", 0) > 0
        sample = self._start_sampling(flight)
        return V2Recorder(self.runner, flight, control, options, handler=handler, drafts=drafts, sample_device=sample)

    def _start_sampling(self, flight: FlightWriter) -> Sample | None:
        """
        What samples device-side lengths; None if that is off, or cannot be done here. Its errors are its own, and do not
        end the hook that calls it.
        """
        every = self._settings.device_lengths_steps
        if not every:
            return None
        try:
            import torch  # noqa: PLC0415  only there inside a worker

            sampler = DeviceSampler(self.runner.req_states, flight.device, every, torch)
        except Exception as error:
            logger.warning("rankscope: device-side lengths cannot be sampled here", exc_info=error)
            self._turn_off([DEVICE_LENGTHS], f"{type(error).__name__}: {error}: device-side lengths unknown")
            return None
        self.hooks[DEVICE_LENGTHS] = HookReport(hook=DEVICE_LENGTHS, state=HookState.ON)

        def sample(step: int, cached: Any, prompts: Any, rows: list[int]) -> None:
            try:
                sampler.step(step, cached, prompts, rows)
            except Exception as error:  # noqa: BLE001
                self._note(DEVICE_LENGTHS, error)

        return sample

    def _turn_off(self, hooks: Iterable[str], reason: str) -> None:
        for hook in hooks:
            self.hooks[hook] = HookReport(hook=hook, state=HookState.OFF, reason=reason)

    def _put_safely(self, point: targets.HookPoint, make: Make) -> None:
        """
        Put one hook on, or report it as off: an object may refuse new attributes.
        """
        try:
            self._put(point, make)
        except Exception as error:
            logger.warning("rankscope: hook %s could not be put on: %s unknown", point.name, point.sees, exc_info=error)
            reason = f"could not be put on ({type(error).__name__}: {error}): {point.sees} unknown"
            self._turn_off([point.name], reason)

    def _put(self, point: targets.HookPoint, make: Make) -> None:
        found = targets.find(self.runner, point)
        if found is None:
            return
        owner, name = found.owner_object, found.attribute_name
        before, original = _own(owner, name), getattr(owner, name)
        # Name, text, signature and marks of what is under it stay visible to others who look.
        wrapper = functools.update_wrapper(make(original), original)
        setattr(owner, name, wrapper)
        if getattr(owner, name) is not wrapper:
            wrappers.silence(wrapper)
            msg = f"{type(owner).__name__} keeps its own {name}"
            raise TypeError(msg)
        in_class = _in_class(type(owner), name) if before is None else None
        self._places[point.name] = _Place(point, owner, name, before, in_class, make)
        self.wrappers[point.name] = wrapper

    def _look_around(self) -> None:
        """
        See what others have done to the hooked functions since.

        A class that they patched after us is hidden by our wrapper on the instance: that is put on anew, around theirs.
        The wrapper that was there goes on calling what it called, as theirs may have been made from it. A hook that
        they took off is reported as such. There is no probe of theirs: who calls it calls it as before.
        """
        for hook, place in list(self._places.items()):
            if _own(place.owner, place.name) is place.before:
                self.remove(hook, "something else in this process took it off")
            elif place.in_class is not None and not _lies_in(type(place.owner), place.name, place.in_class):
                self._restore(hook)
                self._put_safely(place.point, place.make)
                self.publish()

    def _body(self, hook: str, body: Callable[..., Any]) -> Callable[..., Any]:
        """
        `body`, or something that fails in its place where a test asked for that.
        """
        wanted = {name.strip() for name in self._settings.fault_injection.split(",")}
        if not wanted & {hook, "all"}:
            return body

        def fail(*_: Any, **__: Any) -> None:
            raise InjectedFaultError(hook)

        return fail

    def _note(self, hook: str, error: Exception) -> None:
        self.faults.note(hook, error)
        if self.flight is not None:
            self.flight.live[layout.LIVE_FAULTS] = self.faults.total
        count = self.faults.count(hook)
        if not count & (count - 1):  # 1, 2, 4, ...: the report costs more than a step
            self._publish_safely()

    def _failed(self, step: int, phase: int, method: str, error: BaseException) -> None:
        self.failure = StepFailure(step=step, phase=phase, method=method, kind=kind_of(error))
        if self.flight is not None and self.flight.live[layout.LIVE_FAILED_STEPS] <= FAILURES_TOLD:
            self._publish_safely()

    def _reduce(self, detail: Detail, costliest: str) -> None:
        """
        Record less, as our own time is over its budget.
        """
        budget = self._settings.budget_microseconds
        if self.recorder is not None:
            self.recorder.reduce(detail)
        if detail is Detail.CUT:
            costliest = costliest if costliest in self.wrappers else "execute_model"
            reason = f"most steps cost more than {budget} microseconds of ours, and this hook the most of it"
            logger.error("rankscope: hook %s took itself out: %s", costliest, reason)
            self.remove(costliest, reason)
        else:
            logger.warning(
                "rankscope: most steps cost more than %d microseconds of ours: request table and histograms are off",
                budget,
            )

    def remove(self, hook: str, reason: str) -> None:
        """
        Take one hook off for good; the report says why.
        """
        self._restore(hook)
        if hook == DEVICE_LENGTHS and isinstance(self.recorder, V2Recorder):
            self.recorder.stop_sampling()
        self.hooks[hook] = HookReport(hook=hook, state=HookState.REMOVED, reason=reason)
        self.publish()

    def _restore(self, hook: str) -> None:
        ours, place = self.wrappers.pop(hook, None), self._places.pop(hook, None)
        if ours is None or place is None:
            return
        wrappers.silence(ours)  # whoever holds it, or has wrapped it, calls vLLM through it and nothing else
        if _own(place.owner, place.name) is not ours:
            return  # somebody wrapped it after us: taking ours away would take theirs
        before = place.before
        while wrappers.is_silent(before):  # of a rank in this process that was uninstalled before this one
            before = before.__wrapped__
        if before is None:
            delattr(place.owner, place.name)
        else:
            setattr(place.owner, place.name, before)

    def uninstall(self) -> None:
        """
        Take all hooks off and undo the fix; the flight file stays for readers.
        """
        for hook in list(self.wrappers):
            self._restore(hook)
            self._turn_off([hook], "uninstalled")
        if DEVICE_LENGTHS in self.hooks:
            self._turn_off([DEVICE_LENGTHS], "uninstalled")
        if self.fix is not None:
            self.fix.set(applied=False)
        self._after_control()

    def _after_control(self) -> None:
        if self.fix is not None:
            self.fix_report = MitigationReport(mitigation=trim.NAME, state=self.fix.state, reason=self.fix.reason)
        self.publish()

    def publish(self) -> None:
        """
        Write the report into the flight file: hooks with their faults, mitigations, and the step that failed last.
        """
        if self.flight is None:
            return
        hooks = [
            report.model_copy(
                update={"reason": _short(report.reason), "faults": self.faults.kinds.get(report.hook, {})}
            )
            for report in self.hooks.values()
        ]
        report = {
            "hooks": [hook.model_dump(mode="json") for hook in hooks],
            "mitigations": [
                self.fix_report.model_copy(update={"reason": _short(self.fix_report.reason)}).model_dump(mode="json")
            ],
            "failure": None if self.failure is None else self.failure.model_dump(mode="json"),
        }
        self.flight.write_report(report)

    def _publish_safely(self) -> None:
        with contextlib.suppress(Exception):  # nothing of ours may reach vLLM from here
            self.publish()


def _own(owner: Any, name: str) -> Any:
    """
    The attribute that lies in the object itself, not in its class; None if there is none.
    """
    return getattr(owner, "__dict__", {}).get(name)


def _in_class(cls: type, name: str) -> Any:
    """
    The attribute as it lies in `cls` or a base of it; None if there is none.
    """
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return None


def _lies_in(cls: type, name: str, value: Any) -> bool:
    """
    Whether `value` is what `_in_class` finds; a plain function is also what the class gives, which is quicker to see.
    """
    return getattr(cls, name, None) is value or _in_class(cls, name) is value


def _short(text: str) -> str:
    """
    `text` in a size that is known: the report's area is fixed.
    """
    return text[:REASON_LENGTH].encode("ascii", "backslashreplace").decode()[:REASON_LENGTH]


def install(runner: Any, identity: RankIdentity, settings: WorkerSettings, *, completes: bool = False) -> Installation:
    """
    Examine the trim fix, hook `runner` and record its steps. Never raises: what does not work is off, and said once.
    """
    installation = Installation(runner, identity, settings)
    try:
        installation.start_fix()
    except Exception as error:
        logger.warning("rankscope: the trim fix could not be examined", exc_info=error)
        installation.fix_report = MitigationReport(
            mitigation=trim.NAME, state=MitigationState.UNKNOWN_CODE, reason=f"not examined: {error}"[:200]
        )
    try:
        remove_expired(settings.flight_dir, settings.retention_seconds)
        installation.start_hooks(completes=completes)
    except OSError as error:
        logger.warning(
            "rankscope: no flight file in %s (%s): this rank is blind. Give vLLM's user a writable directory there with room for %d KiB per rank, "
            "or set RANKSCOPE_FLIGHT_DIR.",
            settings.flight_dir,
            error.strerror or error,
            layout.file_bytes(settings.ring_steps) // 1024 + 1,
        )
    except Exception as error:
        logger.warning("rankscope: the hooks could not be installed: this rank is blind", exc_info=error)
    return installation
