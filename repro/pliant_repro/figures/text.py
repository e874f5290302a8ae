"""BERT for question answering; its questions are in `squad`.

A model here takes one tensor, (batch, 3, places) of word numbers, segments and mask, and answers with (batch, places, 2):
whether the answer begins, and ends, at each place. With targets (batch, 2) the loss is `F.cross_entropy`, so that the
same loop trains it as any classifier. Place 0 means that there is no answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pliant.errors import ConfigError
from pliant_repro.figures.squad import WORDS, import_transformers, questions, squad

__all__ = ["SpanModel", "bert", "questions", "squad"]

WEIGHTS = ("model.safetensors", "pytorch_model.bin")


class SpanModel(nn.Module):
    """transformers' BERT with one tensor in and one out."""

    def __init__(self, bert: nn.Module, about: str) -> None:
        super().__init__()
        self.bert = bert
        self.about = about
        """What it is, for people."""

    def forward(self, inputs: Tensor) -> Tensor:
        words, segments, mask = inputs.unbind(1)
        told = self.bert(input_ids=words, token_type_ids=segments, attention_mask=mask)
        return torch.stack((told.start_logits, told.end_logits), -1)


def bert(path: str | Path = "", *, size: str = "small", places: int = 512) -> SpanModel:
    """BERT with two outputs at each place.

    Args:
        path: a directory with `config.json` and weights, as transformers writes them (model.safetensors). With
            a configuration only, such as beside TensorFlow's checkpoint, the weights are random, and `about` says so.
        size: without a path: "small" (2 layers of 128; random weights) or "base" (BERT-base's size; random weights).
        places: the longest input, for a model without a path.

    Raises:
        ConfigError: transformers is missing, the path has no configuration, or there is no such size.
    """
    transformers = import_transformers()
    if path:
        return _bert_from(Path(path), transformers)
    if size == "small":
        config = transformers.BertConfig(
            vocab_size=WORDS,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=512,
            max_position_embeddings=places,
        )
    elif size == "base":
        config = transformers.BertConfig(max_position_embeddings=max(512, places))
    else:
        raise ConfigError(f"BERT of size {size!r} is not known: use small or base, or give a path")
    return SpanModel(transformers.BertForQuestionAnswering(config), f"{size} BERT with random weights")


def _bert_from(folder: Path, transformers: Any) -> SpanModel:
    configs = [folder / name for name in ("config.json", "bert_config.json")]
    config_file = next((file for file in configs if file.is_file()), None)
    if config_file is None:
        raise ConfigError(f"{folder} has no config.json: give a directory with BERT, as `save_pretrained` writes it")
    kind = transformers.BertForQuestionAnswering
    if any((folder / name).is_file() for name in WEIGHTS):
        # Weights in a pickle are read by torch's own restricted reader.
        model = kind.from_pretrained(str(folder), local_files_only=True, weights_only=True)
        return SpanModel(model, f"BERT from {folder}")
    config = transformers.BertConfig.from_json_file(str(config_file))
    why = "TensorFlow's weights are not read" if list(folder.glob("*.ckpt*")) else "there are no weights"
    return SpanModel(kind(config), f"BERT as {config_file} has it, with random weights: {why} in {folder}")
