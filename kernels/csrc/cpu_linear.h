// What cpu_linear.cpp is called with.
#pragma once
#include <stdint.h>

#include "cpu_thread_pool.h"

// Mirrored field by field in kernels/cpu_linear.py.
struct Weight {
    char* panels;
    int64_t num_outputs, num_inputs, format;
    int64_t is_int16;  // whether inputs of quantized weights are rounded to 16 bits
};
struct LinearArguments {
    const Weight* weight;
    const float* x;     // [num_rows, num_inputs]
    const float* bias;  // [num_outputs] or null
    float* out;         // [num_rows, num_outputs]
    RunOnThreads run_on_threads;
    int64_t num_rows, x_stride, out_stride, num_threads;
    int64_t is_added;   // to what `out` holds
};
