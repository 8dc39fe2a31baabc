"""
How long until the ranks part: when every request of a running batch will be masked on a rank that is not the last.

A batch holds its ranks together as long as one of its requests is unmasked there. `passage` works out how likely it is
that they have all been masked by when; here it is said whether that can be known, and put into words.
"""

from collections.abc import Sequence

import numpy as np

from rankscope_exporter.contract import Guard, Lengths, MitigationState, Phase
from rankscope_server.domain.clock import Moment
from rankscope_server.domain.facts import EngineFacts, RankFacts, joined
from rankscope_server.domain.history import Records
from rankscope_server.domain.outlook import Forecast, Outlook
from rankscope_server.domain.passage import GRID, chance_parted
from rankscope_server.domain.rates import Rates, estimate_rates
from rankscope_server.domain.turns import Turns, beside, extract_turns
from rankscope_server.domain.unmasked import Floats

HORIZON_SECONDS = 1800.0
"""
What is less likely than `IN_SIGHT` to come within this is not in sight.
"""

BEYOND_HORIZON = 8.0
"""
How many horizons ahead the far end of an interval lies at most.
"""

IN_SIGHT, EARLIEST, LATEST = 0.1, 0.1, 0.9
"""
Chances: of coming within the horizon so that it is called in sight, and of coming before each end of the interval.
"""

WINDOW, RECENT = 320, 64
"""
Steps that the forecast rests on, and those of which one at least must drift.
"""

LEAST_TURNS = 4
"""
Turns of a batch without which nothing is said.
"""


CALM_TURNS = 32
"""
Turns without which drift is not said to be harmless: a batch that still grows looks as if it always would.
"""


def assess_forecast(engine: EngineFacts, now: Moment) -> Forecast:
    """
    How long until every request of a running batch of the engine is masked on a rank, if traffic goes on as it does.
    """
    calm = _calm(engine)
    if calm:
        return Forecast(Outlook.NOT_IN_SIGHT, calm)
    blind = _blindness(engine, now)
    if blind:
        return Forecast(Outlook.UNKNOWN, blind)
    if engine.idle:
        return Forecast(Outlook.NOT_IN_SIGHT, "no request is running")
    return min((_assess_group(group, now) for group in engine.groups), key=_urgency)


def _urgency(forecast: Forecast) -> tuple[int, float]:
    order = (Outlook.IN_SIGHT, Outlook.UNKNOWN, Outlook.NOT_IN_SIGHT)
    return order.index(forecast.outlook), forecast.earliest_seconds or 0.0


def _calm(engine: EngineFacts) -> str:
    """
    Why the ranks cannot part in this way; empty if they can.
    """
    if engine.identity.pp_size < 2:
        return "there is only one pipeline rank"
    if engine.identity.spec_tokens == 0:
        return "nothing is speculated"
    if not engine.missing and all(rank.trim is MitigationState.APPLIED for rank in engine.ranks):
        return "the trim fix is applied"
    return ""


def _blindness(engine: EngineFacts, now: Moment) -> str:
    """
    Why nothing can be said; empty if something can.
    """
    if any(rank.is_v2 for rank in engine.ranks):
        return "the V2 runner keeps its lengths on the device"
    silent = [exporter.url for exporter in engine.exporters if exporter.out_of_reach(now)]
    if silent:
        return f"{joined(silent)} {'does' if len(silent) == 1 else 'do'} not answer"
    if engine.missing:
        return f"{engine.missing} {'rank is' if engine.missing == 1 else 'ranks are'} not seen"
    lost = [rank.label for rank in engine.ranks if not rank.running or rank.failure is not None]
    if lost:
        return f"{joined(lost)} {'takes' if len(lost) == 1 else 'take'} no more steps"
    unhooked = [rank for rank in engine.ranks if rank.lost_hooks]
    if unhooked:
        return (
            f"hook {unhooked[0].lost_hooks[0].hook} of {unhooked[0].label} is {unhooked[0].lost_hooks[0].state.value}"
        )
    return ""


def _assess_group(group: Sequence[RankFacts], now: Moment) -> Forecast:
    pp_size, draft_tokens = group[0].report.identity.pp_size, group[0].report.identity.spec_tokens
    rank = max((rank for rank in group if rank.id.pp_rank < pp_size - 1), key=_latest_drift)
    last = next(rank for rank in group if rank.id.pp_rank == pp_size - 1)
    # Most engines are healthy: a short look tells.
    recent = rank.history.tail(RECENT)
    unknown = _unknown(rank, recent, last.history.tail(RECENT + pp_size + 1))
    if unknown:
        return Forecast(Outlook.UNKNOWN, unknown)
    if not (recent["drifting"] > 0).any():
        return Forecast(Outlook.NOT_IN_SIGHT, "no request drifts")
    records, last_rank = rank.history.tail(WINDOW), last.history.tail(WINDOW + pp_size + 1)
    turns = extract_turns(records, last_rank, pp_size)
    if len(turns) < LEAST_TURNS:
        return Forecast(Outlook.UNKNOWN, f"{rank.label} has been seen for {len(turns)} steps only")
    rates = estimate_rates(turns, draft_tokens)
    return _told(rank, turns, rates, chance_parted(turns, draft_tokens, rates), now)


def _latest_drift(rank: RankFacts) -> int:
    newest = rank.history.tail(4)
    return int(newest["drift_sum"].max()) if len(newest) else 0


def _unknown(rank: RankFacts, records: Records, last_rank: Records) -> str:
    """
    Why the recent steps of a rank say nothing about those to come; empty if they do.
    """
    # A step in which nothing was scheduled, to tell of requests that ended, comes to no decision.
    recent = records[(records["phase"] >= Phase.DECIDED) & (records["scheduled_tokens"] > 0)]
    if len(recent) < LEAST_TURNS:
        return f"{rank.label} has been seen for {len(recent)} steps only"
    if not (recent["lengths"] == Lengths.OUTPUT_TOKENS).all():
        return f"the request-state lengths of {rank.label} are not known"
    if not recent["mask_known"].all():
        return f"it is not known which requests {rank.label} masks"
    if len(last_rank):
        at, there = beside(records, last_rank)
        one, other = records["guard"], last_rank["guard"][at]
        if (there & (one != other) & (one != Guard.NONE) & (other != Guard.NONE)).any():
            return "the ranks have parted already"
    return ""


def _told(rank: RankFacts, turns: Turns, rates: Rates, parted: Floats, now: Moment) -> Forecast:
    masked, requests = int(turns.masked[-1]), int(turns.masked[-1] + turns.unmasked[-1])
    arriving = float(np.median(rates.arriving)) / rates.turn_seconds
    rests_on = f"{masked} of {requests} requests masked on {rank.label}, {arriving:.2g} new a second"
    seconds = GRID * rates.turn_seconds
    if float(np.interp(HORIZON_SECONDS, seconds, parted)) < IN_SIGHT:
        if len(turns) < CALM_TURNS:
            return Forecast(Outlook.UNKNOWN, f"{len(turns)} steps are too few to tell: {rests_on}")
        return Forecast(Outlook.NOT_IN_SIGHT, rests_on)
    age = rank.clock.age_of(int(turns.begin_ns[-1]), now)
    earliest, latest = (
        min(max(0.0, float(np.interp(chance, parted, seconds)) - age), BEYOND_HORIZON * HORIZON_SECONDS)
        for chance in (EARLIEST, LATEST)
    )
    return Forecast(Outlook.IN_SIGHT, rests_on, earliest, max(earliest, latest), rank.label)
