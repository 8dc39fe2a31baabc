"""
Settings of the server: a YAML file, the environment (`RANKSCOPE_SERVER_*`) and flags; later ones win.

    # rankscope.yaml
    deployments:
      - name: chat
        role: canary                # baseline, canary or none
        exporters: [http://10.0.0.7:9610, http://10.0.0.8:9610]
        control_token_file: /run/secrets/rankscope-token

Exporters that take a read token or TLS ask for more: `read_token_file`, `ca_file`, `client_cert_file`, `client_key_file`.
Alerts have settings of their own: see `alert_settings`.
"""

import difflib
import ipaddress
import socket
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

import yaml
from platformdirs import user_data_path
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from rankscope_server.alert_settings import AlertmanagerUrls, AlertSettings, ReceiverSettings
from rankscope_server.domain.model import DeploymentRole

ENV_PREFIX = "RANKSCOPE_SERVER_"
DEFAULT_PORT = 8700
SHORT_RECEIVER = "alertmanager"
"""
The receiver that `alertmanagers` makes.
"""
TARGET_FILES = {
    "token-file": "control_token_file",
    "read-token-file": "read_token_file",
    "ca-file": "ca_file",
    "client-cert-file": "client_cert_file",
    "client-key-file": "client_key_file",
}
"""
What `--target` calls the files of a deployment.
"""


class ConfigError(Exception):
    """
    Settings that cannot be used; the message names where, what and the remedy.
    """


def _exporter_url(value: str) -> str:
    parts = urlsplit(value if "//" in value else f"http://{value}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == -1 or parts.query or parts.fragment:
        msg = f"{value!r} is no exporter address: write it like http://127.0.0.1:9610"
        raise ValueError(msg)
    if parts.username or parts.password:
        msg = "an exporter address holds no password: use control_token_file"
        raise ValueError(msg)
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


ExporterUrl = Annotated[str, AfterValidator(_exporter_url)]


class DeploymentSettings(BaseModel):
    """
    One deployment: a name for engines that serve one model, and the exporters of the nodes that they run on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    role: DeploymentRole = DeploymentRole.NONE
    exporters: Annotated[tuple[ExporterUrl, ...], BeforeValidator(_one_or_many), Field(min_length=1)]
    control_token: SecretStr | None = None
    control_token_file: Path | None = None
    """Holds the token that the exporters have in `RANKSCOPE_CONTROL_TOKEN_FILE`; readable by its owner only."""
    read_token: SecretStr | None = None
    read_token_file: Path | None = None
    """The same for `RANKSCOPE_READ_TOKEN_FILE`."""
    ca_file: Path | None = None
    """Authority of the exporters' certificates; those of the system without it."""
    client_cert_file: Path | None = None
    """Certificate to show to exporters that ask for one."""
    client_key_file: Path | None = None
    """Its key; readable by its owner only."""

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        if self.control_token is not None and self.control_token_file is not None:
            msg = "control_token and control_token_file are both set: keep the file"
            raise ValueError(msg)
        if self.read_token is not None and self.read_token_file is not None:
            msg = "read_token and read_token_file are both set: keep the file"
            raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _tls(self) -> Self:
        if (self.client_cert_file is None) is not (self.client_key_file is None):
            msg = "client_cert_file and client_key_file go together: set both"
            raise ValueError(msg)
        if self.ca_file is not None or self.client_cert_file is not None:
            for url in self.exporters:
                if not url.startswith("https:"):
                    msg = f"exporter {url} has no TLS, and ca_file or client_cert_file is for TLS: write https://"
                    raise ValueError(msg)
        return self


class ServerSettings(BaseSettings):
    """
    Everything that can be set.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    deployments: tuple[DeploymentSettings, ...] = ()
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs a password file."""
    port: Annotated[int, Field(ge=0, le=65535)] = DEFAULT_PORT
    allowed_hosts: tuple[str, ...] = ()
    """Names under which browsers reach the server, beside loopback and `host`: those of a reverse proxy."""
    data_dir: Path = Field(default_factory=lambda: user_data_path("rankscope"))
    database_url: str | None = None
    """SQLAlchemy URL of the store; SQLite in `data_dir` by default."""
    password_file: Path | None = None
    """Lines of `user:hash`, made by `rankscope password NAME`."""
    retention_days: Annotated[float, Field(gt=0)] = 7.0
    """How long samples for charts are kept."""
    poll_seconds: Annotated[float, Field(ge=0.05, le=10)] = 0.25
    """Time between two questions for new steps."""
    alerts: AlertSettings = AlertSettings()
    alertmanagers: AlertmanagerUrls = ()
    """Instances of Alertmanager that get every alert: the short way to write a receiver for them."""

    @model_validator(mode="before")
    @classmethod
    def _add_targets(cls, values: Any) -> Any:
        targets = values.pop("targets", ())
        if targets:
            values["deployments"] = [*(values.get("deployments") or ()), *targets]
        return values

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [deployment.name for deployment in self.deployments]
        urls = [url for deployment in self.deployments for url in deployment.exporters]
        for name in names:
            if names.count(name) > 1:
                msg = f"deployment {name!r} is there twice: give each its own name, and all its exporters in one place"
                raise ValueError(msg)
        for url in urls:
            if urls.count(url) > 1:
                msg = f"exporter {url} is named twice: an exporter belongs to one deployment; run one for each, with its own RANKSCOPE_FLIGHT_DIR"
                raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _routed(self) -> Self:
        names = {deployment.name for deployment in self.deployments}
        for receiver in self.alerts.receivers:
            if self.alertmanagers and receiver.name == SHORT_RECEIVER:
                msg = f"receiver {SHORT_RECEIVER!r} is the one that alertmanagers makes: give yours another name"
                raise ValueError(msg)
            for name in receiver.deployments:
                if name not in names:
                    msg = f"receiver {receiver.name!r} is for deployment {name!r}, and there is none of this name"
                    raise ValueError(msg)
        return self

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        if not is_loopback(self.host) and self.password_file is None:
            msg = (
                f"host {self.host} can be reached from other machines and no password file is set: make one with"
                " `rankscope password NAME > FILE` and name it with --password-file, or listen on 127.0.0.1"
            )
            raise ValueError(msg)
        return self

    @property
    def store_url(self) -> str:
        """SQLAlchemy URL of the store."""
        return self.database_url or f"sqlite+aiosqlite:///{self.data_dir / 'rankscope.db'}"

    @property
    def receivers(self) -> tuple[ReceiverSettings, ...]:
        """All receivers of alerts."""
        short = [ReceiverSettings(name=SHORT_RECEIVER, alertmanager=self.alertmanagers)] if self.alertmanagers else []
        return (*short, *self.alerts.receivers)

    @property
    def external_url(self) -> str:
        """Address under which people reach this server; empty where any free port was asked for."""
        if self.alerts.external_url is not None or self.port == 0:
            return self.alerts.external_url or ""
        host = self.host.strip("[]")
        if host in {"0.0.0.0", "::"}:  # noqa: S104  that is what is looked for
            host = socket.gethostname()
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def describe_links(settings: ServerSettings) -> str:
    """
    That links in alerts may lead nowhere for those who get them, with the remedy; empty where that has been seen to.
    """
    if not settings.receivers or settings.alerts.external_url is not None:
        return ""
    if not settings.external_url:
        return "alerts hold no links to this server: set alerts.external_url to the address under which people reach it"
    return f"links in alerts lead to {settings.external_url}: set alerts.external_url if people reach this server under another address"


def is_loopback(host: str) -> bool:
    """
    Whether an address can be reached from this machine only.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_target(text: str) -> dict[str, Any]:
    """
    A deployment from `name=url[,url...][,role=canary][,token-file=PATH]`, with more files as in `TARGET_FILES`.

    Raises:
        ConfigError: it does not look like that.

    """
    name, equals, rest = text.partition("=")
    target: dict[str, Any] = {"name": name.strip(), "exporters": []}
    for part in rest.split(","):
        key, given, value = part.partition("=")
        if given and key.strip() == "role":
            target["role"] = value.strip()
        elif given and key.strip() in TARGET_FILES:
            target[TARGET_FILES[key.strip()]] = value.strip()
        elif part.strip():
            target["exporters"].append(part.strip())
    if not equals or not name.strip() or not target["exporters"]:
        msg = f"--target {text!r}: write it like chat=http://127.0.0.1:9610,role=canary,token-file=PATH"
        raise ConfigError(msg)
    return target


def load_settings(
    config: Path | None = None, targets: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> ServerSettings:
    """
    Settings from file, environment and flags; targets are added to the deployments of the file.

    Raises:
        ConfigError: something cannot be used.

    """
    file_values = {} if config is None else _read_file(config)
    given: dict[str, Any] = {name: value for name, value in (flags or {}).items() if value is not None}
    if targets:
        given["targets"] = [parse_target(target) for target in targets]

    class Sources(ServerSettings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=file_values)

    try:
        return Sources(**given)
    except (ValidationError, SettingsError) as error:
        source = "settings" if config is None else str(config)
        raise ConfigError(
            _explain(error, source) if isinstance(error, ValidationError) else f"environment: {error}"
        ) from error


def _read_file(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"{path}: {error.strerror}; name an existing file with --config"
        raise ConfigError(msg) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        msg = f"{path}: not YAML: {' '.join(str(error).split())}"
        raise ConfigError(msg) from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        msg = f"{path}: holds no settings; begin it with a line `deployments:`"
        raise ConfigError(msg)
    return {name: _written(inner) for name, inner in value.items() if inner is not None}


def _written(value: Any) -> Any:
    """
    Settings without those that have nothing after their name: all below them may be commented out.
    """
    if isinstance(value, dict):
        return {name: _written(inner) for name, inner in value.items() if inner is not None}
    return [_written(inner) for inner in value] if isinstance(value, list) else value


def _fields_at(place: Sequence[str | int]) -> list[str]:
    """
    Names of the settings that there are at a place in the file.
    """
    match tuple(place):
        case ("alerts", "receivers", *_):
            return list(ReceiverSettings.model_fields)
        case ("alerts", *_):
            return list(AlertSettings.model_fields)
        case ("deployments", *_):
            return list(DeploymentSettings.model_fields)
    return list(ServerSettings.model_fields)


def _unknown_setting(place: Sequence[str | int]) -> str:
    known = _fields_at(place[:-1])
    meant = difflib.get_close_matches(str(place[-1]), known, 1)
    there = f"do you mean {meant[0]}?" if meant else f"there are {', '.join(known)}"
    return f"there is no such setting; {there}"


def _explain(error: ValidationError, source: str) -> str:
    lines = []
    for detail in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            message = _unknown_setting(detail["loc"])
        elif detail["type"] == "string_pattern_mismatch":
            message = "letters, digits, dot, dash and underscore only, 63 at most, beginning with a letter or digit"
        elif detail["type"] == "missing":
            message = "is missing"
        elif detail["type"] in {"tuple_type", "list_type"}:
            message = "is a list: begin each of its entries with `- `"
        elif detail["type"] in {"model_type", "model_attributes_type", "dict_type"}:
            message = "holds settings of its own: write each as `name: value` on a line below it"
        lines.append(f"{source}: {where}: {message}" if where else f"{source}: {message}")
    return "\n".join(lines)


def read_private_text(path: Path, what: str) -> str:
    """
    The text of a file that only its owner may read.

    Raises:
        ConfigError: it cannot be read, is empty, or others may read it.

    """
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        msg = f"{what} {path}: {reason}"
        raise ConfigError(msg) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        msg = f"{what} {path} can be read by others: chmod 600 {path}"
        raise ConfigError(msg)
    if not text:
        msg = f"{what} {path} is empty"
        raise ConfigError(msg)
    return text


def control_token(deployment: DeploymentSettings) -> str | None:
    """
    The token to control the exporters of a deployment; None if none is set.

    Raises:
        ConfigError: its file cannot be used.

    """
    return _token("control", deployment, deployment.control_token, deployment.control_token_file)


def read_token(deployment: DeploymentSettings) -> str | None:
    """
    The token to read from the exporters of a deployment; None if none is set.

    Raises:
        ConfigError: its file cannot be used.

    """
    return _token("read", deployment, deployment.read_token, deployment.read_token_file)


def _token(kind: str, deployment: DeploymentSettings, value: SecretStr | None, path: Path | None) -> str | None:
    if value is not None:
        return value.get_secret_value()
    if path is not None:
        text = read_private_text(path, f"deployment {deployment.name}: {kind} token file")
        return text.splitlines()[0].strip()
    return None
