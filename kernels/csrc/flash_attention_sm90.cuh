// Chunked-prefill attention over the paged cache on Hopper, after FlashAttention-3 (Shah et al. 2024): one warpgroup's warp brings
// K and V blocks in by tensor copies through the block table, two consumer warpgroups of 64 query rows each run both products as
// wgmma, with the scores of the next tile and the values of this one in flight while the softmax of the next is computed.
//
// The rows of a tile are (token, query head of the group): a KV head's K and V are loaded once for its whole group.
#pragma once
#include "wgmma.cuh"

namespace flash_attention {

constexpr int TILE_ROWS = 128;  // of (token, head): 64 per consumer warpgroup
constexpr int TILE_KEYS = 128;
constexpr int NUM_STAGES = 2;
constexpr int NUM_THREADS = 384;
constexpr float LOG2E = 1.4426950408889634f;

struct Params {
    void* out;          // [num_tokens, num_heads, HEAD_DIM]
    const void* query;  // [num_tokens, num_heads, HEAD_DIM]
    const int* block_tables;     // [num_seqs, block_table_stride]
    const int* query_start_loc;  // [num_seqs + 1]
    const int* seq_lens;         // [num_seqs]
    float scale;
    int num_seqs, num_kv_heads, group_size, block_size, num_blocks, max_context, max_tiles;
    int64_t query_stride, query_head_stride, out_stride, block_table_stride;
};

template <typename T>
__device__ __forceinline__ uint32_t pack(float a, float b);
template <>
__device__ __forceinline__ uint32_t pack<__half>(float a, float b) {
    __half2 h = __floats2half2_rn(a, b);
    return reinterpret_cast<uint32_t&>(h);
}
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float a, float b) {
    __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<uint32_t&>(h);
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <int HEAD_DIM>
struct Shared {
    static constexpr int HALVES = HEAD_DIM / 64;                 // columns of 64 items = 128 bytes
    static constexpr int HALF_BYTES = 128 * 128;                 // 128 rows
    static constexpr int TILE_BYTES = HALVES * HALF_BYTES;
    alignas(1024) char query[TILE_BYTES];
    alignas(1024) char keys[NUM_STAGES][TILE_BYTES];
    alignas(1024) char values[NUM_STAGES][TILE_BYTES];
    uint64_t full_keys[NUM_STAGES], full_values[NUM_STAGES], empty_keys[NUM_STAGES], empty_values[NUM_STAGES];
};

enum NamedBarrier { BARRIER_GROUP = 1 /* and 2 */, BARRIER_TAIL = 3, BARRIER_TURN = 4 /* and 5 */ };

template <typename T, int HEAD_DIM>
struct Consumer {
    using Tiles = Shared<HEAD_DIM>;
    static constexpr int OUT_REGS = HEAD_DIM / 2;
    float scores[64];
    float out[OUT_REGS];
    uint32_t probs[32];
    float row_max[2], row_sum[2];
    int position[2];  // of this thread's rows: they see keys 0 .. position
    int group, thread, lane, warp;
    uint64_t query_descriptor;

    // The warpgroups take turns at issuing products: while one computes its softmax, the other's products run.
    __device__ __forceinline__ void take_turn() const { named_barrier_sync(BARRIER_TURN + group, 256); }
    __device__ __forceinline__ void pass_turn() const { named_barrier_arrive(BARRIER_TURN + (group ^ 1), 256); }

    __device__ __forceinline__ void issue_scores(const Tiles& tiles, int stage) {
        const uint64_t keys = matrix_descriptor(tiles.keys[0]) + stage * (Tiles::TILE_BYTES >> 4);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; ++k) {
            const int step = ((k / 4) * Tiles::HALF_BYTES + (k % 4) * 32) >> 4;  // descriptors count in 16 bytes
            Wgmma<T>::scores(scores, query_descriptor + step, keys + step, k > 0);
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void issue_values(const Tiles& tiles, int stage) {
        const uint64_t values = matrix_descriptor(tiles.values[0], Tiles::HALF_BYTES) + stage * (Tiles::TILE_BYTES >> 4);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILE_KEYS / 16; ++k) Wgmma<T>::values(out, probs + 4 * k, values + k * (16 * 128 >> 4));
        wgmma_commit();
    }

    // Masks what a row must not see, raises the maxima and turns scores into probabilities; returns the factors for `out`.
    template <bool MASK>
    __device__ __forceinline__ float2 softmax(int first_key, float scale_log2) {
        if constexpr (MASK) {
#pragma unroll
            for (int i = 0; i < 64; ++i) {
                const int key = first_key + (i / 4) * 8 + (lane % 4) * 2 + (i % 2);
                if (key > position[(i / 2) % 2]) scores[i] = -INFINITY;
            }
        }
        float factor[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float largest = row_max[row];
#pragma unroll
            for (int i = 0; i < 64; i += 4) largest = fmaxf(largest, fmaxf(scores[i + 2 * row], scores[i + 2 * row + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
            const float base = largest == -INFINITY ? 0.f : largest * scale_log2;
            factor[row] = exp2_fast(row_max[row] * scale_log2 - base);
            row_max[row] = largest;
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < 64; i += 4) {
                scores[i + 2 * row] = exp2_fast(fmaf(scores[i + 2 * row], scale_log2, -base));
                scores[i + 2 * row + 1] = exp2_fast(fmaf(scores[i + 2 * row + 1], scale_log2, -base));
                sum += scores[i + 2 * row] + scores[i + 2 * row + 1];
            }
            row_sum[row] = row_sum[row] * factor[row] + sum;
        }
        return make_float2(factor[0], factor[1]);
    }

    __device__ __forceinline__ void rescale(float2 factor) {
#pragma unroll
        for (int i = 0; i < OUT_REGS; ++i) out[i] *= (i / 2) % 2 ? factor.y : factor.x;
    }

    __device__ __forceinline__ void pack_probs() {
#pragma unroll
        for (int i = 0; i < 32; ++i) probs[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
    }

    __device__ __forceinline__ void release(uint64_t* barrier) {
        if (lane == 0) mbarrier_arrive(barrier);
    }
};

// One tile of 128 query rows of one KV head. A thread block takes every gridDim-th, from the longest to the shortest and back and
// forth over the blocks, so that all end at about the same time.
struct Work {
    int kv_head, seq, query_start, seq_len, first_row, num_rows, first_position, num_tiles, num_unmasked;

    // False when the list is over. Sets everything for this block's `item`-th tile; skips those that a sequence is too short for.
    __device__ __forceinline__ bool find(const Params& p, int& item) {
        const int num_items = p.num_kv_heads * p.num_seqs * p.max_tiles;
        for (;; ++item) {
            if (item * static_cast<int>(gridDim.x) >= num_items) return false;
            const int index = item * gridDim.x + (item % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
            if (index >= num_items) continue;
            kv_head = index % p.num_kv_heads;
            seq = index / p.num_kv_heads % p.num_seqs;
            first_row = (p.max_tiles - 1 - index / (p.num_kv_heads * p.num_seqs)) * TILE_ROWS;
            query_start = p.query_start_loc[seq];
            const int query_len = p.query_start_loc[seq + 1] - query_start;
            num_rows = query_len * p.group_size;
            if (first_row >= num_rows) continue;
            seq_len = min(p.seq_lens[seq], p.max_context);
            first_position = seq_len - query_len;
            const int last_token = (min(first_row + TILE_ROWS, num_rows) - 1) / p.group_size;
            num_tiles = max(0, (first_position + last_token + TILE_KEYS) / TILE_KEYS);
            num_unmasked = max(0, (first_position + first_row / p.group_size + 1) / TILE_KEYS);  // that every row sees whole
            return true;
        }
    }
};

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(NUM_THREADS, 1)
    attend(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap value_map) {
    using Tiles = Shared<HEAD_DIM>;
    extern __shared__ char shared[];
    Tiles& tiles = *reinterpret_cast<Tiles*>((reinterpret_cast<uintptr_t>(shared) + 1023) & ~static_cast<uintptr_t>(1023));

    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; ++i) {
            mbarrier_init(&tiles.full_keys[i], 1);
            mbarrier_init(&tiles.full_values[i], 1);
            mbarrier_init(&tiles.empty_keys[i], 8);
            mbarrier_init(&tiles.empty_values[i], 8);
        }
        mbarrier_init_fence();
    }
    __syncthreads();

    if (threadIdx.x < 128) {
        release_registers<24>();
        // A warp issues tensor copies one by one, so the boxes of a tile are dealt out to all four.
        constexpr int WARPS = 4;
        const int piece_rows = min(p.block_size, TILE_KEYS);
        const int num_pieces = TILE_KEYS / piece_rows;
        const int box = threadIdx.x % 32 * WARPS + threadIdx.x / 32;
        const int num_boxes = num_pieces * Tiles::HALVES;
        // Nothing would hold back a tile for a warp without boxes: two phases late, it would wait for ever.
        if (threadIdx.x / 32 >= num_boxes) return;
        const bool has_box = box < num_boxes;
        const int piece = box / Tiles::HALVES, half = box % Tiles::HALVES;
        const int offset = half * Tiles::HALF_BYTES + piece * piece_rows * 128;
        int loaded = 0;  // key tiles so far
        for (int item = 0;; ++item) {
            Work w;
            if (!w.find(p, item)) break;
            const int* table = p.block_tables + w.seq * p.block_table_stride;
            for (int i = 0; i < w.num_tiles; ++i, ++loaded) {
                const int stage = loaded % NUM_STAGES;
                const uint32_t parity = (loaded / NUM_STAGES) & 1;
                const int token = (w.num_tiles - 1 - i) * TILE_KEYS + piece * piece_rows;
                // A block past the end is asked for outside the tensor, and arrives as zeros.
                const int block = has_box && token < w.seq_len ? table[token / p.block_size] : p.num_blocks;
                mbarrier_wait(&tiles.empty_keys[stage], parity ^ 1);
                if (threadIdx.x == 0) mbarrier_expect_bytes(&tiles.full_keys[stage], Tiles::TILE_BYTES);
                if (has_box) tensor_copy(tiles.keys[stage] + offset, &key_map, half * 64, token % p.block_size, w.kv_head, block, &tiles.full_keys[stage]);
                mbarrier_wait(&tiles.empty_values[stage], parity ^ 1);
                if (threadIdx.x == 0) mbarrier_expect_bytes(&tiles.full_values[stage], Tiles::TILE_BYTES);
                if (has_box)
                    tensor_copy(tiles.values[stage] + offset, &value_map, half * 64, token % p.block_size, w.kv_head, block, &tiles.full_values[stage]);
            }
        }
        return;
    }
    take_registers<240>();
    Consumer<T, HEAD_DIM> c;
    c.group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
    c.query_descriptor = matrix_descriptor(tiles.query + c.group * 64 * 128);
    c.thread = threadIdx.x % 128, c.lane = c.thread % 32, c.warp = c.thread / 32;
    const float scale_log2 = p.scale * LOG2E;

    // How a warpgroup moves its 64 rows of the query tile: each thread the same 16-byte chunk of every PIECE_ROWS-th row.
    constexpr int CHUNKS = HEAD_DIM / 8, PIECE_ROWS = 128 / CHUNKS, PIECES = 64 / PIECE_ROWS;
    const int piece_row = c.group * 64 + c.thread / CHUNKS, piece_chunk = c.thread % CHUNKS;
    const int piece_offset = (piece_chunk / 8) * Tiles::HALF_BYTES + piece_row * 128 + (((piece_chunk % 8) ^ (piece_row % 8)) << 4);
    if (c.group == 1) c.pass_turn();

    int consumed = 0;  // key tiles so far
    for (int item = 0;; ++item) {
        Work w;
        if (!w.find(p, item)) break;
        if (w.num_tiles == 0) {  // more query tokens than the sequence is long: these see nothing
            for (int index = threadIdx.x - 128; index < min(TILE_ROWS, w.num_rows - w.first_row) * HEAD_DIM; index += 256) {
                const int packed_row = w.first_row + index / HEAD_DIM;
                static_cast<T*>(p.out)[(w.query_start + packed_row / p.group_size) * p.out_stride +
                                       static_cast<int64_t>(w.kv_head * p.group_size + packed_row % p.group_size) * HEAD_DIM + index % HEAD_DIM] = T(0.f);
            }
            continue;
        }
        // This warpgroup's 64 query rows, 16 bytes a thread at a time, swizzled as the tensor copies swizzle K. All loads go out before
        // the first is needed.
        uint4 rows[PIECES];
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int packed_row = w.first_row + piece_row + i * PIECE_ROWS;
            rows[i] = make_uint4(0, 0, 0, 0);
            if (packed_row < w.num_rows) {
                const T* source = static_cast<const T*>(p.query) + (w.query_start + packed_row / p.group_size) * p.query_stride +
                                  (w.kv_head * p.group_size + packed_row % p.group_size) * p.query_head_stride;
                rows[i] = *reinterpret_cast<const uint4*>(source + piece_chunk * 8);
            }
        }
        // Before the query tile is written again, its last rows must have left.
        named_barrier_sync(BARRIER_GROUP + c.group, 128);
#pragma unroll
        for (int i = 0; i < PIECES; ++i) *reinterpret_cast<uint4*>(tiles.query + piece_offset + i * PIECE_ROWS * 128) = rows[i];
        fence_shared_for_async();
        named_barrier_sync(BARRIER_GROUP + c.group, 128);

#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int packed_row = min(w.first_row + c.group * 64 + c.warp * 16 + c.lane / 4 + 8 * row, w.num_rows - 1);
            c.position[row] = w.first_position + packed_row / p.group_size;
            c.row_max[row] = -INFINITY;
            c.row_sum[row] = 0.f;
        }
#pragma unroll
        for (int i = 0; i < Consumer<T, HEAD_DIM>::OUT_REGS; ++i) c.out[i] = 0.f;

        const int first_stage = consumed % NUM_STAGES;
        mbarrier_wait(&tiles.full_keys[first_stage], (consumed / NUM_STAGES) & 1);
        c.take_turn();
        c.issue_scores(tiles, first_stage);
        c.pass_turn();
        wgmma_wait<0>();
        keep_in_registers(c.scores);
        c.release(&tiles.empty_keys[first_stage]);
        {
            const int first_key = (w.num_tiles - 1) * TILE_KEYS;
            if (w.num_tiles > w.num_unmasked)
                c.template softmax<true>(first_key, scale_log2);
            else
                c.template softmax<false>(first_key, scale_log2);
            c.pack_probs();
            if (first_key + TILE_KEYS > w.seq_len) {
                // Slots behind the sequence may hold anything, and 0 x NaN is NaN: their values become zeros before they are multiplied.
                mbarrier_wait(&tiles.full_values[first_stage], (consumed / NUM_STAGES) & 1);
                const int first_bad = w.seq_len - first_key;
                for (int index = threadIdx.x - 128; index < (TILE_KEYS - first_bad) * CHUNKS; index += 256) {
                    const int row = first_bad + index / CHUNKS, chunk = index % CHUNKS;
                    *reinterpret_cast<uint4*>(tiles.values[first_stage] + (chunk / 8) * Tiles::HALF_BYTES + row * 128 + (chunk % 8) * 16) = make_uint4(0, 0, 0, 0);
                }
                fence_shared_for_async();
                named_barrier_sync(BARRIER_TAIL, 256);
            }
        }

        float2 factor = make_float2(1.f, 1.f);  // what the last softmax asks of `out`, applied while the next scores are computed
        for (int i = 1; i < w.num_tiles; ++i) {
            const int at = consumed + i, stage = at % NUM_STAGES, previous = (at - 1) % NUM_STAGES;
            mbarrier_wait(&tiles.full_keys[stage], (at / NUM_STAGES) & 1);
            c.take_turn();
            c.issue_scores(tiles, stage);
            c.rescale(factor);
            mbarrier_wait(&tiles.full_values[previous], ((at - 1) / NUM_STAGES) & 1);
            c.issue_values(tiles, previous);
            c.pass_turn();
            wgmma_wait<1>();
            keep_in_registers(c.scores);
            c.release(&tiles.empty_keys[stage]);
            const int key_tile = w.num_tiles - 1 - i;
            factor = key_tile >= w.num_unmasked ? c.template softmax<true>(key_tile * TILE_KEYS, scale_log2)
                                              : c.template softmax<false>(key_tile * TILE_KEYS, scale_log2);
            wgmma_wait<0>();
            keep_in_registers(c.out);
            c.release(&tiles.empty_values[previous]);
            c.pack_probs();
        }
        c.rescale(factor);
        consumed += w.num_tiles;
        const int last = (consumed - 1) % NUM_STAGES;
        mbarrier_wait(&tiles.full_values[last], ((consumed - 1) / NUM_STAGES) & 1);
        c.issue_values(tiles, last);
        float norm[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float sum = c.row_sum[row];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            norm[row] = sum > 0.f ? 1.f / sum : 0.f;
        }
        wgmma_wait<0>();
        keep_in_registers(c.out);
        c.release(&tiles.empty_values[last]);

        // Through this warpgroup's part of the query tile, so that rows leave in 16-byte pieces. A warp has waited for its own products
        // only, and those of the others read the tile as well.
        named_barrier_sync(BARRIER_GROUP + c.group, 128);
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; ++j) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const int tile_row = c.group * 64 + c.warp * 16 + c.lane / 4 + 8 * row;
                char* address = tiles.query + (j / 8) * Tiles::HALF_BYTES + tile_row * 128 + (((j % 8) ^ (tile_row % 8)) << 4) + (c.lane % 4) * 4;
                *reinterpret_cast<uint32_t*>(address) = pack<T>(c.out[4 * j + 2 * row] * norm[row], c.out[4 * j + 2 * row + 1] * norm[row]);
            }
        }
        named_barrier_sync(BARRIER_GROUP + c.group, 128);
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int packed_row = w.first_row + piece_row + i * PIECE_ROWS;
            if (packed_row < w.num_rows) {
                T* target = static_cast<T*>(p.out) + (w.query_start + packed_row / p.group_size) * p.out_stride +
                            static_cast<int64_t>(w.kv_head * p.group_size + packed_row % p.group_size) * HEAD_DIM;
                *reinterpret_cast<uint4*>(target + piece_chunk * 8) = *reinterpret_cast<const uint4*>(tiles.query + piece_offset + i * PIECE_ROWS * 128);
            }
        }
    }
}

}  // namespace flash_attention
