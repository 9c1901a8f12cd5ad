// Hopper's warpgroup matrix products (wgmma) and tensor copies (TMA), as FlashAttention and products of few rows need them. sm_90a only.
#pragma once
#include <cuda.h>
#include "async_copy.cuh"

// A tile in shared memory, rows of 128 bytes in the 128-byte swizzle (16-byte chunk c of row r stands at chunk c ^ (r % 8)), 8 rows
// = 1024 bytes. K-major operands step 1024 bytes from 8 rows to the next. For the transposed (MN-major) right operand the leading
// offset is the step between halves of 64 columns and the stride offset the step between 8 rows.
__device__ __forceinline__ uint64_t matrix_descriptor(const void* tile, uint32_t leading_bytes = 16) {
    uint64_t descriptor = (shared_address(tile) & 0x3ffff) >> 4;
    descriptor |= static_cast<uint64_t>((leading_bytes & 0x3ffff) >> 4) << 16;
    descriptor |= static_cast<uint64_t>(1024 >> 4) << 32;
    descriptor |= static_cast<uint64_t>(1) << 62;
    return descriptor;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

template <int N>
__device__ __forceinline__ void keep_in_registers(float (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

#define ACC8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define ACC32(d, i) ACC8(d, i), ACC8(d, i + 8), ACC8(d, i + 16), ACC8(d, i + 24)
#define REGS32                                                                                                          \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, " \
    "%25, %26, %27, %28, %29, %30, %31"
#define REGS64                                                                                                             \
    REGS32                                                                                                                 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, " \
    "%55, %56, %57, %58, %59, %60, %61, %62, %63"

// d[64 x 128] (+)= A[64 x 16] B[128 x 16]^T, both in shared memory, both K-major.
#define DEFINE_SS(NAME, TYPE)                                                                                         \
    __device__ __forceinline__ void NAME(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {                    \
        asm volatile(                                                                                                 \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                              \
            "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" REGS64 "}, %64, %65, p, 1, 1, 0, 0;\n}" \
            : ACC32(d, 0), ACC32(d, 32)                                                                               \
            : "l"(a), "l"(b), "r"(accumulate));                                                                       \
    }
// d[64 x N] += A[64 x 16] B[16 x N], A in registers, B in shared memory with N contiguous.
#define DEFINE_RS128(NAME, TYPE)                                                                                                  \
    __device__ __forceinline__ void NAME(float (&d)[64], const uint32_t* a, uint64_t b) {                                         \
        asm volatile(                                                                                                             \
            "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" REGS64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n" \
            : ACC32(d, 0), ACC32(d, 32)                                                                                           \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                                \
    }
#define DEFINE_RS64(NAME, TYPE)                                                                                                  \
    __device__ __forceinline__ void NAME(float (&d)[32], const uint32_t* a, uint64_t b) {                                        \
        asm volatile(                                                                                                            \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" REGS32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n" \
            : ACC32(d, 0)                                                                                                        \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                               \
    }
// d[64 x N] += A[64 x 16] B[N x 16]^T, both in shared memory, both K-major: N is a thread's items x 2.
#define DEFINE_FEW(NAME, TYPE, ITEMS, N, REGISTERS, ACCUMULATORS, A, B)                                                        \
    __device__ __forceinline__ void NAME(float (&d)[ITEMS], uint64_t a, uint64_t b) {                                         \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, " A ", " B ", 1, 1, 1, 0, 0;\n" \
                     : ACCUMULATORS                                                                                           \
                     : "l"(a), "l"(b));                                                                                       \
    }
#define ACC4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC16(d, i) ACC8(d, i), ACC8(d, i + 8)
#define REGS4 "%0, %1, %2, %3"
#define REGS8 REGS4 ", %4, %5, %6, %7"
#define REGS16 REGS8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define DEFINE_PRODUCTS(NAME, TYPE)                                                                 \
    static DEFINE_FEW(NAME, TYPE, 4, "8", REGS4, ACC4(d, 0), "%4", "%5")                            \
    static DEFINE_FEW(NAME, TYPE, 8, "16", REGS8, ACC8(d, 0), "%8", "%9")                           \
    static DEFINE_FEW(NAME, TYPE, 16, "32", REGS16, ACC16(d, 0), "%16", "%17")                      \
    static DEFINE_FEW(NAME, TYPE, 32, "64", REGS32, ACC32(d, 0), "%32", "%33")

template <typename T>
struct Wgmma;
template <>
struct Wgmma<__half> {
    static DEFINE_SS(scores, "f16") static DEFINE_RS128(values, "f16") static DEFINE_RS64(values, "f16") DEFINE_PRODUCTS(products, "f16")
};
template <>
struct Wgmma<__nv_bfloat16> {
    static DEFINE_SS(scores, "bf16") static DEFINE_RS128(values, "bf16") static DEFINE_RS64(values, "bf16") DEFINE_PRODUCTS(products, "bf16")
};

// A box of a rank-4 tensor to shared memory; what lies outside the tensor arrives as zeros.
__device__ __forceinline__ void tensor_copy(void* destination, const CUtensorMap* map, int c0, int c1, int c2, int c3, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
            shared_address(destination)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// The same of a rank-2 tensor, with an L2 policy or without.
__device__ __forceinline__ void tensor_copy(void* destination, const CUtensorMap* map, int c0, int c1, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared_address(destination)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1)
        : "memory");
}
__device__ __forceinline__ void tensor_copy(void* destination, const CUtensorMap* map, int c0, int c1, uint64_t* barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(
            shared_address(destination)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "l"(policy)
        : "memory");
}

// The description itself, so that the first copy need not wait for it.
__device__ __forceinline__ void prefetch_description(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

template <int REGISTERS>
__device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ void named_barrier_sync(int id, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
__device__ __forceinline__ void fence_shared_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
