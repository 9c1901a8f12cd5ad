// Launchers of silu_and_mul.cuh.
#include "silu_and_mul.cuh"

using namespace silu_and_mul;

template <typename T, int N> static const char* launch(void* out, const void* x, int64_t x_stride, int num_rows, int size, cudaStream_t stream) {
    const int parts = (size / N + THREADS - 1) / THREADS;
    if (parts > 65535) return "silu_and_mul: rows of this size are not supported";
    return launch_early(gate_rows<T, N>, dim3(num_rows, parts), dim3(THREADS), 0, stream, (T*)out, (const T*)x, x_stride, size);
}

template <typename T> static const char* gate(void* out, const void* x, int64_t x_stride, int num_rows, int size, cudaStream_t stream) {
    constexpr int N = 16 / sizeof(T);
    const bool is_aligned = kv_write::divides(N, size, x_stride) && kv_write::divides(16, out, x);
    return is_aligned ? launch<T, N>(out, x, x_stride, num_rows, size, stream) : launch<T, 1>(out, x, x_stride, num_rows, size, stream);
}

// out: contiguous [num_rows, size]; x: [num_rows, 2 x size]. scalar: 0 half, 1 bfloat16, 2 float.
EXPORT const char* launch_silu_and_mul(void* out, const void* x, int64_t x_stride, int num_rows, int size, int scalar, cudaStream_t stream) {
    if (num_rows == 0 || size == 0) return nullptr;
    auto* run = scalar == 0 ? gate<__half> : scalar == 1 ? gate<__nv_bfloat16> : gate<float>;
    return run(out, x, x_stride, num_rows, size, stream);
}
