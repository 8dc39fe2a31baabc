"""
Settings of the exporter process: flags first, then `RANKSCOPE_*` in the environment, then the defaults here.
"""

import ipaddress
import stat
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from rankscope_exporter.contract.words import DEFAULT_PORT
from rankscope_exporter.settings import DEFAULT_FLIGHT_DIR

MIN_TOKEN_LENGTH = 16
"""
Shortest control token that is taken: shorter ones can be guessed by trying.
"""


class SettingsError(Exception):
    """
    A setting that cannot be used; the message names the setting and the remedy.
    """


class ServeSettings(BaseSettings):
    """
    What `rankscope-exporter serve` and `run` need to know.
    """

    model_config = SettingsConfigDict(env_prefix="RANKSCOPE_", frozen=True, env_ignore_empty=True)

    flight_dir: Path = DEFAULT_FLIGHT_DIR
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = DEFAULT_PORT
    """0 picks a free one; the line printed at start says which."""
    control_token: SecretStr | None = None
    control_token_file: Path | None = None
    retention_seconds: Annotated[float, Field(ge=0)] = 3600.0
    """How long the flight file of a process that is gone is kept, after the last sign of it."""
    allowed_hosts: str = ""
    """Names, separated by commas, by which clients may call this exporter besides `localhost`, its host name and plain
    IP addresses."""

    @field_validator("host")
    @classmethod
    def _plain_host(cls, host: str) -> str:
        return host.strip().removeprefix("[").removesuffix("]")

    @property
    def extra_hosts(self) -> tuple[str, ...]:
        """`allowed_hosts` taken apart."""
        return tuple(name.strip() for name in self.allowed_hosts.split(",") if name.strip())

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def read_control_token(settings: ServeSettings) -> str | None:
    """
    The control token, or None where control is off.

    Raises:
        SettingsError: the token is given twice, cannot be read, is readable by others, or is too short.

    """
    if settings.control_token is not None and settings.control_token_file is not None:
        msg = "both control_token and control_token_file are set: keep one of them"
        raise SettingsError(msg)
    if settings.control_token_file is not None:
        token, source = _read_token_file(settings.control_token_file), str(settings.control_token_file)
    elif settings.control_token is not None:
        token, source = settings.control_token.get_secret_value().strip(), "RANKSCOPE_CONTROL_TOKEN"
    else:
        return None
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or any(c.isspace() for c in token):
        msg = (
            f"{source}: a control token has at least {MIN_TOKEN_LENGTH} ASCII characters and no spaces; make one with "
            "`python3 -c 'import secrets; print(secrets.token_urlsafe(32))'`"
        )
        raise SettingsError(msg)
    return token


def _read_token_file(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        # Group access stays allowed: secrets mounted into a pod are 0440 of the pod's own group.
        if mode & (stat.S_IROTH | stat.S_IWOTH):
            msg = f"{path}: others can read or change this control token (mode {stat.S_IMODE(mode):04o}); run `chmod 600 {path}`"
            raise SettingsError(msg)
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path}: cannot read the control token: {getattr(error, 'strerror', None) or error}"
        raise SettingsError(msg) from error
