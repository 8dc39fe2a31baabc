"""
The runs of the detection test: seeded engines and traffic.

Every request keeps its batch together until it is masked on the first rank, so traffic that comes closely enough holds an
engine open for as long as it comes. It has to hold for a while, or the ranks part before anybody can be told.
"""

import random
from dataclasses import dataclass

from rankscope_lab.traffic import Phase, Plan, Stream

SEED = 54260
DRAFT_TOKENS = 3
SLOTS = 64
STEP_SECONDS = 0.2
"""
About how long a step takes with `PACE_MS`: so slow that a busy machine loses no more than a step of traffic.
"""
PACE_MS = 175.0
BEGIN_SECONDS = 3.0
BEGIN = Stream("begin", (200, 300), running=1, anchor=True)
"""
A request that never drifts, for the first seconds: until enough others run, chance would part the ranks too soon.
"""
HELD_UNMASKED, LOOSE_UNMASKED = 9.0, 4.0
"""
Requests that are unmasked on average, while traffic holds the ranks together and when it no longer does for certain.
"""
LENGTHS = (8, 30)
LOOSE, LOOSE_SECONDS = "loose", 60.0
"""
The last phase of runs in which traffic does not stop.
"""
CLIENT_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class BaselineRun:
    """
    An engine without the fix, and the traffic that parts its ranks.
    """

    number: int
    acceptance: float
    plan: Plan


def plan_baseline(number: int, runs: int) -> BaselineRun:
    """
    The run of this number (from 0) of so many: acceptance from 0.3 to 0.9; traffic of even runs stops, that of odd ones
    goes on, thinner and by chance.
    """
    acceptance = round(0.3 + 0.6 * number / max(1, runs - 1), 3)
    chance = random.Random(f"{SEED}/{number}")
    per_second = arrivals(acceptance, 1.0)
    hold = Stream(
        "hold", LENGTHS, rate=HELD_UNMASKED * per_second * chance.uniform(0.9, 1.1), regular=chance.random() < 0.5
    )
    stops = number % 2 == 0
    loose = Stream("loose", LENGTHS, rate=LOOSE_UNMASKED * per_second, regular=False)
    phases = (Phase("begin", BEGIN_SECONDS, (BEGIN, hold)), Phase("hold", chance.uniform(4.0, 9.0), (hold,)))
    if not stops:
        phases += (Phase(LOOSE, LOOSE_SECONDS, (loose,)),)
    plan = Plan(phases, seed=SEED + number, concurrency=SLOTS, timeout=CLIENT_SECONDS)
    return BaselineRun(number, acceptance, plan)


def plan_healthy(number: int, seconds: float) -> Plan:
    """
    Traffic of all sorts for engines whose ranks stay together: regular or not, dense or thin, short and long prompts.
    """
    chance = random.Random(f"{SEED}/healthy/{number}")
    stream = Stream(
        "mixed",
        (5, chance.choice((40, 120))),
        rate=chance.choice((1.0, 5.0, 15.0)),
        regular=chance.random() < 0.5,
        prompts=chance.choice(((2, 8), (2, 400))),
    )
    return Plan(
        (Phase("mixed", seconds, (stream,)),), seed=SEED + 100 + number, concurrency=SLOTS, timeout=4 * CLIENT_SECONDS
    )


def arrivals(acceptance: float, unmasked: float) -> float:
    """
    Requests per second with which so many are unmasked on average.
    """
    rejected = DRAFT_TOKENS - sum(acceptance**n for n in range(1, DRAFT_TOKENS + 1))
    turns = 3 + (DRAFT_TOKENS + 1) / rejected
    return unmasked / turns / STEP_SECONDS
