"""
The trim fix on vLLM's loaded `_update_states`, and its refusals on copies of vLLM's source that were altered.
"""

import functools
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rankscope_exporter.contract.words import MitigationState
from rankscope_exporter.mitigations.trim import TrimFix, same_code

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]

GATED = "            elif num_output_tokens < len(req_state.output_token_ids):\n"
DEFINITION = '    def _update_states(self, scheduler_output: "SchedulerOutput") -> Callable | None:\n'
BEHIND = "            # Update the block IDs.\n"
DELETION = "                del req_state.output_token_ids[num_output_tokens:]\n"


def test_available_applied_and_reverted(harness: ModuleType, fix: TrimFix) -> None:
    """
    It is available, applies to the function in place, more than once without harm, and gives the very same code back.
    """
    function = harness.GPUModelRunner._update_states
    original = function.__code__
    assert (fix.state, fix.reason) == (MitigationState.AVAILABLE, "")

    for _ in range(2):
        assert fix.set(applied=True) is MitigationState.APPLIED
        assert harness.GPUModelRunner._update_states is function
        assert function.__code__ is not original
    for _ in range(2):
        assert fix.set(applied=False) is MitigationState.AVAILABLE
        assert function.__code__ is original


def test_same_bytecode_as_the_edited_source(harness: ModuleType, fix: TrimFix, tmp_path: Path) -> None:
    """
    What is swapped in is what a person's edit of the source compiles to, and not what the source compiles to.
    """
    function = harness.GPUModelRunner._update_states
    original = function.__code__
    fix.set(applied=True)

    assert same_code(function.__code__, harness.edited_source(tmp_path).__code__)
    assert not same_code(function.__code__, original)


def test_found_applied_by_someone_else(harness: ModuleType, fix: TrimFix) -> None:
    """
    A second look at a function that is fixed already says applied, and can take it back.
    """
    function = harness.GPUModelRunner._update_states
    original = function.__code__
    fix.set(applied=True)
    second = TrimFix(function)
    assert second.state is MitigationState.APPLIED

    assert second.set(applied=False) is MitigationState.AVAILABLE
    assert same_code(function.__code__, original)


def test_wrappers_and_bound_methods_made_before_see_it(harness: ModuleType, config: Any, fix: TrimFix) -> None:
    """
    A wrapper and a bound method from before the swap run the fixed code: ranks that call through them stop drifting.
    """
    function = harness.GPUModelRunner._update_states

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    last, wrapped, bound = (harness.Rank(config, function, last=is_last) for is_last in (True, False, False))
    wrapped.update = wrapper
    method = bound.runner._update_states
    bound.update = lambda runner, output: method(output)
    steps = harness.Engine(config, 3, 0.25, [last], [wrapped, bound]).steps(120)

    for _, one, other in steps:
        if any(one.drift.values()) and any(other.drift.values()):
            break
    else:
        pytest.fail("no drift before the fix")
    assert TrimFix(wrapper).set(applied=True) is MitigationState.APPLIED
    after = list(steps)

    assert len(after) > 20
    assert not any(any(view.drift.values()) for views in after for view in views)


def altered(harness: ModuleType, directory: Path, old: str, new: str) -> types.FunctionType:
    """
    `_update_states` as loaded from a copy of vLLM's file in which one place reads differently.
    """
    return harness.on_module(harness.compiled(harness.edit(old, new), directory))


def test_not_applicable_where_the_source_has_the_fix(harness: ModuleType, tmp_path: Path) -> None:
    """
    A release that trims on every rank needs nothing, and nothing is done to it.
    """
    function = altered(harness, tmp_path, GATED, GATED.replace("elif", "if"))
    original = function.__code__
    fix = TrimFix(function)
    assert fix.state is MitigationState.NOT_APPLICABLE

    assert fix.set(applied=True) is MitigationState.NOT_APPLICABLE
    assert function.__code__ is original


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        pytest.param(BEHIND, GATED.replace("elif", "if") + DELETION + BEHIND, "2 trims", id="a second trim"),
        pytest.param(DELETION, DELETION.replace("del ", "trimmed = "), "0 trims", id="no trim"),
        pytest.param(DEFINITION, "    @torch.inference_mode()\n" + DEFINITION, "decorated", id="a decorator"),
        pytest.param(BEHIND, "            super()\n" + BEHIND, "closure", id="a closure"),
    ],
)
def test_refuses_code_that_it_does_not_know(
    harness: ModuleType, tmp_path: Path, old: str, new: str, reason: str
) -> None:
    """
    Anything else than the one gated trim of a plain function is unknown code: the reason says what, and nothing is touched.
    """
    function = altered(harness, tmp_path, old, new)
    original = function.__code__
    fix = TrimFix(function)
    assert fix.state is MitigationState.UNKNOWN_CODE
    assert reason in fix.reason

    assert fix.set(applied=True) is MitigationState.UNKNOWN_CODE
    assert function.__code__ is original


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        pytest.param("[-1] * optimistic_num_accepted", "[-2] * optimistic_num_accepted", "bytecode", id="in place"),
        pytest.param("import functools\n", "import functools\n\n", "no source to compare with", id="lines moved"),
        pytest.param("import functools\n", "import (\n", "no source to compare with", id="no longer Python"),
        pytest.param(None, None, "no source to compare with", id="deleted"),
    ],
)
def test_refuses_where_the_file_is_not_what_was_loaded(
    harness: ModuleType, tmp_path: Path, old: str | None, new: str | None, reason: str
) -> None:
    """
    After an upgrade under a running process the file tells nothing about the code in memory: unknown, and nothing is touched.
    """
    function = altered(harness, tmp_path, GATED, GATED)
    original = function.__code__
    path = Path(original.co_filename)
    assert TrimFix(function).state is MitigationState.AVAILABLE
    if old is None or new is None:
        path.unlink()
    else:
        path.write_text(harness.edit(old, new))
    fix = TrimFix(function)
    assert fix.state is MitigationState.UNKNOWN_CODE
    assert reason in fix.reason

    assert fix.set(applied=True) is MitigationState.UNKNOWN_CODE
    assert function.__code__ is original
