// Reads a buffer once and does nothing with it: the time that a kernel reading the same bytes cannot beat. For benches.
#include "launch.cuh"

namespace {

constexpr int kThreads = 512;

__global__ void read_kernel(const uint4* data, int64_t count, unsigned* out) {
    const int64_t stride = (int64_t)gridDim.x * kThreads;
    unsigned sum = 0;
    int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x;
    for (; i + 3 * stride < count; i += 4 * stride) {
        const uint4 a = data[i], b = data[i + stride], c = data[i + 2 * stride], d = data[i + 3 * stride];
        sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < count; i += stride) {
        const uint4 a = data[i];
        sum ^= a.x ^ a.y ^ a.z ^ a.w;
    }
    if (sum == 0x12345678u) *out = sum;  // keeps the loads
}

}  // namespace

EXPORT const char* read_once(const void* data, int64_t size_bytes, unsigned* out, int num_blocks, cudaStream_t stream) {
    read_kernel<<<(unsigned)num_blocks, kThreads, 0, stream>>>((const uint4*)data, size_bytes / 16, out);
    return last_error();
}
