"""Linear layers of few rows beside cuBLAS: each shape alone, then a decode step's layers with what stands around the products.

    python bench/kernels/skinny_linear.py [--rows 1,8,32]

bf16, CUDA graphs over the weights of all layers, so that L2 serves none of them; median. A layer alone: microseconds, and the share of the
bandwidth at which this GPU reads a buffer (kernels/csrc/read_floor.cu). A step: milliseconds for the products alone, and with norms,
activation and residual additions as separate kernels or inside.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F

from kernels.build import Library, launch, load
from kernels.rms_norm import rms_norm
from kernels.silu_and_mul import silu_and_mul
from kernels.skinny_linear import skinny_linear, skinny_linear_add

LAYERS = {
    "8B": (32, {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}, (128256, 4096)),
    "SmolLM2": (30, {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}, (49152, 576)),
}
Step = Callable[[], object]


def milliseconds(step: Step) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(18):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def read_bytes_per_s() -> float:
    data, out = torch.zeros(1 << 29, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    library = load(Library("read_floor.cu"))
    library.read_once.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    library.read_once.restype = ctypes.c_char_p
    blocks = 8 * torch.cuda.get_device_properties(0).multi_processor_count
    best = min(
        milliseconds(lambda: launch(library.read_once, data.device, data.data_ptr(), data.nbytes, out.data_ptr(), blocks)) for _ in range(3)
    )
    return data.nbytes / best * 1e3


class Model:
    """Weights of all layers of a shape, and a step through them."""

    def __init__(self, name: str) -> None:
        self.num_layers, shapes, head = LAYERS[name]
        self.shapes = {**shapes, "head": head}
        self.weights = {
            part: [
                torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
                for _ in range(self.num_layers if part != "head" else 1)
            ]
            for part, shape in self.shapes.items()
        }
        self.norm = torch.ones(head[1], dtype=torch.bfloat16, device="cuda")
        self.num_bytes = sum(weight.nbytes for weights in self.weights.values() for weight in weights)

    def inputs(self, num_rows: int) -> dict[int, torch.Tensor]:
        return {
            size: torch.randn(num_rows, size, dtype=torch.bfloat16, device="cuda") for size in {shape[1] for shape in self.shapes.values()}
        }

    def products(self, num_rows: int, overlap: bool | None) -> Step:
        """`overlap` None: by cuBLAS."""
        inputs = self.inputs(num_rows)
        layers = zip(*(weights for part, weights in self.weights.items() if part != "head"), strict=True)
        in_order = [weight for layer in layers for weight in layer] + self.weights["head"]

        def step() -> None:
            for weight in in_order:
                x = inputs[weight.shape[1]]
                F.linear(x, weight) if overlap is None else skinny_linear(x, weight, overlap=overlap)

        return step

    def step(self, num_rows: int, overlap: bool | None) -> Step:
        """Everything of a decode step but attention: the first columns of qkv stand for what that gives. `overlap` None: norm, activation
        and addition are kernels of their own, the products cuBLAS's."""
        start, eps = self.inputs(num_rows)[self.norm.numel()], 1e-5
        head = self.weights["head"][0]
        layers = list(zip(*(self.weights[part] for part in ("qkv", "o", "gate_up", "down")), strict=True))

        def separate() -> None:
            x = start.clone()
            for qkv, o, gate_up, down in layers:
                x += F.linear(F.linear(rms_norm(x, self.norm, eps), qkv)[:, : x.shape[1]], o)
                x += F.linear(silu_and_mul(F.linear(rms_norm(x, self.norm, eps), gate_up)), down)
            F.linear(rms_norm(x, self.norm, eps), head)

        def fused(overlap: bool) -> None:
            x = start.clone()
            for qkv, o, gate_up, down in layers:
                attended = skinny_linear(x, qkv, norm_weight=self.norm, eps=eps, overlap=overlap)[:, : x.shape[1]]
                skinny_linear_add(x, attended, o, overlap=overlap)
                hidden = skinny_linear(x, gate_up, norm_weight=self.norm, eps=eps, silu=True, overlap=overlap)
                skinny_linear_add(x, hidden, down, overlap=overlap)
            skinny_linear(x, head, norm_weight=self.norm, eps=eps, overlap=overlap)

        return separate if overlap is None else functools.partial(fused, overlap)


def shape_times(part: str, weights: list[torch.Tensor], num_rows: int) -> list[float]:
    """Microseconds of a product: cuBLAS, ours, ours overlapped; then with what belongs to it: separate kernels, one, one overlapped."""
    num_outputs, num_inputs = weights[0].shape
    x = torch.randn(num_rows, num_inputs, dtype=torch.bfloat16, device="cuda")
    norm, residual = torch.ones_like(x[0]), torch.zeros(num_rows, num_outputs, dtype=x.dtype, device="cuda")
    is_gated, is_added = part == "gate_up", part in ("o", "down")

    def separate(weight: torch.Tensor) -> None:
        y = F.linear(x if is_added else rms_norm(x, norm, 1e-5), weight)
        if is_gated:
            silu_and_mul(y)
        elif is_added:
            residual.add_(y)

    def fused(weight: torch.Tensor, overlap: bool = False) -> None:
        if is_added:
            skinny_linear_add(residual, x, weight, overlap=overlap)
        else:
            skinny_linear(x, weight, norm_weight=norm, eps=1e-5, silu=is_gated, overlap=overlap)

    runs: list[Callable[[torch.Tensor], object]] = [
        lambda weight: F.linear(x, weight),
        lambda weight: skinny_linear(x, weight),
        lambda weight: skinny_linear(x, weight, overlap=True),
        separate,
        fused,
        functools.partial(fused, overlap=True),
    ]
    return [milliseconds(lambda run=run: [run(weight) for weight in weights]) * 1e3 / len(weights) for run in runs]


def each_shape(model: Model, rows: list[int], bytes_per_s: float) -> None:
    for part, (num_outputs, num_inputs) in model.shapes.items():
        floor = num_outputs * num_inputs * 2 / bytes_per_s * 1e6
        for num_rows in rows:
            times = shape_times(part, model.weights[part] * (4 if part == "head" else 1), num_rows)
            cells = " | ".join(f"{time:.1f} ({floor / time:.0%})" for time in times)
            print(f"| {part} {num_outputs} x {num_inputs}, {num_rows} | {floor:.1f} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,4,8,16,32,64")
    parser.add_argument("--models", default=",".join(LAYERS))
    parser.add_argument("--parts", default="steps,shapes")
    options = parser.parse_args()
    rows = [int(count) for count in options.rows.split(",")]
    bytes_per_s = read_bytes_per_s()
    print(f"{torch.cuda.get_device_name()}, reads {bytes_per_s / 1e12:.2f} TB/s")
    for name in options.models.split(","):
        model = Model(name)
        print(f"\n{name}: {model.num_bytes / 1e9:.2f} GB, read in {model.num_bytes / bytes_per_s * 1e3:.3f} ms")
        if "steps" in options.parts:
            print(
                "| step ms, rows | cuBLAS products | ours | ours, overlapped | separate kernels | fused | fused, overlapped |\n|"
                + " --- |" * 7
            )
            for num_rows in rows:
                cells = [
                    f"{milliseconds(make(num_rows, overlap)):.3f}"
                    for make in (model.products, model.step)
                    for overlap in (None, False, True)
                ]
                print(f"| {num_rows} | {' | '.join(cells)} |", flush=True)
        if "shapes" in options.parts:
            print("\n| us, rows | floor | cuBLAS | ours | overlapped | separate kernels | fused | fused, overlapped |\n|" + " --- |" * 8)
            each_shape(model, rows, bytes_per_s)


if __name__ == "__main__":
    main()
