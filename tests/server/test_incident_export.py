"""An incident as JSON."""

import json

from made_ranks import START_UNIX

from rankscope_server.domain.incident import (
    CaptureView,
    IncidentCard,
    IncidentEvent,
    IncidentLife,
    IncidentView,
)
from rankscope_server.domain.model import Evidence, Finding, FindingKind, RankId, RankValue, Severity
from rankscope_server.incidents.export import export_incident, export_json

PP0 = RankId(0, 0, 0)
VIEW = IncidentView(
    card=IncidentCard(
        "i-1", "chat", "e1", IncidentLife.WEDGED, FindingKind.WEDGED, Severity.CRITICAL, "It hangs.", 7, START_UNIX, START_UNIX + 5, None
    ),
    model="some/model",
    vllm_version="0.27.1",
    runner="V1",
    findings=(
        Finding(
            FindingKind.WEDGED,
            Severity.CRITICAL,
            "no rank moves",
            7,
            (PP0,),
            START_UNIX,
            evidence=Evidence((RankValue(PP0, "pp0", "in step 7"),), ("größe-7",)),
        ),
    ),
    timeline=(IncidentEvent(START_UNIX, "wedged", "No rank moves"),),
    captures=(CaptureView(START_UNIX, IncidentLife.WEDGED, 2, 1, 7, 4096),),
)  # fmt: skip


def test_an_export_has_all_that_the_page_shows():
    """In plain types, with the version of its shape first."""
    plain = export_incident(VIEW)

    assert next(iter(plain)) == "schema_version"
    assert (plain["schema_version"], plain["id"], plain["life"], plain["closed_unix"]) == (1, "i-1", "wedged", None)
    assert plain["findings"][0]["kind"] == "wedged"
    assert plain["findings"][0]["evidence"]["values"] == [
        {"rank": {"dp_rank": 0, "pp_rank": 0, "tp_rank": 0}, "label": "pp0", "value": "in step 7"}
    ]
    assert plain["timeline"] == [{"at_unix": START_UNIX, "what": "wedged", "sentence": "No rank moves"}]
    assert plain["captures"][0]["size_bytes"] == 4096


def test_an_export_is_a_file_of_json():
    """Readable, in UTF-8."""
    data = export_json(VIEW)

    assert json.loads(data) == export_incident(VIEW)
    assert "größe-7" in data.decode()
    assert data.endswith(b"}\n")
