// Products with quantized weights. Of w = d q + m the kernel multiplies inputs with q alone and forms, group by group, d (sum of q x) +
// m (sum of x): that saves a multiplication for each weight. Sums of a group and then the groups are added in ascending order, so a row's
// result depends neither on its batch nor on threads and tiles, bit for bit.
//
// Two arithmetics. Fp32: x, products and sums are fp32. Int16: x becomes whole numbers of 16 bits for each group, with a scale of their own,
// and a group's sum is exact in 32 bits. An instruction multiplies 16-bit numbers and adds them up in pairs: a processor does two to four
// times as many as of fp32. What is lost is at most 2^-16 of the largest input of a group, for each input: logits move by some 0.001.
#pragma once
#include "cpu_weight_formats.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Up to here both vectors of a panel are computed at once: more sums would not find registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MAX_WIDE_ROWS = 6;
#else
constexpr int MAX_WIDE_ROWS = 3;
#endif

// x as an arithmetic wants it: entries of 4 bytes, each for one product with a word's part.
template <class Arithmetic> struct PreparedRows {
    typename Arithmetic::Entry* entries;  // [rows, num_entries]
    float* scales;                        // [rows, num_groups]; Int16 only
    float* sums;                          // [rows, num_groups]: of a group's inputs, OFFSET times that where minima are not stored
    int64_t num_entries, num_groups;

    PreparedRows from(int64_t row) const {
        return {entries + row * num_entries, scales + row * num_groups, sums + row * num_groups, num_entries, num_groups};
    }
};

struct Fp32 {
    typedef float Entry;
    typedef V Sum;
    static constexpr int entries_of_word(int bits) { return 32 / bits; }
    static constexpr int entries_of(int num_inputs) { return num_inputs; }

    // A quant is used where it stands in its word, so its input is divided by what that is worth, which is exact.
    template <class Format> static void prepare(const float* x, Entry* entries, float*, float* sum) {
        F<4> total{};
        for (int k = 0; k < Format::GROUP; k += 4) total += load<4>(x + k);
        const float all = ::sum<4>(total);
        *sum = Format::HAS_MINIMA ? all : all * (float)Format::OFFSET;
        constexpr int BITS = Format::BITS, WORD = 32 / BITS;
        for (int k = 0; k < Format::GROUP; k += 8)
            unrolled<8>([&](int i) INLINE {
                const int shift = Format::shift_of(i);
                entries[(Format::word_of(k) + Format::word_of(i)) * WORD + shift / BITS] = x[k + i] * (1.0f / (float)(1 << shift % 16));
            });
    }
    // use(e, w): w[v] is what entry e of a word is multiplied with, for each of N vectors of words.
    template <class Format, int N, class Use> INLINE static inline void each(U* words, Use use) {
        constexpr int PARTS = 16 / Format::BITS;
        V w[N];
        unrolled<2 * PARTS>([&](int e) INLINE {
            const uint32_t mask = ((1u << Format::BITS) - 1) << (Format::BITS * (e % PARTS));
            if (e == PARTS) unrolled<N>([&](int v) INLINE { words[v] >>= 16; });
            unrolled<N>([&](int v) INLINE { w[v] = __builtin_convertvector((I)(words[v] & mask), V); });
            use(e, w);
        });
    }
    static inline Sum multiply_add(Sum sum, Sum w, Entry x) { return sum + w * x; }
    template <bool HAS_MINIMA> static inline V add_group(V total, Sum sum, V scale, V minimum, float, float x_sum) {
        if constexpr (HAS_MINIMA) return total + minimum * x_sum + scale * sum;
        else return total + scale * (sum - x_sum);
    }
};

struct Int16 {
    typedef int32_t Entry;  // two inputs, those of a word's part and of the one 16 bits above it
    typedef I Sum;
    static constexpr int entries_of_word(int bits) { return 16 / bits; }
    static constexpr int entries_of(int num_inputs) { return num_inputs / 2; }

    template <class Format> static void prepare(const float* x, Entry* entries, float* scale, float* sum) {
        typedef Vector<4>::I I4;
        typedef F<4> V4;
        constexpr int VECTORS_4 = Format::GROUP / 4;
        constexpr float ROUNDING = 12582912.0f;  // 1.5 x 2^23: its sum with a small number has that, rounded, in the low bits
        V4 values[VECTORS_4];
        I4 bits{};
        for (int i = 0; i < VECTORS_4; i++) {
            values[i] = load<4>(x + 4 * i);
            const I4 magnitude = (I4)values[i] & 0x7fffffff;
            bits = magnitude > bits ? magnitude : bits;
        }
        const int32_t largest_bits = std::max(std::max(bits[0], bits[1]), std::max(bits[2], bits[3]));
        float largest;
        memcpy(&largest, &largest_bits, sizeof largest);
        // Not finite: all outputs are NaN. Too small for a reciprocal: zero.
        const bool is_finite = largest_bits < 0x7f800000, is_zero = largest < 1e-30f;
        const float factor = is_finite && !is_zero ? 32767.0f / largest : 0.0f;
        I4 total{};
        for (int i = 0; i < VECTORS_4; i += 2) {
            const I4 low = (I4)((is_finite ? values[i] : V4{}) * factor + ROUNDING) - 0x4b400000;
            const I4 high = (I4)((is_finite ? values[i + 1] : V4{}) * factor + ROUNDING) - 0x4b400000;
            total += low + high;
            const I4 pair = (low & 0xffff) | high << 16;
            memcpy(entries + 2 * i, &pair, sizeof pair);
        }
        const int32_t sum_of_integers = total[0] + total[1] + total[2] + total[3];
        *scale = !is_finite ? __builtin_nanf("") : is_zero ? 0.0f : largest / 32767.0f;
        if (Format::HAS_MINIMA) *sum = *scale * (float)sum_of_integers;
        else {
            const int32_t offset = sum_of_integers * Format::OFFSET;
            memcpy(sum, &offset, sizeof offset);
        }
    }
    template <class Format, int N, class Use> INLINE static inline void each(U* words, Use use) {
        constexpr uint32_t LOW = ((1u << Format::BITS) - 1) * 0x10001u;
        typedef typename Vector<W * 2>::H Halves;
        I w[N];
        unrolled<16 / Format::BITS>([&](int e) INLINE {
            unrolled<N>([&](int v) INLINE { w[v] = (I)((U)((Halves)words[v] >> (Format::BITS * e)) & LOW); });
            use(e, w);
        });
    }
    static inline Sum multiply_add(Sum total, Sum pair, Entry input) {
        const I x = I{} + input;
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
        return (I)_mm512_dpwssd_epi32((__m512i)total, (__m512i)pair, (__m512i)x);
#elif defined(__AVX512BW__)
        return total + (I)_mm512_madd_epi16((__m512i)pair, (__m512i)x);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
        return (I)_mm256_dpwssd_avx_epi32((__m256i)total, (__m256i)pair, (__m256i)x);
#elif defined(__AVX2__) && !defined(__AVX512F__)
        return total + (I)_mm256_madd_epi16((__m256i)pair, (__m256i)x);
#elif defined(__SSE2__) && !defined(__AVX__)
        return total + (I)_mm_madd_epi16((__m128i)pair, (__m128i)x);
#else
        return total + (pair << 16 >> 16) * (x << 16 >> 16) + (pair >> 16) * (x >> 16);
#endif
    }
    template <bool HAS_MINIMA> static inline V add_group(V total, Sum sum, V scale, V minimum, float x_scale, float x_sum) {
        if constexpr (HAS_MINIMA) total += minimum * x_sum;
        else {
            int32_t offset;
            memcpy(&offset, &x_sum, sizeof offset);
            sum -= offset;
        }
        return total + scale * x_scale * __builtin_convertvector(sum, V);
    }
};

// R rows with N panels.
template <class Format, class A, int R, int N>
void direct(const PreparedRows<A>& x, const char* const* panels, int64_t num_inputs, float (*sums)[PANEL]) {
    constexpr int AT_ONCE = R <= MAX_WIDE_ROWS ? VECTORS : 1, WORD = A::entries_of_word(Format::BITS);
    typedef typename A::Sum Sum;
    V total[R][N * VECTORS] = {};
    const char* groups[N];
    for (int n = 0; n < N; n++) groups[n] = panels[n];
    const typename A::Entry* entries = x.entries;
    for (int64_t g = 0; g < num_inputs / Format::GROUP; g++, entries += A::entries_of(Format::GROUP)) {
        // Behind the end of its panel comes that of the next N.
        const int64_t left = (num_inputs / Format::GROUP - g) * Format::GROUP_BYTES;
        const int64_t ahead = PREFETCH_BYTES + (left > PREFETCH_BYTES ? 0 : (N - 1) * num_inputs / Format::GROUP * Format::GROUP_BYTES);
        for (int n = 0; n < N; n++)
            for (int i = 0; i < Format::GROUP_BYTES; i += 64) __builtin_prefetch(groups[n] + ahead + i);
        for (int v = 0; v < VECTORS; v += AT_ONCE) {
            Sum part[R][N * AT_ONCE] = {};  // panels side by side: else each sum would wait for the one before it
            for (int word = 0; word < Format::WORDS; word++) {
                U words[N * AT_ONCE];
                unrolled<N * AT_ONCE>([&](int i) INLINE { words[i] = Format::word(groups[i / AT_ONCE], word, v + i % AT_ONCE); });
                A::template each<Format, N * AT_ONCE>(words, [&](int e, Sum* w) INLINE {
                    unrolled<R>([&](int r) INLINE {
                        const typename A::Entry input = entries[r * x.num_entries + word * WORD + e];
                        unrolled<N * AT_ONCE>([&](int i) INLINE { part[r][i] = A::multiply_add(part[r][i], w[i], input); });
                    });
                });
            }
            unrolled<N * AT_ONCE>([&](int i) INLINE {
                const char* group = groups[i / AT_ONCE];
                const int at = v + i % AT_ONCE;
                const V scale = Format::scale(group, at), minimum = Format::minimum(group, at);
                unrolled<R>([&](int r) INLINE {
                    V& sum = total[r][i / AT_ONCE * VECTORS + at];
                    const int64_t of_x = r * x.num_groups + g;
                    sum = A::template add_group<Format::HAS_MINIMA>(sum, part[r][i], scale, minimum, x.scales[of_x], x.sums[of_x]);
                });
            });
        }
        for (int n = 0; n < N; n++) groups[n] += Format::GROUP_BYTES;
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < N * VECTORS; v++) store<W>(sums[r * N + v / VECTORS] + v % VECTORS * W, total[r][v]);
}

// A part of a panel, expanded for many rows.
template <class A, int GROUP, bool HAS_MINIMA> struct QuantizedTile {
    static constexpr int K = A::entries_of(2) == 2 ? 4096 / PANEL : 8192 / PANEL;  // 16 KiB of weights
    static constexpr int FIRST_ROWS = 0;
    static constexpr int ENTRIES = A::entries_of(K), GROUPS = K / GROUP;
    static constexpr size_t SIZE = ENTRIES * PANEL + 2 * GROUPS * PANEL;  // in 4 bytes
    typedef typename A::Sum Sum;
    float* values;

    char* weights() const { return (char*)values; }                      // of A: [ENTRIES, PANEL]
    float* scales() const { return values + ENTRIES * PANEL; }           // [GROUPS, PANEL]
    float* minima() const { return scales() + GROUPS * PANEL; }          // likewise

    template <class Format> void expand(const char* group, const PreparedRows<A>&, int64_t, int count, float*) {
        constexpr int WORD = A::entries_of_word(Format::BITS);
        char* at = weights();
        for (int g = 0; g < count / GROUP; g++, group += Format::GROUP_BYTES) {
            for (int v = 0; v < VECTORS; v++) {
                store<W>(scales() + g * PANEL + v * W, Format::scale(group, v));
                if (HAS_MINIMA) store<W>(minima() + g * PANEL + v * W, Format::minimum(group, v));
            }
            for (int word = 0; word < Format::WORDS; word++, at += WORD * PANEL * 4) {
                U words[VECTORS];
                unrolled<VECTORS>([&](int v) INLINE { words[v] = Format::word(group, word, v); });
                A::template each<Format, VECTORS>(words, [&](int e, Sum* w) INLINE {
                    unrolled<VECTORS>([&](int v) INLINE { memcpy(at + (e * PANEL + v * W) * 4, &w[v], sizeof w[v]); });
                });
            }
        }
    }
    template <int R> void multiply(const PreparedRows<A>& x, int64_t first, int count, float* sums) const {
        const char* tile = weights();
        const typename A::Entry* entries = x.entries + first * A::entries_of(2) / 2;
        for (int g = 0; g < count / GROUP; g++) {
            Sum part[R][VECTORS] = {};
            for (int k = 0; k < A::entries_of(GROUP); k++, tile += PANEL * 4, entries++) {
                Sum w[VECTORS];
                unrolled<VECTORS>([&](int v) INLINE { memcpy(&w[v], tile + v * W * 4, sizeof w[v]); });
                unrolled<R>([&](int r) INLINE {
                    const typename A::Entry input = entries[r * x.num_entries];
                    unrolled<VECTORS>([&](int v) INLINE { part[r][v] = A::multiply_add(part[r][v], w[v], input); });
                });
            }
            unrolled<VECTORS>([&](int v) INLINE {
                const V scale = load<W>(scales() + g * PANEL + v * W), minimum = HAS_MINIMA ? load<W>(minima() + g * PANEL + v * W) : V{};
                unrolled<R>([&](int r) INLINE {
                    float* sum = sums + r * PANEL + v * W;
                    const int64_t of_x = r * x.num_groups + first / GROUP + g;
                    store<W>(sum, A::template add_group<HAS_MINIMA>(load<W>(sum), part[r][v], scale, minimum, x.scales[of_x], x.sums[of_x]));
                });
            });
        }
    }
};

}  // namespace
