"""
TLS and mutual TLS from files.
"""

import ssl
from pathlib import Path

from rankscope_exporter.serve.private import Renewed, check_private
from rankscope_exporter.serve.settings import ServeSettings, SettingsError


def renewed_context(settings: ServeSettings) -> Renewed[ssl.SSLContext] | None:
    """
    The TLS context of the settings, made anew when a file changes; None where TLS is off.

    A new context rather than a changed one: the authority of client certificates can then be replaced too, and
    connections that stand keep what they were made with.

    Raises:
        SettingsError: as `create_context`.

    """
    files = (settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file)
    context = create_context(settings)
    if context is None:
        return None
    return Renewed([path for path in files if path is not None], lambda: _must(create_context(settings)))


def create_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """
    The TLS context for connections that come in; None where TLS is off.

    Raises:
        SettingsError: a file is missing or cannot be used, they do not fit together, or others can read the key.

    """
    cert, key, client_ca = settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file
    if cert is None and key is None:
        if client_ca is not None:
            msg = "tls_client_ca_file is set without TLS: set tls_cert_file and tls_key_file too, or leave it out"
            raise SettingsError(msg)
        return None
    if cert is None or key is None:
        given, missing = ("tls_cert_file", "tls_key_file") if key is None else ("tls_key_file", "tls_cert_file")
        msg = f"{given} is set without {missing}: TLS takes both"
        raise SettingsError(msg)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    check_private(key, "TLS key")
    _check_readable(key, "TLS key")
    _check_readable(cert, "TLS certificate")
    try:
        context.load_cert_chain(cert, key, password=_Encrypted(key).refuse)
    except (ssl.SSLError, ValueError) as error:
        raise SettingsError(_explain(error, cert, key)) from error
    if client_ca is not None:
        _check_readable(client_ca, "certificates of the authority for clients")
        try:
            context.load_verify_locations(client_ca)
        except (ssl.SSLError, ValueError) as error:
            msg = f"{client_ca}: holds no certificate in PEM form; tls_client_ca_file takes that of the authority that signs client certificates"
            raise SettingsError(msg) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class _Encrypted:
    """
    Stands in for a question for the password of a key: nobody is there to answer it.
    """

    def __init__(self, key: Path) -> None:
        self._key = key

    def refuse(self) -> str:
        """Called where the key has a password."""
        msg = f"{self._key}: the TLS key has a password, and nobody is there to type it; write it without one: `openssl pkey -in {self._key} -out FILE`"
        raise SettingsError(msg)


def _check_readable(path: Path, what: str) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        msg = f"{path}: cannot read the {what}: {error.strerror}"
        raise SettingsError(msg) from error


def _explain(error: Exception, cert: Path, key: Path) -> str:
    reason = getattr(error, "reason", None) or str(error)
    if reason == "KEY_VALUES_MISMATCH":
        return f"{key}: is not the key of the certificate in {cert}; give the pair that was issued together"
    if "EE_KEY_TOO_SMALL" in reason or "CA_MD_TOO_WEAK" in reason:
        return f"{cert}: the certificate is too weak for TLS ({reason}); have one issued with at least 2048 bits and SHA-256"
    return f"{cert} and {key}: no certificate with its key in PEM form ({reason}); look at both with `openssl x509 -in {cert}` and `openssl pkey -in {key}`"


def _must(context: ssl.SSLContext | None) -> ssl.SSLContext:
    assert context is not None  # the settings do not change, and they ask for TLS
    return context
