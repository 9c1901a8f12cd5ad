// y[M, N] = x[M, K] W[N, K]^T for few rows M, as fast as W is read, with what stands before and after it in a decoder layer.
//
// A cluster of blocks owns a tile of outputs at a time and splits K among its blocks. In each one thread streams its part of W through a
// ring of tensor copies, and two warpgroups in turn multiply what has come (wgmma: rows of W are the 64-row operand, rows of x the N
// operand, so that 1 to 32 rows cost the same read). x comes through the ring beside W, or, where it is to be normalised, stays in shared
// memory for all tiles. The sums of warpgroups and blocks are added in that order through distributed shared memory. Nothing depends on M
// but the width of the N operand, so a row's result does not depend on how many rows there are, nor on the others.
#pragma once
#include "cluster.cuh"
#include "kv_write.cuh"
#include "wgmma.cuh"

namespace skinny_linear {
using kv_write::from_float, kv_write::Pack, kv_write::to_float;

constexpr int CHUNK = 64;  // columns: 128 bytes, a row of the swizzle
constexpr int BOX_ROWS = 32, BOX_BYTES = BOX_ROWS * 128;  // a tile is 1 to MAX_BOXES boxes of W's rows
constexpr int MAX_BOXES = 4;
constexpr int NUM_GROUPS = 2, GROUP_THREADS = 128, GROUP_WARPS = GROUP_THREADS / 32;
constexpr int NUM_CONSUMERS = NUM_GROUPS * GROUP_THREADS, NUM_WARPS = NUM_CONSUMERS / 32;
constexpr int NUM_THREADS = NUM_CONSUMERS + 32;  // one more warp produces
constexpr int MAX_STAGES = 32;                   // a lane of the producing warp initialises each
constexpr int MAX_CLUSTER = 8;
constexpr int CHAINS = 2;  // sums of a product that do not wait for each other

struct Params {
    void* out;  // [M, N], or [M, N / 2] where gated
    const void *x, *norm_weight, *bias;
    int64_t out_stride, x_stride;
    float eps;
    int num_rows, num_outputs, num_inputs;
    int num_boxes;  // of a tile; 2 where gated: gates, and the same rows of up
    int num_stages;
    int is_gated, is_added;  // out = silu(gate) * up; out += y
};

// Where the tiles of a product are.
struct Tiling {
    int num_tiles, tile_size, num_boxes, box_step;  // box_step: rows of W from one box of a tile to the next
    int num_chunks;                                 // of K

    __host__ __device__ Tiling(int num_outputs, int num_inputs, int num_boxes, bool is_gated)
        : num_boxes(num_boxes), num_chunks((num_inputs + CHUNK - 1) / CHUNK) {
        const int size = is_gated ? num_outputs / 2 : num_outputs;
        tile_size = is_gated ? BOX_ROWS : num_boxes * BOX_ROWS;
        num_tiles = (size + tile_size - 1) / tile_size;
        box_step = is_gated ? size : BOX_ROWS;
    }
};

struct Barriers {
    uint64_t full[MAX_STAGES], empty[MAX_STAGES];
    uint64_t factors_full;  // of the norm
    uint64_t sums_full[2];  // the sums of all blocks of the cluster are here, for this block's share of a tile
};

// The sums that the blocks of a cluster put for one of them: [2][rank][group][rows / ranks][COLUMNS], the rows apart by what spreads the
// reads over the banks. Two of them, in turn: who puts its sums of tile i + 1 has read those of tile i, and who has read those of tile i + 1
// knows that all have put them; so none is overwritten before it is read, without a word about that.
static constexpr __host__ __device__ int sums_stride(int columns) { return columns + 2; }
static inline __host__ __device__ int sums_size(int columns, int num_boxes) { return NUM_GROUPS * num_boxes * BOX_ROWS * sums_stride(columns); }

static inline int stage_bytes(const Params& p, int columns) { return p.num_boxes * BOX_BYTES + (p.norm_weight ? 0 : columns * CHUNK * 2); }

// Of the shared memory, what is not the ring: 1024 bytes to align it, the room behind it that the last box's product reads past it, and so on.
static inline int fixed_bytes(const Params& p, int columns, int cluster) {
    const int chunks = (p.num_inputs + CHUNK - 1) / CHUNK, x = p.norm_weight ? (chunks + cluster - 1) / cluster * columns * CHUNK * 2 : 0;
    return 1024 + BOX_BYTES + x + (2 * sums_size(columns, p.num_boxes) + columns) * 4 + (int)sizeof(Barriers);
}

#if __CUDA_ARCH__ >= 900

// x of this block's columns into shared memory as tensor copies leave it, normalised. It is read once: each block of the cluster tells the
// others the sums of squares over its columns. `squares`: [rank][warp][COLUMNS].
template <typename T, int COLUMNS>
__device__ inline void normalise(const Params& p, unsigned char* x_tiles, float* squares, float* factors, uint64_t* ready, int first_chunk,
                                 int num_chunks) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, num_packs = num_chunks * 8;
    const uint32_t rank = cluster_rank(), ranks = cluster_size();
    const auto* norm_weight = (const Pack<T, 8>*)((const T*)p.norm_weight + first_chunk * CHUNK);
    const auto* x = (const T*)p.x + first_chunk * CHUNK;
    const int packs_inside = min(num_packs, p.num_inputs / 8 - first_chunk * 8);
    auto tile_at = [&](int i, int row) { return (Pack<T, 8>*)(x_tiles + (i / 8 * COLUMNS + row) * 128 + (i % 8 ^ (row & 7)) * 16); };
    if (thread == 0) mbarrier_expect_bytes(ready, ranks * NUM_WARPS * p.num_rows * sizeof(float));
    Pack<T, 8> weight = thread < packs_inside ? norm_weight[thread] : Pack<T, 8>{};
    float mine = 0.0f;  // sum of squares of row `lane`
    constexpr int ROWS = 8;  // at once: their loads are under way together
#pragma unroll 1
    for (int first = 0; first < p.num_rows; first += ROWS) {
        float sums[ROWS] = {};
#pragma unroll 1
        for (int i = thread; i < num_packs; i += NUM_CONSUMERS) {
            Pack<T, 8> packs[ROWS];
#pragma unroll
            for (int row = 0; row < ROWS; row++)
                packs[row] = first + row < p.num_rows && i < packs_inside ? *((const Pack<T, 8>*)(x + (first + row) * p.x_stride) + i) : Pack<T, 8>{};
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
#pragma unroll
                for (int j = 0; j < 8; j++) sums[row] += to_float(packs[row].items[j]) * to_float(packs[row].items[j]);
                *tile_at(i, first + row) = packs[row];
            }
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
#pragma unroll
            for (int step = 16; step > 0; step /= 2) sums[row] += __shfl_xor_sync(0xffffffffu, sums[row], step);
            if (lane == first + row) mine = sums[row];
        }
    }
    if (lane < p.num_rows)
        for (int to = 0; to < ranks; to++)
            remote_store(remote_address(squares + (rank * NUM_WARPS + warp) * COLUMNS + lane, to), remote_address(ready, to), mine);
    mbarrier_wait_cluster(ready, 0);
    if (thread < p.num_rows) {
        float total = 0.0f;
#pragma unroll 16
        for (int part = 0; part < ranks * NUM_WARPS; part++) total += squares[part * COLUMNS + thread];
        factors[thread] = rsqrtf(total / p.num_inputs + p.eps);
    }
    named_barrier_sync(1, NUM_CONSUMERS);
    for (int i = thread; i < num_packs; i += NUM_CONSUMERS) {
        if (i != thread) weight = i < packs_inside ? norm_weight[i] : Pack<T, 8>{};
#pragma unroll 4
        for (int row = 0; row < p.num_rows; row++) {
            Pack<T, 8> pack = *tile_at(i, row);
            const float factor = factors[row];
#pragma unroll
            for (int j = 0; j < 8; j++) pack.items[j] = from_float<T>(to_float(pack.items[j]) * factor * to_float(weight.items[j]));
            *tile_at(i, row) = pack;
        }
    }
    fence_shared_for_async();
    named_barrier_sync(1, NUM_CONSUMERS);
}

// Sums of four outputs of a row over the blocks in rank order and their groups, and the bias of the first.
template <typename T, int COLUMNS> __device__ inline float4 total(const float* sums, int share, uint32_t ranks, const T* bias) {
    constexpr int STRIDE = sums_stride(COLUMNS);
    float result[4] = {};
#pragma unroll
    for (int part = 0; part < MAX_CLUSTER * NUM_GROUPS; part++, sums += share * STRIDE)
        if (part < ranks * NUM_GROUPS)
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
    constexpr int STRIDE = sums_stride(COLUMNS);
    const uint32_t rank = cluster_rank(), ranks = cluster_size();
    const int size = p.is_gated ? p.num_outputs / 2 : p.num_outputs, share = p.num_boxes * BOX_ROWS / ranks, outputs = p.is_gated ? share / 2 : share;
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

// Grid: clusters of 1, 2, 4 or 8 blocks; cluster i takes the tiles i, i + clusters, ... COLUMNS: 8, 16 or 32, at least M. HEIGHT: products
// of 64 rows that a tile takes, 1 or 2; where it has fewer rows, the others are of what happens to stand behind them, and are dropped.
template <typename T, int COLUMNS, int HEIGHT>
__global__ void __launch_bounds__(NUM_THREADS, 2)
    multiply(const __grid_constant__ CUtensorMap weight_map, const __grid_constant__ CUtensorMap x_map, const Params p) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ unsigned char unaligned[];
    unsigned char* ring = unaligned + (-shared_address(unaligned) & 1023);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const uint32_t rank = cluster_rank(), ranks = cluster_size();
    const Tiling tiling(p.num_outputs, p.num_inputs, p.num_boxes, p.is_gated);
    const int first_chunk = tiling.num_chunks * rank / ranks, num_chunks = tiling.num_chunks * (rank + 1) / ranks - first_chunk;
    const int tile_rows = p.num_boxes * BOX_ROWS, num_clusters = gridDim.x / ranks, first_tile = blockIdx.x / ranks;
    const bool is_streamed = p.norm_weight == nullptr;
    const int weight_bytes = p.num_boxes * BOX_BYTES, stage_bytes = weight_bytes + (is_streamed ? COLUMNS * CHUNK * 2 : 0);
    unsigned char* x_tiles = ring + p.num_stages * stage_bytes + BOX_BYTES;
    float* sums = (float*)(x_tiles + (is_streamed ? 0 : (tiling.num_chunks + ranks - 1) / ranks * COLUMNS * CHUNK * 2));
    const int sums_size = skinny_linear::sums_size(COLUMNS, p.num_boxes);
    float* factors = sums + 2 * sums_size;
    auto& barriers = *(Barriers*)(factors + COLUMNS);

    if (warp == NUM_WARPS) {
        if (lane == 0) {
            prefetch_description(&weight_map);
            mbarrier_init(&barriers.factors_full, 1);
            mbarrier_init(&barriers.sums_full[0], 1);
            mbarrier_init(&barriers.sums_full[1], 1);
        }
        if (lane < p.num_stages) {
            mbarrier_init(&barriers.full[lane], 1);
            mbarrier_init(&barriers.empty[lane], GROUP_WARPS);
        }
        mbarrier_init_fence();
        __syncwarp();
    }
    allow_dependent_launch();
    const uint64_t once = evict_first_policy();
    auto load_weight = [&](int tile, int chunk, int stage) {
        unsigned char* to = ring + stage * stage_bytes;
        int row = tile * tiling.tile_size;
        mbarrier_expect_bytes(&barriers.full[stage], stage_bytes);
        for (int box = 0; box < p.num_boxes; box++, to += BOX_BYTES, row += tiling.box_step)
            tensor_copy(to, &weight_map, (first_chunk + chunk) * CHUNK, row, &barriers.full[stage], once);
    };
    auto load_x = [&](int chunk, int stage) {
        tensor_copy(ring + stage * stage_bytes + weight_bytes, &x_map, (first_chunk + chunk) * CHUNK, 0, &barriers.full[stage]);
    };
    // W depends on no other kernel, so that its first chunks are on their way before anything is waited for.
    int tile = first_tile, chunk = 0, num_loaded = 0;
    if (thread == NUM_CONSUMERS)
        for (; tile < tiling.num_tiles && num_loaded < p.num_stages && num_chunks > 0; num_loaded++) {
            load_weight(tile, chunk, num_loaded);
            if (++chunk == num_chunks) chunk = 0, tile += num_clusters;
        }
    __syncthreads();
    cluster_start();
    wait_for_previous_kernel();

    if (warp == NUM_WARPS) {
        if (lane != 0) return;
        if (is_streamed)
            for (int stage = 0; stage < num_loaded; stage++) load_x(stage % num_chunks, stage);
        for (int stage = 0, parity = 0; tile < tiling.num_tiles && num_chunks > 0; tile += num_clusters, chunk = 0)
            for (; chunk < num_chunks; chunk++) {
                mbarrier_wait(&barriers.empty[stage], parity);
                load_weight(tile, chunk, stage);
                if (is_streamed) load_x(chunk, stage);
                if (++stage == p.num_stages) stage = 0, parity ^= 1;
            }
        return;
    }
    if (!is_streamed) normalise<T, COLUMNS>(p, x_tiles, sums + sums_size, factors, &barriers.factors_full, first_chunk, num_chunks);
    constexpr int STRIDE = sums_stride(COLUMNS);
    const int group = warp / GROUP_WARPS;
    const uint64_t ring_descriptor = matrix_descriptor(ring), x_descriptor = matrix_descriptor(is_streamed ? ring + weight_bytes : x_tiles);
    // A stage is always the same group's: by the parity of its barrier a group could not tell a phase it has not taken part in from the
    // one before. So chunks go to the groups in turn through all tiles, and num_stages is a multiple of NUM_GROUPS; the sums go to slots by
    // the order of chunks within a tile.
    static_assert(NUM_GROUPS == 2);
    int num_done = 0;
    auto write_previous = [&](int tile) {
        const int previous = num_done - 1, turn = previous & 1;
        mbarrier_wait_cluster(&barriers.sums_full[turn], previous / 2 & 1);
        write_share<T, COLUMNS>(p, sums + turn * sums_size, tile);
    };
    for (tile = first_tile; tile < tiling.num_tiles; tile += num_clusters, num_done++) {
        float y[HEIGHT][CHAINS][COLUMNS / 2] = {};
        const int base = num_done * num_chunks, slot = (group + base) & 1;
        int stage = (base + slot) % p.num_stages, parity = (base + slot) / p.num_stages & 1;
        for (int i = slot; i < num_chunks; i += NUM_GROUPS) {
            mbarrier_wait(&barriers.full[stage], parity);
            const uint64_t a = ring_descriptor + (stage * stage_bytes >> 4);
            const uint64_t b = x_descriptor + ((is_streamed ? stage * stage_bytes : i * COLUMNS * CHUNK * 2) >> 4);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < CHUNK / 16; k++)
#pragma unroll
                for (int h = 0; h < HEIGHT; h++) Wgmma<T>::products(y[h][k % CHAINS], a + h * (64 * 128 >> 4) + 2 * k, b + 2 * k);
            wgmma_commit();
            // The other group multiplies meanwhile; the sooner this stage is free, the more of W is under way.
            wgmma_wait<0>();
            if (lane == 0) mbarrier_arrive(&barriers.empty[stage]);
            stage += NUM_GROUPS;
            if (stage >= p.num_stages) stage -= p.num_stages, parity ^= 1;
        }
#pragma unroll
        for (int h = 0; h < HEIGHT; h++)
#pragma unroll
            for (int c = 0; c < CHAINS; c++) keep_in_registers(y[h][c]);
        // The sums of a tile travel while the next is multiplied.
        if (num_done > 0) write_previous(tile - num_clusters);

        // A thread has two rows of each 64, 8 apart, and each belongs to the block whose share it is.
        const int turn = num_done & 1, share = tile_rows / ranks;
        uint64_t* full = &barriers.sums_full[turn];
        float* here = sums + turn * sums_size + (rank * NUM_GROUPS + slot) * share * STRIDE + lane % 4 * 2;
        if (thread == 0) mbarrier_expect_bytes(full, NUM_GROUPS * tile_rows * COLUMNS * sizeof(float));
#pragma unroll
        for (int h = 0; h < HEIGHT; h++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = h * 64 + warp % GROUP_WARPS * 16 + half * 8 + lane / 4;
                if (row >= tile_rows) continue;
                const int of_box = row % BOX_ROWS, owner = p.is_gated ? of_box * ranks / BOX_ROWS : row / share;
                const int at = p.is_gated ? of_box % (share / 2) + row / BOX_ROWS * (share / 2) : row % share;
                const uint32_t to = remote_address(here + at * STRIDE, owner), barrier = remote_address(full, owner);
#pragma unroll
                for (int j = 0; j < COLUMNS / 8; j++) {
                    const int first = 4 * j + 2 * half;
                    float pair[2] = {y[h][0][first], y[h][0][first + 1]};
#pragma unroll
                    for (int c = 1; c < CHAINS; c++) pair[0] += y[h][c][first], pair[1] += y[h][c][first + 1];
                    remote_store(to + j * 8 * sizeof(float), barrier, pair[0], pair[1]);
                }
            }
        }
    }
    if (num_done > 0) write_previous(tile - num_clusters);
#endif
}

}  // namespace skinny_linear
