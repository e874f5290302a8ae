"""A corpus of wrong files: good traces and job files, and the mistakes that are made in them, listed as values.

Each case is the text of a file with one or several mistakes. The good files are here, too: they must be accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BadFile:
    """One wrong file."""

    name: str
    """What is wrong, as the name of a test."""
    command: tuple[str, ...]
    """The command that reads it; `FILE` stands for its path."""
    data: bytes
    line: int = 0
    """The line that the refusal must name; 0: any."""
    suffix: str = ".yml"


# --- the good files ---

PHILLY = (
    "timestamp,duration,num_gpus,gpu_time,cluster",
    "2017-10-09 00:01:56,66.0,1,66.0,a",
    "2017-10-09 00:02:56,10,2,80,b",
    "2017-10-09 00:03:56,30,1,80,b",
)
HELIOS = (
    "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration",
    "7,u1,vcA,2,64,1,COMPLETED,2020-04-01 00:10:00,2020-04-01 00:10:02,2020-04-01 01:10:02,3600",
    "8,u1,vcA,1,4,1,COMPLETED,2020-04-01 00:11:00,2020-04-01 00:11:02,2020-04-01 00:12:02,60",
)
PAI = ("job-a,worker,4,Terminated,100.0,700.0,600,29,50,T4", "job-b,worker,1,Terminated,50,60,600,29,100,P100")
OPENB = (
    "name,cpu_milli,num_gpu,gpu_milli,qos,creation_time,deletion_time,scheduled_time",
    "pod-0,12000,1,1000,LS,0,12537496,0",
    "pod-1,6000,2,1000,BE,100,1100,200",
)
EASYSCALE = (
    "name,time,application,max_parallelism,batch_size,epochs,enable_heterogeneous_deterministic,preferred_gpu",
    "bert-0,115,bert,2,8,4,1,v100",
    "electra-1,230,electra,4,4,2,0,t4",
)
POLLUX = ("name,time,application,num_replicas,batch_size", "cifar10-0,53,cifar10,6,2048", "ncf-1,154,ncf,1,256")
"""Its good file needs measured step times, which are not here."""
LOG = (
    "[",
    ' {"jobid": "a", "vc": "x", "submitted_time": "2017-10-09 07:00:00", "attempts": [',
    '   {"start_time": "2017-10-09 07:01:00", "end_time": "2017-10-09 07:02:00", "detail": [{"ip": "m1", "gpus": ["gpu0"]}]}]},',
    ' {"jobid": "b", "vc": "x", "submitted_time": "2017-10-09 07:05:00", "attempts": []}',
    "]",
)
TRACES = {"philly": PHILLY, "helios": HELIOS, "pai": PAI, "openb": OPENB, "easyscale": EASYSCALE, "log": LOG}

JOB = {
    "name": "digits", "program": "train.py", "args": "[--epochs, 3]", "replicas": "4", "min": "1", "max": "4",
    "devices": "[v100, t4]", "speed": "{v100: 3.1}", "mixed": "false", "determinism": "D1", "order": "tree",
    "allow": "[median]", "verify": "100", "priority": "0", "env": "{NAME: value}", "checkpoint_every": "50",
}  # fmt: skip
FEDERATED = {
    "participants": "5", "overcommit": "1.3", "rounds": "20", "target": "0.8", "deadline_s": "600", "seed": "0", "name": "fed",
    "data": "{kind: digits, partition: dirichlet, clients: 40, alpha: 0.5, test_samples: 100}", "model": "mlp",
    "local": "{steps: 5, batch_size: 10, lr: 0.1}", "selector": "{kind: oort, preset: paper}",
    "aggregator": "{kind: fed-yogi, lr: 0.01}", "devices": "synthetic", "availability": "synthetic",
    "privacy": "{clip: 3.0, noise_multiplier: 1.0}", "evaluate_every": "5", "checkpoint_every": "10", "workers": "2",
    "log_path": ".", "batching": "0",
}  # fmt: skip
ARTIFACT = {
    "job_name": "art", "total_worker": "4", "task": "cv", "data_set": "digits", "model": "mlp", "num_clients": "20",
    "epochs": "5", "upload_epoch": "5", "batch_size": "8", "learning_rate": "0.04", "overcommit": "1.3",
    "sample_mode": "oort", "gradient_policy": "yogi", "filter_less": "2", "eval_interval": "2",
}  # fmt: skip


def trace_text(lines: tuple[str, ...]) -> str:
    return "\n".join(lines) + "\n"


def yaml_text(keys: dict[str, str]) -> str:
    return "".join(f"{key}: {value}\n" for key, value in keys.items())


def artifact_text(keys: dict[str, str]) -> str:
    return "ps_ip: 127.0.0.1\njob_conf:\n" + "".join(f"  - {key}: {value}\n" for key, value in keys.items())


# --- mistakes in traces ---

SIM = ("sim", "--trace", "FILE", "--processes", "1", "--policy", "yarn-cs", "--cluster", "v100=4,t4=4")
NO_NUMBERS = ("nan", "inf", "-inf", "-5", "1e300", "many", "0x10", "9" * 5000)
"""Written in the place of a number."""
NUMBERS = {
    "philly": {1: ("duration", NO_NUMBERS), 2: ("num_gpus", (*NO_NUMBERS, "1.5", "100000", ""))},
    "helios": {3: ("gpu_num", ("nan", "-1", "2.5")), 7: ("submit_time", (*NO_NUMBERS, "2020-13-01", "", "yesterday")),
               10: ("duration", ("nan", "", "-1"))},
    "pai": {2: ("inst_num", ("nan", "-1", "x")), 4: ("start_time", ("nan", "-1", "1e99")), 8: ("plan_gpu", ("inf", "-50"))},
    "openb": {2: ("num_gpu", ("nan", "1.5", "-2")), 5: ("creation_time", ("inf", "x", "")), 6: ("deletion_time", ("-1", "nan"))},
    "pollux": {1: ("time", NO_NUMBERS), 3: ("num_replicas", ("0", "-1", "nan", "1.5", "100000")),
               4: ("batch_size", ("0", "-8", "nan", "inf", "1.5", ""))},
    "easyscale": {1: ("time", NO_NUMBERS), 3: ("max_parallelism", ("0", "nan", "1e9", "-4", "")),
                  4: ("batch_size", ("0", "-8", "nan", "inf", "1.5", "")), 5: ("epochs", ("0", "nan", "inf", "-1")),
                  6: ("enable_heterogeneous_deterministic", ("nan", "maybe"))},
}  # fmt: skip
"""By format and column: its name, and what is written there."""


def _replaced(lines: tuple[str, ...], row: int, column: int, value: str) -> str:
    cells = lines[row].split(",")
    cells[column] = value
    return trace_text((*lines[:row], ",".join(cells), *lines[row + 1 :]))


def _trace(name: str, text: str | bytes, line: int = 0) -> BadFile:
    return BadFile(f"trace: {name}", SIM, text if isinstance(text, bytes) else text.encode(), line, ".csv")


def bad_traces() -> Iterator[BadFile]:
    for form, columns in NUMBERS.items():
        row = 1
        for column, (key, values) in columns.items():
            for value in values:
                lines = POLLUX if form == "pollux" else TRACES[form]
                yield _trace(f"{form}, {key} {value[:12]!r}", _replaced(lines, row, column, value), row + 1)
    for form in ("philly", "helios", "openb", "easyscale"):
        lines = TRACES[form]
        text = trace_text(lines)
        needed = {"philly": "duration", "helios": "gpu_num", "openb": "num_gpu", "easyscale": "batch_size"}[form]
        yield _trace(f"{form}, a column is missing", text.replace(needed, "colour", 1), 1)
        yield _trace(f"{form}, a column is there twice", text.replace(lines[0], f"{lines[0]},{needed}", 1), 1)
        yield _trace(f"{form}, the last row is cut off", trace_text((*lines[:-1], lines[-1].split(",")[0])), len(lines))
        yield _trace(f"{form}, a quote is not closed", text.replace(lines[1], f'"{lines[1]}', 1), 2)
        yield _trace(f"{form}, a quote ends too early", text.replace(lines[1], f'"a"b,{lines[1]}', 1), 2)
        yield _trace(f"{form}, too many values", text.replace(lines[1], f"{lines[1]},1,2,3", 1), 2)
        yield _trace(f"{form}, only the header", f"{lines[0]}\n", 1)
        yield _trace(f"{form}, bytes that are no text", text.encode() + b"\xff\xfe\n", len(lines) + 1)
        yield _trace(f"{form}, NUL in a row", text.replace(lines[1], lines[1].replace(",", "\0,"), 1), 2)
        yield _trace(f"{form}, separated by semicolons", text.replace(",", ";"), 1)
    for form, row in (("helios", HELIOS[1]), ("openb", OPENB[1])):
        yield _trace(f"{form}, a name twice", trace_text((*TRACES[form], row)), 4)
    yield _trace(
        "easyscale, an application that nobody knows", trace_text(EASYSCALE).replace("electra,", "elektra,"), 3
    )
    yield _trace("pai, the end before the start", trace_text(PAI).replace("700.0", "7.0"), 1)
    yield _trace("openb, the end before the start", trace_text(OPENB).replace("1100", "11"), 3)
    yield _trace(
        "pai, more devices than anybody has", trace_text(PAI).replace(",4,", ",60000,").replace(",50,T4", ",5000,T4"), 1
    )
    yield _trace("empty", "", 1)
    yield _trace("spaces only", "\n \n\n", 1)
    yield _trace("binary", bytes(range(256)), 2)
    yield _trace("an archive", b"PK\x03\x04\x14\x00\x00\x00\x08\x00\xae\xc3", 1)
    yield _trace("UTF-16", trace_text(PHILLY).encode("utf-16"), 1)
    log = trace_text(LOG)
    for name, text, line in (
        ("cut off", log[:150], 3),
        ("without its last bracket", log.rstrip("]\n"), 4),
        ("a job that is none", log.replace("[", "[7,", 1), 1),
        ("attempts that are none", log.replace('"attempts": []', '"attempts": 5'), 4),
        ("attempts of texts", log.replace('"attempts": []', '"attempts": ["a"]'), 4),
        ("a date that is none", log.replace("07:02:00", "soon"), 2),
        ("an attempt that ends before it begins", log.replace("07:02:00", "06:02:00"), 2),
        ("gpus that are no list", log.replace('["gpu0"]', "3"), 2),
        ("a name that is a number", log.replace('"a"', "5"), 2),
        ("a name twice", log.replace("[]}\n", '[]},\n{"jobid": "a", "submitted_time": "2017-10-09 07:00:00"}\n'), 5),
        ("a moment that is none", log.replace("2017-10-09 07:05:00", "nan"), 4),
        ("nested", "[" * 100_000, 1),
        ("an object", '{"jobs": []}', 1),
        ("no jobs", "[]", 1),
        ("a comma too many", log.replace("[]}\n", "[]},\n"), 5),
        ("numbers of 5000 digits", log.replace("[]}", f"[{'9' * 5000}]}}"), 4),
    ):
        yield _trace(f"log, {name}", text, line)


# --- mistakes in files of jobs ---

BAD_YAML = {
    "a bracket is not closed": ("args: [a, b\n", 0), "a quote is not closed": ("name: 'a\n", 0), "a tab": ("a:\n\t- b\n", 2),
    "a tag": ("env: !!python/object:os.system x\n", 0), "an alias that is endless": ("args: &a [*a]\n", 0),
    "a bomb": ("".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9 if n else ['lol'])}]\n" for n in range(9)), 2),
    "a bomb of mappings": ("a: &a {x: y}\nb: &b {a: *a, b: *a}\nc: {a: *b, b: *b}\n", 2), "nested": ("a: " + "[" * 5000, 1),
    "nested in blocks": ("".join(f"{' ' * n}a:\n" for n in range(300)), 1), "a list": ("- a\n- b\n", 1),
    "a word": ("hello\n", 1), "empty": ("", 1), "only a comment": ("# nothing\n", 1), "two documents": ("a: 1\n---\nb: 2\n", 2),
    "a key that is a list": ("? [a, b]\n: c\n", 1), "a control character": ("name: a\x07b\n", 1),
    "too large": ("a: b\n" * 20_000, 0), "a merge key": ("<<: {a: b}\n", 1), "an unknown alias": ("a: *b\n", 1),
}  # fmt: skip
"""Texts that are no plain YAML, and the line of the mistake."""
BAD_JOBS: dict[str, tuple[str, ...]] = {
    "replicas": ("0", "-1", "nan", ".nan", ".inf", "many", "1.5", "[4]", "true", "100000", "9" * 5000, "0x_", "1e400"),
    "min": ("5", "-1", ".nan", ".inf", "x", "2.5", "{a: b}"),
    "max": ("0", "5", "-1", ".nan", "x", "2.5"),
    "name": ("a b", "../up", "x" * 100, "-a", "[a]"),
    "program": ("gone.py", "[]", "-m", "."),
    "args": ("--epochs 3", "{a: b}", "[[a]]", '["\\0"]'),
    "devices": ("v100", "[v100, v100]", "[[v100]]", "[t4]"),
    "speed": ("{v100: 0}", "{v100: -1}", "{v100: .nan}", "{v100: .inf}", "{v100: fast}", "{p100: 1}", "3"),
    "mixed": ("yes please", "1", "true"),
    "determinism": ("D9", "[D1]"),
    "order": ("up", "1"),
    "allow": ("median", "[{a: b}]"),
    "verify": ("0", "-1", ".nan", "often"),
    "priority": ("high", "1.5", ".inf"),
    "env": ("[a]", "{A B: c}", "{PLIANT_TOKEN: x}", "{A: [b]}"),
    "checkpoint_every": ("-1", ".nan", "x"),
    "kind": ("other", "[train]"),
    "workers": ("5", "-1", "x"),
    "replica": ("4",),
    "directory": ("/",),
    "command": ("train.py", "'\"'"),
}
"""By key: what is written there."""
BAD_FEDERATED: dict[str, tuple[str, ...]] = {
    "participants": ("0", "-1", ".nan", ".inf", "many", "1.5", "41", "[5]"),
    "overcommit": ("0.5", ".nan", ".inf", "1e9", "x"),
    "rounds": ("0", "-3", ".nan", ".inf", "2.5", "9" * 5000),
    "target": ("-0.1", "80", ".nan", "x"),
    "deadline_s": ("0", "-1", ".inf", ".nan", "soon"),
    "seed": ("-1", "1.5", "x", "9" * 30),
    "name": ("a b", "/"),
    "data": (
        "digits", "{kind: digitz, clients: 40}", "{kind: digits, clients: 5000}", "{kind: digits, clients: -1}",
        "{kind: digits, clients: .nan}", "{kind: digits, clients: 40, alpha: 0}", "{kind: digits, clients: 40, alpha: .inf}",
        "{kind: digits, clients: 40, test_samples: 5000}", "{kind: digits, clients: 40, partition: even}", "{kind: speech}",
        "{kind: digits, clients: 40, sizes: gone.csv}", "{kind: digits, clientz: 40}", "{kind: digits, clients: 99999999999999}",
    ),
    "model": ("resnet99", "[mlp]", "lstm", "gone:net"),
    "local": (
        "{steps: 0}", "{batch_size: 0}", "{batch_size: -1}", "{lr: .nan}", "{lr: .inf}", "{lr: 0}", "{momentum: 2}",
        "{weight_decay: -1}", "{stepz: 1}", "{steps: 100000, batch_size: 100000}", "5",
    ),
    "selector": (
        "ort", "{kind: oort, preset: best}", "{kind: oort, pacer_step: .nan}", "{kind: oort, pacer_stp: 1}", "{kind: random, x: 1}",
        "{preset: paper}", "{kind: oort, pacer_step: [1]}", "{kind: oort, exploration_min: -1}", "[oort]",
    ),
    "aggregator": ("fed-best", "{kind: krum, q: 1}", "{kind: fed-prox, mu: -1}", "{kind: fed-yogi, lr: .nan}", "{kind: fed-yogi, lr: a}"),
    "devices": ("gone.csv", "[a]"),
    "availability": ("gone", "{a: b}"),
    "privacy": ("{clip: 0}", "{clip: .nan}", "{noise_multiplier: -1}", "{delta: 2}", "{klip: 1}", "yes"),
    "evaluate_every": ("0", "-1", ".nan"),
    "checkpoint_every": ("0", "x"),
    "workers": ("-1", "1.5", "[a:b]", "99999999999", "true"),
    "batching": ("-1", ".nan", "x"),
    "concurrency": ("41", "-1"),
    "malicious": ("2", "-1", ".nan"),
    "port": ("70000", "-1", "x"),
    "tls_certificate": ("gone.pem",),
    "model_bytes": ("-1", ".inf"),
    "clock_factor": ("0", ".nan", ".inf"),
    "device": ("tpu",),
    "kind": ("fedrated",),
    "priority": ("x", ".nan"),
    "participantz": ("5",),
}  # fmt: skip
BAD_ARTIFACT: dict[str, tuple[str, ...]] = {
    "total_worker": ("-1", "nan", "inf", "x", "21", "1.5"),
    "task": ("vision",),
    "data_set": ("yelp", "unknown"),
    "model": ("resnet99",),
    "num_clients": ("0", "5000", "nan"),
    "epochs": ("0", "nan", "-1", "1e400"),
    "upload_epoch": ("0", "x"),
    "batch_size": ("0", "-8", "nan"),
    "learning_rate": ("0", "nan", "inf", "fast"),
    "overcommit": ("0.5", "nan"),
    "sample_mode": ("ort",),
    "gradient_policy": ("best",),
    "eval_interval": ("0", "[1]"),
}


def _changed(good: dict[str, str], key: str, value: str) -> tuple[dict[str, str], int]:
    """Return the keys with another value, and the place of that key, counted from 1."""
    keys = {**good, key: value}
    return keys, list(keys).index(key) + 1


def bad_jobs() -> Iterator[BadFile]:
    """Wrong files of training jobs, read by two commands in turn."""
    commands = (("submit", "FILE"), ("run", "-f", "FILE"))
    number = 0
    for key, values in BAD_JOBS.items():
        for value in values:
            keys, line = _changed(JOB, key, value)
            line = 0 if key in ("min", "max", "replicas", "mixed", "devices", "speed", "workers") else line
            yield BadFile(f"job: {key} {value[:40]!r}", commands[number % 2], yaml_text(keys).encode(), line)
            number += 1
    for key in ("program", "replicas"):
        rest = {name: value for name, value in JOB.items() if name != key}
        yield BadFile(f"job: without {key}", commands[0], yaml_text(rest).encode(), 1)
    for name, (text, line) in BAD_YAML.items():
        good = yaml_text(JOB) if line == 0 else ""
        yield BadFile(f"job: {name}", commands[0], (good + text).encode(), line)
    yield BadFile("job: a key twice", commands[1], (yaml_text(JOB) + "name: other\n").encode(), len(JOB) + 1)
    yield BadFile("job: binary", commands[0], bytes(range(256)), 2)
    yield BadFile("job: bytes that are no text", commands[1], yaml_text(JOB).encode() + b"\xff\n", len(JOB) + 1)
    yield BadFile("job: cut off", commands[0], yaml_text(JOB).encode()[:47], 3)


def bad_federated() -> Iterator[BadFile]:
    """Wrong files of federated jobs, of our form and of the artifact's."""
    commands = (("fed", "run", "FILE"), ("submit", "FILE"))
    number = 0
    for key, values in BAD_FEDERATED.items():
        for value in values:
            keys, line = _changed(FEDERATED, key, value)
            yield BadFile(f"federated: {key} {value[:60]!r}", commands[number % 2], yaml_text(keys).encode(), line)
            number += 1
    for key, values in BAD_ARTIFACT.items():
        for value in values:
            keys, line = _changed(ARTIFACT, key, value)
            yield BadFile(
                f"artifact: {key} {value[:40]!r}", commands[number % 2], artifact_text(keys).encode(), line + 2
            )
            number += 1
    for name, text, line in (
        ("no job_conf", "ps_ip: 127.0.0.1\n", 1),
        ("job_conf is a word", "ps_ip: 127.0.0.1\njob_conf: hello\n", 2),
        ("a key twice", artifact_text(ARTIFACT) + "  - epochs: 3\n", len(ARTIFACT) + 3),
        ("another machine's address", artifact_text(ARTIFACT).replace("127.0.0.1", "192.0.2.1"), 1),
        ("images that lie nowhere", artifact_text(ARTIFACT).replace("digits", "openImg"), 2),
        ("workers that are none", artifact_text(ARTIFACT) + "worker_ips: [a:b]\n", len(ARTIFACT) + 3),
    ):
        yield BadFile(f"artifact: {name}", commands[0], text.encode(), line)
    for name in ("a bracket is not closed", "a bomb", "a tab", "a control character"):
        text, _ = BAD_YAML[name]
        yield BadFile(f"federated: {name}", commands[0], (yaml_text(FEDERATED) + text).encode())
    yield BadFile("federated: binary", commands[0], b"participants: 3\n" + bytes(range(128, 256)), 2)
    yield BadFile("federated: cut off", commands[0], yaml_text(FEDERATED).encode()[:150])


def all_bad_files() -> list[BadFile]:
    return [*bad_traces(), *bad_jobs(), *bad_federated()]
