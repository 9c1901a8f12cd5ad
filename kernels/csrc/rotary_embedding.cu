// Launchers of rotary_embedding.cuh.
#include "rotary_embedding.cuh"

using namespace rotary_embedding;

template <typename T, int KIND, int N> static const char* launch(const Tokens& tokens, const Cache& cache, cudaStream_t stream) {
    const int work = (tokens.num_heads + tokens.num_kv_heads) * (tokens.rotary_dim / 2 / N);
    const int threads = work >= 512 ? 512 : work <= 32 ? 32 : (work + 31) / 32 * 32;
    return launch_early(rotate<T, KIND, N>, dim3(tokens.num_tokens), dim3(threads), 0, stream, tokens, cache);
}

template <typename T, int KIND> static const char* launch_packed(const Tokens& tokens, const Cache& cache, cudaStream_t stream) {
    constexpr int N = 16 / sizeof(T);
    bool is_aligned = divides(N, tokens.rotary_dim / 2, tokens.head_dim, tokens.query_stride, tokens.query_head_stride, tokens.key_stride,
                                  tokens.key_head_stride) &&
                      divides(16, tokens.query, tokens.key) &&
                      divides(4 * N, tokens.cos, tokens.sin);
    if (tokens.value != nullptr)
        is_aligned = is_aligned && takes_packs(cache, N, sizeof(typename Stored<T, KIND>::type)) &&
                     divides(N, tokens.value_stride, tokens.value_head_stride) && divides(16, tokens.value);
    return is_aligned ? launch<T, KIND, N>(tokens, cache, stream) : launch<T, KIND, 1>(tokens, cache, stream);
}

template <typename T> static const char* launch_kind(const Tokens& tokens, const Cache& cache, int kind, cudaStream_t stream) {
    if (kind == FP8_E4M3) return launch_packed<T, FP8_E4M3>(tokens, cache, stream);
    if (kind == FP8_E5M2) return launch_packed<T, FP8_E5M2>(tokens, cache, stream);
    return launch_packed<T, 0>(tokens, cache, stream);
}

// scalar: 0 half, 1 bfloat16, 2 float. kind: of cache, see kv_write.cuh. Without a value, `cache` may be all zeros.
EXPORT const char* launch_rotary_embedding(const Tokens* tokens, const Cache* cache, int scalar, int kind, cudaStream_t stream) {
    if (tokens->num_tokens == 0) return nullptr;
    if (scalar == 0) return launch_kind<__half>(*tokens, *cache, kind, stream);
    if (scalar == 1) return launch_kind<__nv_bfloat16>(*tokens, *cache, kind, stream);
    return launch_kind<float>(*tokens, *cache, kind, stream);
}

EXPORT int rotary_embedding_struct_bytes(int which) { return which == 0 ? sizeof(Tokens) : sizeof(Cache); }
