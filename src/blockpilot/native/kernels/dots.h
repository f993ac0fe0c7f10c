// Sums of products of 8-bit codes: integers, the same in any order and on any machine.
//
// Codes of 16 rows lie side by side. `SIDE` of them are taken at once, as the machine's vectors allow. A chunk of 64
// bytes holds four inner places of 16 rows; 4-bit codes have a second four in their high halves.
#pragma once

#include "vectors.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define SIDE 16
#define DOTS_NAME "avx512-vnni"
#elif defined(__AVX2__)
#include <immintrin.h>
#define SIDE 8
#if defined(__AVXVNNI__)
#define DOTS_NAME "avx-vnni"
#else
#define DOTS_NAME "avx2"
#endif
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define SIDE 4
#define DOTS_NAME "arm-dot"
#else
#define SIDE 16
#define DOTS_NAME "portable"
#endif

typedef float side __attribute__((vector_size(4 * SIDE), aligned(4)));
typedef int32_t iside __attribute__((vector_size(4 * SIDE), aligned(4)));
typedef _Float16 hside __attribute__((vector_size(2 * SIDE), aligned(2)));

// Whether bytes are taken as unsigned ones, 128 above what they stand for: sums then begin at -128 times those of x.
#if SIDE == 16 && defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define LIFTED 1
#else
#define LIFTED 0
#endif

#define BLOCK 32
#define TILE 8  // tokens that are multiplied together
#define QUAD 4  // tokens that one thread rounds: what two threads write lies in different lines of the cache

// A block of four tokens.
typedef struct {
    _Alignas(64) int8_t codes[8][QUAD][4];  // four inner places of each token, eight times
    float scales[QUAD];
    float sums[QUAD];  // of what the codes stand for
    int32_t eights[QUAD];  // -8 times the sum of codes
    int32_t lifts[QUAD];  // what sums begin at where bytes are lifted
    int32_t half_lifts[2][QUAD];
    int32_t half_sums[2][QUAD];  // of codes
} Quad;

typedef struct {
    Quad quads[TILE / QUAD];
} Tokens;

#define OF(tokens, field, t) ((tokens)->quads[(t) / QUAD].field[(t) % QUAD])

INLINE int32_t four_at(const Tokens *x, int k, int t) {
    int32_t found;
    memcpy(&found, x->quads[t / QUAD].codes[k][t % QUAD], 4);
    return found;
}

INLINE side fma_side(side a, side b, side c) {
#if HAS_FMA
    return __builtin_elementwise_fma(a, b, c);
#else
    return a * b + c;
#endif
}

// 6-bit codes lie in two planes: 4 bits as nibbles do, in 256 bytes, then 2 bits in 128. Byte k of the second holds,
// from its low bits on, those of the chunks k, k + 2, k + 4 and k + 6.

#if SIDE == 16 && defined(__AVX512VNNI__)

// acc[t] += codes of SIDE rows times inner places [4 * from, 4 * to) of T tokens.
INLINE void dot_nibbles(iside *acc, const uint8_t *codes, const Tokens *x, const int T) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int j = 0; j < 4; j++) {
        __m512i both = _mm512_loadu_si512(codes + 64 * j);
        __m512i first = _mm512_and_si512(both, low), second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        for (int t = 0; t < T; t++) {
            __m512i sum = (__m512i)acc[t];
            sum = _mm512_dpbusd_epi32(sum, first, _mm512_set1_epi32(four_at(x, j, t)));
            sum = _mm512_dpbusd_epi32(sum, second, _mm512_set1_epi32(four_at(x, j + 4, t)));
            acc[t] = (iside)sum;
        }
    }
}

INLINE void dot_bytes(iside *acc, const uint8_t *codes, const Tokens *x, const int from, const int to, const int T) {
    for (int k = from; k < to; k++) {
        __m512i lifted = _mm512_xor_si512(_mm512_loadu_si512(codes + 64 * k), _mm512_set1_epi8((char)0x80));
        for (int t = 0; t < T; t++)
            acc[t] = (iside)_mm512_dpbusd_epi32((__m512i)acc[t], lifted, _mm512_set1_epi32(four_at(x, k, t)));
    }
}

INLINE __m512i open_sixes(const uint8_t *codes, int k) {
    __m512i low = _mm512_loadu_si512(codes + 64 * (k % 4)), high = _mm512_loadu_si512(codes + 256 + 64 * (k % 2));
    low = _mm512_and_si512(k < 4 ? low : _mm512_srli_epi16(low, 4), _mm512_set1_epi8(15));
    high = k < 2 ? _mm512_slli_epi16(high, 4) : k < 4 ? _mm512_slli_epi16(high, 2) : k < 6 ? high : _mm512_srli_epi16(high, 2);
    return _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi8(0x30)));
}

INLINE void dot_sixes(iside *acc, const uint8_t *codes, const Tokens *x, const int from, const int to, const int T) {
    for (int k = from; k < to; k++) {
        __m512i opened = open_sixes(codes, k);
        for (int t = 0; t < T; t++)
            acc[t] = (iside)_mm512_dpbusd_epi32((__m512i)acc[t], opened, _mm512_set1_epi32(four_at(x, k, t)));
    }
}

#elif SIDE == 8

INLINE __m256i open_sixes(const uint8_t *codes, int k) {
    __m256i low = _mm256_loadu_si256((const __m256i *)(codes + 64 * (k % 4)));
    __m256i high = _mm256_loadu_si256((const __m256i *)(codes + 256 + 64 * (k % 2)));
    low = _mm256_and_si256(k < 4 ? low : _mm256_srli_epi16(low, 4), _mm256_set1_epi8(15));
    high = k < 2 ? _mm256_slli_epi16(high, 4) : k < 4 ? _mm256_slli_epi16(high, 2) : k < 6 ? high : _mm256_srli_epi16(high, 2);
    return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(0x30)));
}

#if defined(__AVXVNNI__)

INLINE void dot_sixes(iside *acc, const uint8_t *codes, const Tokens *x, const int from, const int to, const int T) {
    for (int k = from; k < to; k++) {
        __m256i opened = open_sixes(codes, k);
        for (int t = 0; t < T; t++)
            acc[t] = (iside)_mm256_dpbusd_avx_epi32((__m256i)acc[t], opened, _mm256_set1_epi32(four_at(x, k, t)));
    }
}

INLINE void dot_nibbles(iside *acc, const uint8_t *codes, const Tokens *x, const int T) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int j = 0; j < 4; j++) {
        __m256i both = _mm256_loadu_si256((const __m256i *)(codes + 64 * j));
        __m256i first = _mm256_and_si256(both, low), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        for (int t = 0; t < T; t++) {
            __m256i sum = (__m256i)acc[t];
            sum = _mm256_dpbusd_avx_epi32(sum, first, _mm256_set1_epi32(four_at(x, j, t)));
            sum = _mm256_dpbusd_avx_epi32(sum, second, _mm256_set1_epi32(four_at(x, j + 4, t)));
            acc[t] = (iside)sum;
        }
    }
}

INLINE void dot_bytes(iside *acc, const uint8_t *codes, const Tokens *x, const int from, const int to, const int T) {
    for (int k = from; k < to; k++) {
        __m256i lifted = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(codes + 64 * k)), _mm256_set1_epi8((char)0x80));
        for (int t = 0; t < T; t++)
            acc[t] = (iside)_mm256_dpbusd_avx_epi32((__m256i)acc[t], lifted, _mm256_set1_epi32(four_at(x, k, t)));
    }
}

#else

// Two codes of up to 15 times 127 each, eight times: 30,480 fits into 16 bits.
INLINE void dot_nibbles(iside *acc, const uint8_t *codes, const Tokens *x, const int T) {
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i sums[8];
    for (int t = 0; t < T; t++) sums[t] = _mm256_setzero_si256();
    for (int j = 0; j < 4; j++) {
        __m256i both = _mm256_loadu_si256((const __m256i *)(codes + 64 * j));
        __m256i first = _mm256_and_si256(both, low), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        for (int t = 0; t < T; t++) {
            __m256i left = _mm256_maddubs_epi16(first, _mm256_set1_epi32(four_at(x, j, t)));
            __m256i right = _mm256_maddubs_epi16(second, _mm256_set1_epi32(four_at(x, j + 4, t)));
            sums[t] = _mm256_add_epi16(sums[t], _mm256_add_epi16(left, right));
        }
    }
    for (int t = 0; t < T; t++) acc[t] += (iside)_mm256_madd_epi16(sums[t], ones);
}

// Two codes of up to 63 times 127 each, twice: 32,004 fits into 16 bits.
INLINE void dot_sixes(iside *acc, const uint8_t *codes, const Tokens *x, const int from, const int to, const int T) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int k = from; k < to; k += 2) {
        __m256i first = open_sixes(codes, k), second = open_sixes(codes, k + 1);
        for (int t = 0; t < T; t++) {
            __m256i left = _mm256_maddubs_epi16(first, _mm256_set1_epi32(four_at(x, k, t)));
            __m256i right = _mm256_maddubs_epi16(second, _mm256_set1_epi32(four_at(x, k + 1, t)));
            acc[t] += (iside)_mm256_madd_epi16(_mm256_add_epi16(left, right), ones);
        }
    }
}

// Two codes of up to 128 times 127 each: 32,512 fits into 16 bits, once.
INLINE void dot_bytes(iside *acc, const uint8_t *codes, const Tokens *x, const int from, const int to, const int T) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int k = from; k < to; k++) {
        __m256i signed_codes = _mm256_loadu_si256((const __m256i *)(codes + 64 * k));
        __m256i sizes = _mm256_abs_epi8(signed_codes);
        for (int t = 0; t < T; t++) {
            __m256i values = _mm256_sign_epi8(_mm256_set1_epi32(four_at(x, k, t)), signed_codes);
            acc[t] += (iside)_mm256_madd_epi16(_mm256_maddubs_epi16(sizes, values), ones);
        }
    }
}

#endif

#elif SIDE == 4

INLINE void dot_nibbles(iside *acc, const uint8_t *codes, const Tokens *x, const int T) {
    for (int j = 0; j < 4; j++) {
        uint8x16_t both = vld1q_u8(codes + 64 * j);
        int8x16_t first = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
        int8x16_t second = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
        for (int t = 0; t < T; t++) {
            int32x4_t sum = (int32x4_t)acc[t];
            sum = vdotq_s32(sum, first, vreinterpretq_s8_s32(vdupq_n_s32(four_at(x, j, t))));
            sum = vdotq_s32(sum, second, vreinterpretq_s8_s32(vdupq_n_s32(four_at(x, j + 4, t))));
            acc[t] = (iside)sum;
        }
    }
}

INLINE void dot_bytes(iside *acc, const uint8_t *codes, const Tokens *x, const int from, const int to, const int T) {
    for (int k = from; k < to; k++) {
        int8x16_t own = vld1q_s8((const int8_t *)codes + 64 * k);
        for (int t = 0; t < T; t++)
            acc[t] = (iside)vdotq_s32((int32x4_t)acc[t], own,
                                      vreinterpretq_s8_s32(vdupq_n_s32(four_at(x, k, t))));
    }
}

INLINE void dot_sixes(iside *acc, const uint8_t *codes, const Tokens *x, const int from, const int to, const int T) {
    for (int k = from; k < to; k++) {
        uint8x16_t low = vld1q_u8(codes + 64 * (k % 4)), high = vld1q_u8(codes + 256 + 64 * (k % 2));
        low = k < 4 ? vandq_u8(low, vdupq_n_u8(15)) : vshrq_n_u8(low, 4);
        high = k < 2 ? vshlq_n_u8(high, 4) : k < 4 ? vshlq_n_u8(high, 2) : k < 6 ? high : vshrq_n_u8(high, 2);
        int8x16_t opened = vreinterpretq_s8_u8(vorrq_u8(low, vandq_u8(high, vdupq_n_u8(0x30))));
        for (int t = 0; t < T; t++)
            acc[t] = (iside)vdotq_s32((int32x4_t)acc[t], opened, vreinterpretq_s8_s32(vdupq_n_s32(four_at(x, k, t))));
    }
}

#else

INLINE iside dot_lanes(iside acc, iside codes, const int8_t x[4]) {
    return acc + (codes << 24 >> 24) * x[0] + (codes << 16 >> 24) * x[1] + (codes << 8 >> 24) * x[2] + (codes >> 24) * x[3];
}

INLINE void dot_nibbles(iside *acc, const uint8_t *codes, const Tokens *x, const int T) {
    for (int j = 0; j < 4; j++) {
        iside both;
        memcpy(&both, codes + 64 * j, sizeof both);
        iside first = both & 0x0F0F0F0F, second = (both >> 4) & 0x0F0F0F0F;
        for (int t = 0; t < T; t++) {
            acc[t] = dot_lanes(acc[t], first, x->quads[t / QUAD].codes[j][t % QUAD]);
            acc[t] = dot_lanes(acc[t], second, x->quads[t / QUAD].codes[j + 4][t % QUAD]);
        }
    }
}

INLINE void dot_bytes(iside *acc, const uint8_t *codes, const Tokens *x, const int from, const int to, const int T) {
    for (int k = from; k < to; k++) {
        iside own;
        memcpy(&own, codes + 64 * k, sizeof own);
        for (int t = 0; t < T; t++) acc[t] = dot_lanes(acc[t], own, x->quads[t / QUAD].codes[k][t % QUAD]);
    }
}

INLINE void dot_sixes(iside *acc, const uint8_t *codes, const Tokens *x, const int from, const int to, const int T) {
    for (int k = from; k < to; k++) {
        iside low, high;
        memcpy(&low, codes + 64 * (k % 4), sizeof low);
        memcpy(&high, codes + 256 + 64 * (k % 2), sizeof high);
        high = k < 2 ? high << 4 : k < 4 ? high << 2 : k < 6 ? high : high >> 2;
        iside opened = ((k < 4 ? low : low >> 4) & 0x0F0F0F0F) | (high & 0x30303030);
        for (int t = 0; t < T; t++) acc[t] = dot_lanes(acc[t], opened, x->quads[t / QUAD].codes[k][t % QUAD]);
    }
}

#endif
