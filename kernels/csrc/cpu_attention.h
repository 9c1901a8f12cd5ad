// What cpu_attention.cpp is called with.
#pragma once
#include <stdint.h>

#include "cpu_thread_pool.h"

// Mirrored field by field in kernels/cpu_attention.py.
struct AttentionArguments {
    const void *query, *key_cache, *value_cache;
    void* out;
    const int32_t* blocks;        // all block tables, one after the other
    const int64_t* first_block;   // [num_seqs] where each table begins in `blocks`
    const int64_t* query_start;   // [num_seqs] first row of each in the query
    const int64_t* query_lens;    // [num_seqs]
    const int64_t* seq_lens;      // [num_seqs]
    const float* alibi_slopes;    // [num_heads] or null
    RunOnThreads run_on_threads;
    int64_t num_seqs, num_heads, num_kv_heads, head_dim, block_size;
    int64_t query_stride;                        // elements between tokens; heads are head_dim apart
    int64_t cache_block_stride, cache_head_stride;  // elements, the same for K and V
    int64_t sliding_window;                      // keys a query sees, itself included; 0: all
    int64_t num_threads;
    float scale, soft_cap;                       // soft_cap 0: none
};
