"""
Tells how the exporter reads what `ras_probe.py` printed: one line of JSON per answer, exit status 1 if one is not read.

    python tests/cuda/ras_check.py < what-the-probe-printed
"""

import dataclasses
import json
import re
import sys
from collections.abc import Iterator

from rankscope_exporter.serve.ras_answer import RasError
from rankscope_exporter.serve.ras_json import parse_json
from rankscope_exporter.serve.ras_text import parse_text

ANSWER = re.compile(r"^##### ([^\n]+) \([0-9.]+ s\)\n(.*?)##### end$", re.MULTILINE | re.DOTALL)
QUESTION = re.compile(r"^> (?:VERBOSE )?STATUS\n", re.MULTILINE)


def answers(transcript: str) -> Iterator[tuple[str, str]]:
    """
    Title and body of each answer that the probe got.
    """
    for title, talk in ANSWER.findall(transcript):
        question = QUESTION.search(talk)
        if question:
            yield title, talk[question.end() :]


def read(title: str, body: str) -> dict[str, object]:
    """
    What the exporter makes of an answer.
    """
    try:
        answer = parse_json(body) if "json status" in title else parse_text(body)
    except RasError as error:
        return {"answer": title, "ok": False, "reason": error.reason, "detail": str(error)}
    return {
        "answer": title,
        "ok": True,
        "nccl_version": answer.nccl_version,
        "summary": {" ".join(key): count for key, count in answer.summary.items()},
        "communicators": [dataclasses.asdict(communicator) for communicator in answer.communicators],
    }


def main() -> int:
    """
    Read a transcript from standard input.
    """
    found = [read(title, body) for title, body in answers(sys.stdin.read())]
    for line in found:
        print(json.dumps(line))
    if not found:
        print("there is no answer in this transcript", file=sys.stderr)
    return 0 if found and all(line["ok"] for line in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
