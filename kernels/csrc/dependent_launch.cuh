// Programmatic dependent launch: a kernel's blocks come in while the kernel before it in the stream still runs, and wait inside for its
// results. Known to sm_90 and newer; elsewhere kernels follow each other as ever.
#pragma once
#include <utility>
#include "launch.cuh"

// The next kernel's blocks may be brought in; it still waits for this one's results.
__device__ __forceinline__ void allow_dependent_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Before anything is read that a kernel of this stream may write, and before the first write: the one before may have come in early as well,
// so that even what stands two kernels back is certain only after this.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

constexpr int LAUNCH_ARCHS[] = {__CUDA_ARCH_LIST__};  // what this library is compiled for

// A kernel that calls wait_for_previous_kernel.
template <typename... Parameters, typename... Arguments>
static const char* launch_early(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = LAUNCH_ARCHS[0] >= 900 ? 1 : 0;
    cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
