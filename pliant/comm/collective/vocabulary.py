"""The numbers that stand for specs in frames: those that this rank has given, and those that peers have explained."""

from __future__ import annotations

import threading
from collections import defaultdict

from pliant.comm.collective.program import Known
from pliant.comm.plan import Channel, Spec
from pliant.comm.transport.link import Link
from pliant.comm.transport.wire import Kind, channel_tag, header, pack_spec, unpack_spec


class Vocabulary:
    """One `Known` for each spec, whoever mentions it first, the user or a peer."""

    def __init__(self, view: int) -> None:
        self.theirs: defaultdict[int, dict[int, Known]] = defaultdict(dict)
        """By peer: what its numbers mean. A number that is missing was never explained."""
        self._view = view
        self._known: dict[Spec, Known] = {}
        self._channels: dict[Channel, int] = {}
        self._numbering = threading.Lock()

    def know(self, spec: Spec) -> Known:
        """What stands for this spec here; any thread."""
        found = self._known.get(spec)
        if found is None:
            with self._numbering:
                channel = self._channels.setdefault(spec.channel, len(self._channels))
                found = self._known.setdefault(spec, Known(spec, len(self._known), channel))
        return found

    def explain(self, known: Known, link: Link) -> None:
        """Tell a peer what our number means, unless it was told."""
        if link.rank not in known.told:
            known.told.add(link.rank)
            payload = pack_spec(known.spec)
            link.say(header(Kind.DEFINE, self._view, spec=known.number, length=len(payload)), payload)

    def learn(self, link: Link, number: int, payload: bytes) -> None:
        """A peer tells what its number means."""
        self.theirs[link.rank][number] = self.know(unpack_spec(payload))

    def tags(self) -> dict[int, bytes]:
        """What stands for each of our channels on every rank."""
        return {number: channel_tag(channel) for channel, number in self._channels.items()}
