// Products with weights of fp32, fp16 and bf16: x, products and sums are fp32. Every output is one sum over k in ascending order, whatever
// the number of rows, threads and tiles, so a row's result does not depend on its batch, bit for bit.
//
// Few rows: a panel's weights are widened in registers and used at once. More: the first few use them so, and leave them in a tile that
// stays in the first-level cache for register-blocked products with the others.
#pragma once
#include "cpu_weight_formats.h"

namespace {

struct FloatRows {
    const float* x;
    int64_t stride;

    FloatRows from(int64_t row) const { return {x + row * stride, stride}; }
};

template <class Format, class, int R, int N>
void direct(const FloatRows& rows, const char* const* panels, int64_t num_inputs, float (*sums)[PANEL]) {
    V total[R][N * VECTORS] = {};
    const char* groups[N];
    for (int n = 0; n < N; n++) groups[n] = panels[n];
    for (int64_t k = 0; k < num_inputs; k++)
        for (int n = 0; n < N; n++) {
            for (int i = 0; i < Format::GROUP_BYTES; i += 64) __builtin_prefetch(groups[n] + PREFETCH_BYTES + i);
            for (int v = 0; v < VECTORS; v++) {
                const V w = Format::values(groups[n], v);
                for (int r = 0; r < R; r++) total[r][n * VECTORS + v] += w * rows.x[r * rows.stride + k];
            }
            groups[n] += Format::GROUP_BYTES;
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < N * VECTORS; v++) store<W>(sums[r * N + v / VECTORS] + v % VECTORS * W, total[r][v]);
}

struct FloatTile {
    static constexpr int K = 4096 / PANEL;    // 16 KiB
    static constexpr int FIRST_ROWS = 4;      // use weights while they are widened, which leaves registers for that
    static constexpr size_t SIZE = K * PANEL; // floats
    float* values;

    // For the first rows.
    template <class Format> void expand(const char* group, const FloatRows& rows, int64_t first, int count, float* sums) {
        constexpr int R = FIRST_ROWS;
        V total[R][VECTORS];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) total[r][v] = load<W>(sums + r * PANEL + v * W);
        for (int k = 0; k < count; k++, group += Format::GROUP_BYTES)
            for (int v = 0; v < VECTORS; v++) {
                const V w = Format::values(group, v);
                store<W>(values + k * PANEL + v * W, w);
                for (int r = 0; r < R; r++) total[r][v] += w * rows.x[r * rows.stride + first + k];
            }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) store<W>(sums + r * PANEL + v * W, total[r][v]);
    }
    template <int R> void multiply(const FloatRows& rows, int64_t first, int count, float* sums) const {
        V total[R][VECTORS];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) total[r][v] = load<W>(sums + r * PANEL + v * W);
        for (int k = 0; k < count; k++) {
            V w[VECTORS];
            for (int v = 0; v < VECTORS; v++) w[v] = load<W>(values + k * PANEL + v * W);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < VECTORS; v++) total[r][v] += w[v] * rows.x[r * rows.stride + first + k];
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) store<W>(sums + r * PANEL + v * W, total[r][v]);
    }
};

}  // namespace
