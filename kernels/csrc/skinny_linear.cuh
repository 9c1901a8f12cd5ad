// y[M, N] = x[M, K] W[N, K]^T for few rows M, as fast as W is read, with what stands before and after it in a decoder layer.
//
// A cluster of blocks owns TILE outputs at a time and splits K among its blocks. In each one thread streams its part of W through a ring
// of tensor copies and a warpgroup multiplies it (wgmma: rows of W are the 64-row operand, rows of x the N operand, so that 1 to 64
// rows cost the same read). x, normalised if asked, stays in shared memory for all tiles. The sums of the blocks are added in rank
// order through distributed shared memory. Nothing depends on M but the width of the N operand, so a row's result does not depend on
// how many rows there are, nor on the others.
#pragma once
#include "cluster.cuh"
#include "kv_write.cuh"
#include "wgmma.cuh"

namespace skinny_linear {
using kv_write::from_float, kv_write::Pack, kv_write::to_float;

constexpr int TILE = 64;       // rows of W; where gated, half of them gates and half the same rows of up
constexpr int CHUNK = 64;      // columns: 128 bytes, a row of the swizzle
constexpr int CHUNK_BYTES = TILE * CHUNK * 2;
constexpr int BOX_ROWS = TILE / 2;
constexpr int NUM_CONSUMERS = 128;
constexpr int NUM_WARPS = NUM_CONSUMERS / 32;
constexpr int NUM_THREADS = NUM_CONSUMERS + 32;  // one more warp produces
constexpr int MIN_STAGES = 5, MAX_STAGES = 32;  // a lane of the producing warp initialises each
constexpr int MAX_CLUSTER = 8;

struct Params {
    void* out;  // [M, N], or [M, N / 2] where gated
    const void *x, *norm_weight, *bias;
    int64_t out_stride, x_stride;
    float eps;
    int num_rows, num_outputs, num_inputs, num_stages;
    int is_gated, is_added;  // out = silu(gate) * up; out += y
};

struct Barriers {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES];
    uint64_t x_full;      // x, or the factors of its norm, are here
    uint64_t sums_full[2];  // the sums of all blocks of the cluster are here, for this block's share of a tile
};

// Where the blocks of a cluster put their sums for one of them: [2][rank][TILE / ranks][COLUMNS], the rows apart by what spreads the reads
// over the banks. Two of them, in turn: who puts its sums of tile i + 1 has read those of tile i, and who has read those of tile i + 1 knows
// that all have put them; so none is overwritten before it is read, without a word about that.
template <int COLUMNS> struct Sums {
    static constexpr int STRIDE = COLUMNS + 2, SIZE = TILE * STRIDE;
};

static inline int x_bytes(int num_inputs, int columns, int cluster) {
    const int chunks = (num_inputs + CHUNK - 1) / CHUNK;
    return (chunks + cluster - 1) / cluster * columns * CHUNK * 2;
}

// Beside the ring, 1024 bytes of them to align it.
static inline int fixed_bytes(int num_inputs, int columns, int cluster) {
    return 1024 + x_bytes(num_inputs, columns, cluster) + (2 * TILE * (columns + 2) + columns) * 4 + (int)sizeof(Barriers);
}

#if __CUDA_ARCH__ >= 900

// x of this block's columns into shared memory as tensor copies leave it, normalised: each rank takes the sums of squares of every
// cluster-th row and tells the others.
template <typename T, int COLUMNS>
__device__ inline void normalise(const Params& p, unsigned char* x_tiles, float* factors, uint64_t* ready, int first_chunk, int num_chunks) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const uint32_t rank = cluster_rank(), ranks = cluster_size();
    const int packs = p.num_inputs / 8;
    if (thread == 0) mbarrier_expect_bytes(ready, p.num_rows * sizeof(float));
    for (int row = rank + ranks * warp; row < p.num_rows; row += ranks * NUM_WARPS) {
        const auto* x = (const Pack<T, 8>*)((const T*)p.x + row * p.x_stride);
        float squares = 0.0f;
#pragma unroll 8
        for (int i = lane; i < packs; i += 32) {
            const Pack<T, 8> pack = x[i];
#pragma unroll
            for (int j = 0; j < 8; j++) squares += to_float(pack.items[j]) * to_float(pack.items[j]);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
        const float factor = rsqrtf(squares / p.num_inputs + p.eps);
        if (lane < ranks) remote_store(remote_address(factors + row, lane), remote_address(ready, lane), factor);
    }
    mbarrier_wait_cluster(ready, 0);
    const int per_row = num_chunks * 8;
#pragma unroll 4
    for (int i = thread; i < p.num_rows * per_row; i += NUM_CONSUMERS) {
        const int row = i / per_row, at = i % per_row, chunk = at / 8, part = at % 8;
        const int column = (first_chunk + chunk) * CHUNK + part * 8;
        Pack<T, 8> pack = {};
        if (column < p.num_inputs) {
            pack = *(const Pack<T, 8>*)((const T*)p.x + row * p.x_stride + column);
            const Pack<T, 8> weight = *(const Pack<T, 8>*)((const T*)p.norm_weight + column);
#pragma unroll
            for (int j = 0; j < 8; j++) pack.items[j] = from_float<T>(to_float(pack.items[j]) * factors[row] * to_float(weight.items[j]));
        }
        *(Pack<T, 8>*)(x_tiles + chunk * COLUMNS * 128 + row * 128 + ((part ^ (row & 7)) * 16)) = pack;
    }
    fence_shared_for_async();
    named_barrier_sync(1, NUM_CONSUMERS);
}

// Sums of four outputs of a row over the blocks in rank order, and the bias of the first.
template <typename T, int COLUMNS> __device__ inline float4 total(const float* sums, int share, uint32_t ranks, const T* bias) {
    constexpr int STRIDE = Sums<COLUMNS>::STRIDE;
    float result[4] = {};
#pragma unroll
    for (int rank = 0; rank < MAX_CLUSTER; rank++, sums += share * STRIDE)
        if (rank < ranks)
#pragma unroll
            for (int j = 0; j < 4; j++) result[j] += sums[j * STRIDE];
    if (bias != nullptr)
#pragma unroll
        for (int j = 0; j < 4; j++) result[j] += to_float(bias[j]);
    return make_float4(result[0], result[1], result[2], result[3]);
}

// What the separate ops would store: each rounds to the type.
template <typename T> __device__ inline float rounded(float value) { return to_float(from_float<T>(value)); }
template <typename T> __device__ inline float gated(float gate, float up) {
    const float g = rounded<T>(gate);
    return g / (1.0f + __expf(-g)) * rounded<T>(up);
}

// This block's share of a tile, from the sums of all; the first half of the share are gates where gated, the other the same rows of up.
template <typename T, int COLUMNS> __device__ inline void write_share(const Params& p, const float* sums, int tile) {
    constexpr int STRIDE = Sums<COLUMNS>::STRIDE;
    const uint32_t rank = cluster_rank(), ranks = cluster_size();
    const int size = p.is_gated ? p.num_outputs / 2 : p.num_outputs, share = TILE / ranks, outputs = p.is_gated ? share / 2 : share;
    const int first = (tile * ranks + rank) * outputs, quads = outputs / 4;
    const T* bias = (const T*)p.bias;
    for (int unit = threadIdx.x; unit < quads * p.num_rows; unit += NUM_CONSUMERS) {
        const int row = unit / quads, local = unit % quads * 4, output = first + local;
        if (output >= size) continue;
        const float* at = sums + local * STRIDE + row;
        auto* out = (Pack<T, 4>*)((T*)p.out + row * p.out_stride + output);
        Pack<T, 4> before = {};
        if (p.is_added) before = *out;
        float4 y = total<T, COLUMNS>(at, share, ranks, bias == nullptr ? nullptr : bias + output);
        if (p.is_gated) {
            const float4 up = total<T, COLUMNS>(at + outputs * STRIDE, share, ranks, bias == nullptr ? nullptr : bias + size + output);
            y = make_float4(gated<T>(y.x, up.x), gated<T>(y.y, up.y), gated<T>(y.z, up.z), gated<T>(y.w, up.w));
        }
        Pack<T, 4> result = {from_float<T>(y.x), from_float<T>(y.y), from_float<T>(y.z), from_float<T>(y.w)};
        if (p.is_added)
#pragma unroll
            for (int j = 0; j < 4; j++) result.items[j] = from_float<T>(to_float(before.items[j]) + to_float(result.items[j]));
        *out = result;
    }
}

#endif

// Grid: clusters of 1, 2, 4 or 8 blocks; cluster i takes the tiles i, i + clusters, ... COLUMNS: 8, 16, 32 or 64, at least M.
template <typename T, int COLUMNS>
__global__ void __launch_bounds__(NUM_THREADS) multiply(const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap x_map, const Params p) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ unsigned char unaligned[];
    unsigned char* ring = unaligned + (-shared_address(unaligned) & 1023);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const uint32_t rank = cluster_rank(), ranks = cluster_size();
    const int all_chunks = (p.num_inputs + CHUNK - 1) / CHUNK;
    const int first_chunk = all_chunks * rank / ranks, num_chunks = all_chunks * (rank + 1) / ranks - first_chunk;
    const int size = p.is_gated ? p.num_outputs / 2 : p.num_outputs, tile_size = p.is_gated ? BOX_ROWS : TILE;
    const int num_tiles = (size + tile_size - 1) / tile_size, num_clusters = gridDim.x / ranks, first_tile = blockIdx.x / ranks;
    unsigned char* x_tiles = ring + p.num_stages * CHUNK_BYTES;
    float* sums = (float*)(x_tiles + (all_chunks + ranks - 1) / ranks * COLUMNS * 128);
    float* factors = sums + 2 * Sums<COLUMNS>::SIZE;
    auto& barriers = *(Barriers*)(factors + COLUMNS);

    if (warp == NUM_WARPS) {
        if (lane < p.num_stages) {
            mbarrier_init(&barriers.full[lane], 1);
            mbarrier_init(&barriers.empty[lane], NUM_WARPS);
        }
        if (lane == 0) {
            mbarrier_init(&barriers.x_full, 1);
            mbarrier_init(&barriers.sums_full[0], 1);
            mbarrier_init(&barriers.sums_full[1], 1);
        }
        mbarrier_init_fence();
        __syncwarp();
    }
    allow_dependent_launch();
    const uint64_t once = evict_first_policy();
    int loaded = 0;  // chunks, of the producer
    auto load = [&](int tile, int chunk) {
        const int stage = loaded % p.num_stages;
        unsigned char* to = ring + stage * CHUNK_BYTES;
        const int first_row = tile * tile_size, second_row = p.is_gated ? size + first_row : first_row + BOX_ROWS;
        if (loaded >= p.num_stages) mbarrier_wait(&barriers.empty[stage], (loaded / p.num_stages - 1) & 1);
        mbarrier_expect_bytes(&barriers.full[stage], CHUNK_BYTES);
        tensor_copy(to, &weight_map, (first_chunk + chunk) * CHUNK, first_row, &barriers.full[stage], once);
        tensor_copy(to + CHUNK_BYTES / 2, &weight_map, (first_chunk + chunk) * CHUNK, second_row, &barriers.full[stage], once);
        loaded++;
    };
    // W depends on no other kernel, so its first chunks are on their way before anything is waited for.
    int tile = first_tile, chunk = 0;
    if (thread == NUM_CONSUMERS) {
        while (tile < num_tiles && loaded < p.num_stages && num_chunks > 0) {
            load(tile, chunk);
            if (++chunk == num_chunks) chunk = 0, tile += num_clusters;
        }
    }
    __syncthreads();
    cluster_start();
    wait_for_previous_kernel();

    if (warp == NUM_WARPS) {
        if (lane == 0 && num_chunks > 0)
            for (; tile < num_tiles; tile += num_clusters, chunk = 0)
                for (; chunk < num_chunks; chunk++) load(tile, chunk);
        return;
    }
    if (p.norm_weight != nullptr) {
        normalise<T, COLUMNS>(p, x_tiles, factors, &barriers.x_full, first_chunk, num_chunks);
    } else {
        if (thread == 0) {
            mbarrier_expect_bytes(&barriers.x_full, num_chunks * COLUMNS * 128);
            for (int i = 0; i < num_chunks; i++) tensor_copy(x_tiles + i * COLUMNS * 128, &x_map, (first_chunk + i) * CHUNK, 0, &barriers.x_full);
        }
        mbarrier_wait(&barriers.x_full, 0);
    }
    const uint64_t x_descriptor = matrix_descriptor(x_tiles), ring_descriptor = matrix_descriptor(ring);
    constexpr int STRIDE = Sums<COLUMNS>::STRIDE, SIZE = Sums<COLUMNS>::SIZE;
    int stage = 0, parity = 0, previous = -1, done = 0;
    for (int tile = first_tile; tile < num_tiles; tile += num_clusters, done++) {
        float y[COLUMNS / 2] = {};
        for (int i = 0; i < num_chunks; i++) {
            mbarrier_wait(&barriers.full[stage], parity);
            const uint64_t a = ring_descriptor + stage * (CHUNK_BYTES >> 4), b = x_descriptor + i * (COLUMNS * 128 >> 4);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < CHUNK / 16; k++) Wgmma<T>::products(y, a + 2 * k, b + 2 * k);
            wgmma_commit();
            wgmma_wait<1>();
            if (i > 0 && lane == 0) mbarrier_arrive(&barriers.empty[previous]);
            previous = stage;
            if (++stage == p.num_stages) stage = 0, parity ^= 1;
        }
        wgmma_wait<0>();
        keep_in_registers(y);
        if (num_chunks > 0 && lane == 0) mbarrier_arrive(&barriers.empty[previous]);
        // A warp has 16 of the tile's rows, a thread two of them, 8 apart, and each belongs to the block whose share it is.
        const int turn = done & 1, share = TILE / ranks;
        uint64_t* full = &barriers.sums_full[turn];
        float* here = sums + turn * SIZE + (rank * share) * STRIDE + lane % 4 * 2;
        if (thread == 0) mbarrier_expect_bytes(full, TILE * COLUMNS * sizeof(float));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = warp * 16 + lane / 4 + half * 8;
            const int local = row % BOX_ROWS, owner = p.is_gated ? local * ranks / BOX_ROWS : row / share;
            const int at = p.is_gated ? local % (share / 2) + row / BOX_ROWS * (share / 2) : row % share;
            const uint32_t to = remote_address(here + at * STRIDE, owner), barrier = remote_address(full, owner);
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; j++) remote_store(to + j * 8 * sizeof(float), barrier, y[4 * j + 2 * half], y[4 * j + 2 * half + 1]);
        }
        mbarrier_wait_cluster(full, done / 2 & 1);
        write_share<T, COLUMNS>(p, sums + turn * SIZE, tile);
    }
#endif
}

}  // namespace skinny_linear
