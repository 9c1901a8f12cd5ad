// Rotates query and key heads in place (Su et al. 2021, pairs (i, i + rotary_dim / 2)) and writes key and value into the cache.
#pragma once
#include "dependent_launch.cuh"
#include "kv_write.cuh"

namespace rotary_embedding {
using namespace kv_write;

// Mirrored field by field in kernels/rotary_embedding.py. Strides in elements.
struct Tokens {
    void *query, *key;
    const void* value;         // null: nothing goes to the cache
    const int64_t* positions;  // [num_tokens]
    const int64_t* slots;      // [num_slot_entries], at most num_tokens
    const float *cos, *sin;    // [max_positions, rotary_dim / 2], contiguous
    int64_t query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride;
    int64_t max_positions;
    int num_tokens, num_slot_entries, num_heads, num_kv_heads, head_dim, rotary_dim;
};

// One thread block per token. Its work, one pack of N items at a time: pairs of packs of every query and key head, then what is not
// rotated of the key heads, then the values; the last two only where the token has a slot.
template <typename T, int KIND, int N> __global__ void rotate(Tokens tokens, Cache cache) {
    allow_dependent_launch();
    wait_for_previous_kernel();
    const int64_t token = blockIdx.x;
    const int64_t position = tokens.positions[token];
    const bool is_rotated = position >= 0 && position < tokens.max_positions;  // never a read past the tables
    const int64_t slot = tokens.value != nullptr && token < tokens.num_slot_entries ? tokens.slots[token] : -1;
    const bool is_kept = tokens.value != nullptr && is_valid(cache, slot);
    const int64_t block = is_kept ? slot / cache.block_size : 0;
    const int offset = is_kept ? (int)(slot - block * cache.block_size) : 0;
    const float k_scale = is_kept && cache.k_scale ? *cache.k_scale : 1.0f, v_scale = is_kept && cache.v_scale ? *cache.v_scale : 1.0f;

    const int half = tokens.rotary_dim / 2, pairs = half / N, d = tokens.head_dim;
    const int num_rotations = (tokens.num_heads + tokens.num_kv_heads) * pairs;
    for (int i = threadIdx.x; i < num_rotations; i += blockDim.x) {
        const int any_head = i / pairs, first = (i - any_head * pairs) * N;
        const bool is_key = any_head >= tokens.num_heads;
        const int head = is_key ? any_head - tokens.num_heads : any_head;
        T* row = is_key ? (T*)tokens.key + token * tokens.key_stride + head * tokens.key_head_stride
                        : (T*)tokens.query + token * tokens.query_stride + head * tokens.query_head_stride;
        Pack<T, N> low = *(const Pack<T, N>*)(row + first), high = *(const Pack<T, N>*)(row + half + first);
        if (is_rotated) {
            const Pack<float, N> cos = *(const Pack<float, N>*)(tokens.cos + position * half + first);
            const Pack<float, N> sin = *(const Pack<float, N>*)(tokens.sin + position * half + first);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float a = to_float(low.items[j]), b = to_float(high.items[j]), c = cos.items[j], s = sin.items[j];
                // Spelled out: contracted differently in two instantiations, fused and plain results would differ.
                low.items[j] = from_float<T>(__fmaf_rn(a, c, -__fmul_rn(b, s)));
                high.items[j] = from_float<T>(__fmaf_rn(b, c, __fmul_rn(a, s)));
            }
            *(Pack<T, N>*)(row + first) = low;
            *(Pack<T, N>*)(row + half + first) = high;
        }
        if (is_key && is_kept) {
            write_key<T, KIND, N>(cache, block, offset, head, d, first, low, k_scale);
            write_key<T, KIND, N>(cache, block, offset, head, d, half + first, high, k_scale);
        }
    }
    if (!is_kept) return;
    const int rest = (d - tokens.rotary_dim) / N;
    for (int i = threadIdx.x; i < tokens.num_kv_heads * rest; i += blockDim.x) {
        const int head = i / rest, first = tokens.rotary_dim + (i - head * rest) * N;
        const T* row = (const T*)tokens.key + token * tokens.key_stride + head * tokens.key_head_stride;
        write_key<T, KIND, N>(cache, block, offset, head, d, first, *(const Pack<T, N>*)(row + first), k_scale);
    }
    const int packs = d / N;
    for (int i = threadIdx.x; i < tokens.num_kv_heads * packs; i += blockDim.x) {
        const int head = i / packs, first = (i - head * packs) * N;
        const T* row = (const T*)tokens.value + token * tokens.value_stride + head * tokens.value_head_stride;
        write_value<T, KIND, N>(cache, block, offset, head, d, first, *(const Pack<T, N>*)(row + first), v_scale);
    }
}

}  // namespace rotary_embedding
