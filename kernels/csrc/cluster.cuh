// Thread block clusters (sm_90 and newer): ranks, barriers and shared memory of the other blocks.
#pragma once
#include "async_copy.cuh"

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ uint32_t cluster_size() {
    uint32_t size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// By every thread of the cluster: all blocks run and have initialised their barriers (with mbarrier_init_fence). Orders nothing else.
__device__ __forceinline__ void cluster_start() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address of what `pointer` is here in the shared memory of the block of `rank`.
__device__ __forceinline__ uint32_t remote_address(const void* pointer, uint32_t rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(pointer)), "r"(rank));
    return address;
}

// Writes there and counts the bytes at the barrier there, which the block awaits with mbarrier_wait_cluster. Unlike a store and an arrival
// it needs no fence, which takes longer than what it orders.
__device__ __forceinline__ void remote_store(uint32_t address, uint32_t barrier, float value) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(value), "r"(barrier) : "memory");
}

__device__ __forceinline__ void remote_store(uint32_t address, uint32_t barrier, float first, float second) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address), "f"(first), "f"(second),
                 "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void mbarrier_wait_cluster(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    } while (!done);
}
