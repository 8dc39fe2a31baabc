"""
Source text of small modules that look like vLLM's runners to every probe, and copies of it with one thing altered.

They are text, not modules, because the same text is read, imported and run, and all three must be judged alike.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from loading import load_module

V1 = """
import functools

def opaque(function):
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

def telling(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

class Mask:
    np = None

class Mixin:
    def sample_tokens(self, grammar_output):
        return grammar_output

class Runner(Mixin):
    def __init__(self):
        self.discard_request_mask = Mask()

    @telling
    def execute_model(self, scheduler_output, intermediate_tensors=None):
        return self._update_states(scheduler_output)

    def _update_states(self, scheduler_output):
        is_last_rank = False
        for req_state, num_output_tokens in scheduler_output:
            optimistic = req_state.prev_num_draft_len
            req_state.output_token_ids.extend([-1] * optimistic)
            if not is_last_rank:
                pass
            elif num_output_tokens < len(req_state.output_token_ids):
                del req_state.output_token_ids[num_output_tokens:]

    def _pp_broadcast_prev_sampled_token_ids(self, sampled_token_ids):
        pass

    def _pp_receive_prev_sampled_token_ids_to_input_batch(self):
        pass

    def _is_all_reqs_chunked_prefill(self):
        return False
"""

V2 = """
import functools

class distributed:
    broadcast = empty = pad = staticmethod(lambda *args: None)

def telling(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

def compute_need_sampled_mask(input_batch):
    return None

class PPHandler:
    def __init__(self):
        self.max_sample_len = 4

    def get_prev_sampled_outputs(self, draft_tokens_to_update=None):
        return None

    def receive(self, input_batch):
        if compute_need_sampled_mask(input_batch) is not None:
            distributed.broadcast(distributed.empty(input_batch, self.max_sample_len))

    def broadcast(self, sampled_token_ids, num_sampled, num_rejected, input_batch):
        if compute_need_sampled_mask(input_batch) is not None:
            sent = distributed.pad(sampled_token_ids, self.max_sample_len)
            distributed.broadcast(sent.contiguous())

    def broadcast_drafts(self, draft_tokens, input_batch):
        distributed.broadcast(draft_tokens)

class Runner:
    def __init__(self):
        self.req_states = {}
        self.pp_handler = PPHandler()

    @telling
    def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False):
        return None

    def update_requests(self, scheduler_output):
        pass

    @telling
    def sample_tokens(self, grammar_output):
        return self.pp_handler.receive(grammar_output)

    def pool(self):
        pass
"""

V2_MODULE = """
class distributed:
    broadcast = empty = staticmethod(lambda *args: None)

def pp_receive(num_reqs, max_sample_len=1):
    distributed.broadcast(distributed.empty(num_reqs, max_sample_len))

def pp_broadcast(sampled_token_ids, num_sampled, num_rejected):
    distributed.broadcast(sampled_token_ids.contiguous())

class Runner:
    def __init__(self):
        self.req_states = {}

    def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False):
        return None

    def update_states(self, scheduler_output):
        pass

    def sample_tokens(self, grammar_output):
        pp_receive(1, max_sample_len=4)
        pp_broadcast(grammar_output, 1, 0)

    def pool(self):
        pass
"""


@dataclass(frozen=True, slots=True)
class Alteration:
    """
    One change of a text, as a fork might have made it.
    """

    name: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        """
        The text with the change; it has to have something to change.
        """
        assert self.old in text, self
        return text.replace(self.old, self.new)

    def __str__(self) -> str:
        return self.name


def alter(text: str, alterations: Iterable[Alteration]) -> str:
    """
    The text with all changes that still find something to change.
    """
    for alteration in alterations:
        if alteration.old in text:
            text = alteration.apply(text)
    return text


def importer(directory: Path) -> Callable[[str], ModuleType]:
    """
    Imports texts from files in `directory`, each under a name of its own.
    """

    def load(text: str) -> ModuleType:
        path = directory / f"lookalike_{len(list(directory.glob('*.py')))}.py"
        path.write_text(text, encoding="utf-8")
        return load_module(path, path.stem)

    return load
