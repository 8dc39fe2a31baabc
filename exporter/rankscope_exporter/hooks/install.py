"""
Putting the hooks on a model runner instance, and taking them off again.

They are set on the instance, not on the class, so that every platform's runner is covered and no device module is
imported for it. All probes come first; then what can be hooked is hooked, and what cannot is reported as such.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankscope_exporter.contract.http import HookReport, MitigationReport, RankIdentity
from rankscope_exporter.contract.words import HookState, MitigationState
from rankscope_exporter.control import Control
from rankscope_exporter.faults import LOGGER, Faults
from rankscope_exporter.flight import layout
from rankscope_exporter.flight.writer import FlightWriter
from rankscope_exporter.hooks import targets, wrappers
from rankscope_exporter.identity import flight_name
from rankscope_exporter.mitigations import trim
from rankscope_exporter.recorder import Recorder
from rankscope_exporter.retention import remove_expired
from rankscope_exporter.settings import WorkerSettings

logger = logging.getLogger(LOGGER)


class InjectedFaultError(Exception):
    """
    Raised by hooks that a test told to fail.
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
        self.faults = Faults(settings.fault_limit, self.remove)
        self._settings = settings
        self.wrappers: dict[str, Callable[..., Any]] = {}
        """What was set on the runner, by the name of the method that it stands for."""
        self._replaced: dict[str, Any] = {}

    def start_fix(self) -> None:
        """
        Examine the trim fix, and apply it if the settings say so.
        """
        if self.identity.runner != "V1":
            reason = f"the {self.identity.runner} runner keeps no output_token_ids to trim"
            state = MitigationState.NOT_APPLICABLE if self.identity.runner == "V2" else MitigationState.UNKNOWN_CODE
            self.fix_report = MitigationReport(mitigation=trim.NAME, state=state, reason=reason)
            return
        fix = self.fix = trim.TrimFix(type(self.runner)._update_states)  # noqa: SLF001  the method that the fix is about
        if self._settings.trim_fix == "on" and fix.set(applied=True) != MitigationState.APPLIED:
            logger.warning("rankscope: RANKSCOPE_TRIM_FIX=on, but the trim fix is %s: %s", fix.state.label, fix.reason)
        self.fix_report = MitigationReport(mitigation=trim.NAME, state=fix.state, reason=fix.reason)

    def start_hooks(self, *, completes: bool) -> None:
        """
        Make the flight file and put the hooks on.

        Raises:
            OSError: there is no flight file to be had; nothing was hooked.

        """
        mask = targets.probe_mask(self.runner)
        reports = [targets.probe(self.runner, point) for point in targets.HOOK_POINTS]
        identity = self.identity
        self.flight = FlightWriter(
            Path(self._settings.flight_dir),
            flight_name(identity),
            identity.model_dump(mode="json"),
            capacity=self._settings.ring_steps,
        )
        control = Control(self.flight.words, self.fix, self._after_control)
        self.recorder = Recorder(
            self.runner,
            self.flight,
            control,
            completes=completes,
            last_rank=identity.pp_rank == identity.pp_size - 1,
            reads_mask=mask.state == HookState.ON,
        )
        self.hooks = {report.hook: report for report in [*reports, mask]}
        usable = {report.hook for report in reports if report.state == HookState.ON}
        if "execute_model" not in usable:  # without steps, nothing else can be placed
            for name in usable:
                self.hooks[name] = HookReport(
                    hook=name,
                    state=HookState.OFF,
                    reason="execute_model is not hooked, so nothing can be told from a step",
                )
            usable = set()
        for name, wrapper in self._make_wrappers(self.recorder, usable).items():
            self._replaced[name] = self.runner.__dict__.get(name)
            self.wrappers[name] = wrapper
            setattr(self.runner, name, wrapper)
        self.publish()

    def _make_wrappers(self, recorder: Recorder, usable: set[str]) -> dict[str, Callable[..., Any]]:
        runner, note, faults = self.runner, self._note, self._injected
        execute, update, sample, broadcast, receive, guard = (point.method for point in targets.HOOK_POINTS)
        # Where vLLM has no guard, coming to the collective is the decision to post it.
        enter = recorder.enter if hasattr(runner, guard) else recorder.enter_unguarded
        made: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
            execute: lambda original: wrappers.wrap_execute_model(
                original, faults(execute, recorder.begin), faults(execute, recorder.end), note
            ),
            update: lambda original: wrappers.wrap_update_states(original, faults(update, recorder.update), note),
            sample: lambda original: wrappers.wrap_sample_tokens(original, faults(sample, recorder.end), note),
            broadcast: lambda original: wrappers.wrap_broadcast(
                original, faults(broadcast, enter), faults(broadcast, recorder.leave), note
            ),
            receive: lambda original: wrappers.wrap_receive(
                original, faults(receive, enter), faults(receive, recorder.leave), runner, note
            ),
            guard: lambda original: wrappers.wrap_guard(original, faults(guard, recorder.decide), note),
        }
        return {name: make(getattr(runner, name)) for name, make in made.items() if name in usable}

    def _injected(self, hook: str, body: Callable[..., Any]) -> Callable[..., Any]:
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

    def remove(self, hook: str, reason: str) -> None:
        """
        Take one hook off for good; the report says why.
        """
        self._restore(hook)
        self.hooks[hook] = HookReport(hook=hook, state=HookState.REMOVED, reason=reason)
        self.publish()

    def _restore(self, hook: str) -> None:
        ours, replaced = self.wrappers.pop(hook, None), self._replaced.pop(hook, None)
        if ours is None or self.runner.__dict__.get(hook) is not ours:
            return  # somebody wrapped it after us: taking ours away would take theirs
        if replaced is None:
            delattr(self.runner, hook)
        else:
            setattr(self.runner, hook, replaced)

    def uninstall(self) -> None:
        """
        Take all hooks off and undo the fix; the flight file stays for readers.
        """
        for hook in list(self.wrappers):
            self._restore(hook)
            self.hooks[hook] = HookReport(hook=hook, state=HookState.OFF, reason="uninstalled")
        if self.fix is not None:
            self.fix.set(applied=False)
        self._after_control()

    def _after_control(self) -> None:
        if self.fix is not None:
            self.fix_report = MitigationReport(mitigation=trim.NAME, state=self.fix.state, reason=self.fix.reason)
        self.publish()

    def publish(self) -> None:
        """
        Write the hook report into the flight file.
        """
        if self.flight is not None:
            self.flight.write_hook_report(
                {
                    "hooks": [report.model_dump(mode="json") for report in self.hooks.values()],
                    "mitigations": [self.fix_report.model_dump(mode="json")],
                }
            )


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
