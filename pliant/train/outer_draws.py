"""Random numbers drawn outside of turns move the generators of every replica as they would move those of every DDP rank.

Code in the outer body of a step, or between epochs, runs once on a worker, with the generators of one hosted replica. A
DDP program runs it on each of N ranks, and there each rank's own generators move. So the numbers that were drawn are
counted, and the generators of all other replicas are moved as far.

Torch's CPU generator, Python's and NumPy's are all Mersenne twisters: what was drawn is a number of 32-bit words, found by
running the twister from the state before until it is in the state after. This is exact for functions that draw a fixed
number of words, as all of torch's do; some functions of Python and NumPy (`shuffle`, `randint`) draw again when a number
does not fit, which depends on the numbers. A CUDA generator counts its numbers itself.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pliant.train.context import RngState, capture_rng, restore_rng

Words = np.ndarray[Any, np.dtype[np.uint32]]
SEARCHES = (1 << 20, 1 << 28)
"""How many words to search, about 5 ns each. If more lie between two states, the program has set the second one."""
_WORDS = 624
_KEY_BYTES = _WORDS * 4
_CHUNK_BLOCKS = 1024
_NORMAL_WORDS = 4
"""A pair of normal deviates takes two doubles of two words each. Torch keeps the second one for its next small draw."""
_MAX_NORMAL_SEARCH = 1 << 16


@dataclass(frozen=True, slots=True)
class Twister:
    """A Mersenne twister: its words, and how many of them were given out."""

    key: bytes
    position: int

    def advanced(self, words: int) -> Twister:
        generator = self._generator()
        if words:
            generator.random_raw(words, output=False)
        state = generator.state["state"]
        return Twister(state["key"].astype("<u4").tobytes(), int(state["pos"]))

    def words_until(self, later: Twister, limit: int = SEARCHES[-1]) -> int | None:
        """Return how many words were given out between the two states; None if that is more than about `limit`."""
        if self.key == later.key:
            return later.position - self.position if later.position >= self.position else None
        ahead = _WORDS - self.position
        generator = self.advanced(ahead)._generator()
        first, second = (_temper(word) for word in np.frombuffer(later.key, dtype="<u4", count=2))
        blocks = 0
        while blocks * _WORDS < limit:
            chunk = min(_CHUNK_BLOCKS, max(1, blocks))
            drawn = generator.random_raw(chunk * _WORDS).reshape(chunk, _WORDS)
            for found in np.flatnonzero((drawn[:, 0] == first) & (drawn[:, 1] == second)):
                words = ahead + (blocks + int(found)) * _WORDS + later.position
                if self.advanced(words) == later:
                    return words
            blocks += chunk
        return None

    def was_just_seeded(self) -> bool:
        """Return whether this state comes soon after a seed. It need not be searched for then: a seed fills all words by a
        known rule, and the steps since then can be undone."""
        words = np.frombuffer(self.key, dtype="<u4")
        for _ in range(_RECENT_BLOCKS):
            if _is_filled_by_seed(words):
                return True
            words = _block_before(words)
        return False

    def _generator(self) -> np.random.MT19937:
        generator = np.random.MT19937(0)
        key = np.frombuffer(self.key, dtype="<u4").astype(np.uint32)
        generator.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": self.position}}
        return generator


_RECENT_BLOCKS = 32
_SEEDS_MIXED = np.frombuffer(np.random.RandomState(19650218).get_state(legacy=False)["state"]["key"].tobytes(), "<u4")
"""What a seed of several words, as all of Python's are, is mixed into."""


def _is_filled_by_seed(words: Words) -> bool:
    """Return whether these words are as a seed leaves them (`init_genrand` and `init_by_array` of the twister's authors). The
    first word does not matter: the twister uses one bit of it."""
    before, after, number = words[1:-1], words[2:], np.arange(2, _WORDS, dtype=np.uint32)
    mixed = before ^ (before >> 30)
    if np.array_equal(after, mixed * np.uint32(1812433253) + number):
        return True
    # The second of the two rounds of `init_by_array` is undone. The first has added the words of the seed, one after the
    # other, and again from the first one on.
    first = after[1:] + number[1:] ^ mixed[1:] * np.uint32(1566083941)
    added = first[1:] - (_SEEDS_MIXED[4:] ^ (first[:-1] ^ (first[:-1] >> 30)) * np.uint32(1664525))
    return any(np.array_equal(added[length:], added[:-length]) for length in range(1, _WORDS // 2))


def _block_before(words: Words) -> Words:
    """Return the words of a twister before it has made these out of them. If a seed has left them, only one bit of the first
    is right."""
    both = np.concatenate([words, words])  # the first half is filled with the words before
    for begin, end in ((228, _WORDS), (1, 228), (0, 1)):  # each needs what was found before it
        upper, lower = (
            _untwist(both[_WORDS + begin - back : _WORDS + end - back] ^ both[397 + begin - back : 397 + end - back])
            for back in (0, 1)
        )
        both[begin:end] = (upper & np.uint32(0x80000000)) | (lower & np.uint32(0x7FFFFFFF))
    return both[:_WORDS]


def _untwist(value: Words) -> Words:
    """Undo the twister's matrix: return the word with the upper bit of one word, and the lower bits of the next."""
    odd = value >> np.uint32(31)
    return ((value ^ odd * np.uint32(0x9908B0DF)) << np.uint32(1)) | odd


def _temper(word: int) -> int:
    """Return the number that the twister gives out for this word of its state."""
    value = int(word)
    value ^= value >> 11
    value ^= (value << 7) & 0x9D2C5680
    value ^= (value << 15) & 0xEFC60000
    return value ^ (value >> 18)


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """What was drawn between two states of the generators."""

    before: RngState
    after: RngState

    @classmethod
    def between(cls, before: RngState, after: RngState) -> Draws | None:
        """Return what was drawn; None if nothing was."""
        return None if before == after else cls(before, after)

    @property
    def counts(self) -> tuple[int | None, ...]:
        """How many words were drawn from the generators of Python, NumPy and torch, and from that of CUDA; None for
        one that was seeded."""
        before, after = self.before, self.after
        words = [
            0 if one == other else _words_between(one, other)
            for one, other in ((before.python[0], after.python[0]), (before.numpy[0], after.numpy[0]))
        ]
        on_host = 0 if torch.equal(before.torch, after.torch) else _drawn(_bytes(before.torch), _bytes(after.torch))
        on_device: int | None = 0
        if before.cuda is not None and after.cuda is not None:
            (seed, begin), (new_seed, end) = (_CUDA.unpack(_bytes(each)) for each in (before.cuda, after.cuda))
            on_device = end - begin if seed == new_seed else None
        return (*words, on_host, on_device)

    def apply(self, state: RngState) -> RngState:
        """Return `state`, moved as far as these draws have moved another replica's generators.

        Where the program has seeded a generator, every replica takes the state after, as every rank would.
        """
        before, after = self.before, self.after
        return RngState(
            python=(
                _moved_words(state.python[0], before.python[0], after.python[0]),
                state.python[1] if after.python[1] is not None else None,
            ),
            numpy=(
                _moved_words(state.numpy[0], before.numpy[0], after.numpy[0]),
                state.numpy[1] and after.numpy[1],
                state.numpy[2] if after.numpy[1] else 0.0,
            ),
            torch=_moved_torch(state.torch, before.torch, after.torch),
            cuda=_moved_cuda(state.cuda, before.cuda, after.cuda),
        )


# --- between batches ---


_HOST_GENERATORS = ("python", "numpy", "torch")


class DrawsBetween:
    """Counts the random numbers that the training draws between the batches of a sampler or stream in the same process.

    They decide what the sampler or stream draws next, if it draws from the same generators. Only then are they counted.
    """

    def __init__(self, entries: Sequence[Sequence[Any]] = ()) -> None:
        """The present state of the generators is that after the last batch."""
        self.entries: list[Sequence[Any]] = [tuple(entry) for entry in entries]
        """The number of a batch, a generator, and how many words were drawn from it before that batch, since a batch drew
        from it; None if it was seeded."""
        self._last = dict.fromkeys(_HOST_GENERATORS, capture_rng())

    def record(self, number: int, before: RngState) -> None:
        """Count what was drawn before a batch. `before` is the state when it was asked for; now it is made."""
        after = capture_rng()
        for generator in _HOST_GENERATORS:
            if _part(before, generator) != _part(after, generator):
                words = _words_drawn(self._last[generator], before, generator)
                if words != 0:
                    self.entries.append((number, generator, words))
                self._last[generator] = after

    def draw_again(self, number: int) -> None:
        """Draw what was drawn before this batch, as far as it is known."""
        for at, generator, words in self.entries:
            if at == number and words is not None:
                restore_rng(_advanced(capture_rng(), generator, words))


def _part(state: RngState, generator: str) -> bytes:
    if generator == "torch":
        return _bytes(state.torch)
    return state.python[0] if generator == "python" else state.numpy[0]


def _words_drawn(before: RngState, after: RngState, generator: str) -> int | None:
    one, other = _part(before, generator), _part(after, generator)
    if one == other:
        return 0
    return _drawn(one, other) if generator == "torch" else _words_between(one, other)


def _advanced(state: RngState, generator: str, words: int) -> RngState:
    if generator == "torch":
        return replace(state, torch=_write_torch(state.torch, _read_torch(state.torch).advanced(words)))
    moved = _twister(_part(state, generator)).advanced(words)
    there = moved.key + struct.pack("<i", moved.position)
    if generator == "python":
        return replace(state, python=(there, state.python[1]))
    return replace(state, numpy=(there, *state.numpy[1:]))


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _moved_words(own: bytes, before: bytes, after: bytes) -> bytes:
    if before == after:
        return own
    words = _words_between(before, after)
    if words is None:
        return after
    moved = _twister(own).advanced(words)
    return moved.key + struct.pack("<i", moved.position)


@functools.lru_cache(maxsize=4)
def _words_between(before: bytes, after: bytes) -> int | None:
    """Return how many words lie between two states; None if the generator was seeded. It is remembered: all replicas of a
    worker ask for the same."""
    begin, end = _twister(before), _twister(after)
    words = begin.words_until(end, SEARCHES[0])
    if words is not None or end.was_just_seeded():
        return words
    return begin.words_until(end)


def _twister(words: bytes) -> Twister:
    return Twister(words[:_KEY_BYTES], struct.unpack_from("<i", words, _KEY_BYTES)[0])


# --- torch ---


_HEAD = struct.Struct("<QiiQ")
"""The seed, how many words are left before the next twist (plus one), whether it is seeded, the next word."""
_NORMAL = struct.Struct("<dddi")
"""Unused, the kept normal deviate, unused, whether there is one."""
_NORMAL_AT = _HEAD.size + _WORDS * 8


def _moved_torch(own: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    if torch.equal(before, after):
        return own
    begin = _read_torch(before)
    words = _drawn(before.numpy().tobytes(), after.numpy().tobytes())
    if words is None:
        return after
    kept = _normal(after)
    if kept is None or kept == _normal(before):
        result = _write_torch(own, _read_torch(own).advanced(words))
        return result if kept is not None else _with_normal(result, None)
    for back in range(_NORMAL_WORDS, min(words, _MAX_NORMAL_SEARCH) + 1):
        # The pair whose second half is kept was drawn `back` words before the end.
        if _normal(_draw_normal(before, begin.advanced(words - back))) == kept:
            drawn = _draw_normal(own, _read_torch(own).advanced(words - back))
            return _write_torch(drawn, _read_torch(drawn).advanced(back - _NORMAL_WORDS))
    return _with_normal(_write_torch(own, _read_torch(own).advanced(words)), None)


@functools.lru_cache(maxsize=4)
def _drawn(before: bytes, after: bytes) -> int | None:
    """Return how many words were drawn; None if the generator was seeded, perhaps with its old seed."""
    seed = _HEAD.unpack_from(before)[0]
    if seed != _HEAD.unpack_from(after)[0]:
        return None
    begin, end = (_read_torch(torch.frombuffer(bytearray(each), dtype=torch.uint8)) for each in (before, after))
    anew = _read_torch(torch.Generator().manual_seed(seed).get_state())
    for limit in SEARCHES:
        words = begin.words_until(end, limit)
        if words is not None or anew.words_until(end, limit) is not None:
            return words
    return None


def _draw_normal(form: torch.Tensor, at: Twister) -> torch.Tensor:
    """Return the state after one normal deviate was drawn at this place."""
    generator = torch.Generator()
    generator.set_state(_with_normal(_write_torch(form, at), None))
    torch.randn(1, generator=generator)
    return generator.get_state()


def _view(data: Any) -> memoryview:
    return memoryview(data)


def _read_torch(state: torch.Tensor) -> Twister:
    data = state.numpy()
    _, left, _, _ = _HEAD.unpack_from(_view(data))
    words = data[_HEAD.size : _NORMAL_AT].view("<u8").astype("<u4")
    return Twister(words.tobytes(), _WORDS + 1 - left)


def _write_torch(form: torch.Tensor, twister: Twister) -> torch.Tensor:
    """Return the state `form` with other words."""
    result = form.clone()
    data = result.numpy()
    seed, _, seeded, _ = _HEAD.unpack_from(_view(data))
    _HEAD.pack_into(_view(data), 0, seed, _WORDS + 1 - twister.position, seeded, twister.position)
    data[_HEAD.size : _NORMAL_AT].view("<u8")[:] = np.frombuffer(twister.key, dtype="<u4")
    return result


def _normal(state: torch.Tensor) -> float | None:
    _, value, _, valid = _NORMAL.unpack_from(_view(state.numpy()), _NORMAL_AT)
    return value if valid else None


def _with_normal(state: torch.Tensor, value: float | None) -> torch.Tensor:
    result = state.clone()
    _NORMAL.pack_into(_view(result.numpy()), _NORMAL_AT, 0.0, value or 0.0, 0.0, value is not None)
    return result


# --- CUDA ---


_CUDA = struct.Struct("<QQ")
"""The seed, and how many numbers were drawn."""


def _moved_cuda(
    own: torch.Tensor | None, before: torch.Tensor | None, after: torch.Tensor | None
) -> torch.Tensor | None:
    if own is None or before is None or after is None or torch.equal(before, after):
        return own
    seed, begin = _CUDA.unpack(before.numpy().tobytes())
    new_seed, end = _CUDA.unpack(after.numpy().tobytes())
    if seed != new_seed or end < begin:
        return after
    own_seed, offset = _CUDA.unpack(own.numpy().tobytes())
    return torch.frombuffer(bytearray(_CUDA.pack(own_seed, offset + end - begin)), dtype=torch.uint8)
