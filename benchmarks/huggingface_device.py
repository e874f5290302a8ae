"""Hugging Face's Trainer with fp16 on a device: the bits of the same program under torchrun, on 1 and 2 workers, and with a kill.

    python benchmarks/huggingface_device.py cuda        # on a machine with one CUDA GPU, from the repository's root
    python benchmarks/huggingface_device.py cpu         # bf16 instead of fp16, to test this program itself

Two ranks of the oracle share the GPU, so they use gloo. The program accumulates over two batches and evaluates. Exit code 1 if a
digest differs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
RANKS = 2
LIMIT_S = 240
PLIANT = "import sys; from pliant.cli.main import main; sys.exit(main())"


def train(side: str, device: str) -> None:
    """Run the program: as transformers' own Trainer, or on a job."""
    import torch

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    from pliant.integrations.huggingface import ElasticTrainer  # isort: skip
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

    draw = torch.Generator().manual_seed(2)
    words = torch.randint(1, 90, (96, 12), generator=draw)
    samples = [{"input_ids": row, "labels": (row[0] > row[1]).long()} for row in words]
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=90, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=16, attn_implementation="eager",
    )  # fmt: skip
    folder = tempfile.mkdtemp()
    arguments = TrainingArguments(
        output_dir=folder, num_train_epochs=2, per_device_train_batch_size=4, learning_rate=2e-3, seed=3, warmup_steps=2,
        logging_steps=2, save_strategy="no", report_to=[], disable_tqdm=True, gradient_accumulation_steps=2,
        eval_strategy="steps", eval_steps=4, use_cpu=device == "cpu", fp16=device == "cuda", bf16=device == "cpu",
        **({"ddp_backend": "gloo"} if side == "oracle" else {}),
    )  # fmt: skip

    class Tell(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            print(f"step {state.global_step}", flush=True)

    given: dict[str, Any] = {
        "model": BertForSequenceClassification(config), "args": arguments, "train_dataset": samples,
        "eval_dataset": samples[:17], "callbacks": [Tell()],
    }  # fmt: skip
    trainer = Trainer(**given) if side == "oracle" else ElasticTrainer(replicas=RANKS, **given)
    trainer.train()
    if trainer.is_world_process_zero():
        digest = hashlib.sha256()
        moments = [value for each in trainer.optimizer.state_dict()["state"].values() for value in each.values()]
        for tensor in [*trainer.model.state_dict().values(), *moments]:
            digest.update(tensor.detach().cpu().numpy().tobytes())
        scaler = trainer.accelerator.scaler
        scale = scaler.get_scale() if scaler is not None else 1.0
        losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        print(f"digest {digest.hexdigest()[:16]} scale {scale:g} eval {losses}", flush=True)


def oracle(device: str) -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = []
    for rank in range(RANKS):
        world = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ = {**os.environ, **{name: str(value) for name, value in world.items()}}
        command = [sys.executable, __file__, device, "--side", "oracle"]
        ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True))
    return "".join(each.communicate(timeout=LIMIT_S)[0] for each in ranks)


def ours(device: str, workers: int, *, kills: bool = False) -> str:
    """Run the program on a job. With `kills` a worker is killed after the third step, and replaced."""
    command = [sys.executable, "-c", PLIANT, "run", "-w", "-np", str(workers), __file__, device, "--side", "ours"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    assert job.stdout is not None
    lines = []
    for line in job.stdout:
        lines.append(line)
        if kills and "step 3" in line:
            kills = False
            pids = subprocess.run(["pgrep", "-f", "side ours"], stdout=subprocess.PIPE, text=True, check=True).stdout
            victim = max(int(pid) for pid in pids.split() if int(pid) not in (os.getpid(), job.pid))
            os.kill(victim, signal.SIGKILL)
            lines.append(f"killed {victim}\n")
    job.wait(timeout=LIMIT_S)
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("--side", choices=("oracle", "ours"))
    args = parser.parse_args()
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
    if args.side:
        train(args.side, args.device)
        return
    runs = {
        "torchrun": lambda: oracle(args.device),
        "1 worker": lambda: ours(args.device, 1),
        "2 workers": lambda: ours(args.device, 2),
        "2 workers, one killed": lambda: ours(args.device, 2, kills=True),
    }
    found = {}
    for name, run in runs.items():
        text = run()
        digests = re.findall(r"digest (.*)", text)
        found[name] = digests[0] if digests else f"no digest:\n{text[-2000:]}"
        print(f"{name:24} {found[name]}", flush=True)
    if len(set(found.values())) > 1:
        sys.exit("the digests differ")


if __name__ == "__main__":
    main()
