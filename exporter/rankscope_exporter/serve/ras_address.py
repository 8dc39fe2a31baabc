"""
Where NCCL's RAS ports are looked for.
"""

from dataclasses import dataclass

AUTO, OFF = "auto", "off"
DEFAULT_PORT = 28028
"""
NCCL's own default; `NCCL_RAS_ADDR` changes it.
"""
MAX_PORTS = 8


@dataclass(frozen=True, slots=True)
class RasAddress:
    """
    One RAS port.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def candidates(self) -> tuple[str, ...]:
        """Hosts to try, in this order. `localhost` needs no resolver, and NCCL listens on one of its two addresses."""
        return ("127.0.0.1", "::1") if self.host == "localhost" else (self.host,)


def parse_addresses(setting: str) -> tuple[RasAddress, ...]:
    """
    The ports that `setting` names: `auto`, `off` (none), or `host:port`, several of them separated by commas.

    Raises:
        ValueError: it names none; the message says what it may be.

    """
    word = setting.strip().lower()
    if word == OFF:
        return ()
    if word == AUTO:
        return (RasAddress("localhost", DEFAULT_PORT),)
    addresses = tuple(dict.fromkeys(_address(part.strip()) for part in setting.split(",")))
    if len(addresses) > MAX_PORTS:
        msg = f"{len(addresses)} RAS ports; at most {MAX_PORTS} are asked"
        raise ValueError(msg)
    return addresses


def _address(text: str) -> RasAddress:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        msg = f"{text!r} is no RAS port: write auto, off or host:port, as in localhost:{DEFAULT_PORT}"
        raise ValueError(msg)
    return RasAddress(host, int(port))
