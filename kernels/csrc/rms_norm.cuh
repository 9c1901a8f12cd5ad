// x / sqrt(mean(x^2) + eps) * weight per row, fp32 inside, rounded once at the end (Zhang & Sennrich 2019).
#pragma once
#include "dependent_launch.cuh"
#include "kv_write.cuh"

namespace rms_norm {
using kv_write::Pack, kv_write::from_float, kv_write::to_float;

template <typename T> struct Rows {
    T* out;
    const T* x;
    T* residual;  // null, or x is added to it first and what is normalised is the sum, rounded as it is stored
    const T* weight;
    int64_t out_stride, x_stride, residual_stride;
    int size;
    float eps;
};

__device__ inline float sum_of_block(float value) {
    __shared__ float sums[32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.0f;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

template <typename T, int N>
__device__ inline Pack<T, N> take(const Rows<T>& rows, const T* x, T* residual, int i, float& squares) {
    Pack<T, N> pack = ((const Pack<T, N>*)x)[i];
    if (residual != nullptr) {
        const Pack<T, N> before = ((const Pack<T, N>*)residual)[i];
#pragma unroll
        for (int j = 0; j < N; j++) pack.items[j] = from_float<T>(to_float(pack.items[j]) + to_float(before.items[j]));
        ((Pack<T, N>*)residual)[i] = pack;
    }
#pragma unroll
    for (int j = 0; j < N; j++) squares += to_float(pack.items[j]) * to_float(pack.items[j]);
    return pack;
}

template <typename T, int N> __device__ inline void give(const Rows<T>& rows, T* out, int i, Pack<T, N> pack, float factor) {
    const Pack<T, N> weight = ((const Pack<T, N>*)rows.weight)[i];
#pragma unroll
    for (int j = 0; j < N; j++) pack.items[j] = from_float<T>(to_float(pack.items[j]) * factor * to_float(weight.items[j]));
    ((Pack<T, N>*)out)[i] = pack;
}

// One thread block per row. KEPT packs of N items per thread stay in registers; KEPT = 0: rows of any size, read twice.
template <typename T, int N, int KEPT> __global__ void norm_rows(Rows<T> rows) {
    allow_dependent_launch();
    wait_for_previous_kernel();
    const int64_t row = blockIdx.x;
    const T* x = rows.x + row * rows.x_stride;
    T* residual = rows.residual ? rows.residual + row * rows.residual_stride : nullptr;
    T* out = rows.out + row * rows.out_stride;
    const int packs = rows.size / N;
    float squares = 0.0f;
    if constexpr (KEPT > 0) {
        Pack<T, N> kept[KEPT];
#pragma unroll
        for (int k = 0; k < KEPT; k++)
            if (const int i = threadIdx.x + k * blockDim.x; i < packs) kept[k] = take<T, N>(rows, x, residual, i, squares);
        const float factor = rsqrtf(sum_of_block(squares) / rows.size + rows.eps);
#pragma unroll
        for (int k = 0; k < KEPT; k++)
            if (const int i = threadIdx.x + k * blockDim.x; i < packs) give<T, N>(rows, out, i, kept[k], factor);
    } else {
        for (int i = threadIdx.x; i < packs; i += blockDim.x) take<T, N>(rows, x, residual, i, squares);
        const float factor = rsqrtf(sum_of_block(squares) / rows.size + rows.eps);
        const T* sum = residual ? residual : x;
        for (int i = threadIdx.x; i < packs; i += blockDim.x) give<T, N>(rows, out, i, ((const Pack<T, N>*)sum)[i], factor);
    }
}

}  // namespace rms_norm
