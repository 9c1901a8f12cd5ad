// How the CPU's linear layers hold weights: panels, and how a file's blocks (GGML's) become a panel.
//
// A panel is PANEL outputs: a sequence of groups of k. A group holds its scales and minima, then words of 32 bits, one for each output,
// with 8 (4 bits) or 4 (8 bits) quants: those of inputs k and k + 4 of 8 are 16 bits apart, for every format.
#pragma once
#include "cpu_linear.h"
#include "cpu_vectors.h"

namespace {

constexpr int W = NATIVE;
constexpr int VECTORS = 2;          // of a panel
constexpr int PANEL = VECTORS * W;  // outputs
typedef Vector<W>::I I;
typedef Vector<W>::U U;
typedef F<W> V;

constexpr int PREFETCH_BYTES = 1024;  // ahead: the processor's own prefetching stops at the end of each page

// w = d q + m. ZERO >= 0: m = -ZERO d is not stored.
template <int NUM_BITS, int GROUP_K, typename Scale, int ZERO> struct Quantized {
    static constexpr int BITS = NUM_BITS, GROUP = GROUP_K, WORDS = GROUP * BITS / 32, OFFSET = ZERO;
    static constexpr bool IS_QUANTIZED = true, HAS_MINIMA = ZERO < 0;
    static constexpr int SCALE_BYTES = PANEL * (int)sizeof(Scale) * (HAS_MINIMA ? 2 : 1), GROUP_BYTES = SCALE_BYTES + WORDS * PANEL * 4;

    // Where the quant of input k of a group stands.
    static constexpr int word_of(int k) { return k / 8 * (BITS / 4) + k % 4 / (16 / BITS); }
    static constexpr int shift_of(int k) { return k % 4 % (16 / BITS) * BITS + k / 4 % 2 * 16; }

    static inline V scale(const char* group, int v) { return load<W>((const Scale*)group + v * W); }
    static inline V minimum(const char* group, int v) {
        if constexpr (HAS_MINIMA) return load<W>((const Scale*)group + PANEL + v * W);
        else return V{};
    }
    static inline U word(const char* group, int word, int v) {
        U bits;
        memcpy(&bits, group + SCALE_BYTES + (word * VECTORS + v) * W * 4, sizeof bits);
        return bits;
    }
};

template <typename E> struct Plain {
    static constexpr int GROUP = 1, GROUP_BYTES = PANEL * (int)sizeof(E);
    static constexpr bool IS_QUANTIZED = false;
    static inline V values(const char* group, int v) { return load<W>((const E*)group + v * W); }
};

template <typename E> struct PlainBlock : Plain<E> {
    static constexpr int K = 1;
    E value;
    void pack(char* group, int column) const { memcpy(group + column * sizeof(E), &value, sizeof value); }
    static float unpack(const char* group, int column, int) { return to_float(((const E*)group)[column]); }
};

template <int BITS, int GROUP_K, typename Scale, int ZERO> struct QuantizedBlock : Quantized<BITS, GROUP_K, Scale, ZERO> {
    typedef Quantized<BITS, GROUP_K, Scale, ZERO> Format;
    static void put(char* group, int column, Scale scale, Scale minimum, const uint8_t* quants) {
        memcpy(group + column * sizeof(Scale), &scale, sizeof scale);
        if (Format::HAS_MINIMA) memcpy(group + (PANEL + column) * sizeof(Scale), &minimum, sizeof minimum);
        uint32_t words[Format::WORDS] = {};
        for (int k = 0; k < GROUP_K; k++) words[Format::word_of(k)] |= (uint32_t)quants[k] << Format::shift_of(k);
        for (int word = 0; word < Format::WORDS; word++)
            memcpy(group + Format::SCALE_BYTES + (word * PANEL + column) * 4, &words[word], sizeof words[word]);
    }
    static float unpack(const char* group, int column, int k) {
        const Scale* scales = (const Scale*)group;
        const float scale = to_float(scales[column]);
        uint32_t bits;
        memcpy(&bits, group + Format::SCALE_BYTES + (Format::word_of(k) * PANEL + column) * 4, sizeof bits);
        const float quant = (float)(bits >> Format::shift_of(k) & ((1u << BITS) - 1));
        return scale * quant + (Format::HAS_MINIMA ? to_float(scales[PANEL + column]) : scale * (float)-ZERO);
    }
};

inline void split_nibbles(const uint8_t* packed, int count, uint8_t* quants) {
    for (int i = 0; i < count; i++) quants[i] = packed[i] & 15, quants[count + i] = packed[i] >> 4;
}

struct Q4_0 : QuantizedBlock<4, 32, fp16, 8> {  // w = d (q - 8)
    static constexpr int K = 32;
    fp16 d;
    uint8_t packed[16];
    void pack(char* group, int column) const {
        uint8_t quants[K];
        split_nibbles(packed, 16, quants);
        put(group, column, d, d, quants);
    }
};

struct Q4_1 : QuantizedBlock<4, 32, fp16, -1> {  // w = d q + m
    static constexpr int K = 32;
    fp16 d, m;
    uint8_t packed[16];
    void pack(char* group, int column) const {
        uint8_t quants[K];
        split_nibbles(packed, 16, quants);
        put(group, column, d, m, quants);
    }
};

struct Q8_0 : QuantizedBlock<8, 32, fp16, 128> {  // w = d q
    static constexpr int K = 32;
    fp16 d;
    int8_t q[32];
    void pack(char* group, int column) const {
        uint8_t quants[K];
        for (int i = 0; i < K; i++) quants[i] = (uint8_t)(q[i] + 128);
        put(group, column, d, d, quants);
    }
};

struct Q4_K : QuantizedBlock<4, 32, float, -1> {  // w = (d s) q - (dmin m), s and m of 6 bits for each of 8 groups
    static constexpr int K = 256;
    fp16 d, dmin;
    uint8_t scales[12], packed[128];
    void pack(char* group, int column) const {
        for (int g = 0; g < 8; g++, group += GROUP_BYTES) {
            const uint8_t high = g < 4 ? 0 : scales[4 + g];
            const int s = g < 4 ? scales[g] & 63 : (high & 15) | (scales[g - 4] >> 6 << 4);
            const int m = g < 4 ? scales[4 + g] & 63 : (high >> 4) | (scales[g] >> 6 << 4);
            uint8_t quants[64];
            split_nibbles(packed + g / 2 * 32, 32, quants);
            put(group, column, to_float(d) * (float)s, -(to_float(dmin) * (float)m), quants + g % 2 * 32);
        }
    }
};

struct Q6_K : QuantizedBlock<8, 16, float, 32> {  // w = (d s) (q - 32), s of 8 bits for each of 16 groups
    static constexpr int K = 256;
    uint8_t low[128], high[64];
    int8_t scales[16];
    fp16 d;
    void pack(char* group, int column) const {
        uint8_t quants[K];
        for (int i = 0; i < K; i++) {
            const int part = i / 128, quarter = i % 128 / 32, j = i % 32;
            const uint8_t nibbles = low[part * 64 + quarter % 2 * 32 + j];
            quants[i] = (quarter < 2 ? nibbles & 15 : nibbles >> 4) | ((high[part * 32 + j] >> (2 * quarter)) & 3) << 4;
        }
        for (int g = 0; g < 16; g++, group += GROUP_BYTES) put(group, column, to_float(d) * (float)scales[g], 0.0f, quants + g * 16);
    }
};

template <class Do> bool with_format(int64_t format, Do act) {
    switch (format) {
        case 0: act(PlainBlock<float>()); return true;
        case 1: act(PlainBlock<fp16>()); return true;
        case 2: act(PlainBlock<bf16>()); return true;
        case 3: act(Q4_0()); return true;
        case 4: act(Q4_1()); return true;
        case 5: act(Q8_0()); return true;
        case 6: act(Q4_K()); return true;
        case 7: act(Q6_K()); return true;
        default: return false;
    }
}

}  // namespace

