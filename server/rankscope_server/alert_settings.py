"""
Settings of alerts: where they go, when they fire.

    alerts:
      external_url: https://rankscope.example        # how people reach this server: links in alerts begin with it
      receivers:
        - name: ops
          alertmanager: [http://am-1:9093, http://am-2:9093]
        - name: pager
          webhook: https://pager.example/hook
          secret_file: /run/secrets/pager            # made by `rankscope alert secret > FILE`
          severities: [critical]
        - name: chat
          apprise_file: /run/secrets/chat-urls       # an address of apprise a line
          deployments: [chat]
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from rankscope_server.domain.alert_rules import FORECAST_SECONDS, RULES, Timing
from rankscope_server.domain.model import Severity

TIMEOUT_SECONDS = 5.0


def _base_url(value: str) -> str:
    parts = _http_parts(value if "//" in value else f"http://{value}")
    if parts is None:
        msg = f"{value!r} is no address of an Alertmanager: write it like http://127.0.0.1:9093"
        raise ValueError(msg)
    if parts[1]:
        msg = "an address holds no password: use username and password_file, or bearer_token_file"
        raise ValueError(msg)
    if "/api/v" in parts[0]:
        msg = f"{value!r} is the address of an API: write only what stands before /api"
        raise ValueError(msg)
    return parts[0]


def _webhook_url(value: SecretStr) -> SecretStr:
    parts = _http_parts(value.get_secret_value(), query=True)
    if parts is None:
        msg = "this is no address of a webhook: write it like https://host.example/path"
        raise ValueError(msg)
    if parts[1]:
        msg = "an address holds no password: use username and password_file, or bearer_token_file"
        raise ValueError(msg)
    return value


def _page_url(value: str) -> str:
    parts = _http_parts(value)
    if parts is None or parts[1]:
        msg = f"{value!r} is no address of pages: write it like https://rankscope.example"
        raise ValueError(msg)
    return parts[0]


def _runbook_url(value: str) -> str:
    if _http_parts(value, query=True) is None or "{name}" not in value:
        msg = f"{value!r} is no address of runbooks: write it like https://wiki.example/runbooks/{{name}}"
        raise ValueError(msg)
    return value


def _http_parts(value: str, *, query: bool = False) -> tuple[str, bool] | None:
    """
    The address without a slash at its end, and whether it holds a password; None if it is no address of HTTP.
    """
    try:
        parts = urlsplit(value)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    if not usable or parts.fragment or (parts.query and not query):
        return None
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}", bool(parts.username or parts.password)


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _known_rules(value: Mapping[str, float]) -> Mapping[str, float]:
    for name in value:
        if name not in RULES:
            msg = f"{name} is no alert; `rankscope alert rules` lists them"
            raise ValueError(msg)
    return value


AlertmanagerUrl = Annotated[str, AfterValidator(_base_url)]
AlertmanagerUrls = Annotated[tuple[AlertmanagerUrl, ...], BeforeValidator(_one_or_many)]
Seconds = Annotated[dict[str, Annotated[float, Field(ge=0, le=3600)]], AfterValidator(_known_rules)]


class ReceiverSettings(BaseModel):
    """
    One receiver of alerts: instances of Alertmanager, a webhook, or addresses of apprise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    alertmanager: AlertmanagerUrls = ()
    """Base addresses of all instances of a cluster: each of them gets every alert."""
    webhook: Annotated[SecretStr, AfterValidator(_webhook_url)] | None = None
    apprise: Annotated[tuple[SecretStr, ...], BeforeValidator(_one_or_many)] = ()
    apprise_file: Path | None = None
    """Holds an address of apprise a line, as those hold tokens; readable by its owner only."""
    severities: Annotated[tuple[Severity, ...], BeforeValidator(_one_or_many), Field(min_length=1)] = tuple(Severity)
    deployments: Annotated[tuple[str, ...], BeforeValidator(_one_or_many)] = ()
    """Names of deployments; all of them without it."""
    secret_file: Path | None = None
    """Holds the secret that webhooks are signed with; readable by its owner only."""
    username: str | None = None
    password_file: Path | None = None
    bearer_token_file: Path | None = None
    ca_file: Path | None = None
    """Authority of the receiver's certificate; those of the system without it."""
    timeout_seconds: Annotated[float, Field(gt=0, le=60)] = TIMEOUT_SECONDS

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = (
            bool(self.alertmanager),
            self.webhook is not None,
            bool(self.apprise),
            self.apprise_file is not None,
        )
        if sum(given) != 1:
            msg = "say where to: one of alertmanager, webhook, apprise and apprise_file"
            raise ValueError(msg)
        if (self.secret_file is None) is (self.webhook is not None):
            msg = (
                "a webhook is signed: make a secret with `rankscope alert secret > FILE` and set secret_file"
                if self.webhook is not None
                else "secret_file is for a webhook"
            )
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _authorized(self) -> Self:
        basic = self.username is not None or self.password_file is not None
        if basic and (self.username is None or self.password_file is None):
            msg = "username and password_file go together: set both"
            raise ValueError(msg)
        if basic and self.bearer_token_file is not None:
            msg = "password_file and bearer_token_file are both set: keep one"
            raise ValueError(msg)
        of_http = bool(self.alertmanager) or self.webhook is not None
        if not of_http and (basic or self.bearer_token_file is not None or self.ca_file is not None):
            msg = "an address of apprise holds its own passwords: remove username, password_file, bearer_token_file and ca_file"
            raise ValueError(msg)
        return self


class AlertSettings(BaseModel):
    """
    When alerts fire, and who hears of them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    external_url: Annotated[str, AfterValidator(_page_url)] | None = None
    """Address under which people reach this server, that of a proxy for example; by default made of host and port."""
    runbook_url: Annotated[str, AfterValidator(_runbook_url)] | None = None
    """Address of your own runbooks, with `{name}` where the name of the alert goes; by default this server's."""
    forecast_minutes: Annotated[float, Field(gt=0, le=120)] = FORECAST_SECONDS / 60
    """A wedge that may come sooner than this is worth an alert."""
    hold_seconds: Seconds = {}
    """How long a condition must hold before its alert fires, by the name of the alert."""
    keep_seconds: Seconds = {}
    """How long it must be over before the alert is resolved."""
    receivers: tuple[ReceiverSettings, ...] = ()

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [receiver.name for receiver in self.receivers]
        for name in names:
            if names.count(name) > 1:
                msg = f"receiver {name!r} is there twice: give each its own name"
                raise ValueError(msg)
        return self

    @property
    def timings(self) -> dict[str, Timing]:
        """Hold and keep times of all alerts."""
        return {
            name: Timing(
                self.hold_seconds.get(name, rule.timing.hold_seconds),
                self.keep_seconds.get(name, rule.timing.keep_seconds),
            )
            for name, rule in RULES.items()
        }
