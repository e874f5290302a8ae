"""Questions for BERT: SQuAD 2.0 from its file, or synthetic ones that say so; and how texts become numbers.

transformers is imported when it is used: for BERT's own vocabulary only.
"""

from __future__ import annotations

import importlib.util
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pliant.errors import ConfigError

WORDS = 8192
"""Different words that the built-in tokenizer and the small model tell apart."""
PAD, BEGIN, SEPARATOR, FIRST_WORD = 0, 2, 3, 4
SQUAD_FILES = ("train-v2.0.json", "dev-v2.0.json")
Sample = tuple[Tensor, Tensor]


def import_transformers() -> Any:
    """transformers; it imports torchvision if that is there, and takes seconds."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("transformers is not installed: `pip install 'pliant[experiments]'`")
    if importlib.util.find_spec("torchvision") is not None:
        from pliant.torchvision_import import import_torchvision

        import_torchvision()
    import transformers

    return transformers


class Tokenizer(Protocol):
    """Cuts a text into numbered words, and knows where each stands in it."""

    begin: int
    separator: int
    pad: int

    def cut(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The words' numbers, and the (begin, end) of each in `text`."""
        ...


class HashTokenizer:
    """Words and punctuation in lower case, numbered by a checksum: needs no vocabulary, and may mix two words up."""

    begin, separator, pad = BEGIN, SEPARATOR, PAD
    _WORD = re.compile(r"\w+|[^\w\s]")

    def __init__(self, num_words: int = WORDS) -> None:
        self._num_words = num_words

    def cut(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = list(self._WORD.finditer(text))
        room = self._num_words - FIRST_WORD
        # Python's own hash() differs between processes, and all replicas must agree.
        numbers = [FIRST_WORD + zlib.crc32(word[0].lower().encode()) % room for word in found]
        return numbers, [word.span() for word in found]


class BertVocabulary:
    """BERT's own word pieces, from a directory (or file) with its vocab.txt."""

    def __init__(self, path: str | Path) -> None:
        file = Path(path) / "vocab.txt" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise ConfigError(f"{file}: there is no such vocabulary; BERT's directories have a vocab.txt")
        self._inner = import_transformers().BertTokenizer(vocab=str(file))
        self.begin, self.separator = int(self._inner.cls_token_id), int(self._inner.sep_token_id)
        self.pad = int(self._inner.pad_token_id)

    def cut(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        told = self._inner(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(told["input_ids"]), [(int(begin), int(end)) for begin, end in told["offset_mapping"]]


@dataclass(frozen=True, slots=True)
class Passage:
    words: list[int]
    places: list[tuple[int, int]]
    """Where each word stands in the text."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A question, with as much of its passage as fits beside it."""

    question: list[int]
    passage: Passage
    first: int
    """Of the passage's words."""
    last: int
    """Not included."""
    answer: tuple[int, int]
    """First and last of the passage's words; (-1, -1): none."""


class Questions(Dataset[Sample]):
    """SQuAD's questions as the model takes them: [CLS] question [SEP] passage [SEP]. Long passages come in several
    overlapping parts; in a part without the answer, and for impossible questions, both targets are 0."""

    def __init__(self, features: Sequence[Feature], tokenizer: Tokenizer, max_seq_length: int, about: str) -> None:
        self._features, self._tokenizer, self._length = list(features), tokenizer, max_seq_length
        self.about = about

    def __len__(self) -> int:
        return len(self._features)

    def __getitem__(self, index: int) -> Sample:
        feature, tokenizer = self._features[index], self._tokenizer
        head = [tokenizer.begin, *feature.question, tokenizer.separator]
        body = [*feature.passage.words[feature.first : feature.last], tokenizer.separator]
        inputs = torch.zeros(3, self._length, dtype=torch.int64)
        inputs[0].fill_(tokenizer.pad)
        used = len(head) + len(body)
        inputs[0, :used] = torch.tensor(head + body)
        inputs[1, len(head) : used] = 1
        inputs[2, :used] = 1
        begin, end = feature.answer
        targets = [0, 0]
        if feature.first <= begin and 0 <= begin <= end < feature.last:
            targets = [len(head) + begin - feature.first, len(head) + end - feature.first]
        return inputs, torch.tensor(targets)


def squad(
    path: str | Path,
    *,
    vocabulary: str | Path = "",
    max_seq_length: int = 384,
    doc_stride: int = 128,
    max_query_length: int = 64,
    limit: int = 0,
) -> Questions:
    """SQuAD 2.0's questions, answerable and impossible.

    Args:
        path: train-v2.0.json, or the directory that it is in.
        vocabulary: a directory with BERT's vocab.txt; without, words are numbered by `HashTokenizer`.
        limit: at most so many questions; 0: all.

    Raises:
        ConfigError: the file is missing, or is not SQuAD.
    """
    file = Path(path)
    if file.is_dir():
        file = next((file / name for name in SQUAD_FILES if (file / name).is_file()), file / SQUAD_FILES[0])
    if max_seq_length < max_query_length + 4 or doc_stride < 1 or max_query_length < 1:
        raise ConfigError(
            f"max_seq_length {max_seq_length}, max_query_length {max_query_length}, doc_stride {doc_stride}: "
            "a question and some of its passage must fit"
        )
    tokenizer: Tokenizer = BertVocabulary(vocabulary) if vocabulary else HashTokenizer()
    features, count = [], 0
    for text, questions in _paragraphs(file):
        words, places = tokenizer.cut(text)
        passage = Passage(words, places)
        for question, answer in questions:
            if limit and count >= limit:
                break
            count += 1
            numbers = tokenizer.cut(question)[0][:max_query_length]
            room = max_seq_length - len(numbers) - 3
            span = _words_at(places, answer)
            features += [
                Feature(numbers, passage, first, min(first + room, len(words)), span)
                for first in _starts(len(words), room, doc_stride)
            ]
    if not features:
        raise ConfigError(f"{file} has no questions: give SQuAD's train-v2.0.json")
    return Questions(features, tokenizer, max_seq_length, f"SQuAD, {count} questions of {file.name}")


def _starts(num_words: int, room: int, stride: int) -> Iterator[int]:
    """Where the parts of a passage begin."""
    first = 0
    while True:
        yield first
        if first + room >= num_words:
            return
        first += min(stride, room)


def _words_at(places: Sequence[tuple[int, int]], answer: tuple[int, int] | None) -> tuple[int, int]:
    """The first and last word of the answer's letters; (-1, -1) without."""
    if answer is None:
        return -1, -1
    touched = [number for number, (begin, end) in enumerate(places) if begin < answer[1] and end > answer[0]]
    return (touched[0], touched[-1]) if touched else (-1, -1)


Asked = list[tuple[str, tuple[int, int] | None]]
"""Questions, and from where to where in the passage the answer stands."""


def _paragraphs(file: Path) -> Iterator[tuple[str, Asked]]:
    """The passages of a SQuAD file with their questions."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}; https://rajpurkar.github.io/SQuAD-explorer/ has train-v2.0.json"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}): give SQuAD's train-v2.0.json") from None
    try:
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                yield str(paragraph["context"]), [_asked(entry) for entry in paragraph["qas"]]
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{file} is not SQuAD ({error!r:.80}): give its train-v2.0.json") from None


def _asked(entry: Any) -> tuple[str, tuple[int, int] | None]:
    if entry.get("is_impossible") or not entry["answers"]:
        return str(entry["question"]), None
    first = entry["answers"][0]
    begin = int(first["answer_start"])
    return str(entry["question"]), (begin, begin + len(first["text"]))


class SyntheticQuestions(Dataset[Sample]):
    """Made up: a question is two neighbouring words of a random passage, its answer the one to three after them. Every
    third question has no answer. There is something to learn in it, but nothing about language."""

    about = "synthetic questions (random words; nothing is learnt about language)"

    def __init__(self, length: int, max_seq_length: int = 128, num_words: int = WORDS, seed: int = 1234) -> None:
        if length < 1 or max_seq_length < 16 or num_words < 64:
            raise ConfigError(
                f"{length} questions of {max_seq_length} places and {num_words} words: use at least 1, 16 and 64"
            )
        self._count, self._length, self._num_words, self._seed = length, max_seq_length, num_words, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._count:
            raise IndexError(index)
        random = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        num_passage = self._length - 5
        passage = torch.randint(FIRST_WORD, self._num_words, (num_passage,), generator=random)
        at, size = (int(torch.randint(low, high, (), generator=random)) for low, high in ((0, num_passage - 5), (1, 4)))
        question, targets = passage[at : at + 2], [4 + at + 2, 4 + at + 1 + size]
        if index % 3 == 2:
            question, targets = torch.randint(FIRST_WORD, self._num_words, (2,), generator=random), [0, 0]
        marks = [torch.tensor([number]) for number in (BEGIN, SEPARATOR)]
        words = torch.cat((marks[0], question, marks[1], passage, marks[1]))
        segments = (torch.arange(self._length) >= 4).long()
        return torch.stack((words, segments, torch.ones_like(words))), torch.tensor(targets)


def questions(
    path: str | Path = "", *, length: int = 4096, max_seq_length: int = 128, **reading: Any
) -> Questions | SyntheticQuestions:
    """SQuAD's questions where there is a path, else `length` synthetic ones; `about` says which."""
    if path:
        return squad(path, max_seq_length=max_seq_length, **reading)
    return SyntheticQuestions(length, max_seq_length)
