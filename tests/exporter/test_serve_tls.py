"""
TLS: what is refused at start, who gets in, and that renewed files are taken.
"""

import contextlib
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from authority import Authority, write
from cryptography.hazmat.primitives import serialization
from listening import WAIT, Listening, is_closed, listening

from rankscope_exporter.serve import app as app_module
from rankscope_exporter.serve.settings import ServeSettings, SettingsError
from rankscope_exporter.serve.tls import create_context

Serve = Callable[..., Listening]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """The authority that clients trust."""
    return Authority(tmp_path, "ours")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    """Another authority."""
    return Authority(tmp_path, "theirs")


@pytest.fixture
def serve(serve_settings: ServeSettings) -> Iterator[Serve]:
    """Serves for real, with changes to the settings by keyword."""
    with contextlib.ExitStack() as stack:

        def start(**changes: Any) -> Listening:
            return stack.enter_context(listening(serve_settings.model_copy(update=changes)))

        yield start


def test_off(serve_settings: ServeSettings) -> None:
    """Without files there is no TLS."""
    assert create_context(serve_settings) is None


def test_versions(serve_settings: ServeSettings, authority: Authority) -> None:
    """TLS 1.2 is the oldest that is spoken."""
    context = create_context(serve_settings.model_copy(update=authority.issue()))
    assert context is not None
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("left_out", "said"),
    [("tls_key_file", "tls_cert_file is set without tls_key_file"), ("tls_cert_file", "tls_key_file is set without")],
)
def test_one_of_two(serve_settings: ServeSettings, authority: Authority, left_out: str, said: str) -> None:
    """A certificate without its key, or a key without its certificate, is not taken for TLS being off."""
    files = authority.issue() | {left_out: None}
    with pytest.raises(SettingsError, match=said):
        create_context(serve_settings.model_copy(update=files))


def test_client_authority_alone(serve_settings: ServeSettings, authority: Authority) -> None:
    """Certificates of clients cannot be asked for without TLS."""
    with pytest.raises(SettingsError, match="set tls_cert_file and tls_key_file too"):
        create_context(serve_settings.model_copy(update={"tls_client_ca_file": authority.ca_file}))


@pytest.mark.parametrize("name", ["tls_cert_file", "tls_key_file", "tls_client_ca_file"])
def test_missing_file(serve_settings: ServeSettings, authority: Authority, name: str, tmp_path: Path) -> None:
    """A file that is not there is named."""
    files = authority.issue() | {name: tmp_path / "missing.pem"}
    with pytest.raises(SettingsError, match=r"missing\.pem: cannot read the .*: No such file"):
        create_context(serve_settings.model_copy(update=files))


@pytest.mark.parametrize("name", ["tls_cert_file", "tls_key_file", "tls_client_ca_file"])
def test_no_pem(serve_settings: ServeSettings, authority: Authority, name: str, tmp_path: Path) -> None:
    """A file that holds something else is named."""
    odd = tmp_path / "odd.pem"
    odd.write_text("no certificate at all\n")
    odd.chmod(0o600)
    with pytest.raises(SettingsError, match=r"odd\.pem.*PEM form"):
        create_context(serve_settings.model_copy(update=authority.issue() | {name: odd}))


def test_key_of_another_certificate(serve_settings: ServeSettings, authority: Authority) -> None:
    """A key that does not belong to the certificate is said to be that."""
    files = authority.issue() | {"tls_key_file": authority.issue("other")["tls_key_file"]}
    with pytest.raises(SettingsError, match="is not the key of the certificate"):
        create_context(serve_settings.model_copy(update=files))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602])
def test_key_of_everybody(serve_settings: ServeSettings, authority: Authority, mode: int) -> None:
    """A key that others can read or change is refused, with the command that repairs it."""
    files = authority.issue()
    files["tls_key_file"].chmod(mode)
    with pytest.raises(SettingsError, match=r"this TLS key .* run `chmod 600 .*server\.key`"):
        create_context(serve_settings.model_copy(update=files))


def test_key_that_cannot_be_read(serve_settings: ServeSettings, authority: Authority, tmp_path: Path) -> None:
    """A key that is there and cannot be read is said to be that."""
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    with pytest.raises(SettingsError, match="cannot read the TLS key: Is a directory"):
        create_context(serve_settings.model_copy(update=authority.issue() | {"tls_key_file": folder}))


def test_key_with_a_password(serve_settings: ServeSettings, authority: Authority) -> None:
    """A key with a password is refused rather than asked about on a terminal."""
    files = authority.issue()
    key = serialization.load_pem_private_key(files["tls_key_file"].read_bytes(), None)
    files["tls_key_file"].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(SettingsError, match="has a password"):
        create_context(serve_settings.model_copy(update=files))


@pytest.mark.integration
def test_tls(serve: Serve, authority: Authority, stranger: Authority) -> None:
    """Clients that trust the authority are answered; others see whom they do not trust; plain HTTP is not answered."""
    listens = serve(**authority.issue())

    assert listens.ask("/healthz", tls=authority.client())[0] == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        listens.ask("/healthz", tls=stranger.client())
    with listens.connect() as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert is_closed(plain)
    assert listens.ask("/healthz", tls=authority.client())[0] == 200


@pytest.mark.integration
def test_mutual_tls(serve: Serve, authority: Authority, stranger: Authority) -> None:
    """Only clients with a certificate of the authority for clients are answered."""
    clients = stranger
    listens = serve(**authority.issue(), tls_client_ca_file=clients.ca_file)

    assert listens.ask("/metrics", tls=authority.client(certificate_of=clients))[0] == 200
    for refused in (authority.client(), authority.client(certificate_of=authority)):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            listens.ask("/metrics", tls=refused)


@pytest.mark.integration
def test_tokens_over_tls(serve: Serve, authority: Authority, token: str) -> None:
    """A certificate does not stand in for a token, nor a token for a certificate."""
    files = authority.issue() | {"tls_client_ca_file": authority.ca_file}
    listens = serve(**files, read_token=ServeSettings(read_token="the-read-token-of-tests").read_token)
    client = authority.client(certificate_of=authority)

    assert listens.ask("/metrics", tls=client)[0] == 401
    assert listens.ask("/metrics", tls=client, token="the-read-token-of-tests")[0] == 200
    with pytest.raises((ssl.SSLError, ConnectionError)):
        listens.ask("/metrics", tls=authority.client(), token="the-read-token-of-tests")


@pytest.mark.integration
def test_handshake_that_never_ends(serve: Serve, authority: Authority) -> None:
    """A client that connects and does not go on with TLS is let go of in time."""
    listens = serve(**authority.issue(), request_seconds=0.5)
    with listens.connect() as silent, listens.connect() as half:
        half.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01")
        assert listens.ask("/healthz", tls=authority.client())[0] == 200
        assert is_closed(silent)
        assert is_closed(half)


@pytest.mark.integration
def test_many_handshakes(serve: Serve, authority: Authority) -> None:
    """However many handshakes stand half done, a client that goes on gets through; the oldest make room."""
    listens = serve(**authority.issue(), request_seconds=10.0 * WAIT)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(listens.connect()) for _ in range(100)]
        assert listens.ask("/healthz", tls=authority.client())[0] == 200
        assert all(is_closed(connection) for connection in silent[:36])


@pytest.mark.integration
def test_renewed_certificate(
    serve: Serve, authority: Authority, stranger: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New files are taken without a restart; while they do not fit together the old ones stay, and health says so."""
    monkeypatch.setattr(app_module, "RENEWAL_SECONDS", 0.02)
    listens = serve(**authority.issue("server"), request_rate=0.0)
    kept = authority.client()
    assert listens.ask("/healthz", tls=kept)[0] == 200

    issued = stranger.ca.issue_cert("127.0.0.1")
    write(stranger.directory / "server.pem", *issued.cert_chain_pems)
    told = listens.ask("/healthz", tls=kept)[1]
    while '"degraded"' not in told:
        told = listens.ask("/healthz", tls=kept)[1]
    assert "is not the key of the certificate" in told

    write(stranger.directory / "server.key", issued.private_key_pem)
    renewed = False
    while not renewed:
        with contextlib.suppress(ssl.SSLCertVerificationError):
            renewed = '"ok"' in listens.ask("/healthz", tls=stranger.client())[1]
    with pytest.raises(ssl.SSLCertVerificationError):
        listens.ask("/healthz", tls=kept)
