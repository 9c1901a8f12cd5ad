// Launcher of skinny_linear.cuh.
#include <atomic>
#include <type_traits>
#include "skinny_linear.cuh"

using namespace skinny_linear;

constexpr int MAX_DEVICES = 64;

// Rows of 16-bit items, `stride` items apart; boxes of CHUNK columns.
static const char* describe(CUtensorMap* map, const void* rows, bool is_half, int num_rows, int num_columns, int64_t stride, int box_rows) {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static Encode encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result;
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
        return reinterpret_cast<Encode>(function);
    }();
    if (encode == nullptr) return "the CUDA driver has no cuTensorMapEncodeTiled; CUDA 12 or newer is needed";
    cuuint64_t sizes[2] = {static_cast<cuuint64_t>(num_columns), static_cast<cuuint64_t>(num_rows)}, strides[1] = {static_cast<cuuint64_t>(stride) * 2};
    cuuint32_t box[2] = {CHUNK, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
    CUresult result = encode(map, is_half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(rows), sizes,
                             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused the shape or strides of x or of the weight";
}

struct Device {
    std::atomic<int> block_bytes;       // shared memory that a block may have; 0: not yet known
    int num_clusters[MAX_CLUSTER + 1];  // that run at once, a block to a multiprocessor
};

// Asked once per kernel and device: it takes microseconds.
template <typename Kernel> static const char* prepare(Device& found, int device, Kernel* kernel, cudaLaunchConfig_t config) {
    int block_bytes = 0;
    cudaDeviceGetAttribute(&block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, block_bytes);
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    config.attrs = &cluster;
    config.numAttrs = 1;
    config.dynamicSmemBytes = block_bytes;
    for (int size = 1; size <= MAX_CLUSTER; size *= 2) {
        cluster.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
        config.gridDim = size;
        cudaOccupancyMaxActiveClusters(&found.num_clusters[size], kernel, &config);
    }
    if (const char* error = last_error()) return error;
    found.block_bytes = block_bytes;
    return nullptr;
}

struct Launch {
    CUtensorMap weight_map, x_map;
    Params params;
    int cluster;
    bool is_overlapped;
    cudaStream_t stream;
};

// How many clusters take the tiles: as few as need no longer than all that run at once.
static int clusters_for(const Tiling& tiling, const Device& found, int cluster) {
    const int most = max(found.num_clusters[cluster], 1), waves = (tiling.num_tiles + most - 1) / most;
    return (tiling.num_tiles + waves - 1) / waves;
}

template <typename T, int COLUMNS, int HEIGHT> static const char* launch(const Launch& what) {
    static Device devices[MAX_DEVICES];
    int device = 0;
    cudaGetDevice(&device);
    if (device >= MAX_DEVICES) return "more than 64 GPUs in a process";
    Device& found = devices[device];
    auto* kernel = multiply<T, COLUMNS, HEIGHT>;
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(NUM_THREADS);
    config.stream = what.stream;
    if (found.block_bytes == 0)
        if (const char* error = prepare(found, device, kernel, config)) return error;

    Params p = what.params;
    const int cluster = what.cluster;
    const Tiling tiling(p.num_outputs, p.num_inputs, p.num_boxes, p.is_gated);
    const int num_clusters = clusters_for(tiling, found, cluster), fixed = fixed_bytes(p, COLUMNS, cluster), stage = stage_bytes(p, COLUMNS);
    const int chunks = (tiling.num_chunks + cluster - 1) / cluster * ((tiling.num_tiles + num_clusters - 1) / num_clusters);
    p.num_stages = min(min((found.block_bytes - fixed) / stage, chunks + 1), MAX_STAGES) / NUM_GROUPS * NUM_GROUPS;
    if (p.num_stages < NUM_GROUPS) return "skinny_linear: K is too large for this many rows";
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes;
    config.numAttrs = what.is_overlapped ? 2 : 1;
    config.gridDim = dim3(num_clusters * cluster);
    config.dynamicSmemBytes = fixed + p.num_stages * stage;
    cudaError_t error = cudaLaunchKernelEx(&config, kernel, what.weight_map, what.x_map, p);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename T, int COLUMNS> static const char* launch_columns(const Launch& what) {
    return what.params.num_boxes <= 2 ? launch<T, COLUMNS, 1>(what) : launch<T, COLUMNS, 2>(what);
}

template <typename T> static const char* launch_rows(const Launch& what, int columns) {
    return columns == 8 ? launch_columns<T, 8>(what) : columns == 16 ? launch_columns<T, 16>(what) : launch_columns<T, 32>(what);
}

// W is contiguous, num_rows at most 32. norm_weight, bias: may be null. cluster: 1, 2, 4 or 8 blocks to split K among. num_stages is found
// here. scalar: 0 half, 1 bfloat16.
EXPORT const char* launch_skinny_linear(const Params* p, const void* weight, int cluster, int is_overlapped, int scalar, cudaStream_t stream) {
    if (p->num_rows == 0 || p->num_outputs == 0) return nullptr;
    const int columns = p->num_rows <= 8 ? 8 : p->num_rows <= 16 ? 16 : 32;
    const bool is_half = scalar == 0;
    Launch what;
    what.params = *p, what.cluster = cluster, what.is_overlapped = is_overlapped != 0, what.stream = stream;
    if (const char* error = describe(&what.weight_map, weight, is_half, p->num_outputs, p->num_inputs, p->num_inputs, BOX_ROWS)) return error;
    if (const char* error = describe(&what.x_map, p->x, is_half, p->num_rows, p->num_inputs, p->x_stride, columns)) return error;
    return is_half ? launch_rows<__half>(what, columns) : launch_rows<__nv_bfloat16>(what, columns);
}

EXPORT int skinny_linear_params_bytes() { return sizeof(Params); }
