"""
Who calls, by the token that a request brings, and what that allows.

The read token opens every `GET`; without one, whoever reaches the address can read. The control token opens
`PUT /v1/control` and whatever the read token opens; without one, control is off.
"""

import enum
import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from rankscope_exporter.contract import CONTROL_PATH, HEALTH_PATH
from rankscope_exporter.serve.private import Renewed, read_private_text
from rankscope_exporter.serve.settings import ServeSettings, SettingsError

MIN_TOKEN_LENGTH = 16
"""
Shortest token that is taken: shorter ones can be guessed by trying.
"""
LANDING_PATH = "/"
_NO_TOKEN = bytes(32)


class Caller(enum.Enum):
    """
    Who sent a request.
    """

    ANONYMOUS = "anonymous"
    """It brings no token."""
    UNKNOWN = "unknown"
    """It brings one, which is not ours."""
    READER = "reader"
    CONTROLLER = "controller"


@dataclass(frozen=True, slots=True)
class Tokens:
    """
    The tokens of this exporter as SHA-256 digests; None where there is none.

    Digests have one length, so a comparison tells nothing about the length of a token either.
    """

    read: bytes | None = field(default=None, repr=False)
    control: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Refusal:
    """
    Why a request is not answered: an HTTP status, and the remedy in words.
    """

    status: int
    detail: str


def needs_token(method: str, path: str, tokens: Tokens) -> bool:
    """
    Whether the answer to a request depends on the token that it brings.
    """
    return _is_control(method, path) or tokens.read is not None


def assess_caller(authorization: str, tokens: Tokens) -> Caller:
    """
    Who sent a request with this `Authorization` header (empty: it has none).

    Takes as long whichever token is given: both comparisons are always made, each in constant time.
    """
    if not authorization:
        return Caller.ANONYMOUS
    scheme, _, given = authorization.partition(" ")
    digest = digest_of(given.strip())
    is_read = hmac.compare_digest(digest, _NO_TOKEN if tokens.read is None else tokens.read)
    is_control = hmac.compare_digest(digest, _NO_TOKEN if tokens.control is None else tokens.control)
    if scheme.lower() != "bearer":
        return Caller.UNKNOWN
    if is_control:
        return Caller.CONTROLLER
    return Caller.READER if is_read else Caller.UNKNOWN


def may_read(caller: Caller, tokens: Tokens) -> bool:
    """
    Whether this caller may know of ranks.
    """
    return tokens.read is None or caller in {Caller.READER, Caller.CONTROLLER}


def assess_access(method: str, path: str, caller: Caller, tokens: Tokens) -> Refusal | None:
    """
    Why `caller` may not have this request answered; None if it may.

    Health and the landing page are for everybody: they leave out what the caller may not know.
    """
    if _is_control(method, path):
        if tokens.control is None:
            return Refusal(
                403,
                "control is off: start the exporter with --control-token-file FILE or RANKSCOPE_CONTROL_TOKEN to turn it on",
            )
        if caller is Caller.CONTROLLER:
            return None
        if caller is Caller.READER:
            return Refusal(403, "this is the read token; control takes this exporter's control token")
        return Refusal(401, "send this exporter's control token as `Authorization: Bearer TOKEN`")
    if may_read(caller, tokens) or path in {HEALTH_PATH, LANDING_PATH}:
        return None
    return Refusal(401, "send this exporter's read token as `Authorization: Bearer TOKEN`")


def _is_control(method: str, path: str) -> bool:
    return method == "PUT" and path == CONTROL_PATH


def digest_of(token: str) -> bytes:
    """
    The digest by which a token is compared.
    """
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def read_tokens(settings: ServeSettings) -> Tokens:
    """
    The tokens of the settings.

    Raises:
        SettingsError: a token is given twice, cannot be read, is readable by others or too short, or both are the same.

    """
    read = _read_token("read", settings.read_token, settings.read_token_file)
    control = read_control_token(settings)
    if read is not None and read == control:
        msg = "the read token and the control token are the same: whoever may read could control; make another for one of them"
        raise SettingsError(msg)
    return Tokens(None if read is None else digest_of(read), None if control is None else digest_of(control))


def renewed_tokens(settings: ServeSettings) -> Renewed[Tokens]:
    """
    The tokens of the settings, read anew when their files change.

    Raises:
        SettingsError: as `read_tokens`.

    """
    files = (settings.read_token_file, settings.control_token_file)
    return Renewed([path for path in files if path is not None], lambda: read_tokens(settings))


def read_control_token(settings: ServeSettings) -> str | None:
    """
    The control token, or None where control is off.

    Raises:
        SettingsError: the token is given twice, cannot be read, is readable by others, or is too short.

    """
    return _read_token("control", settings.control_token, settings.control_token_file)


def _read_token(kind: str, value: SecretStr | None, path: Path | None) -> str | None:
    if value is not None and path is not None:
        msg = f"both {kind}_token and {kind}_token_file are set: keep one of them"
        raise SettingsError(msg)
    if path is not None:
        token, source = read_private_text(path, f"{kind} token"), str(path)
    elif value is not None:
        token, source = value.get_secret_value().strip(), f"RANKSCOPE_{kind.upper()}_TOKEN"
    else:
        return None
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or any(c.isspace() for c in token):
        msg = (
            f"{source}: a {kind} token has at least {MIN_TOKEN_LENGTH} ASCII characters and no spaces; make one with "
            "`python3 -c 'import secrets; print(secrets.token_urlsafe(32))'`"
        )
        raise SettingsError(msg)
    return token
