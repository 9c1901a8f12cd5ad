// Vectors of the compiler's own (GCC, Clang): the same source serves AVX-512, AVX2, NEON and plain SSE2.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <utility>
#include <vector>

#include "cpu_numbers.h"

// Nobody else's: two libraries may be compiled for different processors.
namespace {

#if defined(__AVX512F__)
constexpr int NATIVE = 16;
#elif defined(__AVX__)
constexpr int NATIVE = 8;
#else
constexpr int NATIVE = 4;
#endif

template <int W> struct Vector {
    typedef float F __attribute__((vector_size(W * 4)));
    typedef int32_t I __attribute__((vector_size(W * 4)));
    typedef uint32_t U __attribute__((vector_size(W * 4)));
    typedef uint16_t H __attribute__((vector_size(W * 2)));
};
template <int W> using F = typename Vector<W>::F;

template <int W> inline F<W> load(const float* p) {
    F<W> v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <int W> inline F<W> load(const bf16* p) {
    typename Vector<W>::H h;
    memcpy(&h, p, sizeof h);
    auto bits = __builtin_convertvector(h, typename Vector<W>::U) << 16;
    return (F<W>)bits;
}
template <int W> inline F<W> load(const fp16* p) {
    typedef typename Vector<W>::U U;
    typename Vector<W>::H h;
    memcpy(&h, p, sizeof h);
#if defined(__AVX512F__)
    if constexpr (W == 16) return (F<W>)_mm512_cvtph_ps((__m256i)h);
#endif
#if defined(__F16C__)
    if constexpr (W == 8) return (F<W>)_mm256_cvtph_ps((__m128i)h);
#endif
    U wide = __builtin_convertvector(h, U);
    // The exponent is rebiased by a product, which handles subnormals too; Inf and NaN get the largest exponent afterwards.
    U magnitude = (wide & 0x7fffu) << 13;
    F<W> value = (F<W>)magnitude * 0x1p112f;
    U special = (U)((wide & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return (F<W>)((U)value | special | ((wide & 0x8000u) << 16));
}
template <int W> inline void store(float* p, F<W> v) { memcpy(p, &v, sizeof v); }

// exp for x <= 88; 0 at and below -87, NaN stays (Cephes' polynomial, 2 ulp).
template <int W> inline F<W> exp(F<W> x) {
    typedef typename Vector<W>::I I;
    I below = x <= -87.0f;
    x = below ? (F<W>)(I{} + 0) : x;
    F<W> shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 x 2^23: rounds to an integer, kept in the low bits
    F<W> n = shifted - 12582912.0f;
    F<W> r = x - n * 0.693359375f + n * 2.12194440e-4f;
    F<W> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    I scaled = (I)p + ((I)shifted << 23);
    return (F<W>)(scaled & ~below);
}

template <int W> inline float sum(F<W> v) {
    if constexpr (W == 2) return v[0] + v[1];
    else {
        F<W / 2> low, high;
        memcpy(&low, &v, sizeof low);
        memcpy(&high, (const char*)&v + sizeof low, sizeof high);
        return sum<W / 2>(low + high);
    }
}
template <int W> inline F<W> larger(F<W> a, F<W> b) { return a > b ? a : b; }
template <int W> inline float largest(F<W> v) {
    if constexpr (W == 2) return v[0] > v[1] ? v[0] : v[1];
    else {
        F<W / 2> low, high;
        memcpy(&low, &v, sizeof low);
        memcpy(&high, (const char*)&v + sizeof low, sizeof high);
        return largest<W / 2>(larger<W / 2>(low, high));
    }
}

// use(0), ..., use(N - 1), unrolled before arrays find their registers: what the compiler unrolls by itself comes too late for that.
#define INLINE __attribute__((always_inline))
template <class Use, int... INDEX> INLINE inline void unrolled(std::integer_sequence<int, INDEX...>, Use use) { (use(INDEX), ...); }
template <int N, class Use> INLINE inline void unrolled(Use use) { unrolled(std::make_integer_sequence<int, N>(), use); }

// Grows and is kept: pages of a fresh allocation would be touched anew in every layer.
inline float* scratch(std::vector<float>& memory, size_t count) {
    if (memory.size() < count + 16) memory.resize(count + 16);
    return (float*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
}

}  // namespace
