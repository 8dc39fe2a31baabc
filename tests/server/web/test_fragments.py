"""
Fragments of fixed views, as they were when somebody last looked at them.
"""

import dataclasses
from collections.abc import Callable

import fake_rankscope as views
import pytest

from rankscope_server.domain.model import EngineView, FleetView
from rankscope_server.web.drift_table import tabulate_drift
from rankscope_server.web.guidance import order_by_need, summarise
from rankscope_server.web.live import ENGINE_FRAGMENTS
from rankscope_server.web.templating import Templates

Golden = Callable[[str, str], None]

CASES: list[tuple[str, Callable[[], EngineView], tuple[str, ...]]] = [
    ("drifting", views.drifting, ("headline", "findings", "requests", "fix", "ranks", "drift_table")),
    ("wedged", views.wedged, ("headline", "findings", "strip", "fix", "ranks")),
    ("applied", views.applied, ("headline", "findings", "drift_note", "requests", "fix", "history")),
    ("blind", views.blind, ("headline", "requests", "fix", "ranks")),
    ("lost", views.lost, ("headline", "ranks")),
    ("half", views.half_fixed, ("headline", "findings", "fix")),
    ("v2", views.v2_healthy, ("headline", "findings", "drift_note", "drift_table", "requests", "fix", "ranks")),
    ("v2-drift", views.v2_drifting, ("headline", "findings", "drift_note", "ranks")),
    ("v2-failed", views.v2_failed, ("headline", "findings", "ranks")),
]


def tidy(html: str) -> str:
    """
    Without blank lines and trailing spaces, which mean nothing.
    """
    return "\n".join(line.rstrip() for line in html.splitlines() if line.strip()) + "\n"


@pytest.mark.parametrize(("name", "make", "blocks"), CASES, ids=[case[0] for case in CASES])
def test_engine(
    name: str, make: Callable[[], EngineView], blocks: tuple[str, ...], templates: Templates, golden: Golden
) -> None:
    """The fragments of an engine page are what they were."""
    table = tabulate_drift(views.growing_series(views.NOW, seconds=30))
    golden(
        f"engine-{name}.html",
        tidy("\n".join(templates.block("engine.html", block, view=make(), table=table) for block in blocks)),
    )


def test_fleet(templates: Templates, golden: Golden) -> None:
    """The fleet is what it was."""
    view = views.FakeRankscope(tuple(make() for make in views.ALL_VIEWS)).fleet()
    summary = templates.block(
        "fleet.html", "summary", summary=summarise(view), problems=("the store cannot be written: free some space",)
    )
    listing = templates.block("fleet.html", "deployments", deployments=order_by_need(view.deployments), rendered={})
    golden("fleet.html", tidy(summary + listing))


def test_empty_fleet(templates: Templates, golden: Golden) -> None:
    """An empty fleet says how to fill it."""
    view = FleetView(views.NOW, ())
    summary = templates.block("fleet.html", "summary", summary=summarise(view), problems=())
    golden(
        "fleet-empty.html", tidy(summary + templates.block("fleet.html", "deployments", deployments=(), rendered={}))
    )


@pytest.mark.parametrize("refusal", ["", "the engine is wedged: restart vLLM"], ids=["possible", "refused"])
def test_confirmation(refusal: str, templates: Templates, golden: Golden) -> None:
    """The confirmation says what will happen, or why it cannot."""
    plan = views.FakeRankscope((views.drifting(),)).plan_toggle("baseline", None, desired=True)
    assert plan is not None
    context = {
        "plan": dataclasses.replace(plan, refusal=refusal),
        "outcome": None,
        "action": "/a",
        "back": "/b",
        "in_dialog": True,
    }
    golden(
        f"confirmation-{'refused' if refusal else 'possible'}.html",
        tidy(templates.block("confirm.html", "confirmation", **context)),
    )


@pytest.mark.parametrize("make", views.ALL_VIEWS, ids=lambda make: make.__name__)
def test_every_fragment_is_one_element_with_its_id(make: Callable[[], EngineView], templates: Templates) -> None:
    """A fragment can be morphed into its place: it begins with the element that has its id."""
    table = tabulate_drift(views.growing_series(views.NOW, seconds=30))
    for block in ENGINE_FRAGMENTS:
        html = templates.block("engine.html", block, view=make(), table=table).strip()
        assert f'id="engine-{block.replace("_", "-")}"' in html.partition(">")[0]


@pytest.mark.parametrize("make", views.ALL_VIEWS, ids=lambda make: make.__name__)
def test_no_inline_style_or_script_and_no_htmx_attribute(make: Callable[[], EngineView], templates: Templates) -> None:
    """Nothing in a fragment needs more than the strictest policy, and nothing makes htmx act."""
    table = tabulate_drift(views.growing_series(views.NOW, seconds=30))
    for block in ENGINE_FRAGMENTS:
        html = templates.block("engine.html", block, view=make(), table=table)
        for forbidden in (" style=", "<script", " hx-", " onclick", "javascript:"):
            assert forbidden not in html


def test_data_is_escaped(templates: Templates) -> None:
    """Markup in data stays text."""
    evil = "<img src=x onerror=alert(1)> <hx-partial hx-target='body'>"
    view = dataclasses.replace(views.wedged(), headline=evil, model=evil, deployment=evil)
    html = templates.block("engine.html", "headline", view=view)
    assert "<img" not in html
    assert "<hx-partial" not in html
