"""Determinism levels: what each level pins in a process, and which machines may work together.

    D0  fixed allocation   the same machines give the same result
    D1  elastic (default)  any number of workers gives the same result, on machines of one kind
    D2  heterogeneous      machines may differ: every dispatch that looks at the hardware is pinned

On CUDA, D1 and D2 are strict: an operator without a deterministic kernel is an error (`operators` explains it). D0 leaves
torch as it is.

A worker shows its fingerprint when it joins, and `differences` lists the reasons why it may not. Libraries read some
settings only when they are loaded; `pliant run` sets those before the process starts. A program that changes settings while
it trains is found by `SettingsWatch`. torch does not promise the order in
which gloo sums, so `self_check` compares torch's own sums with our formula before a job claims the bits of DDP.
"""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import distributed as dist

from pliant.comm import kernels, order
from pliant.errors import ConfigError, TrainError

if TYPE_CHECKING:
    from pliant.train.events import StepCommitted

Level = Literal["D0", "D1", "D2"]
LEVELS: tuple[Level, ...] = ("D0", "D1", "D2")
PINS = {
    "ATEN_CPU_CAPABILITY": "aten_pin",
    "ONEDNN_MAX_CPU_ISA": "onednn_pin",
    "MKL_CBWR": "mkl_pin",
    "OMP_NUM_THREADS": "threads_pin",
}
"""The variables that D2 needs in the environment before torch is loaded, and their fields in a fingerprint."""

CUBLAS_CONFIG = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACES = (":4096:8", ":16:8")
"""The values with which cuBLAS sums in one order; the first is what pliant sets."""

# The instruction sets that oneDNN dispatches on, from the least to the best, with the CPU flags that each needs.
_ISAS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("SSE41", ("sse4_1",)),
    ("AVX", ("avx",)),
    ("AVX2", ("avx2", "fma")),
    ("AVX512_CORE", ("avx512f", "avx512bw", "avx512vl", "avx512dq")),
    ("AVX512_CORE_VNNI", ("avx512_vnni",)),
    ("AVX512_CORE_BF16", ("avx512_bf16",)),
    ("AVX512_CORE_AMX", ("amx_tile", "amx_bf16")),
)
_CAPABILITIES = {"DEFAULT": "", "AVX2": "AVX2", "AVX512": "AVX512_CORE"}
"""The capabilities that torch may be told to use, and what the machine must have for each."""
_FP32_PARTS: dict[str, Any] = {
    "matmul": torch.backends.cuda.matmul,
    "conv": torch.backends.cudnn.conv,  # type: ignore[attr-defined]
    "rnn": torch.backends.cudnn.rnn,
}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that decides the bits of a machine's results, besides the program."""

    torch: str
    num_threads: int
    cpu_capability: str
    """What torch's own kernels use: DEFAULT, AVX2, AVX512."""
    cpu_vendor: str
    cpu_model: str
    cpu_isa: str
    """The best that the machine has. MKL and oneDNN choose their kernels by it unless they are pinned."""
    aten_pin: str
    onednn_pin: str
    mkl_pin: str
    threads_pin: str
    flags: str
    """torch's settings that choose kernels or their precision, as `name=value` with spaces between."""
    gpu: str = ""
    gpu_capability: str = ""
    cuda: str = ""
    cudnn: str = ""
    driver: str = ""
    allowed: str = ""
    """The operators without deterministic kernels that the user allows, with commas between."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Fingerprint:
        """Raises ConfigError if `value` is no fingerprint. Fields of newer versions are ignored."""
        kinds = {each.name: int if each.name == "num_threads" else str for each in fields(cls)}
        if isinstance(value, dict) and all(type(value.get(name)) is kind for name, kind in kinds.items()):
            return cls(**{name: value[name] for name in kinds})
        raise ConfigError(
            f"{str(value)[:200]!r} is no fingerprint of a machine: is the other side another version of pliant?"
        )


def level_of(text: str) -> Level:
    """Return the level with this name, in either case."""
    text = text.upper()
    if text not in LEVELS:
        raise ConfigError(f"determinism level {text!r} is unknown: use one of {', '.join(LEVELS)}")
    return text


def fingerprint(device: torch.device | str = "cpu", allowed: Sequence[str] = ()) -> Fingerprint:
    """Return the fingerprint of this process on this device; call it after `pin`. `allowed` are the operators that may
    run without a deterministic kernel."""
    device = torch.device(device)
    vendor, model, isa = _cpu()
    return Fingerprint(
        torch=str(torch.__version__),
        num_threads=torch.get_num_threads(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        cpu_vendor=vendor,
        cpu_model=model,
        cpu_isa=isa,
        **{field: os.environ.get(name, "") for name, field in PINS.items()},
        flags=" ".join(f"{name}={value}" for name, value in settings().items()),
        allowed=",".join(allowed),
        **(_gpu(device) if device.type == "cuda" else {}),
    )


def pin(level: str, device: torch.device | str = "cpu") -> list[str]:
    """Set what the level demands in this process; return what is pinned. D0 demands nothing.

    Raises:
        ConfigError: under D2, the environment was not prepared before torch was loaded; or on CUDA, that of cuBLAS was not
            prepared before CUDA was used.
    """
    level, device = level_of(level), torch.device(device)
    if level == "D0":
        return []
    pinned = _pins_in_force() if level == "D2" else []
    cuda_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    is_early = torch.version.cuda and not cuda_in_use and not os.environ.get(CUBLAS_CONFIG)
    if (device.type == "cuda" or is_early) and not _is_cublas_checked:
        # Set as early as possible: cuBLAS reads it when the first handle is made.
        os.environ[CUBLAS_CONFIG] = cublas_workspace(os.environ.get(CUBLAS_CONFIG), cuda_in_use=cuda_in_use)
    torch.backends.cudnn.benchmark = False
    pinned.append("cudnn.benchmark off")
    if device.type == "cuda":
        pinned += _pin_cuda(level)
    return [*pinned, f"threads {torch.get_num_threads()}", f"CPU capability {torch.backends.cpu.get_cpu_capability()}"]


def differences(mine: Fingerprint, theirs: Fingerprint, level: str) -> list[str]:
    """Return what would change bits if both computed parts of one job. Under D0 that is nothing.

    Under D2 GPUs of different kinds are accepted. Whether the model's operations are the same on both is a question
    about the model, which `obstacles.hetero` answers.
    """
    level = level_of(level)
    if level == "D0":
        return []
    found: list[str] = []

    def compare(what: str, look: Callable[[Fingerprint], object]) -> None:
        if look(mine) != look(theirs):
            found.append(f"{what}: {look(mine) or 'none'} here, {look(theirs) or 'none'} there")

    compare("torch", lambda it: it.torch)
    compare("threads", lambda it: it.num_threads)
    compare("CPU capability", lambda it: it.cpu_capability)
    ours, other = set(mine.flags.split()), set(theirs.flags.split())
    if ours != other:
        shown = [" ".join(sorted(each)) or "none" for each in (ours - other, other - ours)]
        found.append(f"settings: {shown[0]} here, {shown[1]} there")
    compare("allowed operators", lambda it: it.allowed)
    compare("GPU or not", lambda it: "GPU" if it.gpu else "CPU")
    compare("MKL_CBWR", lambda it: it.mkl_pin)
    if level == "D1":
        compare("CPU", lambda it: f"{it.cpu_model} ({it.cpu_isa})")
        compare("ONEDNN_MAX_CPU_ISA", lambda it: it.onednn_pin)
        compare("GPU", lambda it: f"{it.gpu} ({it.gpu_capability})" if it.gpu else "")
        compare("CUDA driver", lambda it: it.driver)
    else:
        compare("oneDNN's instruction set", lambda it: _no_better_than(it.cpu_isa, it.onednn_pin))
        if mine.mkl_pin.upper() != "COMPATIBLE":
            # On processors that are not Intel's, MKL knows only this setting.
            compare("CPU vendor without MKL_CBWR=COMPATIBLE", lambda it: it.cpu_vendor)
        for name, field in PINS.items():
            unset = [where for where, it in (("here", mine), ("there", theirs)) if not getattr(it, field)]
            if unset:
                found.append(f"{name} is not set {' and '.join(unset)}: start with pliant run --determinism D2")
    compare("CUDA", lambda it: it.cuda)
    compare("cuDNN", lambda it: it.cudnn)
    return found


def _no_better_than(isa: str, limit: str) -> str:
    names = [name for name, _ in _ISAS]
    if isa in names and limit.upper() in names:
        return names[min(names.index(isa), names.index(limit.upper()))]
    return isa


def _pins_in_force() -> list[str]:
    """Return the pins for the record; raise ConfigError if a pin is missing, came too late, or asks too much."""
    remedy = "start the program with `pliant run --determinism D2`, which sets it before torch is loaded"
    early = _environment_at_start()
    for name in PINS:
        value = os.environ.get(name)
        if not value:
            raise ConfigError(f"D2 needs {name} in the environment: {remedy}")
        if early.get(name) != value:
            raise ConfigError(
                f"D2 needs {name}={value} to be set before the program starts, not by the program: {remedy}"
            )
    asked, used = os.environ["ATEN_CPU_CAPABILITY"].upper(), torch.backends.cpu.get_cpu_capability()
    if asked != used:
        raise ConfigError(f"ATEN_CPU_CAPABILITY={asked.lower()} is set, but torch uses {used}: {remedy}")
    isa, needed = _cpu()[2], _CAPABILITIES.get(asked, "")
    if needed and _no_better_than(isa, needed) != needed:  # torch would believe it, and die by an illegal instruction
        raise ConfigError(
            f"ATEN_CPU_CAPABILITY={asked.lower()} is set, but this machine has only {isa}: pin what all machines have"
        )
    if os.environ["OMP_NUM_THREADS"] != str(torch.get_num_threads()):
        raise ConfigError(
            f"D2 pins OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}, but torch uses {torch.get_num_threads()} threads: "
            "remove torch.set_num_threads from the program"
        )
    return [f"{name}={os.environ[name]}" for name in PINS]


def _environment_at_start() -> dict[str, str]:
    """Return the environment as the kernel passed it to this program, without what the program has set since."""
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return dict(os.environ)
    pairs = (os.fsdecode(pair).partition("=") for pair in raw.split(b"\0"))
    return {name: value for name, _, value in pairs}


def cublas_workspace(asked: str | None, *, cuda_in_use: bool) -> str:
    """Return the workspace of cuBLAS with which its sums have one order. `asked` is what the environment has now.

    Raises:
        ConfigError: the environment has another value, or has none although CUDA is in use, so that it would come too late.
    """
    if asked in CUBLAS_WORKSPACES:
        return asked
    remedy = (
        f"start the program with `pliant run`, which sets {CUBLAS_CONFIG}, or put "
        f'os.environ["{CUBLAS_CONFIG}"] = "{CUBLAS_WORKSPACES[0]}" above `import torch`'
    )
    if asked:
        raise ConfigError(
            f"{CUBLAS_CONFIG}={asked}: matrix products have no fixed order with it; unset it, and {remedy}"
        )
    if cuda_in_use:
        raise ConfigError(
            f"{CUBLAS_CONFIG} is not set, and the program has used the GPU before pliant.join, so that matrix products may have "
            f"no fixed order: call pliant.join before the first tensor or model goes to the GPU, or {remedy}. "
            'determinism="D0" trains without it'
        )
    return CUBLAS_WORKSPACES[0]


def set_strict() -> None:
    """Let torch use deterministic kernels only, and raise an error where it has none."""
    torch.use_deterministic_algorithms(True)
    # It would fill every fresh tensor, for programs that read memory they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True


_FIXED_WORKSPACES = "torch's"
"""Said of cuBLAS where torch gives it a workspace of one size for each stream, and the variable is no longer needed."""
_is_cublas_checked = False


def free_cublas_of_its_variable() -> None:
    """Let torch see the variable of cuBLAS once, and then remove it from this process.

    torch asks for it in the first matrix product and remembers the answer. It gives cuBLAS a fixed workspace for each
    stream in any case, which is what the order of sums needs. But while the variable is set, torch takes its text apart in
    every product, which takes longer than launching the kernel. Must be called in strict mode.
    """
    global _is_cublas_checked
    config = os.environ.get(CUBLAS_CONFIG)
    if _is_cublas_checked or config != CUBLAS_WORKSPACES[0]:  # the other one is a wish for small workspaces
        return
    one = torch.ones(1, 1, device="cuda")
    torch.mm(one, one)
    del os.environ[CUBLAS_CONFIG]
    try:
        torch.mm(one, one)
    except RuntimeError:  # this torch asks each time
        os.environ[CUBLAS_CONFIG] = config
        return
    torch._C._cuda_clearCublasWorkspaces()  # those of the size that the variable asked for
    _is_cublas_checked = True


def cublas_in_force() -> str | None:
    """Return what fixes the workspaces of cuBLAS; None if nothing does."""
    return _FIXED_WORKSPACES if _is_cublas_checked else os.environ.get(CUBLAS_CONFIG)


def _pin_cuda(level: Level) -> list[str]:
    set_strict()
    free_cublas_of_its_variable()
    pinned = ["deterministic algorithms", "cudnn.deterministic", f"cuBLAS workspaces {cublas_in_force()}"]
    if level == "D2":
        for part in _FP32_PARTS.values():
            part.fp32_precision = "ieee"
        # The older switches, too: torch refuses to answer if the two contradict each other.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        pinned += ["no TF32", "no reduced-precision reductions", "attention by the math kernel"]
    return pinned


# --- settings of torch that choose kernels ---


def settings() -> dict[str, str]:
    """Return torch's settings that choose kernels or their precision. Takes microseconds, and starts no CUDA."""
    matmul, attention = torch.backends.cuda.matmul, cast(Any, torch.backends.cuda)  # which has no types
    is_strict = not torch.is_deterministic_algorithms_warn_only_enabled()
    kernels_on = {
        "flash": attention.flash_sdp_enabled(),
        "efficient": attention.mem_efficient_sdp_enabled(),
        "math": attention.math_sdp_enabled(),
        "cudnn": attention.cudnn_sdp_enabled(),
    }
    values: dict[str, object] = {
        "deterministic": ("strict" if is_strict else "warn-only")
        if torch.are_deterministic_algorithms_enabled()
        else False,
        "cudnn": torch.backends.cudnn.enabled,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        **{f"{name}.fp32": part.fp32_precision for name, part in _FP32_PARTS.items()},
        "matmul.fp16_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "matmul.bf16_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "matmul.fp16_accumulation": matmul.allow_fp16_accumulation,
        "attention": ",".join(name for name, is_on in kernels_on.items() if is_on),
        "attention.reduction": attention.fp16_bf16_reduction_math_sdp_allowed(),
        "blas": str(torch._C._get_blas_preferred_backend()).rpartition(".")[2],
        "linalg": str(torch._C._get_linalg_preferred_backend()).rpartition(".")[2],
        "cublas": cublas_in_force(),
        "cublaslt": os.environ.get("CUBLASLT_WORKSPACE_SIZE"),
    }
    shown = {True: "on", False: "off", None: "default"}
    return {
        name: shown[value] if value is None or isinstance(value, bool) else str(value).replace(" ", "") or "none"
        for name, value in values.items()
    }


class SettingsWatch:
    """Finds a program that changes settings while it trains: other workers, or those that join later, would have others.

    It looks in the first step, in the first step after each change of workers, and every so many steps.
    """

    def __init__(self, device: torch.device, every: int) -> None:
        self._device, self._every = device, every
        self._before = self._present()
        self._is_new_view = True

    def _present(self) -> dict[str, str]:
        threads = {"threads": str(torch.get_num_threads())}
        return {**settings(), **threads} if self._device.type == "cuda" else threads  # a CPU heeds no other setting

    def enter_view(self, _: object = None) -> None:
        self._is_new_view = True

    def end_step(self, event: StepCommitted) -> None:
        """Look if it is time to.

        Raises:
            TrainError: a setting is not what it was when the job began.
        """
        if self._is_new_view or (self._every and event.step % self._every == 0):
            self._is_new_view = False
            self.check(event.step)

    def check(self, step: int) -> None:
        now = self._present()
        changed = [f"{name} is {now[name]}, and was {was}" for name, was in self._before.items() if now[name] != was]
        if changed:
            raise TrainError(
                f"step {step}: the program has changed settings of torch since the job began, which changes bits: "
                f"{'; '.join(changed)}. Set them before job.epochs or job.steps"
            )


def _cpu() -> tuple[str, str, str]:
    """Return vendor, model and best instruction set of this machine's processor."""
    found: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            found.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    flags = set(found.get("flags", "").split())
    isa = platform.machine()
    for name, needed in _ISAS:
        if not flags.issuperset(needed):
            break
        isa = name
    vendor = found.get("vendor_id") or found.get("CPU implementer") or platform.machine()
    return vendor, found.get("model name") or platform.processor() or vendor, isa


def _gpu(device: torch.device) -> dict[str, str]:
    properties = torch.cuda.get_device_properties(device)
    try:
        driver = Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        driver = ""
    return {
        "gpu": properties.name,
        "gpu_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda or "",
        "cudnn": str(torch.backends.cudnn.version() or ""),  # type: ignore[no-untyped-call]
        "driver": driver,
    }


# --- the order of sums ---


MAX_RANKS = 8
"""More ranks cost time by their square and show nothing new: the ring is the same."""
TIMEOUT = datetime.timedelta(seconds=10)
SIZES = (
    (torch.float32, 1),
    (torch.float32, 10),
    (torch.float32, 30_011),
    (torch.float64, 1023),
    (torch.bfloat16, 4099),
)
FACTORS = (1.0, -0.7310585, 1.3591409, 0.5772157, -1.6180340, 0.9159656, -1.2020569, 0.6931472)
"""The ranks' values differ by these factors: of both signs and no two equal, so that the order of the sum shows."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    ok: bool
    """Replicas on any number of workers have the bits of DistributedDataParallel; otherwise only D0 holds."""
    detail: str


def self_check(num_replicas: int, *, thorough: bool = False) -> SelfCheck:
    """Compare torch's all-reduce with the formula. Touches no random generator, and leaves nothing open.

    With `thorough`, also sum tensors that are cut into more than two segments for each rank (megabytes).
    """
    if num_replicas < 2:
        return SelfCheck(True, "one replica: nothing is summed")
    began_s = time.perf_counter()
    num_ranks = min(num_replicas, MAX_RANKS)
    sizes = list(SIZES)
    if thorough:  # from 2 N segments of 1 MiB on, another branch of the formula gives the length of a chunk
        sizes.append((torch.float32, 2 * num_ranks * order.GLOO_SEGMENT_BYTES // 4 + 5))
    cases = [_inputs(dtype, size, num_ranks, seed) for seed, (dtype, size) in enumerate(sizes)]
    try:
        results = _reduce_by_torch(cases, num_ranks)
    except (RuntimeError, AttributeError) as error:
        why = str(error).splitlines()[0]
        return SelfCheck(False, f"gloo of torch {torch.__version__} could not be asked ({why})")
    total = wrong = 0
    for inputs, outputs in zip(cases, results, strict=True):
        expected = fold(inputs)
        total += expected.numel()
        wrong += max(int((expected != output).sum()) for output in outputs)
    took = f"{num_ranks} ranks, {total} sums, {(time.perf_counter() - began_s) * 1000:.0f} ms"
    if wrong:
        return SelfCheck(
            False,
            f"torch {torch.__version__} sums in another order than gloo's ring: {wrong} sums differ ({took}); use a torch "
            "whose self-check passes (2.11 and 2.13 do)",
        )
    return SelfCheck(True, f"torch {torch.__version__} sums as gloo's ring does ({took})")


def fold(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the replicas' tensors by the formula."""
    num_replicas, first = len(inputs), inputs[0]
    out, scratch = torch.empty_like(first), kernels.Scratch()
    length = order.chunk_length(first.numel(), first.itemsize, num_replicas)
    pieces = order.chunks_between(0, first.numel(), length)
    for begin, end, chunk in pieces:
        views = [tensor[begin:end] for tensor in inputs]
        ranges = [(0, end - begin, order.chain(chunk, num_replicas))]
        kernels.PreparedFold(kernels.reducer("sum", first.dtype), views, ranges, scratch, out[begin:end]).run()
    return out


def _inputs(dtype: torch.dtype, size: int, num_ranks: int, seed: int) -> list[torch.Tensor]:
    """Return values whose sums round differently in different orders."""
    base = torch.rand(size, generator=torch.Generator().manual_seed(seed)).sub_(0.5)
    return [(base * FACTORS[rank]).to(dtype) for rank in range(num_ranks)]


def _reduce_by_torch(cases: list[list[torch.Tensor]], num_ranks: int) -> list[list[torch.Tensor]]:
    """Return the result of each rank for each case."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def rank_of_gloo(rank: int) -> list[torch.Tensor]:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = TIMEOUT
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group = dist.ProcessGroupGloo(store, rank, num_ranks, options)
        outputs = []
        for inputs in cases:
            output = inputs[rank].clone()
            group.allreduce([output]).wait()  # type: ignore[attr-defined]
            outputs.append(output)
        return outputs

    with ThreadPoolExecutor(num_ranks, thread_name_prefix="pliant-fold") as ranks:
        by_rank = list(ranks.map(rank_of_gloo, range(num_ranks)))
    return [[outputs[case] for outputs in by_rank] for case in range(len(cases))]
