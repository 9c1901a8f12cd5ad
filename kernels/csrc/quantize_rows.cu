// Launchers of quantize_rows.cuh.
#include "quantize_rows.cuh"

using namespace quantize_rows;

template <typename T, int N, int KEPT> static const char* launch(const Rows<T>& rows, int num_rows, int threads, cudaStream_t stream) {
    quantize<T, N, KEPT><<<num_rows, threads, 0, stream>>>(rows);
    return last_error();
}

template <typename T>
static const char* run(void* values, void* factors, const void* x, int64_t x_stride, int num_rows, int size, cudaStream_t stream) {
    constexpr int N = 16 / sizeof(T);
    const Rows<T> rows{(uint8_t*)values, (float*)factors, (const T*)x, x_stride, size};
    const bool is_aligned = kv_write::divides(N, size, x_stride, values) && kv_write::divides(16, x);
    if (!is_aligned) return launch<T, 1, 0>(rows, num_rows, 256, stream);
    const int packs = size / N;
    auto threads = [&](int kept) { return ((packs + kept - 1) / kept + 31) / 32 * 32; };
    if (threads(1) <= 256) return launch<T, N, 1>(rows, num_rows, threads(1), stream);
    if (threads(2) <= 512) return launch<T, N, 2>(rows, num_rows, threads(2), stream);
    if (threads(4) <= 512) return launch<T, N, 4>(rows, num_rows, threads(4), stream);
    return launch<T, N, 0>(rows, num_rows, 1024, stream);
}

// scalar: 0 half, 1 bfloat16, 2 float. values: [num_rows, size] contiguous; factors: [num_rows].
EXPORT const char* launch_quantize_rows(void* values, void* factors, const void* x, int64_t x_stride, int num_rows, int size, int scalar,
                                        cudaStream_t stream) {
    if (num_rows == 0 || size == 0) return nullptr;
    auto* launcher = scalar == 0 ? run<__half> : scalar == 1 ? run<__nv_bfloat16> : run<float>;
    return launcher(values, factors, x, x_stride, num_rows, size, stream);
}
