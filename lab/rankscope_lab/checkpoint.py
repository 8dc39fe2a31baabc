"""
The lab's checkpoints: a tiny Llama that counts, and a smaller one for the drafter to load.

Attention and MLP contribute nothing, so what a position predicts depends on the token embedded there and on nothing
else: a wrong token in the output is the engine's doing, never the model's.

Writing them needs torch, transformers, tokenizers and safetensors: run it with the lab environment's Python.
"""

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope_lab.counting import FIRST, LAST, VOCABULARY, after

HIDDEN, INTERMEDIATE, HEADS = 64, 128, 2
CONTEXT = 4096
EMBEDDING_SCALE, HEAD_SCALE, NOISE = 8.0, 3.0, 0.02

LAYERS = 2
"""
One for each pipeline rank, in the drafter too: vLLM splits it, and only the half of the last rank is ever used.
"""

REVISION = "2"
"""
Goes up when what is written changes; checkpoints of another revision are written anew.
"""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """
    Where target and drafter lie.
    """

    target: Path
    drafter: Path


def ensure(directory: Path, python: Path) -> Checkpoints:
    """
    The checkpoints in `directory`, written by `python` (the lab environment's) unless they are there.

    Raises:
        RuntimeError: they could not be written; the message has what the writer said.

    """
    found = Checkpoints(directory / "target", directory / "drafter")
    for path in (found.target, found.drafter):
        if _stamp(path) == REVISION:
            continue
        command = [str(python), "-m", "rankscope_lab.checkpoint", str(path), "--layers", str(LAYERS)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            msg = f"cannot write the checkpoint {path}: run `make lab-setup` if the lab's environment is not complete\n{done.stderr.strip()}"
            raise RuntimeError(msg)
    return found


def write(directory: Path, layers: int) -> None:
    """
    Write one checkpoint with its tokenizer. It appears whole or not at all.
    """
    import torch
    from safetensors.torch import save_file  # type: ignore[import-not-found]  # only in the lab's environment

    draft = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    (draft / "config.json").write_text(json.dumps(_config(layers), indent=2))
    weights = {name: tensor.clone().contiguous() for name, tensor in _weights(torch, layers).items()}
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(draft)
    (draft / "revision").write_text(REVISION)
    shutil.rmtree(directory, ignore_errors=True)
    draft.rename(directory)


def _stamp(directory: Path) -> str | None:
    try:
        return (directory / "revision").read_text()
    except FileNotFoundError:
        return None


def _config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,  # vLLM's CPU attention takes 32, and not 16
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }


def _weights(torch: Any, layers: int) -> dict[str, Any]:
    torch.manual_seed(0)
    embedding = torch.nn.functional.normalize(torch.randn(VOCABULARY, HIDDEN), dim=1) * EMBEDDING_SCALE
    head = torch.zeros(VOCABULARY, HIDDEN)
    for token in range(FIRST, LAST + 1):
        head[after(token)] = embedding[token] * HEAD_SCALE
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(HIDDEN), "lm_head.weight": head}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in ("q", "k", "v"):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = NOISE * torch.randn(HIDDEN, HIDDEN)
        weights[f"{prefix}self_attn.o_proj.weight"] = torch.zeros(HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            weights[f"{prefix}mlp.{name}_proj.weight"] = NOISE * torch.randn(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}mlp.down_proj.weight"] = torch.zeros(HIDDEN, INTERMEDIATE)
        weights[f"{prefix}input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[f"{prefix}post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    return weights


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-not-found]
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]

    special = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words = {f"t{token}": token for token in range(len(special), VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(special | words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(directory)


def main(arguments: list[str] | None = None) -> int:
    """
    `python -m rankscope_lab.checkpoint DIRECTORY --layers N`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m rankscope_lab.checkpoint", description="Write one of the lab's checkpoints."
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    options = parser.parse_args(arguments)
    write(options.directory, options.layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
