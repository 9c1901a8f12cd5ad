// Launchers of the sampling kernels. dtype: 0 = fp32, 1 = fp16, 2 = bf16.
#include "launch.cuh"
#include "sampling.cuh"

using namespace sampling;

namespace {

int segment_size_of(int size) {
    const int64_t unit = (int64_t)kStride * kCapacity;
    return (int)((size + unit - 1) / unit) * kStride;
}

// As many blocks a row as fill the device with `resident` blocks, while each still has a few segments to read.
int num_slices_of(int64_t num_rows, int size, int resident, int max_slices) {
    int device = 0, has_clusters = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&has_clusters, cudaDevAttrClusterLaunch, device);
    int num_slices = has_clusters ? max_slices : 1;
    while (num_slices > 1 && (num_rows * num_slices > resident || size < num_slices * 4 * kStride)) num_slices /= 2;
    return num_slices;
}

template <typename... Parameters, typename... Arguments>
const char* launch_clusters(void (*kernel)(Parameters...), int64_t num_rows, int num_slices, int num_threads, cudaStream_t stream, Arguments... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(num_rows * num_slices));
    config.blockDim = dim3((unsigned)num_threads);
    config.stream = stream;
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = (unsigned)num_slices;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.attrs = &cluster;
    config.numAttrs = num_slices > 1 ? 1 : 0;
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
    const char* const remembered = last_error();  // forgotten with this, or a launch that is tried next would seem to have failed too
    return error == cudaSuccess ? remembered : cudaGetErrorString(error);
}

template <typename T>
const char* sample_rows(const void* logits, int64_t row_stride, int64_t num_rows, int size, const int64_t* parameters, const int32_t* table,
                        int64_t* token_ids, int num_processors, cudaStream_t stream) {
    return launch_clusters(sample_kernel<T>, num_rows, num_slices_of(num_rows, size, 2 * num_processors, kMaxSlices), kThreads, stream, (const T*)logits,
                           row_stride, size, segment_size_of(size), parameters, table, token_ids);
}

template <typename T>
const char* greedy_rows(const void* logits, int64_t row_stride, int64_t num_rows, int size, int64_t* token_ids, int num_processors,
                        cudaStream_t stream) {
    const int segment_size = segment_size_of(size);
    const auto launch = [&](int max_slices) {
        const int num_slices = num_slices_of(num_rows, size, 3 * num_processors, max_slices);
        // Twice the threads where each block gets a multiprocessor to itself. Clusters do not fill the last few of a GPU's groups of them.
        const int num_warps = num_rows * num_slices <= num_processors * 3 / 4 ? 32 : 16;
        const auto kernel = num_warps == 32 ? greedy_kernel<T, 32> : greedy_kernel<T, 16>;
        if (num_slices > kMaxSlices && cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess) {
            return last_error();
        }
        return launch_clusters(kernel, num_rows, num_slices, num_warps * 32, stream, (const T*)logits, row_stride, size, segment_size, token_ids);
    };
    // A few rows: as wide a cluster as there may be, so that all of a row is on its way at once. A part of a GPU may have no room for it.
    if (num_rows * kMaxGreedySlices <= num_processors / 2 && launch(kMaxGreedySlices) == nullptr) return nullptr;
    return launch(kMaxSlices);
}

template <typename T>
const char* logprob_rows(const void* logits, int64_t row_stride, int64_t num_rows, int size, const int64_t* rows, const int64_t* token_ids, int64_t count, int num_top,
                         float* logprobs, int64_t* ranks, int64_t* top_ids, float* top_logprobs, cudaStream_t stream) {
    logprobs_kernel<T><<<(unsigned)count, kThreads, 0, stream>>>((const T*)logits, row_stride, num_rows, size, segment_size_of(size), rows,
                                                                 token_ids, num_top, logprobs, ranks, top_ids, top_logprobs);
    return last_error();
}

}  // namespace

EXPORT const char* sample_tokens(const void* logits, int dtype, int64_t row_stride, int64_t num_rows, int size, const int64_t* parameters,
                                 const int32_t* table, int64_t* token_ids, int num_processors, cudaStream_t stream) {
    switch (dtype) {
        case 0: return sample_rows<float>(logits, row_stride, num_rows, size, parameters, table, token_ids, num_processors, stream);
        case 1: return sample_rows<__half>(logits, row_stride, num_rows, size, parameters, table, token_ids, num_processors, stream);
        case 2: return sample_rows<__nv_bfloat16>(logits, row_stride, num_rows, size, parameters, table, token_ids, num_processors, stream);
        default: return "sample_tokens: unknown dtype";
    }
}

EXPORT const char* greedy_tokens(const void* logits, int dtype, int64_t row_stride, int64_t num_rows, int size, int64_t* token_ids,
                                 int num_processors, cudaStream_t stream) {
    switch (dtype) {
        case 0: return greedy_rows<float>(logits, row_stride, num_rows, size, token_ids, num_processors, stream);
        case 1: return greedy_rows<__half>(logits, row_stride, num_rows, size, token_ids, num_processors, stream);
        case 2: return greedy_rows<__nv_bfloat16>(logits, row_stride, num_rows, size, token_ids, num_processors, stream);
        default: return "greedy_tokens: unknown dtype";
    }
}

EXPORT const char* token_logprobs(const void* logits, int dtype, int64_t row_stride, int64_t num_rows, int size, const int64_t* rows,
                                  const int64_t* token_ids, int64_t count, int num_top, float* logprobs, int64_t* ranks, int64_t* top_ids,
                                  float* top_logprobs, cudaStream_t stream) {
    const auto launch = dtype == 0 ? logprob_rows<float> : dtype == 1 ? logprob_rows<__half> : dtype == 2 ? logprob_rows<__nv_bfloat16> : nullptr;
    if (launch == nullptr) return "token_logprobs: unknown dtype";
    return launch(logits, row_stride, num_rows, size, rows, token_ids, count, num_top, logprobs, ranks, top_ids, top_logprobs, stream);
}

EXPORT const char* record_tokens(uint32_t* history, int64_t slot_stride, int64_t num_slots, int size, const int64_t* slots, const int64_t* token_ids,
                                 int64_t count, int is_prompt, cudaStream_t stream) {
    record_tokens_kernel<<<(unsigned)((count + 255) / 256), 256, 0, stream>>>(history, slot_stride, num_slots, size, slots, token_ids, count,
                                                                             is_prompt != 0);
    return last_error();
}

EXPORT const char* apply_penalties(float* logits, int64_t row_stride, int64_t num_rows, int size, const uint32_t* history, int64_t slot_stride,
                                   int64_t num_slots, const int64_t* slots, const float* penalties, cudaStream_t stream) {
    const dim3 grid((unsigned)((size + 255) / 256), (unsigned)num_rows);
    apply_penalties_kernel<<<grid, 256, 0, stream>>>(logits, row_stride, size, history, slot_stride, num_slots, slots, penalties);
    return last_error();
}

EXPORT const char* apply_token_bias(float* logits, int64_t row_stride, int64_t num_rows, int size, const int64_t* rows, const int64_t* token_ids,
                                    const float* values, int64_t count, cudaStream_t stream) {
    apply_token_bias_kernel<<<(unsigned)((count + 255) / 256), 256, 0, stream>>>(logits, row_stride, num_rows, size, rows, token_ids, values, count);
    return last_error();
}

EXPORT const char* apply_token_mask(float* logits, int64_t row_stride, int64_t num_rows, int size, const int64_t* rows, const uint32_t* masks,
                                    int64_t num_words, int64_t num_masks, cudaStream_t stream) {
    const dim3 grid((unsigned)((size + 255) / 256), (unsigned)num_masks);
    apply_token_mask_kernel<<<grid, 256, 0, stream>>>(logits, row_stride, num_rows, size, rows, masks, num_words);
    return last_error();
}
