// How one token's K and V get into the cache: number types, FP8, and the two layouts. Used by cache_ops.cuh and rotary_embedding.cuh.
#pragma once
#include "launch.cuh"

namespace kv_write {

// Kinds of cache: 0 holds the model's own type.
constexpr int FP8_E4M3 = 1, FP8_E5M2 = 2;

template <typename T, int N> struct alignas(sizeof(T) * N) Pack { T items[N]; };

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T> __device__ inline T from_float(float x);
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

template <typename T, int KIND> struct Stored { typedef uint8_t type; };
template <typename T> struct Stored<T, 0> { typedef T type; };

// Saturates to the largest finite value; NaN stays NaN. Divides rather than multiplying by an inverse: same bits as the reference.
template <typename T, int KIND> __device__ inline typename Stored<T, KIND>::type to_stored(T x, float scale) {
    if constexpr (KIND == 0) return x;
    else return (uint8_t)__nv_cvt_float_to_fp8(__fdiv_rn(to_float(x), scale), __NV_SATFINITE, KIND == FP8_E4M3 ? __NV_E4M3 : __NV_E5M2);
}

// Where K and V of a layer stand. Strides in elements. x: items of a head held together in the classic K layout, 0 in the engine's.
struct Cache {
    void *key, *value;
    const float *k_scale, *v_scale;  // null: 1
    int64_t k_block_stride, k_head_stride, v_block_stride, v_head_stride;
    int64_t num_slots;
    int block_size, x;
};

// Slots that are negative (padding) or past the cache are not written.
__device__ inline bool is_valid(const Cache& cache, int64_t slot) { return slot >= 0 && slot < cache.num_slots; }

template <typename T, int KIND, int N> __device__ inline Pack<typename Stored<T, KIND>::type, N> to_stored(const Pack<T, N>& source, float scale) {
    Pack<typename Stored<T, KIND>::type, N> result;
#pragma unroll
    for (int i = 0; i < N; i++) result.items[i] = to_stored<T, KIND>(source.items[i], scale);
    return result;
}

// N items from item `first` of a head on; N divides x.
template <typename T, int KIND, int N>
__device__ inline void write_key(const Cache& cache, int64_t block, int offset, int head, int head_dim, int first, const Pack<T, N>& key, float scale) {
    typedef typename Stored<T, KIND>::type C;
    C* to = (C*)cache.key + block * cache.k_block_stride + head * cache.k_head_stride;
    to += cache.x ? ((int64_t)(first / cache.x) * cache.block_size + offset) * cache.x + first % cache.x : (int64_t)offset * head_dim + first;
    *(Pack<C, N>*)to = to_stored<T, KIND, N>(key, scale);
}

template <typename T, int KIND, int N>
__device__ inline void write_value(const Cache& cache, int64_t block, int offset, int head, int head_dim, int first, const Pack<T, N>& value, float scale) {
    typedef typename Stored<T, KIND>::type C;
    C* to = (C*)cache.value + block * cache.v_block_stride + head * cache.v_head_stride;
    Pack<C, N> stored = to_stored<T, KIND, N>(value, scale);
    if (cache.x) {
#pragma unroll
        for (int i = 0; i < N; i++) to[(int64_t)(first + i) * cache.block_size + offset] = stored.items[i];
    } else {
        *(Pack<C, N>*)(to + (int64_t)offset * head_dim + first) = stored;
    }
}

// ---- on the host: may packs of N items be used? ------------------------------------------------------------------------
template <typename... Values> static inline bool divides(int64_t n, Values... values) { return (((int64_t)values % n == 0) && ...); }

static inline bool takes_packs(const Cache& cache, int n, int stored_size) {
    return divides(n, cache.k_block_stride, cache.k_head_stride, cache.v_block_stride, cache.v_head_stride, cache.x) &&
           divides(n * stored_size, cache.key, cache.value);
}

}  // namespace kv_write
