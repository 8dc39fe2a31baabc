"""
Hook points on small runners: what is found where, and that text, class and live runner are judged alike.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lookalike import V1, V2, V2_MODULE, Alteration, alter, importer

from rankscope_exporter.contract import HookState
from rankscope_exporter.hooks import targets
from rankscope_exporter.hooks.sources import SourceSubject, SourceTree
from rankscope_exporter.hooks.widths import Width, WidthRule, width_rule

ALTERATIONS = {
    "V1": [
        Alteration("an async method", "    def sample_tokens", "    async def sample_tokens"),
        Alteration("an async method under a decorator", "    def execute_model", "    async def execute_model"),
        Alteration("another parameter", "_update_states(self, scheduler_output)", "_update_states(self, sched)"),
        Alteration("no guard", "_is_all_reqs_chunked_prefill", "_is_all_prefill"),
        Alteration("no sender", "_pp_broadcast_prev", "_pp_send_prev"),
        Alteration("no mask", "discard_request_mask", "dropped"),
        Alteration("a property", "    def _pp_receive", "    @property\n    def _pp_receive"),
        Alteration("a static method", "    def _pp_broadcast", "    @staticmethod\n    def _pp_broadcast"),
        Alteration("an opaque decorator", "    @telling", "    @opaque"),
        Alteration("a telling decorator", "    def _update_states", "    @telling\n    def _update_states"),
        Alteration("no base", "class Runner(Mixin)", "class Runner"),
        Alteration("no update", "_update_states", "_refresh"),
        Alteration("state of V2 too", "self.discard", "self.req_states = self.discard"),
    ],
    "V2": [
        Alteration("no receive", "    def receive", "    def take"),
        Alteration("another parameter", "(self, sampled_token_ids,", "(self, tokens,"),
        Alteration("no mask rule", "def compute_need_sampled_mask", "def compute_mask"),
        Alteration("another parameter of the rule", "compute_need_sampled_mask(input_batch):", "compute_need_sampled_mask(b):"),
        Alteration("no drafts", "broadcast_drafts", "send_drafts"),
        Alteration("no queue", "get_prev_sampled_outputs", "get_outputs"),
        Alteration("no state", "req_states", "states"),
        Alteration("another update", "update_requests", "update_states"),
        Alteration("unpadded", "distributed.pad(sampled_token_ids, self.max_sample_len)", "sampled_token_ids"),
        Alteration("another sender", ".contiguous()", ".clone()"),
        Alteration("agreed width", "self.max_sample_len)", "self._sample_len(1))"),
    ],
}  # fmt: skip


def source(text: str) -> SourceSubject:
    """The runner in a text."""
    return SourceSubject(SourceTree({"lookalike": text}.get), "lookalike", "Runner")


def states(subject: object) -> dict[str, HookState]:
    """The state of each hook."""
    return {point.name: targets.probe(subject, point).state for point in targets.points_of(subject)}


@pytest.mark.parametrize(
    ("text", "points"),
    [(V1, targets.V1_POINTS), (V2, targets.V2_HANDLER_POINTS), (V2_MODULE, targets.V2_MODULE_POINTS)],
)
def test_each_kind_of_runner_has_its_points(text, points, tmp_path):
    """A runner's table is known by what it keeps, and on code as known every hook is on, in the text, the class and the runner."""
    runner_class = importer(tmp_path)(text).Runner
    for subject in (source(text), runner_class, runner_class()):
        assert targets.points_of(subject) is points
        assert set(states(subject).values()) == {HookState.ON}


@pytest.mark.parametrize(("kind", "text"), [("V1", V1), ("V2", V2)])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_text_class_and_runner_are_judged_alike(kind, text, data, tmp_path_factory):
    """Whatever a fork altered, source text, class and live runner get the same verdicts with the same reasons."""
    altered = alter(text, data.draw(st.lists(st.sampled_from(ALTERATIONS[kind]), unique_by=str)))
    runner_class = importer(tmp_path_factory.mktemp("text"))(altered).Runner
    judged = [
        (
            targets.points_of(subject),
            [targets.probe(subject, point) for point in targets.points_of(subject)],
            targets.probe_mask(subject),
            width_rule(subject),
        )
        for subject in (source(altered), runner_class, runner_class())
    ]
    assert judged[0] == judged[1] == judged[2]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (V1, None),
        (V2, WidthRule(Width.PADDED, Width.PADDED)),
        (alter(V2, [ALTERATIONS["V2"][8]]), WidthRule(Width.AS_SAMPLED, Width.PADDED)),
        (alter(V2, ALTERATIONS["V2"][8:10]), WidthRule(Width.UNKNOWN, Width.PADDED)),
        (alter(V2, [ALTERATIONS["V2"][10]]), WidthRule(Width.AGREED, Width.AGREED)),
        (alter(V2, [ALTERATIONS["V2"][0]]), WidthRule(Width.PADDED, Width.UNKNOWN)),
        (V2_MODULE, WidthRule(Width.AS_SAMPLED, Width.PADDED)),
    ],
)
def test_widths_are_read_from_the_names_in_the_code(text, rule):
    """Each way to settle the width is told by its names; other code is unknown, and a difference is then not claimed."""
    found = width_rule(source(text))
    assert found == rule
    if found is not None:
        known = Width.UNKNOWN not in (found.sender, found.receiver)
        assert found.differs == ((found.sender != found.receiver) if known else None)


def test_wrappers_go_where_the_code_looks_the_name_up(tmp_path):
    """A runner's method is wrapped on the runner, a handler's on the handler, and a function in the module that calls it."""
    load = importer(tmp_path)
    module, older = load(V2), load(V2_MODULE)
    runner = module.Runner()
    found = {point.name: targets.find(runner, point) for point in targets.V2_HANDLER_POINTS}
    assert found["execute_model"] == targets.Found(runner, "execute_model")
    assert found["PPHandler.receive"] == targets.Found(runner.pp_handler, "receive")
    assert found["compute_need_sampled_mask"] == targets.Found(module, "compute_need_sampled_mask")
    runner = older.Runner()
    found = {point.name: targets.find(runner, point) for point in targets.V2_MODULE_POINTS}
    assert found["pp_receive"] == targets.Found(older, "pp_receive")
    assert found["update_requests"] == targets.Found(runner, "update_states")


def test_a_subclass_elsewhere_is_hooked_where_its_base_calls(tmp_path):
    """A fork that imports the function too, in a module of its own, does not draw the wrapper away from who calls it."""
    load = importer(tmp_path)
    base = load(V2_MODULE)
    fork = load(f"from {base.__name__} import Runner as Base, pp_receive\n\nclass Runner(Base):\n    pass\n")
    (point,) = [point for point in targets.V2_MODULE_POINTS if point.name == "pp_receive"]
    assert targets.find(fork.Runner(), point) == targets.Found(base, "pp_receive")
    text = {"fork": "from base import Runner as Base, pp_receive\n\nclass Runner(Base):\n    pass\n", "base": V2_MODULE}
    subject = SourceSubject(SourceTree(text.get), "fork", "Runner")
    assert targets.points_of(subject) is targets.V2_MODULE_POINTS
    assert set(states(subject).values()) == {HookState.ON}


def test_one_pipeline_rank_has_nothing_to_broadcast(tmp_path):
    """A V2 runner without a handler lacks the handler's hooks for a good reason, which is said, and nothing is found there."""
    runner = importer(tmp_path)(V2).Runner()
    runner.pp_handler = None
    reports = {point.name: targets.probe(runner, point) for point in targets.points_of(runner)}
    absent = {name for name, report in reports.items() if report.state == HookState.ABSENT}
    assert absent == {point.name for point in targets.V2_HANDLER_POINTS if point.owner is not targets.Owner.RUNNER}
    assert all("one pipeline rank" in reports[name].reason for name in absent)
    (receive,) = [point for point in targets.V2_HANDLER_POINTS if point.name == "PPHandler.receive"]
    assert targets.find(runner, receive) is None


def test_a_handler_of_another_name_is_seen_by_the_live_runner(tmp_path):
    """Before there is a runner its handler is known by its class's name only, and is told as missing; the worker sees more."""
    text = V2.replace("PPHandler", "Pipeline")
    runner_class = importer(tmp_path)(text).Runner
    for subject in (source(text), runner_class):
        assert states(subject)["PPHandler.receive"] == HookState.ABSENT
    assert set(states(runner_class()).values()) == {HookState.ON}


def test_a_probe_evaluates_no_property(tmp_path):
    """A property in the place of a method is off, and is not run to find that out."""
    text = V1.replace(
        "    def sample_tokens(self, grammar_output):\n        return grammar_output",
        "    @property\n    def sample_tokens(self):\n        raise RuntimeError",
    )
    runner = importer(tmp_path)(text).Runner()
    assert states(runner)["sample_tokens"] == HookState.OFF


def test_only_a_live_runner_can_be_hooked(tmp_path):
    """To ask a class for the place of a wrapper is a mistake of the caller."""
    with pytest.raises(TypeError, match="live runner"):
        targets.find(importer(tmp_path)(V1).Runner, targets.V1_POINTS[0])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "from torch import thing\n" + V1.replace("    @telling", "    @thing"),
            "decorated with thing, which cannot be read",
        ),
        (V1.replace("    @telling", "    @torch.inference_mode()"), ""),
    ],
)
def test_a_decorator_from_elsewhere_is_not_guessed_at(text, reason):
    """In text, a decorator whose source is not there leaves a method's parameters unknown, but for those of PyTorch that are known."""
    report = targets.probe(source(text), targets.V1_POINTS[0])
    assert (report.state == HookState.OFF) == bool(reason)
    assert reason in report.reason


def test_text_without_the_class_is_an_error():
    """To look for a class that is not there is told by its name."""
    with pytest.raises(LookupError, match="no class Runner"):
        source("x = 1\n")
