// The draw of kernels/exponential_race.py in plain integers, for the CPU and the GPU alike.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#define RACE_FUNCTION __device__ inline
#else
#define RACE_FUNCTION inline
#endif

namespace race {

constexpr uint32_t kSegmentBits = 6;
constexpr uint32_t kNumNodes = (26u << kSegmentBits) + 1;
constexpr uint32_t kLast = 39u << 23;  // later than the arrival of any token of level 0

struct Keys {
    uint64_t seed, sequence_index, position;
};

RACE_FUNCTION Keys read_keys(const int64_t* words) { return {(uint64_t)words[0], (uint64_t)words[1], (uint64_t)words[2]}; }

struct Words {
    uint32_t x[4];
};

// Philox4x32-10 (Salmon et al. 2011): the random bits of tokens 4 * quad .. 4 * quad + 3.
RACE_FUNCTION Words token_bits(const Keys& keys, uint32_t quad) {
    uint32_t c0 = (uint32_t)keys.position, c1 = (uint32_t)(keys.position >> 32), c2 = (uint32_t)keys.sequence_index, c3 = quad;
    uint32_t k0 = (uint32_t)keys.seed, k1 = (uint32_t)(keys.seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

RACE_FUNCTION uint32_t bit_length(uint32_t x) {
#ifdef __CUDA_ARCH__
    return 32 - __clz((int)x);
#else
    return x ? 32 - (uint32_t)__builtin_clz(x) : 0;
#endif
}

// log2(E) + 33 octaves is at least this; most tokens need not be looked up to see that they lose.
RACE_FUNCTION uint32_t least_log_time(uint32_t bits) { return bit_length(bits) << 23; }

// table: log_time_table(), [2, kNumNodes].
RACE_FUNCTION uint32_t log_time(const int32_t* table, uint32_t bits) {
    const bool is_second = bits >> 31;
    const uint32_t s = is_second ? ~bits : bits, length = bit_length(s), shift = length > kSegmentBits + 1 ? length - kSegmentBits - 1 : 0;
    const int32_t* node = table + (is_second ? kNumNodes : 0) + (shift << kSegmentBits) + (s >> shift);
    const int64_t part = s & ((1u << shift) - 1);
    return (uint32_t)(node[0] + (int32_t)((node[1] - node[0]) * part >> shift));
}

// Who arrives first among those offered: the smallest (level + log_time, token).
struct First {
    uint64_t arrival = ~0ull;  // time << 32 | token
    uint32_t limit = kLast;    // what arrives later than this has lost

    RACE_FUNCTION void offer(const int32_t* table, uint32_t level, uint32_t bits, uint32_t token) {
        if (level + least_log_time(bits) > limit) return;
        const uint32_t time = level + log_time(table, bits);
        const uint64_t mine = (uint64_t)time << 32 | token;
        if (mine < arrival) arrival = mine;
        if (time < limit) limit = time;
    }
};

}  // namespace race
