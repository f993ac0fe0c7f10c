// Attention over the slots of a cache.
//
// A query at position p sees the keys of positions 0 to p, in that order: those that lie in their place in the cache,
// then those of a branching tree, which a list names. A score is a sum over the inner index in its order, place k of
// the keys belongs to lane k mod 16 of the mass, values are mixed one after the other. So a plain step, a chain, a tree
// and a prompt give the same bits, whoever shares the work.
//
// Keys and values are stored in half precision. Keys lie 16 rows side by side, [rows / 16][dim][16], so that a score
// needs no sum across lanes; values row by row, [rows][dim]. Queries that attend together score all rows that any of
// them sees, where they lie; then each takes those that it sees, in its own order.
#pragma once

#include "vectors.h"

typedef _Float16 half;
typedef struct {
    half *rows;  // [layers, keys and values, slots, kv heads, capacity, dim]
    int64_t layer_stride, plane_stride, slot_stride, head_stride;
} Cache;

typedef struct {
    const half *keys, *values;
    int num_placed;  // rows 0 .. are in their places
    int num_keys;
    const int32_t *others;  // rows of the keys behind them
} Seen;

#define MAX_QUERIES 8  // whose scores are summed together

INLINE vec load_half16(const half *from) {
#if defined(__F16C__) || defined(__aarch64__)
    typedef _Float16 halves __attribute__((vector_size(32)));
    halves found;
    memcpy(&found, from, sizeof found);
    return __builtin_convertvector(found, vec);
#else  // the exponent is moved by a product; there are no infinities here
    typedef uint16_t bits16 __attribute__((vector_size(32)));
    bits16 found;
    memcpy(&found, from, sizeof found);
    uvec wide = __builtin_convertvector(found, uvec);
    vec size = (vec)((wide & 0x7FFFu) << 13) * 0x1p112f;
    return (vec)((uvec)size | (wide & 0x8000u) << 16);
#endif
}

// Numbers beyond what half precision holds become the largest that it holds.
INLINE void to_halves(const float *from, half *to) {
    typedef _Float16 halves __attribute__((vector_size(32)));
    vec kept = __builtin_elementwise_max(__builtin_elementwise_min(load16(from), all16(65504.0f)), all16(-65504.0f));
    halves found = __builtin_convertvector(kept, halves);
    memcpy(to, &found, sizeof found);
}

INLINE half *plane_of(const Cache *cache, int layer, int plane, int slot, int head) {
    return cache->rows + layer * cache->layer_stride + plane * cache->plane_stride + slot * cache->slot_stride +
           head * cache->head_stride;
}

INLINE size_t key_place(int row, int dim) { return (size_t)(row / LANES) * LANES * dim + row % LANES; }

static void store_key(const Cache *cache, int layer, int slot, int head, int row, const float *key, int dim) {
    half *to = plane_of(cache, layer, 0, slot, head) + key_place(row, dim), found[LANES];
    for (int first = 0; first < dim; first += LANES) {
        to_halves(key + first, found);
        for (int i = 0; i < LANES; i++) to[(size_t)(first + i) * LANES] = found[i];
    }
}

static void store_value(const Cache *cache, int layer, int slot, int head, int row, const float *value, int dim) {
    half *to = plane_of(cache, layer, 1, slot, head) + (size_t)row * dim;
    for (int first = 0; first < dim; first += LANES) to_halves(value + first, to + first);
}

static void move_row(const Cache *cache, int layer, int slot, int head, int from, int to, int dim) {
    half *keys = plane_of(cache, layer, 0, slot, head), *values = plane_of(cache, layer, 1, slot, head);
    for (int i = 0; i < dim; i++) keys[key_place(to, dim) + (size_t)i * LANES] = keys[key_place(from, dim) + (size_t)i * LANES];
    memcpy(values + (size_t)to * dim, values + (size_t)from * dim, sizeof(half) * (size_t)dim);
}

INLINE int seen_row(const Seen *seen, int place) {
    return place < seen->num_placed ? place : seen->others[place - seen->num_placed];
}

// Scores [Q][stride] of SIDES blocks of 16 keys at a time: enough sums that none waits for the one before.
INLINE int score_blocks(
    const half *keys, int first, int last, const float *queries, int dim, float *scores, int stride, const int Q, const int SIDES
) {
    for (; first + SIDES <= last; first += SIDES) {
        const half *own = keys + (size_t)first * LANES * dim;
        vec sums[MAX_QUERIES][4];
        for (int q = 0; q < Q; q++)
            for (int side = 0; side < SIDES; side++) sums[q][side] = (vec){};
        for (int i = 0; i < dim; i++)
            for (int side = 0; side < SIDES; side++) {
                vec key = load_half16(own + LANES * (side * dim + i));
                for (int q = 0; q < Q; q++) sums[q][side] = fma16(key, all16(queries[q * dim + i]), sums[q][side]);
            }
        for (int q = 0; q < Q; q++)
            for (int side = 0; side < SIDES; side++)
                store16(scores + (size_t)q * stride + LANES * (first + side), sums[q][side]);
    }
    return first;
}

typedef void (*Score)(const half *, int, const float *, int, float *, int);
#define SCORE_OF(Q, SIDES) \
    static void score_##Q(const half *keys, int blocks, const float *queries, int dim, float *scores, int stride) { \
        int first = score_blocks(keys, 0, blocks, queries, dim, scores, stride, Q, SIDES); \
        if (SIDES > 1) score_blocks(keys, first, blocks, queries, dim, scores, stride, Q, 1); \
    }
SCORE_OF(1, 4) SCORE_OF(2, 4) SCORE_OF(3, 2) SCORE_OF(4, 2) SCORE_OF(5, 1) SCORE_OF(6, 1) SCORE_OF(7, 1) SCORE_OF(8, 1)
static const Score SCORE[MAX_QUERIES] = {score_1, score_2, score_3, score_4, score_5, score_6, score_7, score_8};

static void score_all(const half *keys, int blocks, const float *queries, int count, int dim, float *scores, int stride) {
    for (int first = 0; first < count && blocks > 0; first += MAX_QUERIES) {
        int queries_left = count - first < MAX_QUERIES ? count - first : MAX_QUERIES;
        SCORE[queries_left - 1](keys, blocks, queries + (size_t)first * dim, dim, scores + (size_t)first * stride, stride);
    }
}

// Scores of rows to scores of places; behind the last key minus infinity. A path ascends: nothing unread is replaced.
static void order_scores(const Seen *seen, float *scores) {
    for (int place = seen->num_placed; place < seen->num_keys; place++) scores[place] = scores[seen_row(seen, place)];
    for (int place = seen->num_keys; place % LANES; place++) scores[place] = -INFINITY;
}

// Scores to weights; what they add up to.
static float weigh(float *scores, int num_keys) {
    vec best = all16(-INFINITY), mass = {};
    for (int first = 0; first < num_keys; first += LANES) best = max16(best, load16(scores + first));
    float top = top16(best);
    for (int first = 0; first < num_keys; first += LANES) {
        vec weights = exp16(load16(scores + first) - top);
        store16(scores + first, weights);
        mass += weights;
    }
    return sum16(mass);
}

// out [Q][dim] += weights [Q][stride] times values, for places first .. last; `seen` finds rows, NULL: they are placed.
INLINE void mix_block(
    const half *values, const Seen *seen, int first, int last, const float *weights, int stride, float *out, int dim,
    int from, const int Q, const int PARTS
) {
    vec sums[4][4];
    for (int q = 0; q < Q; q++)
        for (int p = 0; p < PARTS; p++) sums[q][p] = load16(out + (size_t)q * dim + from + LANES * p);
    for (int place = first; place < last; place++) {
        const half *row = values + (size_t)(seen ? seen_row(seen, place) : place) * dim + from;
        vec value[4];
        for (int p = 0; p < PARTS; p++) value[p] = load_half16(row + LANES * p);
        for (int q = 0; q < Q; q++) {
            vec weight = all16(weights[(size_t)q * stride + place]);
            for (int p = 0; p < PARTS; p++) sums[q][p] = fma16(weight, value[p], sums[q][p]);
        }
    }
    for (int q = 0; q < Q; q++)
        for (int p = 0; p < PARTS; p++) store16(out + (size_t)q * dim + from + LANES * p, sums[q][p]);
}

static void mix_all(
    const half *values, const Seen *seen, int first, int last, const float *weights, int stride, float *out, int count, int dim
) {
    if (first >= last) return;
    for (int q = 0; q < count;) {
        int queries = count - q >= 4 ? 4 : count - q >= 3 ? 3 : 1;
        const float *own = weights + (size_t)q * stride;
        float *to = out + (size_t)q * dim;
        int from = 0;
        for (; from + 64 <= dim; from += 64) {
            if (queries == 4) mix_block(values, seen, first, last, own, stride, to, dim, from, 4, 4);
            else if (queries == 3) mix_block(values, seen, first, last, own, stride, to, dim, from, 3, 4);
            else mix_block(values, seen, first, last, own, stride, to, dim, from, 1, 4);
        }
        for (; from < dim; from += LANES) {
            for (int one = 0; one < queries; one++)
                mix_block(values, seen, first, last, own + (size_t)one * stride, stride, to + (size_t)one * dim, dim, from, 1, 1);
        }
        q += queries;
    }
}
