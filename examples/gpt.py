"""Train a small GPT on the characters of a text file, then let it generate text.

    python examples/gpt.py --text book.txt                                 # one process: two replicas take turns
    pliant run -w -np 2 examples/gpt.py --text book.txt                    # `pliant resize 1` while it trains changes nothing
    pliant run -np 2 examples/gpt.py --text book.txt --sync priority       # for slow networks

Without --text it reads its own source file.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pliant


class Windows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text; the target of each character is the next one."""

    def __init__(self, text: str, length: int) -> None:
        self.letters = sorted(set(text))
        number = {letter: index for index, letter in enumerate(self.letters)}
        self.text = torch.tensor([number[letter] for letter in text])
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = index * self.length
        return self.text[begin : begin + self.length], self.text[begin + 1 : begin + self.length + 1]


class Block(nn.Module):
    """A transformer block: causal attention, then a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.to_qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.from_heads(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(self.perceptron_norm(x))


class Gpt(nn.Module):
    def __init__(self, letters: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.length = length
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.letter, self.place):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.blocks(self.letter(text) + self.place.weight[: text.shape[1]])
        return self.norm(x) @ self.letter.weight.T  # tied, as in GPT-2

    @torch.no_grad()
    def write(self, text: Tensor, count: int) -> Tensor:
        """Return `text` followed by `count` sampled characters."""
        draw = torch.Generator().manual_seed(1)
        for _ in range(count):
            likely = self(text[None, -self.length :])[0, -1].softmax(0)
            text = torch.cat([text, torch.multinomial(likely, 1, generator=draw)])
        return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--length", type=int, default=64, help="characters of the context")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sync", choices=("fifo", "priority", "auto"), default="fifo")
    args = parser.parse_args()

    torch.set_num_threads(1)  # the same number on every machine: other numbers of threads give other bits
    torch.manual_seed(1)
    windows = Windows(args.text.read_text(), args.length)
    net = Gpt(len(windows.letters), args.length, args.width, args.layers)
    with pliant.join(replicas=2, sync=args.sync) as job:
        adam = torch.optim.AdamW(net.parameters(), lr=3e-3)
        model, optimizer = job.wrap(net, adam)
        loader = job.loader(windows, batch_size=8, shuffle=True)
        for epoch in job.epochs(args.epochs):
            for step in loader:
                for text, following in step:
                    loss = F.cross_entropy(model(text).flatten(0, 1), following.flatten())
                    loss.backward()
                    step.log(loss=loss)
                optimizer.step()
                optimizer.zero_grad()
                if job.is_first and step.number % 5 == 0:
                    print(f"epoch {epoch}, step {step.number}: loss {step['loss']:.4f}, {job.size} workers", flush=True)
        if job.is_first:
            written = net.eval().write(windows.text[:8], 120)
            print("it writes: " + "".join(windows.letters[letter] for letter in written), flush=True)


if __name__ == "__main__":
    main()
