"""Use Hugging Face's Trainer on an elastic job: its result does not depend on the number of workers.

    python examples/huggingface.py                          # one process: two replicas take turns
    pliant run -w -np 2 examples/huggingface.py             # `pliant resize 1` while it trains changes no bit

A tiny BERT learns whether the larger of two numbers comes first. Compared with a program for one GPU, only the class of the
trainer and `replicas` differ.
"""

import argparse
import hashlib

import torch

from pliant.integrations.huggingface import ElasticTrainer

# isort: split
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments


class Pairs(torch.utils.data.Dataset):
    """Pairs of numbers below 100, digit by digit. The label says whether the first is larger."""

    def __init__(self, length: int) -> None:
        draw = torch.Generator().manual_seed(2)
        self.numbers = torch.randint(0, 100, (length, 2), generator=draw)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        first, second = self.numbers[index]
        words = torch.stack([first // 10, first % 10, torch.tensor(10), second // 10, second % 10])
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": (first > second).long()}


def model() -> BertForSequenceClassification:
    torch.manual_seed(1)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=11, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=8,
        )
    )  # fmt: skip


def arguments(epochs: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir="huggingface-run", num_train_epochs=epochs, per_device_train_batch_size=8, learning_rate=2e-3,
        warmup_steps=5, logging_steps=20, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=3,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--samples", type=int, default=512)
    args = parser.parse_args()

    torch.set_num_threads(1)  # the same number on every machine: other numbers of threads give other bits
    pairs = Pairs(args.samples)
    trainer = ElasticTrainer(model=model(), args=arguments(args.epochs), train_dataset=pairs, replicas=2)
    trainer.train()
    if trainer.is_world_process_zero():
        state = b"".join(parameter.detach().numpy().tobytes() for parameter in trainer.model.parameters())
        print(f"model {hashlib.sha256(state).hexdigest()[:16]} after step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main()
