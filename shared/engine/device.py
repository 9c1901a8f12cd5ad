"""The device an engine computes on: which one a setting means, and how host data gets there."""

from __future__ import annotations

import logging

import torch

from kernels import gpu_attention
from shared.config import Settings
from shared.errors import ConfigurationError
from shared.model_files.model_config import ModelConfig
from shared.nvidia_driver import gpu_index

logger = logging.getLogger(__name__)


def select_device(settings: Settings, config: ModelConfig) -> torch.device:
    """ "auto" is the GPU where there is one that can run the model, the CPU otherwise. A GPU becomes this thread's current one. Raises
    ConfigurationError for "cuda" without one, and for a GPU that is not there."""
    kind, index = settings.device.partition(":")[0], gpu_index(settings.device)
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if kind == "cuda":
            raise ConfigurationError(
                f"device {settings.device!r}: torch finds no NVIDIA GPU here; set PAGEWIRE_DEVICE=cpu, or install its CUDA build"
            )
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if index is not None and index >= num_gpus:
        raise ConfigurationError(f"device {settings.device!r}: there are {num_gpus} GPUs here, numbered from 0")
    problem = gpu_attention.unsupported(config.head_dim, settings.block_size)
    if problem is None:
        device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        # Streams, events and pinned memory that name no device are those of the current one.
        torch.cuda.set_device(device)
        return device
    if kind == "cuda":
        raise ConfigurationError(f"device {settings.device!r}: {problem}")
    logger.warning("the GPU stays unused: %s", problem)
    return torch.device("cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """What dtype "auto" means there."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def select_kv_dtype(settings: Settings, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of the KV cache of an engine that computes in `dtype`. Raises ConfigurationError."""
    if settings.kv_cache_dtype == "auto":
        return dtype
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        raise ConfigurationError(
            f"kv_cache_dtype = {settings.kv_cache_dtype!r} needs an NVIDIA GPU and dtype bfloat16 or float16, and this engine computes in "
            f"{str(dtype).removeprefix('torch.')} on the {device.type}; leave it out"
        )
    return torch.float8_e4m3fn


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
