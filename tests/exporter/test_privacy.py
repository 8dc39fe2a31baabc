"""
What is never recorded: prompts and tokens; and request ids where the setting says so.

Stand-in runners go through steps in which everything that must not be seen is distinctive. Then every byte of the
flight files, every answer over HTTP and every line of the log is searched for it.
"""

import io
import itertools
import logging
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from loading import load_module
from starlette.testclient import TestClient

from rankscope_exporter.commands.dump import DumpOptions, dump
from rankscope_exporter.contract import RequestIds
from rankscope_exporter.hooks.install import Installation, install
from rankscope_exporter.serve.app import create_app
from rankscope_exporter.serve.settings import ServeSettings
from rankscope_exporter.settings import WorkerSettings

SUPPORT = Path(__file__).parents[1] / "support"
CONTROL = "the-control-token-of-tests"
PATHS = ("/", "/metrics", "/v1/ranks", "/v1/requests", "/v1/steps", "/healthz", "/nothing-here")

PROMPT = "the quokka ordered seventeen umbrellas"
PROMPT_TOKENS = [1_734_501_121 + 104_729 * n for n in range(8)]
DRAFT_TOKENS = [1_911_234_567, 1_911_344_321, 1_911_454_123]
SAMPLED_TOKENS = [1_600_700_803 + 15_485_863 * n for n in range(10)]
REQUEST_IDS = [f"chatcmpl-wombat-{n}-5f3759df" for n in range(3)]


def traces_of_token(token: int) -> Iterator[bytes]:
    """A token as text, as JSON has it, and as integers of either width and order."""
    yield str(token).encode()
    yield f"{token:x}".encode()
    for layout in ("<i", ">i", "<q", ">q"):
        yield struct.pack(layout, token)


def traces_of_text(text: str) -> Iterator[bytes]:
    """A text whole, and each of its longer words."""
    yield from (part.encode() for part in (text, *(word for word in text.split() if len(word) > 5)))
    yield text.encode("utf-16-le")


SECRETS = {
    trace
    for token in (*PROMPT_TOKENS, *DRAFT_TOKENS, *SAMPLED_TOKENS)
    for trace in traces_of_token(token)
} | set(traces_of_text(PROMPT))  # fmt: skip


def load(name: str) -> ModuleType:
    """A copy of a stand-in's module for this test alone: the fix changes the code of its class."""
    return load_module(SUPPORT / f"{name}.py", f"{name}_of_privacy")


class Engine:
    """
    Two ranks with all hooks on. `run` takes them through steps that drift, mask, fail and are traced everywhere.
    """

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.settings = WorkerSettings(flight_dir=directory, **settings)
        self.installations: list[Installation] = []

    def put_on(self, runner: Any, identity: Any, pp_rank: int) -> Any:
        named = identity.model_copy(
            update={"pp_rank": pp_rank, "pid": os.getpid(), "request_ids": self.settings.request_ids}
        )
        self.installations.append(install(runner, named, self.settings, completes=True))
        return runner


class V1Engine(Engine):
    """On the V1 runner, whose request states hold the tokens themselves."""

    def run(self) -> None:
        module = load("standin")
        for pp_rank in (0, 1):
            runner = module.StandInRunner(is_last_rank=pp_rank == 1)
            states = {
                request_id: SimpleNamespace(
                    prompt=PROMPT, prompt_token_ids=list(PROMPT_TOKENS), output_token_ids=list(SAMPLED_TOKENS),
                    prev_num_draft_len=0, num_tokens=18, sampling_params=SimpleNamespace(stop=[PROMPT]),
                )
                for request_id in REQUEST_IDS
            }  # fmt: skip
            runner.requests = states
            runner.input_batch.req_ids = list(states)
            runner.input_batch.req_id_to_index = {request_id: n for n, request_id in enumerate(states)}
            runner.input_batch.prev_sampled_token_ids = np.array(SAMPLED_TOKENS)
            runner.input_batch.token_ids_cpu = np.array([PROMPT_TOKENS] * 3)
            self.put_on(runner, module.identity(), pp_rank)
            for step, lengths in enumerate([[10, 10, 10], [9, 8, 10], [7, 8, 10], [7, 8, 10]]):
                runner.discard_request_mask.np[: len(states)] = step == 3
                module.take_step(runner, self.output(module, runner, lengths))

    @staticmethod
    def output(module: ModuleType, runner: Any, lengths: list[int]) -> Any:
        output = module.schedule(runner, lengths=lengths, new=(REQUEST_IDS[0],), finished=("gone",))
        for new in output.scheduled_new_reqs:
            new.prompt, new.prompt_token_ids = PROMPT, list(PROMPT_TOKENS)
        output.scheduled_spec_decode_tokens = {request_id: list(DRAFT_TOKENS) for request_id in REQUEST_IDS}
        output.scheduled_cached_reqs.new_token_ids = [list(SAMPLED_TOKENS)] * 3
        return output


class V2Engine(Engine):
    """On the V2 runner, whose host side holds lengths, and whose scheduler's output holds the tokens."""

    def run(self) -> None:
        module = load("standin_v2")
        for pp_rank in (0, 1):
            runner = module.StandInRunner(last=pp_rank == 1, drafts=3)
            self.put_on(runner, module.identity_of(runner), pp_rank)
            scheduler = module.Scheduler(drafts=3)
            for request_id in REQUEST_IDS:
                scheduler.add(request_id)
            for step in range(7):  # the last one schedules all requests again
                if step == 4:
                    self.make_drift(runner)
                output = scheduler.schedule()
                for new in output.scheduled_new_reqs:
                    new.text, new.prompt_token_ids = PROMPT, list(PROMPT_TOKENS)
                output.scheduled_spec_decode_tokens = {
                    request_id: list(DRAFT_TOKENS) for request_id in output.scheduled_spec_decode_tokens
                }
                output.scheduled_cached_reqs.new_token_ids = [list(SAMPLED_TOKENS)]
                module.take_step(runner, output)

    @staticmethod
    def make_drift(runner: Any) -> None:
        """From now on rows of this runner count more computed tokens than the scheduler."""
        state = runner.req_states

        class Ahead(dict[str, int]):
            def __getitem__(self, key: str) -> int:
                row = super().__getitem__(key)
                state.num_computed_tokens_np[row] += 3
                return row

        state.req_id_to_index = Ahead(state.req_id_to_index)


ENGINES = pytest.mark.parametrize("kind", [V1Engine, V2Engine])


def collect(directory: Path, caplog: pytest.LogCaptureFixture) -> dict[str, bytes]:
    """Everything that can be seen of an engine, by where it is seen."""
    seen = {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert len([name for name in seen if name.endswith(".flight")]) == 2
    for form, view in itertools.product(("table", "json", "csv"), ("steps", "requests", "header", "align")):
        printed = io.StringIO()
        shown = {} if view == "steps" else {view: True}
        dump([directory], DumpOptions(form=form, **shown), printed, printed.write)
        seen[f"dump {form} {view}"] = printed.getvalue().encode()
    app = create_app(ServeSettings(flight_dir=directory, control_token=CONTROL))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        for path, accept in itertools.product(PATHS, ("", "application/openmetrics-text;version=1.0.0")):
            seen[f"GET {path} {accept}"] = client.get(path, headers={"accept": accept}).content
        command = {"engine": "e1", "desired": True, "generation": 1, "effective_step": 0}
        for token in (CONTROL, "wrong"):
            answer = client.put("/v1/control", json=command, headers={"authorization": f"Bearer {token}"})
            seen[f"PUT with token {token}"] = answer.content
        seen["requests"] = client.get("/v1/requests").content
    seen["log"] = "\n".join(
        logging.Formatter("%(name)s %(message)s").format(record) for record in caplog.records
    ).encode()
    return seen


def found(seen: dict[str, bytes], secrets: set[bytes]) -> dict[str, set[bytes]]:
    """Which secrets are seen where."""
    return {place: hits for place, data in seen.items() if (hits := {secret for secret in secrets if secret in data})}


@pytest.fixture(autouse=True)
def _clean(serve_settings: ServeSettings, caplog: pytest.LogCaptureFixture) -> None:
    """No `RANKSCOPE_*` from outside, and every line of the log."""
    caplog.set_level(logging.DEBUG)
    for name in ("vllm.rankscope", "rankscope.exporter"):
        caplog.set_level(logging.DEBUG, logger=name)


@ENGINES
@pytest.mark.parametrize("faults", ["", "all"])
def test_prompts_and_tokens_are_nowhere(
    kind: type[Engine], faults: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No prompt, draft or sampled token is in a flight file, an answer or the log, also where our hooks fail."""
    directory = tmp_path / "flight"
    kind(directory, fault_injection=faults, fault_limit=2).run()

    seen = collect(directory, caplog)

    assert found(seen, SECRETS) == {}
    # The search does find what is there.
    assert (REQUEST_IDS[0].encode() in seen["requests"]) is (not faults)
    assert (b"failed" in seen["log"]) is bool(faults)


@ENGINES
def test_request_ids_are_shown(kind: type[Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By default a request that drifts is named, in the flight file and in the answer about requests, and there alone."""
    directory = tmp_path / "flight"
    kind(directory).run()

    places = found(collect(directory, caplog), {request_id.encode() for request_id in REQUEST_IDS})

    assert {re.sub(r"^(GET |dump \S+ )|^.*\.(?=flight$)", "", place).split()[0] for place in places} == {
        "/v1/requests",
        "flight",
        "requests",
    }


@ENGINES
@pytest.mark.parametrize("mode", [RequestIds.HASHED, RequestIds.OMITTED])
def test_request_ids_are_nowhere(
    kind: type[Engine], mode: RequestIds, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Hashed or left out, no request id is seen anywhere, and what else is known of the requests stays known."""
    directory = tmp_path / "flight"
    kind(directory, request_ids=mode).run()

    seen = collect(directory, caplog)

    assert found(seen, {trace for request_id in REQUEST_IDS for trace in traces_of_text(request_id)}) == {}
    rows = rows_by_rank(directory)
    assert all(row["drift"] > 0 for row in rows[0])
    assert rows[0]
    names = {row["request_id"] for row in itertools.chain(*rows.values())}
    assert (names == {""}) is (mode is RequestIds.OMITTED)


def rows_by_rank(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """The rows of `/v1/requests`, by pipeline rank."""
    with TestClient(create_app(ServeSettings(flight_dir=directory)), base_url="http://127.0.0.1") as client:
        tables = client.get("/v1/requests").json()["tables"]
    return {table["pp_rank"]: table["rows"] for table in tables}


def test_hashed_ids_fit_together(tmp_path: Path) -> None:
    """A hashed id is the same on all ranks of an engine, so that ranks can be compared; different requests differ."""
    directory = tmp_path / "flight"
    V2Engine(directory, request_ids=RequestIds.HASHED).run()

    rows = rows_by_rank(directory)
    first, last = ({row["request_id"] for row in rows[pp_rank]} for pp_rank in (0, 1))

    assert first == last
    assert len(first) == len(rows[0]) > 1
