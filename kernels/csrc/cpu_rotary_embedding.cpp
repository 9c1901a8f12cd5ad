// Rotates query and key heads in place and writes key and value into the cache, on the CPU.
// Macro: ELEMENT (float, bf16, fp16: type of everything but the tables). Plain loops: the compiler vectorises them.
#include <stdint.h>

#include <algorithm>
#include <atomic>

#include "cpu_numbers.h"
#include "cpu_rotary_embedding.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

typedef ELEMENT E;
typedef RotaryArguments<E> Arguments;

static void rotate(E* __restrict__ head, const float* __restrict__ cos, const float* __restrict__ sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = to_float(head[i]), b = to_float(head[half + i]);
        from_float(a * cos[i] - b * sin[i], head + i);
        from_float(b * cos[i] + a * sin[i], head + half + i);
    }
}

struct Tokens {
    const Arguments& a;
    std::atomic<int64_t> next{0};
};

static const int64_t kTokensAtOnce = 32;

static void one_token(const Arguments& a, int64_t token) {
    const int64_t half = a.rotary_dim / 2;
    const float *cos = a.cos + a.positions[token] * half, *sin = a.sin + a.positions[token] * half;
    for (int64_t h = 0; h < a.num_heads; h++) rotate(a.query + token * a.query_stride + h * a.query_head_stride, cos, sin, half);
    for (int64_t h = 0; h < a.num_kv_heads; h++) rotate(a.key + token * a.key_stride + h * a.key_head_stride, cos, sin, half);
    const int64_t slot = token < a.num_slot_entries ? a.slots[token] : -1;
    if (slot < 0) return;
    const int64_t block = slot / a.block_size, offset = slot % a.block_size;
    for (int64_t h = 0; h < a.num_kv_heads; h++) {
        memcpy(a.key_cache + block * a.k_block_stride + h * a.k_head_stride + offset * a.head_dim,
               a.key + token * a.key_stride + h * a.key_head_stride, a.head_dim * sizeof(E));
        memcpy(a.value_cache + block * a.v_block_stride + h * a.v_head_stride + offset * a.head_dim,
               a.value + token * a.value_stride + h * a.value_head_stride, a.head_dim * sizeof(E));
    }
}

static void work(void* data) {
    Tokens& tokens = *(Tokens*)data;
    for (int64_t first; (first = tokens.next.fetch_add(kTokensAtOnce, std::memory_order_relaxed)) < tokens.a.num_tokens;)
        for (int64_t token = first; token < std::min(tokens.a.num_tokens, first + kTokensAtOnce); token++) one_token(tokens.a, token);
}

// Returns -1, or the first token whose position or slot does not exist; then nothing has been done.
EXPORT int64_t cpu_rotary_embedding_and_cache(const Arguments* arguments) {
    const Arguments& a = *arguments;
    for (int64_t token = 0; token < a.num_tokens; token++) {
        if (a.positions[token] < 0 || a.positions[token] >= a.max_positions) return token;
        if (token < a.num_slot_entries && (a.slots[token] < -1 || a.slots[token] >= a.num_slots)) return token;
    }
    Tokens tokens{a};
    if (a.num_tokens <= kTokensAtOnce) work(&tokens);
    else a.run_on_threads(work, &tokens, (int)a.num_threads);
    return -1;
}
