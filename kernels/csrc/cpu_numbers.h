// The number types of the C++ kernels, one at a time. The compiler vectorises loops over them.
#pragma once
#include <stdint.h>
#include <string.h>

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline float to_float(fp16 x) {
    uint32_t magnitude = (uint32_t)(x.bits & 0x7fff) << 13, bits;
    float value;
    memcpy(&value, &magnitude, 4);
    value *= 0x1p112f;
    memcpy(&bits, &value, 4);
    bits |= ((x.bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u) | (uint32_t)(x.bits & 0x8000) << 16;
    memcpy(&value, &bits, 4);
    return value;
}
inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, bf16* out) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    out->bits = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void from_float(float x, fp16* out) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    uint16_t result;
    if (bits > 0x7f800000) result = 0x7e00;
    else if (bits >= 0x477ff000) result = 0x7c00;  // rounds past the largest
    else if (bits < 0x38800000) {                  // subnormal: adding 0.5 leaves the rounded fraction in the low bits
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, 4);
        result = (uint16_t)(bits - 0x3f000000);
    } else result = (uint16_t)((bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13);
    out->bits = sign | result;
}
