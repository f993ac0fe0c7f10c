// The noise of sampling: standard Gumbel noise as a function of (seed, position, token id). models/noise.py says how it
// is made; here it is made 16 tokens at a time.
#pragma once

#include "vectors.h"

static uint64_t position_key(uint64_t seed, uint64_t position) {
    uint64_t key = seed * 0x9E3779B97F4A7C15u + position * 0xD1B54A32D192ED03u + 0x632BE59BD9B4E019u;
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9u;
    key = (key ^ (key >> 27)) * 0x94D049BB133111EBu;
    return key ^ (key >> 31);
}

INLINE uvec mix16(uvec bits) {
    bits ^= bits >> 16;
    bits *= 0x7FEB352Du;
    bits ^= bits >> 15;
    bits *= 0x846CA68Bu;
    return bits ^ (bits >> 16);
}

// log(1 + y) for y in (-1, 0], exact where 1 + y rounds.
INLINE vec log_next16(vec y) {
    vec whole = y + 1.0f;
    vec part = whole - 1.0f;
    return choose16(part == 0.0f, y, log16(whole) * (y / part));
}

INLINE vec noise16(uint64_t key, uvec token_ids) {
    uvec bits = token_ids * 0x9E3779B1u + (uint32_t)key;
    bits = mix16(mix16(bits) + (uint32_t)(key >> 32));
    vec uniform = __builtin_convertvector((ivec)(bits & 0x7FFFFFFFu), vec);
    uniform = (uniform + 0.5f) * 0x1p-31f;
    uniform = choose16(uniform > 1.0f - 0x1p-24f, all16(1.0f - 0x1p-24f), uniform);
    return -log16(-log_next16(-uniform));
}
