// Copies between pieces of memory of any kind, and the checksum of what pieces of GPU memory hold: one call queues both and waits.
//
// The checksum is XXH3-64 (Collet, xxHash 0.8, seed 0, inputs longer than 240 bytes). It adds up 16 stripes of 64 bytes, then scrambles its
// eight 64-bit accumulators, block of 1 KiB after block. The sums do not depend on each other, so twelve warps form them for a tile of
// blocks; the scrambling does, and is one more warp's work on the tile before.
#include "launch.cuh"
#include "xxh3.h"

constexpr int STRIPE = 64, BLOCK = 1024, TILE = 96, WARPS = 12, PER_WARP = TILE / WARPS, AHEAD = 16, MAX_PIECES = 256;
static_assert(TILE % AHEAD == 0, "the chain takes whole groups of a full tile");

__device__ inline uint64_t secret(int offset) {
    uint64_t value = 0;
    for (int i = 0; i < 8; i++) value |= (uint64_t)SECRET[offset + i] << (8 * i);
    return value;
}

__device__ inline uint64_t product(uint64_t key) { return (key & 0xffffffffu) * (key >> 32); }

__device__ inline uint64_t fold(uint64_t a, uint64_t b) { return (a * b) ^ __umul64hi(a, b); }

__device__ inline void scramble(uint64_t& acc, uint64_t sum, uint64_t key) {
    acc += sum;
    acc = (acc ^ (acc >> 47) ^ key) * P32_1;
}

struct Pieces {
    const char* at[MAX_PIECES];
};

// One thread block a payload: pieces_per_payload pieces one after the other, each a multiple of BLOCK, or one piece of a multiple of 16.
__global__ void __launch_bounds__((WARPS + 1) * 32) xxh3(const __grid_constant__ Pieces pieces, int pieces_per_payload, int64_t piece_bytes, uint64_t* digests) {
    __shared__ uint64_t sums[2][TILE][8];
    __shared__ uint64_t final[8];
    const char* const* mine = pieces.at + blockIdx.x * pieces_per_payload;
    const int64_t length = pieces_per_payload * piece_bytes;
    // The last block is summed like the others, as far as it has whole stripes before the last 64 bytes, but not scrambled.
    const int num_blocks = (int)((length - 1) / BLOCK), tail_stripes = (int)((length - 1 - (int64_t)num_blocks * BLOCK) / STRIPE);
    const int num_summed = num_blocks + (tail_stripes > 0), num_tiles = (num_summed + TILE - 1) / TILE;
    const unsigned blocks_per_piece = pieces_per_payload == 1 ? 0xffffffffu : (unsigned)(piece_bytes / BLOCK);
    const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    // A warp reads 512 bytes, eight stripes, at once: a thread two neighbouring accumulators' 16 bytes of one stripe.
    const int pair = thread & 3, stripe = thread >> 2, lane = threadIdx.x & 7;
    uint64_t keys[2][2], acc = 0, scramble_key = 0;
    if (warp < WARPS) {
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < 2; i++) keys[half][i] = secret(8 * (stripe + 8 * half + 2 * pair + i));
    } else {
        const uint64_t initial[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
        acc = initial[lane];
        scramble_key = secret(192 - STRIPE + 8 * lane);
    }
    for (int tile = 0; tile <= num_tiles; tile++) {
        if (warp < WARPS && tile < num_tiles) {
            ulonglong2 values[PER_WARP][2];
#pragma unroll
            for (int i = 0; i < PER_WARP; i++) {
                const unsigned block = tile * TILE + i * WARPS + warp;
                if (block >= num_summed) break;
                const unsigned piece = block / blocks_per_piece;
                const char* in = mine[piece] + (int64_t)(block - piece * blocks_per_piece) * BLOCK + 16 * thread;
                const int count = block < num_blocks ? 16 : tail_stripes;
                values[i][0] = stripe < count ? *(const ulonglong2*)in : ulonglong2{0, 0};
                values[i][1] = stripe + 8 < count ? *(const ulonglong2*)(in + BLOCK / 2) : ulonglong2{0, 0};
            }
#pragma unroll
            for (int i = 0; i < PER_WARP; i++) {
                const int block = tile * TILE + i * WARPS + warp;
                if (block >= num_summed) break;
                const int count = block < num_blocks ? 16 : tail_stripes;
                uint64_t low = 0, high = 0;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    if (stripe + 8 * half >= count) continue;
                    const ulonglong2 v = values[i][half];
                    low += v.y + product(v.x ^ keys[half][0]);
                    high += v.x + product(v.y ^ keys[half][1]);
                }
#pragma unroll
                for (int step = 4; step < 32; step *= 2) {
                    low += __shfl_xor_sync(0xffffffffu, low, step);
                    high += __shfl_xor_sync(0xffffffffu, high, step);
                }
                if (stripe == 0) {
                    sums[tile & 1][i * WARPS + warp][2 * pair] = low;
                    sums[tile & 1][i * WARPS + warp][2 * pair + 1] = high;
                }
            }
        } else if (warp == WARPS && thread < 8 && tile > 0) {
            const uint64_t(*in)[8] = sums[(tile - 1) & 1];
            const int count = min(TILE, num_blocks - (tile - 1) * TILE);
            int i = 0;
            for (; i + AHEAD <= count; i += AHEAD) {  // fetched ahead of the chain, which would otherwise wait for each
                uint64_t next[AHEAD];
#pragma unroll
                for (int j = 0; j < AHEAD; j++) next[j] = in[i + j][lane];
#pragma unroll
                for (int j = 0; j < AHEAD; j++) scramble(acc, next[j], scramble_key);
            }
            for (; i < count; i++) scramble(acc, in[i][lane], scramble_key);
            if (tile == num_tiles && tail_stripes > 0) acc += in[num_blocks - (tile - 1) * TILE][lane];
        }
        __syncthreads();
    }
    if (warp == WARPS && thread < 8) {
        const uint64_t* in = (const uint64_t*)(mine[pieces_per_payload - 1] + piece_bytes - STRIPE);  // it may overlap the stripe before
        acc += in[lane ^ 1] + product(in[lane] ^ secret(192 - STRIPE - 7 + 8 * lane));
        final[lane] = acc;
        __syncwarp(0xff);
        if (lane == 0) {
            uint64_t hash = (uint64_t)length * P64_1;
            for (int i = 0; i < 4; i++) hash += fold(final[2 * i] ^ secret(11 + 16 * i), final[2 * i + 1] ^ secret(19 + 16 * i));
            hash = (hash ^ (hash >> 37)) * 0x165667919E3779F9ull;
            digests[blockIdx.x] = hash ^ (hash >> 32);
        }
    }
}

// Mirrored field by field in kernels/piece_transfer.py. Addresses stand on the host.
struct Transfer {
    const int64_t *to, *from;  // num_copied pieces
    const int64_t* summed;     // num_summed pieces, after the copies or, where those do not write to them, beside them
    uint64_t* digests;         // pinned; num_summed / pieces_per_payload of them
    int64_t num_copied, copied_bytes, num_summed, summed_bytes, pieces_per_payload, is_sum_beside;
};

static cudaError_t copy_pieces(const Transfer& transfer, cudaStream_t stream) {
    const int64_t *to = transfer.to, *from = transfer.from, bytes = transfer.copied_bytes;
    for (int64_t i = 0; i < transfer.num_copied;) {  // pieces that follow each other on both sides go in one copy
        int64_t n = 1;
        while (i + n < transfer.num_copied && to[i + n] == to[i] + n * bytes && from[i + n] == from[i] + n * bytes) n++;
        cudaError_t error = cudaMemcpyAsync((void*)to[i], (const void*)from[i], n * bytes, cudaMemcpyDefault, stream);
        if (error != cudaSuccess) return error;
        i += n;
    }
    return cudaSuccess;
}

static cudaError_t sum_pieces(const Transfer& transfer, cudaStream_t stream) {
    const int per = (int)transfer.pieces_per_payload, at_once = MAX_PIECES / per * per;
    for (int64_t i = 0; i < transfer.num_summed; i += at_once) {
        const int64_t n = transfer.num_summed - i < at_once ? transfer.num_summed - i : at_once;
        Pieces pieces;
        for (int64_t j = 0; j < n; j++) pieces.at[j] = (const char*)transfer.summed[i + j];
        xxh3<<<(unsigned)(n / per), (WARPS + 1) * 32, 0, stream>>>(pieces, per, transfer.summed_bytes, transfer.digests + i / per);
        cudaError_t error = cudaGetLastError();
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

// What a thread that moves KV has to itself. Who waits for `done` sleeps: lanes that stay awake, asking for the event or looking at a word
// that the GPU writes, take cores and the driver's lock from each other.
struct Lane {
    int device;
    cudaStream_t sums;
    cudaEvent_t summed, done;
};

static cudaError_t run(const Transfer& transfer, const Lane& lane, cudaStream_t stream) {
    cudaError_t error = cudaSetDevice(lane.device);
    if (transfer.is_sum_beside && error == cudaSuccess) error = sum_pieces(transfer, lane.sums);
    if (error == cudaSuccess) error = copy_pieces(transfer, stream);
    if (!transfer.is_sum_beside && error == cudaSuccess) error = sum_pieces(transfer, stream);
    // What follows also after a failure, so that nothing writes to memory that the caller lets go.
    if (transfer.is_sum_beside && cudaEventRecord(lane.summed, lane.sums) == cudaSuccess) cudaStreamWaitEvent(stream, lane.summed, 0);
    cudaError_t waited = cudaEventRecord(lane.done, stream);
    if (waited == cudaSuccess) waited = cudaEventSynchronize(lane.done);
    return error != cudaSuccess ? error : waited;
}

// Returns when everything queued on the stream before, the copies and the sums are done.
EXPORT const char* transfer_pieces(const Transfer* transfer, const Lane* lane, cudaStream_t stream) {
    const cudaError_t error = run(*transfer, *lane, stream);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

EXPORT const char* new_lane(int device, int priority, Lane* lane) {
    cudaError_t error = cudaSetDevice(device);
    lane->device = device;
    if (error == cudaSuccess) error = cudaStreamCreateWithPriority(&lane->sums, cudaStreamNonBlocking, priority);
    for (cudaEvent_t* event : {&lane->summed, &lane->done})
        if (error == cudaSuccess) error = cudaEventCreateWithFlags(event, cudaEventBlockingSync | cudaEventDisableTiming);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

EXPORT void free_lane(const Lane* lane) {
    cudaSetDevice(lane->device);
    cudaStreamDestroy(lane->sums);
    cudaEventDestroy(lane->summed);
    cudaEventDestroy(lane->done);
    cudaGetLastError();
}

EXPORT int transfer_struct_bytes(int which) { return which == 0 ? sizeof(Transfer) : sizeof(Lane); }
