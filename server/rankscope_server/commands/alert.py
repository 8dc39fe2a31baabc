"""
`rankscope alert`: try receivers, list the alerts.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import anyio
import typer

from rankscope_server.alerting.create import create_links
from rankscope_server.domain.alert_life import Change
from rankscope_server.domain.alert_notice import tried
from rankscope_server.domain.alert_rules import RULES
from rankscope_server.domain.facts import joined
from rankscope_server.domain.model import Severity
from rankscope_server.notify.create import create_receivers
from rankscope_server.notify.receiver import DeliveryError, Receiver
from rankscope_server.notify.webhook import make_secret
from rankscope_server.settings import ConfigError, load_settings

alert = typer.Typer(
    name="alert", help="Try the receivers of alerts, list the alerts.", no_args_is_help=True, rich_markup_mode=None
)

Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with receivers under `alerts:`.")]
Alertmanager = Annotated[
    list[str] | None,
    typer.Option("--alertmanager", help="Address of an Alertmanager, like http://127.0.0.1:9093. Can be repeated."),
]


@dataclass(frozen=True, slots=True)
class Tried:
    """
    What a receiver made of a test alert.
    """

    receiver: Receiver
    seconds: tuple[float, ...]
    """How long it took to take it: firing, and resolved."""
    error: str
    """Why it did not; empty if it did."""

    @property
    def line(self) -> str:
        """The same for people."""
        who = f"{self.receiver.name} ({self.receiver.kind}, {self.receiver.where})"
        if self.error:
            what = "the alert" if not self.seconds else "that it is resolved"
            return f"{who}: did not take {what}: {self.error}"
        firing, resolved = self.seconds
        return f"{who}: took it firing in {firing:.2f} s and resolved in {resolved:.2f} s"


@alert.command("test")
def try_receivers(
    config: Config = None,
    alertmanager: Alertmanager = None,
    receiver: Annotated[
        list[str] | None, typer.Option(help="Try only this receiver, by its name in the settings. Can be repeated.")
    ] = None,
    severity: Annotated[Severity, typer.Option(help="Severity of the test alert.")] = Severity.WARNING,
    hold: Annotated[
        float,
        typer.Option(
            min=0,
            max=240,
            help="Seconds until it is resolved. Alertmanager waits before it tells anyone (group_wait): hold it for longer to see its routes work.",
        ),
    ] = 0.0,
) -> None:
    """
    Send an alert named RankscopeTest to every receiver, firing and then resolved, whatever severities and deployments it is for.

    Ends with 0 if all of them took it, 1 if some did not, 2 if the settings cannot be used.
    """
    try:
        settings = load_settings(config, (), {"alertmanagers": tuple(alertmanager) if alertmanager else None})
        chosen = settings.receivers
        for name in receiver or ():
            if name not in {one.name for one in chosen}:
                known = joined(one.name for one in chosen) or "none"
                _fail(f"there is no receiver {name!r}; those of the settings: {known}")
        if receiver:
            chosen = tuple(one for one in chosen if one.name in receiver)
        receivers = [made for made, _ in create_receivers(chosen, create_links(settings))]
    except ConfigError as error:
        _fail(str(error))
    if not receivers:
        _fail("no receiver to try: name one with --alertmanager URL, or a file that has some with --config")
    outcomes = anyio.run(_try_all, receivers, severity, hold)
    for outcome in outcomes:
        typer.echo(outcome.line)
    if any(outcome.error for outcome in outcomes):
        raise typer.Exit(1)


@alert.command("rules")
def list_rules(config: Config = None) -> None:
    """
    List the alerts: how loud they are, how long a condition must hold and be over, and what they mean.
    """
    try:
        timings = load_settings(config).alerts.timings
    except ConfigError as error:
        _fail(str(error))
    for rule in RULES.values():
        timing = timings[rule.name]
        typer.echo(f"{rule.name}")
        typer.echo(
            f"  {', then '.join(severity.value for severity in rule.severities)};"
            f" fires after {timing.hold_seconds:g} s, is resolved {timing.keep_seconds:g} s after its end"
        )
        typer.echo(f"  {rule.meaning}")


@alert.command("secret")
def print_secret() -> None:
    """
    Print a new secret for a webhook: its file is the secret_file of the receiver here, and its key at the other end.
    """
    typer.echo(make_secret())


async def _try_all(receivers: Sequence[Receiver], severity: Severity, hold: float) -> list[Tried]:
    outcomes: dict[int, Tried] = {}

    async def attempt(number: int, receiver: Receiver) -> None:
        outcomes[number] = await _try(receiver, f"{time.time_ns():x}", severity, hold)

    async with anyio.create_task_group() as tasks:
        for number, receiver in enumerate(receivers):
            tasks.start_soon(attempt, number, receiver)
    return [outcomes[number] for number in range(len(receivers))]


async def _try(receiver: Receiver, name: str, severity: Severity, hold: float) -> Tried:
    fired, seconds = time.time(), []
    try:
        for change in (Change.FIRING, Change.RESOLVED):
            if change is Change.RESOLVED:
                await anyio.sleep(hold)
            now, began = time.time(), time.monotonic()
            await receiver.send([tried(name, change, severity, now, fired)], now)
            seconds.append(time.monotonic() - began)
    except DeliveryError as error:
        return Tried(receiver, tuple(seconds), str(error))
    finally:
        await receiver.close()
    return Tried(receiver, tuple(seconds), "")


def _fail(message: str) -> NoReturn:
    for line in message.splitlines():
        print(f"rankscope: {line}", file=sys.stderr)  # noqa: T201  this is the interface
    raise typer.Exit(2)
