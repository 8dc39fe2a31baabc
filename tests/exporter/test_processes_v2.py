"""
Which processes run code of ours, and who they say they are: real processes, spawned and forked, over a stub of vLLM.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope_exporter import identity as identities
from rankscope_exporter.flight import FlightFile, list_flight_files

SUPPORT = Path(__file__).parents[1] / "support"

STUBS = {
    "vllm/__init__.py": "__version__ = '0.0.stub'",
    "vllm/v1/__init__.py": "",
    "vllm/v1/worker/__init__.py": "",
    "vllm/v1/worker/worker_base.py": """
        import os
        from types import SimpleNamespace


        class WorkerWrapperBase:
            def __init__(self, rank):
                self.rpc_rank = self.global_rank = rank
                self.vllm_config = SimpleNamespace(
                    instance_id=os.environ["ENGINE"],
                    parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_rank=0),
                )

            def init_device(self):
                from standin_v2 import StandInRunner
                self.worker = SimpleNamespace(model_runner=StandInRunner(last=self.rpc_rank == 1))
    """,
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/parallel_state.py": """
        import os
        from types import SimpleNamespace


        def get_pp_group():
            return SimpleNamespace(rank_in_group=int(os.environ["PP_RANK"]), world_size=2, device_group=None)


        def get_tp_group():
            return SimpleNamespace(rank_in_group=0, world_size=1)
    """,
    "torch/__init__.py": "",
    "torch/distributed.py": "def get_backend(group):\n    return 'gloo'",
    "engine.py": """
        # What vLLM's processes do: a front end starts an engine core, which starts workers; each of them loads plugins.
        import json
        import multiprocessing
        import os
        import sys


        def load_plugins():
            if not os.environ.get("PLUGINS_LOADED"):
                from rankscope_exporter.plugin import register
                register()


        def tell(name, queue):
            queue.put((name, os.getpid(), sorted(m for m in sys.modules if m.startswith("rankscope_exporter"))))


        def worker(rank, queue):
            load_plugins()
            os.environ["PP_RANK"] = str(rank)
            from vllm.v1.worker.worker_base import WorkerWrapperBase
            wrapper = WorkerWrapperBase(rank)
            wrapper.init_device()
            from standin_v2 import Scheduler, take_step
            scheduler = Scheduler()
            scheduler.add("a")
            for _ in range(3 + rank):
                take_step(wrapper.worker.model_runner, scheduler.schedule())
            tell(f"worker {rank}", queue)


        def helper(queue):
            load_plugins()
            tell("helper", queue)


        def engine_core(method, queue):
            load_plugins()
            if method == "fork":
                os.environ["PLUGINS_LOADED"] = "1"  # what vLLM's own mark does, which a fork inherits
            context = multiprocessing.get_context(method)
            children = [context.Process(target=worker, args=(rank, queue)) for rank in range(2)]
            children.append(context.Process(target=helper, args=(queue,)))
            for child in children:
                child.start()
            for child in children:
                child.join()
            tell("engine core", queue)


        if __name__ == "__main__":
            method = sys.argv[1]
            context = multiprocessing.get_context(method)
            queue = context.Queue()
            load_plugins()
            core = context.Process(target=engine_core, args=(method, queue))
            core.start()
            told = [queue.get(timeout=120) for _ in range(4)]
            core.join()
            tell("front end", queue)
            told.append(queue.get(timeout=120))
            print(json.dumps(told))
    """,
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory with a stub of vLLM, of torch, and a program that starts processes as vLLM does."""
    directory = tmp_path / "site"
    for name, text in STUBS.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return directory


def run_engine(site: Path, flight: Path, engine: str, method: str) -> dict[str, tuple[int, list[str]]]:
    """Run an engine to its end; what each of its processes told: its pid and which modules of ours it has imported."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")},
        "PYTHONPATH": f"{site}{os.pathsep}{SUPPORT}",
        "RANKSCOPE_FLIGHT_DIR": str(flight),
        "RANKSCOPE_RING_STEPS": "64",
        "ENGINE": engine,
    }
    command = [sys.executable, str(site / "engine.py"), method]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    return {name: (pid, modules) for name, pid, modules in json.loads(ran.stdout)}


@pytest.mark.integration
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_only_workers_run_code_of_ours(site, tmp_path, method):
    """Front end, engine core and helpers load the entry point and nothing more; each worker has a file of its own pid."""
    told = run_engine(site, tmp_path / "flight", "e1", method)
    assert set(told) == {"front end", "engine core", "helper", "worker 0", "worker 1"}
    for name in ("front end", "engine core", "helper"):
        assert set(told[name][1]) <= {"rankscope_exporter", "rankscope_exporter.plugin", "rankscope_exporter.faults"}
    files = {}
    for path in list_flight_files(tmp_path / "flight"):
        with FlightFile(path) as flight:
            files[flight.identity()["pp_rank"]] = (flight.pid, flight.identity()["pid"], flight.step(), flight.faults())
    for rank in (0, 1):
        pid, modules = told[f"worker {rank}"]
        assert "rankscope_exporter.hooks.install" in modules
        assert files.pop(rank) == (pid, pid, 3 + rank, 0)
    assert files == {}


@pytest.mark.integration
def test_engines_of_a_node_share_a_directory(site, tmp_path):
    """Several engines, one after the other or at once: each rank of each has its own file."""
    flight = tmp_path / "flight"
    for engine, method in (("e1", "spawn"), ("e2", "fork")):
        run_engine(site, flight, engine, method)
    found = set()
    for path in list_flight_files(flight):
        with FlightFile(path) as file:
            found.add((file.identity()["engine"], file.identity()["pp_rank"]))
    assert found == {("e1", 0), ("e1", 1), ("e2", 0), ("e2", 1)}


def groups(monkeypatch: pytest.MonkeyPatch, **ranks: tuple[int, int]) -> None:
    """VLLM's process groups: rank and size by name; a release has no others."""
    functions = {
        f"get_{name}_group": lambda rank=rank, size=size: SimpleNamespace(rank_in_group=rank, world_size=size)
        for name, (rank, size) in ranks.items()
    }
    state = SimpleNamespace(**functions)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0"))
    monkeypatch.setitem(sys.modules, "vllm.distributed", SimpleNamespace(parallel_state=state))


def config(instance: str, **parallel: int) -> Any:
    return SimpleNamespace(instance_id=instance, parallel_config=SimpleNamespace(**parallel))


def read(vllm_config: Any) -> Any:
    return identities.read_identity(SimpleNamespace(rpc_rank=0), SimpleNamespace(req_states=None), vllm_config)


def labels(identity: Any) -> tuple[Any, ...]:
    """What stands on every series of a rank."""
    return identity.engine, identity.dp_rank, identity.pp_rank, identity.tp_rank


def test_every_rank_of_a_node_has_its_own_identity(monkeypatch):
    """TP x PP x DP, of two engines: labels and names of flight files are all different, even with the same pid."""
    found = []
    for engine, dp, pp, tp in itertools.product(("e1", "e2"), range(2), range(2), range(2)):
        groups(monkeypatch, pp=(pp, 2), tp=(tp, 2))
        found.append(read(config(engine, data_parallel_size=2, data_parallel_rank=dp, data_parallel_index=dp)))
    assert len({labels(identity) for identity in found}) == 16
    assert len({identities.flight_name(identity) for identity in found}) == 16
    assert {(i.dp_size, i.pp_size, i.tp_size) for i in found} == {(2, 2, 2)}
    assert {i.engine for i in found} == {"e1-dp0", "e1-dp1", "e2-dp0", "e2-dp1"}


def test_replicas_of_a_dense_model_are_told_apart(monkeypatch):
    """VLLM tells the engines of a dense model that each is alone, and leaves them one instance id: the index is the rank."""
    groups(monkeypatch, pp=(0, 1), tp=(0, 1))
    found = [
        read(config("e1", data_parallel_size=1, data_parallel_rank=0, data_parallel_index=index)) for index in range(3)
    ]
    assert len({labels(identity) for identity in found}) == 3
    assert [identity.dp_rank for identity in found] == [0, 1, 2]


def test_an_older_release_without_an_index(monkeypatch):
    """Before the index there was the rank."""
    groups(monkeypatch, pp=(1, 2), tp=(0, 1))
    identity = read(config("e1", data_parallel_size=2, data_parallel_rank=1))
    assert labels(identity) == ("e1-dp1", 1, 1, 0)
    assert labels(read(config("e1"))) == ("e1", 0, 1, 0)


def test_prefill_context_ranks_count_with_tensor_ranks(monkeypatch):
    """Ranks of a prefill context group share a stage: each has a rank of its own in it, and the size is that of the stage."""
    found = []
    for pcp, tp in itertools.product(range(2), range(2)):
        groups(monkeypatch, pp=(0, 2), tp=(tp, 2), pcp=(pcp, 2))
        found.append(read(config("e1", data_parallel_size=1)))
    assert [identity.tp_rank for identity in found] == [0, 1, 2, 3]
    assert {identity.tp_size for identity in found} == {4}


@pytest.mark.parametrize("engine", ["../../etc/passwd", "a/b c", "x" * 500, "é"])
def test_an_instance_id_is_no_path(monkeypatch, tmp_path, engine):
    """Whatever an engine is called, its file lies in the directory, with a name that is not too long."""
    groups(monkeypatch, pp=(0, 1), tp=(0, 1))
    name = identities.flight_name(read(config(engine)))
    assert (tmp_path / name).parent == tmp_path
    assert "/" not in name
    assert len(name) < 200
