// Writing new K and V into the cache, and moving whole blocks.
#pragma once
#include "kv_write.cuh"

namespace cache_ops {
using namespace kv_write;

// Mirrored field by field in kernels/cache_ops.py. Strides in elements.
struct NewTokens {
    const void *key, *value;
    const int64_t* slots;
    int64_t key_stride, key_head_stride, value_stride, value_head_stride;
    int num_tokens, num_heads, head_dim;
};

// One thread block per entry of slot_mapping: rows of key past its end are never touched.
template <typename T, int KIND, int N> __global__ void reshape_and_cache(NewTokens tokens, Cache cache) {
    const int64_t token = blockIdx.x, slot = tokens.slots[token];
    if (!is_valid(cache, slot)) return;
    const int64_t block = slot / cache.block_size;
    const int offset = (int)(slot - block * cache.block_size);
    const float k_scale = cache.k_scale ? *cache.k_scale : 1.0f, v_scale = cache.v_scale ? *cache.v_scale : 1.0f;
    const T* key = (const T*)tokens.key + token * tokens.key_stride;
    const T* value = (const T*)tokens.value + token * tokens.value_stride;
    const int packs = tokens.head_dim / N;
    for (int i = threadIdx.x; i < tokens.num_heads * packs; i += blockDim.x) {
        const int head = i / packs, first = (i - head * packs) * N;
        const Pack<T, N> k = *(const Pack<T, N>*)(key + head * tokens.key_head_stride + first);
        const Pack<T, N> v = *(const Pack<T, N>*)(value + head * tokens.value_head_stride + first);
        write_key<T, KIND, N>(cache, block, offset, head, tokens.head_dim, first, k, k_scale);
        write_value<T, KIND, N>(cache, block, offset, head, tokens.head_dim, first, v, v_scale);
    }
}

// Rows of memory: row i is row ids[i * id_step] of `data`, or row i itself where ids is null. Mirrored in kernels/cache_ops.py.
struct Rows {
    char* data;
    const int64_t* ids;
    int64_t stride_bytes, id_step, num_rows;
};

__device__ inline int64_t row_of(const Rows& rows, int64_t i) { return rows.ids ? rows.ids[i * rows.id_step] : i; }

constexpr int COPY_THREADS = 256, COPY_WORDS = 4;  // a thread block moves 16 KiB, all of it in flight at once

// Pairs of which one row does not exist are skipped.
template <typename Word> __global__ void __launch_bounds__(COPY_THREADS) copy_rows(Rows to, Rows from, int64_t row_words) {
    const int64_t to_row = row_of(to, blockIdx.x), from_row = row_of(from, blockIdx.x);
    if (to_row < 0 || to_row >= to.num_rows || from_row < 0 || from_row >= from.num_rows) return;
    Word* out = (Word*)(to.data + to_row * to.stride_bytes);
    const Word* in = (const Word*)(from.data + from_row * from.stride_bytes);
    const int64_t first = (int64_t)blockIdx.y * COPY_THREADS * COPY_WORDS + threadIdx.x;
    Word words[COPY_WORDS];
#pragma unroll
    for (int i = 0; i < COPY_WORDS; i++)
        if (first + i * COPY_THREADS < row_words) words[i] = in[first + i * COPY_THREADS];
#pragma unroll
    for (int i = 0; i < COPY_WORDS; i++)
        if (first + i * COPY_THREADS < row_words) out[first + i * COPY_THREADS] = words[i];
}

}  // namespace cache_ops
