"""
What `doctor` says of an environment.
"""

import json
from typing import Any

import pytest

from rankscope_exporter import doctor
from rankscope_exporter.contract import HookState, MitigationState
from rankscope_exporter.contract.http import HookReport, MitigationReport
from rankscope_exporter.examination import RunnerExamination, WidthReport, assess_reports, assess_runner
from rankscope_exporter.hooks.widths import Width


@pytest.mark.parametrize(
    ("hook", "state", "problem"),
    [
        ("_update_states", HookState.ON, False),
        ("_update_states", HookState.ABSENT, True),
        ("_update_states", HookState.OFF, True),
        ("_is_all_reqs_chunked_prefill", HookState.ABSENT, False),
        ("_is_all_reqs_chunked_prefill", HookState.OFF, True),
        ("PPHandler.broadcast_drafts", HookState.ABSENT, False),
        ("PPHandler.receive", HookState.ABSENT, True),
    ],
)
def test_a_hook_that_sees_nothing_is_a_problem_unless_its_absence_is_fine(hook, state, problem):
    """Absent code is a problem, except where a release works without it; a failed probe always is."""
    found = assess_reports([HookReport(hook=hook, state=state, reason="because")], [])
    assert bool(found) == problem
    assert all("because" in text for text in found)


@pytest.mark.parametrize("state", list(MitigationState))
def test_only_unknown_code_is_a_problem_of_the_fix(state):
    """Available, applied and not applicable are fine; unknown code is said, with its reason."""
    found = assess_reports([], [MitigationReport(mitigation="trim", state=state, reason="2 trims")])
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


def runner_found(**changes: Any) -> RunnerExamination:
    """A V2 runner in which everything can be seen, with `changes`."""
    return RunnerExamination(
        **{
            "runner": "V2",
            "runner_class": "a.Runner",
            "hooks": [HookReport(hook="execute_model", state=HookState.ON)],
            "width": WidthReport(sender=Width.PADDED, receiver=Width.PADDED, differs=False),
            "mitigations": [
                MitigationReport(mitigation="trim", state=MitigationState.NOT_APPLICABLE, reason="no list")
            ],
            "fix_class": "",
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"width": None}, None),
        (
            {"width": WidthReport(sender=Width.UNKNOWN, receiver=Width.PADDED, differs=None)},
            "V2 runner: how wide the sender posts is unknown",
        ),
        ({"runner": "unknown"}, "unknown code"),
        ({"hooks": [HookReport(hook="x", state=HookState.OFF, reason="why")]}, "V2 runner: hook x is off: why"),
    ],
)
def test_what_is_unknown_of_a_runner_is_a_problem(changes, problem):
    """A width that nobody knows, a class of neither kind and a hook that is off are each said, with the runner's name."""
    found = assess_runner(runner_found(**changes))
    assert found == [] if problem is None else problem in found[0]


def test_it_reads_well():
    """A person gets the versions, a table per runner with its width and its fix, how one is chosen, and the problems."""
    found = doctor.Examination(
        exporter_version="0.1.0",
        vllm_version="0.27.1",
        python="3.11",
        hooks=[HookReport(hook="init_device", state=HookState.ON)],
        runners=[
            runner_found(
                runner="V1",
                hooks=[
                    HookReport(hook="execute_model", state=HookState.ON),
                    HookReport(hook="x", state=HookState.OFF, reason="why"),
                ],
                width=None,
                mitigations=[MitigationReport(mitigation="trim", state=MitigationState.AVAILABLE)],
            ),
            runner_found(width=WidthReport(sender=Width.AS_SAMPLED, receiver=Width.PADDED, differs=True)),
        ],
        selection="As configured.",
        flight_dir="/flight",
        problems=["do this"],
    )
    text = doctor.render(found)
    for part in (
        "vLLM 0.27.1",
        "init_device  on",
        "hooks on the V1 runner, a.Runner",
        "execute_model  on",
        "off     why",
        "trim fix: available\n",
        "hooks on the V2 runner",
        "the sender posts as sampled, the receiver k+1; these differ",
        "trim fix: not applicable (no list)",
        "As configured.",
        "/flight",
        "  - do this",
    ):
        assert part in text
