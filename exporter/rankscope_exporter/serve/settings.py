"""
Settings of the exporter process: flags first, then `RANKSCOPE_*` in the environment, then the defaults here.
"""

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from rankscope_exporter.contract.words import DEFAULT_PORT
from rankscope_exporter.serve.ras_address import parse_addresses
from rankscope_exporter.settings import DEFAULT_FLIGHT_DIR


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
    read_token: SecretStr | None = None
    read_token_file: Path | None = None
    control_token: SecretStr | None = None
    control_token_file: Path | None = None
    tls_cert_file: Path | None = None
    """Certificate in PEM form, with those between it and the authority behind it."""
    tls_key_file: Path | None = None
    tls_client_ca_file: Path | None = None
    """Certificates of the authorities that sign those of clients; clients without one are refused then."""
    retention_seconds: Annotated[float, Field(ge=0)] = 3600.0
    """How long the flight file of a process that is gone is kept, after the last sign of it."""
    allowed_hosts: str = ""
    """Names, separated by commas, by which clients may call this exporter besides `localhost`, its host name and plain
    IP addresses."""

    max_connections: Annotated[int, Field(ge=8, le=65536)] = 256
    request_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    """Time for a client to send a request, and for a TLS handshake."""
    keep_alive_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 20.0
    """How long a connection stays open after an answer."""
    request_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 50.0
    """Requests per second that each client address may send in the long run; 0: as many as it likes."""
    request_burst: Annotated[int, Field(ge=1)] = 100
    """Requests that each client address may send at once."""
    failure_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Wrong tokens per second that each client address may try in the long run; 0: as many as it likes."""
    failure_burst: Annotated[int, Field(ge=1)] = 10
    """Wrong tokens that each client address may try at once."""

    nccl_ras: str = "auto"
    """NCCL's RAS ports: auto (localhost:28028), off, or host:port, several of them separated by commas."""
    nccl_ras_seconds: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)] = 15.0
    """Time between two questions to a RAS port."""

    @field_validator("nccl_ras")
    @classmethod
    def _known_ports(cls, setting: str) -> str:
        parse_addresses(setting)
        return setting

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
