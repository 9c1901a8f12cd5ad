// y = x W^T on the CPU with W as its file stores it: 4 or 8 bits with scales, fp16, bf16 or fp32. Weights become fp32 in registers, with
// exactly the values of the file; x, products and sums are fp32.
//
// Every output is one sum over k in ascending order, whatever the number of rows, threads and tiles, and every weight format goes through
// the same sums: a row's result depends neither on its batch nor on how W is stored, bit for bit.
//
// W lies in panels of PANEL outputs. A panel is a sequence of groups of k; a group holds its scales and minima, then words of 32 bits, one
// for each output, with 8 (4 bits) or 4 (8 bits) consecutive k. Few rows: a panel's weights are expanded in registers and used at once.
// More: the first few use them so, and leave them in a tile that stays in the first-level cache for register-blocked products with the others.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "cpu_linear.h"
#include "cpu_vectors.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int W = NATIVE;
constexpr int VECTORS = 2;           // of a panel
constexpr int PANEL = VECTORS * W;   // outputs
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE_ROWS = 12;        // 24 sums and their operands in 32 registers
#else
constexpr int TILE_ROWS = 6;
#endif
constexpr int DIRECT_ROWS = 6;       // up to here all rows use weights from registers
constexpr int FIRST_ROWS = 4;        // of more: those that do, which leaves registers for what expands them
constexpr int TILE_K = 4096 / PANEL; // 16 KiB of fp32
constexpr int MAX_BLOCK_ROWS = 132;  // rows x TILE_K stay in the second-level cache
constexpr int TASK_PANELS = 8;       // most panels of a task
constexpr int TASK_SHARE = 2;        // a task is at most this part of what is left for each thread, so that all end at about the same time
constexpr int PREFETCH_BYTES = 1024; // ahead: the processor's own prefetching stops at the end of each page
typedef Vector<W>::I I;
typedef Vector<W>::U U;
typedef F<W> V;

// The formats. `each<N>(groups, use)` calls use(n, k, w) with the weights w[VECTORS] of each of N panels for ascending k of one group.
template <int BITS, int GROUP_K, typename Scale, int ZERO> struct Quantized {  // w = d q + m; ZERO >= 0: m = -ZERO d is not stored
    static constexpr int GROUP = GROUP_K, WORDS = GROUP * BITS / 32, HALF = 16 / BITS;
    static constexpr bool HAS_MINIMA = ZERO < 0;
    static constexpr int SCALE_BYTES = PANEL * (int)sizeof(Scale) * (HAS_MINIMA ? 2 : 1), GROUP_BYTES = SCALE_BYTES + WORDS * PANEL * 4;

    template <int N, class Use> static inline void each(const char* const* groups, Use use) {
        V scale[HALF][N * VECTORS], minimum[N * VECTORS];
        for (int v = 0; v < N * VECTORS; v++) {
            const Scale* scales = (const Scale*)groups[v / VECTORS] + v % VECTORS * W;
            scale[0][v] = load<W>(scales);
            if constexpr (HAS_MINIMA) minimum[v] = load<W>(scales + PANEL);
            else minimum[v] = scale[0][v] * (float)-ZERO;
            // A quant is used where it stands in its word: its scale is divided by what that is worth, which is exact.
            for (int j = 1; j < HALF; j++) scale[j][v] = scale[0][v] * (1.0f / (float)(1 << (BITS * j)));
        }
        // Panels take turns by words: registers hold one panel's, and sums of the others go on meanwhile.
        for (int word = 0, k = 0; word < WORDS; word++, k += 2 * HALF)
            for (int n = 0; n < N; n++) {
                U words[VECTORS];
                for (int v = 0; v < VECTORS; v++) memcpy(&words[v], groups[n] + SCALE_BYTES + (word * VECTORS + v) * W * 4, sizeof(U));
                for (int half = 0; half < 2; half++) {
                    for (int j = 0; j < HALF; j++) {
                        V w[VECTORS];
                        for (int v = 0; v < VECTORS; v++) {
                            const V quant = __builtin_convertvector((I)(words[v] & (((1u << BITS) - 1) << (BITS * j))), V);
                            w[v] = quant * scale[j][n * VECTORS + v] + minimum[n * VECTORS + v];
                        }
                        use(n, k + half * HALF + j, w);
                    }
                    for (int v = 0; v < VECTORS; v++) words[v] >>= 16;
                }
            }
    }
};

template <typename E> struct Plain {
    static constexpr int GROUP = 1, GROUP_BYTES = PANEL * (int)sizeof(E);
    template <int N, class Use> static inline void each(const char* const* groups, Use use) {
        for (int n = 0; n < N; n++) {
            V w[VECTORS];
            for (int v = 0; v < VECTORS; v++) w[v] = load<W>((const E*)groups[n] + v * W);
            use(n, 0, w);
        }
    }
};

}  // namespace

typedef LinearArguments Arguments;

namespace {

template <class Format, int R, int N>
void direct(const float* x, int64_t stride, const char* const* panels, int64_t num_inputs, float (*sums)[PANEL]) {
    V total[R][N * VECTORS] = {};
    const char* groups[N];
    for (int n = 0; n < N; n++) groups[n] = panels[n];
    for (int64_t first = 0; first < num_inputs; first += Format::GROUP) {
        for (int n = 0; n < N; n++)
            for (int i = 0; i < Format::GROUP_BYTES; i += 64) __builtin_prefetch(groups[n] + PREFETCH_BYTES + i);
        Format::template each<N>(groups, [&](int n, int k, const V* w) {
            for (int r = 0; r < R; r++)
                for (int v = 0; v < VECTORS; v++) total[r][n * VECTORS + v] += w[v] * x[r * stride + first + k];
        });
        for (int n = 0; n < N; n++) groups[n] += Format::GROUP_BYTES;
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < N * VECTORS; v++) store<W>(sums[r * N + v / VECTORS] + v % VECTORS * W, total[r][v]);
}

template <int R> void multiply(const float* x, int64_t stride, const float* tile, int count, float* sums) {
    V total[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) total[r][v] = load<W>(sums + r * PANEL + v * W);
    for (int k = 0; k < count; k++) {
        V w[VECTORS];
        for (int v = 0; v < VECTORS; v++) w[v] = load<W>(tile + k * PANEL + v * W);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) total[r][v] += w[v] * x[r * stride + k];
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store<W>(sums + r * PANEL + v * W, total[r][v]);
}

template <int R> void multiply_rows(int num_rows, const float* x, int64_t stride, const float* tile, int count, float* sums) {
    if (num_rows == R) multiply<R>(x, stride, tile, count, sums);
    else if constexpr (R > 1) multiply_rows<R - 1>(num_rows, x, stride, tile, count, sums);
}

// What `direct` does for a part of k, for the first of many rows: the expanded weights stay in `tile` for the others.
template <class Format> void expand(const char* group, const float* x, int64_t stride, int count, float* tile, float* sums) {
    constexpr int R = FIRST_ROWS;
    V total[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) total[r][v] = load<W>(sums + r * PANEL + v * W);
    for (int first = 0; first < count; first += Format::GROUP, group += Format::GROUP_BYTES)
        Format::template each<1>(&group, [&](int, int k, const V* w) {
            for (int v = 0; v < VECTORS; v++) store<W>(tile + (first + k) * PANEL + v * W, w[v]);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < VECTORS; v++) total[r][v] += w[v] * x[r * stride + first + k];
        });
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store<W>(sums + r * PANEL + v * W, total[r][v]);
}

struct Plan {
    const Arguments& a;
    int64_t num_panels, num_blocks;
    std::atomic<int64_t> next{0};  // panel, counted over all blocks

    // Whole pairs of panels, since a single row takes two at once. Returns how many from `first` on; 0: nothing is left.
    int64_t take(int64_t& first) {
        int64_t count;
        first = next.load(std::memory_order_relaxed);
        do {
            const int64_t left = num_panels * num_blocks - first;
            if (left <= 0) return 0;
            count = std::max<int64_t>(1, std::min<int64_t>(TASK_PANELS, left / (TASK_SHARE * a.num_threads)) / 2) * 2;
            count = std::min(count, num_panels - first % num_panels);
        } while (!next.compare_exchange_weak(first, first + count, std::memory_order_relaxed));
        return count;
    }
};

inline void finish(const Arguments& a, int64_t row, int64_t panel, const float* sums) {
    const int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, a.weight->num_outputs - first);
    float* out = a.out + row * a.out_stride + first;
    const float* bias = a.bias ? a.bias + first : nullptr;
    if (count < PANEL) {
        for (int64_t i = 0; i < count; i++) {
            const float result = bias ? sums[i] + bias[i] : sums[i];
            out[i] = a.is_added ? out[i] + result : result;
        }
        return;
    }
    for (int i = 0; i < PANEL; i += W) {
        const V result = bias ? load<W>(sums + i) + load<W>(bias + i) : load<W>(sums + i);
        store<W>(out + i, a.is_added ? load<W>(out + i) + result : result);
    }
}

template <class Format, int R, int N> int64_t direct_panels(const Plan& plan, int64_t panel, int64_t end) {
    const int64_t num_inputs = plan.a.weight->num_inputs, panel_bytes = num_inputs / Format::GROUP * Format::GROUP_BYTES;
    for (; panel + N <= end; panel += N) {
        float sums[R * N][PANEL];
        const char* panels[N];
        for (int n = 0; n < N; n++) panels[n] = plan.a.weight->panels + (panel + n) * panel_bytes;
        direct<Format, R, N>(plan.a.x, plan.a.x_stride, panels, num_inputs, sums);
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) finish(plan.a, r, panel + n, sums[r * N + n]);
    }
    return panel;
}

template <class Format> void tiled(const Plan& plan, int64_t block, int64_t panel, int64_t end) {
    const Arguments& a = plan.a;
    const int64_t num_inputs = a.weight->num_inputs, panel_bytes = num_inputs / Format::GROUP * Format::GROUP_BYTES;
    // Blocks and tiles of about the same size; a block has more than FIRST_ROWS.
    const int64_t first_row = a.num_rows * block / plan.num_blocks;
    const int num_rows = (int)(a.num_rows * (block + 1) / plan.num_blocks - first_row);
    thread_local std::vector<float> memory;
    float* tile = scratch(memory, (size_t)TILE_K * PANEL + (size_t)(end - panel) * num_rows * PANEL);
    float* sums = tile + TILE_K * PANEL;  // [panels, rows, PANEL]
    memset(sums, 0, (size_t)(end - panel) * num_rows * PANEL * sizeof(float));
    const int tiled_rows = num_rows - FIRST_ROWS, num_tiles = (tiled_rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t first = 0; first < num_inputs; first += TILE_K) {
        const int count = (int)std::min<int64_t>(TILE_K, num_inputs - first);
        for (int64_t p = panel; p < end; p++) {
            const char* group = a.weight->panels + p * panel_bytes + first / Format::GROUP * Format::GROUP_BYTES;
            float* of_panel = sums + (p - panel) * num_rows * PANEL;
            const float* x = a.x + first_row * a.x_stride + first;
            expand<Format>(group, x, a.x_stride, count, tile, of_panel);
            for (int t = 0; t < num_tiles; t++) {
                const int from = FIRST_ROWS + tiled_rows * t / num_tiles, to = FIRST_ROWS + tiled_rows * (t + 1) / num_tiles;
                multiply_rows<TILE_ROWS>(to - from, x + from * a.x_stride, a.x_stride, tile, count, of_panel + from * PANEL);
            }
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int64_t p = panel; p < end; p++) finish(a, first_row + r, p, sums + ((p - panel) * num_rows + r) * PANEL);
}

template <class Format> void work(void* data) {
    Plan& plan = *(Plan*)data;
    for (int64_t first, count; (count = plan.take(first));) {
        int64_t panel = first % plan.num_panels;
        const int64_t end = panel + count;
        switch (plan.a.num_rows) {
            case 1:  // two panels at once: else each sum would wait for the one before it
                panel = direct_panels<Format, 1, 2>(plan, panel, end);
                direct_panels<Format, 1, 1>(plan, panel, end);
                break;
            case 2: direct_panels<Format, 2, 1>(plan, panel, end); break;
            case 3: direct_panels<Format, 3, 1>(plan, panel, end); break;
            case 4: direct_panels<Format, 4, 1>(plan, panel, end); break;
            case 5: direct_panels<Format, 5, 1>(plan, panel, end); break;
            case DIRECT_ROWS: direct_panels<Format, DIRECT_ROWS, 1>(plan, panel, end); break;
            default: tiled<Format>(plan, first / plan.num_panels, panel, end);
        }
    }
}

// ---- how a file stores weights (GGML's blocks), and how that becomes a panel -------------------------------------------------
template <typename E> struct PlainBlock : Plain<E> {
    static constexpr int K = 1;
    E value;
    void pack(char* group, int column) const { memcpy(group + column * sizeof(E), &value, sizeof value); }
    static float unpack(const char* group, int column, int) { return to_float(((const E*)group)[column]); }
};

template <int BITS, int GROUP_K, typename Scale, int ZERO> struct QuantizedBlock : Quantized<BITS, GROUP_K, Scale, ZERO> {
    typedef Quantized<BITS, GROUP_K, Scale, ZERO> Format;
    static void put(char* group, int column, Scale scale, Scale minimum, const uint8_t* quants) {
        memcpy(group + column * sizeof(Scale), &scale, sizeof scale);
        if (Format::HAS_MINIMA) memcpy(group + (PANEL + column) * sizeof(Scale), &minimum, sizeof minimum);
        for (int word = 0; word < Format::WORDS; word++) {
            uint32_t bits = 0;
            for (int j = 0; j < 32 / BITS; j++) bits |= (uint32_t)quants[word * (32 / BITS) + j] << (BITS * j);
            memcpy(group + Format::SCALE_BYTES + (word * PANEL + column) * 4, &bits, sizeof bits);
        }
    }
    static float unpack(const char* group, int column, int k) {
        const Scale* scales = (const Scale*)group;
        const float scale = to_float(scales[column]);
        uint32_t bits;
        memcpy(&bits, group + Format::SCALE_BYTES + (k * BITS / 32 * PANEL + column) * 4, sizeof bits);
        const float quant = (float)(bits >> (k * BITS % 32) & ((1u << BITS) - 1));
        return scale * quant + (Format::HAS_MINIMA ? to_float(scales[PANEL + column]) : scale * (float)-ZERO);
    }
};

inline void split_nibbles(const uint8_t* packed, int count, uint8_t* quants) {
    for (int i = 0; i < count; i++) quants[i] = packed[i] & 15, quants[count + i] = packed[i] >> 4;
}

struct Q4_0 : QuantizedBlock<4, 32, fp16, 8> {  // w = d (q - 8)
    static constexpr int K = 32;
    fp16 d;
    uint8_t packed[16];
    void pack(char* group, int column) const {
        uint8_t quants[K];
        split_nibbles(packed, 16, quants);
        put(group, column, d, d, quants);
    }
};

struct Q4_1 : QuantizedBlock<4, 32, fp16, -1> {  // w = d q + m
    static constexpr int K = 32;
    fp16 d, m;
    uint8_t packed[16];
    void pack(char* group, int column) const {
        uint8_t quants[K];
        split_nibbles(packed, 16, quants);
        put(group, column, d, m, quants);
    }
};

struct Q8_0 : QuantizedBlock<8, 32, fp16, 128> {  // w = d q
    static constexpr int K = 32;
    fp16 d;
    int8_t q[32];
    void pack(char* group, int column) const {
        uint8_t quants[K];
        for (int i = 0; i < K; i++) quants[i] = (uint8_t)(q[i] + 128);
        put(group, column, d, d, quants);
    }
};

struct Q4_K : QuantizedBlock<4, 32, float, -1> {  // w = (d s) q - (dmin m), s and m of 6 bits for each of 8 groups
    static constexpr int K = 256;
    fp16 d, dmin;
    uint8_t scales[12], packed[128];
    void pack(char* group, int column) const {
        for (int g = 0; g < 8; g++, group += GROUP_BYTES) {
            const uint8_t high = g < 4 ? 0 : scales[4 + g];
            const int s = g < 4 ? scales[g] & 63 : (high & 15) | (scales[g - 4] >> 6 << 4);
            const int m = g < 4 ? scales[4 + g] & 63 : (high >> 4) | (scales[g] >> 6 << 4);
            uint8_t quants[64];
            split_nibbles(packed + g / 2 * 32, 32, quants);
            put(group, column, to_float(d) * (float)s, -(to_float(dmin) * (float)m), quants + g % 2 * 32);
        }
    }
};

struct Q6_K : QuantizedBlock<8, 16, float, 32> {  // w = (d s) (q - 32), s of 8 bits for each of 16 groups
    static constexpr int K = 256;
    uint8_t low[128], high[64];
    int8_t scales[16];
    fp16 d;
    void pack(char* group, int column) const {
        uint8_t quants[K];
        for (int i = 0; i < K; i++) {
            const int part = i / 128, quarter = i % 128 / 32, j = i % 32;
            const uint8_t nibbles = low[part * 64 + quarter % 2 * 32 + j];
            quants[i] = (quarter < 2 ? nibbles & 15 : nibbles >> 4) | ((high[part * 32 + j] >> (2 * quarter)) & 3) << 4;
        }
        for (int g = 0; g < 16; g++, group += GROUP_BYTES) put(group, column, to_float(d) * (float)scales[g], 0.0f, quants + g * 16);
    }
};

template <class Do> bool with_format(int64_t format, Do act) {
    switch (format) {
        case 0: act(PlainBlock<float>()); return true;
        case 1: act(PlainBlock<fp16>()); return true;
        case 2: act(PlainBlock<bf16>()); return true;
        case 3: act(Q4_0()); return true;
        case 4: act(Q4_1()); return true;
        case 5: act(Q8_0()); return true;
        case 6: act(Q4_K()); return true;
        case 7: act(Q6_K()); return true;
        default: return false;
    }
}

}  // namespace

// Bytes of a weight's panels; -1: no such format, or num_inputs is not whole blocks of it.
EXPORT int64_t cpu_linear_nbytes(const Weight* weight) {
    int64_t nbytes = -1;
    with_format(weight->format, [&](auto block) {
        typedef decltype(block) Block;
        const int64_t num_panels = (weight->num_outputs + PANEL - 1) / PANEL;
        if (weight->num_inputs % Block::K == 0) nbytes = num_panels * (weight->num_inputs / Block::GROUP) * Block::GROUP_BYTES;
    });
    return nbytes;
}

namespace {

struct Packing {
    const Weight& weight;
    const char* rows;
    const int64_t* order;
    int64_t first, num_rows;
    std::atomic<int64_t> next{0};
};

template <class Block> void pack(void* data) {
    Packing& p = *(Packing*)data;
    const int64_t num_groups = p.weight.num_inputs / Block::GROUP, num_blocks = p.weight.num_inputs / Block::K;
    for (int64_t begin; (begin = p.next.fetch_add(PANEL, std::memory_order_relaxed)) < p.num_rows;)
        for (int64_t i = begin; i < std::min(p.num_rows, begin + PANEL); i++) {
            const char* source = p.rows + (p.order ? p.order[i] : i) * num_blocks * (int64_t)sizeof(Block);
            char* group = p.weight.panels + (p.first + i) / PANEL * num_groups * Block::GROUP_BYTES;
            for (int64_t b = 0; b < num_blocks; b++, source += sizeof(Block), group += Block::K / Block::GROUP * Block::GROUP_BYTES) {
                Block block;
                memcpy((void*)&block, source, sizeof block);
                block.pack(group, (int)((p.first + i) % PANEL));
            }
        }
}

}  // namespace

// Rows of a file's blocks into `weight`, from output `first` on: row i is row order[i] of `rows`, or i.
EXPORT void cpu_linear_pack(const Weight* weight, int64_t first, const char* rows, const int64_t* order, int64_t num_rows,
                            RunOnThreads run_on_threads, int num_threads) {
    Packing packing{*weight, rows, order, first, num_rows};
    with_format(weight->format, [&](auto block) { run_on_threads(pack<decltype(block)>, &packing, num_threads); });
}

// out[i] = row rows[i] of the weight, [num_rows, num_inputs].
EXPORT void cpu_linear_rows(const Weight* weight, const int64_t* rows, int64_t num_rows, float* out) {
    with_format(weight->format, [&](auto block) {
        typedef decltype(block) Block;
        for (int64_t i = 0; i < num_rows; i++) {
            const char* group = weight->panels + rows[i] / PANEL * (weight->num_inputs / Block::GROUP) * Block::GROUP_BYTES;
            for (int64_t first = 0; first < weight->num_inputs; first += Block::GROUP, group += Block::GROUP_BYTES)
                for (int k = 0; k < Block::GROUP; k++) *out++ = Block::unpack(group, (int)(rows[i] % PANEL), k);
        }
    });
}

EXPORT const char* cpu_linear(const Arguments* arguments) {
    const Arguments& a = *arguments;
    if (!a.num_rows) return nullptr;
    Plan plan{a, (a.weight->num_outputs + PANEL - 1) / PANEL, (a.num_rows + MAX_BLOCK_ROWS - 1) / MAX_BLOCK_ROWS};
    bool is_known = with_format(a.weight->format, [&](auto block) { a.run_on_threads(work<decltype(block)>, &plan, (int)a.num_threads); });
    return is_known ? nullptr : "cpu_linear: unknown weight format";
}
