"""
The documents promise nothing that is not there: commands, links, settings, decisions.
"""

import contextlib
import enum
import functools
import io
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings
from typer.testing import CliRunner

from rankscope_exporter import cli as exporter_cli
from rankscope_exporter.contract import http
from rankscope_exporter.contract.metrics import METRICS
from rankscope_exporter.serve.settings import ServeSettings
from rankscope_exporter.settings import WorkerSettings
from rankscope_server.alerting.desk import AlertDesk
from rankscope_server.alerting.telemetry import AlertCollector
from rankscope_server.cli import cli as server_cli
from rankscope_server.control.board import Board
from rankscope_server.control.reports import Reports
from rankscope_server.incidents.desk import IncidentDesk
from rankscope_server.ingest.clock import SystemClock
from rankscope_server.ingest.tracks import Fleet
from rankscope_server.settings import ServerSettings
from rankscope_server.telemetry import ServerCollector

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *(ROOT / place / "README.md" for place in ("exporter", "server", "lab")),
    ]
)
ADRS = sorted((ROOT / "docs" / "adr").glob("*.md"))
CHANGES = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def relative(path: Path) -> str:
    """A document's name as tests show it."""
    return str(path.relative_to(ROOT))


def prose(text: str) -> str:
    """A document without its fenced code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def commands(path: Path) -> Iterator[str]:
    """Every command that a document shows: lines of shell blocks, and code in sentences that begins with a program of ours."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"^    (make .*)$", text, flags=re.MULTILINE)
    lines += re.findall(r"`((?:make|rankscope|rankscope-exporter|\.venv/bin/rankscope) [^`\n]+)`", prose(text))
    without_comments = (line.partition("  #")[0].strip() for line in lines)
    yield from (line for line in without_comments if line)


def words_of(command: str) -> list[str]:
    """The words of a command."""
    return shlex.split(command.strip("()"))


ALL_COMMANDS = sorted({(relative(path), command) for path in DOCUMENTS for command in commands(path)})


def of_program(*programs: str) -> list[tuple[str, str]]:
    """The documented commands that begin with one of these programs."""
    return [(path, command) for path, command in ALL_COMMANDS if Path(words_of(command)[0]).name in programs]


@functools.cache
def help_of(program: str, *command: str) -> str:
    """What `--help` of a command prints; it has to succeed."""
    assert program in {point.name for point in entry_points(group="console_scripts")}
    if program == "rankscope":
        result = CliRunner().invoke(server_cli, [*command, "--help"], terminal_width=200)
        assert result.exit_code == 0, result.output
        return result.output
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
        exporter_cli.main([*command, "--help"])
    assert ended.value.code == 0, printed.getvalue()
    return printed.getvalue()


def test_readme_shows_commands() -> None:
    """The readers of commands below find those of the README, so an empty list is no success."""
    shown = [command for path, command in ALL_COMMANDS if path == "README.md"]
    assert any(command.startswith("make run") for command in shown)
    assert any(command.startswith("make test") for command in shown)
    assert any("serve --target" in command for command in shown)


@pytest.mark.parametrize(("path", "command"), of_program("make"))
def test_make_target_exists(path: str, command: str) -> None:
    """A `make` command that a document shows can be made."""
    done = subprocess.run(["make", "--dry-run", *words_of(command)[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 0, f"{path}: {done.stderr}"


@pytest.mark.parametrize(("path", "command"), of_program("rankscope", "rankscope-exporter"))
def test_command_and_flags_exist(path: str, command: str) -> None:
    """A command of ours that a document shows exists, with every flag that it is shown with."""
    program, *rest = words_of(command)
    program = Path(program).name
    own = rest[: rest.index("--")] if "--" in rest else rest
    if own[0].startswith("-"):
        known, flags = help_of(program), own
    else:
        depth = 2 if "\nCommands:\n" in help_of(program, own[0]) else 1  # a command may be one of a group
        known, flags = help_of(program, *own[:depth]), own[depth:]
    missing = [flag for flag in flags if flag.startswith("--") and flag.partition("=")[0] not in known]
    assert not missing, f"{path}: `{command}`: no {missing}"


@pytest.mark.parametrize(("path", "command"), [shown for shown in of_program("pip") if shown[0] == "README.md"])
def test_pip_installs_what_is_there(path: str, command: str) -> None:
    """What the README has pip install is a distribution in this repository: nothing of ours is on an index."""
    for word in words_of(command)[2:]:
        if not word.startswith("-"):
            assert word.startswith("./"), f"{path}: {word} is not a path of this repository"
            assert (ROOT / word / "pyproject.toml").is_file(), f"{path}: {word}"


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(path.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_relative_links_resolve(path: Path) -> None:
    """Every link to another file, picture or heading leads to one."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_decisions_are_numbered_without_gaps() -> None:
    """Decisions count from 1, and the number in the file's name is that of its title."""
    names = [int(path.name[:4]) for path in ADRS]
    titles = [int(path.read_text(encoding="utf-8").removeprefix("# ").partition(".")[0]) for path in ADRS]
    assert names == titles == list(range(1, len(ADRS) + 1))


@pytest.mark.parametrize("path", ADRS, ids=relative)
def test_decision_has_its_parts(path: Path) -> None:
    """A decision says its status, context, decision and consequences, in this order, and the architecture names it."""
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^Status: (proposed|accepted|superseded by \[\d+\]\(.+\))$", text, flags=re.MULTILINE)
    assert re.findall(r"^## (.+)$", text, flags=re.MULTILINE) == ["Context", "Decision", "Consequences"]
    assert f"](adr/{path.name})" in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_changelog_parses() -> None:
    """The changelog has versions in descending order, each with known kinds of changes, each with entries."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    heads = [section.splitlines()[0] for section in sections]
    released = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d{2}-\d{2}", head) for head in heads[1:]]
    assert heads[0] == "[Unreleased]"
    assert all(released), heads
    numbers = [tuple(map(int, match.groups())) for match in released if match]
    assert numbers == sorted(numbers, reverse=True)
    for section in sections:
        for kind, *entries in re.findall(r"^### (.+)\n((?:.|\n)*?)(?=^### |\Z)", section, flags=re.MULTILINE):
            assert kind in CHANGES
            assert re.search(r"^- \S", "".join(entries), flags=re.MULTILINE), kind


TABLES: list[tuple[type[BaseSettings], str, str, set[str]]] = [
    (WorkerSettings, "docs/exporter.md", "### In the environment of vLLM", {"fault_injection"}),  # for tests only
    (ServeSettings, "docs/exporter.md", "### Of the exporter process", set()),
    (ServerSettings, "README.md", "The server, where", set()),
]


def shown_default(default: object) -> str:
    """A default as tables show it, empty where it is no plain value or says nothing."""
    if isinstance(default, enum.Enum):
        default = default.value
    if isinstance(default, (bool, int, float)):
        return f"`{default:g}`"
    return f"`{default}`" if isinstance(default, (str, Path)) and default != "" else ""


@pytest.mark.parametrize(
    ("settings", "page", "heading", "untold"), TABLES, ids=lambda value: getattr(value, "__name__", "")
)
def test_settings_are_all_told(settings: type[BaseSettings], page: str, heading: str, untold: set[str]) -> None:
    """The tables have every setting, by the name of its variable, with its default where that is a plain value, and its meaning."""
    section = (ROOT / page).read_text(encoding="utf-8").partition(f"\n{heading}")[2]
    table = section[: section.index("\n\n", section.index("| ---"))]
    rows = {
        name: told for name, told, _ in re.findall(r"^\| `(\w+)` \| (.*?) ?\| (\S.+) \|$", table, flags=re.MULTILINE)
    }
    prefix = settings.model_config["env_prefix"]
    fields = {f"{prefix}{name.upper()}": field for name, field in settings.model_fields.items() if name not in untold}
    assert set(rows) == set(fields)
    for variable, field in fields.items():
        if told := shown_default(field.default):
            assert rows[variable] == told, variable


@functools.cache
def server_metrics() -> set[str]:
    """The server's own metrics, as they are scraped."""
    clock = SystemClock()
    desk = AlertDesk((), clock, deployments=())
    board = Board(Fleet(), {}, clock, Reports(IncidentDesk(clock, retention_seconds=1.0), desk, ()))
    families = [*AlertCollector(desk).collect(), *ServerCollector(board, ()).collect()]
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_metrics_that_are_named_exist(path: Path) -> None:
    """Every metric that a document names is served under that name; one that ends in `_` stands for those that begin so."""
    known = {name for spec in METRICS for name in (spec.name, *spec.sample_names)} | server_metrics()
    packages = {"rankscope_exporter", "rankscope_server", "rankscope_lab"}
    named = set(re.findall(r"\brankscope_[a-z_]+", path.read_text(encoding="utf-8"))) - packages
    beginnings = {name for name in named if name.endswith("_") and any(other.startswith(name) for other in known)}
    assert named - beginnings <= known


def test_architecture_tells_every_path_of_the_exporter() -> None:
    """The exporter's paths in the architecture are those of the contract."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `(?:PUT )?(/\S+)` \|", text, flags=re.MULTILINE))
    assert told == {value for name, value in vars(http).items() if name.endswith("_PATH")}
