"""A server that is killed between two notifications, and started again: every receiver hears each thing once."""

import contextlib
import hashlib
import hmac
import os
import re
import signal
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from catching import Catching, Caught, catching
from listening import listening
from made_node import MadeRank

from rankscope_exporter.serve.settings import ServeSettings
from rankscope_server.domain.clock import Moment
from rankscope_server.notify.webhook import make_secret

pytestmark = pytest.mark.integration

ALERTS = ["RankscopeGuardDisagreement", "RankscopeMaskDisagreement"]
KEEP_SECONDS = 0.5


class NodeClock:
    """This machine's clocks, as ranks that are made by hand read them."""

    def now(self) -> Moment:
        return Moment(time.time(), time.monotonic() + 995.0)


@contextlib.contextmanager
def serving(config: Path, directory: Path) -> Iterator[subprocess.Popen]:
    """A server process; killed at the end, if it was not before."""
    command = [sys.executable, "-m", "rankscope_server", "serve", "--config", str(config), "--port", "0",
               "--data-dir", str(directory / "data")]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}
    with (directory / "log").open("a") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        try:
            assert re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline()), (directory / "log").read_text()
            yield server
        finally:
            server.kill()
            server.wait(30)
            server.stdout.close()


class Heard:
    """What the receiver has heard, each message once."""

    def __init__(self, receiver: Catching) -> None:
        self.receiver = receiver

    def messages(self) -> dict[str, tuple[str, str]]:
        """Name of the alert and what became of it, by the id of the message."""
        return {
            request.headers["webhook-id"]: (request.json()["data"]["labels"]["alertname"], request.json()["type"])
            for request in self.receiver.caught
        }

    def of(self, kind: str) -> list[str]:
        """The alerts of which it heard that, once for each message."""
        return sorted(name for name, heard in self.messages().values() if heard == kind)


def kill_at_the_next(receiver: Catching, server: subprocess.Popen) -> None:
    """Kill the server once a notification is on its way, before it can know that it arrived."""

    def kill(_: Caught) -> None:
        receiver.before = lambda _: None
        server.send_signal(signal.SIGKILL)
        server.wait(30)

    receiver.before = kill


def test_a_server_that_is_killed_between_notifications_repeats_and_loses_none(tmp_path: Path):
    """Killed as the first firing one is on its way, then as the first resolved one is: two of each arrive, told by their ids."""
    nodes = tmp_path / "flight"
    nodes.mkdir(mode=0o700)
    secret = tmp_path / "secret"
    secret.write_text(make_secret())
    secret.chmod(0o600)
    ranks = [MadeRank(nodes, pp, NodeClock()) for pp in (0, 1)]
    for rank in ranks:
        rank.steps(1, 30)
    with catching() as receiver, listening(ServeSettings(flight_dir=nodes)) as exporter:
        config = tmp_path / "rankscope.yaml"
        receivers = [{"name": "pager", "webhook": receiver.url, "secret_file": str(secret), "severities": ["critical"]}]
        config.write_text(
            yaml.safe_dump(
                {
                    "deployments": [{"name": "chat", "exporters": [f"http://127.0.0.1:{exporter.port}"]}],
                    "alerts": {"receivers": receivers, "keep_seconds": dict.fromkeys(ALERTS, KEEP_SECONDS)},
                }
            )
        )
        heard = Heard(receiver)
        with serving(config, tmp_path) as server:
            kill_at_the_next(receiver, server)
            ranks[0].step(31, masked=8)
            ranks[1].step(31)
            receiver.wait(lambda: len(receiver.caught) == 1)
            assert server.poll() == -signal.SIGKILL
        assert len(heard.of("alert.firing")) == 1
        with serving(config, tmp_path) as server:
            receiver.wait(lambda: len(heard.messages()) == 2)
            assert heard.of("alert.firing") == ALERTS
            assert heard.of("alert.resolved") == []
            kill_at_the_next(receiver, server)
            for rank in ranks:  # vLLM is restarted
                rank.writer.path.unlink()
            for pp in (0, 1):
                MadeRank(nodes, pp, NodeClock(), engine="e2").steps(1, 30)
            receiver.wait(lambda: len(heard.messages()) == 3)
            assert server.wait(30) == -signal.SIGKILL
        with serving(config, tmp_path):
            receiver.wait(lambda: len(heard.messages()) == 4)
    assert heard.of("alert.firing") == heard.of("alert.resolved") == ALERTS
    assert len(receiver.caught) > 4  # what was on its way came again, under its id
    check_signatures(receiver, secret.read_text())


def check_signatures(receiver: Catching, secret: str) -> None:
    key = b64decode(secret.removeprefix("whsec_"))
    for request in receiver.caught:
        signed = f"{request.headers['webhook-id']}.{request.headers['webhook-timestamp']}.".encode() + request.body
        expected = f"v1,{b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()}"
        assert request.headers["webhook-signature"] == expected
