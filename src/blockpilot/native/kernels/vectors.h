// Vectors of 16 floats for everything that is not a product of codes. The compiler splits them where a machine's are
// shorter; the order of every sum is the one that is written here. No contraction, no fast-math: a fused
// multiply-add happens where `fma16` says so, on machines that have it.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4)));
typedef uint32_t uvec __attribute__((vector_size(64), aligned(4)));

#if defined(__FMA__) || defined(__aarch64__)
#define HAS_FMA 1
#else
#define HAS_FMA 0
#endif

INLINE vec load16(const float *from) {
    vec found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE void store16(float *to, vec values) { memcpy(to, &values, sizeof values); }

INLINE vec all16(float value) { return value - (vec){}; }

INLINE vec fma16(vec a, vec b, vec c) {
#if HAS_FMA
    return __builtin_elementwise_fma(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE vec as_floats(ivec bits) { return (vec)bits; }
INLINE ivec as_bits(vec values) { return (ivec)values; }
INLINE vec choose16(ivec is_first, vec first, vec second) {
    return as_floats((as_bits(first) & is_first) | (as_bits(second) & ~is_first));
}
INLINE vec max16(vec a, vec b) { return __builtin_elementwise_max(a, b); }

INLINE float sum16(vec v) {
    typedef float half __attribute__((vector_size(32)));
    typedef float quarter __attribute__((vector_size(16)));
    half h = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
             __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    quarter q = __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
    return (q[0] + q[2]) + (q[1] + q[3]);
}

INLINE float top16(vec v) {  // a maximum has no order
    v = max16(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = max16(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = max16(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return v[0] > v[1] ? v[0] : v[1];
}

INLINE int32_t add16(ivec v) {
    v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return v[0] + v[1];
}

// Whole numbers nearest to values below 2**22: adding 1.5 * 2**23 leaves them in the low bits.
#define ROUNDING 12582912.0f
INLINE vec round16(vec v) { return (v + ROUNDING) - ROUNDING; }

// exp by 2**n * p(r), |r| <= ln(2) / 2; below -87 zero, above 88 the value at 88.
INLINE vec exp16(vec x) {
    ivec is_low = x < -87.0f;
    x = choose16(x > 88.0f, all16(88.0f), x);
    x = choose16(is_low, all16(-87.0f), x);
    vec n = round16(x * 1.44269504088896341f);
    vec r = fma16(n, all16(-0.693359375f), x);
    r = fma16(n, all16(2.12194440e-4f), r);
    vec p = all16(1.9875691500e-4f);
    p = fma16(p, r, all16(1.3981999507e-3f));
    p = fma16(p, r, all16(8.3334519073e-3f));
    p = fma16(p, r, all16(4.1665795894e-2f));
    p = fma16(p, r, all16(1.6666665459e-1f));
    p = fma16(p, r, all16(5.0000001201e-1f));
    p = fma16(p, r * r, r + 1.0f);
    vec power = as_floats((__builtin_convertvector(n, ivec) + 127) << 23);
    return choose16(is_low, (vec){}, p * power);
}

// log of positive, normal numbers.
INLINE vec log16(vec x) {
    ivec bits = as_bits(x);
    vec e = __builtin_convertvector((bits >> 23) - 126, vec);
    vec m = as_floats((bits & 0x007FFFFF) | 0x3F000000);  // in [0.5, 1)
    ivec is_low = m < 0.707106781186547524f;
    e = e - choose16(is_low, all16(1.0f), (vec){});
    m = m + choose16(is_low, m, (vec){}) - 1.0f;
    vec z = m * m;
    vec p = all16(7.0376836292e-2f);
    p = fma16(p, m, all16(-1.1514610310e-1f));
    p = fma16(p, m, all16(1.1676998740e-1f));
    p = fma16(p, m, all16(-1.2420140846e-1f));
    p = fma16(p, m, all16(1.4249322787e-1f));
    p = fma16(p, m, all16(-1.6668057665e-1f));
    p = fma16(p, m, all16(2.0000714765e-1f));
    p = fma16(p, m, all16(-2.4999993993e-1f));
    p = fma16(p, m, all16(3.3333331174e-1f));
    p = p * m * z;
    p = fma16(e, all16(-2.12194440e-4f), p);
    p = fma16(z, all16(-0.5f), p);
    return fma16(e, all16(0.693359375f), m + p);
}
