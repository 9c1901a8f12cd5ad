// Launchers of cache_ops.cuh.
#include "cache_ops.cuh"

using namespace cache_ops;

template <typename T, int KIND, int N> static const char* write(const NewTokens& tokens, const Cache& cache, cudaStream_t stream) {
    const int work = tokens.num_heads * (tokens.head_dim / N);
    const int threads = work >= 512 ? 512 : (work + 31) / 32 * 32;
    reshape_and_cache<T, KIND, N><<<tokens.num_tokens, threads, 0, stream>>>(tokens, cache);
    return last_error();
}

template <typename T, int KIND> static const char* write_packed(const NewTokens& tokens, const Cache& cache, cudaStream_t stream) {
    constexpr int N = 16 / sizeof(T);
    const bool is_aligned = takes_packs(cache, N, sizeof(typename Stored<T, KIND>::type)) &&
                            divides(N, tokens.head_dim, tokens.key_stride, tokens.key_head_stride, tokens.value_stride, tokens.value_head_stride) &&
                            divides(16, tokens.key, tokens.value);
    return is_aligned ? write<T, KIND, N>(tokens, cache, stream) : write<T, KIND, 1>(tokens, cache, stream);
}

template <typename T> static const char* write_kind(const NewTokens& tokens, const Cache& cache, int kind, cudaStream_t stream) {
    if (kind == FP8_E4M3) return write_packed<T, FP8_E4M3>(tokens, cache, stream);
    if (kind == FP8_E5M2) return write_packed<T, FP8_E5M2>(tokens, cache, stream);
    return write_packed<T, 0>(tokens, cache, stream);
}

// scalar: 0 half, 1 bfloat16, 2 float. kind: of cache, see kv_write.cuh.
EXPORT const char* launch_reshape_and_cache(const NewTokens* tokens, const Cache* cache, int scalar, int kind, cudaStream_t stream) {
    if (tokens->num_tokens == 0) return nullptr;
    if (scalar == 0) return write_kind<__half>(*tokens, *cache, kind, stream);
    if (scalar == 1) return write_kind<__nv_bfloat16>(*tokens, *cache, kind, stream);
    return write_kind<float>(*tokens, *cache, kind, stream);
}

template <typename Word> static const char* copy(const Rows& to, const Rows& from, int64_t num_pairs, int64_t row_bytes, cudaStream_t stream) {
    const int64_t row_words = row_bytes / (int64_t)sizeof(Word), per_block = COPY_THREADS * COPY_WORDS;
    const int64_t parts = (row_words + per_block - 1) / per_block;
    if (parts > 65535) return "copy_rows: a block of this size is not supported";
    copy_rows<Word><<<dim3((unsigned)num_pairs, (unsigned)parts), COPY_THREADS, 0, stream>>>(to, from, row_words);
    return last_error();
}

EXPORT const char* launch_copy_rows(const Rows* to, const Rows* from, int64_t num_pairs, int64_t row_bytes, cudaStream_t stream) {
    if (num_pairs == 0 || row_bytes == 0) return nullptr;
    for (int64_t size : {16, 4}) {
        if (!divides(size, to->data, from->data, to->stride_bytes, from->stride_bytes, row_bytes)) continue;
        return size == 16 ? copy<uint4>(*to, *from, num_pairs, row_bytes, stream) : copy<uint32_t>(*to, *from, num_pairs, row_bytes, stream);
    }
    return copy<uint8_t>(*to, *from, num_pairs, row_bytes, stream);
}

// Between memories of any kind; pairs lies on the host. Neighbours that stay neighbours go in one copy.
EXPORT const char* launch_swap_rows(char* to, const char* from, const int64_t* pairs, int64_t num_pairs, int64_t row_bytes, cudaStream_t stream) {
    for (int64_t i = 0; i < num_pairs;) {
        int64_t n = 1;
        while (i + n < num_pairs && pairs[2 * (i + n)] == pairs[2 * i] + n && pairs[2 * (i + n) + 1] == pairs[2 * i + 1] + n) n++;
        cudaError_t error = cudaMemcpyAsync(to + pairs[2 * i + 1] * row_bytes, from + pairs[2 * i] * row_bytes, n * row_bytes, cudaMemcpyDefault, stream);
        if (error != cudaSuccess) return cudaGetErrorString(error);
        i += n;
    }
    return nullptr;
}

EXPORT int cache_ops_struct_bytes(int which) { return which == 0 ? sizeof(NewTokens) : which == 1 ? sizeof(Cache) : sizeof(Rows); }
