"""
What a person at a browser gets of incidents and alerts.
"""

import dataclasses
import re
import time

import fake_rankscope as views
import fake_reports as reports
import pytest
from fake_rankscope import ENGINES, INCIDENTS, FakeRankscope

from rankscope_server.domain.alert import AlertsView
from rankscope_server.domain.incident import IncidentEvent, IncidentLife

pytestmark = pytest.mark.browser

expect = pytest.importorskip("playwright.sync_api", reason="pip install playwright").expect

WEDGE = f"/incidents/{INCIDENTS['wedge']}"
BASELINE = f"/incidents/{INCIDENTS['baseline']}"


def wait_live(page) -> None:
    """
    Until the stream has been heard.
    """
    expect(page.locator("#stream")).to_have_attribute("data-connection", re.compile("live|old"))


def test_incidents_by_keyboard(site, open_tab, keep) -> None:
    """The list leads to an incident, that to its engine, and the engine back to it, by the keyboard alone."""
    page = open_tab()
    page.goto(f"{site.url}/incidents")
    wait_live(page)
    expect(page.locator(".incidents").first.locator("tbody tr")).to_have_count(3)
    expect(page.locator("nav a[aria-current=page]")).to_contain_text("Incidents")
    keep(page, "incidents-light")

    kind = page.locator(f"#open-i_2d_{INCIDENTS['wedge'][2:].replace('-', '_2d_')}")
    kind.focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**{WEDGE}")
    expect(page.locator("h1")).to_contain_text("pp0 stopped receiving at step 72")
    expect(page.locator("#capture-2")).to_have_text(re.compile("capture 3"))
    keep(page, "incident-wedge-light")

    page.locator("#incident-engine").focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/deployments/wedge/engines/{ENGINES['wedge']}")
    page.locator("#engine-incident").focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**{WEDGE}")


def test_incidents_are_live(site, open_tab) -> None:
    """A new incident appears in the list and beside the link, without a reload, and is said to screen readers."""
    del site.fake.reports[INCIDENTS["wedge"]]
    page = open_tab()
    page.goto(f"{site.url}/incidents")
    wait_live(page)
    expect(page.locator("#count-incidents")).to_have_text("2 open")
    page.evaluate("window.untouched = true")

    site.fake.report(reports.wedge())

    expect(page.locator("#incidents")).to_contain_text("pp0 stopped receiving at step 72")
    expect(page.locator("#count-incidents")).to_have_text("3 open")
    expect(page.locator("#announcements")).to_have_text("New: wedged on wedge, wedged.")
    assert page.evaluate("window.untouched")


def test_incident_is_live(site, open_tab) -> None:
    """What happens to an incident comes to its page; what has focus keeps it."""
    page = open_tab()
    page.goto(site.url + BASELINE)
    wait_live(page)
    page.locator("#export-json").focus()

    view = reports.open_drift()
    event = IncidentEvent(views.NOW - 1, "worsening", "Output is wrong from step 380.")
    card = dataclasses.replace(view.card, life=IncidentLife.WORSENING)
    site.fake.report(dataclasses.replace(view, card=card, timeline=(*view.timeline, event)))

    expect(page.locator("#incident-headline .state")).to_have_text("worsening")
    expect(page.locator(".event").last).to_contain_text("Output is wrong from step 380.")
    expect(page.locator("#announcements")).to_have_text(re.compile("is now worsening"))
    expect(page.locator("#export-json")).to_be_focused()

    del site.fake.reports[card.id]
    site.fake.version += 1
    expect(page.locator("#connection-text")).to_contain_text("no longer kept")


def test_fix_is_turned_on_from_an_incident(site, open_tab) -> None:
    """The next step of an open drift opens the confirmation in place and leads to the progress."""
    page = open_tab()
    page.goto(site.url + BASELINE)
    wait_live(page)
    page.locator("#next-step").click()
    page.locator("#confirm-go").click()

    page.wait_for_url(f"**/deployments/baseline/engines/{ENGINES['baseline']}#fix")
    expect(page.locator("#fix-progress")).to_contain_text("Pending: 0 of 2")


def test_capture_is_downloaded(site, open_tab) -> None:
    """A plain link brings the flight records, under a name that says whose they are."""
    page = open_tab()
    page.goto(site.url + WEDGE)
    with page.expect_download() as download:
        page.locator("#capture-0").click()

    assert download.value.suggested_filename == f"{INCIDENTS['wedge']}-0.zip"


def test_alerts_are_live(site, open_tab, keep) -> None:
    """A receiver that fails is seen, and its recovery comes without a reload."""
    page = open_tab()
    page.goto(f"{site.url}/alerts")
    wait_live(page)
    chat = page.locator("#receiver-chat")
    expect(chat).to_contain_text("check secret_file")
    expect(page.locator("#count-alerts")).to_have_text("4 firing")
    keep(page, "alerts-light")

    view = reports.alerts()
    mended = dataclasses.replace(view.receivers[1], healthy=True, error="", waiting=0, failing_since_unix=None)
    site.fake.alert(AlertsView(view.active[:2], view.past, (view.receivers[0], mended, view.receivers[2])))

    expect(chat).not_to_contain_text("check secret_file")
    expect(page.locator("#alerts-summary")).to_have_text(re.compile("2 alerts fire."))
    expect(page.locator("#count-alerts")).to_have_text("2 firing")
    page.locator("#alerts-active [data-label=Where] a").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/deployments/wedge/engines/{ENGINES['wedge']}")


def test_pages_without_scripts(site, open_tab) -> None:
    """Without scripts the pages say the same, and a link takes the place of the stream."""
    page = open_tab(java_script_enabled=False)
    for path, said in (("/incidents", "Going on"), (WEDGE, "Flight records"), ("/alerts", "Receivers")):
        page.goto(site.url + path)
        expect(page.locator("main")).to_contain_text(said)
        expect(page.locator("noscript a")).to_have_attribute("href", path)


def test_empty_pages(serve, open_tab, keep) -> None:
    """Without incidents and receivers the pages say what would be there, and how to get it."""
    site = serve(FakeRankscope(now=time.time()))
    page = open_tab()
    page.goto(f"{site.url}/incidents")
    wait_live(page)
    expect(page.get_by_role("heading", name="No incident so far")).to_be_visible()
    expect(page.locator("#count-incidents")).to_have_text("")
    keep(page, "incidents-empty-light")
    page.goto(f"{site.url}/alerts")
    wait_live(page)
    expect(page.locator("#alerts-receivers pre")).to_contain_text("alertmanager:")
    keep(page, "alerts-empty-light")


def test_no_sideways_scrolling(site, open_tab) -> None:
    """In a narrow window nothing makes a page wider than the window."""
    page = open_tab()
    widths = {}
    for path in ("/incidents", WEDGE, f"/incidents/{INCIDENTS['dark']}", "/alerts"):
        page.goto(site.url + path)
        for width in (320, 768):
            page.set_viewport_size({"width": width, "height": 800})
            widths[path, width] = page.evaluate("document.documentElement.scrollWidth")

    assert {(path, width): found for (path, width), found in widths.items() if found > width} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(scheme: str, site, open_tab, keep, contrast: str) -> None:
    """Every text stands out from its ground by 4.5 to 1 at least."""
    page = open_tab(color_scheme=scheme)
    for name, path in (("list", "/incidents"), ("wedge", WEDGE), ("drift", BASELINE), ("alerts", "/alerts")):
        page.goto(site.url + path)
        wait_live(page)
        assert page.evaluate(contrast) == []
        if scheme == "dark":
            keep(page, f"reports-{name}-dark")
            page.set_viewport_size({"width": 360, "height": 800})
            keep(page, f"reports-{name}-dark-narrow")
            page.set_viewport_size({"width": 1280, "height": 900})


def test_incident_on_paper(site, open_tab, keep) -> None:
    """On paper an incident is light and has nothing that can only be operated, and all of its evidence."""
    view = reports.wedge()
    first = view.findings[0]
    many = dataclasses.replace(first.evidence, values=first.evidence.values * 10)
    site.fake.report(
        dataclasses.replace(view, findings=(dataclasses.replace(first, evidence=many), *view.findings[1:]))
    )
    page = open_tab(color_scheme="dark", width=794, height=1123)
    page.goto(site.url + WEDGE)
    wait_live(page)
    page.emulate_media(media="print")

    for gone in (".site-header", ".next-step", "#export-json", ".site-footer"):
        expect(page.locator(gone)).to_be_hidden()
    for kept in ("h1", "#incident-findings", "#incident-timeline", "#capture-2"):
        expect(page.locator(kept)).to_be_visible()
    expect(page.locator("#incident-findings details dd").last).to_be_visible()
    assert page.evaluate("getComputedStyle(document.querySelector('h1')).color") == "rgb(21, 33, 31)"
    keep(page, "incident-print")


def test_last_label_of_the_chart_is_whole(site, open_tab) -> None:
    """The time at the right edge of the drift chart has room for all of it, in clocks of twelve hours too."""
    page = open_tab(locale="en-US")
    page.goto(f"{site.url}/deployments/baseline/engines/{ENGINES['baseline']}")
    expect(page.locator("#drift-chart canvas")).to_be_visible()
    room = page.evaluate(
        """() => {
          const chart = document.getElementById('drift-chart').getBoundingClientRect();
          const plot = document.querySelector('#drift-chart .u-over').getBoundingClientRect();
          const context = document.createElement('canvas').getContext('2d');
          context.font = '12px system-ui, sans-serif';
          return { beside: chart.right - plot.right, half: context.measureText('12:38:48 PM').width / 2 };
        }"""
    )
    assert room["beside"] >= room["half"]
