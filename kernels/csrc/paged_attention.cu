// Launchers of paged_attention.cuh for one head size, scalar type, cache type and layout: HEAD_SIZE, SCALAR (0 half, 1 bfloat16),
// KV_CACHE (0 as SCALAR, 1 FP8 E4M3, 2 FP8 E5M2), CLASSIC_LAYOUT (0 the engine's layout, 1 the classic ones).
#include <atomic>
#include <type_traits>
#include "paged_attention.cuh"

using namespace paged_attention;
using T = std::conditional_t<SCALAR == 0, __half, __nv_bfloat16>;

constexpr int MAX_DEVICES = 64;

// The dynamic shared memory that a block of `kernel` may ask for on a device.
static int max_shared_bytes(const void* kernel, int device) {
    int bytes = 0;
    cudaFuncAttributes attributes = {};
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaFuncGetAttributes(&attributes, kernel);
    return bytes - static_cast<int>(attributes.sharedSizeBytes);
}

// Asking for more shared memory than a block needs keeps the number of blocks on a multiprocessor down.
static int shared_bytes_for(int needed, int blocks_per_multiprocessor, int bytes_per_multiprocessor, int most) {
    const int wanted = bytes_per_multiprocessor / (blocks_per_multiprocessor + 1) + 1;
    return needed > wanted ? needed : wanted < most ? wanted : most;
}

template <int NUM_GROUPS, bool IS_DEEP>
static const char* attend_with(const Params& p, int blocks_per_multiprocessor, cudaStream_t stream) {
    auto* kernel = attend<T, KV_CACHE, HEAD_SIZE, CLASSIC_LAYOUT, NUM_GROUPS, IS_DEEP>;
    constexpr int needed = Shape<T, KV_CACHE, HEAD_SIZE, CLASSIC_LAYOUT, IS_DEEP>::SHARED_BYTES;
    static std::atomic<int> most[MAX_DEVICES], per_multiprocessor[MAX_DEVICES];  // bytes; 0: the kernel is not prepared for the device
    int device = 0;
    cudaGetDevice(&device);
    if (device >= MAX_DEVICES) return "more than 64 GPUs in a process";
    if (most[device] == 0) {
        const int bytes = max_shared_bytes(reinterpret_cast<const void*>(kernel), device);
        int all = 0;
        cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
        if (bytes >= needed) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes_for(needed, 1, all, bytes));
        if (const char* error = last_error()) return error;
        per_multiprocessor[device] = all;
        most[device] = bytes;
    }
    if (most[device] < needed) {
        if constexpr (IS_DEEP) return attend_with<NUM_GROUPS, false>(p, blocks_per_multiprocessor, stream);
        return "this GPU has too little shared memory for this head size";
    }
    dim3 grid(p.num_kv_heads * p.groups_per_kv_head, p.num_seqs, p.num_partitions);
    const int shared_bytes = shared_bytes_for(needed, blocks_per_multiprocessor, per_multiprocessor[device], most[device]);
    // Not early: blocks that come in while the kernel before still runs crowd on the multiprocessors that it leaves free.
    kernel<<<grid, NUM_THREADS, shared_bytes, stream>>>(p);
    return last_error();
}

static const char* reduce_partitions(const Params& p, cudaStream_t stream) {
    if (p.num_partitions > MAX_REDUCE_PARTITIONS) return "too many partitions; use a larger partition size";
    return launch_early(reduce<T, HEAD_SIZE>, dim3(p.num_heads, p.num_seqs), dim3(32 * REDUCE_WARPS), 0, stream, p);
}

// V1 where partial_out is null, else V2: the partitions and their reduction. groups_per_kv_head = ceil(group_size / (8 * num_groups)).
EXPORT const char* launch_paged_attention(const Params* p, int num_groups, int is_deep, int blocks_per_multiprocessor, cudaStream_t stream) {
    auto* attend_as = num_groups == 1 ? (is_deep ? attend_with<1, true> : attend_with<1, false>) : (is_deep ? attend_with<2, true> : attend_with<2, false>);
    const char* error = attend_as(*p, blocks_per_multiprocessor, stream);
    if (error != nullptr || p->partial_out == nullptr) return error;
    return reduce_partitions(*p, stream);
}

EXPORT int paged_attention_params_bytes() { return sizeof(Params); }
