"""
A scheduler as asynchronous scheduling has it: it plans a step before it knows what the last one brought.

It counts on every draft token being accepted, and corrects itself once the verdict is in. Its messages have the
names that vLLM's have, as far as the runner and the hooks look at them.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rankscope_exporter.simulation.traffic import Arrival

CHUNK_TOKENS = 512
"""
Prompt tokens of a request that one step reads at most.
"""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """
    A request that the ranks see for the first time.
    """

    req_id: str
    prompt_tokens: int
    seed: int


@dataclass(slots=True)
class CachedRequests:
    """
    The requests of a step that the ranks know already, in parallel lists.
    """

    req_ids: list[str] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class SchedulerOutput:
    """
    What every rank of the engine is told about one step.
    """

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    finished_req_ids: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Request:
    arrival: Arrival
    computed: int = 0
    """Tokens whose states are computed, drafts in flight among them."""
    output: int = 0
    """Tokens that were really generated."""
    placeholders: int = 0
    """Tokens counted on from steps in flight."""
    drafts: int = 0
    """Draft tokens that the next step will verify."""


class Scheduler:
    """
    Plans steps for at most `slots` requests at a time, with `draft_tokens` drafts for each.
    """

    def __init__(self, slots: int, draft_tokens: int) -> None:
        self._slots = slots
        self._draft_tokens = draft_tokens
        self._waiting: deque[Arrival] = deque()
        self._running: dict[str, _Request] = {}
        self._finished: set[str] = set()
        self.completed = 0
        """Requests that got all their tokens."""

    def add(self, arrivals: Iterable[Arrival]) -> None:
        """
        Queue requests.
        """
        self._waiting.extend(arrivals)

    def schedule(self) -> SchedulerOutput | None:
        """
        The next step, or None if there is nothing to do.
        """
        if not (self._running or self._waiting or self._finished):
            return None
        plan = SchedulerOutput(finished_req_ids=self._finished)
        self._finished = set()
        cached = plan.scheduled_cached_reqs
        for request_id, request in self._running.items():
            cached.req_ids.append(request_id)
            cached.num_computed_tokens.append(request.computed)
            cached.num_output_tokens.append(request.output + request.placeholders)
            self._plan(plan, request)
        while self._waiting and len(self._running) < self._slots:
            arrival = self._waiting.popleft()
            request = self._running[arrival.request_id] = _Request(arrival)
            plan.scheduled_new_reqs.append(NewRequest(arrival.request_id, arrival.prompt_tokens, arrival.seed))
            self._plan(plan, request)
        plan.total_num_scheduled_tokens = sum(plan.num_scheduled_tokens.values())
        return plan

    def _plan(self, plan: SchedulerOutput, request: _Request) -> None:
        known = request.arrival.prompt_tokens + request.output + request.placeholders
        tokens = min(known + request.drafts - request.computed, max(CHUNK_TOKENS, 1 + request.drafts))
        request_id = request.arrival.request_id
        plan.num_scheduled_tokens[request_id] = tokens
        if request.drafts:
            plan.scheduled_spec_decode_tokens[request_id] = [-1] * request.drafts
        request.computed += tokens
        if request.computed < request.arrival.prompt_tokens:
            return  # a chunk of the prompt: nothing will be sampled
        request.placeholders += 1 + request.drafts
        request.drafts = self._draft_tokens

    def update(self, plan: SchedulerOutput, generated: Mapping[str, int]) -> None:
        """
        Take in how many tokens the step of `plan` brought for each request; 0 where nothing was sampled.
        """
        for request_id, tokens in generated.items():
            request = self._running.get(request_id)
            if request is None or not tokens:
                continue  # it was done before this step's verdict came, or its prompt is being read
            rejected = 1 + len(plan.scheduled_spec_decode_tokens.get(request_id, ())) - tokens
            request.output += tokens
            request.placeholders -= tokens + rejected
            request.computed -= rejected
            if request.output >= request.arrival.output_tokens:
                del self._running[request_id]
                self._finished.add(request_id)
                self.completed += 1
