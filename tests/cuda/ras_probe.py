"""
Prints what a real NCCL answers on its RAS port: run on a machine with CUDA GPUs and torch, nothing else.

    python3 tests/cuda/ras_probe.py

Starts one process per GPU (one GPU: a group of one), makes two communicators, runs a few collectives and asks the
RAS port for the text status, the verbose status and the JSON status. With two GPUs or more, rank 0 then posts a
broadcast that its peers never post, and the questions are asked again: that is what a mismatch looks like.
"""

import argparse
import os
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

QUESTIONS = {
    "text status": ("STATUS",),
    "verbose text status": ("VERBOSE STATUS",),
    "json status": ("SET FORMAT json", "STATUS"),
    "verbose json status": ("SET FORMAT json", "VERBOSE STATUS"),
}
PROTOCOL = 2  # what NCCL's own client of 2.24 to 2.32 says; the server answers with its own and goes on either way
PATIENCE_SECONDS = 10.0
ANSWER_LIMIT_BYTES = 4 << 20


def ask(address: tuple[str, int], commands: tuple[str, ...], leg_timeout_seconds: int = 3) -> str:
    """
    Sends the handshake and the commands one by one, returns all that came back, each command as `> command`.
    """
    transcript = []
    with socket.create_connection(address, timeout=PATIENCE_SECONDS) as connection:
        reader = connection.makefile("rb")
        for command in (f"CLIENT PROTOCOL {PROTOCOL}", f"TIMEOUT {leg_timeout_seconds}", *commands[:-1]):
            connection.sendall(f"{command}\n".encode())
            transcript += [f"> {command}\n", reader.readline(ANSWER_LIMIT_BYTES).decode(errors="replace")]
        connection.sendall(f"{commands[-1]}\n".encode())
        transcript += [f"> {commands[-1]}\n", reader.read(ANSWER_LIMIT_BYTES).decode(errors="replace")]
    return "".join(transcript)


def ask_all(address: tuple[str, int], title: str) -> None:
    """
    Asks every question and prints the raw answers; what fails is printed as what failed.
    """
    for name, commands in QUESTIONS.items():
        started = time.perf_counter()
        try:
            answer = ask(address, commands)
        except OSError as error:
            answer = f"no answer: {error!r}\n"
        print(f"##### {title}: {name} ({time.perf_counter() - started:.3f} s)\n{answer}##### end", flush=True)


def member(rank: int, world: int, port: int, address: tuple[str, int], skip_mismatch: bool) -> None:
    """
    One rank: collectives of several types on two communicators; rank 0 asks the questions.
    """
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    store = dist.PrefixStore("probe", dist.distributed_c10d._get_default_store())
    second = dist.new_group(list(range(world)))
    data = torch.ones(1024, device="cuda")
    gathered = [torch.empty_like(data) for _ in range(world)]
    for _ in range(3):
        dist.all_reduce(data)
    for _ in range(2):
        dist.broadcast(data, src=0)
    dist.all_gather(gathered, data)
    for _ in range(4):
        dist.all_reduce(data, group=second)
    torch.cuda.synchronize()
    store.set(f"ready/{rank}", "1")
    if rank == 0:
        store.wait([f"ready/{peer}" for peer in range(world)])
        ask_all(address, f"{world} rank(s), all equal")
        if world > 1 and not skip_mismatch:
            dist.broadcast(data, src=0, async_op=True)
            dist.broadcast(data, src=0, async_op=True)
            ask_all(address, f"{world} ranks, rank 0 posted two broadcasts more")
            os.kill(int(store.get("pid/1")), signal.SIGSTOP)
            ask_all(address, f"{world} ranks, the process of rank 1 stopped")
            os.kill(int(store.get("pid/1")), signal.SIGCONT)
        store.set("over", "1")
    else:
        store.set(f"pid/{rank}", str(os.getpid()))
        store.wait(["over"])
    sys.stdout.flush()
    os._exit(0)  # a mismatch is never made good, and a tidy end would wait for it


def main() -> int:
    """
    Starts the ranks and waits for them.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ras", default=os.environ.get("NCCL_RAS_ADDR", "localhost:28028"), help="host:port of RAS")
    parser.add_argument("--skip-mismatch", action="store_true", help="leave out the broadcasts that no peer joins")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU is visible: run this on a machine with one", file=sys.stderr)
        return 2
    host, _, ras_port = options.ras.rpartition(":")
    world = torch.cuda.device_count()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    print(f"##### torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}, {world} GPU(s)", flush=True)
    mp.spawn(member, args=(world, port, (host, int(ras_port)), options.skip_mismatch), nprocs=world)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
