"""
The models of a run: the lab's counting target with two layers for each of two ranks, and a head for EAGLE-3.

The head's weights are vLLM's dummy ones, so hardly a draft of it is right: every step then has rejections to undo.
"""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rankscope_lab.checkpoint import CONTEXT, HEADS, HIDDEN, INTERMEDIATE, REVISION
from rankscope_lab.counting import VOCABULARY

LAYERS = 4
AUXILIARY_LAYERS = (1, 2, 3)
"""
Layers whose hidden states the head takes in; one of them lies on the first rank.
"""


@dataclass(frozen=True, slots=True)
class Models:
    """
    Where target and head lie.
    """

    target: Path
    eagle3: Path


def ensure(directory: Path, python: Path) -> Models:
    """
    The models in `directory`, written by `python` (a lab environment's) unless they are there.

    Raises:
        RuntimeError: the target could not be written; the message has what the writer said.

    """
    found = Models(directory / "target4", directory / "eagle3")
    revision = found.target / "revision"
    if not revision.exists() or revision.read_text() != REVISION:
        command = [str(python), "-m", "rankscope_lab.checkpoint", str(found.target), "--layers", str(LAYERS)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            msg = f"cannot write {found.target}: run `make lab-v2-setup` if the environment is not complete\n{done.stderr.strip()}"
            raise RuntimeError(msg)
    found.eagle3.mkdir(parents=True, exist_ok=True)
    found.eagle3.joinpath("config.json").write_text(json.dumps(_eagle3(), indent=2))
    return found


def _eagle3() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": list(AUXILIARY_LAYERS),
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
