"""The sentences above an incident: goldens of what a tired person reads."""

import dataclasses

import pytest
from made_ranks import START_UNIX

from rankscope_server.domain.incident import IncidentLife
from rankscope_server.domain.incident_life import Incident, incident_id
from rankscope_server.domain.incident_story import build_card, build_incident, tell
from rankscope_server.domain.model import ActedMark, Evidence, Finding, FindingKind, RankId, RankValue, Severity

PP0, PP1 = RankId(0, 0, 0), RankId(0, 1, 0)


def found(kind, step, sentence="", values=(), began_with="", severity=Severity.CRITICAL):
    said = tuple(
        RankValue(rank, label, value) for rank, label, value in zip((PP0, PP1), ("pp0", "pp1"), values, strict=False)
    )
    return Finding(
        kind, severity, sentence, step, (PP0, PP1), START_UNIX, evidence=Evidence(said, began_with=began_with)
    )


DRIFT = found(
    FindingKind.DRIFT,
    371,
    "pp0 counts up to 12 tokens more than the scheduler in 3 requests; drift began at step 371 with request ...07f2; pp1 agrees with the scheduler",
    ("+12 tokens in 3 requests",),
    began_with="chatcmpl-0c1dd5e07f2",
    severity=Severity.WARNING,
)
MASK = found(
    FindingKind.MASK_DISAGREEMENT,
    395,
    "at step 395 pp0 masks 2 of 6 requests and pp1 masks none of 6 requests: requests that are masked on one rank only get wrong tokens",
    ("masks 2 of 6 requests", "masks none of 6 requests"),
)
GUARD = found(
    FindingKind.GUARD_DISAGREEMENT,
    412,
    "at step 412 pp1 broadcasts the sampled tokens and pp0 skips the collective (it masks all 6 requests)",
    ("skips the collective, all 6 requests masked", "broadcasts"),
)
WEDGED = found(
    FindingKind.WEDGED,
    412,
    "pp1 posted the broadcast of step 412 and never came back; pp0 is in step 413: no rank has moved for 14 s, and none will until the engine is restarted",
)
BATCH = found(
    FindingKind.BATCH_MISMATCH,
    88,
    "pp0 and pp1 run different batches since step 88",
    ("4 new, 2 cached, 31 tokens", "3 new, 2 cached, 24 tokens"),
)
WIDTH = found(
    FindingKind.WIDTH_MISMATCH,
    90,
    "at step 90 pp0 posts the sampled tokens 4 columns wide and pp1 posts the sampled tokens 1 column wide",
    ("posts 3 collectives, 4 columns", "posts 3 collectives, 1 column"),
)
STALLED = found(
    FindingKind.STALLED,
    17,
    "no rank has moved for 31 s with step 17 in flight on pp0 and pp1; no disagreement is known",
    severity=Severity.WARNING,
)
LOST = found(FindingKind.RANK_LOST, 118, "pp0 is gone (pid 4000) at step 118; pp1 waits for it")
MIXED = found(
    FindingKind.MITIGATION_MIXED,
    402,
    "the trim fix is on at pp0 and not at pp1: turn it on or off again for all ranks",
)
BLIND = found(
    FindingKind.BLIND, None, "the exporter of pp0 last answered 9.0 s ago: refused", severity=Severity.WARNING
)
FIX_ON = ActedMark(1, True, 405, START_UNIX + 9)


def closed(finding):
    return dataclasses.replace(finding, open=False)


def incident(*findings, **changes):
    made = Incident(
        id="i-20261201-134455-7f2a",
        deployment="chat",
        engine="e1",
        model="some/model",
        vllm_version="0.27.1",
        runner="V1",
        life=IncidentLife.OPEN,
        opened_unix=START_UNIX,
        changed_unix=START_UNIX,
        reach=2,
        findings=findings,
    )
    return dataclasses.replace(made, **changes)


GOLDENS = {
    "wedge": (
        incident(DRIFT, MASK, GUARD, WEDGED),
        (
            "pp0 stopped receiving at step 412: it believed all 6 requests were prefill; pp1 broadcast. "
            "Drift began at step 371 with request ...07f2. Output is wrong since step 395, where masked requests first differed. "
            "The engine is wedged until it is restarted."
        ),
    ),
    "wedge, ended": (
        incident(GUARD, WEDGED, life=IncidentLife.CLOSED),
        (
            "pp0 stopped receiving at step 412: it believed all 6 requests were prefill; pp1 broadcast. "
            "The engine was wedged until it ended."
        ),
    ),
    "guard, one request": (
        incident(
            found(
                FindingKind.GUARD_DISAGREEMENT,
                9,
                values=("skips the collective, its only request masked", "broadcasts"),
            )
        ),
        "pp0 stopped receiving at step 9: it believed its only request was prefill; pp1 broadcast.",
    ),
    "guard, reason unknown": (
        incident(found(FindingKind.GUARD_DISAGREEMENT, 9, values=("skips the collective", "broadcasts"))),
        "pp0 stopped receiving at step 9; pp1 broadcast.",
    ),
    "guard, the sender": (
        incident(
            found(
                FindingKind.GUARD_DISAGREEMENT, 9, values=("broadcasts", "skips the collective, all 2 requests masked")
            )
        ),
        "pp1 sent nothing at step 9: it believed all 2 requests were prefill; pp0 waited for it.",
    ),
    "guard without evidence": (
        incident(dataclasses.replace(GUARD, evidence=Evidence())),
        "At step 412 pp1 broadcasts the sampled tokens and pp0 skips the collective (it masks all 6 requests).",
    ),
    "mask": (
        incident(DRIFT, MASK),
        (
            "Output is wrong since step 395, where ranks masked different requests: "
            "pp0 masks 2 of 6 requests; pp1 masks none of 6 requests. Drift began at step 371 with request ...07f2."
        ),
    ),
    "mask without evidence": (
        incident(dataclasses.replace(MASK, evidence=Evidence())),
        (
            "Output is wrong: at step 395 pp0 masks 2 of 6 requests and pp1 masks none of 6 requests: "
            "requests that are masked on one rank only get wrong tokens."
        ),
    ),
    "drift": (
        incident(DRIFT),
        (
            "Drift began at step 371 with request ...07f2: pp0 +12 tokens in 3 requests. No mask and no guard decision has differed."
        ),
    ),
    "drift, not all compared": (
        incident(DRIFT, missing=1),
        "Drift began at step 371 with request ...07f2: pp0 +12 tokens in 3 requests.",
    ),
    "drift without evidence": (
        incident(dataclasses.replace(DRIFT, evidence=Evidence())),
        (
            "pp0 counts up to 12 tokens more than the scheduler in 3 requests; drift began at step 371 with request ...07f2; "
            "pp1 agrees with the scheduler. No mask and no guard decision has differed."
        ),
    ),
    "drift that the fix ended": (
        incident(closed(DRIFT), closed(MASK), acted=(FIX_ON,), drift_last=405, life=IncidentLife.RECOVERED),
        (
            "Output was wrong from step 395 on, where ranks masked different requests: "
            "pp0 masks 2 of 6 requests; pp1 masks none of 6 requests. Drift began at step 371 with request ...07f2. "
            "The trim fix was turned on at step 405; drift ended there."
        ),
    ),
    "drift that went on": (
        incident(closed(DRIFT), acted=(FIX_ON,), drift_last=450),
        (
            "Drift began at step 371 with request ...07f2: pp0 +12 tokens in 3 requests. No mask and no guard decision has differed. "
            "The trim fix was turned on at step 405; drift ended at step 450."
        ),
    ),
    "batch": (
        incident(BATCH, dataclasses.replace(GUARD, step=90), WEDGED),
        (
            "pp0 and pp1 were given different batches at step 88: pp0 4 new, 2 cached, 31 tokens; pp1 3 new, 2 cached, 24 tokens. "
            "The engine is wedged until it is restarted."
        ),
    ),
    "width": (
        incident(WIDTH),
        (
            "pp0 and pp1 posted the sampled-token exchange of step 90 differently: "
            "pp0 posts 3 collectives, 4 columns; pp1 posts 3 collectives, 1 column."
        ),
    ),
    "stalled": (
        incident(STALLED),
        "No rank has moved for 31 s with step 17 in flight on pp0 and pp1; no disagreement is known.",
    ),
    "stalled for a while": (
        incident(closed(STALLED)),
        "No rank moved for a while with step 17 in flight; no disagreement was found.",
    ),
    "lost": (incident(LOST), "pp0 is gone (pid 4000) at step 118; pp1 waits for it."),
    "lost for a while": (incident(closed(LOST)), "For a while: pp0 is gone (pid 4000) at step 118; pp1 waits for it."),
    "mixed": (
        incident(DRIFT, MIXED),
        (
            "Drift began at step 371 with request ...07f2. "
            "The trim fix is on at pp0 and not at pp1: turn it on or off again for all ranks."
        ),
    ),
    "blind": (incident(BLIND), "Not everything is seen: the exporter of pp0 last answered 9.0 s ago: refused."),
    "blind and back": (
        incident(closed(BLIND)),
        "For a while, not everything is seen: the exporter of pp0 last answered 9.0 s ago: refused.",
    ),
    "stalled and blind": (
        incident(BLIND, STALLED),
        (
            "No rank has moved for 31 s with step 17 in flight on pp0 and pp1; no disagreement is known. "
            "Not everything is seen: the exporter of pp0 last answered 9.0 s ago: refused."
        ),
    ),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_the_sentence_of_an_incident(name):
    """What happened, in the order of its cause, from findings, evidence and steps."""
    made, expected = GOLDENS[name]

    assert tell(made) == expected


def test_a_card_names_the_worst_and_the_first_step():
    """Kind and severity are of the worst finding, the step of the first."""
    card = build_card(incident(BLIND, DRIFT, MASK, GUARD))

    assert (card.kind, card.severity, card.step) == (FindingKind.GUARD_DISAGREEMENT, Severity.CRITICAL, 371)
    assert build_card(incident(BLIND)).severity is Severity.WARNING
    assert build_incident(incident(DRIFT)).card == build_card(incident(DRIFT))


def test_ids_sort_by_time_and_tell_engines_apart():
    """The same arguments give the same id; one that is taken is not given again."""
    first = incident_id(START_UNIX, "chat", "e1")

    assert first == incident_id(START_UNIX, "chat", "e1") == "i-20231114-221320-" + first[-4:]
    assert incident_id(START_UNIX, "chat", "e2") != first
    assert incident_id(START_UNIX, "chat", "e1", {first}) != first
    assert first < incident_id(START_UNIX + 1, "chat", "e1")
