"""
What the exporters of a deployment ask of a client: a token, an authority to trust, a certificate.
"""

import ssl
from collections.abc import Callable, Generator

import httpx2

from rankscope_server.settings import ConfigError, DeploymentSettings, control_token, read_private_text, read_token


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


class BearerAuth(httpx2.Auth):
    """
    Sends the read token to read and the control token to control; never the one in place of the other.

    A token that is refused is read again from its file, so tokens can be replaced while server and exporters run.
    """

    def __init__(self, read: TokenSource, control: TokenSource) -> None:
        self.read = read
        self.control = control

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        """
        One request, and once more if there is a new token.
        """
        source = self.control if request.method == "PUT" else self.read
        if source.value is None:
            yield request
            return
        request.headers["Authorization"] = f"Bearer {source.value}"
        response = yield request
        if response.status_code == 401 and source.refresh():
            request.headers["Authorization"] = f"Bearer {source.value}"
            yield request


def create_auth(deployment: DeploymentSettings) -> BearerAuth:
    """
    The tokens for the exporters of a deployment.

    Raises:
        ConfigError: a file of a token cannot be used.

    """
    return BearerAuth(
        read=TokenSource(lambda: read_token(deployment)), control=TokenSource(lambda: control_token(deployment))
    )


def create_tls_context(deployment: DeploymentSettings) -> ssl.SSLContext | None:
    """
    How the exporters of a deployment are reached by https: whom to trust, and which certificate to show; None if none is.

    Raises:
        ConfigError: a file cannot be used.

    """
    if not any(url.startswith("https:") for url in deployment.exporters):
        return None
    where = f"deployment {deployment.name}"
    ca, cert, key = deployment.ca_file, deployment.client_cert_file, deployment.client_key_file
    try:
        # Named authorities stand instead of those of the system: whoever has one of those is no exporter of ours.
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    except OSError as error:
        msg = f"{where}: ca_file {ca}: {_reason(error, 'no certificate in PEM form')}"
        raise ConfigError(msg) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
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
    return context


def _reason(error: Exception, otherwise: str) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not that of the certificate; give the pair that was issued together"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.strerror:
        return error.strerror
    return otherwise
