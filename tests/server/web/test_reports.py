"""
Incidents and alerts: pages, JSON and files.
"""

import dataclasses
import io
import re
import zipfile
from collections.abc import Callable

import fake_rankscope as views
import fake_reports as reports
import pytest
import yaml
from fake_rankscope import ENGINES, INCIDENTS, FakeRankscope
from starlette.testclient import TestClient

from rankscope_server.alert_settings import AlertSettings
from rankscope_server.domain.alert import AlertsView
from rankscope_server.domain.incident import IncidentLife, IncidentView
from rankscope_server.domain.model import Evidence, FindingKind, RankId, RankValue
from rankscope_server.web.incident_page import IncidentPage, alert_name, done_during, find_runbook
from rankscope_server.web.live_alerts import ALERT_FRAGMENTS
from rankscope_server.web.live_incidents import INCIDENT_FRAGMENTS, list_context
from rankscope_server.web.templating import Templates
from rankscope_server.web.wire import to_wire, wire_model

Golden = Callable[[str, str], None]

WEDGE = f"/incidents/{INCIDENTS['wedge']}"


def tidy(html: str) -> str:
    """
    Without blank lines and trailing spaces, which mean nothing.
    """
    return "\n".join(line.rstrip() for line in html.splitlines() if line.strip()) + "\n"


def shown(view: IncidentView, **changes: object) -> IncidentPage:
    """
    The page of an incident whose engine is no longer known.
    """
    return dataclasses.replace(IncidentPage(view, None, (), ""), **changes)  # type: ignore[arg-type]


class TestApi:
    """
    The JSON of incidents and alerts.
    """

    def test_list(self, client: TestClient) -> None:
        """Incidents that are not closed come first; a deployment's own can be asked for."""
        listed = client.get("/api/v1/incidents").json()
        assert [card["life"] for card in listed] == ["open", "open", "wedged", "recovered", "closed"]
        mine = client.get("/api/v1/incidents?deployment=wedge&limit=1").json()
        assert [card["id"] for card in mine] == [INCIDENTS["wedge"]]

    def test_incident(self, client: TestClient) -> None:
        """An incident has every field of its view, with the evidence of each finding."""
        body = client.get(f"/api/v1{WEDGE}").json()
        assert body.keys() == set(IncidentView.__dataclass_fields__)
        assert body["card"]["kind"] == "wedged"
        assert body["findings"][2]["evidence"]["values"][1] == {
            "rank": {"dp_rank": 0, "pp_rank": 1, "tp_rank": 0},
            "label": "pp1",
            "value": "broadcasts, none of 8 requests masked",
        }
        assert [capture["last_step"] for capture in body["captures"]] == [31, 66, 73]

    def test_alerts(self, client: TestClient) -> None:
        """Alerts by their state, receivers with why they fail."""
        body = client.get("/api/v1/alerts").json()
        assert body.keys() == set(AlertsView.__dataclass_fields__)
        assert [alert["state"] for alert in body["active"]] == ["firing"] * 4 + ["pending"]
        assert [receiver["healthy"] for receiver in body["receivers"]] == [True, False, None]

    @pytest.mark.parametrize("make", reports.ALL_INCIDENTS, ids=lambda make: make.__name__)
    def test_every_incident_travels(self, make: Callable[[], IncidentView]) -> None:
        """Each incident can be carried and is valid by its own schema."""
        wire = to_wire(make())
        assert wire_model(IncidentView).model_validate_json(wire.model_dump_json()) == wire

    def test_capture(self, client: TestClient) -> None:
        """Flight records come as a zip file with a name that says whose they are."""
        answer = client.get(f"/api/v1{WEDGE}/captures/1.zip")
        assert answer.headers["Content-Type"] == "application/zip"
        assert answer.headers["Content-Disposition"] == f'attachment; filename="{INCIDENTS["wedge"]}-1.zip"'
        assert "capture.json" in zipfile.ZipFile(io.BytesIO(answer.content)).namelist()

    def test_trace(self, client: TestClient, fake: FakeRankscope) -> None:
        """The newest records that are kept come as a trace, with a track for each rank."""
        del fake.captures[INCIDENTS["wedge"], 2]
        answer = client.get(f"/api/v1{WEDGE}/trace.json")
        assert answer.headers["Content-Disposition"] == f'attachment; filename="{INCIDENTS["wedge"]}-trace.json"'
        events = answer.json()["traceEvents"]
        assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["pp0", "pp1"]

    def test_records_that_cannot_be_read(self, client: TestClient, fake: FakeRankscope) -> None:
        """Damaged records are said to be damaged."""
        fake.captures[INCIDENTS["wedge"], 2] = b"PK"
        answer = client.get(f"/api/v1{WEDGE}/trace.json")
        assert answer.status_code == 500
        assert "Flight records 2 of this incident cannot be read" in answer.json()["detail"]

    def test_export(self, client: TestClient) -> None:
        """An incident comes as one file in plain types."""
        answer = client.get(f"/api/v1{WEDGE}/export.json")
        assert answer.headers["Content-Disposition"] == f'attachment; filename="{INCIDENTS["wedge"]}.json"'
        assert (answer.json()["schema_version"], answer.json()["kind"]) == (1, "wedged")

    @pytest.mark.parametrize(
        ("path", "remedy"),
        [
            ("/incidents/i-nope", "GET /api/v1/incidents"),
            ("/incidents/i-nope/captures/0.zip", "GET /api/v1/incidents"),
            (f"{WEDGE}/captures/9.zip", "`captures` of the incident"),
            (f"/incidents/{INCIDENTS['dark']}/trace.json", "a trace is made of them"),
            ("/incidents/i-nope/export.json", "GET /api/v1/incidents"),
        ],
    )
    def test_what_is_not_there(self, path: str, remedy: str, client: TestClient) -> None:
        """What is not kept is said to be so, with where to look."""
        answer = client.get(f"/api/v1{path}")
        assert answer.status_code == 404
        assert remedy in answer.json()["detail"]


class TestPages:
    """
    The pages without scripts.
    """

    def test_list_leads_to_each_incident(self, client: TestClient) -> None:
        """The list names every incident with its sentence, and leads to its page."""
        html = client.get("/incidents").text
        for make in reports.ALL_INCIDENTS:
            card = make().card
            assert f'href="/incidents/{card.id}"' in html
            assert card.sentence in html

    def test_empty_list_says_what_would_be_there(self, client: TestClient, fake: FakeRankscope) -> None:
        """Without an incident the page says what one is."""
        fake.reports.clear()
        assert "No incident so far" in client.get("/incidents").text

    def test_incident(self, client: TestClient) -> None:
        """An incident's page has its sentence as heading, and leads to its engine."""
        for make in reports.ALL_INCIDENTS:
            card = make().card
            html = client.get(f"/incidents/{card.id}").text
            assert re.search(rf"<h1[^>]*>{re.escape(card.sentence)}</h1>", html)
            assert f'href="/deployments/{card.deployment}/engines/{card.engine}"' in html

    def test_what_was_done_is_there(self, client: TestClient) -> None:
        """The page says who toggled the fix while it lasted."""
        assert "by mira" in client.get(f"/incidents/{INCIDENTS['canary']}").text
        assert "Nobody toggled the trim fix" in client.get(WEDGE).text

    def test_runbook_is_linked_where_one_is_known(self, client: TestClient, fake: FakeRankscope) -> None:
        """The runbook of the worst finding is linked, and nothing is made up where there is none."""
        assert 'href="/runbooks/RankscopeWedged"' in client.get(WEDGE).text
        fake.alert(AlertsView((), (), ()))
        assert "/runbooks/" not in client.get(WEDGE).text

    def test_engine_that_is_gone_has_no_link(self, client: TestClient, fake: FakeRankscope) -> None:
        """An incident outlives its engine."""
        fake.forget(views.wedged())
        html = client.get(WEDGE).text
        assert ENGINES["wedge"] in html
        assert "/deployments/wedge" not in html

    def test_captures_that_were_removed_have_no_link(self, client: TestClient, fake: FakeRankscope) -> None:
        """What was removed to make room is still listed, and the rest keeps its number."""
        view = reports.wedge()
        removed = dataclasses.replace(view.captures[0], kept=False)
        fake.report(dataclasses.replace(view, captures=(removed, *view.captures[1:])))
        html = client.get(WEDGE).text
        assert "removed to make room" in html
        assert "captures/0.zip" not in html
        assert "captures/1.zip" in html

    def test_engine_leads_to_its_open_incident(self, client: TestClient) -> None:
        """The engine's page and the fleet lead to the incident that is open."""
        for path in (f"/deployments/wedge/engines/{ENGINES['wedge']}", "/"):
            assert f'href="{WEDGE}"' in client.get(path).text

    def test_alerts(self, client: TestClient) -> None:
        """The page shows every alert and how each receiver does."""
        html = client.get("/alerts").text
        for said in (
            "RankscopeWedged",
            "pending",
            "resolved",
            "answered 401",
            "not used yet",
            ">healthy<",
            f'href="{WEDGE}"',
        ):
            assert said.lower() in html.lower()

    def test_without_a_receiver_the_page_shows_how_to_add_one(self, client: TestClient, fake: FakeRankscope) -> None:
        """The example is one that the server takes."""
        fake.alert(AlertsView((), (), ()))
        html = client.get("/alerts").text
        assert "Nobody is told" in html
        example = re.search(r"<pre[^>]*><code>(.*?)</code>", html, re.DOTALL)
        assert example is not None
        settings = AlertSettings.model_validate(yaml.safe_load(example.group(1).replace("&#34;", '"'))["alerts"])
        assert [receiver.name for receiver in settings.receivers] == ["pager", "chat"]

    def test_counts_stand_beside_the_links(self, client: TestClient, fake: FakeRankscope) -> None:
        """Every page says how many incidents go on and how many alerts fire; errors, too."""
        for path in ("/", "/incidents", WEDGE, "/alerts", "/audit", "/api", "/nope"):
            html = client.get(path).text
            assert re.search(r'id="count-incidents".*>3<span class="visually-hidden"> open<', html), path
            assert re.search(r'id="count-alerts".*>4<span class="visually-hidden"> firing<', html), path
        fake.reports.clear()
        fake.alert(AlertsView((), (), ()))
        assert '<span id="count-incidents" class="nav-count"></span>' in client.get("/").text

    def test_pages_hold_under_the_strictest_policy(self, client: TestClient) -> None:
        """No inline script, no style attribute, nothing from elsewhere, no id twice."""
        for path in ("/incidents", WEDGE, "/alerts"):
            html = client.get(path).text
            assert not re.search(r"<script(?![^>]*\ssrc=)", html)
            assert " style=" not in html
            assert not re.search(r'(?:src|href)="(?:https?:)?//', html)
            ids = re.findall(r'\sid="([^"]+)"', html)
            assert len(ids) == len(set(ids)), path

    def test_unknown_incident(self, client: TestClient) -> None:
        """An incident that is not there is a page with a remedy."""
        answer = client.get("/incidents/i-nope")
        assert answer.status_code == 404
        assert "No incident i-nope is known." in answer.text


class TestFragments:
    """
    Fragments as they were when somebody last looked at them.
    """

    def test_list(self, templates: Templates, golden: Golden) -> None:
        """The list."""
        cards = tuple(make().card for make in reports.ALL_INCIDENTS)
        golden("incidents.html", tidy(templates.block("incidents.html", "incidents", **list_context(cards))))

    def test_nothing_open(self, templates: Templates) -> None:
        """That nothing is open is said, and what is over is shown."""
        html = templates.block("incidents.html", "incidents", **list_context((reports.equal_stall().card,)))
        assert "No incident is open." in html
        assert "stalled" in html

    @pytest.mark.parametrize("make", reports.ALL_INCIDENTS, ids=lambda make: make.__name__)
    def test_incident(self, make: Callable[[], IncidentView], templates: Templates, golden: Golden) -> None:
        """An incident."""
        page = shown(make(), runbook="/runbooks/x")
        html = [templates.block("incident.html", name, shown=page) for name in INCIDENT_FRAGMENTS]
        golden(f"incident-{make.__name__.replace('_', '-')}.html", tidy("\n".join(html)))

    def test_alerts(self, templates: Templates, golden: Golden) -> None:
        """Alerts and receivers."""
        html = [templates.block("alerts.html", name, view=reports.alerts()) for name in ALERT_FRAGMENTS]
        golden("alerts.html", tidy("\n".join(html)))

    def test_every_fragment_is_one_element_with_its_id(self, templates: Templates) -> None:
        """A fragment can be morphed into its place: it begins with the element that has its id."""
        for name in INCIDENT_FRAGMENTS:
            html = templates.block("incident.html", name, shown=shown(reports.wedge())).strip()
            assert f'id="incident-{name}"' in html.partition(">")[0]
        for name in ALERT_FRAGMENTS:
            html = templates.block("alerts.html", name, view=reports.alerts()).strip()
            assert f'id="alerts-{name}"' in html.partition(">")[0]

    def test_data_is_escaped(self, templates: Templates) -> None:
        """Markup in data stays text."""
        evil = "<img src=x onerror=alert(1)>"
        view = reports.wedge()
        card = dataclasses.replace(view.card, sentence=evil, deployment=evil)
        page = shown(dataclasses.replace(view, card=card, model=evil))
        assert "<img" not in templates.block("incident.html", "headline", shown=page)

    def test_many_ranks_are_folded(self, templates: Templates) -> None:
        """Of a thousand ranks the first eight are in view, and the rest can be unfolded."""
        values = tuple(RankValue(RankId(0, pp, 0), f"pp{pp}", "skips") for pp in range(1000))
        found = dataclasses.replace(reports.wedge().findings[0], evidence=Evidence(values))
        html = templates.block(
            "incident.html", "findings", shown=shown(dataclasses.replace(reports.wedge(), findings=(found,)))
        )
        assert html.index("pp7<") < html.index("<summary>992 more ranks</summary>") < html.index("pp8<")


class TestReading:
    """
    What stands beside an incident on its page.
    """

    @pytest.mark.parametrize("kind", FindingKind)
    def test_every_kind_has_a_name_for_its_alert(self, kind: FindingKind) -> None:
        """Names are what they are in the rules."""
        assert re.fullmatch(r"Rankscope([A-Z][a-z]+)+", alert_name(kind))
        assert alert_name(FindingKind.GUARD_DISAGREEMENT) == "RankscopeGuardDisagreement"

    def test_runbook_of_any_alert_of_the_kind(self) -> None:
        """A resolved alert about another engine knows the runbook as well."""
        assert find_runbook(FindingKind.STALLED, reports.alerts()) == "/runbooks/RankscopeStalled"
        assert find_runbook(FindingKind.BLIND, reports.alerts()) == ""

    def test_only_what_was_done_meanwhile(self) -> None:
        """What was done before it opened, after it closed, or to another engine is not of it."""
        card = dataclasses.replace(reports.wedge().card, opened_unix=100.0, closed_unix=200.0, life=IncidentLife.CLOSED)
        row = dataclasses.replace(views.applied().audit[0], deployment="wedge", engine=card.engine, at_unix=150.0)
        rows = [
            row,
            dataclasses.replace(row, engine=""),
            dataclasses.replace(row, engine="other"),
            dataclasses.replace(row, at_unix=99.0),
            dataclasses.replace(row, at_unix=201.0),
        ]
        assert done_during(card, rows) == tuple(rows[:2])


class TestStreams:
    """
    Live streams of these pages.
    """

    def test_incidents_and_counts(self, follow, fake: FakeRankscope) -> None:  # type: ignore[no-untyped-def]
        """A change brings the list and the count; a new incident is said aloud."""
        del fake.reports[INCIDENTS["wedge"]]

        async def body(reader) -> None:  # type: ignore[no-untyped-def]
            first = await reader.next("")
            assert first.data.count("<hx-partial") == 3
            await reader.next("heartbeat")
            fake.report(reports.wedge())
            changed = await reader.next("")
            assert 'hx-target="#incidents"' in changed.data
            assert 'hx-target="#count-incidents"' in changed.data
            assert 'hx-target="#count-alerts"' not in changed.data
            assert (await reader.next("announce")).data == "New: wedged on wedge, wedged."

        follow("/live/incidents", body)

    def test_incident(self, follow, fake: FakeRankscope) -> None:  # type: ignore[no-untyped-def]
        """A change brings the parts that it touches; when the incident is forgotten the stream says so and ends."""

        async def body(reader) -> None:  # type: ignore[no-untyped-def]
            await reader.next("heartbeat")
            view = reports.open_drift()
            card = dataclasses.replace(view.card, life=IncidentLife.WORSENING)
            fake.report(dataclasses.replace(view, card=card))
            changed = await reader.next("")
            assert 'hx-target="#incident-headline"' in changed.data
            assert 'hx-target="#incident-findings"' not in changed.data
            assert (await reader.next("announce")).data == f"Incident {card.id} is now worsening."
            del fake.reports[card.id]
            fake.version += 1
            assert "no longer kept" in (await reader.next("gone")).data
            assert await reader.next() is None

        follow(f"/live/incidents/{INCIDENTS['baseline']}", body)

    def test_alerts(self, follow, fake: FakeRankscope) -> None:  # type: ignore[no-untyped-def]
        """A receiver that recovers brings its part, and is said aloud."""

        async def body(reader) -> None:  # type: ignore[no-untyped-def]
            await reader.next("heartbeat")
            view = reports.alerts()
            mended = dataclasses.replace(view.receivers[1], healthy=True, error="", failing_since_unix=None)
            fake.alert(dataclasses.replace(view, receivers=(view.receivers[0], mended, view.receivers[2])))
            changed = await reader.next("")
            assert re.findall(r'hx-target="#([a-z-]+)"', changed.data) == ["alerts-summary", "alerts-receivers"]
            assert (await reader.next("announce")).data == "Receiver chat is now healthy."

        follow("/live/alerts", body)

    def test_unknown_incident(self, client: TestClient) -> None:
        """A stream of an incident that is not there is a plain 404."""
        assert client.get("/live/incidents/nope").status_code == 404
