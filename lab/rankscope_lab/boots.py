"""
Stock vLLM of several releases, booted for a few requests: does Rankscope know who each rank is and what it did?

One release after the other in an environment of its own, with either model runner, workers spawned and forked, pipeline
ranks alone, times tensor ranks, and in two data-parallel replicas.
"""

import asyncio
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt
from prometheus_client.parser import text_string_to_metric_families
from rankscope_exporter.contract.metrics import RANK_LABELS
from rankscope_exporter.flight import FlightFile, list_flight_files

from rankscope_lab import stand_ins, traffic
from rankscope_lab.checkpoint import Checkpoints
from rankscope_lab.engine import Engine, EngineOptions, Progress
from rankscope_lab.environment import REPOSITORY, V1_RELEASE, V2_RELEASE, Environment, ensure, of_release
from rankscope_lab.processes import Child, free_port
from rankscope_lab.v2 import models
from rankscope_lab.v2.launch import OfflineRun, Options, platform
from rankscope_lab.v2.offline import Settings
from rankscope_lab.v2.workload import Request

TOKENS = 20
ANSWER_SECONDS = 120.0
READY_SECONDS = 420.0
SCRAPE_SECONDS = 30.0
PLACE_LABELS = ("dp_rank", "pp_rank", "tp_rank")

Place = tuple[int, int, int]
"""
Data-parallel, pipeline and tensor rank of a process.
"""


@dataclass(frozen=True, slots=True)
class Boot:
    """
    What is booted.
    """

    name: str
    release: str
    v2: bool = False
    pipeline_ranks: int = 2
    tensor_ranks: int = 1
    replicas: int = 1
    """Data-parallel replicas; more than one are started by an API server, which is the only way to have them."""
    start_method: str = "spawn"

    def places(self) -> set[Place]:
        """
        Data-parallel, pipeline and tensor rank of each process.
        """
        sizes = (self.replicas, self.pipeline_ranks, self.tensor_ranks)
        return set(itertools.product(*map(range, sizes)))


BOOTS = (
    Boot("v1-0.27.1", V1_RELEASE),
    Boot("v1-0.28.0", "0.28.0", start_method="fork"),  # the first release whose first rank receives asynchronously
    Boot("v2-0.30.0", "0.30.0", v2=True, start_method="fork"),
    Boot("v2-0.32.0", V2_RELEASE, v2=True),
    Boot("fork", V1_RELEASE, start_method="fork"),
    Boot("tp2-pp2", V1_RELEASE, tensor_ranks=2, start_method="fork"),
    Boot("dp2", V1_RELEASE, pipeline_ranks=1, replicas=2),
)


@dataclass(frozen=True, slots=True)
class BootedRank:
    """
    What Rankscope says of one rank: its flight file, and its samples on `/metrics` by name (those with a value per rank).
    """

    identity: Mapping[str, Any]
    records: npt.NDArray[np.void]
    samples: Mapping[str, float]
    faults: int

    @property
    def place(self) -> Place:
        """Data-parallel, pipeline and tensor rank."""
        return place_of(self.identity)


@dataclass(frozen=True, slots=True)
class Booted:
    """
    A boot: what it was asked, what came, and its ranks by place.
    """

    requests: Sequence[Request]
    tokens: int
    wrong_tokens: int
    ranks: Sequence[BootedRank]


def run(boot: Boot, work: Path, environ: Mapping[str, str], progress: Progress) -> Booted:
    """
    Boot it, send the requests, scrape the exporter, end it. Logs and flight files lie in `work`.

    Raises:
        SetupError: the release cannot be installed here.
        RuntimeError: it does not boot, or does not come to its end; the message has the end of its log.

    """
    environment = of_release(boot.release, environ)
    ensure(environment, progress)
    found = models.ensure(REPOSITORY / "var" / "lab" / "checkpoints", environment.python)
    settings = Settings(
        target=str(found.target),
        pipeline_ranks=boot.pipeline_ranks,
        tensor_ranks=boot.tensor_ranks,
        requests=4,
        aborted=0.0,
        answer=TOKENS,
    )
    flight = work / "flight"
    work.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = (str(environment.python), "-m", "rankscope_exporter", "serve")
    exporter = Child((*command, "--flight-dir", str(flight), "--port", str(port)), environ, work / "exporter.log")
    try:
        exporter.start()
        progress(f"{boot.name}: starting vLLM {boot.release}")
        if boot.replicas == 1:
            tokens, wrong = _offline(boot, environment, settings, work)
        else:
            tokens, wrong = _served(boot, environment, settings, work, progress)
        text = asyncio.run(_scrape(port))
    finally:
        exporter.stop()
    return Booted(settings.draw(), tokens, wrong, _read(flight, text))


def _offline(boot: Boot, environment: Environment, settings: Settings, work: Path) -> tuple[int, int]:
    extra = {"RANKSCOPE_FLIGHT_DIR": str(work / "flight")}
    options = Options(environment, settings, v2=boot.v2, start_method=boot.start_method, extra=extra)
    with OfflineRun(options, work / "vllm.log") as offline:
        facts = offline.facts(READY_SECONDS)
    return facts["tokens"], facts["wrong_tokens"]


def _served(
    boot: Boot, environment: Environment, settings: Settings, work: Path, progress: Progress
) -> tuple[int, int]:
    cpus = sorted(os.sched_getaffinity(0))
    target = Path(settings.target)
    options = EngineOptions(
        environment.python,
        Checkpoints(target, target),
        name=boot.name,
        speculation=False,
        context=settings.context,
        arguments=(
            *("--pipeline-parallel-size", str(boot.pipeline_ranks), "--tensor-parallel-size", str(boot.tensor_ranks)),
            *("--data-parallel-size", str(boot.replicas)),
        ),
        environment={
            **platform(environment.release, v2=boot.v2, scratch=work),
            stand_ins.START_METHOD: boot.start_method,
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cpus[n % len(cpus)]) for n in range(len(boot.places()))),
            "RANKSCOPE_FLIGHT_DIR": str(work / "flight"),
        },
    )
    with Engine(options, work / "vllm.log") as engine:
        engine.wait_ready(READY_SECONDS, progress)
        answers = asyncio.run(_ask(engine.url, settings.draw()))
    return sum(len(answer.tokens) for answer in answers), sum(answer.wrong_tokens for answer in answers)


async def _ask(url: str, requests: Sequence[Request]) -> list[traffic.Answer]:
    async with httpx2.AsyncClient(base_url=url, timeout=None) as client:
        asked = (traffic.Request(request.prompt, request.tokens) for request in requests)
        return await asyncio.gather(*(traffic.ask(client, request, timeout=ANSWER_SECONDS) for request in asked))


def place_of(identity: Mapping[str, Any]) -> Place:
    """
    Data-parallel, pipeline and tensor rank of an identity.
    """
    return identity["dp_rank"], identity["pp_rank"], identity["tp_rank"]


async def _scrape(port: int) -> str:
    async with httpx2.AsyncClient(timeout=SCRAPE_SECONDS) as client:
        return (await client.get(f"http://127.0.0.1:{port}/metrics")).raise_for_status().text


def _read(directory: Path, text: str) -> list[BootedRank]:
    samples = samples_of(text)
    ranks = []
    for path in list_flight_files(directory):
        with FlightFile(path) as flight:
            identity = flight.identity()
            ranks.append(BootedRank(identity, flight.records(), samples.get(place_of(identity), {}), flight.faults()))
    return sorted(ranks, key=lambda rank: rank.place)


def samples_of(text: str) -> dict[Place, dict[str, float]]:
    """
    Samples of a scrape by data-parallel, pipeline and tensor rank, then by name: those that have nothing but a rank's labels.
    """
    found: dict[Place, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.keys() == set(RANK_LABELS):
                place = tuple(int(sample.labels[label]) for label in PLACE_LABELS)
                found.setdefault((place[0], place[1], place[2]), {})[sample.name] = sample.value
    return found
