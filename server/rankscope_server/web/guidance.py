"""
What the reader should do next, and the order of need.
"""

from dataclasses import dataclass

from rankscope_server.domain.model import DeploymentCard, EngineCard, EngineView, FleetView, State
from rankscope_server.domain.outlook import Outlook
from rankscope_server.web.links import engine_path, fix_question

NEEDS_SOMEBODY = State.BLIND
"""
The mildest state in which somebody should look.
"""
AT_RISK = {State.DRIFTING, State.MITIGATION_MIXED, State.OUTPUT_WRONG}
"""
States in which ranks have not parted, and may.
"""


@dataclass(frozen=True, slots=True)
class NextStep:
    """
    The one thing to do next.
    """

    action: str
    """What the link says."""
    href: str
    why: str
    asks: bool = False
    """Whether the link leads to a confirmation, which opens in place."""


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """
    The fleet in one line.
    """

    deployments: int
    engines: int
    ranks: int
    in_need: int
    worst: State | None
    """None while there is no deployment."""
    unknown_code: tuple[str, ...] = ()
    """Deployments with ranks that run code which Rankscope does not know."""


def order_by_need(deployments: tuple[DeploymentCard, ...]) -> tuple[DeploymentCard, ...]:
    """
    The worst state first, names deciding among equals.
    """
    return tuple(sorted(deployments, key=lambda card: (-card.state, card.name)))


def summarise(fleet: FleetView) -> FleetSummary:
    """
    Count what there is and what needs somebody.
    """
    cards = fleet.deployments
    return FleetSummary(
        deployments=len(cards),
        engines=sum(len(card.engines) for card in cards),
        ranks=sum(len(engine.ranks) for card in cards for engine in card.engines),
        in_need=sum(needs_somebody(card.state) for card in cards),
        worst=max((card.state for card in cards), default=None),
        unknown_code=tuple(card.name for card in order_by_need(cards) if card.unknown_code),
    )


def needs_somebody(state: State) -> bool:
    """
    Whether somebody should look at what is in this state.
    """
    return state >= NEEDS_SOMEBODY


def foresees(engine: EngineView | EngineCard) -> bool:
    """
    Whether a forecast is worth saying: a wedge is in sight, or something is wrong that may lead to one.

    Ranks that have parted are beyond what it foresees; their state says so.
    """
    if engine.ended or engine.state >= State.PARTED:
        return False
    return engine.forecast.outlook is Outlook.IN_SIGHT or engine.state in AT_RISK


def assess_card(card: DeploymentCard) -> NextStep | None:
    """
    What to do next about a deployment; None while nothing is needed.
    """
    if not card.engines:
        return None
    engines = [engine for engine in card.engines if not engine.ended] or card.engines
    worst = max(engines, key=lambda engine: engine.state)
    page = engine_path(card.name, worst.engine)
    ask = fix_question(card.name, worst.engine if len(engines) == 1 else None, desired=True)
    return _assess(card.state, card.fix_state, page, ask)


def assess_engine(view: EngineView) -> NextStep | None:
    """
    What to do next about an engine; None while nothing is needed, or while a toggle is on its way.
    """
    progress = view.fix.progress
    if progress is not None and progress.acknowledged < progress.ranks and view.state < State.RANK_LOST:
        return None
    page = engine_path(view.deployment, view.engine)
    state = view.fix.state if view.fix.can_turn_on or view.fix.state != "available" else "refused"
    return _assess(view.state, state, page, fix_question(view.deployment, view.engine, desired=True))


def _assess(state: State, fix_state: str, page: str, ask: str) -> NextStep | None:
    available = fix_state == "available"
    match state:
        case State.WEDGED:
            return NextStep(
                "How to get it back",
                f"{page}#restart",
                "It needs a restart: the trim fix does not revive a wedged engine.",
            )
        case State.RANK_LOST:
            return NextStep(
                "See what each rank did last",
                f"{page}#ranks",
                "A rank is lost while its peers wait: this engine needs a restart.",
            )
        case State.PARTED if available:
            return NextStep("Turn the trim fix on now", ask, "Ranks decide differently: a wedge is near.", asks=True)
        case State.OUTPUT_WRONG if available:
            return NextStep(
                "Turn the trim fix on now",
                ask,
                "Output of running requests is already wrong; new ones can be kept right.",
                asks=True,
            )
        case State.DRIFTING if available:
            return NextStep(
                "Turn the trim fix on",
                ask,
                "Drift grows until ranks part; the fix can be turned on while the engine runs.",
                asks=True,
            )
        case State.PARTED | State.OUTPUT_WRONG:
            return NextStep(
                "See where ranks part", f"{page}#findings", "Ranks disagree, and the trim fix cannot be turned on here."
            )
        case State.MITIGATION_MIXED:
            return NextStep(
                "See which ranks have the fix",
                f"{page}#ranks",
                "Ranks of one engine disagree about the trim fix: turn it on or off again for all of them.",
            )
        case State.DRIFTING if fix_state == "not applicable":
            return NextStep(
                "See what each rank holds",
                f"{page}#ranks",
                "The trim fix is not for this runner: keep the flight files, and report what they show.",
            )
        case State.DRIFTING:
            return NextStep(
                "See why the fix cannot be turned on",
                f"{page}#fix",
                "Drift grows, and the trim fix is not there to turn on.",
            )
        case State.STALLED:
            return NextStep("See what each rank did last", f"{page}#ranks", "A step takes longer than it may.")
        case State.BLIND:
            return NextStep(
                "See what is not seen, and why", f"{page}#findings", "Something that should be watched is not."
            )
        case _:
            return None
