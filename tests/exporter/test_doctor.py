"""
What `doctor` says of an environment.
"""

import json

import pytest

from rankscope_exporter import doctor
from rankscope_exporter.contract import HookState, MitigationState
from rankscope_exporter.contract.http import HookReport, MitigationReport


@pytest.mark.parametrize(
    ("hook", "state", "problem"),
    [
        ("_update_states", HookState.ON, False),
        ("_update_states", HookState.ABSENT, True),
        ("_update_states", HookState.OFF, True),
        ("_is_all_reqs_chunked_prefill", HookState.ABSENT, False),
        ("_is_all_reqs_chunked_prefill", HookState.OFF, True),
    ],
)
def test_a_hook_that_sees_nothing_is_a_problem_unless_its_absence_is_fine(hook, state, problem):
    """Absent code is a problem, except where a release works without it; a failed probe always is."""
    found = doctor.assess_reports([HookReport(hook=hook, state=state, reason="because")], [])
    assert bool(found) == problem
    assert all("because" in text for text in found)


@pytest.mark.parametrize("state", list(MitigationState))
def test_only_unknown_code_is_a_problem_of_the_fix(state):
    """Available, applied and not applicable are fine; unknown code is said, with its reason."""
    found = doctor.assess_reports([], [MitigationReport(mitigation="trim", state=state, reason="2 trims")])
    assert bool(found) == (state == MitigationState.UNKNOWN_CODE)


def test_without_vllm_it_says_where_to_run_it(tmp_path, monkeypatch):
    """Where vLLM is missing the exit code is 1, and the JSON names the remedy."""
    pytest.importorskip("rankscope_server")  # the environment without vLLM
    monkeypatch.setenv("RANKSCOPE_FLIGHT_DIR", str(tmp_path))
    written: list[str] = []
    assert doctor.examine(as_json=True, write=written.append) == 1
    found = json.loads("".join(written))
    assert any("run this with the Python that runs vLLM" in problem for problem in found["problems"])


@pytest.mark.parametrize(
    ("variable", "value"), [("VLLM_PLUGINS", "other"), ("RANKSCOPE_ENABLED", "0"), ("RANKSCOPE_RING_STEPS", "1")]
)
def test_settings_that_are_in_the_way_are_named(monkeypatch, tmp_path, variable, value):
    """An allow-list without Rankscope, an off switch and a bad value are each a problem with the variable's name."""
    monkeypatch.setenv("RANKSCOPE_FLIGHT_DIR", str(tmp_path))
    monkeypatch.setenv(variable, value)
    found = doctor.examine_environment({variable: value})
    assert any(variable in problem for problem in found.problems)


def test_a_flight_directory_that_cannot_be_used_is_a_problem(monkeypatch, tmp_path):
    """A file in the place of the directory is told with the setting to change."""
    (tmp_path / "flight").write_text("")
    monkeypatch.setenv("RANKSCOPE_FLIGHT_DIR", str(tmp_path / "flight"))
    assert any("RANKSCOPE_FLIGHT_DIR" in problem for problem in doctor.examine_environment({}).problems)


def test_it_reads_well():
    """A person gets the versions, a line per hook, the fix, and the problems with their remedies."""
    found = doctor.Examination(
        exporter_version="0.1.0",
        vllm_version="0.27.1",
        python="3.11",
        runner_class="a.Runner",
        hooks=[
            HookReport(hook="execute_model", state=HookState.ON),
            HookReport(hook="x", state=HookState.OFF, reason="why"),
        ],
        mitigations=[MitigationReport(mitigation="trim", state=MitigationState.AVAILABLE)],
        flight_dir="/flight",
        problems=["do this"],
    )
    text = doctor.render(found)
    for part in (
        "vLLM 0.27.1",
        "execute_model  on",
        "off     why",
        "trim           available",
        "/flight",
        "  - do this",
    ):
        assert part in text
