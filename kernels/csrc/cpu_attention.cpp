// Causal attention over the paged cache on the CPU, straight from the blocks: nothing is gathered.
//
// Two paths. Rows with one query token (decode) are bound by memory: each K and V row is read once for all query heads of its group,
// and a sequence is cut into parts of PART_TOKENS so that one long sequence keeps every core busy. Chunks (prefill) are bound by
// arithmetic: tiles of query rows against tiles of keys, two register-blocked products per tile, online softmax between them.
// A row's result depends neither on the batch it is in nor on the number of threads: parts and tiles are cut at fixed positions.
//
// Vectors are the compiler's own (GCC, Clang): the same source serves AVX-512, AVX2, NEON and plain SSE2.
// Macros: ELEMENT (float, bf16, fp16: type of query, caches and output) and HEAD_DIM_FACTOR (a power of two that divides head_dim);
// one library has one of each, since all of them together take a minute to compile.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu_attention.h"
#include "cpu_vectors.h"

#ifndef ELEMENT
#define ELEMENT float
#endif
#ifndef HEAD_DIM_FACTOR
#define HEAD_DIM_FACTOR 16
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int COLUMNS = 4;  // vectors of a register tile; 32 registers hold 6 x 4 sums and their operands
#else
constexpr int COLUMNS = 2;
#endif
constexpr int ROWS = 6;             // rows of a register tile
constexpr int TILE_KEYS = 64;       // keys between two rescalings
constexpr int BLOCK_ROWS = 4 * ROWS;  // query rows whose scores, sums and queries stay in the first-level cache with a tile of keys
constexpr int PART_TOKENS = 256;    // keys of one decode task
constexpr int TILE_ROWS = 192;      // query rows (tokens x heads of the group) of one prefill task
constexpr int INLINE_ELEMENTS = 1 << 15;  // less K and V than this is not worth waking a thread
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

typedef ELEMENT E;
constexpr int LANES = HEAD_DIM_FACTOR < NATIVE ? HEAD_DIM_FACTOR : NATIVE;  // of vectors along head_dim

}  // namespace

typedef AttentionArguments Arguments;

namespace {

struct Task {
    int64_t seq, kv_head;
    int64_t first, last;  // decode: keys; prefill: query tokens of the sequence
    int64_t slot;         // decode: first partial result of (sequence, head), -1 if the task is alone
    int64_t part, num_parts;
    bool is_decode;
};

struct Plan {
    const Arguments& a;
    std::vector<Task> tasks;
    std::vector<int64_t> group_of_part;  // per partial result: index of its counter
    float* partials;                     // per part: group x (head_dim sums, max, normaliser)
    std::unique_ptr<std::atomic<int>[]> num_done;
    std::atomic<int64_t> next{0};
    int64_t group;
    explicit Plan(const Arguments& arguments) : a(arguments), partials(nullptr), group(arguments.num_heads / arguments.num_kv_heads) {}
};

// The K or V row of each of `count` tokens from `first` on.
inline void find_rows(const Arguments& a, const E* cache, const int32_t* table, int64_t kv_head, int64_t first, int count, const E** rows) {
    int64_t block = first / a.block_size, offset = first % a.block_size;
    for (int t = 0; t < count;) {
        const E* row = cache + (int64_t)table[block] * a.cache_block_stride + kv_head * a.cache_head_stride + offset * a.head_dim;
        for (; offset < a.block_size && t < count; offset++, t++, row += a.head_dim) rows[t] = row;
        block++, offset = 0;
    }
}

inline void prefetch(const void* row, int64_t nbytes) {
    for (int64_t i = 0; i < nbytes; i += 64) __builtin_prefetch((const char*)row + i);
}

// scores[g][t] = query[g] . keys[t] for G rows; T keys at a time so that the sums are independent of each other.
template <int G>
void dot(const float* query, int64_t head_dim, const E* const* keys, const E* const* ahead, int count, float* scores) {
    constexpr int T = 4;
    int t = 0;
    for (; t + T <= count; t += T) {
        for (int i = 0; i < T; i++) prefetch(ahead[t + i], head_dim * (int64_t)sizeof(E));
        F<LANES> sums[G][T] = {};
        for (int64_t j = 0; j < head_dim; j += LANES) {
            F<LANES> key[T];
            for (int i = 0; i < T; i++) key[i] = load<LANES>(keys[t + i] + j);
            for (int g = 0; g < G; g++) {
                F<LANES> q = load<LANES>(query + g * head_dim + j);
                for (int i = 0; i < T; i++) sums[g][i] += q * key[i];
            }
        }
        for (int g = 0; g < G; g++)
            for (int i = 0; i < T; i++) scores[g * TILE_KEYS + t + i] = sum<LANES>(sums[g][i]);
    }
    for (; t < count; t++) {
        prefetch(ahead[t], head_dim * (int64_t)sizeof(E));
        F<LANES> sums[G] = {};
        for (int64_t j = 0; j < head_dim; j += LANES) {
            F<LANES> key = load<LANES>(keys[t] + j);
            for (int g = 0; g < G; g++) sums[g] += load<LANES>(query + g * head_dim + j) * key;
        }
        for (int g = 0; g < G; g++) scores[g * TILE_KEYS + t] = sum<LANES>(sums[g]);
    }
}

// out[r][c] = out[r][c] x factors[r] + sum over k of left[r][k] x right(k)[c], a tile of R rows and N vectors.
template <int W, int R, int N, typename Right>
inline void product(const float* left, int64_t left_stride, Right right, int count, float* out, int64_t out_stride, const float* factors) {
    F<W> sums[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) sums[r][n] = factors ? load<W>(out + r * out_stride + n * W) * factors[r] : F<W>{};
    for (int k = 0; k < count; k++) {
        F<W> row[N];
        for (int n = 0; n < N; n++) row[n] = load<W>(right(k) + n * W);
        for (int r = 0; r < R; r++) {
            float x = left[r * left_stride + k];
            for (int n = 0; n < N; n++) sums[r][n] += row[n] * x;
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) store<W>(out + r * out_stride + n * W, sums[r][n]);
}

template <int W, int R, typename Right>
inline void product_columns(const float* left, int64_t left_stride, Right right, int count, float* out, int64_t out_stride, const float* factors,
                            int64_t num_columns) {
    int64_t c = 0;
    for (; c + COLUMNS * W <= num_columns; c += COLUMNS * W)
        product<W, R, COLUMNS>(left, left_stride, [&](int k) { return right(k) + c; }, count, out + c, out_stride, factors);
    for (; c < num_columns; c += W)
        product<W, R, 1>(left, left_stride, [&](int k) { return right(k) + c; }, count, out + c, out_stride, factors);
}

template <int W, typename Right>
inline void product_rows(const float* left, int64_t left_stride, Right right, int count, float* out, int64_t out_stride, const float* factors,
                         int64_t num_columns, int num_rows) {
    int r = 0;
    auto rows = [&](auto size) {
        constexpr int R = decltype(size)::value;
        for (; r + R <= num_rows; r += R)
            product_columns<W, R>(left + r * left_stride, left_stride, right, count, out + r * out_stride, out_stride,
                                  factors ? factors + r : nullptr, num_columns);
    };
    rows(std::integral_constant<int, ROWS>());
    rows(std::integral_constant<int, 4>());
    rows(std::integral_constant<int, 3>());
    rows(std::integral_constant<int, 2>());
    rows(std::integral_constant<int, 1>());
}

// Soft cap (on the scaled product), then ALiBi; in place over `size` scores of one row, whole vectors.
inline void bend(const Arguments& a, float* scores, int size, int64_t head, int64_t query_position, int64_t first_key) {
    constexpr int W = NATIVE;
    if (a.soft_cap > 0) {
        float inverse = 1.0f / a.soft_cap;
        for (int t = 0; t < size; t += W) {
            F<W> x = load<W>(scores + t) * (2.0f * inverse);
            x = x > 60.0f ? F<W>{} + 60.0f : x;
            x = x < -60.0f ? F<W>{} - 60.0f : x;
            store<W>(scores + t, a.soft_cap - 2.0f * a.soft_cap / (exp<W>(x) + 1.0f));
        }
    }
    if (a.alibi_slopes) {
        float slope = a.alibi_slopes[head];
        for (int t = 0; t < size; t++) scores[t] += slope * (float)(first_key + t - query_position);
    }
}

inline int whole_vectors(int count) { return (count + NATIVE - 1) / NATIVE * NATIVE; }

// Online softmax of one row over keys [begin, end) of the tile: its first `size` scores, whole vectors, become exp(score - max). Returns what
// earlier sums are worth now.
inline float soften(float* scores, int size, int begin, int end, float& max, float& normaliser) {
    constexpr int W = NATIVE;
    for (int t = 0; t < begin; t++) scores[t] = LOWEST;
    for (int t = end; t < size; t++) scores[t] = LOWEST;
    F<W> most = load<W>(scores);
    for (int t = W; t < size; t += W) most = larger<W>(most, load<W>(scores + t));
    float new_max = std::max(max, largest<W>(most));
    // Nothing seen yet, or nothing but NaN, which no maximum shows and which must not come out as zeros.
    if (new_max == LOWEST && std::none_of(scores + begin, scores + end, [](float x) { return x != x; })) {
        memset(scores, 0, size * sizeof(float));
        return 1.0f;
    }
    F<W> total = {};
    for (int t = 0; t < size; t += W) {
        F<W> p = exp<W>(load<W>(scores + t) - new_max);
        store<W>(scores + t, p);
        total += p;
    }
    float factor = max == new_max ? 1.0f : max == LOWEST ? 0.0f : std::exp(max - new_max);
    normaliser = normaliser * factor + sum<W>(total);
    max = new_max;
    return factor;
}

inline void write_row(const float* sums, float normaliser, int64_t head_dim, E* out) {
    float inverse = normaliser > 0 || normaliser != normaliser ? 1.0f / normaliser : 0.0f;
    for (int64_t j = 0; j < head_dim; j++) from_float(sums[j] * inverse, out + j);
}

void decode(Plan& plan, const Task& task) {
    const Arguments& a = plan.a;
    const int64_t group = plan.group, d = a.head_dim, token = a.query_start[task.seq], position = a.seq_lens[task.seq] - 1;
    const int32_t* table = a.blocks + a.first_block[task.seq];
    thread_local std::vector<float> memory;
    float* query = scratch(memory, (size_t)group * (2 * d + TILE_KEYS + 2));
    float *sums = query + group * d, *scores = sums + group * d, *max = scores + group * TILE_KEYS, *normaliser = max + group;
    const E* source = (const E*)a.query + token * a.query_stride + task.kv_head * group * d;
    for (int64_t i = 0; i < group * d; i++) query[i] = to_float(source[i]) * a.scale, sums[i] = 0;
    for (int64_t g = 0; g < group; g++) max[g] = LOWEST, normaliser[g] = 0;

    const E *key_rows[TILE_KEYS], *value_rows[TILE_KEYS];
    for (int64_t first = task.first; first < task.last; first += TILE_KEYS) {
        const int count = (int)std::min<int64_t>(TILE_KEYS, task.last - first);
        find_rows(a, (const E*)a.key_cache, table, task.kv_head, first, count, key_rows);
        find_rows(a, (const E*)a.value_cache, table, task.kv_head, first, count, value_rows);
        for (int64_t g = 0; g < group;) {
            auto rows = [&](auto size) {
                constexpr int G = decltype(size)::value;
                for (; g + G <= group; g += G) dot<G>(query + g * d, d, key_rows, value_rows, count, scores + g * TILE_KEYS);
            };
            rows(std::integral_constant<int, 4>());
            rows(std::integral_constant<int, 3>());
            rows(std::integral_constant<int, 2>());
            rows(std::integral_constant<int, 1>());
        }
        float factors[64];
        for (int64_t g0 = 0; g0 < group; g0 += 64) {
            const int num_rows = (int)std::min<int64_t>(64, group - g0);
            for (int g = 0; g < num_rows; g++) {
                float* row = scores + (g0 + g) * TILE_KEYS;
                if (a.soft_cap > 0 || a.alibi_slopes) {
                    for (int t = count; t < whole_vectors(count); t++) row[t] = 0;
                    bend(a, row, whole_vectors(count), task.kv_head * group + g0 + g, position, first);
                }
                factors[g] = soften(row, whole_vectors(count), 0, count, max[g0 + g], normaliser[g0 + g]);
            }
            product_rows<LANES>(scores + g0 * TILE_KEYS, TILE_KEYS, [&](int t) { return value_rows[t]; }, count, sums + g0 * d, d, factors, d, num_rows);
        }
    }

    E* out = (E*)a.out + token * a.num_heads * d + task.kv_head * group * d;
    if (task.slot < 0) {
        for (int64_t g = 0; g < group; g++) write_row(sums + g * d, normaliser[g], d, out + g * d);
        return;
    }
    const int64_t part_size = group * (d + 2);
    float* mine = plan.partials + (task.slot + task.part) * part_size;
    memcpy(mine, sums, group * d * sizeof(float));
    memcpy(mine + group * d, max, 2 * group * sizeof(float));
    if (plan.num_done[plan.group_of_part[task.slot]].fetch_add(1, std::memory_order_acq_rel) + 1 < task.num_parts) return;
    // The last part to end merges all of them, in their order.
    for (int64_t g = 0; g < group; g++) {
        float top = LOWEST, total = 0;
        auto maxima = [&](int64_t part) { return plan.partials + (task.slot + part) * part_size + group * d; };
        for (int64_t part = 0; part < task.num_parts; part++) top = std::max(top, maxima(part)[g]);
        for (int64_t j = 0; j < d; j++) sums[g * d + j] = 0;
        for (int64_t part = 0; part < task.num_parts; part++) {
            const float weight = maxima(part)[g] == LOWEST ? 0.0f : std::exp(maxima(part)[g] - top);
            const float* theirs = plan.partials + (task.slot + part) * part_size + g * d;
            for (int64_t j = 0; j < d; j++) sums[g * d + j] += weight * theirs[j];
            total += weight * maxima(part)[group + g];
        }
        write_row(sums + g * d, total, d, out + g * d);
    }
}

template <int H, int... I> inline void swap_pair(F<LANES>& upper, F<LANES>& lower, std::integer_sequence<int, I...>) {
    typedef F<LANES> V;
    typedef Vector<LANES>::I Index;
    // Lanes 0 .. LANES - 1 are the upper row's, the others the lower row's.
    constexpr Index first = {(I & H ? LANES + I - H : I)...}, second = {(I & H ? LANES + I : I + H)...};
#ifdef __clang__
    V a = __builtin_shufflevector(upper, lower, (I & H ? LANES + I - H : I)...), b = __builtin_shufflevector(upper, lower, (I & H ? LANES + I : I + H)...);
#else
    V a = __builtin_shuffle(upper, lower, first), b = __builtin_shuffle(upper, lower, second);
#endif
    upper = a, lower = b;
}
template <int H> inline void swap_halves(F<LANES>* square) {
    for (int i = 0; i < LANES; i++)
        if (!(i & H)) swap_pair<H>(square[i], square[i + H], std::make_integer_sequence<int, LANES>());
    if constexpr (H > 1) swap_halves<H / 2>(square);
}

// packed[j][t] = rows[t][j], zeros for t >= count; in squares, so that reads and writes are whole vectors.
inline void transpose(const E* const* rows, int count, int64_t head_dim, float* packed) {
    typedef F<LANES> V;
    for (int t0 = 0; t0 < TILE_KEYS; t0 += LANES)
        for (int64_t j0 = 0; j0 < head_dim; j0 += LANES) {
            V square[LANES];
            for (int i = 0; i < LANES; i++) square[i] = t0 + i < count ? load<LANES>(rows[t0 + i] + j0) : V{};
            // Each round swaps the halves of ever smaller squares; what is left after the last is the transpose.
            swap_halves<LANES / 2>(square);
            for (int i = 0; i < LANES; i++) store<LANES>(packed + (j0 + i) * TILE_KEYS + t0, square[i]);
        }
}

void prefill(Plan& plan, const Task& task) {
    const Arguments& a = plan.a;
    const int64_t group = plan.group, d = a.head_dim, seq_len = a.seq_lens[task.seq], start = a.query_start[task.seq];
    const int64_t context = seq_len - a.query_lens[task.seq];  // position of the chunk's first token
    const int32_t* table = a.blocks + a.first_block[task.seq];
    const int num_tokens = (int)(task.last - task.first), num_rows = (int)(num_tokens * group);
    thread_local std::vector<float> memory;
    float* query = scratch(memory, (size_t)num_rows * (2 * d + TILE_KEYS + 3) + 2 * TILE_KEYS * d);
    float *packed_keys = query + num_rows * d, *packed_values = packed_keys + TILE_KEYS * d, *sums = packed_values + TILE_KEYS * d;
    float *scores = sums + num_rows * d, *max = scores + num_rows * TILE_KEYS, *normaliser = max + num_rows, *factors = normaliser + num_rows;
    // Row = token x group + head, so that the rows a tile hides are consecutive.
    for (int i = 0; i < num_tokens; i++) {
        const E* source = (const E*)a.query + (start + task.first + i) * a.query_stride + task.kv_head * group * d;
        for (int64_t j = 0; j < group * d; j++) query[i * group * d + j] = to_float(source[j]) * a.scale;
    }
    memset(sums, 0, num_rows * d * sizeof(float));
    for (int r = 0; r < num_rows; r++) max[r] = LOWEST, normaliser[r] = 0;

    const int64_t last_key = context + task.last;  // behind what the last query sees
    const int64_t first_key = a.sliding_window ? std::max<int64_t>(0, context + task.first + 1 - a.sliding_window) : 0;
    for (int64_t first = first_key; first < last_key; first += TILE_KEYS) {
        const int count = (int)std::min<int64_t>(TILE_KEYS, last_key - first);
        const E *key_rows[TILE_KEYS], *value_rows[TILE_KEYS];
        find_rows(a, (const E*)a.key_cache, table, task.kv_head, first, count, key_rows);
        find_rows(a, (const E*)a.value_cache, table, task.kv_head, first, count, value_rows);
        transpose(key_rows, count, d, packed_keys);
        for (int t = 0; t < count; t++) prefetch(value_rows[t], d * (int64_t)sizeof(E));
        // Query tokens before this tile's first key see none of it.
        const int skipped = (int)std::max<int64_t>(0, first - context - task.first);
        if constexpr (!std::is_same<E, float>::value) {
            for (int t = 0; t < count; t++)
                for (int64_t j = 0; j < d; j += LANES) store<LANES>(packed_values + t * d + j, load<LANES>(value_rows[t] + j));
        }
        for (int from = (int)(skipped * group); from < num_rows; from += BLOCK_ROWS) {
            const int rows = std::min(BLOCK_ROWS, num_rows - from);
            // What the block's last row sees of the tile: no product is formed with later keys.
            const int seen = (int)std::min<int64_t>(count, context + task.first + (from + rows - 1) / group + 1 - first), size = whole_vectors(seen);
            float* block_scores = scores + (int64_t)from * TILE_KEYS;
            product_rows<NATIVE>(query + from * d, d, [&](int j) { return packed_keys + (int64_t)j * TILE_KEYS; }, (int)d, block_scores, TILE_KEYS,
                                 nullptr, size, rows);
            for (int r = from; r < from + rows; r++) {
                const int64_t position = context + task.first + r / group;
                float* row = scores + (int64_t)r * TILE_KEYS;
                if (a.soft_cap > 0 || a.alibi_slopes) bend(a, row, size, task.kv_head * group + r % group, position, first);
                const int end = (int)std::min<int64_t>(count, position + 1 - first);
                const int begin = a.sliding_window ? (int)std::min<int64_t>(end, std::max<int64_t>(0, position + 1 - a.sliding_window - first)) : 0;
                factors[r] = soften(row, size, begin, end, max[r], normaliser[r]);
            }
            auto add = [&](auto value) {
                product_rows<LANES>(block_scores, TILE_KEYS, value, seen, sums + from * d, d, factors + from, d, rows);
            };
            if constexpr (std::is_same<E, float>::value) add([&](int t) { return value_rows[t]; });
            else add([&](int t) { return packed_values + (int64_t)t * d; });
        }
    }
    for (int i = 0; i < num_tokens; i++)
        for (int64_t g = 0; g < group; g++) {
            const int64_t r = i * group + g;
            E* out = (E*)a.out + (start + task.first + i) * a.num_heads * d + (task.kv_head * group + g) * d;
            write_row(sums + r * d, normaliser[r], d, out);
        }
}

void work(void* data) {
    Plan& plan = *(Plan*)data;
    const int64_t count = (int64_t)plan.tasks.size();
    for (int64_t i; (i = plan.next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        const Task& task = plan.tasks[i];
        if (task.is_decode) decode(plan, task);
        else prefill(plan, task);
    }
}

}  // namespace

EXPORT const char* cpu_paged_attention(const Arguments* arguments) {
    const Arguments& a = *arguments;
    if (a.head_dim < 2 || a.head_dim % LANES) return "cpu_paged_attention: head_dim is not a multiple of HEAD_DIM_FACTOR";
    if (a.num_kv_heads < 1 || a.num_heads % a.num_kv_heads) return "cpu_paged_attention: num_heads must be a multiple of num_kv_heads";
    Plan plan(a);
    int64_t num_parts = 0, num_groups = 0, num_elements = 0;
    const int64_t tile_tokens = std::max<int64_t>(1, TILE_ROWS / plan.group);
    for (int64_t s = 0; s < a.num_seqs; s++) {
        const int64_t num_tokens = a.query_lens[s];
        if (num_tokens < 2) continue;
        for (int64_t last = num_tokens; last > 0; last -= tile_tokens)  // the tiles that see the most keys first
            for (int64_t h = 0; h < a.num_kv_heads; h++) {
                plan.tasks.push_back({s, h, std::max<int64_t>(0, last - tile_tokens), last, -1, 0, 1, false});
                num_elements += a.seq_lens[s] * a.head_dim;
            }
    }
    for (int64_t s = 0; s < a.num_seqs; s++) {
        if (a.query_lens[s] != 1) continue;
        const int64_t seq_len = a.seq_lens[s];
        int64_t first = a.sliding_window ? std::max<int64_t>(0, seq_len - a.sliding_window) : 0;
        const int64_t first_part = first / PART_TOKENS, parts = std::max<int64_t>(1, (seq_len + PART_TOKENS - 1) / PART_TOKENS - first_part);
        for (int64_t h = 0; h < a.num_kv_heads; h++) {
            for (int64_t part = 0; part < parts; part++) {
                const int64_t begin = std::max(first, (first_part + part) * PART_TOKENS);
                const int64_t end = std::min(seq_len, (first_part + part + 1) * PART_TOKENS);
                plan.tasks.push_back({s, h, begin, end, parts > 1 ? num_parts : -1, part, parts, true});
            }
            num_elements += (seq_len - first) * a.head_dim;
            if (parts > 1) {
                plan.group_of_part.resize(num_parts + parts, num_groups++);
                num_parts += parts;
            }
        }
    }
    // seq_len 0 comes out as zeros: a decode task without keys writes them.
    thread_local std::vector<float> partials;
    if (num_parts) {
        plan.partials = scratch(partials, (size_t)num_parts * plan.group * (a.head_dim + 2));
        plan.num_done.reset(new std::atomic<int>[num_groups]());
    }
    if (num_elements < INLINE_ELEMENTS || plan.tasks.size() < 2) work(&plan);
    else a.run_on_threads(work, &plan, (int)a.num_threads);
    return nullptr;
}
