"""BERT for question answering, and its data: SQuAD 2.0 from its file, or synthetic questions.

A model takes one tensor, (batch, 3, places) of word numbers, segments and mask, and returns (batch, places, 2): whether the
answer begins, and ends, at each place. Place 0 means that there is no answer. With targets (batch, 2) the loss is
`F.cross_entropy`, so the same loop trains it as any classifier.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from pliant.errors import ConfigError

NUM_WORDS = 8192
"""Different words of the synthetic questions and of the small model."""
NUM_SYNTHETIC = 1 << 16
BEGIN, SEPARATOR, FIRST_WORD = 2, 3, 4
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
    """transformers' BERT with one tensor in and one out."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, inputs: Tensor) -> Tensor:
        words, segments, mask = inputs.unbind(1)
        found = self.bert(input_ids=words, token_type_ids=segments, attention_mask=mask)
        return torch.stack((found.start_logits, found.end_logits), -1)


def small_bert(places: int) -> SpanModel:
    """Return a BERT of two layers with random weights."""
    transformers = import_transformers()
    config = transformers.BertConfig(
        vocab_size=NUM_WORDS, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512,
        max_position_embeddings=places,
    )  # fmt: skip
    return SpanModel(transformers.BertForQuestionAnswering(config))


def bert_in(folder: Path) -> SpanModel:
    """Return the BERT found below `folder`.

    Weights are random where there is only a configuration, such as beside TensorFlow's checkpoint. Without that, too, it is
    BERT-base.
    """
    transformers = import_transformers()
    kind = transformers.BertForQuestionAnswering
    weights = [*folder.rglob("model.safetensors"), *folder.rglob("pytorch_model.bin")]
    if weights:
        # torch's own restricted reader reads weights in a pickle.
        return SpanModel(kind.from_pretrained(str(weights[0].parent), local_files_only=True, weights_only=True))
    configs = [*folder.rglob("config.json"), *folder.rglob("bert_config.json")]
    base = transformers.BertConfig
    return SpanModel(kind(base.from_json_file(str(configs[0])) if configs else base()))


# --- data ---


class Questions(Dataset[Sample]):
    """SQuAD's questions as the model takes them: [CLS] question [SEP] passage [SEP].

    Long passages come in overlapping parts. In a part without the answer, and for impossible questions, both targets are 0.
    """

    def __init__(self, encoded: Any, answers: Sequence[Span]) -> None:
        self._words = torch.tensor(encoded["input_ids"], dtype=torch.int32)
        self._segments = torch.tensor(encoded["token_type_ids"], dtype=torch.int8)
        self._mask = torch.tensor(encoded["attention_mask"], dtype=torch.int8)
        sources = encoded["overflow_to_sample_mapping"]
        targets = [
            find_answer(places, segments, answers[source])
            for places, segments, source in zip(
                encoded["offset_mapping"], encoded["token_type_ids"], sources, strict=True
            )
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


def squad_in(folder: Path, places: int) -> Questions:
    """Return the questions of train-v2.0.json in `folder`, answerable and impossible, by the vocab.txt found below it.

    Raises:
        ConfigError: a file is missing, or is not SQuAD.
    """
    asked = list(_read_questions(folder / "train-v2.0.json"))
    if not asked:
        raise ConfigError(f"{folder}/train-v2.0.json has no questions")
    vocabulary = next(folder.rglob("vocab.txt"), None)
    if vocabulary is None:
        raise ConfigError(f"{folder} has no vocab.txt: SQuAD needs BERT's vocabulary, which comes with its weights")
    tokenizer = import_transformers().BertTokenizer(vocab=str(vocabulary))
    encoded = tokenizer(
        [question for question, _, _ in asked], [text for _, text, _ in asked], truncation="only_second", max_length=places,
        stride=places // 4, padding="max_length", return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    return Questions(encoded, [answer for _, _, answer in asked])


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
        where = "https://rajpurkar.github.io/SQuAD-explorer/ has train-v2.0.json"
        raise ConfigError(f"{file}: {error.strerror}; {where}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is not SQuAD ({error!r:.80}): give its train-v2.0.json") from None


class SyntheticQuestions(Dataset[Sample]):
    """Made-up questions: two neighbouring words of a random passage, answered by the one to three words after them.

    Every third question has no answer. There is something to learn in it, but nothing about language.
    """

    def __init__(self, places: int) -> None:
        self._places = places

    def __len__(self) -> int:
        return NUM_SYNTHETIC

    def __getitem__(self, index: int) -> Sample:
        random = torch.Generator().manual_seed(1234 * 1_000_003 + index)
        num_passage = self._places - 5
        passage = torch.randint(FIRST_WORD, NUM_WORDS, (num_passage,), generator=random)
        at, size = (int(torch.randint(low, high, (), generator=random)) for low, high in ((0, num_passage - 5), (1, 4)))
        question, targets = passage[at : at + 2], [4 + at + 2, 4 + at + 1 + size]
        if index % 3 == 2:
            question, targets = torch.randint(FIRST_WORD, NUM_WORDS, (2,), generator=random), [0, 0]
        begin, separator = torch.tensor([BEGIN]), torch.tensor([SEPARATOR])
        words = torch.cat((begin, question, separator, passage, separator))
        segments = (torch.arange(self._places) >= 4).long()
        return torch.stack((words, segments, torch.ones_like(words))), torch.tensor(targets)
