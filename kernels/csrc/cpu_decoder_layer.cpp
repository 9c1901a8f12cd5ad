// A decoder layer on the CPU in fp32 as one call of the kernels of the other libraries, in the order in which Python would call them one by
// one, with the same results bit for bit. At batch 1 what Python does between two kernels takes as long as many of them.
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "cpu_attention.h"
#include "cpu_linear.h"
#include "cpu_rotary_embedding.h"
#include "cpu_vectors.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t BLOCK_ROWS = 264;  // go through the feed-forward part at once: two blocks of cpu_linear.cpp

}  // namespace

// Mirrored field by field in kernels/cpu_decoder_layer.py.
struct Projection {  // the outputs of all weights side by side
    const Weight* const* weights;
    const float* const* biases;
    int64_t num_weights, num_outputs;
};
struct Norm {
    const float* weight;
    double eps;
};
struct DecoderLayer {
    const char* (*linear)(const LinearArguments*);
    const char* (*attention)(const AttentionArguments*);
    int64_t (*rotary_embedding_and_cache)(const RotaryArguments<float>*);
    void (*rms_norm)(const float*, int64_t, const float*, float, int64_t, int64_t, float*, RunOnThreads, int);
    void (*silu_and_mul)(const float*, int64_t, int64_t, int64_t, float*, RunOnThreads, int);
    RunOnThreads run_on_threads;
    Norm input_norm, post_attention_norm;
    Projection qkv, output, gate_up, down;
    const float *cos, *sin;  // [max_positions, rotary_dim / 2]
    float *key_cache, *value_cache;
    int64_t max_positions, rotary_dim, num_heads, num_kv_heads, head_dim, hidden_size, sliding_window;
    int64_t num_slots, block_size, cache_block_stride, cache_head_stride;
    double scale, soft_cap;
};
struct DecoderStep {
    float* x;    // [num_tokens, hidden_size], written over
    float* out;  // [num_rows, hidden_size]; x itself where all rows are wanted
    const int64_t *positions, *slots;
    const int64_t* rows;                  // [num_rows], or null: all
    const AttentionArguments* attention;  // what is known of the step
    int64_t num_tokens, num_rows, num_threads;
    int64_t wrong_token;  // out: the first whose position or slot does not exist, or -1
};

namespace {

struct Call {
    const DecoderLayer& layer;
    const DecoderStep& step;
    const char* message = nullptr;

    void norm(const Norm& norm, const float* x, int64_t num_rows, float* out) {
        layer.rms_norm(x, layer.hidden_size, norm.weight, (float)norm.eps, num_rows, layer.hidden_size, out, layer.run_on_threads, (int)step.num_threads);
    }
    void project(const Projection& projection, const float* x, int64_t num_rows, float* out, bool is_added) {
        for (int64_t i = 0; i < projection.num_weights && !message; i++) {
            const Weight* weight = projection.weights[i];
            const LinearArguments arguments{weight, x, projection.biases[i], out, layer.run_on_threads, num_rows, weight->num_inputs,
                                            projection.num_outputs, step.num_threads, is_added};
            message = layer.linear(&arguments);
            out += weight->num_outputs;
        }
    }
};

}  // namespace

EXPORT const char* cpu_decoder_layer(const DecoderLayer* decoder_layer, DecoderStep* decoder_step) {
    const DecoderLayer& layer = *decoder_layer;
    const DecoderStep& step = *decoder_step;
    Call call{layer, step};
    const int64_t d = layer.head_dim, query_size = layer.num_heads * d, key_size = layer.num_kv_heads * d, qkv_size = query_size + 2 * key_size;
    const int64_t inner_size = layer.down.weights[0]->num_inputs, block_rows = std::min(std::max(step.num_tokens, step.num_rows), BLOCK_ROWS);
    thread_local std::vector<float> memory;
    float* qkv = scratch(memory, (size_t)(step.num_tokens * (qkv_size + query_size) + block_rows * (layer.hidden_size + 3 * inner_size + query_size)));
    float *mixed = qkv + step.num_tokens * qkv_size, *normed = mixed + step.num_tokens * query_size;
    float *gate_up = normed + block_rows * layer.hidden_size, *activated = gate_up + block_rows * 2 * inner_size;
    float* wanted = activated + block_rows * inner_size;  // of `mixed`

    for (int64_t first = 0; first < step.num_tokens; first += BLOCK_ROWS) {
        const int64_t count = std::min(BLOCK_ROWS, step.num_tokens - first);
        call.norm(layer.input_norm, step.x + first * layer.hidden_size, count, normed);
        call.project(layer.qkv, normed, count, qkv + first * qkv_size, false);
    }
    RotaryArguments<float> rotary{};
    rotary.query = qkv, rotary.key = qkv + query_size, rotary.value = rotary.key + key_size;
    rotary.positions = step.positions, rotary.slots = step.slots, rotary.cos = layer.cos, rotary.sin = layer.sin;
    rotary.key_cache = layer.key_cache, rotary.value_cache = layer.value_cache, rotary.run_on_threads = layer.run_on_threads;
    rotary.query_stride = rotary.key_stride = rotary.value_stride = qkv_size;
    rotary.query_head_stride = rotary.key_head_stride = rotary.value_head_stride = d;
    rotary.k_block_stride = rotary.v_block_stride = layer.cache_block_stride;
    rotary.k_head_stride = rotary.v_head_stride = layer.cache_head_stride;
    rotary.max_positions = layer.max_positions, rotary.num_slots = layer.num_slots;
    rotary.num_tokens = rotary.num_slot_entries = step.num_tokens, rotary.num_threads = step.num_threads;
    rotary.num_heads = layer.num_heads, rotary.num_kv_heads = layer.num_kv_heads, rotary.head_dim = d;
    rotary.rotary_dim = layer.rotary_dim, rotary.block_size = layer.block_size;
    decoder_step->wrong_token = layer.rotary_embedding_and_cache(&rotary);
    if (call.message || step.wrong_token >= 0 || !step.num_rows) return call.message;

    AttentionArguments attention = *step.attention;
    attention.query = qkv, attention.key_cache = layer.key_cache, attention.value_cache = layer.value_cache, attention.out = mixed;
    attention.head_dim = d, attention.query_stride = qkv_size;
    attention.cache_block_stride = layer.cache_block_stride, attention.cache_head_stride = layer.cache_head_stride;
    attention.sliding_window = layer.sliding_window, attention.num_threads = step.num_threads;
    attention.scale = (float)layer.scale, attention.soft_cap = (float)layer.soft_cap;
    if ((call.message = layer.attention(&attention))) return call.message;

    float* x = step.out;
    for (int64_t i = 0; step.rows && i < step.num_rows; i++)
        memcpy(x + i * layer.hidden_size, step.x + step.rows[i] * layer.hidden_size, layer.hidden_size * sizeof(float));
    for (int64_t first = 0; first < step.num_rows; first += BLOCK_ROWS) {
        const int64_t count = std::min(BLOCK_ROWS, step.num_rows - first);
        for (int64_t i = 0; step.rows && i < count; i++)
            memcpy(wanted + i * query_size, mixed + step.rows[first + i] * query_size, query_size * sizeof(float));
        float* block = x + first * layer.hidden_size;
        call.project(layer.output, step.rows ? wanted : mixed + first * query_size, count, block, true);
        call.norm(layer.post_attention_norm, block, count, normed);
        call.project(layer.gate_up, normed, count, gate_up, false);
        layer.silu_and_mul(gate_up, 2 * inner_size, count, inner_size, activated, layer.run_on_threads, (int)step.num_threads);
        call.project(layer.down, activated, count, block, true);
    }
    return call.message;
}
