"""
The trim fix on small modules: what it changes, and everything that it refuses to touch.
"""

import importlib.util
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope_exporter.contract import MitigationState
from rankscope_exporter.mitigations.trim import TrimFix

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
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module

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
    fix = TrimFix(load(METHOD.replace("req_state.prev_num_draft_len", "len(req_state.accepted())")).Runner.update)
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


def test_a_gate_on_something_else_needs_nothing_of_ours(load):
    """A trim that hangs on another condition than the last rank is not the one that the fix knows."""
    fix = TrimFix(load(METHOD.replace("if not is_last_rank", "if is_last_rank")).Runner.update)
    assert fix.state == MitigationState.NOT_APPLICABLE


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
