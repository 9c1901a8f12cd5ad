"""Which worker gets which GPU."""

from __future__ import annotations

import pytest

from services.local import stack
from services.local.placement import WorkerGroup, place_workers
from services.local.stack import Stack, StackPlan
from shared.config import load_settings


def placed(
    num_prefill: int, num_decode: int, num_gpus: int, devices: tuple[str, str] = ("cuda", "cuda"), ranks: int = 1
) -> tuple[list[str], list[str]]:
    prefill, decode = place_workers(WorkerGroup(num_prefill, devices[0], ranks), WorkerGroup(num_decode, devices[1], ranks), num_gpus)
    return [place.device for place in prefill], [place.device for place in decode]


def shared(num_prefill: int, num_decode: int, num_gpus: int, devices: tuple[str, str] = ("cuda", "cuda")) -> list[list[int]]:
    found = place_workers(WorkerGroup(num_prefill, devices[0]), WorkerGroup(num_decode, devices[1]), num_gpus)
    return [[place.num_gpu_workers for place in places] for places in found]


def on(*gpus: int) -> list[str]:
    return [f"cuda:{gpu}" for gpu in gpus]


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "num_gpus", "prefill", "decode"),
    [
        (1, 1, 2, on(0), on(1)),
        (1, 1, 8, on(0), on(1)),
        (2, 2, 4, on(0, 1), on(2, 3)),
        (1, 3, 4, on(0), on(1, 2, 3)),
        (0, 2, 2, [], on(0, 1)),
        (0, 3, 2, [], on(0, 1, 0)),
    ],
)
def test_each_worker_has_a_gpu_of_its_own_where_there_are_enough(
    num_prefill: int, num_decode: int, num_gpus: int, prefill: list[str], decode: list[str]
) -> None:
    assert placed(num_prefill, num_decode, num_gpus) == (prefill, decode)


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "num_gpus", "prefill", "decode"),
    [
        (1, 1, 1, on(0), on(0)),
        (1, 2, 2, on(0), on(1, 1)),
        (2, 1, 2, on(0, 0), on(1)),
        (2, 2, 2, on(0, 0), on(1, 1)),
        (2, 2, 3, on(0, 0), on(1, 2)),
        (3, 1, 3, on(0, 1, 0), on(2)),
        (1, 5, 4, on(0), on(1, 2, 3, 1, 2)),
    ],
)
def test_with_fewer_gpus_prefill_and_decode_are_kept_apart_and_share_among_themselves(
    num_prefill: int, num_decode: int, num_gpus: int, prefill: list[str], decode: list[str]
) -> None:
    assert placed(num_prefill, num_decode, num_gpus) == (prefill, decode)


@pytest.mark.parametrize("num_prefill", range(6))
@pytest.mark.parametrize("num_decode", range(1, 6))
@pytest.mark.parametrize("num_gpus", range(1, 9))
def test_no_gpu_has_two_workers_more_than_needed_and_each_knows_how_many_share(num_prefill: int, num_decode: int, num_gpus: int) -> None:
    places = [
        place for group in place_workers(WorkerGroup(num_prefill, "auto"), WorkerGroup(num_decode, "auto"), num_gpus) for place in group
    ]
    devices = [place.device for place in places]
    assert all(place.num_gpu_workers == devices.count(place.device) for place in places)
    assert all(0 <= int(device.removeprefix("auto:")) < num_gpus for device in devices)
    if num_gpus >= num_prefill + num_decode:
        assert len(set(devices)) == len(devices)


def test_workers_of_one_gpu_are_counted_together() -> None:
    assert shared(1, 1, 1) == [[2], [2]]
    assert shared(1, 2, 2) == [[1], [2, 2]]
    assert shared(0, 3, 2) == [[], [2, 1, 2]]


def test_ranks_take_gpus_one_after_the_other() -> None:
    assert placed(1, 1, 4, ranks=2) == (on(0), on(2))
    assert placed(0, 2, 8, ranks=4) == ([], on(0, 4))
    assert placed(1, 2, 5, ranks=2) == (on(0), on(2, 2))


def test_too_few_gpus_for_the_ranks_are_left_to_the_worker_to_name() -> None:
    assert placed(0, 1, 1, ranks=2) == ([], ["cuda"])


def test_without_a_gpu_every_setting_stays_as_it_is() -> None:
    assert placed(1, 1, 0, ("auto", "cpu")) == (["auto"], ["cpu"])


def test_a_named_gpu_is_that_of_its_role_and_left_alone_by_the_other() -> None:
    assert placed(1, 2, 3, ("cuda:0", "auto")) == (on(0), ["auto:1", "auto:2"])
    assert placed(2, 1, 2, ("cuda:1", "auto")) == (on(1, 1), ["auto:0"])
    assert placed(1, 1, 1, ("cuda:0", "auto")) == (on(0), ["auto:0"])
    assert shared(2, 1, 2, ("cuda:1", "cuda:1")) == [[3, 3], [3]]


def test_a_role_on_the_cpu_takes_no_gpu() -> None:
    assert placed(2, 2, 2, ("cpu", "cuda")) == (["cpu", "cpu"], on(0, 1))
    assert shared(2, 1, 1, ("cpu", "cuda")) == [[1, 1], [1]]


class _Started:
    """A child that is only noted."""

    def __init__(self, name: str, _command: list[str], environ: dict[str, str], reports_status: bool = True) -> None:
        self.name, self.environ, self.reports_status = name, environ, reports_status

    def start(self) -> None:
        pass


def started(monkeypatch: pytest.MonkeyPatch, num_gpus: int, num_decode: int, **settings: str) -> dict[str, dict[str, str]]:
    monkeypatch.setattr(stack, "Child", _Started)
    monkeypatch.setattr(stack, "count_gpus", lambda: num_gpus)
    monkeypatch.setattr(stack, "may_use_gpu", lambda device: device != "cpu")
    launcher = Stack(StackPlan(load_settings("router", **settings), 1, num_decode, "redis://127.0.0.1:1", is_json=True))
    launcher._start("redis://127.0.0.1:1")
    return {child.name: child.environ for child in launcher._services if isinstance(child, _Started)}


def test_the_launcher_tells_each_worker_its_gpu_and_hides_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    environs = started(monkeypatch, 2, 2, device="cuda", gpu_memory_utilization="0.8")
    found = {
        name: load_settings("prefill" if "prefill" in name else "decode", environ) for name, environ in environs.items() if name != "router"
    }
    assert {name: (settings.device, settings.num_gpu_workers) for name, settings in found.items()} == {
        "prefill-0": ("cuda:0", 1), "decode-0": ("cuda:1", 2), "decode-1": ("cuda:1", 2),
    }  # fmt: skip
    assert {settings.gpu_memory_utilization for settings in found.values()} == {0.8}
    assert all("CUDA_VISIBLE_DEVICES" not in environ for environ in environs.values())


def test_a_device_of_one_role_holds_for_that_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_PREFILL_DEVICE", "cuda:1")
    environs = started(monkeypatch, 2, 1)
    assert load_settings("prefill", environs["prefill-0"]).device == "cuda:1"
    assert load_settings("decode", environs["decode-0"]).device == "auto:0"
