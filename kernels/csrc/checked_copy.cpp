// XXH3-64 of ordinary memory, and the same while it is copied: one pass over the bytes, as fast as they come.
//
// A copy of this size finds neither end in a cache. Reads are asked for well ahead, and writes go past the caches: a plain store would first
// read what it overwrites.
#include "xxh3.h"
#include <stddef.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {
constexpr size_t STRIPE = 64, BLOCK = 1024, AHEAD = 2048;

inline uint64_t read64(const uint8_t* p) {
    uint64_t value;
    memcpy(&value, p, 8);
    return value;
}

#ifdef __AVX2__
struct Sums {
    __m256i half[2] = {
        _mm256_setr_epi64x((long long)P32_3, (long long)P64_1, (long long)P64_2, (long long)P64_3),
        _mm256_setr_epi64x((long long)P64_4, (long long)P32_2, (long long)P64_5, (long long)P32_1),
    };

    inline void add(const __m256i* data, const uint8_t* secret) {
        for (int i = 0; i < 2; i++) {
            __m256i key = _mm256_xor_si256(data[i], _mm256_loadu_si256((const __m256i*)secret + i));
            __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
            half[i] = _mm256_add_epi64(half[i], _mm256_add_epi64(product, _mm256_shuffle_epi32(data[i], 0x4e)));
        }
    }
    inline void scramble() {
        const __m256i prime = _mm256_set1_epi32((int)P32_1);
        for (int i = 0; i < 2; i++) {
            __m256i x = _mm256_xor_si256(half[i], _mm256_srli_epi64(half[i], 47));
            x = _mm256_xor_si256(x, _mm256_loadu_si256((const __m256i*)(SECRET + sizeof SECRET - STRIPE) + i));
            __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
            half[i] = _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
        }
    }
    void store(uint64_t* out) const { memcpy(out, half, sizeof half); }
};
struct Stripe {
    __m256i data[2];
    explicit inline Stripe(const uint8_t* p) : data{_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)} {}
    inline void put(uint8_t* to) const {
        _mm256_storeu_si256((__m256i*)to, data[0]);
        _mm256_storeu_si256((__m256i*)to + 1, data[1]);
    }
    inline void put_past_caches(uint8_t* to) const {
        _mm256_stream_si256((__m256i*)to, data[0]);
        _mm256_stream_si256((__m256i*)to + 1, data[1]);
    }
};
inline void fence() { _mm_sfence(); }
#else
struct Sums {
    uint64_t lane[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};

    inline void add(const uint64_t* data, const uint8_t* secret) {
        for (int i = 0; i < 8; i++) {
            uint64_t key = data[i] ^ read64(secret + 8 * i);
            lane[i] += data[i ^ 1] + (key & 0xffffffffu) * (key >> 32);
        }
    }
    inline void scramble() {
        for (int i = 0; i < 8; i++) lane[i] = (lane[i] ^ lane[i] >> 47 ^ read64(SECRET + sizeof SECRET - STRIPE + 8 * i)) * P32_1;
    }
    void store(uint64_t* out) const { memcpy(out, lane, sizeof lane); }
};
struct Stripe {
    uint64_t data[8];
    explicit inline Stripe(const uint8_t* p) { memcpy(data, p, STRIPE); }
    inline void put(uint8_t* to) const { memcpy(to, data, STRIPE); }
    inline void put_past_caches(uint8_t* to) const { put(to); }
};
inline void fence() {}
#endif

inline uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

uint64_t finish(const Sums& sums, size_t nbytes) {
    uint64_t lane[8], hash = nbytes * P64_1;
    sums.store(lane);
    for (int i = 0; i < 4; i++) hash += fold(lane[2 * i] ^ read64(SECRET + 11 + 16 * i), lane[2 * i + 1] ^ read64(SECRET + 19 + 16 * i));
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9ull;
    return hash ^ hash >> 32;
}

enum class Put { nowhere, plainly, past_caches };

template <Put put> inline void take(Sums& sums, const uint8_t* from, uint8_t* to, const uint8_t* secret) {
    Stripe stripe(from);
    sums.add(stripe.data, secret);
    if (put == Put::plainly) stripe.put(to);
    if (put == Put::past_caches) stripe.put_past_caches(to);
}

// The last stripe is the last 64 bytes, which overlap the one before unless the size is a multiple.
template <Put put> uint64_t run(const uint8_t* from, uint8_t* to, size_t nbytes) {
    Sums sums;
    size_t blocks = (nbytes - 1) / BLOCK, stripes = (nbytes - 1 - blocks * BLOCK) / STRIPE, at = 0;
    for (size_t block = 0; block < blocks; block++) {
        for (size_t i = 0; i < BLOCK / STRIPE; i++, at += STRIPE) {
            __builtin_prefetch(from + at + AHEAD);
            take<put>(sums, from + at, to + at, SECRET + 8 * i);
        }
        sums.scramble();
    }
    for (size_t i = 0; i < stripes; i++, at += STRIPE) take<put>(sums, from + at, to + at, SECRET + 8 * i);
    take<put == Put::nowhere ? put : Put::plainly>(sums, from + nbytes - STRIPE, to + nbytes - STRIPE, SECRET + sizeof SECRET - STRIPE - 7);
    if (put == Put::past_caches) fence();
    return finish(sums, nbytes);
}
}  // namespace

// `nbytes` > 240.
extern "C" uint64_t checksum(const uint8_t* from, int64_t nbytes) { return run<Put::nowhere>(from, nullptr, (size_t)nbytes); }

// The checksum is of the bytes that were written, each read once. The two do not overlap.
extern "C" uint64_t checked_copy(uint8_t* to, const uint8_t* from, int64_t nbytes) {
    if ((uintptr_t)to % 32) return run<Put::plainly>(from, to, (size_t)nbytes);
    return run<Put::past_caches>(from, to, (size_t)nbytes);
}
