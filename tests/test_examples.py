"""Every example is run as its docstring says, alone and on several workers, and ends alike: small sizes, real programs."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from command import command
from gang import FULL, addresses, run, specs, torchrun

from pliant import record
from pliant.fed import simulate
from pliant.fed.data.datasets import DEBIAN
from pliant.jobs.schema import read_job
from pliant.yaml_source import YamlSource

sys.path.insert(0, str(Path(__file__).parent / "jobs"))

from serving_process import serving

pytestmark = [pytest.mark.processes, pytest.mark.timeout(420)]

EXAMPLES = Path(__file__).parent.parent / "examples"
GPT = ("--epochs", "4", "--length", "16", "--width", "16", "--layers", "1", "--text")
GROW = "grow-batch-size:max_batch=64,warmup=20,interval=20,lr=sqrt"
RESNET = ("--epochs", "1", "--samples", "8", "--batch-size", "2")


@dataclass(frozen=True, kw_only=True)
class ExampleRun:
    """One run of an example."""

    program: str
    arguments: tuple[str, ...] = ()
    adapting: dict[str, str] = field(default_factory=dict)
    launched: bool = True
    """Whether it is started as a worker of pliant; if not, by torchrun or alone."""


def run_examples(runs: dict[str, ExampleRun], workers: int) -> dict[str, list[str]]:
    """Return what each worker prints. The same processes do all runs, because imports take longest."""
    places = []
    with torchrun(workers) as ranks:
        for one in runs.values():
            members = [replace(each, adapting=one.adapting) for each in specs(addresses("A" * workers), timeout_s=60)]
            places.append([member.to_environ() for member in members] if one.launched else ranks)
        outputs = run(_run_in_turn, workers, list(runs.values()), places, timeout_s=200)
    return {name: [each[index] for each in outputs] for index, name in enumerate(runs)}


def _run_in_turn(rank: int, runs: Sequence[ExampleRun], places: Sequence[Sequence[dict[str, str]]]) -> list[str]:
    outputs = []
    for one, environs in zip(runs, places, strict=True):
        for name in [name for name in os.environ if name.startswith("PLIANT_")]:
            del os.environ[name]
        os.environ.update(environs[rank])
        path = EXAMPLES / one.program
        sys.argv, sys.path[0] = [str(path), *one.arguments], str(path.parent)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            try:
                runpy.run_path(str(path), run_name="__main__")
            except Exception:
                print(traceback.format_exc())
        outputs.append(said.getvalue())
    return outputs


@dataclass
class Outputs:
    pair: dict[str, list[str]]
    """Outputs with two workers."""
    alone: dict[str, list[str]]
    decided: dict[str, list[dict[str, Any]]]
    """Decisions of the policies with two workers."""

    def last(self, name: str, *, alone: bool) -> str:
        return "".join((self.alone if alone else self.pair)[name]).strip().splitlines()[-1]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    folder = tmp_path_factory.mktemp("examples")
    text = folder / "text.txt"
    text.write_text("".join(f"{number} and {number + 1} make {2 * number + 1}. " for number in range(60)))
    kept = {name: {"record": str(folder / f"{name}.jsonl")} for name in ("v2", "v3", "v4", "v5")}
    gpt, resnet = (
        ExampleRun(program="gpt.py", arguments=(*GPT, str(text))),
        ExampleRun(program="resnet.py", arguments=RESNET),
    )
    spirals = ExampleRun(program="train.py", arguments=("--epochs", "1"))
    pair = run_examples(
        {
            "ddp": ExampleRun(program="digits_ddp.py", launched=False),
            "digits": ExampleRun(program="digits.py"),
            "v2": ExampleRun(program="policies/v2_table.py", adapting=kept["v2"]),
            "v3": ExampleRun(program="policies/v3_noise.py", adapting=kept["v3"]),
            "v4": ExampleRun(program="policies/v4_rate.py", adapting=kept["v4"]),
            "gpt": gpt,
            "gpt, priority": replace(gpt, arguments=(*gpt.arguments, "--sync", "priority")),
            "resnet": resnet,
            "spirals": spirals,
            "engine": ExampleRun(program="allreduce.py"),
            "arrays": ExampleRun(program="numpy_allreduce.py"),
        },
        2,
    )
    alone = {
        name: replace(one, launched=False) for name, one in {"gpt": gpt, "resnet": resnet, "spirals": spirals}.items()
    }
    alone |= {
        "digits": ExampleRun(program="digits.py", launched=False),
        "replay": ExampleRun(program="policies/v1_fixed.py", adapting={"replay": kept["v2"]["record"]}),
        "v4": ExampleRun(program="policies/v4_rate.py", launched=False),
        "v5": ExampleRun(program="policies/v5_workers.py", adapting={"policy": GROW, **kept["v5"]}),
        "gpt, less": replace(alone["gpt"], arguments=(*gpt.arguments, "--epochs", "3")),
        "spirals, more": replace(alone["spirals"], arguments=("--epochs", "2")),
    }
    said = run_examples(alone, 1)
    return Outputs(pair, said, {name: _decided(Path(each["record"])) for name, each in kept.items()})


def _decided(path: Path) -> list[dict[str, Any]]:
    return [fact.data["decision"] for fact in record.read(path) if fact.kind == "decision"]


WRITTEN = sorted(path for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".yml", ".toml"))


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_an_example_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 120
    assert text.startswith('"""' if path.suffix == ".py" else "# ")


def test_digits_is_its_ddp_twin_on_any_number_of_workers(outputs: Outputs) -> None:
    ddp = outputs.last("ddp", alone=False)
    assert re.fullmatch(r"model \w{16}, \d\d\.\d% right", ddp)
    assert outputs.last("digits", alone=False) == ddp
    assert outputs.last("digits", alone=True) == ddp


def test_gpt_learns_a_text_and_writes_the_same_however_it_was_trained(outputs: Outputs) -> None:
    written = outputs.last("gpt", alone=True)
    assert written.startswith("it writes: 0 and 1 ")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", outputs.alone["gpt"][0])]
    assert losses[-1] < 0.9 * losses[0]
    assert outputs.last("gpt", alone=False) == written
    assert outputs.last("gpt, priority", alone=False) == written
    assert outputs.last("gpt, less", alone=True) != written


def test_resnet_has_the_same_bits_on_two_workers(outputs: Outputs) -> None:
    assert outputs.last("resnet", alone=True).startswith("model ")
    assert outputs.last("resnet", alone=False) == outputs.last("resnet", alone=True)


def test_the_spirals_of_the_cluster_guide(outputs: Outputs) -> None:
    assert outputs.last("spirals", alone=True).startswith("model ")
    assert outputs.last("spirals", alone=False) == outputs.last("spirals", alone=True)
    assert outputs.last("spirals, more", alone=True) != outputs.last("spirals", alone=True)


def test_the_job_file_is_submitted_to_a_cluster(outputs: Outputs, tmp_path: Path) -> None:
    """With fewer epochs; beside its program, as a user has it."""
    text = (EXAMPLES / "job.yml").read_text()
    assert "args: [--epochs, 20]" in text
    (tmp_path / "job.yml").write_text(text.replace("[--epochs, 20]", "[--epochs, 1]"))
    (tmp_path / "train.py").write_bytes((EXAMPLES / "train.py").read_bytes())
    with serving(tmp_path / "state", "--devices", "cpu=2") as server:
        done = command("submit", str(tmp_path / "job.yml"), "--wait", "--state", str(server.state))
        assert done.exit_code == 0, done.output + server.log
        assert outputs.last("spirals", alone=True) in server.output("job-1")


def test_the_federated_file_learns_digits() -> None:
    history = simulate(read_job(YamlSource.read(EXAMPLES / "federated" / "digits.yml")).job.config)
    assert history.final is not None
    assert history.final.round == 20
    assert history.final.accuracy > 0.8


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="no Fashion-MNIST: apt install dataset-fashion-mnist")
def test_the_federated_file_with_oort_does_a_round() -> None:
    job = read_job(YamlSource.read(EXAMPLES / "federated" / "fmnist-oort.yml")).job
    history = simulate(job.config.model_copy(update={"rounds": 1, "batching": 0}))
    assert history.final is not None
    assert len(history.rounds[0].aggregated) == 20


def test_the_engine_alone_with_tensors_and_with_arrays(outputs: Outputs) -> None:
    assert outputs.pair["engine"] == [f"rank {rank} of 2: sum over ranks [3.0, 3.0, 3.0, 3.0]\n" for rank in range(2)]
    lines = [said.partition(": ")[2] for said in outputs.pair["arrays"]]
    assert lines[0] == lines[1]
    assert re.fullmatch(r"y = (2\.9|3\.0)\d+ x \+ -(0\.9|1\.0)\d+, everywhere the same bits: True\n", lines[0])


# --- the tutorial of policies ---


def _epochs(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("epoch")]


def test_the_tutorials_table_is_replayed_by_a_program_without_it(outputs: Outputs) -> None:
    found = [(each["kind"], each["size"]) for each in outputs.decided["v2"]]
    assert found == [("set_batch_size", 16), ("set_batch_size", 32)]
    epochs = _epochs(outputs.pair["v2"][0])
    assert len(epochs) == 4
    assert "batch 32, 240 steps" in epochs[-1]
    assert _epochs(outputs.alone["replay"][0]) == epochs


def test_the_tutorials_policies_that_look_at_the_noise(outputs: Outputs) -> None:
    assert {each["kind"] for each in outputs.decided["v3"]} == {"set_batch_size"}
    kinds = [each["kind"] for each in outputs.decided["v4"]]
    assert kinds.count("set_batch_size") == kinds.count("set_learning_rate") >= 2
    assert _epochs(outputs.alone["v4"][0]) == _epochs(outputs.pair["v4"][0])
    assert _epochs(outputs.pair["v3"][0]) != _epochs(outputs.pair["v4"][0])


def test_the_tutorials_last_version_asks_for_a_worker(outputs: Outputs) -> None:
    assert {each["kind"] for each in outputs.decided["v5"]} == {"set_batch_size", "set_learning_rate", "resize"}
    assert len(_epochs(outputs.alone["v5"][0])) == 4


@pytest.mark.skipif(not FULL, reason="the same with a worker that comes: PLIANT_FULL=1")
def test_the_tutorials_last_version_as_it_is_started(tmp_path: Path) -> None:
    kept = tmp_path / "run.jsonl"
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("pliant")), "run", "-q", "-w", "-np", "1", "-H", "127.0.0.1:2",
            "--policy", GROW, "--record", str(kept), str(EXAMPLES / "policies" / "v5_workers.py"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    decided = _decided(kept)
    assert {each["kind"] for each in decided} == {"set_batch_size", "set_learning_rate", "resize"}
    assert [each["workers"] for each in decided if each["kind"] == "resize"] == [2]
    assert "epoch 3" in done.stdout
