"""
What the exporters of a deployment ask of a client: a token, an authority to trust, a certificate.
"""

import ssl
import time
from collections.abc import Callable, Generator
from pathlib import Path

import httpx2
import structlog

from rankscope_server.settings import ConfigError, DeploymentSettings, control_token, read_private_text, read_token

logger = structlog.get_logger("rankscope.ingest")

RENEWAL_SECONDS = 2.0
"""
How often files of TLS are looked at, while there are requests.
"""


class TokenSource:
    """
    A token, or None, that is read again where the one that was sent is not taken.
    """

    def __init__(self, read: Callable[[], str | None]) -> None:
        self._read = read
        self.value = read()

    def refresh(self) -> bool:
        """
        Read it again; whether it is another one now. While it cannot be read, it stays what it was.
        """
        before = self.value
        try:
            self.value = self._read()
        except ConfigError:
            return False
        return self.value is not None and self.value != before


class RenewedTls:
    """
    The TLS context of a deployment, changed in place when its files change: new connections go by the new files.

    Files that cannot be used change nothing, and are tried again. An authority that was replaced stays trusted until
    the server is restarted, as no context can forget one.
    """

    def __init__(self, deployment: DeploymentSettings, seconds: Callable[[], float] = time.monotonic) -> None:
        self.context = create_tls_context(deployment)
        self._deployment = deployment
        self._seconds = seconds
        self._looked = seconds()
        self._seen = self._times()
        self._problem = ""

    def refresh(self) -> None:
        """
        Look at the files if that was not done just now. Never raises.
        """
        if self.context is None or self._seconds() < self._looked + RENEWAL_SECONDS:
            return
        self._looked = self._seconds()
        seen = self._times()
        if seen == self._seen and not self._problem:
            return
        self._seen, deployment = seen, self._deployment
        try:
            # Certificates are often replaced before their keys: a whole new context tells whether all fits together.
            create_tls_context(deployment)
            load_tls_files(self.context, deployment)
        except ConfigError as error:
            if str(error) != self._problem:
                logger.error("tls.unusable", deployment=deployment.name, error=str(error))  # noqa: TRY400  it says it all
            self._problem = str(error)
        else:
            logger.info("tls.read_anew", deployment=deployment.name)
            self._problem = ""

    def _times(self) -> tuple[tuple[int, int] | None, ...]:
        deployment = self._deployment
        return tuple(
            _time(path) for path in (deployment.ca_file, deployment.client_cert_file, deployment.client_key_file)
        )


def _time(path: Path | None) -> tuple[int, int] | None:
    try:
        status = None if path is None else path.stat()
    except OSError:
        return None
    return None if status is None else (status.st_ino, status.st_mtime_ns)


class BearerAuth(httpx2.Auth):
    """
    Sends the read token to read and the control token to control; never the one in place of the other.

    A token that is refused is read again from its file, and files of TLS are looked at now and then, so all of them can
    be replaced while server and exporters run.
    """

    def __init__(self, read: TokenSource, control: TokenSource, tls: RenewedTls | None = None) -> None:
        self.read = read
        self.control = control
        self._tls = tls

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        """
        One request, and once more if there is a new token.
        """
        if self._tls is not None:
            self._tls.refresh()
        source = self.control if request.method == "PUT" else self.read
        if source.value is None:
            yield request
            return
        request.headers["Authorization"] = f"Bearer {source.value}"
        response = yield request
        if response.status_code == 401 and source.refresh():
            request.headers["Authorization"] = f"Bearer {source.value}"
            yield request


def create_auth(deployment: DeploymentSettings, tls: RenewedTls | None = None) -> BearerAuth:
    """
    The tokens for the exporters of a deployment, and the files of TLS to look at.

    Raises:
        ConfigError: a file of a token cannot be used.

    """
    read, control = TokenSource(lambda: read_token(deployment)), TokenSource(lambda: control_token(deployment))
    return BearerAuth(read, control, tls)


def create_tls_context(deployment: DeploymentSettings) -> ssl.SSLContext | None:
    """
    How the exporters of a deployment are reached by https: whom to trust, and which certificate to show; None if none is.

    Raises:
        ConfigError: a file cannot be used.

    """
    if not any(url.startswith("https:") for url in deployment.exporters):
        return None
    # Named authorities stand instead of those of the system: whoever has one of those is no exporter of ours.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if deployment.ca_file else ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_tls_files(context, deployment)
    return context


def load_tls_files(context: ssl.SSLContext, deployment: DeploymentSettings) -> None:
    """
    Have a context trust the authority of a deployment, and show its certificate.

    Raises:
        ConfigError: a file cannot be used.

    """
    where = f"deployment {deployment.name}"
    ca, cert, key = deployment.ca_file, deployment.client_cert_file, deployment.client_key_file
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except OSError as error:
            msg = f"{where}: ca_file {ca}: {_reason(error, 'no certificate in PEM form')}"
            raise ConfigError(msg) from error
    if cert is not None and key is not None:
        read_private_text(key, f"{where}: client key file")

        def refuse() -> str:
            msg = f"{where}: client_key_file {key} has a password: write it without one, `openssl pkey -in {key} -out FILE`"
            raise ConfigError(msg)

        try:
            context.load_cert_chain(cert, key, password=refuse)
        except (OSError, ValueError) as error:
            reason = _reason(error, "no certificate with its key in PEM form")
            msg = f"{where}: client_cert_file {cert} and client_key_file {key}: {reason}"
            raise ConfigError(msg) from error


def _reason(error: Exception, otherwise: str) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not that of the certificate; give the pair that was issued together"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.strerror:
        return error.strerror
    return otherwise
