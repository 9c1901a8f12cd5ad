"""The reference ops mean the same on a GPU: what CUDA kernels will be compared with there."""

from __future__ import annotations

import pytest
import torch

from kernels import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_paged_attention_over_a_shuffled_cache_equals_the_cpu(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(3)
    seq_lens, query_start_loc = [1, 17, 513, 0, 33], [0, 1, 2, 9, 9, 42]
    counts = [-(-n // 16) for n in seq_lens]
    order = torch.randperm(sum(counts), generator=generator).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    keys, values = (torch.randn(sum(counts), 3, 16, 64, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(42, 9, 64, generator=generator).to(dtype)
    on_cpu = reference.paged_attention(query.float(), keys.float(), values.float(), tables, query_start_loc, seq_lens, 0.125)
    on_gpu = reference.paged_attention(query.cuda(), keys.cuda(), values.cuda(), tables, query_start_loc, seq_lens, 0.125)
    torch.testing.assert_close(on_gpu.cpu().float(), on_cpu, atol=tolerance, rtol=tolerance)


def test_reshape_and_cache_writes_the_mapped_slots() -> None:
    caches = [torch.zeros(4, 2, 16, 8, device="cuda") for _ in range(2)]
    rows = torch.randn(5, 2, 8, device="cuda")
    reference.reshape_and_cache(rows, rows * 2, *caches, torch.tensor([0, -1, 17, 63, 5], device="cuda"))
    assert torch.equal(caches[0][1, :, 1], rows[2])
    assert torch.equal(caches[1][3, :, 15], rows[3] * 2)
    assert int((caches[0] != 0).any(-1).any(1).sum()) == 4


def test_norm_rotary_and_activation_equal_the_cpu() -> None:
    x = torch.randn(7, 4, 16)
    angles = torch.rand(7, 8)
    for on_cpu, on_gpu in (
        (reference.rms_norm(x, torch.ones(16), 1e-5), reference.rms_norm(x.cuda(), torch.ones(16).cuda(), 1e-5)),
        (
            reference.rotary_embedding(x, angles.cos(), angles.sin()),
            reference.rotary_embedding(x.cuda(), angles.cos().cuda(), angles.sin().cuda()),
        ),
        (reference.silu_and_mul(x), reference.silu_and_mul(x.cuda())),
    ):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, atol=1e-5, rtol=1e-5)
