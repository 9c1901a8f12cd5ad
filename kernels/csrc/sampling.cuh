// Sampling without sorting the vocabulary, in integers, so that a draw is the same bit for bit on any device and in any split.
//
// A row's logits become levels, level = floor((maximum - logit) * scale), with scale = log2(e) / temperature * 2^23: how many 2^-23 octaves
// a token is less likely than the best one. Its weight is floor(2^40 * 2^(-level / 2^23)) by a polynomial whose every step is rounded once.
// Tokens are ordered by (logit descending, index ascending); each filter keeps a prefix of that order, so what is kept is a Boundary. Of what
// is kept the first to arrive in the exponential race wins, a minimum over tokens.
//
// A cluster of blocks shares a row. Each block reads its slice for the maxima of 2048 groups, whose k-th largest is a lower bound of the k-th
// largest logit; then again: to race where only min-p is on, else to collect the few logits above that bound, where their segments are, and to
// add up weights, where top-p needs the total. The first block sorts the candidates and lets what is kept race. What that cannot decide (large
// k, flat rows, many ties) goes through radix passes over the row.
#pragma once
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <float.h>
#include <stdint.h>

#include <utility>

#include "exponential_race.h"

namespace sampling {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kCapacity = 2048;
constexpr int kPerThread = kCapacity / kThreads;
constexpr int kStride = 512;  // elements a warp loads at once; the size of a segment is a multiple of it
constexpr int kMaxSlices = 8;
constexpr int kMaxGreedySlices = 16;  // more than the portable eight: Hopper and later take them when asked
constexpr uint32_t kMaxCandidatesK = 1024;
constexpr uint32_t kNucleusCandidates = 512;
constexpr uint32_t kFull = 0xffffffffu;
constexpr uint32_t kLowestKey = 0x007fffffu;  // the key of -infinity
constexpr uint32_t kLevelBits = 0x1fffffffu;
constexpr uint32_t kOut = 1u << 30;  // the level of a token that may not race
constexpr float kMaxLevel = 536870880.0f;  // the largest float below 2^29: 64 octaves
constexpr int kNumParameters = 7;

struct Parameters {
    float scale;  // 0: greedy
    uint32_t max_level;
    uint32_t top_k;    // 0: off
    uint32_t top_p31;  // in 2^-31; 2^31: off
    race::Keys keys;

    __device__ bool has_top_p() const { return top_p31 < (1u << 31); }
};

__device__ inline Parameters read_parameters(const int64_t* words, int size) {
    Parameters parameters{__uint_as_float((uint32_t)words[0]), (uint32_t)words[1], 0, (uint32_t)words[3], race::read_keys(words + 4)};
    if (words[2] > 0 && words[2] < size) parameters.top_k = (uint32_t)words[2];
    if (parameters.scale == 0.0f) {
        parameters.scale = 1.0f;
        parameters.max_level = kFull;
        parameters.top_k = size > 1 ? 1 : 0;
        parameters.top_p31 = 1u << 31;
    }
    return parameters;
}

template <typename T>
struct Row {
    const T* data;
    int size;
    int segment_size;
    bool is_aligned;

    __device__ Row(const T* data, int size, int segment_size)
        : data(data), size(size), segment_size(segment_size), is_aligned((uintptr_t)data % (4 * sizeof(T)) == 0) {}
    __device__ int num_segments() const { return (size + segment_size - 1) / segment_size; }
};

// The last token that is kept, in the order (level, order, index); order = ~key of the logit.
struct Boundary {
    uint32_t level, order, index;

    __device__ bool keeps(uint32_t l, uint32_t o, uint32_t i) const {
        if (l != level) return l < level;
        if (o != order) return o < order;
        return i <= index;
    }
};

struct Shared {
    union {
        uint64_t candidates[kCapacity];
        struct {
            uint32_t counts[kCapacity], low[kCapacity], high[kCapacity];
        } histogram;
    };
    uint64_t segment_sums[kCapacity];
    uint64_t warp_sums[2][kWarps];
    uint32_t warp_counts[2][kWarps];
    uint32_t slice_top, slice_threshold, num_candidates;
    uint32_t tops[kMaxSlices], thresholds[kMaxSlices], counts[kMaxSlices];
    uint64_t found_above, found_above_weight, found_amount, found_weight;
    uint64_t slice_weight, slice_first;
    uint32_t found;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ inline auto this_cluster() { return cooperative_groups::this_cluster(); }
#else
struct SingleBlock {  // before Hopper there are no clusters: a block has a row to itself
    __device__ unsigned num_blocks() const { return 1; }
    __device__ unsigned block_rank() const { return 0; }
    __device__ void sync() const { __syncthreads(); }
    __device__ int barrier_arrive() const { return 0; }
    __device__ void barrier_wait(int) const {}
    template <typename Memory>
    __device__ Memory* map_shared_rank(Memory* memory, int) const {
        return memory;
    }
};
__device__ inline SingleBlock this_cluster() { return {}; }
#endif

template <typename Memory>
__device__ inline Memory& block_memory() {
    __shared__ Memory memory;
    return memory;
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Larger logit, larger key; NaN is -infinity, and both zeros are one.
__device__ inline uint32_t key_of(float x) {
    const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));
    return x != x ? kLowestKey : (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}
__device__ inline float logit_of(uint32_t key) {
    if (key <= kLowestKey) return __uint_as_float(0xff800000u);
    return __uint_as_float((key & 0x80000000u) ? key & 0x7fffffffu : ~key);
}

// fminf turns the NaN of a NaN logit into the last level; the conversion saturates what +infinity makes negative to 0.
__device__ inline uint32_t level_of(float x, float maximum, float scale) {
    return __float2uint_rz(fminf(__fmul_rn(__fsub_rn(maximum, x), scale), kMaxLevel));
}

// 2^40 * 2^(-level / 2^23), rounded down. All coefficients are positive and every operation is rounded once, so it is monotone.
__device__ inline uint64_t weight_of(uint32_t level) {
    const float g = __fsub_rn(2.0f, __uint_as_float(0x3f800000u | (level & 0x7fffffu)));  // in (0, 1]
    float p = 0x1.b4d1e4p-13f;
    p = __fadd_rn(__fmul_rn(p, g), 0x1.4ca4ccp-10f);
    p = __fadd_rn(__fmul_rn(p, g), 0x1.3c4a8ap-7f);
    p = __fadd_rn(__fmul_rn(p, g), 0x1.c69f6ap-5f);
    p = __fadd_rn(__fmul_rn(p, g), 0x1.ebfc3ep-3f);
    p = __fadd_rn(__fmul_rn(p, g), 0x1.62e430p-1f);
    p = __fadd_rn(__fmul_rn(p, g), 1.0f);  // in (1, 2]
    return ((uint64_t)(__float_as_uint(p) - 0x3f000000u) << 16) >> (level >> 23);
}

// ceil(total * p31 / 2^31) for total < 2^62.
__device__ inline uint64_t share_of(uint64_t total, uint32_t p31) {
    const uint64_t low = (total & 0x7fffffffu) * p31;
    return (total >> 31) * p31 + ((low + 0x7fffffffu) >> 31);
}

__device__ inline float4 load4(const float* data) { return *reinterpret_cast<const float4*>(data); }
template <typename T>
__device__ inline float4 load4(const T* data) {
    struct alignas(8) Four {
        T x[4];
    };
    const Four four = *reinterpret_cast<const Four*>(data);
    return make_float4(to_float(four.x[0]), to_float(four.x[1]), to_float(four.x[2]), to_float(four.x[3]));
}

// One lane's part of the `kStride` elements from `begin` on, four at a time: visit(index of the first, logits); NaN past the end of the row.
// Every lane of the warp visits equally often, in ascending index.
template <typename T, typename Visit>
__device__ inline void visit_quads(const Row<T>& row, int begin, Visit visit) {
    const int first = begin + (int)(threadIdx.x % 32) * 4;
    float4 x[4];
    if (row.is_aligned && begin + kStride <= row.size) {  // one branch for the warp, so that all loads are on their way together
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = load4(row.data + first + j * 128);
    } else {
        const float nan = __uint_as_float(0x7fc00000u);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int index = first + j * 128;
            x[j].x = index + 0 < row.size ? to_float(row.data[index + 0]) : nan;
            x[j].y = index + 1 < row.size ? to_float(row.data[index + 1]) : nan;
            x[j].z = index + 2 < row.size ? to_float(row.data[index + 2]) : nan;
            x[j].w = index + 3 < row.size ? to_float(row.data[index + 3]) : nan;
        }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) visit(first + j * 128, x[j]);
}

// The same one at a time: visit(index, component, logit).
template <typename T, typename Visit>
__device__ inline void visit_stride(const Row<T>& row, int begin, Visit visit) {
    visit_quads(row, begin, [&](int index, const float4& x) {
        visit(index + 0, 0, x.x);
        visit(index + 1, 1, x.y);
        visit(index + 2, 2, x.z);
        visit(index + 3, 3, x.w);
    });
}

template <int num_warps = kWarps, typename T, typename Visit>
__device__ inline void visit_segments(const Row<T>& row, int first, int last, Visit visit) {
    for (int segment = first + (int)(threadIdx.x / 32); segment < last; segment += num_warps) {
        const int begin = segment * row.segment_size;
        for (int offset = 0; offset < row.segment_size; offset += kStride) visit_stride(row, begin + offset, visit);
    }
}

__device__ inline uint64_t warp_sum(uint64_t value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kFull, (unsigned long long)value, offset);
    return value;
}
__device__ inline uint64_t warp_inclusive_sum(uint64_t value) {
    const int lane = threadIdx.x % 32;
    for (int offset = 1; offset < 32; offset *= 2) {
        const uint64_t below = __shfl_up_sync(kFull, (unsigned long long)value, offset);
        if (lane >= offset) value += below;
    }
    return value;
}

// Sum over the threads before this one; `total` over all of them.
__device__ inline uint64_t block_exclusive_sum(Shared& shared, uint64_t value, uint64_t& total) {
    const int warp = threadIdx.x / 32;
    const uint64_t inclusive = warp_inclusive_sum(value);
    __syncthreads();
    if (threadIdx.x % 32 == 31) shared.warp_sums[0][warp] = inclusive;
    __syncthreads();
    uint64_t before = 0;
    total = 0;
    for (int w = 0; w < kWarps; ++w) {
        if (w == warp) before = total;
        total += shared.warp_sums[0][w];
    }
    return before + inclusive - value;
}

// values[threadIdx.x * kPerThread + i] for the block's 2048 entries: finds the one entry with exclusive sum < amount <= inclusive sum.
// found(entry, exclusive sum) is called by the one thread that has it. Returns the total.
template <typename Found>
__device__ inline uint64_t find_crossing(Shared& shared, const uint64_t (&values)[kPerThread], uint64_t amount, Found found) {
    uint64_t sum = 0, total;
    for (int i = 0; i < kPerThread; ++i) sum += values[i];
    uint64_t before = block_exclusive_sum(shared, sum, total);
    for (int i = 0; i < kPerThread; ++i) {
        if (before < amount && amount <= before + values[i]) found(threadIdx.x * kPerThread + i, before);
        before += values[i];
    }
    return total;
}

// The largest key t such that at least `count` of the block's keys are >= t; stops early at one with exactly `count`.
__device__ inline uint32_t kth_largest(Shared& shared, const uint32_t (&keys)[4], uint32_t count) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t threshold = 0;
    for (int bit = 31; bit >= 0; --bit) {
        const uint32_t middle = threshold | 1u << bit;
        uint32_t above = 0;
        for (int i = 0; i < 4; ++i) above += keys[i] >= middle;
        above = __reduce_add_sync(kFull, above);
        // Two buffers make one barrier enough: a warp writes the next count while another still reads this one.
        if (lane == 0) shared.warp_counts[bit & 1][warp] = above;
        __syncthreads();
        above = __reduce_add_sync(kFull, lane < kWarps ? shared.warp_counts[bit & 1][lane] : 0);
        if (above >= count) threshold = middle;
        if (above == count) break;
    }
    __syncthreads();
    return threshold;
}

__device__ inline uint32_t block_max(Shared& shared, uint32_t value) {
    value = __reduce_max_sync(kFull, value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.warp_counts[0][threadIdx.x / 32] = value;
    __syncthreads();
    uint32_t result = 0;
    for (int w = 0; w < kWarps; ++w) result = max(result, shared.warp_counts[0][w]);
    __syncthreads();
    return result;
}

__device__ __forceinline__ uint64_t warp_min(uint64_t value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value = min(value, (uint64_t)__shfl_xor_sync(kFull, (unsigned long long)value, offset));
    return value;
}

__device__ inline uint64_t block_min(Shared& shared, uint64_t value) {
    value = warp_min(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.warp_sums[0][threadIdx.x / 32] = value;
    __syncthreads();
    uint64_t result = ~0ull;
    for (int w = 0; w < kWarps; ++w) result = min(result, shared.warp_sums[0][w]);
    return result;
}

// Ascending, in shared memory. Returns how many entries were sorted: `count` up to a power of two, the rest of them all ones.
__device__ inline void sort_candidates(Shared& shared, int count) {
    int padded = 2;
    while (padded < count) padded *= 2;
    for (int i = count + threadIdx.x; i < padded; i += kThreads) shared.candidates[i] = ~0ull;
    for (int size = 2; size <= padded; size *= 2) {
        for (int stride = size / 2; stride > 0; stride /= 2) {
            __syncthreads();
            for (int pair = threadIdx.x; pair < padded / 2; pair += kThreads) {
                const int low = pair / stride * stride * 2 + pair % stride, high = low + stride;
                const uint64_t a = shared.candidates[low], b = shared.candidates[high];
                if ((a > b) == ((low & size) == 0)) {
                    shared.candidates[low] = b;
                    shared.candidates[high] = a;
                }
            }
        }
    }
    __syncthreads();
}

__device__ inline uint64_t candidate_of(float x, int index) { return (uint64_t)~key_of(x) << 32 | (uint32_t)index; }
__device__ inline float logit_of_order(uint32_t order) { return logit_of(~order); }

// Takes the logits that are >= threshold, all of them when it is -infinity. num_candidates goes past the capacity if they are too many;
// is_full then keeps a thread from counting further.
struct Collector {
    float threshold;
    bool is_full = false;

    __device__ void offer(Shared& shared, float x, int index, int size) {
        const bool takes_all = threshold == __uint_as_float(0xff800000u);
        if ((x >= threshold || takes_all) && index < size && !is_full) {
            const uint32_t place = atomicAdd(&shared.num_candidates, 1u);
            if (place < kCapacity) {
                shared.candidates[place] = candidate_of(x, index);
            } else {
                is_full = true;
            }
        }
    }
};

// segment_sums holds the sum of value(index, logit) of every segment: the first index whose inclusive sum reaches `amount`.
template <typename T, typename Value>
__device__ inline int locate(Shared& shared, const Row<T>& row, uint64_t amount, Value value) {
    const int num_segments = row.num_segments(), lane = threadIdx.x % 32;
    uint64_t sums[kPerThread];
    for (int i = 0; i < kPerThread; ++i) {
        const int segment = threadIdx.x * kPerThread + i;
        sums[i] = segment < num_segments ? shared.segment_sums[segment] : 0;
    }
    find_crossing(shared, sums, amount, [&](int segment, uint64_t before) {
        shared.found = segment;
        shared.found_amount = amount - before;
    });
    __syncthreads();
    if (threadIdx.x < 32) {
        const int begin = shared.found * row.segment_size;
        uint64_t left = shared.found_amount;
        __syncwarp();  // all have read before one writes
        for (int offset = 0; offset < row.segment_size; offset += 128) {
            const int first = begin + offset + lane * 4;
            uint64_t values[4], sum = 0;
            for (int i = 0; i < 4; ++i) {
                values[i] = first + i < row.size ? value(first + i, to_float(row.data[first + i])) : 0;
                sum += values[i];
            }
            const uint64_t inclusive = warp_inclusive_sum(sum);
            uint64_t before = inclusive - sum;
            const bool has_it = before < left && left <= inclusive;
            if (has_it) {
                int i = 0;
                for (; before + values[i] < left; ++i) before += values[i];
                shared.found = first + i;
            }
            if (__ballot_sync(kFull, has_it)) break;
            left -= __shfl_sync(kFull, (unsigned long long)inclusive, 31);
        }
    }
    __syncthreads();
    return shared.found;
}

template <typename T, typename Value>
__device__ inline uint64_t sum_segments(Shared& shared, const Row<T>& row, int first, int last, Value value) {
    uint64_t total = 0;
    for (int segment = first + (int)(threadIdx.x / 32); segment < last; segment += kWarps) {
        const int begin = segment * row.segment_size;
        uint64_t sum = 0;
        for (int offset = 0; offset < row.segment_size; offset += kStride) {
            visit_stride(row, begin + offset, [&](int index, int, float x) { sum += index < row.size ? value(index, x) : 0; });
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) shared.segment_sums[segment] = sum;
        total += sum;
    }
    // Each lane holds its warp's total; one of them counts.
    uint64_t result;
    block_exclusive_sum(shared, threadIdx.x % 32 == 0 ? total : 0, result);
    return result;
}

// Adds to the histogram; every lane of the warp calls it, with bucket < 0 for nothing. Shared memory has no 64-bit atomic addition in
// hardware: the low word carries into the high one, and the order of additions does not matter in the end.
__device__ inline void add_to_histogram(Shared& shared, int bucket, uint64_t weight) {
    int is_same;
    __match_all_sync(kFull, bucket, &is_same);
    uint32_t count = 1;
    if (is_same) {  // flat rows: one addition for the warp instead of 32 in a row
        if (bucket < 0) return;
        weight = warp_sum(weight);
        count = 32;
        if (threadIdx.x % 32 != 0) return;
    }
    if (bucket < 0) return;
    atomicAdd(&shared.histogram.counts[bucket], count);
    const uint32_t low = (uint32_t)weight;
    uint32_t high = (uint32_t)(weight >> 32);
    if (low) high += atomicAdd(&shared.histogram.low[bucket], low) > ~low;
    if (high) atomicAdd(&shared.histogram.high[bucket], high);
}

// Moves `boundary` up so that only the first tokens in order stay: `amount` of them, or the fewest whose weight reaches `amount`.
// Returns the weight of what stays. Radix passes over three digits of the level and three of the logit, then the index decides ties.
template <typename T>
__device__ uint64_t narrow(Shared& shared, const Row<T>& row, float maximum, float scale, Boundary& boundary, bool is_by_weight, uint64_t amount) {
    uint32_t level_prefix = 0, level_mask = 0, order_prefix = 0, order_mask = 0;
    uint64_t above_weight = 0;
    const int num_segments = row.num_segments();
    for (int digit = 0; digit < 6; ++digit) {
        const bool is_level = digit < 3;
        const int shift = digit == 0 ? 18 : digit == 1 ? 9 : digit == 3 ? 21 : digit == 4 ? 10 : 0;
        const uint32_t mask = digit == 0 || digit == 3 || digit == 4 ? 2047 : digit == 5 ? 1023 : 511;
        if (digit == 3 && is_by_weight) {  // one weight for all that are left
            const uint64_t weight = weight_of(level_prefix);
            amount = (amount + weight - 1) / weight;
            is_by_weight = false;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < kCapacity; i += kThreads) {
            shared.histogram.counts[i] = shared.histogram.low[i] = shared.histogram.high[i] = 0;
        }
        __syncthreads();
        visit_segments(row, 0, num_segments, [&](int index, int, float x) {
            const uint32_t level = level_of(x, maximum, scale), order = ~key_of(x);
            const bool is_in = index < row.size && (level & level_mask) == level_prefix && (order & order_mask) == order_prefix &&
                               boundary.keeps(level, order, index);
            add_to_histogram(shared, is_in ? (int)((is_level ? level : order) >> shift & mask) : -1, is_in ? weight_of(level) : 0);
        });
        __syncthreads();
        uint64_t counts[kPerThread], weights[kPerThread];
        for (int i = 0; i < kPerThread; ++i) {
            const int bucket = threadIdx.x * kPerThread + i;
            counts[i] = shared.histogram.counts[bucket];
            weights[i] = (uint64_t)shared.histogram.high[bucket] << 32 | shared.histogram.low[bucket];
        }
        uint64_t sum = 0, total_weight;
        for (int i = 0; i < kPerThread; ++i) sum += weights[i];
        const uint64_t weight_before = block_exclusive_sum(shared, sum, total_weight);
        const uint64_t total = find_crossing(shared, is_by_weight ? weights : counts, amount, [&](int bucket, uint64_t before) {
            const int mine = bucket % kPerThread;
            uint64_t above = weight_before, metric = 0, weight = 0;
            for (int i = 0; i < kPerThread; ++i) {
                if (i < mine) above += weights[i];
                if (i == mine) metric = is_by_weight ? weights[i] : counts[i];
                if (i == mine) weight = weights[i];
            }
            shared.found = bucket;
            shared.found_above = before;
            shared.found_above_weight = above;
            shared.found_amount = metric;
            shared.found_weight = weight;
        });
        if (total < amount) return total_weight;  // only in the first pass: fewer are left than may stay
        __syncthreads();
        amount -= shared.found_above;
        above_weight += shared.found_above_weight;
        (is_level ? level_prefix : order_prefix) |= shared.found << shift;
        (is_level ? level_mask : order_mask) |= mask << shift;
        if (amount == shared.found_amount) {
            const Boundary end{level_prefix | (kLevelBits & ~level_mask), order_prefix | ~order_mask, kFull};
            if (boundary.keeps(end.level, end.order, end.index)) boundary = end;
            return above_weight + shared.found_weight;
        }
    }
    const Boundary old = boundary;
    const auto is_tie = [&](int index, float x) -> uint64_t {
        const uint32_t level = level_of(x, maximum, scale), order = ~key_of(x);
        return level == level_prefix && order == order_prefix && old.keeps(level, order, index);
    };
    sum_segments(shared, row, 0, num_segments, is_tie);
    __syncthreads();
    boundary = Boundary{level_prefix, order_prefix, (uint32_t)locate(shared, row, amount, is_tie)};
    return above_weight + amount * weight_of(level_prefix);
}

// Lets the tokens of segments [first, last) that `boundary` keeps race. Returns this thread's first arrival.
template <typename T>
__device__ inline uint64_t race_segments(const Row<T>& row, int first, int last, const Parameters& parameters, float maximum,
                                         const Boundary& boundary, const int32_t* table) {
    race::First best;
    for (int segment = first + (int)(threadIdx.x / 32); segment < last; segment += kWarps) {
        for (int offset = 0; offset < row.segment_size; offset += kStride) {
            visit_quads(row, segment * row.segment_size + offset, [&](int index, const float4& x) {
                const float logits[4] = {x.x, x.y, x.z, x.w};
                uint32_t levels[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const uint32_t level = level_of(logits[i], maximum, parameters.scale);
                    levels[i] = index + i < row.size && boundary.keeps(level, ~key_of(logits[i]), index + i) ? level : kOut;
                }
                if (min(min(levels[0], levels[1]), min(levels[2], levels[3])) <= best.limit) {
                    const race::Words bits = race::token_bits(parameters.keys, (uint32_t)index / 4);
#pragma unroll
                    for (int i = 0; i < 4; ++i) best.offer(table, levels[i], bits.x[i], index + i);
                }
                best.limit = __reduce_min_sync(kFull, best.limit);  // what lost to any lane need not be looked up
            });
        }
    }
    return best.arrival;
}

// The whole row, by one block: any parameters, any distribution. Returns the first arrival. A function of its own, so that the faster paths
// keep their registers.
template <typename T>
__device__ __noinline__ uint64_t draw_by_radix(Shared& shared, Row<T> row, Parameters parameters, float maximum, const int32_t* table) {
    Boundary boundary{parameters.max_level, kFull, kFull};
    const float scale = parameters.scale;
    uint64_t total = 0;
    if (parameters.top_k) total = narrow(shared, row, maximum, scale, boundary, false, parameters.top_k);
    if (parameters.has_top_p()) {
        if (!parameters.top_k) {
            total = sum_segments(shared, row, 0, row.num_segments(), [&](int, float x) -> uint64_t {
                const uint32_t level = level_of(x, maximum, scale);
                return level <= parameters.max_level ? weight_of(level) : 0;
            });
        }
        narrow(shared, row, maximum, scale, boundary, true, share_of(total, parameters.top_p31));
    }
    return block_min(shared, race_segments(row, 0, row.num_segments(), parameters, maximum, boundary, table));
}

// `count` candidates lie in shared memory, the first of the row in order. row_weight: of all tokens that min-p leaves, where only top-p is on.
// Returns the first arrival; all ones: the nucleus reaches past the candidates.
__device__ inline uint64_t draw_from_candidates(Shared& shared, const Parameters& parameters, float maximum, const int32_t* table, int count,
                                                uint64_t row_weight) {
    sort_candidates(shared, count);
    uint64_t weights[kPerThread], sum = 0, total;
    const int limit = parameters.top_k ? min(count, (int)parameters.top_k) : count;
    for (int i = 0; i < kPerThread; ++i) {
        const int place = threadIdx.x * kPerThread + i;
        const uint32_t level =
            place < limit ? level_of(logit_of_order((uint32_t)(shared.candidates[place] >> 32)), maximum, parameters.scale) : kFull;
        weights[i] = place < limit && level <= parameters.max_level ? weight_of(level) : 0;
        sum += weights[i];
    }
    int kept = limit;
    if (parameters.has_top_p()) {
        block_exclusive_sum(shared, sum, total);
        const uint64_t target = share_of(parameters.top_k ? total : row_weight, parameters.top_p31);
        if (total < target) return ~0ull;
        find_crossing(shared, weights, target, [&](int place, uint64_t) { shared.found = place; });
        __syncthreads();
        kept = shared.found + 1;
    }
    race::First best;
    for (int place = threadIdx.x; place < kept; place += kThreads) {
        const uint32_t token = (uint32_t)shared.candidates[place];
        const uint32_t level = level_of(logit_of_order((uint32_t)(shared.candidates[place] >> 32)), maximum, parameters.scale);
        const race::Words bits = race::token_bits(parameters.keys, token / 4);
        const uint32_t mine = token % 4 == 0 ? bits.x[0] : token % 4 == 1 ? bits.x[1] : token % 4 == 2 ? bits.x[2] : bits.x[3];
        if (level <= parameters.max_level) best.offer(table, level, mine, token);
    }
    return block_min(shared, best.arrival);
}

// Keys of the maxima of 4 groups a thread, over segments [first, last); segment_sums gets the key of each segment's maximum.
template <typename T>
__device__ inline void group_maxima(Shared& shared, const Row<T>& row, int first, int last, uint32_t (&keys)[4]) {
    const float lowest = __uint_as_float(0xff800000u);
    float maxima[4] = {lowest, lowest, lowest, lowest};
    for (int segment = first + (int)(threadIdx.x / 32); segment < last; segment += kWarps) {
        const int begin = segment * row.segment_size;
        float tops[4] = {lowest, lowest, lowest, lowest};
        for (int offset = 0; offset < row.segment_size; offset += kStride) {
            visit_stride(row, begin + offset, [&](int, int component, float x) { tops[component] = fmaxf(tops[component], x); });
        }
        for (int i = 0; i < 4; ++i) maxima[i] = fmaxf(maxima[i], tops[i]);
        const uint32_t top = __reduce_max_sync(kFull, key_of(fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]))));
        if (threadIdx.x % 32 == 0) shared.segment_sums[segment] = top;
    }
    for (int i = 0; i < 4; ++i) keys[i] = key_of(maxima[i]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    sample_kernel(const T* logits, int64_t row_stride, int size, int segment_size, const int64_t* parameter_rows, const int32_t* table,
                  int64_t* token_ids) {
    Shared& shared = block_memory<Shared>();
    const auto cluster = this_cluster();
    const int num_slices = cluster.num_blocks(), slice = cluster.block_rank();
    const int64_t row_index = blockIdx.x / num_slices;
    const Row<T> row(logits + row_index * row_stride, size, segment_size);
    const Parameters parameters = read_parameters(parameter_rows + row_index * kNumParameters, size);
    const int num_segments = row.num_segments();
    const int first = (int)((int64_t)num_segments * slice / num_slices), last = (int)((int64_t)num_segments * (slice + 1) / num_slices);
    const uint32_t wanted = parameters.top_k ? parameters.top_k : parameters.has_top_p() ? kNucleusCandidates : 0;
    const bool collects = wanted > 0 && wanted <= kMaxCandidatesK;
    const bool adds_up = parameters.top_k == 0 && parameters.has_top_p();

    uint32_t keys[4];
    group_maxima(shared, row, first, last, keys);
    const uint32_t top = block_max(shared, max(max(keys[0], keys[1]), max(keys[2], keys[3])));
    // A bound that at least a slice's share exceeds in every slice is one that `wanted` exceed in the row.
    const uint32_t bound = collects ? kth_largest(shared, keys, (wanted + num_slices - 1) / num_slices) : 0;
    if (threadIdx.x == 0) {
        shared.slice_top = top;
        shared.slice_threshold = bound;
        shared.num_candidates = 0;
    }
    cluster.sync();
    if (threadIdx.x < num_slices) {
        const Shared* peer = cluster.map_shared_rank(&shared, threadIdx.x);
        shared.tops[threadIdx.x] = peer->slice_top;
        shared.thresholds[threadIdx.x] = peer->slice_threshold;
    }
    __syncthreads();
    uint32_t row_top = 0, row_threshold = kFull;
    for (int i = 0; i < num_slices; ++i) {
        row_top = max(row_top, shared.tops[i]);
        row_threshold = min(row_threshold, shared.thresholds[i]);
    }
    const bool is_empty = row_top <= kLowestKey;  // nothing but NaN and -infinity
    const float maximum = fminf(logit_of(row_top), FLT_MAX), threshold = logit_of(row_threshold);
    Collector collector{threshold};
    uint64_t slice_weight = 0, slice_first = ~0ull;
    if (!is_empty && adds_up) {
        slice_weight = sum_segments(shared, row, first, last, [&](int index, float x) -> uint64_t {
            const uint32_t level = level_of(x, maximum, parameters.scale);
            collector.offer(shared, x, index, size);
            return level <= parameters.max_level ? weight_of(level) : 0;
        });
    } else if (!is_empty && collects) {
        for (int segment = first + (int)(threadIdx.x / 32); segment < last; segment += kWarps) {
            if (shared.segment_sums[segment] < row_threshold) continue;  // most segments: they need not be read again
            for (int offset = 0; offset < segment_size; offset += kStride) {
                visit_stride(row, segment * segment_size + offset,
                             [&](int index, int, float x) { collector.offer(shared, x, index, size); });
            }
        }
    }
    if (!is_empty && wanted == 0) {
        const Boundary boundary{parameters.max_level, kFull, kFull};
        slice_first = block_min(shared, race_segments(row, first, last, parameters, maximum, boundary, table));
    }
    if (threadIdx.x == 0) {
        shared.slice_weight = slice_weight;
        shared.slice_first = slice_first;
    }
    cluster.sync();
    if (slice == 0 && is_empty && threadIdx.x == 0) token_ids[row_index] = 0;
    if (slice == 0 && !is_empty) {
        if (threadIdx.x < num_slices) shared.counts[threadIdx.x] = cluster.map_shared_rank(&shared, threadIdx.x)->num_candidates;
        uint64_t row_weight = 0, first_arrival = ~0ull;
        for (int i = 0; i < num_slices; ++i) {
            const Shared* peer = cluster.map_shared_rank(&shared, i);
            row_weight += peer->slice_weight;
            first_arrival = min(first_arrival, peer->slice_first);
        }
        __syncthreads();
        if (collects) {
            int count = shared.counts[0];
            for (int i = 1; i < num_slices && count <= kCapacity; ++i) {
                const int more = shared.counts[i];
                const Shared* peer = cluster.map_shared_rank(&shared, i);
                if (count + more <= kCapacity) {
                    for (int place = threadIdx.x; place < more; place += kThreads) shared.candidates[count + place] = peer->candidates[place];
                }
                count += more;
            }
            __syncthreads();
            if (count <= kCapacity) first_arrival = draw_from_candidates(shared, parameters, maximum, table, count, row_weight);
        }
        if (first_arrival == ~0ull) first_arrival = draw_by_radix(shared, row, parameters, maximum, table);
        if (threadIdx.x == 0) token_ids[row_index] = (uint32_t)first_arrival;
    }
    cluster.sync();  // the first block reads the others' shared memory until here
}

// The lowest index of the largest logit; NaN never wins. A cluster shares a row, and each block writes its best into the first one's memory:
// nothing is read from another block, so there is one barrier on the way out.
template <typename T, int num_warps>
__global__ void __launch_bounds__(num_warps * 32, 48 / num_warps)
    greedy_kernel(const T* logits, int64_t row_stride, int size, int segment_size, int64_t* token_ids) {
    uint64_t(&best)[num_warps + kMaxGreedySlices] = block_memory<uint64_t[num_warps + kMaxGreedySlices]>();
    uint64_t* const of_slices = best + num_warps;
    const auto cluster = this_cluster();
    auto all_run = cluster.barrier_arrive();  // no block may write to one that has not begun
    const int num_slices = cluster.num_blocks(), slice = cluster.block_rank();
    const int64_t row_index = blockIdx.x / num_slices;
    const Row<T> row(logits + row_index * row_stride, size, segment_size);
    const int num_segments = row.num_segments();
    const int first = (int)((int64_t)num_segments * slice / num_slices), last = (int)((int64_t)num_segments * (slice + 1) / num_slices);
    float largest = __uint_as_float(0xff800000u);
    int at = 0;
    visit_segments<num_warps>(row, first, last, [&](int index, int, float x) {
        if (x > largest) {
            largest = x;
            at = index;
        }
    });
    // As in the candidates, smaller is better: then the lowest index wins among equals.
    uint64_t mine = warp_min(candidate_of(largest, at));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) best[warp] = mine;
    __syncthreads();
    cluster.barrier_wait(std::move(all_run));
    if (warp == 0) {
        mine = warp_min(lane < num_warps ? best[lane] : ~0ull);
        if (lane == 0) *cluster.map_shared_rank(of_slices + slice, 0) = mine;
    }
    cluster.sync();
    if (slice == 0 && warp == 0) {
        const uint64_t winner = warp_min(lane < num_slices ? of_slices[lane] : ~0ull);
        if (lane == 0) token_ids[row_index] = (uint32_t)winner;
    }
}

// Raw log-softmax in fp32 of one token per asked row, its rank, and the num_top most likely tokens. One block a row.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    logprobs_kernel(const T* logits, int64_t row_stride, int64_t num_rows, int size, int segment_size, const int64_t* rows, const int64_t* token_ids,
                    int num_top, float* logprobs, int64_t* ranks, int64_t* top_ids, float* top_logprobs) {
    Shared& shared = block_memory<Shared>();
    const int64_t item = blockIdx.x, token = token_ids[item];
    if (rows[item] < 0 || rows[item] >= num_rows) return;
    const Row<T> row(logits + rows[item] * row_stride, size, segment_size);
    const int num_segments = row.num_segments();
    const uint32_t chosen_key = token >= 0 && token < size ? key_of(to_float(row.data[token])) : kLowestKey;
    const float chosen = logit_of(chosen_key), lowest = __uint_as_float(0xff800000u);
    float maxima[4] = {lowest, lowest, lowest, lowest};
    uint32_t rank = 0, keys[4];
    visit_segments(row, 0, num_segments, [&](int, int component, float x) {
        maxima[component] = fmaxf(maxima[component], x);
        rank += x > chosen;
    });
    for (int i = 0; i < 4; ++i) keys[i] = key_of(maxima[i]);
    const float maximum = fminf(logit_of(block_max(shared, max(max(keys[0], keys[1]), max(keys[2], keys[3])))), FLT_MAX);
    const float threshold = num_top > 0 ? logit_of(kth_largest(shared, keys, num_top)) : lowest;
    if (threadIdx.x == 0) shared.num_candidates = 0;
    __syncthreads();
    Collector collector{threshold};
    float sum = 0.0f;
    visit_segments(row, 0, num_segments, [&](int index, int, float x) {
        sum += x == x ? expf(x - maximum) : 0.0f;
        if (num_top > 0) collector.offer(shared, x, index, size);
    });
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFull, sum, offset);
    rank = __reduce_add_sync(kFull, rank);
    if (threadIdx.x % 32 == 0) {
        shared.warp_counts[0][threadIdx.x / 32] = rank;
        shared.warp_counts[1][threadIdx.x / 32] = __float_as_uint(sum);
    }
    __syncthreads();
    rank = 0;
    sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) {
        rank += shared.warp_counts[0][w];
        sum += __uint_as_float(shared.warp_counts[1][w]);
    }
    const float log_sum = logf(sum);
    if (threadIdx.x == 0) {
        logprobs[item] = chosen - maximum - log_sum;
        ranks[item] = (int64_t)rank + 1;
    }
    if (num_top == 0) return;
    if (shared.num_candidates > kCapacity) {
        __syncthreads();
        Boundary boundary{kFull, kFull, kFull};
        const float scale = 12102203.0f;  // temperature 1; any scale gives the same order
        narrow(shared, row, maximum, scale, boundary, false, num_top);
        __syncthreads();
        if (threadIdx.x == 0) shared.num_candidates = 0;
        __syncthreads();
        collector = Collector{lowest};
        visit_segments(row, 0, num_segments, [&](int index, int, float x) {
            if (boundary.keeps(level_of(x, maximum, scale), ~key_of(x), index)) collector.offer(shared, x, index, size);
        });
        __syncthreads();
    }
    sort_candidates(shared, shared.num_candidates);
    for (int i = threadIdx.x; i < num_top; i += kThreads) {
        top_ids[item * num_top + i] = (uint32_t)shared.candidates[i];
        top_logprobs[item * num_top + i] = logit_of_order((uint32_t)(shared.candidates[i] >> 32)) - maximum - log_sum;
    }
}

// history [num_slots, size]: bit 31 = the token is in the prompt, the rest = how often it was generated.
constexpr uint32_t kInPrompt = 0x80000000u;

__global__ void record_tokens_kernel(uint32_t* history, int64_t slot_stride, int64_t num_slots, int size, const int64_t* slots,
                                     const int64_t* token_ids, int64_t count, bool is_prompt) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const int64_t slot = slots[i], token = token_ids[i];
    if (slot < 0 || slot >= num_slots || token < 0 || token >= size) return;
    uint32_t* entry = history + slot * slot_stride + token;
    if (is_prompt) {
        atomicOr(entry, kInPrompt);
    } else {
        atomicAdd(entry, 1u);
    }
}

// penalties [num_rows, 3]: repetition, frequency, presence. Reads a logit only where the history has its token.
__global__ void apply_penalties_kernel(float* logits, int64_t row_stride, int size, const uint32_t* history, int64_t slot_stride, int64_t num_slots,
                                       const int64_t* slots, const float* penalties) {
    const int64_t row = blockIdx.y, slot = slots[row];
    const int token = blockIdx.x * blockDim.x + threadIdx.x;
    if (slot < 0 || slot >= num_slots || token >= size) return;
    const uint32_t entry = history[slot * slot_stride + token];
    if (entry == 0) return;
    const float repetition = penalties[row * 3], frequency = penalties[row * 3 + 1], presence = penalties[row * 3 + 2];
    float* logit = logits + row * row_stride + token;
    float x = *logit;
    x = x > 0.0f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    const uint32_t count = entry & ~kInPrompt;
    if (count) x = __fsub_rn(x, __fadd_rn(__fmul_rn(frequency, (float)count), presence));
    *logit = x;
}

__global__ void apply_token_bias_kernel(float* logits, int64_t row_stride, int64_t num_rows, int size, const int64_t* rows, const int64_t* token_ids,
                                        const float* values, int64_t count) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const int64_t row = rows[i], token = token_ids[i];
    if (row < 0 || row >= num_rows || token < 0 || token >= size) return;
    float* logit = logits + row * row_stride + token;
    *logit = __fadd_rn(*logit, values[i]);
}

// masks [num_masks, words]: bit t % 32 of word t / 32 is set where token t may be drawn in row rows[i].
__global__ void apply_token_mask_kernel(float* logits, int64_t row_stride, int64_t num_rows, int size, const int64_t* rows, const uint32_t* masks,
                                        int64_t num_words) {
    const int64_t row = rows[blockIdx.y];
    const int token = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < 0 || row >= num_rows || token >= size) return;
    if (!(masks[blockIdx.y * num_words + token / 32] >> (token % 32) & 1)) logits[row * row_stride + token] = __uint_as_float(0xff800000u);
}

}  // namespace sampling
