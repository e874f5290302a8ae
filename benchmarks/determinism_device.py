"""What D1 promises on a device: equal bits twice, a nondeterministic operator refused by name, and what strict kernels cost.

    OUT=. python benchmarks/determinism_device.py --device cuda     # one GPU, from the repository's root, about 5 minutes
    OUT=. python benchmarks/determinism_device.py --device cpu      # tiny networks, to test this program itself

It needs torch and numpy only, writes $OUT/determinism_device.json, prints a line for each check, and ends with exit code 1 if
one of them fails. Each check runs in processes of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

LIMIT_S = 150.0
"""The longest that one process may take."""
STEPS = 5
Json = dict[str, Any]


# --- the models ---


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*split, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        wide = (
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )
        self.mlp = nn.Sequential(*wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result


class Gpt(nn.Module):
    """GPT-2: 124M parameters with 12 blocks of width 768; the last layer shares the weights of the embedding."""

    def __init__(self, blocks: int, width: int, heads: int, length: int, words: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


def gpt(device: torch.device) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return the model and its step, as `pliant doctor` wants them: autocast to bfloat16, batch 8 x 1024 on a GPU."""
    torch.manual_seed(7)
    full = device.type == "cuda"
    model = Gpt(12, 768, 12, 1024, 50304) if full else Gpt(2, 32, 2, 16, 101)
    tokens = torch.randint(50304 if full else 101, (8, 1025 if full else 17), device=device)

    def step(model: nn.Module) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return model.to(device), step


def build() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """For `pliant doctor benchmarks/determinism_device.py:build --device cuda`."""
    return gpt(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


class PutInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad.clone().put_(
            torch.zeros(1, dtype=torch.long, device=grad.device), torch.zeros(1, device=grad.device)
        )


class Strange(nn.Module):
    """Calls operators without deterministic kernels: `put_` has none anywhere, the others have none on CUDA."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.which == "put_":
            return x.clone().put_(torch.zeros(1, dtype=torch.long, device=x.device), torch.zeros(1, device=x.device))
        if self.which == "put in backward":
            return PutInBackward.apply(x)  # type: ignore[no-any-return]
        if self.which == "median":
            return x + x.median(-1, keepdim=True).values
        if self.which == "grid":
            grid = torch.rand(x.shape[0], 8, 8, 2, device=x.device) * 2 - 1
            return F.grid_sample(x, grid, align_corners=False)
        return x


def strange(which: str, device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """Return a model with convolutions around the operator, and a batch."""
    torch.manual_seed(7)
    inner: nn.Module = nn.AdaptiveAvgPool2d(3) if which == "pool" else Strange(which)
    blocks = [
        nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), each, nn.Conv2d(2, 2, 1)) for each in (nn.ReLU(), inner, nn.ReLU())
    ]
    return nn.Sequential(*blocks).to(device), torch.randn(2, 2, 8, 8, device=device)


OPERATORS = {
    "put_": ("put_", "1.1 (Strange)"),
    "put in backward": ("put_", "of 1 (Sequential), after 1.0 and before 1.2"),
    "median": ("median", "1.1 (Strange)"),
    "pool": ("adaptive_avg_pool2d_backward", "1.1 (AdaptiveAvgPool2d)"),
    "grid": ("grid_sampler_2d_backward", "of 1 (Sequential), after 1.0 and before 1.2"),
}
"""The operators to try: their names, and the places that the error must name."""


# --- what the processes do ---


def digest_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def train_gpt(device: torch.device, level: str, compiled: bool) -> Json:
    """Train GPT-2 with two replicas on this worker; return the digests of its parameters after each step."""
    import pliant

    job = pliant.join(replicas=2, determinism=level)
    model, step_of = gpt(device)
    job.wrap(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
    run = torch.compile(model) if compiled else model
    optimizer = job._declared.wrapped.optimizers[0]  # type: ignore[union-attr]
    digests = []
    for step in job.steps(STEPS):
        for _ in step:
            step_of(run).backward()  # type: ignore[arg-type, no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        digests.append(digest_of(model))
    from pliant.train import determinism

    return {"digests": digests, "settings": determinism.settings()}


def train_strange(device: torch.device, which: str, allow: list[str]) -> Json:
    """Train a model with an operator that has no deterministic kernel. Its error is not caught."""
    import pliant

    job = pliant.join(replicas=2, allow=allow)
    model, batch = strange(which, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.wrap(model, optimizer)
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
    for step in job.steps(2):
        for _ in step:
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return {"strict": strict}


def join_late(device: torch.device) -> Json:
    """Use the GPU before the job is joined, without the environment that cuBLAS needs."""
    import pliant

    model = nn.Linear(4, 4, device=device)
    model(torch.ones(4, 4, device=device))
    job = pliant.join(replicas=2)
    job.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return {}


def search(device: torch.device, names: list[str]) -> Json:
    """Return all operators that `pliant doctor` finds in a model that has several, and the microseconds of a look at the
    settings."""
    from pliant.train import determinism, trial

    parts = [strange(name, device)[0] for name in names]
    found = trial.find_operators(nn.Sequential(*parts), trial.make_loss(torch.randn(2, 2, 8, 8), device))
    began_s = time.perf_counter()
    for _ in range(100):
        determinism.settings()
    look_us = (time.perf_counter() - began_s) * 1e4
    return {"found": [[each.operator, each.module, each.direction] for each in found], "look_us": round(look_us, 1)}


def price(device: torch.device, compiled: bool) -> Json:
    """Return what determinism costs GPT-2, and which of its operators have no deterministic kernel."""
    from dataclasses import asdict

    from pliant.train import trial

    model, step = gpt(device)
    found = trial.find_operators(model, step)
    run = torch.compile(model) if compiled else model
    measured = trial.measure_price(model, lambda _: step(run), device, found)  # type: ignore[arg-type]
    return {"found": [each.operator for each in found], **asdict(measured)}


# --- the checks ---


class Checks:
    """Runs processes, and keeps what they found."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.rows: list[Json] = []

    def child(self, *words: str, cublas: str | None = None) -> tuple[Json, str, str]:
        """Run a part in a process of its own; return what it found, and what it wrote to stdout and stderr."""
        environ = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
        if cublas:
            environ["CUBLAS_WORKSPACE_CONFIG"] = cublas
        argv = [sys.executable, __file__, "--device", self.device, "--part", *words]
        try:
            done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"failed": f"longer than {LIMIT_S:.0f} s"}, "", ""
        lines = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        found = json.loads(lines[-1]) if lines else {"failed": done.stderr.strip().splitlines()[-1:]}
        return found, done.stdout, done.stderr

    def add_doctor(self) -> None:
        """Run the command as a user does."""
        run = "import sys; sys.path.insert(0, sys.argv.pop(1)); from pliant.cli.main import main; main()"
        argv = [sys.executable, "-c", run, str(ROOT), "doctor", f"{__file__}:build", "--device", self.device]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
        ok = done.returncode == 0 and "ms strict" in done.stdout
        self.add("pliant doctor of GPT-2", ok, said=done.stdout.splitlines()[-7:], errors=done.stderr[-300:])

    def add(self, what: str, ok: bool | None, **data: Any) -> None:
        self.rows.append({"what": what, "ok": ok, **data})
        print({True: "ok  ", False: "FAIL", None: "    "}[ok], what, json.dumps(data), flush=True)


def run_checks(device: str, compiled: bool) -> list[Json]:
    checks, names = Checks(device), ["put_", "put in backward"]
    if device == "cuda":
        names += ["median", "pool", "grid"]
    for kind in ("eager", "compiled") if compiled else ("eager",):
        first, second = checks.child("gpt", "D1", kind)[0], checks.child("gpt", "D1", kind)[0]
        same = len(first.get("digests", ())) == STEPS and first["digests"] == second.get("digests")
        second.pop("settings", None)
        checks.add(f"GPT-2 under autocast, {kind}, strict: the same bits twice", same, first=first, second=second)
    free = [checks.child("gpt", "D0", "eager")[0].get("digests") for _ in range(2)]
    checks.add("GPT-2, D0, twice the same bits (not promised)", None, same=free[0] == free[1])
    tries = [(which, *allowed) for which in names for allowed in ((), (OPERATORS[which][0],), ("cumprod",))]
    with ThreadPoolExecutor(4 if device == "cuda" else 2) as pool:
        results = dict(zip(tries, pool.map(lambda words: checks.child("strange", *words), tries), strict=True))
    for which in names:
        operator, place = OPERATORS[which]
        _, _, errors = results[which,]
        said = next((line for line in errors.splitlines() if "NotDeterministic" in line), errors[-500:])
        ok = f"{operator} has no deterministic kernel" in said and place in said
        checks.add(f"{which} is refused by name and module", ok, said=said[:300])
        found, output, errors = results[which, operator]
        ok = found.get("strict") is True and output.count(f"bits not promised: {operator}") == 1
        checks.add(f"{which} is allowed, and printed once", ok, found=found, errors=errors[-300:])
        _, _, errors = results[which, "cumprod"]
        checks.add(f"{which} is refused if another operator is allowed", "NotDeterministic" in errors)
    found = checks.child("search", *names)[0]
    expected = {
        "put_": ["put_", "{}.1.1", "forward"],
        "put in backward": ["put_", "{}.1.1", "backward"],
        "median": ["median", "{}.1.1", "forward"],
        "pool": ["adaptive_avg_pool2d_backward", "{}.1.1", "backward"],
        "grid": ["grid_sampler_2d_backward", "{}.1.1", "backward"],
    }
    wanted = [[text.format(number) for text in expected[name]] for number, name in enumerate(names)]
    wanted.append(["put_", "0.1.1", "backward"])  # that of put_ puts zeros
    ok = sorted(found.get("found", ())) == sorted(wanted)
    checks.add("the search finds all operators with their modules", ok, found=found, wanted=wanted)
    if device == "cuda":
        errors = checks.child("late")[2]
        checks.add("a program that uses the GPU before pliant.join is told so", "CUBLAS_WORKSPACE_CONFIG" in errors)
        errors = checks.child("late", cublas=":4096:8")[2]
        checks.add("with the environment of `pliant run` it runs", not errors, said=errors[-300:])
    for kind in ("eager", "compiled") if compiled else ("eager",):
        found = checks.child("price", kind)[0]
        checks.add(f"price of determinism for GPT-2, {kind}", None if "failed" not in found else False, **found)
    if importlib.util.find_spec("typer") is not None:
        checks.add_doctor()
    return checks.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--eager-only", action="store_true", help="leave out torch.compile, which takes minutes on a CPU"
    )
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.part:
        began_s = time.monotonic()
        rows = run_checks(given.device, compiled=given.device == "cuda" and not given.eager_only)
        name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        report = {
            "torch": torch.__version__,
            "device": name,
            "took_s": round(time.monotonic() - began_s),
            "checks": rows,
        }
        path = Path(os.environ.get("OUT", ".")) / "determinism_device.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
        failed = [row["what"] for row in rows if row["ok"] is False]
        print(f"{len(rows)} checks, {len(failed)} failed, {report['took_s']} s: {path}")
        sys.exit(1 if failed else 0)
    part, *words = given.part
    device = torch.device(given.device)
    found = {
        "gpt": lambda: train_gpt(device, words[0], words[1] == "compiled"),
        "strange": lambda: train_strange(device, words[0], words[1:]),
        "late": lambda: join_late(device),
        "search": lambda: search(device, words),
        "price": lambda: price(device, words[0] == "compiled"),
    }[part]()
    print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
