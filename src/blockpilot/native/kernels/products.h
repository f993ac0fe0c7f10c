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

#define GROUP 16  // rows of weights that lie side by side
#define FEW 16  // tokens of a pass whose weights are not kept in larger caches
#define AHEAD 4096  // bytes of weights that are called for before they are needed; the next rows follow these

typedef struct {
    int32_t rows, size;  // rows are padded to a multiple of 16 in `data`
    int32_t kind;  // KIND_*
    int32_t is_half;  // scales and offsets in half precision, else float32
    int32_t stride;  // bytes of one block of 16 rows
    const uint8_t *data;  // [groups of rows, blocks, codes, then scales, then offsets]
} Weight;

// NIBBLES: scale * code + offset. CENTRED: scale * (code - 8). BYTES: scale * code, signed. OFFSET: BYTES and an offset.
// HALVES: two scales per block, for 16 codes each.
enum { NIBBLES, CENTRED, BYTES, OFFSET_BYTES, HALVES, NUM_KINDS };

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
    for (int half = 0; half < 2; half++) to->half_lifts[half][place] = LIFTED ? -128 * sums[half] : 0;
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

typedef void (*Multiply)(const Weight *, const uint8_t *, const Tokens *, float *, int);

#define TILE_OF(KIND, T) \
    static void multiply_##KIND##_##T(const Weight *w, const uint8_t *group, const Tokens *x, float *out, int is_few) { \
        multiply_tile(w, group, x, out, is_few, T, KIND); \
    }
#define TILES_OF(KIND) \
    TILE_OF(KIND, 1) TILE_OF(KIND, 2) TILE_OF(KIND, 3) TILE_OF(KIND, 4) \
    TILE_OF(KIND, 5) TILE_OF(KIND, 6) TILE_OF(KIND, 7) TILE_OF(KIND, 8)
#define NAMES_OF(KIND) \
    {multiply_##KIND##_1, multiply_##KIND##_2, multiply_##KIND##_3, multiply_##KIND##_4, \
     multiply_##KIND##_5, multiply_##KIND##_6, multiply_##KIND##_7, multiply_##KIND##_8}

TILES_OF(NIBBLES)
TILES_OF(CENTRED)
TILES_OF(BYTES)
TILES_OF(OFFSET_BYTES)
TILES_OF(HALVES)
static const Multiply MULTIPLY[NUM_KINDS][TILE] = {
    NAMES_OF(NIBBLES), NAMES_OF(CENTRED), NAMES_OF(BYTES), NAMES_OF(OFFSET_BYTES), NAMES_OF(HALVES),
};

INLINE int num_groups(const Weight *w) { return (w->rows + GROUP - 1) / GROUP; }

INLINE const uint8_t *group_of(const Weight *w, int group) {
    return w->data + (size_t)group * (w->size / BLOCK) * w->stride;
}

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

// Row groups that a thread claims at once: few enough that threads end together, many enough that tokens stay close.
INLINE int chunk_of(const Thread *thread, int total) {
    int chunk = total / (thread->pool->num_threads * 8);
    return chunk < 1 ? 1 : chunk > 16 ? 16 : chunk;
}
