"""Exporters that ask for a token, TLS or a certificate, over real sockets."""

import datetime as dt
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from authority import Authority, write
from listening import WAIT, Listening, listening
from typer.testing import CliRunner

from rankscope_exporter.contract import ControlCommand
from rankscope_exporter.serve.settings import ServeSettings
from rankscope_server.cli import cli
from rankscope_server.ingest.access import (
    RENEWAL_SECONDS,
    BearerAuth,
    RenewedTls,
    TokenSource,
    create_auth,
    create_tls_context,
)
from rankscope_server.ingest.client import ExporterError, create_client, fetch_ranks, send_command
from rankscope_server.settings import ConfigError, DeploymentSettings, load_settings

pytestmark = [pytest.mark.anyio, pytest.mark.integration]

READ, CONTROL = "the-read-token-of-tests", "the-control-token-of-tests"
COMMAND = ControlCommand(engine="e1", desired=True, generation=1, effective_step=0)
Serve = Callable[..., Listening]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "theirs")


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """An exporter that really listens."""
    for name in [name for name in os.environ if name.startswith("RANKSCOPE_")]:
        monkeypatch.delenv(name)
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(listening(ServeSettings(flight_dir=tmp_path / "flight", **options)))


def private(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def deployment(url: str, **options: Any) -> DeploymentSettings:
    return DeploymentSettings(name="chat", exporters=(url,), **options)


def patient_client(settings: DeploymentSettings) -> httpx2.AsyncClient:
    """The server's client, with time for a machine that is busy with other tests."""
    client = create_client(auth=create_auth(settings), tls=create_tls_context(settings))
    client.timeout = httpx2.Timeout(WAIT)
    return client


async def ask(settings: DeploymentSettings) -> str:
    """What went wrong with asking for ranks; empty if nothing did."""
    async with patient_client(settings) as client:
        try:
            await fetch_ranks(client, settings.exporters[0])
        except ExporterError as error:
            return str(error)
    return ""


async def command(settings: DeploymentSettings) -> str:
    """What came of a command."""
    async with patient_client(settings) as client:
        try:
            return (await send_command(client, settings.exporters[0], COMMAND)).reason
        except ExporterError as error:
            return str(error)


async def test_everything_at_once(serve: Serve, authority: Authority, stranger: Authority, tmp_path: Path):
    """Mutual TLS and both tokens, each by file."""
    port = serve(**authority.issue(), tls_client_ca_file=stranger.ca_file, read_token=READ, control_token=CONTROL).port
    cert, key = stranger.pair("client", "server.example")
    settings = deployment(
        f"https://127.0.0.1:{port}",
        read_token_file=private(tmp_path / "read", READ + "\n"),
        control_token_file=private(tmp_path / "control", CONTROL),
        ca_file=authority.ca_file,
        client_cert_file=cert,
        client_key_file=key,
    )
    assert await ask(settings) == ""
    assert "no rank of engine 'e1'" in await command(settings)


async def test_read_token(serve: Serve):
    """A token that is missing and one that is wrong are told apart; the control token is not sent to read."""
    url = f"http://127.0.0.1:{serve(read_token=READ, control_token=CONTROL).port}"
    assert await ask(deployment(url, read_token=READ)) == ""
    assert "set read_token_file of this deployment" in await ask(deployment(url, control_token=CONTROL))
    assert "does not take the read token" in await ask(deployment(url, read_token="another-token-of-tests"))
    assert "control_token_file" in await command(deployment(url, control_token="another-token-of-tests"))


async def test_new_token_without_a_restart(serve: Serve, tmp_path: Path):
    """A token that was replaced on both sides is read as soon as the old one is refused."""
    path = private(tmp_path / "read", "the-token-of-yesterday")
    url = f"http://127.0.0.1:{serve(read_token=READ).port}"
    settings = deployment(url, read_token_file=path)
    async with patient_client(settings) as client:
        with pytest.raises(ExporterError, match="does not take the read token"):
            await fetch_ranks(client, url)
        private(path, READ)
        await fetch_ranks(client, url)


async def test_new_certificate_without_a_restart(serve: Serve, authority: Authority, stranger: Authority):
    """A certificate that was replaced is shown as soon as it fits its key; until then the one before is."""
    url = f"https://127.0.0.1:{serve(**authority.issue(), tls_client_ca_file=authority.ca_file).port}"
    cert, key = stranger.pair("client")
    settings = deployment(url, ca_file=authority.ca_file, client_cert_file=cert, client_key_file=key)
    now = 0.0
    tls = RenewedTls(settings, lambda: now)
    async with create_client(auth=create_auth(settings, tls), tls=tls.context) as client:
        client.timeout = httpx2.Timeout(WAIT)
        issued = authority.ca.issue_cert("server.example")
        for blobs, path in ((issued.cert_chain_pems, cert), ([issued.private_key_pem], key)):
            now += RENEWAL_SECONDS
            with pytest.raises(ExporterError, match="client_cert_file and client_key_file"):
                await fetch_ranks(client, url)
            write(path, *blobs)
        now += RENEWAL_SECONDS
        await fetch_ranks(client, url)


async def test_token_file_that_is_gone_keeps_the_token(tmp_path: Path):
    """What was read stays, as long as nothing new can be read."""
    path = private(tmp_path / "read", READ)
    settings = deployment("http://127.0.0.1:9610", read_token_file=path)
    source = create_auth(settings).read
    path.unlink()
    assert not source.refresh()
    assert source.value == READ


async def test_tokens_go_where_they_belong():
    """The read token to read, the control token to control, none in place of the other."""
    auth = BearerAuth(TokenSource(lambda: READ), TokenSource(lambda: None))
    sent = [next(auth.auth_flow(httpx2.Request(method, "http://127.0.0.1/"))) for method in ("GET", "PUT")]
    assert [request.headers.get("authorization") for request in sent] == [f"Bearer {READ}", None]


async def test_certificate_that_is_not_trusted(serve: Serve, authority: Authority, stranger: Authority):
    """Whom to trust is said with the setting for it, whether none or another is trusted."""
    url = f"https://127.0.0.1:{serve(**authority.issue()).port}"
    assert await ask(deployment(url, ca_file=authority.ca_file)) == ""
    for settings in (deployment(url), deployment(url, ca_file=stranger.ca_file)):
        assert "is not trusted" in (said := await ask(settings))
        assert "set ca_file of this deployment" in said


async def test_certificate_of_another_name(serve: Serve, authority: Authority):
    """A name that does not fit is told as that."""
    url = f"https://127.0.0.1:{serve(**authority.issue(identity='other.example')).port}"
    assert "is for another name" in await ask(deployment(url, ca_file=authority.ca_file))


async def test_certificate_that_has_expired(serve: Serve, authority: Authority):
    """So is the end of its time."""
    ended = dt.datetime.now(tz=dt.timezone.utc) - dt.timedelta(days=1)
    url = f"https://127.0.0.1:{serve(**authority.issue(not_after=ended)).port}"
    assert "has expired" in await ask(deployment(url, ca_file=authority.ca_file))


async def test_http_and_https_mixed_up(serve: Serve, authority: Authority):
    """The other scheme is what helps, and is said."""
    plain, tls = serve().port, serve(**authority.issue()).port
    assert "write http:// before" in await ask(deployment(f"https://127.0.0.1:{plain}", ca_file=authority.ca_file))
    assert "write https:// before" in await ask(deployment(f"http://127.0.0.1:{tls}"))


async def test_certificate_of_the_server(serve: Serve, authority: Authority, stranger: Authority):
    """An exporter that wants a certificate and gets none, or one of another authority, is told of with the settings."""
    url = f"https://127.0.0.1:{serve(**authority.issue(), tls_client_ca_file=authority.ca_file).port}"
    cert, key = stranger.pair("client")
    theirs = {"client_cert_file": cert, "client_key_file": key}
    for options in ({}, theirs):
        assert "client_cert_file and client_key_file" in await ask(
            deployment(url, ca_file=authority.ca_file, **options)
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"request_rate": 0.001, "request_burst": 1}, "raise RANKSCOPE_REQUEST_RATE there"),
        ({"read_token": "another-token-of-tests", "failure_burst": 1}, "after wrong tokens, wait"),
    ],
)
async def test_too_many_requests(serve: Serve, options: dict[str, Any], said: str):
    """An exporter that answers fewer requests than it is sent is told of with the setting."""
    url = f"http://127.0.0.1:{serve(**options).port}"
    await ask(deployment(url, read_token=READ))
    assert said in await ask(deployment(url, read_token=READ))


@pytest.mark.parametrize("reason", ["SSLV3_ALERT_HANDSHAKE_FAILURE", None])
def test_any_other_error_of_tls_is_told(reason: str | None):
    """With OpenSSL's word for it, if there is one."""
    from rankscope_server.ingest.client import explain_tls

    error = ssl.SSLError(1, "odd")
    error.reason = reason
    assert explain_tls(error).startswith("TLS failed (")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("read_token: a, read_token_file: b", "keep the file"),
        ("client_cert_file: a", "go together: set both"),
        ("client_key_file: a", "go together: set both"),
        ("ca_file: a", "write https://"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, text: str, words: str):
    """What cannot be meant is refused with the remedy."""
    path = tmp_path / "rankscope.yaml"
    path.write_text(f"deployments: [{{name: chat, exporters: ['http://a:9610'], {text}}}]")
    with pytest.raises(ConfigError, match=words):
        load_settings(path)


def test_target_names_files(tmp_path: Path):
    """All files can be given on the command line."""
    text = "chat=https://a:9610,token-file=c,read-token-file=r,ca-file=a,client-cert-file=p,client-key-file=k"
    made = load_settings(None, [text]).deployments[0]
    assert (made.control_token_file, made.read_token_file, made.ca_file) == (Path("c"), Path("r"), Path("a"))
    assert (made.client_cert_file, made.client_key_file) == (Path("p"), Path("k"))


def test_check_config_looks_at_files(authority: Authority, tmp_path: Path):
    """Files of tokens and TLS are looked at before anything starts, each mistake with its file and the remedy."""
    cert, key = authority.pair("client")
    _, other = authority.pair("other")
    odd = private(tmp_path / "odd.pem", "no certificate\n")
    base = f"chat=https://a:9610,ca-file={authority.ca_file}"

    def check(*targets: str) -> str:
        done = CliRunner().invoke(cli, ["check-config", *(word for target in targets for word in ("--target", target))])
        assert done.exit_code == (0 if "read only" in done.output else 2)
        return done.output

    assert "read only" in check(f"{base},client-cert-file={cert},client-key-file={key}")
    assert "the key is not that of the certificate" in check(f"{base},client-cert-file={cert},client-key-file={other}")
    assert f"ca_file {odd}: no certificate in PEM form" in check(f"chat=https://a:9610,ca-file={odd}")
    assert "No such file or directory" in check(f"chat=https://a:9610,ca-file={tmp_path / 'missing'}")
    assert "read token file" in check(f"{base},read-token-file={tmp_path / 'missing'}")
    key.chmod(0o640)
    assert f"chmod 600 {key}" in check(f"{base},client-cert-file={cert},client-key-file={key}")
