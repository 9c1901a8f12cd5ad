"""Which worker computes on which GPU: one each where there are enough, else in turn, prefill and decode apart where that can be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shared.nvidia_driver import gpu_index


@dataclass(frozen=True)
class WorkerGroup:
    """The workers of one role."""

    count: int
    device: str
    """The setting: "cpu", "auto", "cuda", or with the number of a GPU, which all of them get."""
    num_ranks: int = 1
    """GPUs that each worker takes, one after the other."""


@dataclass(frozen=True)
class Place:
    device: str
    """The setting of that worker, its first GPU named."""
    num_gpu_workers: int
    """Workers on its GPU, itself included."""


def place_workers(prefill: WorkerGroup, decode: WorkerGroup, num_gpus: int) -> tuple[list[Place], list[Place]]:
    """The place of each prefill and each decode worker. Whoever needs more GPUs than there are is left to say so itself."""
    groups = (prefill, decode)
    slots = _free_slots(groups, num_gpus)
    counts = [group.count if _is_placed_here(group) else 0 for group in groups]
    split = _num_prefill_slots(counts[0], counts[1], len(slots))
    shares = (slots[:split], slots[split:] or slots)
    devices = [
        [
            f"{group.device}:{share[index % len(share)]}" if share and _is_placed_here(group) else group.device
            for index in range(group.count)
        ]
        for group, share in zip(groups, shares, strict=True)
    ]
    num_workers = Counter(gpu for group, taken in zip(groups, devices, strict=True) for device in taken for gpu in _gpus(device, group))
    first, second = (
        [Place(device, max((num_workers[gpu] for gpu in _gpus(device, group)), default=1)) for device in taken]
        for group, taken in zip(groups, devices, strict=True)
    )
    return first, second


def _is_placed_here(group: WorkerGroup) -> bool:
    return group.device in ("auto", "cuda")


def _free_slots(groups: tuple[WorkerGroup, WorkerGroup], num_gpus: int) -> list[int]:
    """The first GPU of each place for a worker; those that a setting gives to one role only where there are no others."""
    num_ranks = max(group.num_ranks for group in groups)
    slots = range(0, num_gpus - num_ranks + 1, num_ranks)
    named = {gpu for group in groups if group.count for gpu in _gpus(group.device, group)}
    return [slot for slot in slots if named.isdisjoint(range(slot, slot + num_ranks))] or list(slots)


def _num_prefill_slots(num_prefill: int, num_decode: int, num_slots: int) -> int:
    """The fewest at which the fullest slot has as few workers as can be; decode, which keeps KV the longest, gets what is over."""
    if not num_prefill or not num_decode or num_slots < 2:
        return num_slots if num_prefill else 0

    def fullest(count: int) -> int:
        return max(-(-num_prefill // count), -(-num_decode // (num_slots - count)))

    return min(range(1, num_slots), key=lambda count: (fullest(count), count))


def _gpus(device: str, group: WorkerGroup) -> range:
    first = gpu_index(device)
    return range(0) if first is None else range(first, first + group.num_ranks)
