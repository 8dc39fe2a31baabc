"""
What a person at a browser gets.
"""

import dataclasses
import re
import time

import fake_rankscope as views
import pytest
from fake_rankscope import ENGINES, FakeRankscope

from rankscope_server.domain.model import ActedMark, Series, State

pytestmark = pytest.mark.browser

expect = pytest.importorskip("playwright.sync_api", reason="pip install playwright").expect

BASELINE = f"/deployments/baseline/engines/{ENGINES['baseline']}"


def wait_live(page) -> None:
    """
    Until the stream has been heard.
    """
    expect(page.locator("#stream")).to_have_attribute("data-connection", re.compile("live|old"))


def test_fleet_shows_states_by_need(site, open_tab, keep) -> None:
    """The fleet shows each deployment's state, worst first, and leads to the fix."""
    page = open_tab()
    page.goto(site.url)
    wait_live(page)

    states = {
        "wedge": "wedged",
        "lost": "rank lost",
        "v2-failed": "rank lost",
        "half": "mitigation mixed",
        "baseline": "drifting",
        "v2-drift": "drifting",
        "dark": "blind",
        "canary": "healthy",
        "steady": "healthy",
        "v2": "healthy",
    }
    expect(page.locator(".deployment h2")).to_have_text(list(states))
    expect(page.locator(".deployment-head .state")).to_have_text(list(states.values()))
    expect(page.locator("#fleet-summary .unknown-code")).to_contain_text("Unknown code in dark")
    expect(page.locator("#deployment-baseline .next-step a")).to_have_text("Turn the trim fix on")
    keep(page, "fleet-light")


def test_fleet_is_live(site, open_tab) -> None:
    """A change reaches the page without a reload, and is said to screen readers."""
    page = open_tab()
    page.goto(site.url)
    wait_live(page)
    page.evaluate("window.untouched = true")

    site.fake.show(dataclasses.replace(views.drifting(), state=State.PARTED, headline="They parted at step 413"))

    expect(page.locator("#deployment-baseline .headline")).to_have_text("They parted at step 413.")
    expect(page.locator("#announcements")).to_have_text("baseline is now parted.")
    assert page.evaluate("window.untouched")


def test_focus_and_open_details_survive_a_swap(site, open_tab) -> None:
    """What has focus keeps it, and what was opened stays open, when the part of the page around it is replaced."""
    page = open_tab()
    page.goto(site.url + BASELINE)
    wait_live(page)
    page.locator(".hooks summary").first.click()
    page.locator("#fix-turn-on").focus()
    page.evaluate("window.button = document.activeElement")

    view = views.drifting()
    site.fake.show(
        dataclasses.replace(
            view,
            fix=dataclasses.replace(view.fix, last_actor="mira", desired=False),
            ranks=(dataclasses.replace(view.ranks[0], step=999), view.ranks[1]),
        )
    )

    expect(page.locator(".fix-who")).to_contain_text("mira")
    expect(page.locator(".rank").first).to_contain_text("999")
    assert page.evaluate("document.activeElement === window.button")
    expect(page.locator(".hooks").first).to_have_attribute("open", "")


def test_toggle_by_keyboard(site, open_tab, keep) -> None:
    """The fix is turned on from the keyboard alone, and each rank's progress is seen."""
    page = open_tab()
    page.goto(site.url + BASELINE)
    wait_live(page)
    page.locator("#fix-turn-on").focus()

    page.keyboard.press("Enter")
    expect(page.locator("#confirm-dialog")).to_be_visible()
    expect(page.locator("#confirm-title")).to_be_focused()
    expect(page.locator("#confirm-dialog")).to_contain_text("does not revive a wedged engine")
    keep(page, "confirm-light", full_page=False)

    page.keyboard.press("Escape")
    expect(page.locator("#confirm-dialog")).to_be_hidden()
    expect(page.locator("#fix-turn-on")).to_be_focused()
    assert site.fake.toggles == []

    page.keyboard.press("Enter")
    expect(page.locator("#confirm-title")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.locator("#confirm-go")).to_be_focused()
    page.keyboard.press("Enter")

    expect(page.locator("#confirm-dialog")).to_be_hidden()
    expect(page.locator("#announcements")).to_have_text("Sent to 2 ranks; they act at step 432.")
    expect(page.locator("#fix-progress")).to_have_text("Pending: 0 of 2 ranks have acted; they act at step 432.")
    expect(page.locator("#fix-turn-on")).to_be_focused()
    assert site.fake.toggles == [("baseline", ENGINES["baseline"], True, "local")]

    site.fake.acknowledge("baseline", ENGINES["baseline"], 1)
    expect(page.locator("#fix-progress")).to_contain_text("1 of 2")
    site.fake.acknowledge("baseline", ENGINES["baseline"], 2)
    expect(page.locator("#fix-progress")).to_have_text("Applied at step 432 on every rank.")
    expect(page.locator("#fix-turn-off")).to_be_visible()
    keep(page, "applied-light")


def test_toggle_from_the_fleet(site, open_tab) -> None:
    """The way that the fleet page shows leads through the confirmation to the engine's progress."""
    page = open_tab()
    page.goto(site.url)
    wait_live(page)

    page.locator("#deployment-baseline .next-step a").click()
    page.locator("#confirm-go").click()

    page.wait_for_url(f"**{BASELINE}#fix")
    expect(page.locator("#fix-progress")).to_contain_text("Pending: 0 of 2")


def test_refused_toggle(site, open_tab) -> None:
    """A toggle that is refused after all says why in the dialog. (The browser itself logs the 409.)"""
    page = open_tab(complains=True)
    page.goto(site.url + BASELINE)
    wait_live(page)
    page.locator("#fix-turn-on").click()
    expect(page.locator("#confirm-go")).to_be_visible()
    site.fake.refusal = "pp1 is stopped: a toggle needs every rank"
    page.locator("#confirm-go").click()

    expect(page.locator("#confirm-dialog [role=alert]")).to_contain_text("pp1 is stopped: a toggle needs every rank.")
    page.locator("#confirm-dialog [data-close]").click()
    expect(page.locator("#fix-turn-on")).to_be_focused()


def test_disabled_button_tells_its_reason(site, open_tab, keep) -> None:
    """Where the fix cannot be toggled the button can be reached, does nothing, and its reason is read."""
    page = open_tab()
    page.goto(f"{site.url}/deployments/wedge/engines/{ENGINES['wedge']}")
    wait_live(page)
    button = page.locator("#fix-turn-on")
    expect(button).to_have_accessible_description(re.compile("The engine is wedged"))
    button.focus()
    page.keyboard.press("Enter")

    expect(page.locator("#announcements")).to_contain_text("The engine is wedged")
    expect(page.locator("#confirm-dialog")).to_be_hidden()
    keep(page, "wedged-light")


def test_toggle_without_scripts(site, open_tab) -> None:
    """Without scripts the same button leads through a page to the same end."""
    page = open_tab(java_script_enabled=False)
    page.goto(site.url + BASELINE)
    page.locator("#fix-turn-on").click()
    page.locator("#confirm-go").click()

    expect(page.locator("#fix-progress")).to_contain_text("Pending: 0 of 2")
    assert page.url == f"{site.url}{BASELINE}#fix"


def test_chart_grows_and_is_not_made_again(site, open_tab) -> None:
    """New points are put behind the old ones in the same canvas; zoom and theme do not lose them."""
    page = open_tab()
    page.goto(site.url + BASELINE)
    canvas = page.locator("#drift-chart canvas")
    expect(canvas).to_be_visible()
    expect(page.locator("#drift-chart .u-legend")).to_contain_text("pp0")
    page.evaluate("window.canvas = document.querySelector('#drift-chart canvas')")
    height = page.locator("#drift-chart").bounding_box()["height"]

    series = site.fake.drift
    site.fake.draw(
        Series(
            [*series.times_unix, series.times_unix[-1] + 1],
            series.labels,
            [[*values, 321.0] for values in series.values],
        )
    )

    expect(page.locator("#drift-chart .u-legend")).to_contain_text("321")
    page.locator("#theme-switch").click()
    page.locator("#theme-switch").click()
    assert page.evaluate("window.canvas === document.querySelector('#drift-chart canvas')")
    assert page.locator("#drift-chart").bounding_box()["height"] == height


def test_the_chart_marks_where_the_fix_acted(site, open_tab, keep) -> None:
    """A line stands at the step on which the ranks acted, and the note below it says so in words."""
    now = site.fake.now
    view = views.applied()
    page = open_tab()
    page.goto(f"{site.url}/deployments/canary/engines/{ENGINES['canary']}")
    wait_live(page)
    expect(page.locator("#drift-chart canvas")).to_be_visible()
    before = page.evaluate(ACCENT_PIXELS)

    site.fake.show(dataclasses.replace(view, acted=(ActedMark(3, True, 396, now - 300),)))

    expect(page.locator("#engine-drift-note")).to_contain_text("Trim fix on at step 396")
    wait_for_pixels(page, ACCENT_PIXELS, before + 100)
    keep(page, "chart-mark-light")


def test_samples_that_stand_alone_are_seen(site, open_tab) -> None:
    """Device-side lengths are sampled now and then: each sample is a dot, as no line leads to it."""
    page = open_tab()
    page.goto(f"{site.url}/deployments/v2-drift/engines/{ENGINES['v2-drift']}")
    wait_live(page)
    now = site.fake.now
    times = [now + n for n in range(120)]
    site.fake.draw(Series(times, ["pp0", "pp1"], [[6.0 if n % 20 == 7 else None for n in range(120)], [None] * 120]))

    wait_for_pixels(page, TRACE_PIXELS, 20)


def wait_for_pixels(page, count: str, least: int) -> None:
    """
    Until the chart has more than `least` pixels that `count` counts. (The page's policy lets no wait_for_function in.)
    """
    deadline = time.monotonic() + 15
    while (found := page.evaluate(count)) <= least:
        assert time.monotonic() < deadline, found
        page.wait_for_timeout(50)


COUNT = """
() => {
  const probe = document.createElement('span');
  probe.style.color = 'var(%s)';
  document.body.append(probe);
  const wanted = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
  probe.remove();
  const shown = document.querySelector('#drift-chart canvas');
  if (!shown) return 0;
  const copy = Object.assign(document.createElement('canvas'), { width: shown.width, height: shown.height });
  const context = copy.getContext('2d', { willReadFrequently: true });
  context.drawImage(shown, 0, 0);
  const { data } = context.getImageData(0, 0, copy.width, copy.height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] && wanted.every((v, k) => Math.abs(v - data[i + k]) < 12)) count++;
  return count;
}
"""
ACCENT_PIXELS, TRACE_PIXELS = COUNT % "--accent", COUNT % "--trace-1"


def test_nothing_moves_when_data_arrive(site, open_tab) -> None:
    """The page does not jump while it comes alive."""
    page = open_tab()
    page.add_init_script(
        "window.shift = 0; new PerformanceObserver((list) => { for (const e of list.getEntries()) window.shift += e.value; }).observe({type: 'layout-shift', buffered: true});"
    )
    page.goto(site.url + BASELINE)
    wait_live(page)
    expect(page.locator("#drift-chart canvas")).to_be_visible()

    assert page.evaluate("window.shift") < 0.02


def test_old_data_are_said(site, open_tab, keep) -> None:
    """An engine whose data are old says how old, and grows older by itself."""
    page = open_tab()
    page.goto(f"{site.url}/deployments/dark/engines/{ENGINES['dark']}")

    expect(page.locator("#connection-text")).to_have_text(re.compile(r"Last data (4[89]|5\d) s ago"))
    keep(page, "blind-light")


def test_lost_connection_is_said_and_comes_back(site, open_tab) -> None:
    """When the server cannot be reached the page says so, and is live again as soon as it can."""
    page = open_tab(complains=True)
    page.goto(site.url)
    wait_live(page)
    page.context.set_offline(True)
    site.fake.closing = True

    expect(page.locator("#connection-text")).to_have_text(
        re.compile(r"Connection lost \d+ s ago, trying again"), timeout=20_000
    )
    site.fake.closing = False
    page.context.set_offline(False)
    expect(page.locator("#connection-text")).to_have_text("Live", timeout=20_000)


def test_engine_that_leaves(site, open_tab) -> None:
    """When the engine is gone for good the page says so and keeps what was known."""
    page = open_tab()
    page.goto(site.url + BASELINE)
    wait_live(page)
    site.fake.forget(views.drifting())

    expect(page.locator("#connection-text")).to_contain_text("no longer known")
    expect(page.locator("h1")).to_contain_text("baseline")


def test_markup_in_data_is_text(site, open_tab) -> None:
    """Markup that slips into a name or a sentence does nothing."""
    page = open_tab()
    page.goto(site.url)
    wait_live(page)
    evil = '<b hx-get="/audit" hx-trigger="load" onclick="x()">evil</b><hx-partial hx-target="body">gone</hx-partial>'
    site.fake.now += 1
    site.fake.show(dataclasses.replace(views.drifting(), headline=evil))

    expect(page.locator("#deployment-baseline .headline")).to_contain_text('<b hx-get="/audit"')
    expect(page.locator("#deployment-wedge")).to_be_visible()


def test_theme_is_kept(site, open_tab) -> None:
    """The choice of light or dark holds over pages."""
    page = open_tab(color_scheme="light")
    page.goto(site.url)
    page.locator("#theme-switch").click()
    page.locator("#theme-switch").click()
    page.goto(f"{site.url}/audit")

    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 21, 23)"


def test_times_are_local_with_utc_in_the_title(site, open_tab) -> None:
    """A time is shown in the reader's zone; its title has UTC, also after a swap."""
    page = open_tab(timezone_id="Asia/Tokyo", locale="en-GB")
    page.goto(f"{site.url}/deployments/canary/engines/{ENGINES['canary']}")
    wait_live(page)
    shown = page.locator(".fix-who time")
    expect(shown).to_have_text("29 May 2026, 05:21:30")
    expect(shown).to_have_attribute("title", "2026-05-28 20:21:30 UTC")


@pytest.mark.parametrize("width", [320, 768])
def test_no_sideways_scrolling(width: int, site, open_tab) -> None:
    """In a narrow window nothing makes a page wider than the window."""
    site.fake.rows = list(views.applied().audit)
    page = open_tab(width=width, complains=True)  # The last page is a 404.
    engines = (f"/deployments/{name}/engines/{engine}" for name, engine in sorted(ENGINES.items()))
    widths = {}
    for path in ("/", *engines, "/audit", "/api", f"{BASELINE}/fix?desired=on", "/nope"):
        page.goto(site.url + path)
        widths[path] = page.evaluate("document.documentElement.scrollWidth")

    assert {path: found for path, found in widths.items() if found > width} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(scheme: str, site, open_tab, contrast: str) -> None:
    """Every text stands out from its ground by 4.5 to 1 at least."""
    page = open_tab(color_scheme=scheme)
    for path in (
        "/",
        BASELINE,
        f"/deployments/wedge/engines/{ENGINES['wedge']}",
        f"/deployments/dark/engines/{ENGINES['dark']}",
        f"/deployments/v2-drift/engines/{ENGINES['v2-drift']}",
        f"/deployments/v2-failed/engines/{ENGINES['v2-failed']}",
    ):
        page.goto(site.url + path)
        wait_live(page)
        assert page.evaluate(contrast) == []


def test_looks(site, open_tab, keep) -> None:
    """Each state is kept as a picture, dark and narrow."""
    page = open_tab(color_scheme="dark")
    for name, engine in sorted(ENGINES.items()):
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto(f"{site.url}/deployments/{name}/engines/{engine}")
        wait_live(page)
        if site.fake.engine(name, engine).drift_unknown:
            expect(page.locator("#engine-drift-note")).to_contain_text("RANKSCOPE_DEVICE_LENGTHS_STEPS")
            expect(page.locator("#drift-chart")).to_be_hidden()
        else:
            expect(page.locator("#drift-chart canvas")).to_be_visible()
        keep(page, f"engine-{name}-dark")
        page.set_viewport_size({"width": 360, "height": 800})
        keep(page, f"engine-{name}-dark-narrow")


def test_looks_of_an_empty_fleet(serve, open_tab, keep) -> None:
    """An empty fleet says how to fill it, and fills itself when a target comes."""
    site = serve(FakeRankscope(now=time.time()))
    page = open_tab()
    page.goto(site.url)
    wait_live(page)
    expect(page.get_by_role("heading", name="Point Rankscope at an exporter")).to_be_visible()
    keep(page, "fleet-empty-light")

    site.fake.show(views.healthy())
    expect(page.locator("#deployment-steady")).to_be_visible()
    expect(page.locator(".empty")).to_have_count(0)
