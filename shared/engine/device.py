"""The device an engine computes on: which one a setting means, and how host data gets there."""

from __future__ import annotations

import logging

import torch

from kernels import gpu_attention
from shared.config import Settings
from shared.errors import ConfigurationError
from shared.model_files.model_config import ModelConfig

logger = logging.getLogger(__name__)


def select_device(settings: Settings, config: ModelConfig) -> torch.device:
    """ "auto" is the GPU where there is one that can run the model, the CPU otherwise. Raises ConfigurationError for "cuda" without one."""
    if settings.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if settings.device == "cuda":
            raise ConfigurationError("device 'cuda': torch finds no NVIDIA GPU here; set PAGEWIRE_DEVICE=cpu, or install its CUDA build")
        return torch.device("cpu")
    problem = gpu_attention.unsupported(config.head_dim, settings.block_size)
    if problem is None:
        return torch.device("cuda", torch.cuda.current_device())
    if settings.device == "cuda":
        raise ConfigurationError(f"device 'cuda': {problem}")
    logger.warning("the GPU stays unused: %s", problem)
    return torch.device("cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """What dtype "auto" means there."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` of the host; copied without waiting for the device."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of it on the host, which is there when a Marker made after this has been waited for."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class Marker:
    """What this thread has given the device to do so far."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(blocking=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Until it is done."""
        if self._event is not None:
            self._event.synchronize()
