// Launcher of flash_attention_sm90.cuh for one head size and scalar type: HEAD_SIZE (64 or 128), SCALAR (0 half, 1 bfloat16).
#include <type_traits>
#include "flash_attention_sm90.cuh"

using namespace flash_attention;
using T = std::conditional_t<SCALAR == 0, __half, __nv_bfloat16>;

// One layer's K or V as [num_blocks][num_kv_heads][block_size][HEAD_SIZE], strides in items; boxes of 64 items x a block's rows.
static const char* describe(CUtensorMap* map, const void* cache, const Params& p, int64_t block_stride, int64_t head_stride) {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static Encode encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
        return reinterpret_cast<Encode>(function);
    }();
    if (encode == nullptr) return "the CUDA driver has no cuTensorMapEncodeTiled; CUDA 12 or newer is needed";
    cuuint64_t sizes[4] = {HEAD_SIZE, static_cast<cuuint64_t>(p.block_size), static_cast<cuuint64_t>(p.num_kv_heads),
                           static_cast<cuuint64_t>(p.num_blocks)};
    cuuint64_t strides[3] = {HEAD_SIZE * 2, static_cast<cuuint64_t>(head_stride) * 2, static_cast<cuuint64_t>(block_stride) * 2};
    cuuint32_t box[4] = {64, static_cast<cuuint32_t>(p.block_size < TILE_KEYS ? p.block_size : TILE_KEYS), 1, 1};
    cuuint32_t steps[4] = {1, 1, 1, 1};
    CUresult result = encode(map, SCALAR == 0 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(cache),
                             sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused the cache's shape or strides";
}

EXPORT const char* flash_attention_sm90(const Params* p, const void* key_cache, const void* value_cache, int64_t k_block_stride, int64_t k_head_stride,
                                        int64_t v_block_stride, int64_t v_head_stride, cudaStream_t stream) {
    alignas(64) CUtensorMap key_map, value_map;
    if (const char* error = describe(&key_map, key_cache, *p, k_block_stride, k_head_stride)) return error;
    if (const char* error = describe(&value_map, value_cache, *p, v_block_stride, v_head_stride)) return error;
    auto* kernel = attend<T, HEAD_SIZE>;
    constexpr int shared_bytes = sizeof(Shared<HEAD_SIZE>) + 1024;
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return cudaGetErrorString(error);
    int device = 0, num_multiprocessors = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
    const int num_items = p->num_kv_heads * p->num_seqs * p->max_tiles;
    kernel<<<min(num_items, num_multiprocessors), NUM_THREADS, shared_bytes, stream>>>(*p, key_map, value_map);
    return last_error();
}

EXPORT int flash_attention_params_bytes() { return sizeof(Params); }
