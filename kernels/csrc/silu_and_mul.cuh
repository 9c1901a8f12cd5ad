// silu(gate) * up for rows [gate | up], fp32 inside (Shazeer 2020).
#pragma once
#include "dependent_launch.cuh"
#include "kv_write.cuh"

namespace silu_and_mul {
using kv_write::Pack, kv_write::from_float, kv_write::to_float;

constexpr int THREADS = 256;

// Grid: rows x parts of a row; one pack of N items per thread.
template <typename T, int N> __global__ void __launch_bounds__(THREADS) gate_rows(T* out, const T* x, int64_t x_stride, int size) {
    allow_dependent_launch();
    wait_for_previous_kernel();
    const int64_t row = blockIdx.x;
    const int i = (blockIdx.y * THREADS + threadIdx.x) * N;
    if (i >= size) return;
    const Pack<T, N> gate = *(const Pack<T, N>*)(x + row * x_stride + i), up = *(const Pack<T, N>*)(x + row * x_stride + size + i);
    Pack<T, N> result;
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float g = to_float(gate.items[j]);
        const float e = sizeof(T) == 4 ? expf(-g) : __expf(-g);
        result.items[j] = from_float<T>(g / (1.0f + e) * to_float(up.items[j]));
    }
    *(Pack<T, N>*)(out + row * size + i) = result;
}

}  // namespace silu_and_mul
