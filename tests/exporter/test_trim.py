"""
The trim fix on small modules: what it changes, and everything that it refuses to touch.
"""

import functools
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loading import load_module

from rankscope_exporter.contract import MitigationState
from rankscope_exporter.mitigations.trim import TrimFix, fix_of

METHOD = """
    import collections

    class Runner:
        def update(self, req_state, num_output_tokens, is_last_rank):
            drafts = req_state.prev_num_draft_len
            req_state.output_token_ids.extend([-1] * drafts)
            if not is_last_rank:
                collections.OrderedDict()
            elif num_output_tokens < len(req_state.output_token_ids):
                del req_state.output_token_ids[num_output_tokens:]
            return len(req_state.output_token_ids)
"""

SECOND_TRIM = """\
            if num_output_tokens < len(req_state.output_token_ids):
                del req_state.output_token_ids[num_output_tokens:]
"""

Load = Callable[[str], Any]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """
    Writes a module's source into a file and imports it.
    """

    def load_source(source: str) -> Any:
        path = tmp_path / f"module_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(textwrap.dedent(source))
        return load_module(path, path.stem)

    return load_source


def length_after(module: Any, *, is_last_rank: bool) -> int:
    state = SimpleNamespace(prev_num_draft_len=3, output_token_ids=[1, 2, 3])
    return int(module.Runner().update(state, 4, is_last_rank))


def test_the_fix_trims_on_every_rank_and_is_undone(load):
    """Off, only the last rank trims; on, every rank does; off again, the very code object of before is back."""
    module = load(METHOD)
    original = module.Runner.update.__code__
    fix = TrimFix(module.Runner.update)
    assert fix.state == MitigationState.AVAILABLE
    assert (length_after(module, is_last_rank=False), length_after(module, is_last_rank=True)) == (6, 4)
    assert fix.set(applied=True) == fix.set(applied=True) == MitigationState.APPLIED
    assert (length_after(module, is_last_rank=False), length_after(module, is_last_rank=True)) == (4, 4)
    assert fix.set(applied=False) == MitigationState.AVAILABLE
    assert module.Runner.update.__code__ is original


def test_references_that_exist_already_see_the_fix(load):
    """A bound method taken before, and a wrapper around it, run the fixed code."""
    module = load(METHOD)
    bound = module.Runner().update
    TrimFix(module.Runner.update).set(applied=True)
    assert bound(SimpleNamespace(prev_num_draft_len=3, output_token_ids=[]), 1, False) == 1


def test_a_fix_applied_earlier_is_recognised(load):
    """In a process that inherited the fixed code, the fix stands as applied and can be undone."""
    module = load(METHOD)
    TrimFix(module.Runner.update).set(applied=True)
    again = TrimFix(module.Runner.update)
    assert again.state == MitigationState.APPLIED
    assert again.set(applied=False) == MitigationState.AVAILABLE
    assert length_after(module, is_last_rank=False) == 6


def test_source_that_is_fixed_already_needs_nothing(load):
    """An `if` in place of the `elif` is not applicable."""
    fix = TrimFix(load(METHOD.replace("elif num", "if num")).Runner.update)
    assert fix.state == MitigationState.NOT_APPLICABLE
    assert "every rank already" in fix.reason


def test_a_release_that_awaits_accepted_counts_needs_nothing(load):
    """Where the extend is not optimistic there is nothing to mitigate."""
    fix = TrimFix(
        load(METHOD.replace("req_state.prev_num_draft_len", "valid_sampled_token_count[0] - 1")).Runner.update
    )
    assert fix.state == MitigationState.NOT_APPLICABLE
    assert "awaited" in fix.reason


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("elif num_output_tokens < len(req_state.output_token_ids):", "elif num_output_tokens == 0:", "0 trims"),
        ("del req_state.output_token_ids[num_output_tokens:]", "del req_state.output_token_ids[-1:]", "0 trims"),
        ("output_token_ids", "output_tokens", "0 trims"),
        (
            "            return len(",
            SECOND_TRIM + "            return len(",
            "2 trims",
        ),
    ],
)
def test_other_code_is_left_alone(load, old, new, reason):
    """A trim that is not there, not alone, or not as known is unknown code: nothing is changed, and the reason is said."""
    assert old in METHOD
    module = load(METHOD.replace(old, new))
    code = module.Runner.update.__code__
    fix = TrimFix(module.Runner.update)
    assert fix.state == MitigationState.UNKNOWN_CODE
    assert reason in fix.reason
    assert fix.set(applied=True) == MitigationState.UNKNOWN_CODE
    assert module.Runner.update.__code__ is code


@pytest.mark.parametrize(
    ("old", "new", "condition"),
    [
        ("if not is_last_rank", "if is_last_rank", "is_last_rank"),
        ("if not is_last_rank", "if not self.is_tail", "not self.is_tail"),
        (
            "if not is_last_rank:",
            "if req_state is None:\n                pass\n            elif not is_last_rank:",
            "req_state is None; not is_last_rank",
        ),
    ],
)
def test_a_trim_that_hangs_on_something_else_is_unknown(load, old, new, condition):
    """Whether a trim behind another condition than the last rank is reached everywhere cannot be told: never green."""
    fix = TrimFix(load(METHOD.replace(old, new)).Runner.update)
    assert fix.state == MitigationState.UNKNOWN_CODE
    assert fix.reason.endswith(f": {condition}")


def test_growth_that_is_not_known_is_unknown(load):
    """Where the placeholders are counted by something unknown, nobody can say that there is nothing to mitigate."""
    fix = TrimFix(load(METHOD.replace("prev_num_draft_len", "prev_drafts")).Runner.update)
    assert fix.state == MitigationState.UNKNOWN_CODE
    assert "grow" in fix.reason


def test_a_decorated_function_is_left_alone(load):
    """A decorator may depend on the code it was given."""
    source = METHOD.replace("        def update", "        @staticmethod_like\n        def update").replace(
        "class Runner", "def staticmethod_like(f):\n        return f\n\n    class Runner"
    )
    fix = TrimFix(load(source).Runner.update)
    assert (fix.state, fix.reason) == (MitigationState.UNKNOWN_CODE, "the function is decorated")


def test_a_closure_is_left_alone(load):
    """A function with free variables is unknown code."""
    body = textwrap.indent(textwrap.dedent(METHOD), "    ").replace("is_last_rank:\n", "is_last_rank and gate:\n")
    source = f"def make(gate):\n{body}\n    return Runner\n\nRunner = make(True)\n"
    fix = TrimFix(load(source).Runner.update)
    assert fix.state == MitigationState.UNKNOWN_CODE


def test_a_file_that_changed_since_it_was_loaded_is_not_trusted(load):
    """If the file on disk does not compile to the loaded bytecode, nothing is touched."""
    module = load(METHOD)
    path = Path(module.__file__)
    path.write_text(path.read_text().replace("collections.OrderedDict()", "collections.Counter()"))
    fix = TrimFix(module.Runner.update)
    assert (fix.state, fix.reason) == (
        MitigationState.UNKNOWN_CODE,
        "the file on disk does not compile to the loaded bytecode",
    )


@pytest.mark.parametrize("thing", [len, "text", SimpleNamespace()])
def test_what_is_no_python_function_is_unknown(thing):
    """A builtin or an object without code is unknown, not an error."""
    assert TrimFix(thing).state == MitigationState.UNKNOWN_CODE


def test_a_function_without_source_is_unknown():
    """Code that came from no file is unknown, and the reason says so."""
    namespace: dict[str, Any] = {}
    exec(compile(textwrap.dedent(METHOD), "<nowhere>", "exec"), namespace)
    fix = TrimFix(namespace["Runner"].update)
    assert fix.state == MitigationState.UNKNOWN_CODE
    assert "no source" in fix.reason


RUNNER = METHOD.replace("def update(", "def _update_states(")


def subclass(body: str, name: str = "Fork", base: str = "Runner") -> str:
    """A class after `RUNNER`, with a body of its own."""
    return textwrap.dedent(RUNNER) + f"\nclass {name}({base}):\n" + textwrap.indent(textwrap.dedent(body), "    ")


def test_a_subclass_that_calls_its_base_leads_to_the_trim(load):
    """An override without a trim that calls `super()` is passed over: the base's code is what is changed, and it is named."""
    module = load(
        subclass("def _update_states(self, *args):\n    return super()._update_states(*args)\n")
        + "class Deeper(Fork):\n    def _update_states(self, *args):\n        return Fork._update_states(self, *args)\n"
    )
    fix = fix_of(module.Deeper)
    assert (fix.state, fix.owner) == (MitigationState.AVAILABLE, "Runner")
    fix.set(applied=True)
    state = SimpleNamespace(prev_num_draft_len=3, output_token_ids=[1, 2, 3])
    assert module.Deeper()._update_states(state, 4, False) == 4


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("def _update_states(self, *args):\n    return 0\n", "0 trims"),
        (
            """
            def _update_states(self, *args):
                tokens = args[0]
                if 1 < len(tokens.output_token_ids):
                    del tokens.output_token_ids[1:]
                return super()._update_states(*args)
            """,
            "it trims, and calls the next class's too",
        ),
        ("_update_states = len\n", "not a Python function"),
    ],
)
def test_a_subclass_that_does_not_lead_to_the_trim_is_unknown(load, body, reason):
    """An override that stands in the trim's place, or trims besides, makes the code unknown: the base is left alone."""
    module = load(subclass(body))
    code = module.Runner._update_states.__code__
    fix = fix_of(module.Fork)
    assert (fix.state, fix.owner) == (MitigationState.UNKNOWN_CODE, "Fork")
    assert reason in fix.reason
    assert fix.set(applied=True) == MitigationState.UNKNOWN_CODE
    assert module.Runner._update_states.__code__ is code


def test_the_path_to_unknown_code_is_told(load):
    """Where the base that a subclass calls is not known, the reason names both."""
    module = load(
        subclass("def _update_states(self, *args):\n    return super()._update_states(*args)\n").replace(
            "elif num_output_tokens", "elif num_output_tokens == 1 or num_output_tokens"
        )
    )
    fix = fix_of(module.Fork)
    assert fix.state == MitigationState.UNKNOWN_CODE
    assert "Runner._update_states, which Fork calls: 0 trims" in fix.reason


def test_a_runner_without_the_method_is_unknown():
    """No `_update_states` anywhere is unknown code, not an error."""
    assert (fix_of(int).state, fix_of(int).reason) == (MitigationState.UNKNOWN_CODE, "there is no _update_states")


def wraps_around(method: Any) -> Any:
    """What another plugin would put around a method."""

    @functools.wraps(method)
    def around(*args: Any) -> Any:
        return method(*args)

    return around


def test_a_method_under_a_wrapper_of_another_plugin_is_reached(load):
    """A wrapper that tells what it wraps, and holds it, hides nothing; what it calls is changed."""
    module = load(RUNNER)
    module.Runner._update_states = wraps_around(wraps_around(module.Runner._update_states))
    fix = fix_of(module.Runner)
    assert fix.set(applied=True) == MitigationState.APPLIED
    state = SimpleNamespace(prev_num_draft_len=3, output_token_ids=[1, 2, 3])
    assert module.Runner()._update_states(state, 4, False) == 4


def test_a_wrapt_method_is_reached(load):
    """A wrapt proxy tells what it wraps."""
    wrapt = pytest.importorskip("wrapt", reason="wrapt is not installed here: pip install wrapt")
    module = load(RUNNER)
    wrapt.wrap_function_wrapper(
        module, "Runner._update_states", lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs)
    )
    fix = fix_of(module.Runner)
    assert fix.set(applied=True) == MitigationState.APPLIED
    state = SimpleNamespace(prev_num_draft_len=3, output_token_ids=[1, 2, 3])
    assert module.Runner()._update_states(state, 4, False) == 4


def test_a_method_under_an_opaque_wrapper_is_unknown(load):
    """A wrapper that does not tell what it wraps is what is examined, and it has no trim."""
    module = load(RUNNER)
    original = module.Runner._update_states
    module.Runner._update_states = lambda *args: original(*args) or 0
    fix = fix_of(module.Runner)
    assert fix.state == MitigationState.UNKNOWN_CODE
    assert "a wrapper that does not tell what it wraps" in fix.reason


def test_a_replacement_that_only_claims_to_wrap_is_unknown(load):
    """A function with `functools.wraps` that cannot come to the original: changing the original would change nothing."""
    module = load(RUNNER)
    code = module.Runner._update_states.__code__

    @functools.wraps(module.Runner._update_states)
    def replacement(*args: Any) -> int:
        return 0

    module.Runner._update_states = replacement
    fix = fix_of(module.Runner)
    assert fix.state == MitigationState.UNKNOWN_CODE
    assert "does not hold it" in fix.reason
    assert fix.set(applied=True) == MitigationState.UNKNOWN_CODE
    assert replacement.__wrapped__.__code__ is code
