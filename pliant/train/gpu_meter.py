"""How much memory of the worker's GPU torch holds, and how busy the GPU is, by NVIDIA's management library (NVML)."""

from __future__ import annotations

import ctypes
import logging
import math

import torch

log = logging.getLogger(__name__)

PERIOD_S = 1.0
"""NVML measures over up to a second, and torch's figures cost a tenth of a millisecond: they are not read more often."""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuMeter:
    """Reads the GPU that this process computes on. Without one it reads zeros, and loads nothing."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._handle = ctypes.c_void_p()
        self._device = -1
        """The device that the handle is of."""
        self._found, self._read_s = (0.0, 0.0), -math.inf

    def read(self, now_s: float) -> tuple[float, float]:
        """Return the bytes that torch holds on the GPU, and the share of the last second in which the GPU computed."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return 0.0, 0.0
        if now_s - self._read_s >= PERIOD_S:
            device = torch.cuda.current_device()
            self._read_s = now_s
            self._found = float(torch.cuda.memory_reserved(device)), self._read_use(device)
        return self._found

    def _read_use(self, device: int) -> float:
        if device != self._device:
            self._device, self._library = device, self._open(device)
        if self._library is None:
            return 0.0
        found = _Utilization()
        failed = self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(found))
        return 0.0 if failed else found.gpu / 100

    def _open(self, device: int) -> ctypes.CDLL | None:
        """Return the library, with a handle of the device, or None if there is none: the driver brings it along."""
        # by UUID: CUDA_VISIBLE_DEVICES may have given the device another number
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            log.info("the use of the GPU is not measured: %s", error)
            return None
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._handle))
        if failed:
            log.info("the use of the GPU is not measured: NVML returns error %d", failed)
            return None
        return library
