"""State becomes text and tensors, and comes back as it was, bit by bit and kind by kind."""

from __future__ import annotations

import enum
import inspect
import json
import math
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pliant.errors import CheckpointError, TrainError
from pliant.train.state_tree import flatten, unflatten


def round_trip(tree: object) -> object:
    skeleton, tensors = flatten(tree)
    json.loads(skeleton, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return unflatten(skeleton, [tensor.clone() for tensor in tensors])


def assert_same(a: object, b: object, path: str = "tree") -> None:
    """Equal kinds and bits. Stricter than ==, which holds between 1 and True, or 0.0 and -0.0, and not between nans."""
    if isinstance(a, OrderedDict):
        assert isinstance(b, dict), path
        assert getattr(a, "_metadata", None) == getattr(b, "_metadata", None), path
    elif isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), path
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), path
        assert torch.equal(
            a.detach().contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
        ), path
        return
    else:
        assert type(a) is type(b), f"{path}: {type(a)} became {type(b)}"
    if isinstance(a, dict):
        assert isinstance(b, dict)
        assert len(a) == len(b), path
        for (key, item), (other_key, other) in zip(a.items(), b.items(), strict=True):
            assert_same(key, other_key, f"key {key!r} of {path}")
            assert_same(item, other, f"{path}[{key!r}]")
        if isinstance(a, defaultdict):
            assert a.default_factory is b.default_factory  # type: ignore[attr-defined]
    elif isinstance(a, (list, tuple, deque)):
        assert len(a) == len(b), path  # type: ignore[arg-type]
        for index, (item, other) in enumerate(zip(a, b, strict=True)):  # type: ignore[call-overload]
            assert_same(item, other, f"{path}[{index}]")
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b), path
    elif isinstance(a, (np.ndarray, np.generic)):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), path  # type: ignore[attr-defined]
    else:
        assert a == b, path


ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary(max_size=20)
    | st.complex_numbers(allow_nan=False)
)
KEYS = (
    st.text(st.characters())
    | st.integers()
    | st.booleans()
    | st.none()
    | st.floats(allow_nan=False)
    | st.tuples(st.text(), st.integers())
)
TENSORS = st.builds(
    lambda shape, dtype, seed: torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(
        [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8]
    ),
    st.integers(0, 1000),
)
TREES = st.recursive(
    ATOMS | TENSORS | st.builds(np.float32, st.floats(width=32)) | st.builds(np.int16, st.integers(-9, 9)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(lambda items: deque(items, 9))
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4).map(lambda items: defaultdict(list, items))
        | st.sets(KEYS, max_size=3)
        | st.frozensets(st.integers(), max_size=3)
        | st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_whatever_goes_in_comes_out(tree: object) -> None:
    assert_same(tree, round_trip(tree))


@pytest.mark.parametrize(
    "value",
    [
        math.inf, -math.inf, -0.0, struct.unpack(">d", bytes.fromhex("7ff80000000000ab"))[0], 5e-324, 0.1, 1 << 80,
        "\ud800\udc00", "å\x00\n", {"\ud800": 1}, torch.float16, torch.float8_e4m3fn, torch.Size([2, 3]),
        torch.device("cuda", 1), torch.device("cpu"), np.float64(0.1), np.bool_(True), np.str_("x"),
        np.arange(6, dtype=">i2").reshape(2, 3), np.zeros((0, 3)), np.float16(1) * np.ones(20000), (),
        {(1, ("a", None)): 2, frozenset({1}): 3, b"k": 4}, {1: "a", "1": "b", None: "c", 1.5: "d", False: "e"},
        defaultdict(None, {1: 2}), Counter({30: 1, 80: 2}), 1 + 2j, [[[[]]]], {"t": 1}, {"d": {"t": 0}, "order": []},
    ],
    ids=repr,
)  # fmt: skip
def test_special_values(value: object) -> None:
    assert_same(value, round_trip(value))


def test_the_tensors_are_the_memory_itself() -> None:
    weight = nn.Parameter(torch.ones(3))
    _, (listed,) = flatten({"w": weight})
    assert listed.data_ptr() == weight.data_ptr()
    assert not listed.requires_grad
    listed[0] = 7
    assert weight[0] == 7
    mine = torch.zeros(3)
    assert unflatten('{"d":{"w":{"t":0}}}', [mine])["w"] is mine  # type: ignore[index]


def test_memory_order_survives() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    skeleton, (listed,) = flatten([image, image.transpose(0, 1)])[0], flatten([image])[1]
    assert listed.is_contiguous()
    assert listed.data_ptr() == image.data_ptr()
    assert_same([image, image.transpose(0, 1)], unflatten(skeleton, [listed.clone()]))
    gaps = torch.arange(10.0)[::2]
    assert torch.equal(round_trip(gaps), gaps)  # type: ignore[arg-type]


def test_tied_weights_are_listed_once_and_stay_tied() -> None:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    skeleton, tensors = flatten(nn.ModuleList([embedding, head]).state_dict())
    assert len(tensors) == 1
    state = unflatten(skeleton, tensors)
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()  # type: ignore[index]
    assert len(flatten([torch.empty(0), torch.empty(0)])[1]) == 2


def test_a_state_dict_keeps_the_versions_of_its_modules() -> None:
    """BatchNorm of version 1 had no num_batches_tracked: without the version a loader would have to guess."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    state = round_trip(model.state_dict())
    assert state._metadata[""] == {"version": 1}  # type: ignore[attr-defined]
    assert state._metadata["1"] == {"version": 2}  # type: ignore[attr-defined]
    assert_same(model.state_dict(), state)
    model.load_state_dict(state)  # type: ignore[arg-type]


def test_equal_sets_have_equal_skeletons() -> None:
    assert flatten({8, 0, "a", None})[0] == flatten({None, "a", 0, 8})[0]


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


class Mine(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        ({"a": [1, object()]}, "state['a'][1]", "builtins.object"),
        ({"fn": math.sqrt}, "state['fn']", "'sqrt'"),
        ([lambda x: x], "state[0]", "<lambda>"),
        ({"e": Colour.RED}, "state['e']", "Colour"),
        (Point(1, 2), "state", "Point"),
        ({"m": Mine()}, "state['m']", "Mine"),
        (defaultdict(lambda: 1), "state", "defaultdict"),
        ({torch.ones(1): 1}, "state", "tensor"),
        ({(1, Colour.RED): 1}, "key", "Colour"),
        ([torch.ones(2, 2).to_sparse()], "state[0]", "sparse"),
        ([torch.ones(2, device="meta")], "state[0]", "meta"),
        (np.array([object()]), "state", "object"),
        (nn.LazyLinear(3).weight, "state", "lazy"),
        (nn.Linear(1, 1), "state", "Linear"),
    ],
    ids=lambda value: None,
)
def test_what_cannot_be_kept_is_named(value: object, path: str, kind: str) -> None:
    with pytest.raises(TrainError) as caught:
        flatten(value)
    assert path in str(caught.value)
    assert kind in str(caught.value)
    assert ": " in str(caught.value)


def test_a_tree_that_contains_itself() -> None:
    tree: list[object] = []
    tree.append(tree)
    with pytest.raises(TrainError, match="containing itself"):
        flatten(tree)


@pytest.mark.parametrize(
    "skeleton",
    ["", "{", '{"t":1}', '{"t":-1}', '{"t":"a"}', '{"what":1}', '{"d":1,"D":2}', '{"float":"zz"}', '{"bytes":"*"}',
     '{"set":[[]]}', '{"defaultdict":["eval",[]]}', '{"t":0,"order":[0,0,1]}', '{"dtype":"nope"}', '{"scalar":["|O","00"]}',
     '{"D":1}', '{"D":[1]}', '{"D":[[[],1]]}', '{"module":[1,2]}', '{}', '{"array":["<f4",[3],"AAAA"]}'],
)  # fmt: skip
def test_a_damaged_skeleton_is_an_error_of_ours(skeleton: str) -> None:
    with pytest.raises(CheckpointError):
        unflatten(skeleton, [torch.zeros(2)])


OPTIMIZERS = sorted(
    name for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)  # fmt: skip


def trained(kind: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    make = getattr(torch.optim, kind)
    optimizer: torch.optim.Optimizer = make(params, lr=0.1)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for param in params:
            grad = torch.randn(param.shape, generator=generator)
            param.grad = grad.to_sparse() if kind == "SparseAdam" else grad
        optimizer.step(lambda: torch.tensor(1.0))
    return optimizer


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer(kind: str) -> None:
    """The state comes back exactly, and a step after it has the same bits as one without the trip."""
    params = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.zeros(2, 2))]
    optimizer = trained(kind, params)
    state = round_trip(optimizer.state_dict())
    assert_same(optimizer.state_dict(), state)
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    other = getattr(torch.optim, kind)(twins, lr=9.0)
    other.load_state_dict(state)
    for param, twin in zip(params, twins, strict=True):
        twin.grad = param.grad
    optimizer.step(lambda: torch.tensor(1.0))
    other.step(lambda: torch.tensor(1.0))
    assert all(torch.equal(param, twin) for param, twin in zip(params, twins, strict=True))


class Warmup:
    """A callable with state, which LambdaLR keeps as a dict."""

    def __init__(self) -> None:
        self.steps = 5

    def __call__(self, epoch: int) -> float:
        return min(1.0, (epoch + 1) / self.steps)


lr = torch.optim.lr_scheduler
SCHEDULERS = {
    "LambdaLR": lambda opt: lr.LambdaLR(opt, lambda epoch: 0.9**epoch),
    "LambdaLR with state": lambda opt: lr.LambdaLR(opt, Warmup()),
    "MultiplicativeLR": lambda opt: lr.MultiplicativeLR(opt, lambda epoch: 0.9),
    "StepLR": lambda opt: lr.StepLR(opt, 2),
    "MultiStepLR": lambda opt: lr.MultiStepLR(opt, [1, 2, 2]),
    "ConstantLR": lambda opt: lr.ConstantLR(opt),
    "LinearLR": lambda opt: lr.LinearLR(opt),
    "ExponentialLR": lambda opt: lr.ExponentialLR(opt, 0.9),
    "PolynomialLR": lambda opt: lr.PolynomialLR(opt),
    "CosineAnnealingLR": lambda opt: lr.CosineAnnealingLR(opt, 10),
    "CosineAnnealingWarmRestarts": lambda opt: lr.CosineAnnealingWarmRestarts(opt, 2),
    "CyclicLR": lambda opt: lr.CyclicLR(opt, 0.01, 0.1, cycle_momentum=False),
    "CyclicLR, own scale": lambda opt: lr.CyclicLR(opt, 0.01, 0.1, scale_fn=Warmup(), cycle_momentum=False),
    "OneCycleLR": lambda opt: lr.OneCycleLR(opt, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda opt: lr.ReduceLROnPlateau(opt),
    "ChainedScheduler": lambda opt: lr.ChainedScheduler([lr.ConstantLR(opt), lr.ExponentialLR(opt, 0.9)]),
    "SequentialLR": lambda opt: lr.SequentialLR(opt, [lr.LinearLR(opt), lr.MultiStepLR(opt, [3])], milestones=[2]),
    "SWALR": lambda opt: torch.optim.swa_utils.SWALR(opt, 0.05),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_scheduler(name: str) -> None:
    def advance(scheduler: object) -> None:
        scheduler.step(*([1.0] if isinstance(scheduler, lr.ReduceLROnPlateau) else []))  # type: ignore[attr-defined]

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)
    for _ in range(3):
        advance(scheduler)
    state = round_trip(scheduler.state_dict())
    assert_same(scheduler.state_dict(), state)
    twin = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    restored = SCHEDULERS[name](twin)
    twin.load_state_dict(round_trip(optimizer.state_dict()))  # type: ignore[arg-type]
    restored.load_state_dict(state)
    for _ in range(4):
        advance(scheduler)
        advance(restored)
        assert optimizer.param_groups[0]["lr"] == twin.param_groups[0]["lr"]


def test_the_list_of_schedulers_is_complete() -> None:
    kinds = {
        name for name, kind in vars(lr).items()
        if inspect.isclass(kind) and issubclass(kind, lr.LRScheduler) and not name.startswith("_")
    } - {"LRScheduler"}  # fmt: skip
    assert kinds <= {name.split(" ")[0].rstrip(",") for name in SCHEDULERS}


def test_scaler_and_averages() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    assert_same(scaler.state_dict(), round_trip(scaler.state_dict()))
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2), use_buffers=True)
    average.update_parameters(nn.Linear(2, 2))
    assert_same(average.state_dict(), round_trip(average.state_dict()))
