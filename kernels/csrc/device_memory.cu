// Memory that a GPU shares with the host and with other processes: pinned host memory, CUDA IPC.
#include <cuda.h>
#include "launch.cuh"

// Errors are taken back: what a caller survives must not be reported by the next kernel's launch.
static const char* message_of(cudaError_t error) {
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

EXPORT const char* pin_host_memory(void* address, int64_t bytes, int is_read_only) {
    return message_of(cudaHostRegister(address, bytes, is_read_only ? cudaHostRegisterReadOnly : cudaHostRegisterDefault));
}

EXPORT const char* unpin_host_memory(void* address) { return message_of(cudaHostUnregister(address)); }

// The handle of the allocation that holds `address`, and how far into it that is.
EXPORT const char* export_device_memory(const void* address, int device, char* handle, int64_t* offset) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess) error = cudaFree(nullptr);  // the driver's own calls need the context, which a new thread has not
    if (error != cudaSuccess) return message_of(error);
    error = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || function == nullptr) return "the driver has no cuMemGetAddressRange";
    CUdeviceptr base = 0;
    size_t bytes = 0;
    if (((CUresult(*)(CUdeviceptr*, size_t*, CUdeviceptr))function)(&base, &bytes, (CUdeviceptr)address) != CUDA_SUCCESS)
        return "this is no memory of a GPU";
    static_assert(sizeof(cudaIpcMemHandle_t) == 64, "the handle has 64 bytes");
    error = cudaIpcGetMemHandle((cudaIpcMemHandle_t*)handle, (void*)base);
    *offset = (int64_t)((CUdeviceptr)address - base);
    return message_of(error);
}

// Maps it on GPU `device`, which may be another than the one it lies on.
EXPORT const char* open_device_memory(const char* handle, int device, void** address) {
    cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess) error = cudaIpcOpenMemHandle(address, *(const cudaIpcMemHandle_t*)handle, cudaIpcMemLazyEnablePeerAccess);
    return message_of(error);
}

EXPORT const char* close_device_memory(void* address, int device) {
    cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess) error = cudaIpcCloseMemHandle(address);
    return message_of(error);
}
