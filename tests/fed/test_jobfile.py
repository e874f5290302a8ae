"""Federated job files of our own form: what they give, and how mistakes in them are told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pliant.errors import ConfigError
from pliant.fed.aggregation import AGGREGATORS
from pliant.fed.config import NamedOptions
from pliant.fed.data import names
from pliant.fed.data.build import build_task
from pliant.fed.data.task import Task
from pliant.fed.jobfile import FederatedJob
from pliant.fed.workers import WorkerPlace, WorkerPlaces
from pliant.jobs.schema import is_federated, read_federated_form, read_job
from pliant.yaml_source import YamlSource

EXAMPLES = Path(__file__).parents[2] / "examples"

FULL = """\
name: 007
seed: 3
participants: 5
overcommit: 1.5
rounds: 9
target: 0.9
data: {kind: play, path: sub/../text.txt, partition: natural, map: map.csv, clients: 0}
model: lstm
local: {steps: 3, lr: 1e-2, optimizer: adamw}
selector: {kind: oort, preset: artifact, pacer_step: 5, exploration_min: 1e-1}
aggregator: {kind: fed-yogi, lr: 1e-3}
privacy: {clip: 1.5}
devices: devices.csv
availability: synthetic
workers: [localhost:2, there:3, ray:4]
log_path: logs here
ssh_user: me
port: 4000
"""


def read(folder: Path, text: str, *, file: str = "fed.yml", name: str = "") -> FederatedJob:
    for made in ("text.txt", "map.csv", "devices.csv"):
        (folder / made).touch()
    (folder / file).write_text(text)
    return read_federated_form(YamlSource.read(folder / file), name)


def refused(folder: Path, text: str) -> list[str]:
    """The lines of the refusal, without the folder."""
    with pytest.raises(ConfigError) as refusal:
        read(folder, text)
    return str(refusal.value).replace(f"{folder}/", "").splitlines()


def test_every_section_arrives_with_absolute_paths_and_survives_json(tmp_path: Path) -> None:
    job = read(tmp_path, FULL)
    config = job.config
    assert (config.name, job.is_named, job.directory) == ("007", True, str(tmp_path))
    assert (config.seed, config.participants, config.invited, config.rounds, config.target) == (3, 5, 7, 9, 0.9)
    assert config.data.path == str(tmp_path / "text.txt")
    assert config.data.map == str(tmp_path / "map.csv")
    assert (config.devices, config.availability) == (str(tmp_path / "devices.csv"), "synthetic")
    assert (config.local.lr, config.local.optimizer) == (0.01, "adamw")
    assert config.selector == NamedOptions(
        kind="oort", options={"preset": "artifact", "pacer_step": 5, "exploration_min": 0.1}
    )
    assert config.aggregator == NamedOptions(kind="fed-yogi", options={"lr": 0.001})
    assert config.privacy is not None
    assert config.privacy.clip == 1.5
    assert job.placement.places == WorkerPlaces(
        (WorkerPlace("local", "localhost", 2), WorkerPlace("ssh", "there", 3), WorkerPlace("ray", "ray", 4))
    )
    assert job.placement.log_path == str(tmp_path / "logs here")
    assert (job.placement.ssh_user, job.placement.port) == ("me", 4000)
    assert FederatedJob.model_validate_json(job.model_dump_json()) == job


@pytest.mark.parametrize(
    ("text", "told"), [("3", "local 3"), ("0", ""), ("ray:4", "ray 4"), ("h:2", "ssh 2"), ('["a:1", 127.0.0.1:2]', "ssh 1, local 2")]
)  # fmt: skip
def test_workers_are_a_number_a_host_ray_or_several(tmp_path: Path, text: str, told: str) -> None:
    places = read(tmp_path, f"participants: 2\nworkers: {text}\n").placement.places
    assert ", ".join(f"{place.kind} {place.count}" for place in (places.parts if places else ())) == told


def test_participants_are_enough_and_names_are_numbered(tmp_path: Path) -> None:
    job = read(tmp_path, "participants: 2\n", file="my fed.yml")
    assert (job.config.name, job.is_named) == ("my-fed-1", False)
    assert job.with_free_name(["my-fed-1", "my-fed-3"]).config.name == "my-fed-2"
    assert read(tmp_path, FULL, name="other").config.name == "other"
    with pytest.raises(ConfigError, match=r"name 'a/b': use up to 64 letters"):
        read(tmp_path, FULL, name="a/b")


def test_every_mistake_is_told_with_its_line(tmp_path: Path) -> None:
    text = """\
participants: 0
name: a b
rounds: many
data:
  kind: digits
  clientz: 3
  alpha: -1
local: {steps: 2.5}
selector: {kind: oort}
workers: -2
overcommit: 0.5
privacy: {delta: 2}
bathcing: 1
"""
    assert refused(tmp_path, text) == [
        "fed.yml:1: participants 0: use 1 or more",
        "fed.yml:2: name 'a b': use up to 64 letters, digits, . _ and -, beginning with a letter or digit",
        "fed.yml:3: rounds 'many': use a whole number",
        "fed.yml:6: unknown key 'data.clientz': did you mean clients?",
        "fed.yml:7: data.alpha -1: use more than 0",
        "fed.yml:8: local.steps 2.5: use a whole number",
        "fed.yml:10: workers '-2' is no number of workers: give 0 or more, host:n, or ray:n",
        "fed.yml:11: overcommit 0.5: use 1.0 or more",
        "fed.yml:12: privacy.delta 2: use less than 1",
        "fed.yml:13: unknown key 'bathcing': did you mean batching?",
    ]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("selector: ort", "fed.yml:2: selector 'ort' is unknown: use one of random,"),
        ("selector:\n  kind: oort\n  pacer: sometimes", "fed.yml:2: pacer 'sometimes' is not known: use 'falling' or 'flat'"),
        ("selector: {kind: random, pacer_step: 3}", "fed.yml:2: selector random: 'pacer_step' is unknown"),
        ("selector: {kind: oort, pacer_stp: 3}", "fed.yml:2: selector oort: 'pacer_stp' is unknown; did you mean pacer_step?"),
        ("aggregator: {kind: krum, q: 1}", "fed.yml:2: krum has no option 'q'"),
        ("aggregator: {kind: fed-prox, mu: -1}", "fed.yml:2: mu=-1: use 0"),
        ("model: resnet99", "fed.yml:2: model 'resnet99' is unknown: use cnn,"),
        ("data: {kind: cifar}", "fed.yml:2: data.kind 'cifar' is unknown: use fashion-mnist,"),
        ("data: {kind: play,\n  path: nope.txt}", "fed.yml:3: data.path nope.txt: no such file or folder"),
        ("devices: nope.csv", "fed.yml:2: devices nope.csv: no such file or folder"),
        ("data: {clients: 0}", "fed.yml:2: data.clients 0: a iid partition needs 1 or more"),
        ("workers: true", "fed.yml:2: workers True: give a number, host:n, ray:n"),
        ("workers: [b:x]", "fed.yml:2: workers 'b:x'"),
        ("workers: -1", "fed.yml:2: workers '-1' is no number of workers"),
        ("seed: 18446744073709551617", "fed.yml:2: seed 18446744073709551617: use less than"),
        ("local: {lr: 1.0e308}", "fed.yml:2: local.lr '1.0e308': use 1e+30 or less"),
        ("local: {batch_size: 1000000000000}", "fed.yml:2: local.batch_size 1000000000000 with local.steps 10: use no more than"),
        ("local: {batch_size: 10000,\n  steps: 10001}", "fed.yml:3: local.steps 10001 with local.batch_size 10000: use no more"),
        ("model_bytes: 99999999999999999999", "fed.yml:2: model_bytes 99999999999999999999: use "),
        ("selector: {kind: oort, seed: -1}", "fed.yml:2: selector oort: seed=-1: use a whole number of 0 or more"),
        ("selector: {kind: random, seed: 0.5}", "fed.yml:2: selector random: seed=0.5: use a whole number"),
        ("port: 70000", "fed.yml:2: port 70000: use 65535 or less"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told_where_it_stands(tmp_path: Path, more: str, told: str) -> None:
    (line,) = refused(tmp_path, f"participants: 2\n{more}\n")
    assert line.startswith(told)


def test_which_files_are_federated(tmp_path: Path) -> None:
    for text, answer in (
        ("participants: 1", True),
        ("job_conf: []", True),
        ("ps_ip: x", True),
        ("program: a.py", False),
    ):
        (tmp_path / "job.yml").write_text(text)
        assert is_federated(YamlSource.read(tmp_path / "job.yml")) is answer


@pytest.mark.parametrize("name", ["digits", "fmnist-oort"])
def test_our_examples_are_jobs(name: str) -> None:
    path = EXAMPLES / "federated" / f"{name}.yml"
    assert read_federated_form(YamlSource.read(path)).config.name == name
    assert len(path.read_text().splitlines()) < 120


OWN = "import torch\n\ndef data():\n    raise ValueError\n\ndef model(num_classes):\n    return torch.nn.Linear(2, num_classes)\n"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("devices: devices.csv", "fed.yml:4: devices.csv: the file is empty; give a table of devices, or synthetic"),
        ("availability: text.txt", "fed.yml:4: text.txt: the file is empty; give a trace"),
        ("model: lstm", "fed.yml:4: model 'lstm' is not for images: use cnn, cnn-bn, mlp, logistic, resnet18,"),
        ("model: nowhere:net", "fed.yml:4: model 'nowhere:net': No module named 'nowhere'; give module:function"),
        ("model: mine:net", "fed.yml:4: model 'mine:net': mine has no function 'net'"),
        ("model: mine:data", "fed.yml:4: model 'mine:data': too many positional arguments; it is called with the number"),
        ("data: {kind: 'mine:data', path: x}", "fed.yml:4: data.kind 'mine:data': too many positional arguments; it is"),
        ("data: {kind: digits,\n  clients: 5000}", "fed.yml:5: 1438 samples for 5000 clients: use 1 to 1438"),
        ("data: {kind: 'mine:date'}", "fed.yml:4: data.kind 'mine:date': mine has no function 'date'"),
        ("data:\n  kind: fashion-mnist\n  path: .", "fed.yml:6: {here}: no train-images-idx3-ubyte(.gz) there"),
        ("data: {kind: speech, path: .}", "fed.yml:4: {here}: no WORD/SPEAKER_nohash_N.wav there"),
        ("data: {kind: digits, sizes: map.csv}", "fed.yml:4: map.csv: no rows in it"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_told_before_there_is_a_job(tmp_path: Path, more: str, told: str) -> None:
    for made in ("text.txt", "map.csv", "devices.csv"):
        (tmp_path / made).touch()
    (tmp_path / "mine.py").write_text(OWN)
    rest = "#" if more.startswith("data") else "data: {kind: digits}"
    (tmp_path / "fed.yml").write_text(f"participants: 2\nname: a\n{rest}\n{more}\n")
    before = list(sys.path)
    with pytest.raises(ConfigError) as refusal:
        read_job(tmp_path / "fed.yml")
    said = str(refusal.value).replace(f"{tmp_path}/", "")
    assert said.startswith(told.replace("{here}", str(tmp_path)))
    assert "\n" not in said
    assert sys.path == before
    assert "mine" not in sys.modules


def test_functions_beside_the_file_and_the_artifacts_keys(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "fed.yml").write_text("participants: 2\nmodel: mine:model\ndata: {kind: 'mine:data'}\n")
    assert read_job(YamlSource.read(tmp_path / "fed.yml")).job.config.model == "mine:model"  # and data() was not called
    (tmp_path / "table").touch()
    text = "ps_ip: 127.0.0.1\njob_conf:\n  - data_set: digits\n  - model: lr\n  - device_conf_file: table\n"
    (tmp_path / "fed.yml").write_text(text)
    with pytest.raises(ConfigError, match=r"fed.yml:5: device_conf_file: .*/table: the file is empty"):
        read_job(tmp_path / "fed.yml")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("tls_certificate: c.pem\ntls_key: map.csv", "fed.yml:3: tls_certificate c.pem: no such file"),
        ("tls_key: k.pem\ntls_certificate: map.csv", "fed.yml:3: tls_key k.pem: no such file"),
        ("tls_key: map.csv", "fed.yml:3: tls_key is of no use without its certificate: add tls_certificate"),
        ("tls_certificate: map.csv", "fed.yml:3: certificate 'map.csv' with key ''"),
    ],
)
def test_tls_is_checked_also_without_executors(tmp_path: Path, more: str, told: str) -> None:
    (line,) = refused(tmp_path, f"participants: 2\nworkers: 0\n{more}\n")
    assert line.startswith(told)


def test_mistakes_of_names_sizes_and_files_are_told_beside_those_of_values(tmp_path: Path) -> None:
    text = """\
participants: 9
rounds: 0
data: {kind: digitz, clients: 8, alpha: .nan, sizes: gone.csv}
model: big
selector: {kind: oort, pacer_step: .inf, preset: [1]}
aggregator: best
concurrency: 10
deadline_s: .inf
kind: fed
"""
    assert [line.removeprefix("fed.yml:")[:28] for line in refused(tmp_path, text)] == [
        "1: participants 9: the job h", "2: rounds 0: use 1 or more", "3: data.alpha nan: use a num", "3: data.kind 'digitz' is unk",
        "3: data.sizes gone.csv: no s", "4: model 'big' is unknown: u", "5: pacer_step inf: use a num", "5: preset [1]: use a number,",
        "6: aggregator 'best' is unkn", "7: concurrency 10: the job h", "8: deadline_s inf: use a num", "9: kind 'fed' is not known: ",
    ]  # fmt: skip


def test_sizes_are_taken_as_they_are_written_or_refused(tmp_path: Path) -> None:
    (tmp_path / "sizes.csv").write_text("client,num_samples\na,900\nb,900\n")
    data = "kind: digits, partition: iid, clients: 2"

    def build(text: str) -> Task:
        return build_task(read(tmp_path, f"model: mlp\n{text}\n").config)

    with pytest.raises(
        ConfigError, match=r"2 clients would have 1800 samples, and there are 1438: .*`scale_sizes: true`"
    ):
        build(f"participants: 2\ndata: {{{data}, sizes: sizes.csv}}")
    assert build(f"participants: 2\ndata: {{{data}, sizes: sizes.csv, scale_sizes: true}}").sizes.tolist() == [719, 719]
    with pytest.raises(ConfigError, match=r"data.test_samples 360: there are 359; use 1 to 359, or 0 for all"):
        build(f"participants: 2\ndata: {{{data}, test_samples: 360}}")
    (tmp_path / "fed.yml").write_text(f"participants: 2\ndata: {{{data}, test_samples: 360}}\nmodel: mlp\n")
    with pytest.raises(ConfigError, match=r"fed.yml:2: .*data.test_samples 360"):
        read_job(tmp_path / "fed.yml")
    (tmp_path / "sizes.csv").write_text("client,num_samples\na,-900\nb,many\n")
    with pytest.raises(ConfigError) as refusal:
        build(f"participants: 2\ndata: {{{data}, sizes: sizes.csv}}")
    assert str(refusal.value).replace(f"{tmp_path}/", "").splitlines() == [
        "sizes.csv:2: num_samples '-900': use a whole number, 0 or more", "sizes.csv:3: num_samples 'many': use a whole number, 0 or more"
    ]  # fmt: skip


def test_the_names_that_are_known_without_torch_are_those_that_there_are() -> None:
    assert tuple(AGGREGATORS) == names.AGGREGATORS


def test_a_wrong_file_is_refused_without_torch(tmp_path: Path) -> None:
    (tmp_path / "fed.yml").write_text("participants: 2\nmodel: big\nselector: ort\naggregator: best\nrounds: 0\n")
    code = f"""\
import sys
from pathlib import Path
from pliant.errors import ConfigError
from pliant.jobs.schema import read_job
try:
    read_job(Path({str(tmp_path / "fed.yml")!r}))
except ConfigError as error:
    sys.exit("torch" in sys.modules or len(str(error).splitlines()) != 4)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
