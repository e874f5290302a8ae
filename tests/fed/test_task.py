"""The task of a job: samples, partition, malicious clients, loss and models, equal to the bit in every process."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pliant.errors import ConfigError
from pliant.fed.config import FedConfig
from pliant.fed.data import models
from pliant.fed.data.build import build_task
from pliant.fed.data.models import make_model
from pliant.fed.data.task import InMemory, Task


def task_of(data: dict[str, object] | None = None, **given: object) -> Task:
    full = {"kind": "digits", "clients": 10, **(data or {})}
    return build_task(FedConfig.model_validate({"data": full, "model": "logistic", **given}))


def digest(task: Task) -> str:
    found = hashlib.sha256()
    arrays = [each.detach().numpy() for each in task.model().parameters()]
    for each in (task.partition.order, task.malicious, task.shuffle.numpy(), *arrays):
        found.update(each.tobytes())
    return found.hexdigest()


def test_two_builds_are_alike_to_the_bit_also_in_another_process() -> None:
    data = {"kind": "digits", "clients": 10, "partition": "dirichlet"}
    config = FedConfig.model_validate({"data": data, "malicious": 0.3, "seed": 5})
    torch.manual_seed(77)
    before = torch.get_rng_state()
    here = digest(build_task(config))
    assert torch.equal(before, torch.get_rng_state())
    code = "import sys, test_task; print(test_task.digest(test_task.build_task(test_task.FedConfig.model_validate_json(sys.argv[1]))))"
    there = subprocess.run(
        [sys.executable, "-c", code, config.model_dump_json()],
        cwd=Path(__file__).parent, capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert there.stdout.strip() == here
    assert digest(build_task(config.model_copy(update={"seed": 6}))) != here


def test_facts_of_the_digits() -> None:
    task = task_of({"test_samples": 100})
    assert (task.num_clients, task.num_classes, task.num_test) == (10, 10, 100)
    assert int(task.sizes.sum()) == len(task.train.labels) == 1438
    assert task.train.inputs([0, 5]).shape == (2, 1, 8, 8)
    assert not task.malicious.any()


@pytest.mark.parametrize(
    ("data", "sizes"), [({"partition": "shards", "per_client": 2}, [71, 72]), ({"partition": "iid"}, [143, 144])]
)
def test_partitions_by_their_names(data: dict[str, object], sizes: list[int]) -> None:
    assert sizes[0] <= task_of(data).sizes.min() <= task_of(data).sizes.max() <= sizes[1] * 2


def test_sizes_from_a_table(tmp_path: Path) -> None:
    table = tmp_path / "sizes.csv"
    table.write_text("client,num_samples\n" + "".join(f"c{i},{10 * i}\n" for i in range(1, 8)))
    for partition in ("iid", "dirichlet"):
        data = {"partition": partition, "sizes": str(table), "clients": 7, "least": 20, "most": 50}
        assert sorted(task_of(data).sizes) == [20, 20, 30, 40, 50, 50, 50]
    with pytest.raises(ConfigError, match="shards are of one size"):
        task_of({"partition": "shards", "sizes": str(table)})


def test_clients_with_too_few_samples_are_left_out() -> None:
    whole = task_of({"partition": "dirichlet", "clients": 40})
    some = task_of({"partition": "dirichlet", "clients": 40, "least": 20})
    assert some.num_clients == int((whole.sizes >= 20).sum()) < whole.num_clients


def play(folder: Path) -> Path:
    path = folder / "play.txt"
    lines = "to be or not to be that is the question " * 30
    path.write_text("\n\n".join(f"{role}:\n{lines[: 400 * (n + 1)]}" for n, role in enumerate("ABC")))
    return path


def test_a_play_by_its_roles_and_a_model_of_its_characters(tmp_path: Path) -> None:
    data = {"kind": "play", "path": str(play(tmp_path)), "partition": "natural", "clients": 0}
    task = task_of(data, model="transformer")
    assert task.partition.names == ("A", "B", "C")
    inputs = task.train.inputs([0, 1])
    losses = task.loss(task.model()(inputs), task.train.labels[:2])
    assert losses.shape == (2,)
    assert losses.mean().item() == pytest.approx(np.log(task.num_classes), rel=0.3)
    assert task_of({**data, "clients": 2}, model="lstm").partition.names == ("A", "B")


def named(path: str = "") -> tuple[InMemory, InMemory]:
    both = InMemory(torch.arange(24.0).reshape(12, 2), torch.arange(12) % 3, ("a", "b", "c"), ("x", "y") * 6)
    return both, both


def test_data_and_models_of_the_users_own(tmp_path: Path) -> None:
    task = task_of({"kind": f"{__name__}:named", "partition": "natural", "clients": 0})
    assert task.partition.names == ("x", "y")
    client_map = tmp_path / "map.csv"
    client_map.write_text("client_id,sample_name\n" + "".join(f"u{i // 4},{i}\n" for i in range(12)))
    mapped = task_of({"kind": f"{__name__}:named", "partition": "natural", "clients": 0, "map": str(client_map)})
    assert [mapped.partition.of(i).tolist() for i in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def image(path: Path) -> None:
    made = pytest.importorskip("PIL.Image", reason="needs Pillow: the extra `experiments`")
    path.parent.mkdir(parents=True, exist_ok=True)
    made.new("RGB", (8, 8), (len(str(path)) % 256, 0, 0)).save(path)


def test_folders_of_images_with_and_without_a_test_folder(tmp_path: Path) -> None:
    for number in range(10):
        for kind in ("cat", "dog"):
            image(tmp_path / "flat" / kind / f"{number}.png")
            image(tmp_path / "split" / "train" / kind / f"{number}.png")
    image(tmp_path / "split" / "test" / "dog" / "1.png")
    flat = task_of({"kind": "images", "path": str(tmp_path / "flat"), "clients": 4})
    assert (len(flat.train.labels), flat.num_test) == (18, 2)
    assert flat.train.inputs(flat.partition.of(0)).shape[1:] == (3, 64, 64)
    split = task_of({"kind": "images", "path": str(tmp_path / "split"), "clients": 4})
    assert (len(split.train.labels), split.test.labels.tolist(), split.test.classes) == (20, [1], ("cat", "dog"))
    image(tmp_path / "split" / "test" / "bird" / "1.png")
    with pytest.raises(ConfigError, match="'bird' is not among"):
        task_of({"kind": "images", "path": str(tmp_path / "split"), "clients": 4})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"kind": "mnist"}, "data.kind 'mnist' is unknown"),
        ({"kind": "speech"}, "data.path is empty"),
        ({"partition": "natural"}, "give data.map"),
        ({"clients": 5000}, "1438 samples for 5000 clients"),
    ],
)
def test_what_cannot_be_is_named(data: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        task_of(data)


SMALL, IMAGE, COLOURS = torch.zeros(1, 8, 8), torch.zeros(1, 28, 28), torch.zeros(3, 32, 32)
TEXT = torch.zeros(20, dtype=torch.int64)


@pytest.mark.parametrize("name", ["cnn", "cnn-bn", "mlp", "logistic"])
@pytest.mark.parametrize("sample", [SMALL, IMAGE, COLOURS], ids=["digits", "mnist", "colours"])
def test_images_of_any_size_become_scores(name: str, sample: torch.Tensor) -> None:
    assert make_model(name, 7, sample)(torch.randn(2, *sample.shape)).shape == (2, 7)


def test_the_small_cnn_has_the_parameters_that_it_says() -> None:
    assert sum(each.numel() for each in make_model("cnn", 10, IMAGE).parameters()) == 45_226
    assert not list(make_model("cnn", 10, IMAGE).buffers())
    assert list(make_model("cnn-bn", 10, IMAGE).buffers())


@pytest.mark.parametrize("name", models.TEXTS)
def test_texts_become_scores_of_each_next_character(name: str) -> None:
    model = make_model(name, 30, TEXT)
    codes = torch.randint(0, 30, (2, 20))
    before = model(codes)
    assert before.shape == (2, 20, 30)
    changed = codes.clone()
    changed[:, 12:] = 0
    torch.testing.assert_close(model(changed)[:, :12], before[:, :12])  # what comes later is not looked at


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="needs torchvision: the extra `experiments`"
)
@pytest.mark.parametrize("name", ["shufflenet_v2_x2_0", "resnet18"])
@pytest.mark.parametrize("channels", [1, 3])
def test_torchvisions_models_take_any_number_of_channels(name: str, channels: int) -> None:
    model = make_model(name, 35, torch.zeros(channels, 32, 32)).eval()
    assert model(torch.zeros(1, channels, 32, 32)).shape == (1, 35)


@pytest.mark.parametrize(
    ("name", "sample", "said"),
    [
        ("vgg", IMAGE, "'vgg' is unknown"),
        ("cnn", TEXT, "is not for text: use lstm"),
        ("lstm", IMAGE, "is not for images: use cnn, cnn-bn, mlp, logistic, resnet18"),
        ("resnet18", torch.zeros(64), "is not for samples of shape .64.: use mlp, logistic, or"),
        ("cnn", torch.zeros(1, 2, 9), "too small for a cnn"),
    ],
)
def test_what_does_not_fit_is_named(name: str, sample: torch.Tensor, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_model(name, 10, sample)
