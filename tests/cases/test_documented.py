"""docs/failure-class.md names every case, with the reports that it was made from and the verdict that it must get."""

import re
from pathlib import Path

import pytest
from made_case import Case, make_case

from cases import CASES

PAGE = (Path(__file__).parents[2] / "docs" / "failure-class.md").read_text(encoding="utf-8")
ROWS = {row[1]: (row[2].strip(), row[3].strip()) for row in re.finditer(r"^\| `([^`]+)` \|(.*?)\|(.*?)\|$", PAGE, re.MULTILINE)}  # fmt: skip


def test_every_case_has_a_row() -> None:
    """No case is left out, and none is promised that is not there."""
    assert set(ROWS) == {case.name for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_row_says_what_the_case_does(case: Case) -> None:
    """The reports are those of the case; kinds that must be found are named, and none where nothing must be."""
    reports, verdict = ROWS[case.name]
    kinds = {one.kind.value for made in make_case(case) for one in made.verdicts}

    assert reports == ", ".join(case.reports)
    assert all(kind in verdict for kind in kinds)
    section = PAGE[: PAGE.index(f"| `{case.name}` |")].rpartition("\n## ")[2].splitlines()[0]
    assert (section == "What must not be found") == (not kinds)
