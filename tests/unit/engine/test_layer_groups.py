"""A group of layers is reported once its KV stands in the cache, and stays as it was reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_engine_core import engine_for
from tiny_models import with_changes, write_tiny_hf

from shared.engine.layer_groups import LayerGroups, num_groups
from shared.model_files.model_source import resolve_model
from shared.request import Request

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("num_layers", "count", "expected"),
    [(6, 3, [(0, 2), (2, 2), (4, 2)]), (7, 3, [(0, 3), (3, 3), (6, 1)]), (2, 1, [(0, 2)]), (5, 4, [(0, 2), (2, 2), (4, 1)])],
)
def test_groups_cover_every_layer_once_and_in_order(num_layers: int, count: int, expected: list[tuple[int, int]]) -> None:
    seen: list[tuple[int, int]] = []
    groups = LayerGroups(num_layers, count, CPU, lambda start, size: seen.append((start, size)))
    for index in range(num_layers):
        groups.after_layer(index)
    groups.wait()
    assert seen == expected


def test_the_default_is_one_group_on_a_cpu_and_never_more_than_layers() -> None:
    assert num_groups(None, 32, CPU) == 1
    assert num_groups(None, 32, torch.device("cuda")) > 1
    assert num_groups(50, 8, CPU) == 8


def test_what_a_group_reports_is_final_while_later_layers_are_still_to_come(tmp_path: Path) -> None:
    write_tiny_hf(tmp_path, with_changes(num_layers=4))
    engine = engine_for(resolve_model(str(tmp_path)), kv_layer_groups=2, max_num_batched_tokens=6)
    request = Request("r", [(7 * i) % 200 for i in range(21)], arrival_s=0.0, deadline_at_s=1e9)
    engine.scheduler.add(request)
    reported: list[tuple[int, int, int]] = []
    while (output := engine.schedule()) is not None:
        blocks = engine.manager.block_ids("r")
        row = output.scheduled[0]
        touched = blocks[row.start // 4 : -(-row.end // 4)]
        untouched_later = engine.cache.tensor[touched, 2:].clone()
        seen: list[tuple[int, int, torch.Tensor]] = []

        def listen(
            start: int, count: int, touched: list[int] = touched, seen: list[tuple[int, int, torch.Tensor]] = seen,
            later: torch.Tensor = untouched_later,
        ) -> None:  # fmt: skip
            seen.append((start, count, engine.cache.tensor[touched, start : start + count].clone()))
            if start == 0:
                assert torch.equal(engine.cache.tensor[touched, 2:], later), "the second group was computed before the first left"

        engine.run(output, listen)
        for start, count, bytes_then in seen:
            assert torch.equal(engine.cache.tensor[touched, start : start + count], bytes_then)
            reported.append((row.start, start, count))
        if row.completes:
            engine.scheduler.remove("r")
    assert reported == [(start, layer, 2) for start in range(0, 20, 4) for layer in (0, 2)]
