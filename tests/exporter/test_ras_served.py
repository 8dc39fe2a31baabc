"""
The NCCL view as the exporter process serves it: settings, scrape, health.
"""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from fake_ras import HASH, FakeRas, communicator, document, rank
from prometheus_client.parser import text_string_to_metric_families as parse_text
from pydantic import ValidationError
from starlette.testclient import TestClient

from rankscope_exporter.serve.app import create_app
from rankscope_exporter.serve.settings import ServeSettings


@pytest.fixture
def port() -> Iterator[FakeRas]:
    """A RAS port in a thread of its own, with a communicator of two ranks that parted."""
    fake = FakeRas()
    fake.json = document(communicator([rank(0, counts={"Broadcast": 5}), rank(1, counts={"Broadcast": 4})]))
    listening, over = threading.Event(), threading.Event()

    async def live() -> None:
        async with fake.listening():
            listening.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(live(),))
    thread.start()
    assert listening.wait(30)
    yield fake
    over.set()
    thread.join(30)


def first_answer(client: TestClient) -> dict[str, object]:
    """The health of the port, once it was asked; each question to the exporter lets its background run."""
    for _ in range(10_000):
        (health,) = client.get("/healthz").json()["nccl"]["ports"]
        if health["reason"] != "not asked yet":
            return health
    pytest.fail("the port was never asked")


def served(client: TestClient, name: str) -> list[tuple[dict[str, str], float]]:
    families = parse_text(client.get("/metrics").text)
    return [(sample.labels, sample.value) for family in families for sample in family.samples if sample.name == name]


def test_port_that_answers(serve_settings: ServeSettings, port: FakeRas) -> None:
    """What NCCL says stands in the scrape, with the labels that join it with ranks."""
    changes = {"nccl_ras": str(port.address), "request_rate": 0}
    with TestClient(create_app(serve_settings.model_copy(update=changes)), base_url="http://127.0.0.1") as client:
        health = first_answer(client)
        up = served(client, "rankscope_nccl_ras_up")
        counts = served(client, "rankscope_nccl_collectives_total")

    assert (health["up"], health["nccl_version"]) == (True, "2.29.1")
    assert up == [({"address": str(port.address)}, 1)]
    assert {(x["nccl_rank"], x["pid"], x["communicator"]): n for x, n in counts if x["collective"] == "Broadcast"} == {
        ("0", "7000", HASH): 5,
        ("1", "7001", HASH): 4,
    }


def test_port_that_is_absent(serve_settings: ServeSettings) -> None:
    """Without NCCL the scrape says 0 and health says why; nothing else changes."""
    changes = {"nccl_ras": "127.0.0.1:1", "request_rate": 0}
    with TestClient(create_app(serve_settings.model_copy(update=changes)), base_url="http://127.0.0.1") as client:
        health = first_answer(client)
        up = served(client, "rankscope_nccl_ras_up")
        failures = served(client, "rankscope_nccl_ras_failures_total")
        status = client.get("/healthz").json()["status"]

    assert (health["up"], "nothing listens on 127.0.0.1:1" in str(health["reason"]), status) == (False, True, "ok")
    assert (up, failures) == (
        [({"address": "127.0.0.1:1"}, 0)],
        [({"address": "127.0.0.1:1", "reason": "refused"}, 1)],
    )


def test_off(serve_settings: ServeSettings) -> None:
    """Off serves nothing of NCCL and says so."""
    settings = serve_settings.model_copy(update={"nccl_ras": "off"})
    with TestClient(create_app(settings), base_url="http://127.0.0.1") as client:
        health = client.get("/healthz").json()["nccl"]
        text = client.get("/metrics").text

    assert (health, "nccl" in text) == ({"enabled": False, "ports": []}, False)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [("NCCL_RAS", "localhost", "auto, off or host:port"), ("NCCL_RAS_SECONDS", "0.1", "greater than or equal to 1")],
)
def test_bad_settings(
    serve_settings: ServeSettings, monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    """A setting that means nothing is refused with what it may be."""
    monkeypatch.setenv(f"RANKSCOPE_{name}", value)

    with pytest.raises(ValidationError, match=says):
        ServeSettings()
