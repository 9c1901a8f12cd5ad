// What cpu_rotary_embedding.cpp is called with.
#pragma once
#include <stdint.h>

#include "cpu_thread_pool.h"

// Mirrored field by field in kernels/cpu_rotary_embedding.py. Strides in elements.
template <typename E> struct RotaryArguments {
    E *query, *key;
    const E* value;
    const int64_t *positions, *slots;  // slot -1: nothing is written
    const float *cos, *sin;            // [max_positions, rotary_dim / 2]
    E *key_cache, *value_cache;
    RunOnThreads run_on_threads;
    int64_t query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride;
    int64_t k_block_stride, k_head_stride, v_block_stride, v_head_stride;
    int64_t max_positions, num_slots, num_tokens, num_slot_entries, num_heads, num_kv_heads, head_dim, rotary_dim, block_size, num_threads;
};
