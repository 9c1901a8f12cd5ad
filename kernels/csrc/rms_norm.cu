// Launchers of rms_norm.cuh.
#include "rms_norm.cuh"

using namespace rms_norm;

template <typename T, int N, int KEPT> static const char* launch(const Rows<T>& rows, int num_rows, int threads, cudaStream_t stream) {
    return launch_early(norm_rows<T, N, KEPT>, dim3(num_rows), dim3(threads), 0, stream, rows);
}

template <typename T> static const char* launch_kept(const Rows<T>& rows, int num_rows, cudaStream_t stream) {
    constexpr int N = 16 / sizeof(T);
    const bool is_aligned = kv_write::divides(N, rows.size, rows.out_stride, rows.x_stride, rows.residual_stride) &&
                            kv_write::divides(16, rows.out, rows.x, rows.residual,
                                                   rows.weight);
    if (!is_aligned) return launch<T, 1, 0>(rows, num_rows, 256, stream);
    const int packs = rows.size / N;
    auto threads = [&](int kept) { return ((packs + kept - 1) / kept + 31) / 32 * 32; };
    if (threads(1) <= 256) return launch<T, N, 1>(rows, num_rows, threads(1), stream);
    if (threads(2) <= 512) return launch<T, N, 2>(rows, num_rows, threads(2), stream);
    if (threads(4) <= 512) return launch<T, N, 4>(rows, num_rows, threads(4), stream);
    return launch<T, N, 0>(rows, num_rows, 1024, stream);
}

template <typename T>
static const char* norm(void* out, const void* x, void* residual, const void* weight, int64_t out_stride, int64_t x_stride,
                        int64_t residual_stride, int num_rows, int size, float eps, cudaStream_t stream) {
    return launch_kept<T>(Rows<T>{(T*)out, (const T*)x, (T*)residual, (const T*)weight, out_stride, x_stride, residual_stride, size, eps}, num_rows, stream);
}

// scalar: 0 half, 1 bfloat16, 2 float. residual may be null; out may be x.
EXPORT const char* launch_rms_norm(void* out, const void* x, void* residual, const void* weight, int64_t out_stride, int64_t x_stride,
                                   int64_t residual_stride, int num_rows, int size, float eps, int scalar, cudaStream_t stream) {
    if (num_rows == 0) return nullptr;
    auto* run = scalar == 0 ? norm<__half> : scalar == 1 ? norm<__nv_bfloat16> : norm<float>;
    return run(out, x, residual, weight, out_stride, x_stride, residual_stride, num_rows, size, eps, stream);
}
