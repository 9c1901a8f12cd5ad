// PagedAttention V1 and V2: one query token per sequence over the KV blocks its block table names (Kwon et al. 2023), with the
// partial softmax of Flash-Decoding for V2.
//
// One thread block serves one (sequence, KV head, partition) with ALL query heads of the group (up to 8 x NUM_GROUPS), so each
// element of K and V is read from memory once. A producer warp keeps asynchronous copies of whole blocks in flight; four consumer
// warps each take 16 of a stage's 64 tokens and run both products on the tensor cores with tokens (K) and head dimensions (V) as
// the 16 rows and query heads as the 8 columns: S^T = K Q^T, O^T = V^T P^T. The softmax state is fp32.
//
// The contraction index of a product may be permuted if both operands are: so fragments come from shared memory as whole 16-byte
// chunks of a row instead of by ldmatrix, and the shared layout is the one in memory.
#pragma once
#include "async_copy.cuh"

namespace paged_attention {

constexpr int NUM_WARPS = 4;       // consumers; one more warp produces
constexpr int NUM_THREADS = 32 * (NUM_WARPS + 1);
constexpr int STAGE_TOKENS = 64;   // 16 a warp
constexpr int BARRIER_BYTES = 256;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

enum CacheKind { CACHE_AUTO = 0, CACHE_E4M3 = 1, CACHE_E5M2 = 2 };

struct Params {
    void* out;              // [num_seqs, num_heads, HEAD_DIM] T
    void* partial_out;      // [num_seqs, num_heads, num_partitions, HEAD_DIM], or null: one partition, straight to out
    float* max_logits;      // [num_seqs, num_heads, num_partitions]
    float* exp_sums;        // as max_logits
    const void* query;      // [num_seqs, num_heads, HEAD_DIM] T
    const void* key_cache;
    const void* value_cache;
    const int* block_tables;     // [num_seqs, block_table_stride]
    const int* seq_lens;         // [num_seqs]
    const float* alibi_slopes;   // [num_heads] or null
    const float* k_scale;        // one element or null (1)
    const float* v_scale;
    float scale;
    float soft_cap;              // 0: none
    int sliding_window;          // 0: none
    int num_seqs, num_heads, num_kv_heads, group_size, groups_per_kv_head;
    int block_size, partition_size, num_partitions;
    int max_context;             // what a row of the block table can hold; a longer seq_len is cut to it
    int partial_is_f32;
    int is_even;      // partition_size is the least: each sequence is cut into equal parts, num_partitions of them at most
    int evict_first;  // the cache is read past L2's other contents: for short runs, which would wait for their eviction
    int64_t query_stride, out_stride, block_table_stride;
    int64_t k_block_stride, k_head_stride, v_block_stride, v_head_stride;  // elements of the cache
};

// Tokens of a partition of a sequence.
__device__ __forceinline__ int partition_size_of(const Params& p, int seq_len) {
    if (!p.is_even) return p.partition_size;
    const int share = (seq_len + p.num_partitions - 1) / p.num_partitions;
    return max(p.partition_size, (share + STAGE_TOKENS - 1) / STAGE_TOKENS * STAGE_TOKENS);
}

constexpr int clamp(int value, int low, int high) { return value < low ? low : value > high ? high : value; }

template <typename T>
struct Scalar;
template <>
struct Scalar<__half> {
    static __device__ __forceinline__ uint32_t pack(float a, float b) {
        __half2 h = __floats2half2_rn(a, b);
        return reinterpret_cast<uint32_t&>(h);
    }
    static __device__ __forceinline__ float2 unpack(uint32_t u) { return __half22float2(reinterpret_cast<__half2&>(u)); }
    static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};
template <>
struct Scalar<__nv_bfloat16> {
    static __device__ __forceinline__ uint32_t pack(float a, float b) {
        __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
        return reinterpret_cast<uint32_t&>(h);
    }
    static __device__ __forceinline__ float2 unpack(uint32_t u) { return __bfloat1622float2(reinterpret_cast<__nv_bfloat162&>(u)); }
    static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

// Two FP8 numbers -> two halves.
template <int CACHE>
__device__ __forceinline__ uint32_t fp8x2_to_half2(uint32_t two_bytes) {
    __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two_bytes & 0xffff), CACHE == CACHE_E4M3 ? __NV_E4M3 : __NV_E5M2);
    return static_cast<uint32_t>(h.x) | (static_cast<uint32_t>(h.y) << 16);
}

// 8x8 transpose of 16-bit elements across the warp.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t value) {
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(value));
    return result;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What depends on head size, types and layout only.
template <typename T, int CACHE, int HEAD_DIM, bool CLASSIC, bool IS_DEEP>
struct Shape {
    static constexpr int ITEM_BYTES = CACHE == CACHE_AUTO ? 2 : 1;
    static constexpr int ROW_BYTES = HEAD_DIM * ITEM_BYTES;
    // A chunk is what a lane reads at once: 16 bytes, or 8 where a row is no multiple of 16.
    static constexpr int CHUNK_BYTES = ROW_BYTES % 16 == 0 ? 16 : 8;
    static constexpr int CHUNK_WORDS = CHUNK_BYTES / 4;
    static constexpr int CHUNK_ITEMS = CHUNK_BYTES / ITEM_BYTES;
    static constexpr int NUM_CHUNKS = HEAD_DIM / CHUNK_ITEMS;
    static constexpr int K_GROUPS = (NUM_CHUNKS + 3) / 4;      // 4 lanes share a token
    static constexpr int K_STEPS = CHUNK_ITEMS / 4;            // products of depth 16 per K group
    static constexpr int V_GROUPS = CLASSIC ? (HEAD_DIM + 15) / 16 : (NUM_CHUNKS + 7) / 8;  // 8 lanes share a token
    static constexpr int V_TILES = CLASSIC ? 1 : CHUNK_ITEMS / 2;                           // 16-row tiles of O^T per V group
    // K or V of one stage. A copy to an address that is no multiple of 128 costs a tenth of the memory bandwidth, so pieces stand close
    // together, although rows that all begin in the same bank make the reads conflict.
    static constexpr int OPERAND_BYTES = STAGE_TOKENS * ROW_BYTES;
    static constexpr int STAGE_BYTES = 2 * OPERAND_BYTES;
    // Shallow: four blocks fit a multiprocessor. Deep: two, each with more copies in flight. The stages also hold what the warps merge.
    static constexpr int MIN_STAGES = IS_DEEP || STAGE_BYTES < NUM_WARPS * 16 * HEAD_DIM * 4 ? 2 : 1;
    static constexpr int NUM_STAGES = clamp((IS_DEEP ? 112 : 56) * 1024 / STAGE_BYTES, MIN_STAGES, 6);
    static constexpr int SHARED_BYTES = NUM_STAGES * STAGE_BYTES + BARRIER_BYTES;
    static_assert(4 * NUM_STAGES * 8 <= BARRIER_BYTES, "full and empty, K and V");
    static_assert(ROW_BYTES % 8 == 0, "a row must be a multiple of 8 bytes");
    static_assert(!CLASSIC || ROW_BYTES % 16 == 0, "the classic K layout holds 16-byte chunks");
};

template <int WORDS>
__device__ __forceinline__ void load_chunk(uint32_t (&words)[WORDS], const char* address) {
    if constexpr (WORDS == 4) {
        uint4 v = *reinterpret_cast<const uint4*>(address);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else {
        uint2 v = *reinterpret_cast<const uint2*>(address);
        words[0] = v.x, words[1] = v.y;
    }
}

template <typename T, int CACHE, int HEAD_DIM, bool CLASSIC, int NUM_GROUPS, bool IS_DEEP>
struct Kernel {
    using S = Shape<T, CACHE, HEAD_DIM, CLASSIC, IS_DEEP>;
    // FP8 becomes half exactly; the query is scaled by a power of two into its range.
    using MathT = typename std::conditional<CACHE == CACHE_AUTO, T, __half>::type;
    using Math = Scalar<MathT>;
    static constexpr int NUM_HEADS = 8 * NUM_GROUPS;

    // Byte offset of chunk `chunk` of token `token` of a stage, inside K.
    static __device__ __forceinline__ int key_offset(int token, int chunk, int block_size) {
        if constexpr (CLASSIC) {
            return token / block_size * block_size * S::ROW_BYTES + (chunk * block_size + token % block_size) * 16;
        } else {
            return token * S::ROW_BYTES + chunk * S::CHUNK_BYTES;
        }
    }

    static __device__ __forceinline__ void produce(const Params& p, int seq, int kv_head, int first_token, int num_stages, int window_start, int seq_len,
                                                   char* stages, uint64_t* full, uint64_t* empty) {
        const int lane = threadIdx.x % 32;
        const int piece_tokens = CLASSIC ? p.block_size : min(p.block_size, 16);
        const int num_pieces = STAGE_TOKENS / piece_tokens;
        const uint32_t piece_bytes = piece_tokens * S::ROW_BYTES;
#if __CUDA_ARCH__ >= 900
        const uint64_t policy = evict_first_policy();
#endif
        const int* table = p.block_tables + seq * p.block_table_stride;
        const char* keys = static_cast<const char*>(p.key_cache) + kv_head * p.k_head_stride * S::ITEM_BYTES;
        const char* values = static_cast<const char*>(p.value_cache) + kv_head * p.v_head_stride * S::ITEM_BYTES;
        const int destination = lane * static_cast<int>(piece_bytes);
        int token = first_token + lane * piece_tokens;
        // Blocks outside the sequence or its window need not exist.
        bool has_piece = lane < num_pieces && token < seq_len && token + piece_tokens > window_start;
        int64_t block = has_piece ? table[token / p.block_size] : 0;
        for (int stage_index = 0; stage_index < num_stages; ++stage_index) {
            const int stage = stage_index % S::NUM_STAGES;
            const uint32_t parity = (stage_index / S::NUM_STAGES) & 1;
            const char* key = keys + (block * p.k_block_stride + (CLASSIC ? 0 : (token % p.block_size) * HEAD_DIM)) * S::ITEM_BYTES;
            const char* value = values + (block * p.v_block_stride + (CLASSIC ? 0 : (token % p.block_size) * HEAD_DIM)) * S::ITEM_BYTES;
            const bool copies = has_piece;
            // The next block id is on its way while this stage waits for room.
            token += STAGE_TOKENS;
            has_piece = lane < num_pieces && token < seq_len;
            block = has_piece ? table[token / p.block_size] : 0;
            const uint32_t num_bytes = __popc(__ballot_sync(~0u, copies)) * piece_bytes;
#pragma unroll
            for (int operand = 0; operand < 2; ++operand) {
                const int slot = 2 * stage + operand;
                char* target = stages + stage * S::STAGE_BYTES + operand * S::OPERAND_BYTES + destination;
                const char* source = operand == 0 ? key : value;
                if (stage_index >= S::NUM_STAGES) mbarrier_wait(&empty[slot], parity ^ 1);
#if __CUDA_ARCH__ >= 900
                if (lane == 0) mbarrier_expect_bytes(&full[slot], num_bytes);
                __syncwarp();
                if (copies && p.evict_first) bulk_copy(target, source, piece_bytes, &full[slot], policy);
                if (copies && !p.evict_first) bulk_copy(target, source, piece_bytes, &full[slot]);
#else
                for (int piece = 0; piece < num_pieces; ++piece) {
                    const uint64_t from = __shfl_sync(~0u, reinterpret_cast<uint64_t>(source), piece);
                    const uint64_t to = __shfl_sync(~0u, reinterpret_cast<uint64_t>(target), piece);
                    if (!__shfl_sync(~0u, copies, piece)) continue;  // before the window, or behind the end
                    for (int offset = lane * 16; offset < static_cast<int>(piece_bytes); offset += 32 * 16)
                        copy_16_bytes(reinterpret_cast<char*>(to) + offset, reinterpret_cast<const char*>(from) + offset);
                }
                arrive_when_copied(&full[slot]);
#endif
            }
        }
    }

    // The group's query heads as the right operand of S^T = K Q^T; `unscale` undoes the power of two, for heads 2t and 2t+1 of each group.
    static __device__ __forceinline__ void load_query(const Params& p, int seq, int first_head, int num_heads,
                                                      uint32_t (&q)[NUM_GROUPS][S::K_GROUPS][S::K_STEPS][2], float (&unscale)[NUM_GROUPS][2]) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int group = 0; group < NUM_GROUPS; ++group) {
            const int head = group * 8 + g;
            const T* row = static_cast<const T*>(p.query) + seq * p.query_stride + static_cast<int64_t>(first_head + head) * HEAD_DIM;
            float largest = 0.f;
#pragma unroll
            for (int j = 0; j < S::K_GROUPS; ++j) {
                const int chunk = 4 * j + t;
                const bool has_chunk = head < num_heads && chunk < S::NUM_CHUNKS;
#pragma unroll
                for (int s = 0; s < S::K_STEPS; ++s) {
                    uint2 four = has_chunk ? *reinterpret_cast<const uint2*>(row + chunk * S::CHUNK_ITEMS + 4 * s) : make_uint2(0, 0);
                    q[group][j][s][0] = four.x, q[group][j][s][1] = four.y;
                    if constexpr (CACHE != CACHE_AUTO) {
                        float2 a = Scalar<T>::unpack(four.x), b = Scalar<T>::unpack(four.y);
                        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y))));
                    }
                }
            }
            unscale[group][0] = unscale[group][1] = 1.f;
            if constexpr (CACHE != CACHE_AUTO) {
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
                // largest * factor lies in [1, 2); exponents are kept where both factors are normal numbers.
                int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23), 2), 252);
                const float factor = __uint_as_float(static_cast<uint32_t>(254 - exponent) << 23);
                const float inverse = __uint_as_float(static_cast<uint32_t>(exponent) << 23);
#pragma unroll
                for (int j = 0; j < S::K_GROUPS; ++j)
#pragma unroll
                    for (int s = 0; s < S::K_STEPS; ++s)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            float2 pair = Scalar<T>::unpack(q[group][j][s][half]);
                            q[group][j][s][half] = Math::pack(pair.x * factor, pair.y * factor);
                        }
                unscale[group][0] = __shfl_sync(~0u, inverse, 8 * t);
                unscale[group][1] = __shfl_sync(~0u, inverse, 8 * t + 4);
            }
        }
    }

    static __device__ __forceinline__ void run(const Params& p) {
        const int kv_head = blockIdx.x / p.groups_per_kv_head;
        const int first_head = kv_head * p.group_size + (blockIdx.x % p.groups_per_kv_head) * NUM_HEADS;
        const int num_heads = min(NUM_HEADS, (kv_head + 1) * p.group_size - first_head);
        const int seq = blockIdx.y, partition = blockIdx.z;
        allow_dependent_launch();
        const int seq_len = min(p.seq_lens[seq], p.max_context);
        const int window_start = p.sliding_window > 0 ? max(0, seq_len - p.sliding_window) : 0;
        const int partition_size = partition_size_of(p, seq_len);
        const int partition_start = partition * partition_size;
        const int end = min(seq_len, partition_start + partition_size);
        const int first_token = max(partition_start, window_start / STAGE_TOKENS * STAGE_TOKENS);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

        if (first_token >= end) {
            // Nothing to see here: an empty sequence, or a partition outside it or before its window.
            if (p.partial_out == nullptr) {
                for (int i = threadIdx.x; i < num_heads * HEAD_DIM; i += NUM_THREADS)
                    static_cast<T*>(p.out)[seq * p.out_stride + static_cast<int64_t>(first_head) * HEAD_DIM + i] = T(0.f);
            } else if (threadIdx.x < num_heads) {
                const int64_t index = (static_cast<int64_t>(seq) * p.num_heads + first_head + threadIdx.x) * p.num_partitions + partition;
                p.max_logits[index] = -INFINITY;
                p.exp_sums[index] = 0.f;
            }
            return;
        }

        extern __shared__ __align__(128) char shared[];
        uint64_t* full = reinterpret_cast<uint64_t*>(shared);  // [stage][K, V]
        uint64_t* empty = full + 2 * S::NUM_STAGES;
        char* stages = shared + BARRIER_BYTES;
        const int num_stages = (end - first_token + STAGE_TOKENS - 1) / STAGE_TOKENS;
        if (threadIdx.x == 0) {
            for (int i = 0; i < 2 * S::NUM_STAGES; ++i) {
#if __CUDA_ARCH__ >= 900
                mbarrier_init(&full[i], 1);
#else
                mbarrier_init(&full[i], 32);
#endif
                mbarrier_init(&empty[i], NUM_WARPS);
            }
            mbarrier_init_fence();
        }
        __syncthreads();

        constexpr int TILES = S::V_GROUPS * S::V_TILES;
        float out[NUM_GROUPS][TILES][4];
        float row_max[NUM_GROUPS][2], row_sum[NUM_GROUPS][2];
        if (warp == NUM_WARPS) {
            produce(p, seq, kv_head, first_token, num_stages, window_start, seq_len, stages, full, empty);
        } else {
            uint32_t q[NUM_GROUPS][S::K_GROUPS][S::K_STEPS][2];
            float factor[NUM_GROUPS][2];
            load_query(p, seq, first_head, num_heads, q, factor);
            const float k_scale = (CACHE != CACHE_AUTO && p.k_scale != nullptr) ? *p.k_scale : 1.f;
            float slope[NUM_GROUPS][2];
#pragma unroll
            for (int group = 0; group < NUM_GROUPS; ++group)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    factor[group][i] *= p.scale * k_scale * (p.soft_cap > 0.f ? 1.f / p.soft_cap : LOG2E);
                    const int head = group * 8 + 2 * t + i;
                    slope[group][i] = p.alibi_slopes != nullptr && head < num_heads ? p.alibi_slopes[first_head + head] * LOG2E : 0.f;
                    row_max[group][i] = -INFINITY;
                    row_sum[group][i] = 0.f;
                }
#pragma unroll
            for (int group = 0; group < NUM_GROUPS; ++group)
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                    for (int i = 0; i < 4; ++i) out[group][tile][i] = 0.f;

            // This lane's tokens of a stage. As rows of K: `row_token` and the one two behind; as columns of V: four from `column_token`.
            const int row_token = 16 * (g >> 1) + 4 * warp + (g & 1);
            const int column_token = 16 * t + 4 * warp;
            const int key_at[2] = {key_offset(row_token, 0, p.block_size), key_offset(row_token + 2, 0, p.block_size)};
            const int key_chunk_stride = CLASSIC ? 16 * p.block_size : S::CHUNK_BYTES;

            for (int stage_index = 0; stage_index < num_stages; ++stage_index) {
                const int stage = stage_index % S::NUM_STAGES;
                const uint32_t parity = (stage_index / S::NUM_STAGES) & 1;
                const char* keys = stages + stage * S::STAGE_BYTES;
                const char* values = keys + S::OPERAND_BYTES;
                const int stage_token = first_token + stage_index * STAGE_TOKENS;

                float s[NUM_GROUPS][4];
                mbarrier_wait(&full[2 * stage], parity);
                score(keys, key_at, key_chunk_stride, t, q, s);
                release(&empty[2 * stage]);

                const bool is_partial = stage_token + STAGE_TOKENS > end || stage_token < window_start;
                uint32_t probs[NUM_GROUPS][2];
#pragma unroll
                for (int group = 0; group < NUM_GROUPS; ++group)
                    softmax_step(p, s[group], factor[group], slope[group], stage_token + row_token, end, window_start, seq_len, is_partial,
                                 row_max[group], row_sum[group], out[group], probs[group]);

                mbarrier_wait(&full[2 * stage + 1], parity);
                uint32_t valid = 0xf;  // of this lane's four tokens
                if (is_partial) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int position = stage_token + column_token + i;
                        if (position >= end || position < window_start) valid &= ~(1u << i);
                    }
                }
                accumulate(values, column_token, valid, p.block_size, g, t, probs, out);
                release(&empty[2 * stage + 1]);
            }
        }
        merge_and_write(p, seq, partition, first_head, num_heads, stages, row_max, row_sum, out);
    }

    // Gives a slot back to the producer. The fence waits for this lane's reads: without it the compiler issues the arrival as soon as
    // the reads are on their way, and the next copy overtakes them.
    static __device__ __forceinline__ void release(uint64_t* barrier) {
        __threadfence_block();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
    }

    // s = K Q^T of this warp's 16 tokens: rows g and g + 8, columns 2t and 2t + 1.
    static __device__ __forceinline__ void score(const char* keys, const int (&key_at)[2], int chunk_stride, int t,
                                                 const uint32_t (&q)[NUM_GROUPS][S::K_GROUPS][S::K_STEPS][2], float (&s)[NUM_GROUPS][4]) {
        float odd[NUM_GROUPS][4];  // a second chain of products, so that they do not all wait for each other
#pragma unroll
        for (int group = 0; group < NUM_GROUPS; ++group)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[group][i] = odd[group][i] = 0.f;
#pragma unroll
        for (int j = 0; j < S::K_GROUPS; ++j) {
            const int chunk = 4 * j + t;
            uint32_t k[2][S::CHUNK_WORDS];
            const bool has_chunk = S::NUM_CHUNKS % 4 == 0 || chunk < S::NUM_CHUNKS;
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                if (has_chunk) {
                    load_chunk(k[row], keys + key_at[row] + chunk * chunk_stride);
                } else {
#pragma unroll
                    for (int word = 0; word < S::CHUNK_WORDS; ++word) k[row][word] = 0;
                }
            }
#pragma unroll
            for (int step = 0; step < S::K_STEPS; ++step) {
                uint32_t a[4];
                if constexpr (CACHE == CACHE_AUTO) {
                    a[0] = k[0][2 * step], a[1] = k[1][2 * step], a[2] = k[0][2 * step + 1], a[3] = k[1][2 * step + 1];
                } else {
                    a[0] = fp8x2_to_half2<CACHE>(k[0][step]), a[1] = fp8x2_to_half2<CACHE>(k[1][step]);
                    a[2] = fp8x2_to_half2<CACHE>(k[0][step] >> 16), a[3] = fp8x2_to_half2<CACHE>(k[1][step] >> 16);
                }
#pragma unroll
                for (int group = 0; group < NUM_GROUPS; ++group)
                    Math::mma(step % 2 ? odd[group] : s[group], a, q[group][j][step][0], q[group][j][step][1]);
            }
        }
#pragma unroll
        for (int group = 0; group < NUM_GROUPS; ++group)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[group][i] += odd[group][i];
    }

    // Online softmax over 16 tokens x 8 heads: raises row_max, rescales, and leaves P^T as the right operand of O^T = V^T P^T.
    static __device__ __forceinline__ void softmax_step(const Params& p, float (&s)[4], const float (&factor)[2], const float (&slope)[2],
                                                        int token, int end, int window_start, int seq_len, bool is_partial,
                                                        float (&row_max)[2], float (&row_sum)[2], float (&out)[S::V_GROUPS * S::V_TILES][4],
                                                        uint32_t (&probs)[2]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[i] *= factor[i % 2];
            if (p.soft_cap > 0.f) s[i] = p.soft_cap * LOG2E * tanhf(s[i]);
        }
        if (p.alibi_slopes != nullptr) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[i] += slope[i % 2] * static_cast<float>(token + (i / 2) * 2 - (seq_len - 1));
        }
        if (is_partial) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int position = token + (i / 2) * 2;
                if (position >= end || position < window_start) s[i] = -INFINITY;
            }
        }
        float correction[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float largest = fmaxf(s[i], s[i + 2]);
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 4));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 8));
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 16));
            const float new_max = fmaxf(row_max[i], largest);
            const float base = new_max == -INFINITY ? 0.f : new_max;
            correction[i] = exp2_fast(row_max[i] - base);
            row_max[i] = new_max;
            s[i] = exp2_fast(s[i] - base);
            s[i + 2] = exp2_fast(s[i + 2] - base);
            row_sum[i] = row_sum[i] * correction[i] + s[i] + s[i + 2];
        }
        if (__any_sync(~0u, correction[0] != 1.f || correction[1] != 1.f)) {
#pragma unroll
            for (int tile = 0; tile < S::V_GROUPS * S::V_TILES; ++tile)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[tile][i] *= correction[i % 2];
        }
        probs[0] = transpose_8x8(Math::pack(s[0], s[1]));
        probs[1] = transpose_8x8(Math::pack(s[2], s[3]));
    }

    // O^T += V^T P^T. Values outside the sequence or its window are taken as zero: their slots may hold anything, and 0 x NaN is NaN.
    static __device__ __forceinline__ void accumulate(const char* values, int column_token, uint32_t valid, int block_size, int g, int t, const uint32_t (&probs)[NUM_GROUPS][2],
                                                      float (&out)[NUM_GROUPS][S::V_GROUPS * S::V_TILES][4]) {
        if constexpr (CLASSIC) {
            const int piece = column_token / block_size;
            const char* base = values + piece * block_size * S::ROW_BYTES + (column_token % block_size) * S::ITEM_BYTES;
#pragma unroll
            for (int j = 0; j < S::V_GROUPS; ++j) {
                uint32_t a[4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int dim = 16 * j + 8 * half + g;
                    const bool has_row = HEAD_DIM % 16 == 0 || dim < HEAD_DIM;
                    const char* address = base + dim * block_size * S::ITEM_BYTES;
                    if constexpr (CACHE == CACHE_AUTO) {
                        uint2 four = has_row ? *reinterpret_cast<const uint2*>(address) : make_uint2(0, 0);
                        if (valid != 0xf) {
                            four.x &= ((valid & 1) ? 0x0000ffffu : 0u) | ((valid & 2) ? 0xffff0000u : 0u);
                            four.y &= ((valid & 4) ? 0x0000ffffu : 0u) | ((valid & 8) ? 0xffff0000u : 0u);
                        }
                        a[half] = four.x, a[half + 2] = four.y;
                    } else {
                        uint32_t four = has_row ? *reinterpret_cast<const uint32_t*>(address) : 0;
                        if (valid != 0xf)
                            four &= ((valid & 1) ? 0xffu : 0u) | ((valid & 2) ? 0xff00u : 0u) | ((valid & 4) ? 0xff0000u : 0u) | ((valid & 8) ? 0xff000000u : 0u);
                        a[half] = fp8x2_to_half2<CACHE>(four), a[half + 2] = fp8x2_to_half2<CACHE>(four >> 16);
                    }
                }
#pragma unroll
                for (int group = 0; group < NUM_GROUPS; ++group) Math::mma(out[group][j], a, probs[group][0], probs[group][1]);
            }
        } else {
            const char* base = values + column_token * S::ROW_BYTES;
#pragma unroll
            for (int j = 0; j < S::V_GROUPS; ++j) {
                const int chunk = 8 * j + g;
                const bool has_chunk = S::NUM_CHUNKS % 8 == 0 || chunk < S::NUM_CHUNKS;
                uint32_t v[4][S::CHUNK_WORDS];
#pragma unroll
                for (int token = 0; token < 4; ++token) {
                    if (has_chunk && (valid >> token & 1)) {
                        load_chunk(v[token], base + token * S::ROW_BYTES + chunk * S::CHUNK_BYTES);
                    } else {
#pragma unroll
                        for (int word = 0; word < S::CHUNK_WORDS; ++word) v[token][word] = 0;
                    }
                }
                if constexpr (CACHE == CACHE_AUTO) {
#pragma unroll
                    for (int tile = 0; tile < S::V_TILES; ++tile) {
                        const uint32_t a[4] = {__byte_perm(v[0][tile], v[1][tile], 0x5410), __byte_perm(v[0][tile], v[1][tile], 0x7632),
                                               __byte_perm(v[2][tile], v[3][tile], 0x5410), __byte_perm(v[2][tile], v[3][tile], 0x7632)};
#pragma unroll
                        for (int group = 0; group < NUM_GROUPS; ++group)
                            Math::mma(out[group][j * S::V_TILES + tile], a, probs[group][0], probs[group][1]);
                    }
                } else {
#pragma unroll
                    for (int tile = 0; tile < S::V_TILES; ++tile) {
                        // Two items of four tokens, paired by token: the same two bytes of a word, tile by tile.
                        const int word = tile / 2;
                        const uint32_t selector = tile % 2 ? 0x7362 : 0x5140;
                        const uint32_t first = __byte_perm(v[0][word], v[1][word], selector);
                        const uint32_t second = __byte_perm(v[2][word], v[3][word], selector);
                        const uint32_t a[4] = {fp8x2_to_half2<CACHE>(first), fp8x2_to_half2<CACHE>(first >> 16),
                                               fp8x2_to_half2<CACHE>(second), fp8x2_to_half2<CACHE>(second >> 16)};
#pragma unroll
                        for (int group = 0; group < NUM_GROUPS; ++group)
                            Math::mma(out[group][j * S::V_TILES + tile], a, probs[group][0], probs[group][1]);
                    }
                }
            }
        }
    }

    // The head dimension of rows g (half 0) and g + 8 (half 1) of an O^T tile.
    static __device__ __forceinline__ int out_dim(int tile, int g, int half) {
        if constexpr (CLASSIC) return 16 * tile + 8 * half + g;
        return (8 * (tile / S::V_TILES) + g) * S::CHUNK_ITEMS + 2 * (tile % S::V_TILES) + half;
    }

    // The four warps' partial results become one, and leave as output or as this partition's share.
    static __device__ __forceinline__ void merge_and_write(const Params& p, int seq, int partition, int first_head, int num_heads, char* stages,
                                                           float (&row_max)[NUM_GROUPS][2], float (&row_sum)[NUM_GROUPS][2],
                                                           float (&out)[NUM_GROUPS][S::V_GROUPS * S::V_TILES][4]) {
        constexpr int TILES = S::V_GROUPS * S::V_TILES;
        __shared__ float warp_max[NUM_WARPS][NUM_HEADS], warp_sum[NUM_WARPS][NUM_HEADS];
        float* partial = reinterpret_cast<float*>(stages);  // [warp][head][HEAD_DIM]
        static_assert(NUM_WARPS * NUM_HEADS * HEAD_DIM * 4 <= S::NUM_STAGES * S::STAGE_BYTES, "the stages hold the partial results");
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        if (warp < NUM_WARPS) {
#pragma unroll
            for (int group = 0; group < NUM_GROUPS; ++group)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float sum = row_sum[group][i];
                    sum += __shfl_xor_sync(~0u, sum, 4);
                    sum += __shfl_xor_sync(~0u, sum, 8);
                    sum += __shfl_xor_sync(~0u, sum, 16);
                    if (g == 0) {
                        warp_max[warp][group * 8 + 2 * t + i] = row_max[group][i];
                        warp_sum[warp][group * 8 + 2 * t + i] = sum;
                    }
                }
        }
        __syncthreads();  // and nobody reads the stages any more
        if (warp < NUM_WARPS) {
#pragma unroll
            for (int group = 0; group < NUM_GROUPS; ++group) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int head = group * 8 + 2 * t + i;
                    float total_max = warp_max[0][head];
#pragma unroll
                    for (int w = 1; w < NUM_WARPS; ++w) total_max = fmaxf(total_max, warp_max[w][head]);
                    const float weight = total_max == -INFINITY ? 0.f : exp2_fast(row_max[group][i] - total_max);
                    float* row = partial + (warp * NUM_HEADS + head) * HEAD_DIM;
                    if (head < num_heads) {
#pragma unroll
                        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const int dim = out_dim(tile, g, half);
                                if (HEAD_DIM % (CLASSIC ? 16 : 8 * S::CHUNK_ITEMS) == 0 || dim < HEAD_DIM)
                                    row[dim] = out[group][tile][2 * half + i] * weight;
                            }
                        }
                    }
                }
            }
        }
        __syncthreads();
        const float v_scale = (CACHE != CACHE_AUTO && p.v_scale != nullptr) ? *p.v_scale : 1.f;
        for (int index = threadIdx.x; index < num_heads * (HEAD_DIM / 2); index += NUM_THREADS) {
            const int head = index / (HEAD_DIM / 2), dim = 2 * (index % (HEAD_DIM / 2));
            float total_max = warp_max[0][head];
#pragma unroll
            for (int w = 1; w < NUM_WARPS; ++w) total_max = fmaxf(total_max, warp_max[w][head]);
            float sum = 0.f, x = 0.f, y = 0.f;
#pragma unroll
            for (int w = 0; w < NUM_WARPS; ++w) {
                sum += total_max == -INFINITY ? 0.f : warp_sum[w][head] * exp2_fast(warp_max[w][head] - total_max);
                const float2 pair = *reinterpret_cast<const float2*>(partial + (w * NUM_HEADS + head) * HEAD_DIM + dim);
                x += pair.x, y += pair.y;
            }
            const float norm = sum > 0.f ? v_scale / sum : 0.f;
            x *= norm, y *= norm;
            if (p.partial_out == nullptr) {
                T* row = static_cast<T*>(p.out) + seq * p.out_stride + static_cast<int64_t>(first_head + head) * HEAD_DIM;
                *reinterpret_cast<uint32_t*>(row + dim) = Scalar<T>::pack(x, y);
            } else {
                const int64_t row = (static_cast<int64_t>(seq) * p.num_heads + first_head + head) * p.num_partitions + partition;
                if (p.partial_is_f32)
                    *reinterpret_cast<float2*>(static_cast<float*>(p.partial_out) + row * HEAD_DIM + dim) = make_float2(x, y);
                else
                    *reinterpret_cast<uint32_t*>(static_cast<T*>(p.partial_out) + row * HEAD_DIM + dim) = Scalar<T>::pack(x, y);
                if (dim == 0) {
                    p.max_logits[row] = total_max * LN2;
                    p.exp_sums[row] = sum;
                }
            }
        }
    }
};

template <typename T, int CACHE, int HEAD_DIM, bool CLASSIC, int NUM_GROUPS, bool IS_DEEP>
__global__ void __launch_bounds__(NUM_THREADS, NUM_GROUPS * HEAD_DIM <= 128 && !IS_DEEP ? 4 : 1) attend(const __grid_constant__ Params p) {
    Kernel<T, CACHE, HEAD_DIM, CLASSIC, NUM_GROUPS, IS_DEEP>::run(p);
}

// m = max m_j, L = sum l_j exp(m_j - m), O = sum O_j l_j exp(m_j - m) / L. One block per (query head, sequence).
constexpr int REDUCE_WARPS = 4;
constexpr int MAX_REDUCE_PARTITIONS = 2048;

template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(32 * REDUCE_WARPS) reduce(const __grid_constant__ Params p) {
    __shared__ float weights[MAX_REDUCE_PARTITIONS];
    __shared__ float warp_value[REDUCE_WARPS];
    __shared__ float partial[REDUCE_WARPS][HEAD_DIM];
    const int head = blockIdx.x, seq = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    allow_dependent_launch();
    wait_for_previous_kernel();
    const int seq_len = min(p.seq_lens[seq], p.max_context);
    const int partition_size = partition_size_of(p, seq_len);
    const int num_partitions = min((seq_len + partition_size - 1) / partition_size, p.num_partitions);
    const int64_t first = (static_cast<int64_t>(seq) * p.num_heads + head) * p.num_partitions;

    float largest = -INFINITY;
    for (int i = threadIdx.x; i < num_partitions; i += 32 * REDUCE_WARPS) {
        weights[i] = p.max_logits[first + i];
        largest = fmaxf(largest, weights[i]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
    if (lane == 0) warp_value[warp] = largest;
    __syncthreads();
    largest = fmaxf(fmaxf(warp_value[0], warp_value[1]), fmaxf(warp_value[2], warp_value[3]));
    __syncthreads();
    float sum = 0.f;
    for (int i = threadIdx.x; i < num_partitions; i += 32 * REDUCE_WARPS) {
        const float weight = weights[i] == -INFINITY ? 0.f : p.exp_sums[first + i] * exp2_fast((weights[i] - largest) * LOG2E);
        weights[i] = weight;
        sum += weight;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) warp_value[warp] = sum;
    __syncthreads();
    sum = warp_value[0] + warp_value[1] + warp_value[2] + warp_value[3];
    const float norm = sum > 0.f ? 1.f / sum : 0.f;

    constexpr int ITEMS = (HEAD_DIM + 63) / 64;  // pairs a lane owns
    float2 total[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) total[i] = make_float2(0.f, 0.f);
#pragma unroll 4
    for (int j = warp; j < num_partitions; j += REDUCE_WARPS) {
        const float weight = weights[j];
        if (weight == 0.f) continue;  // such a partition wrote no output
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int dim = 2 * (lane + 32 * i);
            if (HEAD_DIM % 64 != 0 && dim >= HEAD_DIM) continue;
            float2 pair = p.partial_is_f32
                              ? *reinterpret_cast<const float2*>(static_cast<const float*>(p.partial_out) + (first + j) * HEAD_DIM + dim)
                              : Scalar<T>::unpack(*reinterpret_cast<const uint32_t*>(static_cast<const T*>(p.partial_out) + (first + j) * HEAD_DIM + dim));
            total[i].x += weight * pair.x;
            total[i].y += weight * pair.y;
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int dim = 2 * (lane + 32 * i);
        if (HEAD_DIM % 64 != 0 && dim >= HEAD_DIM) continue;
        partial[warp][dim] = total[i].x, partial[warp][dim + 1] = total[i].y;
    }
    __syncthreads();
    for (int pair = threadIdx.x; pair < HEAD_DIM / 2; pair += 32 * REDUCE_WARPS) {
        float x = 0.f, y = 0.f;
#pragma unroll
        for (int w = 0; w < REDUCE_WARPS; ++w) x += partial[w][2 * pair], y += partial[w][2 * pair + 1];
        T* row = static_cast<T*>(p.out) + seq * p.out_stride + static_cast<int64_t>(head) * HEAD_DIM;
        *reinterpret_cast<uint32_t*>(row + 2 * pair) = Scalar<T>::pack(x * norm, y * norm);
    }
}

}  // namespace paged_attention
