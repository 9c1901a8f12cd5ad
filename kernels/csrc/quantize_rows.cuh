// Rows as E4M3, each divided by its own factor: that by which its largest item becomes the largest number of E4M3.
#pragma once
#include "kv_write.cuh"

namespace quantize_rows {
using kv_write::FP8_E4M3, kv_write::Pack, kv_write::to_float, kv_write::to_stored;

constexpr float LARGEST = 448.0f, SMALLEST_FACTOR = 1.17549435e-38f;

template <typename T> struct Rows {
    uint8_t* values;
    float* factors;
    const T* x;
    int64_t x_stride;
    int size;
};

__device__ inline float max_of_block(float value) {
    __shared__ float largest[32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < blockDim.x / 32 ? largest[threadIdx.x % 32] : 0.0f;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}

template <typename T, int N> __device__ inline Pack<T, N> take(const T* x, int i, float& largest) {
    const Pack<T, N> pack = ((const Pack<T, N>*)x)[i];
#pragma unroll
    for (int j = 0; j < N; j++) largest = fmaxf(largest, fabsf(to_float(pack.items[j])));
    return pack;
}

// Divides rather than multiplying by an inverse: same bits as the reference. A denormal factor would be too coarse, or zero.
__device__ inline float factor_of(float largest) { return fmaxf(__fdiv_rn(largest, LARGEST), SMALLEST_FACTOR); }

// One thread block per row. KEPT packs of N items per thread stay in registers; KEPT = 0: rows of any size, read twice.
template <typename T, int N, int KEPT> __global__ void quantize(Rows<T> rows) {
    const int64_t row = blockIdx.x;
    const T* x = rows.x + row * rows.x_stride;
    auto* values = (Pack<uint8_t, N>*)(rows.values + row * rows.size);
    const int packs = rows.size / N;
    float largest = 0.0f, factor;
    if constexpr (KEPT > 0) {
        Pack<T, N> kept[KEPT];
#pragma unroll
        for (int k = 0; k < KEPT; k++)
            if (const int i = threadIdx.x + k * blockDim.x; i < packs) kept[k] = take<T, N>(x, i, largest);
        factor = factor_of(max_of_block(largest));
#pragma unroll
        for (int k = 0; k < KEPT; k++)
            if (const int i = threadIdx.x + k * blockDim.x; i < packs) values[i] = to_stored<T, FP8_E4M3, N>(kept[k], factor);
    } else {
        for (int i = threadIdx.x; i < packs; i += blockDim.x) take<T, N>(x, i, largest);
        factor = factor_of(max_of_block(largest));
        for (int i = threadIdx.x; i < packs; i += blockDim.x)
            values[i] = to_stored<T, FP8_E4M3, N>(((const Pack<T, N>*)x)[i], factor);
    }
    if (threadIdx.x == 0) rows.factors[row] = factor;
}

}  // namespace quantize_rows
