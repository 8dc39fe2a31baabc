"""Receivers of apprise, over a service that listens here."""

import dataclasses
import threading

import pytest
from catching import catching
from made_ranks import START_UNIX

from rankscope_server.domain.alert_life import Change
from rankscope_server.domain.alert_notice import Links, tried
from rankscope_server.domain.model import Severity
from rankscope_server.notify.apprise import build_text, message_type
from rankscope_server.notify.create import create_receivers
from rankscope_server.notify.receiver import DeliveryError
from rankscope_server.settings import load_settings

pytestmark = pytest.mark.anyio

FIRING = tried("1", Change.FIRING, Severity.CRITICAL, START_UNIX, START_UNIX)
RESOLVED = tried("1", Change.RESOLVED, Severity.CRITICAL, START_UNIX + 9, START_UNIX)


def receiver(url: str, **fields):
    settings = load_settings(flags={"alerts": {"receivers": [{"name": "ops", "apprise": url, **fields}]}})
    ((made, _),) = create_receivers(settings.receivers, Links("https://rankscope.example"))
    return made


async def test_a_message_says_what_is_wrong_and_where_to_look():
    """In words, with the colour of its severity; what is over is good news."""
    with catching() as service:
        made = receiver(service.url.replace("http", "json") + "/hook")
        await made.send([FIRING], START_UNIX)
        await made.send([RESOLVED], START_UNIX)
    firing, resolved = (request.json() for request in service.caught)
    assert (firing["title"], firing["type"]) == ("TEST CRITICAL RankscopeTest: test", "failure")
    assert "nothing is wrong" in firing["message"]
    assert "https://rankscope.example/" in firing["message"]
    assert "/runbooks/" not in firing["message"]
    assert (resolved["title"], resolved["type"]) == ("TEST RESOLVED RankscopeTest: test", "success")


async def test_the_end_of_a_forecast_is_no_all_clear():
    """It also ends because the ranks have parted: the message is not green, and says so."""
    over = dataclasses.replace(RESOLVED, name="RankscopeForecast", test=False)
    assert message_type(RESOLVED) == "success"
    assert message_type(over) == "info"
    assert "or the ranks have parted, of which other alerts tell" in build_text(over, Links())
    assert "It is over" not in build_text(over, Links())


async def test_a_service_that_refuses_is_a_failure_that_tells_no_secret(capfd):
    """Nor is there one in what is logged."""
    with catching() as service:
        service.status = 500
        made = receiver(service.url.replace("http://", "json://user:hunter2@"))
        with pytest.raises(DeliveryError, match="see that its address and tokens are right") as caught:
            await made.send([FIRING], START_UNIX)
    assert "hunter2" not in str(caught.value) + made.where + "".join(capfd.readouterr())


async def test_a_service_that_does_not_answer_holds_nothing_up():
    """The thread that waits for it is left behind, and no second one waits beside it."""
    released = threading.Event()
    with catching() as service:
        service.before = lambda _: released.wait(30)
        made = receiver(service.url.replace("http", "json"), timeout_seconds=0.1)
        for words in ("no answer within 0.1 s", "still waits for the answer to the last message"):
            with pytest.raises(DeliveryError, match=words):
                await made.send([FIRING], START_UNIX)
        released.set()
        service.wait(lambda: len(service.caught) == 1)
