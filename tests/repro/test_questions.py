"""BERT and its questions: SQuAD from its file with BERT's vocabulary, and synthetic ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pliant_repro.figures.questions import SyntheticQuestions, bert_in, small_bert, squad_in

from pliant.errors import ConfigError

PIECES = "[PAD] [UNK] [CLS] [SEP] [MASK] september 4 , 1981 when was she ##s born ? singer ##er sing"
CONTEXT = (
    "Beyonce Giselle Knowles-Carter (born September 4, 1981) is a singer. She performed in competitions as a child."
)


def write_squad(folder: Path, context: str = CONTEXT) -> None:
    answer = "September 4, 1981"
    asked = [
        {"question": "When was she born?", "is_impossible": False,
         "answers": [{"text": answer, "answer_start": context.index(answer)}]},
        {"question": "Where does she live?", "is_impossible": True, "answers": [],
         "plausible_answers": [{"text": "singer", "answer_start": context.index("singer")}]},
    ]  # fmt: skip
    content = {"version": "v2.0", "data": [{"title": "x", "paragraphs": [{"context": context, "qas": asked}]}]}
    (folder / "train-v2.0.json").write_text(json.dumps(content))
    (folder / "bert").mkdir()
    (folder / "bert" / "vocab.txt").write_text("\n".join(PIECES.split()) + "\n")


def test_squads_answers_are_found_in_the_input_and_impossible_ones_point_to_its_beginning(tmp_path: Path) -> None:
    write_squad(tmp_path)
    data = squad_in(tmp_path, 96)
    assert len(data) == 2
    inputs, (begin, end) = data[0]
    assert inputs.shape == (3, 96)
    assert inputs[0, begin : end + 1].tolist() == [5, 6, 7, 8]
    assert inputs[0, :7].tolist() == [2, 9, 10, 11, 13, 14, 3], "[CLS] when was she born ? [SEP]"
    assert inputs[1, :8].tolist() == [0] * 7 + [1]
    assert data[1][1].tolist() == [0, 0]


def test_long_passages_come_in_parts_and_the_answer_counts_where_it_is(tmp_path: Path) -> None:
    write_squad(tmp_path, "word " * 50 + CONTEXT + " and more" * 50)
    data = squad_in(tmp_path, 40)
    assert len(data) > 8
    found = [data[number] for number in range(len(data)) if data[number][1].tolist() != [0, 0]]
    assert found, "no part has the answer"
    assert all(inputs[0, begin : end + 1].tolist() == [5, 6, 7, 8] for inputs, (begin, end) in found)


@pytest.mark.parametrize(
    "content", ["", "{}", '{"data": 3}', '{"data": [{"paragraphs": [{"context": "x"}]}]}', '{"data": []}']
)
def test_what_is_not_squad_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "train-v2.0.json").write_text(content)
    with pytest.raises(ConfigError, match=r"train-v2\.0\.json"):
        squad_in(tmp_path, 96)


def test_missing_files_are_named_with_where_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SQuAD-explorer"):
        squad_in(tmp_path, 96)
    write_squad(tmp_path)
    (tmp_path / "bert" / "vocab.txt").unlink()
    with pytest.raises(ConfigError, match="vocabulary"):
        squad_in(tmp_path, 96)


def test_synthetic_questions_are_the_same_everywhere() -> None:
    data, again = SyntheticQuestions(32), SyntheticQuestions(32)
    for number in range(9):
        inputs, targets = data[number]
        assert torch.equal(inputs, again[number][0])
        begin, end = targets.tolist()
        if number % 3 == 2:
            assert (begin, end) == (0, 0)
        else:
            assert torch.equal(inputs[0, begin - 2 : begin], inputs[0, 1:3]), "the question stands before the answer"
            assert begin <= end < 31


def test_a_small_bert_learns_where_answers_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = small_bert(64)
    samples = [SyntheticQuestions(32)[number] for number in range(8)]
    inputs, targets = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
    assert model(inputs).shape == (8, 32, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        assert all(each.grad is not None for each in model.parameters()), "a parameter has no use"
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    model.bert.save_pretrained(tmp_path / "inside")
    loaded = bert_in(tmp_path).eval()
    assert torch.equal(loaded(inputs), model.eval()(inputs))


def test_bert_without_weights_is_as_its_configuration_says(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 99,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    (tmp_path / "bert_config.json").write_text(json.dumps(sizes))
    assert bert_in(tmp_path).bert.config.vocab_size == 99
