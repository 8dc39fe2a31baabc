"""
`python -m rankscope_lab.matrix`: fetch vLLM releases, examine their source text, show the table.

Exit status: 0 well, 1 a release could not be fetched or read (it is named, with what to do), 2 called wrongly,
3 something in a release is not known to Rankscope (it is named).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rankscope_lab.environment import REPOSITORY
from rankscope_lab.matrix import document
from rankscope_lab.matrix.releases import RELEASES, FetchError, Progress, fetch_all
from rankscope_lab.matrix.rows import Row, examine_release

FAILED, MISUSED, UNKNOWN = 1, 2, 3


def build_parser() -> argparse.ArgumentParser:
    """
    The command line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m rankscope_lab.matrix",
        description="What Rankscope's hooks and its trim fix find in vLLM releases, read from their source text.",
        epilog="The first run fetches 2 GB of wheels, one after another, and keeps 8 MB of them; later runs fetch what is new.",
    )
    some = parser.add_mutually_exclusive_group()
    some.add_argument(
        "--releases", nargs="+", metavar="X.Y.Z", choices=list(RELEASES), default=list(RELEASES), help="only these"
    )
    some.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="put the table of all releases between the marks of this document too",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with every hook and its reason")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", default=REPOSITORY / "var" / "matrix",
        help="where the text of releases is kept (var/matrix in the repository)",
    )  # fmt: skip
    return parser


def examine(releases: Sequence[str], cache: Path, progress: Progress) -> list[Row]:
    """
    The rows of releases, in the order asked for.
    """
    rows = []
    for release, found in fetch_all(releases, cache, progress).items():
        if isinstance(found, FetchError):
            rows.append(Row(release=release, problem=str(found)))
        else:
            progress(f"{release}: examining")
            rows.append(examine_release(release, found.read))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Show the matrix; the exit status.
    """
    options = build_parser().parse_args(arguments)
    rows = examine(options.releases, options.cache, _say)
    if options.json:
        print(json.dumps([row.model_dump(mode="json") for row in rows], indent=2))
    else:
        print(document.render_table(rows), end="")
    for line in document.explain(rows):
        _say(line)
    if any(row.problem for row in rows):
        if options.write is not None:
            _say(f"{options.write} stays as it is, because not all releases were examined")
        return FAILED
    if options.write is not None:
        try:
            text = options.write.read_text(encoding="utf-8")
            options.write.write_text(document.put_into(text, document.render_table(rows)), encoding="utf-8")
        except (OSError, ValueError) as error:
            _say(f"{options.write} was not written: {error}")
            return MISUSED
        _say(f"{options.write} is written")
    return UNKNOWN if any(row.unknown for row in rows) else 0


def _say(text: str) -> None:
    print(f"matrix: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
