// RMS norm and gated activation on the CPU in fp32, rows apart: what a layer does between its products.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "cpu_thread_pool.h"
#include "cpu_vectors.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int W = NATIVE;
constexpr int64_t ROWS_AT_ONCE = 8;
typedef F<W> V;

struct Rows {
    const float *x, *weight;
    float* out;  // contiguous
    int64_t num_rows, size, x_stride;
    float eps;
    std::atomic<int64_t> next{0};
};

template <void (*act)(const Rows&, const float*, float*)> void work(void* data) {
    Rows& rows = *(Rows*)data;
    for (int64_t first; (first = rows.next.fetch_add(ROWS_AT_ONCE, std::memory_order_relaxed)) < rows.num_rows;)
        for (int64_t r = first; r < std::min(rows.num_rows, first + ROWS_AT_ONCE); r++) act(rows, rows.x + r * rows.x_stride, rows.out + r * rows.size);
}

template <void (*act)(const Rows&, const float*, float*)> void run(Rows& rows, RunOnThreads run_on_threads, int num_threads) {
    if (rows.num_rows <= ROWS_AT_ONCE) work<act>(&rows);
    else run_on_threads(work<act>, &rows, num_threads);
}

void normalize(const Rows& rows, const float* x, float* out) {
    V squares[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= rows.size; i += 4 * W)
        for (int j = 0; j < 4; j++) squares[j] += load<W>(x + i + j * W) * load<W>(x + i + j * W);
    float total = sum<W>((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; i < rows.size; i++) total += x[i] * x[i];
    const float factor = 1.0f / std::sqrt(total / (float)rows.size + rows.eps);
    for (int64_t j = 0; j < rows.size; j++) out[j] = x[j] * factor * rows.weight[j];
}

void activate(const Rows& rows, const float* gate, float* out) {
    const float* up = gate + rows.size;
    int64_t i = 0;
    for (; i + W <= rows.size; i += W) {
        V x = load<W>(gate + i), negative = -x;
        negative = negative > 88.0f ? V{} + 88.0f : negative;  // the limit of `exp`; silu is 0 there but for 1e-36
        store<W>(out + i, x / (1.0f + exp<W>(negative)) * load<W>(up + i));
    }
    for (; i < rows.size; i++) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

}  // namespace

// x: [num_rows, size] -> out: x / sqrt(mean(x^2) + eps) * weight.
EXPORT void cpu_rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t num_rows, int64_t size, float* out,
                         RunOnThreads run_on_threads, int num_threads) {
    Rows rows{x, weight, out, num_rows, size, x_stride, eps};
    run<normalize>(rows, run_on_threads, num_threads);
}

// x: [num_rows, 2 x size] = [gate | up] -> out: silu(gate) x up.
EXPORT void cpu_silu_and_mul(const float* x, int64_t x_stride, int64_t num_rows, int64_t size, float* out, RunOnThreads run_on_threads,
                             int num_threads) {
    Rows rows{x, nullptr, out, num_rows, size, x_stride, 0.0f};
    run<activate>(rows, run_on_threads, num_threads);
}
