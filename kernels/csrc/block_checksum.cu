// XXH3-64 (Collet, xxHash 0.8, seed 0, inputs longer than 240 bytes) of payloads that lie in GPU memory in rows.
//
// The hash adds up 16 stripes of 64 bytes, then scrambles its eight 64-bit accumulators, block of 1 KiB after block. The sums do not
// depend on each other, so twelve warps form them for a tile of blocks; the scrambling does, and is one more warp's work on the tile before.
#include "cache_ops.cuh"

using namespace cache_ops;

__constant__ uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb,
    0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc,
    0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
constexpr uint64_t P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87ull, P64_2 = 0xC2B2AE3D27D4EB4Full, P64_3 = 0x165667B19E3779F9ull, P64_4 = 0x85EBCA77C2B2AE63ull,
                   P64_5 = 0x27D4EB2F165667C5ull;
constexpr int STRIPE = 64, BLOCK = 1024, TILE = 96, WARPS = 12, PER_WARP = TILE / WARPS;

__device__ inline uint64_t secret(int offset) {
    uint64_t value = 0;
    for (int i = 0; i < 8; i++) value |= (uint64_t)SECRET[offset + i] << (8 * i);
    return value;
}

__device__ inline uint64_t product(uint64_t key) { return (key & 0xffffffffu) * (key >> 32); }

__device__ inline uint64_t fold(uint64_t a, uint64_t b) { return (a * b) ^ __umul64hi(a, b); }

// The payload is rows ids[0 .. n) one after the other; row_bytes is a multiple of BLOCK, or n is 1.
struct Payload {
    Rows rows;
    int64_t first;
    uint32_t blocks_per_row;  // 0: the payload is one row
    // 32-bit, since a division of 64 bits for each KiB would take longer than the KiB.
    __device__ const char* at(uint32_t block, int64_t offset = 0) const {
        const uint32_t row = blocks_per_row ? block / blocks_per_row : 0;
        return rows.data + row_of(rows, first + row) * rows.stride_bytes + (int64_t)(block - row * blocks_per_row) * BLOCK + offset;
    }
};

// One thread block a payload; digests[i] = 0 where a row does not exist.
__global__ void __launch_bounds__((WARPS + 1) * 32) xxh3(Rows rows, int64_t rows_per_payload, int64_t row_bytes, uint64_t* digests) {
    __shared__ uint64_t sums[2][TILE][8];
    __shared__ uint64_t final[8];
    __shared__ int is_outside;
    const Payload payload = {rows, (int64_t)blockIdx.x * rows_per_payload, rows_per_payload == 1 ? 0u : (uint32_t)(row_bytes / BLOCK)};
    if (threadIdx.x == 0) is_outside = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < rows_per_payload; i += blockDim.x) {
        const int64_t row = row_of(rows, payload.first + i);
        if (row < 0 || row >= rows.num_rows) is_outside = 1;
    }
    __syncthreads();
    if (is_outside) {
        if (threadIdx.x == 0) digests[blockIdx.x] = 0;
        return;
    }
    const int64_t length = rows_per_payload * row_bytes, num_blocks = (length - 1) / BLOCK, num_tiles = (num_blocks + TILE - 1) / TILE;
    const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
    // A warp reads 512 bytes, eight stripes, at once: a thread two neighbouring accumulators' 16 bytes of one stripe.
    const int pair = thread & 3, stripe = thread >> 2;
    uint64_t keys[2][2];
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 2; i++) keys[half][i] = secret(8 * (stripe + 8 * half + 2 * pair + i));
    const int lane = threadIdx.x & 7;
    const uint64_t initial[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    uint64_t acc = initial[lane];
    const uint64_t scramble_key = secret(192 - STRIPE + 8 * lane);
    for (int64_t tile = 0; tile <= num_tiles; tile++) {
        if (warp < WARPS && tile < num_tiles) {
            ulonglong2 values[PER_WARP][2];
#pragma unroll
            for (int i = 0; i < PER_WARP; i++) {
                const int64_t block = tile * TILE + i * WARPS + warp;
                if (block >= num_blocks) break;
                const char* in = payload.at((uint32_t)block, 16 * thread);
                values[i][0] = *(const ulonglong2*)in;
                values[i][1] = *(const ulonglong2*)(in + BLOCK / 2);
            }
#pragma unroll
            for (int i = 0; i < PER_WARP; i++) {
                if (tile * TILE + i * WARPS + warp >= num_blocks) break;
                uint64_t low = 0, high = 0;
#pragma unroll
                for (int half = 0; half < 2; half++) {
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
            const int count = (int)min((int64_t)TILE, num_blocks - (tile - 1) * TILE);
            const uint64_t(*in)[8] = sums[(tile - 1) & 1];
            // Sixteen are fetched ahead of the chain, which would otherwise wait for each.
            for (int i = 0; i < count; i += 16) {
                uint64_t next[16];
#pragma unroll
                for (int j = 0; j < 16; j++) next[j] = in[i + j][lane];
#pragma unroll
                for (int j = 0; j < 16; j++) {
                    if (i + j >= count) break;
                    acc += next[j];
                    acc = (acc ^ (acc >> 47) ^ scramble_key) * P32_1;
                }
            }
        }
        __syncthreads();
    }
    if (warp == WARPS && thread < 8) {
        const int64_t num_stripes = (length - 1 - num_blocks * BLOCK) / STRIPE;
        for (int i = 0; i <= num_stripes; i++) {
            const bool is_last = i == num_stripes;  // it may overlap the one before
            const char* in = is_last ? payload.at(0, 0) + (length - STRIPE) : payload.at((uint32_t)num_blocks, i * STRIPE);
            if (is_last && rows_per_payload > 1) in = payload.at((uint32_t)num_blocks, BLOCK - STRIPE);
            acc += ((const uint64_t*)in)[lane ^ 1];
            acc += product(((const uint64_t*)in)[lane] ^ secret((is_last ? 192 - STRIPE - 7 : 8 * i) + 8 * lane));
        }
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

EXPORT const char* launch_block_checksums(const Rows* rows, int64_t num_payloads, int64_t rows_per_payload, int64_t row_bytes, uint64_t* digests,
                                          cudaStream_t stream) {
    if (num_payloads == 0) return nullptr;
    xxh3<<<(unsigned)num_payloads, (WARPS + 1) * 32, 0, stream>>>(*rows, rows_per_payload, row_bytes, digests);
    return last_error();
}

EXPORT int block_checksum_struct_bytes(int) { return sizeof(Rows); }
