// What every launcher shares. A launcher is an extern "C" function of raw pointers that returns nullptr or an error text.
#pragma once
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

static inline const char* last_error() {
    cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
