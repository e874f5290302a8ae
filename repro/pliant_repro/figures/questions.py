"""BERT for question answering, and its data: SQuAD 2.0 from its file, or synthetic questions.

A model takes one tensor, (batch, 3, places) of word numbers, segments and mask, and returns (batch, places, 2): whether the
answer begins, and ends, at each place. Place 0 means that there is no answer. With targets (batch, 2) the loss is
`F.cross_entropy`, so the same loop trains it as any classifier.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from pliant.errors import ConfigError

NUM_WORDS = 8192
"""Different words of the synthetic questions and of the small model."""
BEGIN, SEPARATOR, FIRST_WORD = 2, 3, 4
SQUAD_FILES = ("train-v2.0.json", "dev-v2.0.json")
Sample = tuple[Tensor, Tensor]
Span = tuple[int, int]


def import_transformers() -> Any:
    """Return transformers. It imports torchvision if that is installed, and takes seconds."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("transformers is not installed: `pip install transformers`")
    if importlib.util.find_spec("torchvision") is not None:
        from pliant.torchvision_import import import_torchvision

        import_torchvision()
    import transformers

    return transformers


# --- models ---


class SpanModel(nn.Module):
    """transformers' BERT with one tensor in and one out. `about` describes it."""

    def __init__(self, bert: nn.Module, about: str) -> None:
        super().__init__()
        self.bert, self.about = bert, about

    def forward(self, inputs: Tensor) -> Tensor:
        words, segments, mask = inputs.unbind(1)
        found = self.bert(input_ids=words, token_type_ids=segments, attention_mask=mask)
        return torch.stack((found.start_logits, found.end_logits), -1)


def bert(folder: Path | None = None, *, size: str = "small", places: int = 512) -> SpanModel:
    """Return BERT with two outputs at each place: from `folder`, or of this size with random weights.

    A folder with a configuration only, such as beside TensorFlow's checkpoint, gives random weights; `about` says so.

    Raises:
        ConfigError: transformers is missing, or the folder has no configuration.
    """
    transformers = import_transformers()
    kind = transformers.BertForQuestionAnswering
    if folder is None:
        small = {"vocab_size": NUM_WORDS, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                 "intermediate_size": 512, "max_position_embeddings": places}  # fmt: skip
        config = transformers.BertConfig(**(small if size == "small" else {"max_position_embeddings": max(512, places)}))
        return SpanModel(kind(config), f"{size} BERT with random weights")
    files = [folder / name for name in ("config.json", "bert_config.json") if (folder / name).is_file()]
    if not files:
        raise ConfigError(f"{folder} has no config.json: give a directory with BERT, as `save_pretrained` writes it")
    if any((folder / name).is_file() for name in ("model.safetensors", "pytorch_model.bin")):
        # torch's own restricted reader reads weights in a pickle.
        model = kind.from_pretrained(str(folder), local_files_only=True, weights_only=True)
        return SpanModel(model, f"BERT from {folder}")
    config = transformers.BertConfig.from_json_file(str(files[0]))
    why = "TensorFlow's weights are not read" if list(folder.glob("*.ckpt*")) else "there are no weights"
    return SpanModel(kind(config), f"BERT as {files[0]} has it, with random weights: {why} in {folder}")


def from_folder(folder: Path, places: int) -> tuple[SpanModel, Questions]:
    """Return the BERT and the SQuAD questions that are found below `folder`; BERT-base with random weights without one."""
    configs = [each.parent for name in ("config.json", "bert_config.json") for each in sorted(folder.rglob(name))]
    words = [each.parent for each in sorted(folder.rglob("vocab.txt"))]
    data = squad(folder, words[0] if words else folder, max_seq_length=places)
    return bert(configs[0]) if configs else bert(size="base"), data


# --- data ---


class Questions(Dataset[Sample]):
    """SQuAD's questions as the model takes them: [CLS] question [SEP] passage [SEP].

    Long passages come in overlapping parts. In a part without the answer, and for impossible questions, both targets are 0.
    """

    def __init__(self, encoded: Any, answers: Sequence[Span], about: str) -> None:
        self.about = about
        self._words = torch.tensor(encoded["input_ids"], dtype=torch.int32)
        self._segments = torch.tensor(encoded["token_type_ids"], dtype=torch.int8)
        self._mask = torch.tensor(encoded["attention_mask"], dtype=torch.int8)
        sources = encoded["overflow_to_sample_mapping"]
        targets = [
            find_answer(places, segments, answers[source])
            for places, segments, source in zip(encoded["offset_mapping"], encoded["token_type_ids"], sources, strict=True)
        ]
        self._targets = torch.tensor(targets)

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> Sample:
        parts = (self._words[index], self._segments[index], self._mask[index])
        return torch.stack([part.long() for part in parts]), self._targets[index]


def find_answer(places: Sequence[Span], segments: Sequence[int], answer: Span) -> Span:
    """Return the first and last token of the answer's letters; (0, 0) unless all of it is in this part of the passage."""
    begin, end = answer
    passage = [at for at, (first, last) in enumerate(places) if segments[at] and first < last]
    touched = [at for at in passage if places[at][0] < end and places[at][1] > begin]
    is_whole = touched and places[passage[0]][0] <= begin and places[passage[-1]][1] >= end
    return (touched[0], touched[-1]) if is_whole else (0, 0)


def squad(path: Path, vocabulary: Path, *, max_seq_length: int = 384, limit: int = 0) -> Questions:
    """Return SQuAD 2.0's questions, answerable and impossible.

    Args:
        path: train-v2.0.json, or the directory that it is in.
        vocabulary: the directory with BERT's vocab.txt.
        limit: at most so many questions; 0 means all.

    Raises:
        ConfigError: a file is missing, or is not SQuAD.
    """
    if max_seq_length < 32:
        raise ConfigError(f"max_seq_length {max_seq_length}: use 32 or more, for a question and a part of its passage")
    file = path
    if path.is_dir():
        file = next((path / name for name in SQUAD_FILES if (path / name).is_file()), path / SQUAD_FILES[0])
    asked = list(islice(_read_questions(file), limit or None))
    if not asked:
        raise ConfigError(f"{file} has no questions: give SQuAD's train-v2.0.json")
    if not (vocabulary / "vocab.txt").is_file():
        raise ConfigError(f"{vocabulary} has no vocab.txt: SQuAD needs BERT's vocabulary, which comes with its weights")
    tokenizer = import_transformers().BertTokenizer(vocab=str(vocabulary / "vocab.txt"))
    encoded = tokenizer(
        [question for question, _, _ in asked], [text for _, text, _ in asked], truncation="only_second",
        max_length=max_seq_length, stride=max_seq_length // 4, padding="max_length", return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )  # fmt: skip
    return Questions(encoded, [answer for _, _, answer in asked], f"SQuAD, {len(asked)} questions of {file.name}")


def _read_questions(file: Path) -> Iterator[tuple[str, str, Span]]:
    """Yield question, passage and the letters of the answer in it; (0, 0) means no answer."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        for paragraph in (paragraph for article in content["data"] for paragraph in article["paragraphs"]):
            for entry in paragraph["qas"]:
                span = (0, 0)
                if not entry.get("is_impossible") and entry["answers"]:
                    begin = int(entry["answers"][0]["answer_start"])
                    span = (begin, begin + len(entry["answers"][0]["text"]))
                yield str(entry["question"]), str(paragraph["context"]), span
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}; https://rajpurkar.github.io/SQuAD-explorer/ has train-v2.0.json"
        ) from None
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is not SQuAD ({error!r:.80}): give its train-v2.0.json") from None


class SyntheticQuestions(Dataset[Sample]):
    """Made-up questions: two neighbouring words of a random passage, answered by the one to three words after them.

    Every third question has no answer. There is something to learn in it, but nothing about language.
    """

    about = "synthetic questions (random words; nothing is learnt about language)"

    def __init__(self, length: int, max_seq_length: int = 128) -> None:
        if length < 1 or max_seq_length < 16:
            raise ConfigError(f"{length} questions of {max_seq_length} places: use at least 1 and 16")
        self._count, self._length = length, max_seq_length

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._count:
            raise IndexError(index)
        random = torch.Generator().manual_seed(1234 * 1_000_003 + index)
        num_passage = self._length - 5
        passage = torch.randint(FIRST_WORD, NUM_WORDS, (num_passage,), generator=random)
        at, size = (int(torch.randint(low, high, (), generator=random)) for low, high in ((0, num_passage - 5), (1, 4)))
        question, targets = passage[at : at + 2], [4 + at + 2, 4 + at + 1 + size]
        if index % 3 == 2:
            question, targets = torch.randint(FIRST_WORD, NUM_WORDS, (2,), generator=random), [0, 0]
        begin, separator = torch.tensor([BEGIN]), torch.tensor([SEPARATOR])
        words = torch.cat((begin, question, separator, passage, separator))
        segments = (torch.arange(self._length) >= 4).long()
        return torch.stack((words, segments, torch.ones_like(words))), torch.tensor(targets)
