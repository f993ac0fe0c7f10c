// Products of weights in codes and rows rounded to 8 bits.
//
// A row of numbers is rounded per block of 32: x = scale * code. A weight's block of 32 is scale * code + offset, so
//
//     sum w x  =  sum over blocks of  (weight's scale * x's scale) * sum of products of codes  +  offset * sum of x.
//
// Sums of products of codes are integers. The float32 sum goes over blocks in their order, one fused multiply-add per
// term, whatever the number of tokens: one token, a chain, a tree and a batch give the same bits.
#pragma once

#include "dots.h"
#include "threads.h"

#define SUPER 256  // weights of a row that share steps
#define GROUP 16  // rows of weights that lie side by side
#define FEW 16  // tokens of a pass whose weights are not kept in larger caches
#define AHEAD 4096  // bytes of weights that are called for before they are needed; the next rows follow these

typedef struct {
    int32_t rows, size;  // rows are padded to a multiple of 16 in `data`
    int32_t kind;  // KIND_*
    int32_t is_half;  // scales and offsets in half precision, else float32
    int32_t stride;  // bytes of one block of 16 rows, of FINE kinds of 256 weights of each
    const uint8_t *data;  // [groups of rows, blocks, codes, then scales, then offsets]
} Weight;

// NIBBLES: scale * code + offset. CENTRED: scale * (code - 8). BYTES: scale * code, signed. OFFSET: BYTES and an offset.
// HALVES: two scales per block, for 16 codes each.
// FINE: scales, and offsets, are whole numbers of 8 bits times a step in half precision that 256 weights share.
// FINE_NIBBLES are NIBBLES otherwise, FINE_SIXES are HALVES of code - 32, codes of 6 bits. Eight blocks of codes come
// first, then eight of whole numbers, then the steps.
enum { NIBBLES, CENTRED, BYTES, OFFSET_BYTES, HALVES, FINE_NIBBLES, FINE_SIXES, NUM_KINDS };
#define FINE_CODES(kind) ((kind) == FINE_NIBBLES ? 256 : 384)  // bytes of one block of 16 rows

INLINE int num_tiles(int count) { return (count + TILE - 1) / TILE; }
INLINE int num_quads(int count) { return (count + QUAD - 1) / QUAD; }
INLINE size_t tokens_bytes(int count, int size) { return sizeof(Tokens) * (size_t)num_tiles(count) * (size / BLOCK); }

// A block of one token, the nearest codes.
INLINE void round_block(Quad *to, int place, vec left, vec right) {
    vec top = max16(as_floats(as_bits(left) & 0x7FFFFFFF), as_floats(as_bits(right) & 0x7FFFFFFF));
    float scale = top16(top) * (1.0f / 127.0f);
    vec inverse = all16(scale > 0.0f ? 1.0f / scale : 0.0f);
    typedef int8_t codes16 __attribute__((vector_size(16)));
    int8_t codes[BLOCK];
    ivec first = __builtin_convertvector(round16(left * inverse), ivec);
    ivec second = __builtin_convertvector(round16(right * inverse), ivec);
    codes16 low = __builtin_convertvector(first, codes16), high = __builtin_convertvector(second, codes16);
    memcpy(codes, &low, 16);
    memcpy(codes + 16, &high, 16);
    for (int k = 0; k < 8; k++) memcpy(to->codes[k][place], codes + 4 * k, 4);
    int32_t sums[2] = {add16(first), add16(second)}, sum = sums[0] + sums[1];
    to->scales[place] = scale;
    to->sums[place] = scale * (float)sum;
    to->eights[place] = -8 * sum;
    to->lifts[place] = LIFTED ? -128 * sum : 0;
    for (int half = 0; half < 2; half++) {
        to->half_sums[half][place] = sums[half];
        to->half_lifts[half][place] = LIFTED ? -128 * sums[half] : 0;
    }
}

INLINE Tokens *tile_of(Tokens *all, int token, int size) { return all + (size_t)(token / TILE) * (size / BLOCK); }

static void round_row(Tokens *all, int token, const float *row, int size) {
    Tokens *tile = tile_of(all, token, size);
    for (int block = 0; block < size / BLOCK; block++)
        round_block(&tile[block].quads[token % TILE / QUAD], token % QUAD, load16(row + block * BLOCK), load16(row + block * BLOCK + 16));
}

// Sums [T][16] of one group of rows and the first T tokens of a tile. With few tokens the group passes
// by the larger caches, so that keys, drafters and the interpreter stay there.
INLINE void multiply_tile(
    const Weight *w, const uint8_t *group, const Tokens *x, float *out, int is_few, const int T, const int KIND
) {
    const int num_blocks = w->size / BLOCK, stride = w->stride, is_half = w->is_half;
    const int code_bytes = KIND <= CENTRED ? 256 : 512, scale_bytes = is_half ? 2 : 4;
    for (int lane = 0; lane < GROUP; lane += SIDE) {
        side totals[TILE];
        for (int t = 0; t < T; t++) totals[t] = (side){};
        const uint8_t *codes = group;
        for (int b = 0; b < num_blocks; b++, codes += stride) {
            const Tokens *tokens = x + b;
            for (int line = 0; line < code_bytes + 64; line += 64) {
                if (is_few) __builtin_prefetch(codes + AHEAD + line, 0, 0);
                else __builtin_prefetch(codes + AHEAD + line);
            }
            const uint8_t *own = codes + 4 * lane;
            const uint8_t *numbers = codes + code_bytes + scale_bytes * lane;
            side factors[2];
            for (int n = 0; n < (KIND == NIBBLES || KIND == OFFSET_BYTES || KIND == HALVES ? 2 : 1); n++) {
                if (is_half) {
                    hside half;
                    memcpy(&half, numbers + 32 * n, sizeof half);
                    factors[n] = __builtin_convertvector(half, side);
                } else
                    memcpy(&factors[n], numbers + 64 * n, sizeof factors[n]);
            }
            iside acc[TILE];
            if (KIND == HALVES) {
                for (int half = 0; half < 2; half++) {
                    for (int t = 0; t < T; t++) acc[t] = OF(tokens, half_lifts[half], t) - (iside){};
                    dot_bytes(acc, own, tokens, 4 * half, 4 * half + 4, T);
                    for (int t = 0; t < T; t++)
                        totals[t] = fma_side(__builtin_convertvector(acc[t], side), factors[half] * OF(tokens, scales, t), totals[t]);
                }
                continue;
            }
            for (int t = 0; t < T; t++) {
                if (KIND == CENTRED) acc[t] = OF(tokens, eights, t) - (iside){};
                else if (KIND == NIBBLES) acc[t] = (iside){};
                else acc[t] = OF(tokens, lifts, t) - (iside){};
            }
            if (KIND <= CENTRED) dot_nibbles(acc, own, tokens, T);
            else dot_bytes(acc, own, tokens, 0, 8, T);
            for (int t = 0; t < T; t++) {
                totals[t] = fma_side(__builtin_convertvector(acc[t], side), factors[0] * OF(tokens, scales, t), totals[t]);
                if (KIND == NIBBLES || KIND == OFFSET_BYTES)
                    totals[t] = fma_side(factors[1], OF(tokens, sums, t) - (side){}, totals[t]);
            }
        }
        for (int t = 0; t < T; t++) memcpy(out + GROUP * t + lane, &totals[t], sizeof totals[t]);
    }
}

INLINE side whole_numbers(const uint8_t *from) {
    typedef int8_t small __attribute__((vector_size(SIDE), aligned(1)));
    small found;
    memcpy(&found, from, sizeof found);
    return __builtin_convertvector(found, side);
}

// The same of FINE kinds. A whole number times a step is exact, so the sums are those of scales and offsets in float32.
INLINE void multiply_fine(
    const Weight *w, const uint8_t *group, const Tokens *x, float *out, int is_few, const int T, const int KIND
) {
    const int num_supers = w->size / SUPER, stride = w->stride, code_bytes = FINE_CODES(KIND);
    for (int lane = 0; lane < GROUP; lane += SIDE) {
        side totals[TILE];
        for (int t = 0; t < T; t++) totals[t] = (side){};
        const uint8_t *super = group;
        const Tokens *tokens = x;
        for (int s = 0; s < num_supers; s++, super += stride) {
            side steps[2];
            for (int n = 0; n < (KIND == FINE_NIBBLES ? 2 : 1); n++) {
                hside half;
                memcpy(&half, super + 8 * (code_bytes + 32) + 32 * n + 2 * lane, sizeof half);
                steps[n] = __builtin_convertvector(half, side);
            }
            for (int b = 0; b < SUPER / BLOCK; b++, tokens++) {
                for (int line = 0; line < code_bytes + 64; line += 64) {
                    const uint8_t *ahead = super + AHEAD + b * (stride / 8) + line;
                    if (is_few) __builtin_prefetch(ahead, 0, 0);
                    else __builtin_prefetch(ahead);
                }
                const uint8_t *own = super + b * code_bytes + 4 * lane;
                const uint8_t *whole = super + 8 * code_bytes + 32 * b + lane;
                side first = whole_numbers(whole) * steps[0], second = whole_numbers(whole + 16) * steps[KIND == FINE_NIBBLES];
                iside acc[TILE];
                if (KIND == FINE_NIBBLES) {
                    for (int t = 0; t < T; t++) acc[t] = (iside){};
                    dot_nibbles(acc, own, tokens, T);
                    for (int t = 0; t < T; t++) {
                        totals[t] = fma_side(__builtin_convertvector(acc[t], side), first * OF(tokens, scales, t), totals[t]);
                        totals[t] = fma_side(second, OF(tokens, sums, t) - (side){}, totals[t]);
                    }
                    continue;
                }
                for (int half = 0; half < 2; half++) {
                    for (int t = 0; t < T; t++) acc[t] = -32 * OF(tokens, half_sums[half], t) - (iside){};
                    dot_sixes(acc, own, tokens, 4 * half, 4 * half + 4, T);
                    for (int t = 0; t < T; t++)
                        totals[t] = fma_side(
                            __builtin_convertvector(acc[t], side), (half ? second : first) * OF(tokens, scales, t), totals[t]
                        );
                }
            }
        }
        for (int t = 0; t < T; t++) memcpy(out + GROUP * t + lane, &totals[t], sizeof totals[t]);
    }
}

typedef void (*Multiply)(const Weight *, const uint8_t *, const Tokens *, float *, int);

#define TILE_OF(BODY, KIND, T) \
    static void multiply_##KIND##_##T(const Weight *w, const uint8_t *group, const Tokens *x, float *out, int is_few) { \
        BODY(w, group, x, out, is_few, T, KIND); \
    }
#define TILES_OF(BODY, KIND) \
    TILE_OF(BODY, KIND, 1) TILE_OF(BODY, KIND, 2) TILE_OF(BODY, KIND, 3) TILE_OF(BODY, KIND, 4) \
    TILE_OF(BODY, KIND, 5) TILE_OF(BODY, KIND, 6) TILE_OF(BODY, KIND, 7) TILE_OF(BODY, KIND, 8)
#define NAMES_OF(KIND) \
    {multiply_##KIND##_1, multiply_##KIND##_2, multiply_##KIND##_3, multiply_##KIND##_4, \
     multiply_##KIND##_5, multiply_##KIND##_6, multiply_##KIND##_7, multiply_##KIND##_8}

TILES_OF(multiply_tile, NIBBLES)
TILES_OF(multiply_tile, CENTRED)
TILES_OF(multiply_tile, BYTES)
TILES_OF(multiply_tile, OFFSET_BYTES)
TILES_OF(multiply_tile, HALVES)
TILES_OF(multiply_fine, FINE_NIBBLES)
TILES_OF(multiply_fine, FINE_SIXES)
static const Multiply MULTIPLY[NUM_KINDS][TILE] = {
    NAMES_OF(NIBBLES), NAMES_OF(CENTRED), NAMES_OF(BYTES), NAMES_OF(OFFSET_BYTES), NAMES_OF(HALVES),
    NAMES_OF(FINE_NIBBLES), NAMES_OF(FINE_SIXES),
};

INLINE int num_groups(const Weight *w) { return (w->rows + GROUP - 1) / GROUP; }

INLINE size_t group_bytes(const Weight *w) {
    return (size_t)(w->size / (w->kind < FINE_NIBBLES ? BLOCK : SUPER)) * w->stride;
}

INLINE const uint8_t *group_of(const Weight *w, int group) { return w->data + group * group_bytes(w); }

// Sums [tokens of the tile][16] of a group of rows. Where registers are few, four tokens at a time.
INLINE void multiply(const Weight *w, int group, const Tokens *x, int tile, int count, float *out) {
    const Tokens *own = x + (size_t)tile * (w->size / BLOCK);
    int left = count - tile * TILE < TILE ? count - tile * TILE : TILE, first = SIDE == 16 || left < QUAD ? left : QUAD;
    int is_few = count <= FEW;
    MULTIPLY[w->kind][first - 1](w, group_of(w, group), own, out, is_few);
    if (left > first)
        MULTIPLY[w->kind][left - first - 1](
            w, group_of(w, group), (const Tokens *)(own->quads + 1), out + GROUP * first, is_few
        );
}

// Codes of `rows` x `size` in the order in which they are read: `codes` one byte each, what NIBBLES and CENTRED have in
// 0 .. 15; `scales` and `offsets` [rows, blocks], of HALVES two scales per block. `to` is full of zeros.
static void pack_group(const Weight *w, const int8_t *codes, const float *scales, const float *offsets, int group, uint8_t *to) {
    int num_blocks = w->size / BLOCK, is_nibble = w->kind <= CENTRED, per_block = w->kind == HALVES ? 2 : 1;
    int rows = w->rows - group * GROUP < GROUP ? w->rows - group * GROUP : GROUP;
    for (int b = 0; b < num_blocks; b++, to += w->stride) {
        uint8_t *numbers = to + (is_nibble ? 256 : 512);
        for (int r = 0; r < rows; r++) {
            size_t row = (size_t)group * GROUP + r;
            const int8_t *from = codes + row * w->size + b * BLOCK;
            for (int k = 0; k < 8; k++)
                for (int i = 0; i < 4; i++) {
                    uint8_t code = (uint8_t)from[4 * k + i];
                    if (is_nibble) to[64 * (k % 4) + 4 * r + i] |= (uint8_t)(k < 4 ? code : code << 4);
                    else to[64 * k + 4 * r + i] = code;
                }
            for (int n = 0; n < 2; n++) {
                const float *given = n < per_block ? scales + (row * num_blocks + b) * per_block + n
                                     : offsets     ? offsets + row * num_blocks + b
                                                   : NULL;
                if (!given) continue;
                _Float16 half = (_Float16)*given;
                if (w->is_half) memcpy(numbers + 32 * n + 2 * r, &half, 2);
                else memcpy(numbers + 64 * n + 4 * r, given, 4);
            }
        }
    }
}

// The same of FINE kinds: whole numbers `scales` and `offsets`, of FINE_SIXES two scales per block and no offsets;
// `steps` [1 or 2, rows, size / 256]. FINE_SIXES have codes in 0 .. 63.
static void pack_fine_group(
    const Weight *w, const int8_t *codes, const int8_t *scales, const int8_t *offsets, const float *steps, int group, uint8_t *to
) {
    int num_blocks = w->size / BLOCK, num_supers = w->size / SUPER, code_bytes = FINE_CODES(w->kind);
    int rows = w->rows - group * GROUP < GROUP ? w->rows - group * GROUP : GROUP;
    for (int r = 0; r < rows; r++) {
        size_t row = (size_t)group * GROUP + r;
        for (int b = 0; b < num_blocks; b++) {
            uint8_t *super = to + (size_t)(b / 8) * w->stride, *own = super + b % 8 * code_bytes + 4 * r;
            for (int k = 0; k < 8; k++)
                for (int i = 0; i < 4; i++) {
                    uint8_t code = (uint8_t)codes[row * w->size + b * BLOCK + 4 * k + i];
                    own[64 * (k % 4) + i] |= (uint8_t)((code & 15) << (k < 4 ? 0 : 4));
                    if (w->kind == FINE_SIXES) own[256 + 64 * (k % 2) + i] |= (uint8_t)(code >> 4 << 2 * (k / 2));
                }
            uint8_t *whole = super + 8 * code_bytes + b % 8 * 32 + r;
            whole[0] = (uint8_t)(offsets ? scales[row * num_blocks + b] : scales[2 * (row * num_blocks + b)]);
            whole[16] = (uint8_t)(offsets ? offsets[row * num_blocks + b] : scales[2 * (row * num_blocks + b) + 1]);
        }
        for (int s = 0; s < num_supers; s++)
            for (int n = 0; n < (offsets ? 2 : 1); n++) {
                _Float16 half = (_Float16)steps[((size_t)n * w->rows + row) * num_supers + s];
                memcpy(to + (size_t)s * w->stride + 8 * (code_bytes + 32) + 32 * n + 2 * r, &half, 2);
            }
    }
}

// Row groups that a thread claims at once: few enough that threads end together, many enough that tokens stay close.
INLINE int chunk_of(const Thread *thread, int total) {
    int chunk = total / (thread->pool->num_threads * 8);
    return chunk < 1 ? 1 : chunk > 16 ? 16 : chunk;
}
