// y = x W^T on the CPU with W as its file stores it: quantized (cpu_quantized_products.h) or fp16, bf16, fp32 (cpu_float_products.h). A row's
// result depends neither on its batch nor on threads.
#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu_float_products.h"
#include "cpu_quantized_products.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

typedef LinearArguments Arguments;

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE_ROWS = 12;  // 24 sums and their operands in 32 registers
#else
constexpr int TILE_ROWS = 6;
#endif
constexpr int DIRECT_ROWS = 6;       // up to here weights are used from registers
constexpr int MAX_BLOCK_ROWS = 132;  // their part of x that goes with a tile stays in the second-level cache
constexpr int TASK_PANELS = 8;       // most panels of a task
constexpr int TASK_SHARE = 2;        // a task is at most this part of what is left for each thread, so that all end at about the same time

template <class Rows> struct Plan {
    const Arguments& a;
    Rows rows;
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

struct Preparing {
    const Arguments& a;
    const void* rows;
    std::atomic<int64_t> next{0};
};

// A format with an arithmetic.
template <class TheFormat, class TheArithmetic, bool = TheFormat::IS_QUANTIZED> struct Product {
    typedef TheFormat Format;
    typedef TheArithmetic Arithmetic;
    typedef PreparedRows<Arithmetic> Rows;
    typedef QuantizedTile<Arithmetic, Format::GROUP, Format::HAS_MINIMA> Tile;

    static void prepare_rows(void* data) {
        Preparing& p = *(Preparing*)data;
        for (int64_t row; (row = p.next.fetch_add(1, std::memory_order_relaxed)) < p.a.num_rows;) {
            const Rows rows = ((const Rows*)p.rows)->from(row);
            const float* x = p.a.x + row * p.a.x_stride;
            for (int64_t g = 0; g < rows.num_groups; g++)
                Arithmetic::template prepare<Format>(x + g * Format::GROUP, rows.entries + g * Arithmetic::entries_of(Format::GROUP), rows.scales + g,
                                                     rows.sums + g);
        }
    }
    static Rows prepare(const Arguments& a) {
        const int64_t num_entries = Arithmetic::entries_of((int)a.weight->num_inputs), num_groups = a.weight->num_inputs / Format::GROUP;
        thread_local std::vector<float> memory;
        float* entries = scratch(memory, (size_t)(a.num_rows * (num_entries + 2 * num_groups)));
        float* scales = entries + a.num_rows * num_entries;
        const Rows rows{(typename Arithmetic::Entry*)entries, scales, scales + a.num_rows * num_groups, num_entries, num_groups};
        Preparing preparing{a, &rows};
        if (a.num_rows <= DIRECT_ROWS) prepare_rows(&preparing);
        else a.run_on_threads(prepare_rows, &preparing, (int)a.num_threads);
        return rows;
    }
};

template <class TheFormat, class TheArithmetic> struct Product<TheFormat, TheArithmetic, false> {
    typedef TheFormat Format;
    typedef TheArithmetic Arithmetic;
    typedef FloatRows Rows;
    typedef FloatTile Tile;
    static Rows prepare(const Arguments& a) { return {a.x, a.x_stride}; }
};

template <class P, int R, int N> int64_t direct_panels(const Plan<typename P::Rows>& plan, int64_t panel, int64_t end) {
    typedef typename P::Format Format;
    const int64_t num_inputs = plan.a.weight->num_inputs, panel_bytes = num_inputs / Format::GROUP * Format::GROUP_BYTES;
    for (; panel + N <= end; panel += N) {
        float sums[R * N][PANEL];
        const char* panels[N];
        for (int n = 0; n < N; n++) panels[n] = plan.a.weight->panels + (panel + n) * panel_bytes;
        direct<Format, typename P::Arithmetic, R, N>(plan.rows, panels, num_inputs, sums);
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) finish(plan.a, r, panel + n, sums[r * N + n]);
    }
    return panel;
}

template <int R, class Tile, class Rows>
void multiply_rows(int num_rows, const Tile& tile, const Rows& rows, int64_t first, int count, float* sums) {
    if (num_rows == R) tile.template multiply<R>(rows, first, count, sums);
    else if constexpr (R > 1) multiply_rows<R - 1>(num_rows, tile, rows, first, count, sums);
}

template <class P> void tiled(const Plan<typename P::Rows>& plan, int64_t block, int64_t panel, int64_t end) {
    typedef typename P::Format Format;
    typedef typename P::Tile Tile;
    const Arguments& a = plan.a;
    const int64_t num_inputs = a.weight->num_inputs, panel_bytes = num_inputs / Format::GROUP * Format::GROUP_BYTES;
    // Blocks and tiles of about the same size; a block has more than FIRST_ROWS.
    const int64_t first_row = a.num_rows * block / plan.num_blocks;
    const int num_rows = (int)(a.num_rows * (block + 1) / plan.num_blocks - first_row);
    const auto rows = plan.rows.from(first_row);
    thread_local std::vector<float> memory;
    Tile tile{scratch(memory, Tile::SIZE + (size_t)(end - panel) * num_rows * PANEL)};
    float* sums = tile.values + Tile::SIZE;  // [panels, rows, PANEL]
    memset(sums, 0, (size_t)(end - panel) * num_rows * PANEL * sizeof(float));
    const int tiled_rows = num_rows - Tile::FIRST_ROWS, num_tiles = (tiled_rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t first = 0; first < num_inputs; first += Tile::K) {
        const int count = (int)std::min<int64_t>(Tile::K, num_inputs - first);
        for (int64_t p = panel; p < end; p++) {
            float* of_panel = sums + (p - panel) * num_rows * PANEL;
            tile.template expand<Format>(a.weight->panels + p * panel_bytes + first / Format::GROUP * Format::GROUP_BYTES, rows, first, count, of_panel);
            for (int t = 0; t < num_tiles; t++) {
                const int from = Tile::FIRST_ROWS + tiled_rows * t / num_tiles, to = Tile::FIRST_ROWS + tiled_rows * (t + 1) / num_tiles;
                multiply_rows<TILE_ROWS>(to - from, tile, rows.from(from), first, count, of_panel + from * PANEL);
            }
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int64_t p = panel; p < end; p++) finish(a, first_row + r, p, sums + ((p - panel) * num_rows + r) * PANEL);
}

template <class P> void work(void* data) {
    auto& plan = *(Plan<typename P::Rows>*)data;
    for (int64_t first, count; (count = plan.take(first));) {
        int64_t panel = first % plan.num_panels;
        const int64_t end = panel + count;
        switch (plan.a.num_rows) {
            case 1:  // two panels at once: else each sum would wait for the one before it
                panel = direct_panels<P, 1, 2>(plan, panel, end);
                direct_panels<P, 1, 1>(plan, panel, end);
                break;
            case 2: direct_panels<P, 2, 1>(plan, panel, end); break;
            case 3: direct_panels<P, 3, 1>(plan, panel, end); break;
            case 4: direct_panels<P, 4, 1>(plan, panel, end); break;
            case 5: direct_panels<P, 5, 1>(plan, panel, end); break;
            case DIRECT_ROWS: direct_panels<P, DIRECT_ROWS, 1>(plan, panel, end); break;
            default: tiled<P>(plan, first / plan.num_panels, panel, end);
        }
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

namespace {

template <class P> void multiply(const Arguments& a) {
    const int64_t num_panels = (a.weight->num_outputs + PANEL - 1) / PANEL, num_blocks = (a.num_rows + MAX_BLOCK_ROWS - 1) / MAX_BLOCK_ROWS;
    Plan<typename P::Rows> plan{a, P::prepare(a), num_panels, num_blocks};
    a.run_on_threads(work<P>, &plan, (int)a.num_threads);
}

}  // namespace

EXPORT const char* cpu_linear(const Arguments* arguments) {
    const Arguments& a = *arguments;
    if (!a.num_rows) return nullptr;
    const bool is_known = with_format(a.weight->format, [&](auto block) {
        typedef decltype(block) Format;
        if constexpr (Format::IS_QUANTIZED)
            if (a.weight->is_int16) return multiply<Product<Format, Int16>>(a);
        multiply<Product<Format, Fp32>>(a);
    });
    return is_known ? nullptr : "cpu_linear: unknown weight format";
}
