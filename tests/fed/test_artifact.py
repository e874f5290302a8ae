"""Job files in the artifact's form, and in FedScale's: every key, every trap, every refusal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pliant.errors import ConfigError
from pliant.fed.artifact import KNOWN
from pliant.fed.jobfile import FederatedJob
from pliant.jobs.schema import read_federated_form
from pliant.yaml_source import YamlSource

EXAMPLES = Path(__file__).parents[2] / "examples" / "federated"
OORT_KEYS = [
    "job_name",
    "log_path",
    "ps_ip",
    "ps_port",
    "manager_port",
    "this_rank",
    "learners",
    "total_worker",
    "time_stamp",
    "backend",
    "to_device",
    "gpu_device",
    "timeout",
    "task",
    "data_set",
    "data_dir",
    "data_mapfile",
    "client_path",
    "user_trace",
    "model",
    "model_size",
    "filter_less",
    "filter_more",
    "filter_class",
    "sequential",
    "zipf_alpha",
    "duplicate_data",
    "skip_partition",
    "enforce_random",
    "epochs",
    "upload_epoch",
    "batch_size",
    "test_bsz",
    "learning_rate",
    "min_learning_rate",
    "decay_factor",
    "decay_epoch",
    "loss_decay",
    "eval_interval",
    "dump_epoch",
    "num_loaders",
    "test_ratio",
    "is_even_avg",
    "stale_threshold",
    "resampling_interval",
    "fixed_clients",
    "forward_pass",
    "load_model",
    "model_path",
    "read_models_path",
    "test_only",
    "max_iter_store",
    "release_cache",
    "gradient_policy",
    "yogi_eta",
    "yogi_tau",
    "yogi_beta",
    "yogi_beta2",
    "proxy_avg",
    "proxy_mu",
    "sample_mode",
    "score_mode",
    "overcommit",
    "malicious_clients",
    "noise_factor",
    "sampler_path",
    "clock_factor",
    "exploration_factor",
    "exploration_decay",
    "exploration_min",
    "exploration_alpha",
    "round_penalty",
    "round_threshold",
    "pacer_delta",
    "pacer_step",
    "clip_bound",
    "cut_off_util",
    "sample_window",
    "blacklist_rounds",
    "blacklist_max_len",
    "capacity_bin",
    "sample_seed",
]
FEDSCALE_KEYS = [
    "num_participants",
    "rounds",
    "local_steps",
    "decay_round",
    "device_conf_file",
    "device_avail_file",
    "data_map_file",
    "experiment_mode",
    "engine",
    "qfed_q",
    "malicious_factor",
    "clip_threshold",
    "target_delta",
    "max_concurrency",
    "max_staleness",
    "connection_timeout",
    "use_cuda",
    "save_checkpoint",
    "wandb_token",
    "model_zoo",
    "overcommitment",
]


def read(
    folder: Path, *lines: str, top: str = "ps_ip: 127.0.0.1\nworker_ips: ['127.0.0.1:2']\n", name: str = ""
) -> FederatedJob:
    (folder / "devices").touch()
    text = top + "job_conf:\n" + "".join(f"  - {line}\n" for line in lines)
    (folder / "conf.yml").write_text(text)
    return read_federated_form(YamlSource.read(folder / "conf.yml"), name)


def digits(folder: Path, *lines: str, **more: str) -> FederatedJob:
    return read(folder, "data_set: digits", "model: mlp", "client_path: devices", "num_clients: 30", *lines, **more)


def refused(folder: Path, *lines: str, **more: str) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        digits(folder, *lines, **more)
    return [line.replace(f"{folder}/", "") for line in str(refusal.value).splitlines()]


def told(folder: Path, *lines: str, **more: str) -> list[str]:
    return [line.replace(f"{folder}/", "") for line in digits(folder, *lines, **more).remarks]


@pytest.mark.parametrize("key", [*OORT_KEYS, *FEDSCALE_KEYS])
def test_every_key_is_known(key: str) -> None:
    assert key in KNOWN


def test_what_the_artifact_means_by_its_keys(tmp_path: Path) -> None:
    job = digits(
        tmp_path, "job_name: night", "total_worker: 8", "epochs: 7", "upload_epoch: 3", "batch_size: 15", "learning_rate: 1e-2",
        "min_learning_rate: 1e-3", "decay_factor: 0.9", "decay_epoch: 4", "eval_interval: 2", "overcommit: 1.25",
        "filter_less: 2", "filter_more: 1e5", "sample_mode: oort", "pacer_delta: 10", "round_penalty: 2.0",
        "exploration_min: 0.4", "blacklist_rounds: 50", "noise_factor: 0.5", "gradient_policy: yogi", "model_size: 65536",
        "clock_factor: 2", "malicious_clients: 0.1", "log_path: ./evals", "time_stamp: '0101_000000'", "ps_port: 29501",
        "learner: 1-2", "manager_port: 9005", "this_rank: 0", "sample_seed: 9",
    )  # fmt: skip
    config, local = job.config, job.config.local
    assert (config.name, config.participants, config.invited, config.rounds, config.seed) == ("night", 8, 10, 7, 9)
    assert (local.steps, local.batch_size, local.lr, local.min_lr, local.lr_decay, local.decay_rounds) == (
        3, 15, 0.01, 0.001, 0.9, 4,
    )  # fmt: skip
    assert (local.optimizer, local.momentum, local.weight_decay) == ("sgd", 0.9, 5e-4)
    assert config.evaluate_every == 2
    assert config.data.model_dump(include={"kind", "partition", "clients", "least", "most"}) == {
        "kind": "digits", "partition": "iid", "clients": 30, "least": 2, "most": 100_000,
    }  # fmt: skip
    assert config.selector.kind == "oort"
    assert config.selector.options == {
        "preset": "artifact", "pacer_delta": 10.0, "round_penalty": 2.0, "exploration_min": 0.4, "blacklist_rounds": 50,
        "noise_factor": 0.5,
    }  # fmt: skip
    assert config.aggregator.kind == "fed-yogi"
    assert config.aggregator.options == {"even": True, "lr": 5e-3, "tau": 1e-3, "beta1": 0.0, "beta2": 0.999}
    assert config.model_bytes == 65536 * 1000 // 8
    assert (config.clock_factor, config.malicious, config.devices) == (2.0, 0.1, str(tmp_path / "devices"))
    assert (job.placement.log_path, job.placement.port, job.time) == (str(tmp_path / "evals"), 29501, "0101_000000")
    assert job.placement.host == ""
    assert job.placement.workers == ("127.0.0.1:2",)
    assert job.remarks == ()


@pytest.mark.parametrize(
    ("written", "seed"), [("9007199254740993", 2**53 + 1), ("9223372036854775807", 2**63 - 1), ("1e5", 10**5)]
)
def test_whole_numbers_are_exact(tmp_path: Path, written: str, seed: int) -> None:
    assert digits(tmp_path, f"sample_seed: {written}").config.seed == seed


def test_fedscale_has_its_own_names_and_defaults(tmp_path: Path) -> None:
    job = read(
        tmp_path, "num_participants: 6", "rounds: 4", "data_set: digits", "model: resnet18", "device_conf_file: devices",
        "num_clients: 20", "gradient_policy: fed-yogi", "sample_mode: oort", "malicious_factor: 4", "clip_threshold: 3",
        "noise_factor: 0.2", "use_cuda: False", "experiment_mode: simulation", "engine: pytorch",
        top="ps_ip: localhost\nworker_ips:\n  - 127.0.0.1:[2, 1]\n",
    )  # fmt: skip
    config = job.config
    assert (config.participants, config.rounds, config.overcommit, config.local.lr) == (6, 4, 1.3, 0.05)
    assert config.selector.options == {"preset": "fedscale"}
    assert config.aggregator.options == {"even": True, "lr": 3e-3, "tau": 1e-8, "beta1": 0.9, "beta2": 0.99}
    assert (config.malicious, config.device, config.model_bytes, config.clock_factor) == (0.25, "cpu", 0, 2.437)
    assert config.privacy is not None
    assert (config.privacy.clip, config.privacy.noise_multiplier, config.privacy.where) == (3.0, 0.2, "client")
    assert job.placement.workers == ("127.0.0.1:3",)
    assert digits(tmp_path, "malicious_factor: 1e15").config.malicious == 0


@pytest.mark.parametrize(
    ("lines", "kind", "options"),
    [
        ((), "fed-avg", {"even": True}),
        (("gradient_policy:",), "fed-avg", {"even": True}),
        (("gradient_policy: ''", "is_even_avg: False"), "fed-avg", {"even": False}),
        (("gradient_policy: prox",), "fed-prox", {"even": True, "mu": 0.1}),
        (("proxy_avg: True", "proxy_mu: 0.5"), "fed-prox", {"even": True, "mu": 0.5}),
        (("proxy_avg: False",), "fed-avg", {"even": True}),
        (("gradient_policy: yogi", "rounds: 3"), "fed-yogi",
         {"even": True, "lr": 3e-3, "tau": 1e-8, "beta1": 0.9, "beta2": 0.99}),
        (("gradient_policy: q-fedavg", "qfed_q: 2"), "q-fedavg", {"q": 2.0}),
        (("gradient_policy: fed-buff", "max_staleness: 3"), "fed-buff", {"size": 10, "max_staleness": 3}),
    ],
)  # fmt: skip
def test_policies_are_what_they_are_called(
    tmp_path: Path, lines: tuple[str, ...], kind: str, options: dict[str, object]
) -> None:
    aggregator = digits(tmp_path, *lines).config.aggregator
    assert (aggregator.kind, aggregator.options) == (kind, options)


@pytest.mark.parametrize(("word", "natural"), [("False", False), ("false", False), ("0", False), ("True", True)])
def test_false_is_false(tmp_path: Path, word: str, natural: bool) -> None:
    """The artifact's own parser takes every word for true."""
    partition = digits(tmp_path, f"skip_partition: {word}").config.data.partition
    assert partition == ("natural" if natural else "iid")


def test_paths_are_as_a_shell_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "d").touch()
    monkeypatch.setenv("FEDSCALE_HOME", str(tmp_path / "tables"))
    job = read(tmp_path, "data_set: digits", "model: mlp", "device_conf_file: $FEDSCALE_HOME/d", "num_clients: 9",
               "log_path: ${FEDSCALE_HOME}/logs", "seed: 5")  # fmt: skip
    assert job.config.devices == str(tmp_path / "tables" / "d")
    assert job.placement.log_path == str(tmp_path / "tables" / "logs")
    assert job.config.seed == 5


def test_random_takes_oorts_keys_and_does_not_use_them(tmp_path: Path) -> None:
    config = digits(tmp_path, "sample_mode: random", "pacer_delta: 10", "exploration_min: 0.4").config
    assert (config.selector.kind, config.selector.options) == ("random", {})


def test_clients_by_a_map_or_by_nature(tmp_path: Path) -> None:
    (tmp_path / "map.csv").touch()
    mapped = read(tmp_path, "data_set: digits", "model: mlp", "client_path: devices", "data_mapfile: map.csv")
    assert (mapped.config.data.partition, mapped.config.data.clients) == ("natural", 0)
    assert mapped.config.data.map == str(tmp_path / "map.csv")
    assert digits(tmp_path, "data_mapfile: map.csv", "enforce_random: True").config.data.partition == "iid"
    assert digits(tmp_path, "sequential: 1").config.data.alpha == 1.0
    texts = read(tmp_path, "task: nlp", "data_set: blog", "data_dir: .", "model: albert-base-v2", "client_path: devices",
                 "skip_partition: True")  # fmt: skip
    assert (texts.config.data.kind, texts.config.model, texts.config.local.optimizer) == (
        "posts", "transformer", "adamw",
    )  # fmt: skip
    assert texts.config.clock_factor == pytest.approx(2.5 * 6.047)


def test_a_round_has_as_many_participants_as_there_are_devices_if_it_is_not_said(tmp_path: Path) -> None:
    assert digits(tmp_path, top="worker_ips: [localhost:3, '127.0.0.1:2']\nps_ip:\n").config.participants == 5


def test_unknown_keys_are_warned_about_with_their_lines(tmp_path: Path) -> None:
    top = "ps_ip: 127.0.0.1\nwokers: 3\nsetup_commands: [source activate]\nexecutor_entry: a.py\n"
    assert told(tmp_path, "totalworker: 3", "moon_phase: full", "loss_decay: 0.5", top=top) == [
        "conf.yml:2: wokers is not known, and has no effect: did you mean worker_ips?",
        "conf.yml:3: setup_commands are not run: workers start with the Python that pliant is installed in",
        "conf.yml:4: executor_entry is not run: coordinator and workers are pliant's own",
        "conf.yml:5: no total_worker (num_participants): 2 take part in a round, one for each worker",
        "conf.yml:10: totalworker is not known, and has no effect: did you mean total_worker?",
        "conf.yml:11: moon_phase is not known, and has no effect",
        "conf.yml:12: loss_decay has no effect: a client's utility is taken from all samples of its first pass",
    ]
    assert told(tmp_path, "loss_decay: 0.2", "test_ratio: 1.0", "total_worker: 3") == []
    few = read(tmp_path, "data_set: digits", "model: mlp", "total_worker: 4")
    assert [line.replace(f"{tmp_path}/", "") for line in few.remarks] == [
        "conf.yml:3: no client_path (device_conf_file): the clients' devices are synthetic, drawn like FedScale's",
        "conf.yml:4: data_set has no map of clients: its samples are dealt to 4 clients, as many as take part in a round; "
        "add num_clients for more",
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("epochs: ten", "epochs 'ten': use a whole number"),
        ("epochs: 0", "epochs '0': use a whole number from 1 to 1e+30"),
        ("epochs: inf", "epochs 'inf': use a whole number"),
        ("model_size: 1e400", "model_size '1e400': use a number from 1 to 1e+30"),
        ("time_stamp: ../other", "time_stamp '../other': use up to 64 letters"),
        ("overcommit: 0.9", "overcommit '0.9': use a number from 1 to 100"),
        ("skip_partition: maybe", "skip_partition 'maybe': use True or False"),
        ("local_steps: [1]", "local_steps ['1']: use one value"),
        ("stale_threshold: 2", "stale_threshold 2: rounds are synchronous"),
        ("test_only: True", "test_only True: a job trains"),
        ("load_model: True", "load_model True: a job begins with a new model"),
        ("experiment_mode: deployment", "experiment_mode deployment: real clients are reached through Flower"),
        ("engine: tensorflow", "engine tensorflow: models are PyTorch's"),
        ("task: voice", "task voice: there are cv, speech, nlp"),
        ("sample_seed: 0.5", "sample_seed '0.5': use a whole number"),
        ("sample_seed: 1e999", "sample_seed '1e999': use a whole number"),
        ("sequential: 2", "sequential 2: sizes by Zipf's law are not drawn"),
        ("sample_mode: best", "sample_mode: selector 'best' is unknown"),
        ("gradient_policy: magic", "gradient_policy: aggregator 'magic' is unknown"),
        ("user_trace: nowhere", "user_trace nowhere: no such file or folder"),
        ("job_name: a b", "job_name 'a b': use up to 64 letters"),
        ("client_path: other", "client_path is given twice: leave one out"),
        ("device_conf_file: other", "device_conf_file is given twice as client_path"),
        ("cut_off_util: 2", "cut_off_util '2': use a number from 0 to 1"),
        ("blacklist_rounds: 0", "blacklist_rounds"),
        ("score_mode: norm", "score_mode norm: utility is taken from the samples' losses"),
        ("ps_ip: 203.0.113.7", "ps_ip 203.0.113.7: not an address of this machine"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_line(tmp_path: Path, line: str, why: str) -> None:
    lines = ("sample_mode: oort",) if "blacklist" in line else ()
    (said,) = refused(tmp_path, *lines, line)
    if not lines:
        assert said.startswith(f"conf.yml:8: {why}")
    assert why in said


def test_several_mistakes_are_told_together(tmp_path: Path) -> None:
    top = "ps_ip: 203.0.113.7\nworker_ips: ['a:2', b:x]\nuse_container: docker\n"
    lines = refused(tmp_path, "gradient_policy: yogi", "proxy_avg: True", "just words", top=top)
    assert [re.sub(r"(:\d+: \S+ \S+).*", r"\1", line) for line in lines] == [
        "conf.yml:1: ps_ip 203.0.113.7:",
        "conf.yml:2: 'b:x' in",
        "conf.yml:3: use_container docker:",
        "conf.yml:10: proxy_avg True",
        "conf.yml:11: 'just words'",
    ]
    (tmp_path / "conf.yml").write_text("ps_ip: 127.0.0.1\n")
    with pytest.raises(ConfigError, match=r"conf.yml:1: job_conf is missing: add a list"):
        read_federated_form(YamlSource.read(tmp_path / "conf.yml"))


@pytest.mark.parametrize("name", ["openimage", "speech", "stackoverflow"])
def test_the_examples_want_only_the_users_paths(tmp_path: Path, name: str) -> None:
    text = (EXAMPLES / f"{name}.yml").read_text()
    assert len(text.splitlines()) < 120
    (tmp_path / "conf.yml").write_text(text)
    with pytest.raises(ConfigError) as refusal:
        read_federated_form(YamlSource.read(tmp_path / "conf.yml"))
    assert all("no such file or folder" in line for line in str(refusal.value).splitlines())
    (tmp_path / "conf.yml").write_text(re.sub(r"/path/to/[\w./]+", ".", text))
    config = read_federated_form(YamlSource.read(tmp_path / "conf.yml")).config
    assert (config.participants, config.invited, config.rounds) == (100, 130, 500)
    assert (config.selector.kind, config.aggregator.kind, config.data.partition) == ("oort", "fed-yogi", "natural")
