"""What receivers are sent, and what is made of their answers."""

import base64
import dataclasses
import hashlib
import hmac
import json
import ssl
from pathlib import Path

import httpx2
import pytest
from made_ranks import START_UNIX

from rankscope_server.domain.alert_life import Change
from rankscope_server.domain.alert_notice import Links, Notice, tried
from rankscope_server.domain.model import Severity
from rankscope_server.notify.create import create_receivers
from rankscope_server.notify.receiver import DeliveryError
from rankscope_server.notify.webhook import make_secret
from rankscope_server.settings import ConfigError, load_settings

pytestmark = pytest.mark.anyio

LINKS = Links("https://rankscope.example")
FIRED = START_UNIX
NOTICE = dataclasses.replace(
    tried("1", Change.FIRING, Severity.CRITICAL, FIRED, FIRED),
    name="RankscopeWedged",
    kind="wedged",
    deployment="chat",
    engine="e1",
    summary="pp1 never came back",
    incident="i-1",
    test=False,
)
OVER = dataclasses.replace(NOTICE, change=Change.RESOLVED, resolved_unix=FIRED + 60, at_unix=FIRED + 60)


class Server(httpx2.MockTransport):
    """Answers as it is told, and remembers what it was sent."""

    def __init__(self, status: int = 200, error: Exception | None = None, text: str = "", **headers: str) -> None:
        super().__init__(self.answer)
        self.status, self.error, self.text, self.headers = status, error, text, headers
        self.seen: list[httpx2.Request] = []

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.seen.append(request)
        if self.error is not None:
            raise self.error
        return httpx2.Response(self.status, text=self.text, headers=self.headers)

    @property
    def bodies(self):
        return [json.loads(request.content) for request in self.seen]


@pytest.fixture
def write(tmp_path: Path):
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o600)
        return path

    return write


def receivers(server: httpx2.AsyncBaseTransport | None = None, **fields):
    settings = load_settings(flags={"alerts": {"receivers": [{"name": "ops", **fields}]}}).receivers
    return [made for made, _ in create_receivers(settings, LINKS, transport=server)]


async def send(receiver, *notices: Notice, now=FIRED + 100):
    await receiver.send(notices, now)
    await receiver.close()


async def test_alertmanager_is_told_when_an_alert_began_and_until_when_to_believe_it():
    """With labels to route by, and links in annotations; what is empty is left out."""
    server = Server()
    (receiver,) = receivers(server, alertmanager="am:9093/base/")
    await send(receiver, NOTICE)
    assert str(server.seen[0].url) == "http://am:9093/base/api/v2/alerts"
    (alert,) = server.bodies[0]
    assert alert["labels"] == {
        "alertname": "RankscopeWedged",
        "severity": "critical",
        "deployment": "chat",
        "engine": "e1",
        "kind": "wedged",
        "source": "rankscope-server",
    }
    assert alert["annotations"]["summary"] == "pp1 never came back"
    assert alert["annotations"]["incident_url"] == "https://rankscope.example/incidents/i-1"
    assert alert["annotations"]["runbook_url"] == "https://rankscope.example/runbooks/RankscopeWedged"
    assert alert["generatorURL"] == "https://rankscope.example/deployments/chat/engines/e1"
    assert (alert["startsAt"], alert["endsAt"]) == ("2023-11-14T22:13:20.000Z", "2023-11-14T22:19:00.000Z")


async def test_alertmanager_is_told_when_an_alert_ended():
    """Never in the future, nor before it began, whatever the wall clock did."""
    server = Server()
    (receiver,) = receivers(server, alertmanager="http://am:9093")
    await receiver.send([OVER], FIRED + 100)
    await receiver.send([OVER], FIRED - 100)
    await receiver.close()
    (first,), (jumped,) = server.bodies
    assert (first["startsAt"], first["endsAt"]) == ("2023-11-14T22:13:20.000Z", "2023-11-14T22:14:20.000Z")
    assert jumped["startsAt"] == jumped["endsAt"] == "2023-11-14T22:11:40.000Z"


async def test_an_alert_that_got_worse_is_two_for_alertmanager():
    """The severity is a label: the milder one ends."""
    server = Server()
    (receiver,) = receivers(server, alertmanager="http://am:9093")
    await send(receiver, dataclasses.replace(NOTICE, change=Change.WORSE, before=Severity.WARNING, at_unix=FIRED + 50))
    milder, worse = server.bodies[0]
    assert (milder["labels"]["severity"], milder["endsAt"]) == ("warning", "2023-11-14T22:14:10.000Z")
    assert (worse["labels"]["severity"], worse["endsAt"]) == ("critical", "2023-11-14T22:19:00.000Z")


async def test_each_instance_is_a_receiver_of_its_own():
    """None waits for another; names tell them apart."""
    made = receivers(Server(), alertmanager=["http://am-1:9093", "http://am-2:9093", "http://am-1:9093/"])
    assert [receiver.name for receiver in made] == ["ops am-1:9093", "ops am-2:9093"]
    for receiver in made:
        await receiver.close()


async def test_a_webhook_is_signed(write):
    """As Standard Webhooks are: over id, time and body, with the secret of the file."""
    secret, server = make_secret(), Server(204)
    (receiver,) = receivers(server, webhook="https://h.example/T0K3N?x=1", secret_file=write("secret", secret))
    await send(receiver, NOTICE)
    (request,) = server.seen
    signed = f"{NOTICE.id}.{int(FIRED + 100)}.".encode() + request.content
    digest = hmac.new(base64.b64decode(secret.removeprefix("whsec_")), signed, hashlib.sha256).digest()
    assert request.headers["webhook-id"] == NOTICE.id
    assert request.headers["webhook-timestamp"] == str(int(FIRED + 100))
    assert request.headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"
    assert receiver.where == "https://h.example/..."


async def test_the_body_of_a_webhook_says_what_kind_it_is(write):
    """A schema version, a type, times in UTC."""
    server = Server()
    (receiver,) = receivers(server, webhook="https://h.example", secret_file=write("secret", make_secret()))
    await receiver.send([NOTICE], FIRED)
    await receiver.send([OVER], FIRED)
    await receiver.close()
    firing, resolved = server.bodies
    assert (firing["schema_version"], firing["type"], resolved["type"]) == (1, "alert.firing", "alert.resolved")
    assert firing["data"]["labels"]["alertname"] == "RankscopeWedged"
    assert (firing["data"]["resolved_at"], resolved["data"]["resolved_at"]) == (None, "2023-11-14T22:14:20.000Z")
    assert firing["data"]["page_url"] == "https://rankscope.example/deployments/chat/engines/e1"


async def test_passwords_and_tokens_are_read_for_each_request(write):
    """So that they can be replaced."""
    server, token = Server(), write("token", "one\n")
    (receiver,) = receivers(server, alertmanager="http://am:9093", bearer_token_file=token)
    await receiver.send([NOTICE], FIRED)
    write("token", "two")
    await receiver.send([NOTICE], FIRED)
    token.unlink()
    with pytest.raises(DeliveryError, match=r"bearer token file .*No such file"):
        await send(receiver, NOTICE)
    assert [request.headers["authorization"] for request in server.seen] == ["Bearer one", "Bearer two"]
    (receiver,) = receivers(
        server, alertmanager="http://am:9093", username="ada", password_file=write("password", "secret")
    )
    await send(receiver, NOTICE)
    assert server.seen[-1].headers["authorization"] == f"Basic {base64.b64encode(b'ada:secret').decode()}"


@pytest.mark.parametrize(
    ("server", "words", "reached"),
    [
        (Server(400, text="bad\nlabel"), r"answers 400 \(bad label\)", True),
        (Server(302, location="http://evil.example"), "a redirect, and those are not followed", False),
        (Server(401), "does not take the credentials", False),
        (Server(404), "see that the address of this receiver is right", False),
        (Server(429), "takes no more for now", False),
        (Server(503), "answers 503", False),
        (Server(error=httpx2.ConnectError("")), "see that it runs and listens", False),
        (Server(error=httpx2.ReadTimeout("")), "no answer in time", False),
        (Server(error=httpx2.RemoteProtocolError("")), "write https://", False),
        (Server(error=httpx2.ProxyError("")), "NO_PROXY", False),
    ],
)
async def test_a_receiver_that_takes_nothing_says_why(server, words, reached):
    """With the remedy; an answer about the body is no reason to stop sending."""
    (receiver,) = receivers(server, alertmanager="http://am:9093")
    with pytest.raises(DeliveryError, match=words) as caught:
        await send(receiver, NOTICE)
    assert caught.value.reached is reached
    assert len(server.seen) == 1


async def test_a_certificate_that_is_not_trusted_names_the_setting():
    """Wherever in the chain of causes it is."""
    error = httpx2.ConnectError("")
    error.__cause__ = ssl.SSLCertVerificationError(1, "self-signed certificate")
    error.__cause__.verify_message = "self-signed certificate"
    (receiver,) = receivers(Server(error=error), alertmanager="https://am:9093")
    with pytest.raises(DeliveryError, match="set ca_file of this receiver"):
        await send(receiver, NOTICE)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "one of alertmanager, webhook, apprise and apprise_file"),
        ({"alertmanager": "a", "webhook": "http://b"}, "one of alertmanager, webhook"),
        ({"alertmanager": "ftp://a"}, "write it like http://127.0.0.1:9093"),
        ({"alertmanager": "http://u:p@a"}, "use username and password_file"),
        ({"webhook": "https://h/x"}, "make a secret with `rankscope alert secret > FILE`"),
        ({"webhook": "nonsense", "secret_file": "/s"}, "write it like https://host.example/path"),
        ({"alertmanager": "a", "secret_file": "/s"}, "secret_file is for a webhook"),
        ({"alertmanager": "a", "username": "ada"}, "go together: set both"),
        (
            {"alertmanager": "a", "username": "u", "password_file": "/p", "bearer_token_file": "/t"},
            "both set: keep one",
        ),
        ({"apprise": "json://a", "ca_file": "/c"}, "an address of apprise holds its own passwords"),
        ({"alertmanager": "a", "deployments": "nowhere"}, "for deployment 'nowhere', and there is none"),
        ({"alertmanager": "a", "severities": "loud"}, "severities"),
        ({"alertmanager": "a", "colour": "red"}, "there is no such setting"),
        ({"alertmanager": "http://a:9093/api/v2/alerts"}, "write only what stands before /api"),
        ({"alertmanager": "a", "ca_file": "/nowhere"}, "ca_file /nowhere: No such file"),
        ({"webhook": "http://h", "secret_file": "/nowhere"}, "secret file /nowhere: No such file"),
        ({"apprise": "nonsense://x"}, "address 1: apprise does not understand it"),
        ({"apprise_file": "/nowhere"}, "apprise file /nowhere: No such file"),
    ],
)
def test_receivers_that_cannot_be_used_are_said_plainly(fields, words):
    """When settings are read, not when an alert fires."""
    with pytest.raises(ConfigError) as caught:
        receivers(Server(), **fields)
    assert words in str(caught.value)


def test_files_of_secrets_are_for_their_owner_and_hold_what_they_should(write):
    """Others could forge alerts, or read where they go."""
    secret = write("secret", "not-a-secret")
    with pytest.raises(ConfigError, match="make one with `rankscope alert secret"):
        receivers(Server(), webhook="https://h.example", secret_file=secret)
    secret.write_text(make_secret())
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        receivers(Server(), webhook="https://h.example", secret_file=secret)
    with pytest.raises(ConfigError, match="holds no address: write one a line"):
        receivers(Server(), apprise_file=write("urls", "# nothing yet\n"))


def test_secrets_in_addresses_are_shown_nowhere(write):
    """Not in names, not where pages show them, not in errors of settings."""
    urls = ["json://user:hunter2@127.0.0.1:1/T0K3N", "slack://TokenAbcde1/TokenB1234/TokenC12345678901234567890/#ops"]
    made = receivers(apprise_file=write("urls", "\n".join(urls)))
    shown = " ".join(f"{receiver.name} {receiver.where}" for receiver in made)
    assert len({receiver.name for receiver in made}) == 2
    assert all(receiver.name.startswith("ops ") for receiver in made)
    for word in ("hunter2", "TokenAbcde1", "TokenC12345"):
        assert word not in shown
    settings = load_settings(flags={"alerts": {"receivers": [{"name": "ops", "apprise": urls}]}})
    assert "hunter2" not in repr(settings)
    with pytest.raises(ConfigError) as caught:
        receivers(apprise=["nonsense://user:hunter2@x"])
    assert "hunter2" not in str(caught.value)


def test_alerts_have_hold_and_keep_times_that_can_be_set():
    """By name; a name that there is not is refused."""
    timings = load_settings(flags={"alerts": {"hold_seconds": {"RankscopeBlind": 60}}}).alerts.timings
    assert (timings["RankscopeBlind"].hold_seconds, timings["RankscopeBlind"].keep_seconds) == (60, 30)
    assert timings["RankscopeDrift"].hold_seconds == 0
    with pytest.raises(ConfigError, match="Nonsense is no alert; `rankscope alert rules` lists them"):
        load_settings(flags={"alerts": {"keep_seconds": {"Nonsense": 1}}})


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ({}, "http://127.0.0.1:8700"),
        ({"port": 0}, ""),
        ({"host": "::1"}, "http://[::1]:8700"),
        ({"alerts": {"external_url": "https://rankscope.example/base/"}}, "https://rankscope.example/base"),
    ],
)
def test_links_lead_to_this_server(flags, url):
    """By the address that was set, or the one that it listens on."""
    assert load_settings(flags=flags).external_url == url


def test_the_short_way_makes_a_receiver():
    """Beside those of the file."""
    more = {"receivers": [{"name": "other", "alertmanager": "b"}]}
    settings = load_settings(flags={"alertmanagers": ("a:9093",), "alerts": more})
    assert [(receiver.name, receiver.alertmanager) for receiver in settings.receivers] == [
        ("alertmanager", ("http://a:9093",)),
        ("other", ("http://b",)),
    ]
    with pytest.raises(ConfigError, match="give yours another name"):
        load_settings(
            flags={"alertmanagers": ("a",), "alerts": {"receivers": [{"name": "alertmanager", "alertmanager": "b"}]}}
        )
