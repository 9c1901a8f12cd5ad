"""The sending half of a GPU-to-GPU transfer in a process of its own: says where its KV is, line by line, and does as it is told.

In: "read BLOCK", "locate BLOCK", "release", "exit". Out: a line of JSON each.
"""

from __future__ import annotations

import json
import sys

import torch

from shared.engine.device_blocks import DeviceBlocks
from shared.engine.peer_device_memory import offer_of
from shared.transport.protocol.region import Region

SHAPE = (16, 8, 2, 8, 16, 128)
CHUNK = 4 << 20


def cache_of(device: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(11)
    return torch.randn(SHAPE, generator=generator).to(torch.bfloat16).to(f"cuda:{device}")


def main() -> None:
    cache = cache_of(int(sys.argv[1]))
    blocks = DeviceBlocks(cache, staging_nbytes=4 * CHUNK, max_chunk_nbytes=CHUNK, is_debug=True)
    assert blocks.segment is not None
    answer({"segment": blocks.segment.model_dump(), "device_memory": offer_of(cache).model_dump()})
    held = []
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "exit":
            return
        if command == "release":
            held.clear()
            answer({})
            continue
        regions = [Region(int(arguments[0]), 0, 8, 0, 8, 0, 16)]
        if command == "read":
            held.append(blocks.read(regions))
            answer({"offset": held[-1].segment_offset, "nbytes": held[-1].view.nbytes, "checksum": held[-1].checksum})
        else:
            located = blocks.locate(regions)
            answer({"offsets": located.offsets, "checksum": located.checksum})


def answer(value: dict[str, object]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
