"""A receiver of frames for tests: it records what a link delivers."""

from __future__ import annotations

from pliant.comm.connection import PeerLink
from pliant.comm.frames import Frame


class FrameRecorder:
    """Records (kind, number, payload) of every frame."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, int, bytes]] = []
        self.place = bytearray()

    def on_frame(self, link: PeerLink, frame: Frame, payload: bytes) -> None:
        self.frames.append((frame[0], frame[5], payload))

    def place_for(self, link: PeerLink, frame: Frame) -> memoryview:
        self.place = bytearray(frame[8])
        return memoryview(self.place)

    def on_bulk(self, link: PeerLink, frame: Frame) -> None:
        self.frames.append((frame[0], frame[5], bytes(self.place)))
