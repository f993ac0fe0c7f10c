// The layers of a model over packed tokens: one walk for the target and for block drafters.
#pragma once

#include "attention.h"
#include "products.h"

#define ASKED 64  // queries that attend together

typedef struct {
    const float *input_norm, *post_norm;  // [hidden]
    const float *q_norm, *k_norm;  // [dim]; NULL: none
    Weight qkv[3], gate_up[2], o, down;  // checkpoints may store queries, keys and values in different forms
    int32_t num_qkv;  // parts
    const float *qkv_bias;  // [rows of qkv]; NULL: none
    const float *router;  // [experts, hidden]; NULL: no experts
    const Weight *expert_gate_up, *expert_down;  // [experts][2], [experts]
    const float *attention_base, *mlp_base;  // of convolutions [2, conv_taps, hidden]; NULL: none
    Weight attention_kernel, mlp_kernel;  // their corrections [2 * conv_taps * groups, hidden]
} Layer;

typedef struct {
    int32_t num_layers, hidden, num_heads, num_kv, dim, inner;  // inner: the widest of all layers
    int32_t num_experts, num_active, is_normalized;
    int32_t conv_taps, conv_group;
    float eps;
    const float *cosines, *sines;  // [positions, dim / 2]
    const float *norm;
    const Layer *layers;
} Model;

// Tokens of all requests, packed. What each sees: rows 0 .. num_placed of its slot, then those of its list.
typedef struct {
    int32_t count, num_rows;  // tokens; rows that the longest slot has, theirs counted
    int32_t num_runs, run_size;  // tokens of one slot that attend together, and the most of them
    const int32_t *runs;  // [num_runs + 1] where each begins
    const int32_t *token_ids, *positions, *slots, *stored, *num_placed, *num_keys, *list_starts, *lists;
    const int32_t *offsets;  // places in their blocks, for convolutions; else NULL
    const float *embedding;  // [vocabulary, hidden]
    const int32_t *tap_places;  // by layer, where its output goes in a row of `taps`; -1: nowhere
    float *taps;  // [count, num_taps * hidden]; NULL: none
    int32_t num_taps;
} Batch;

typedef struct {
    int capacity;  // tokens
    float *x, *normed, *qkv, *mixed, *inner, *deltas;
    float *shares;  // of routed experts [tokens, active]
    int32_t *experts;
    Tokens *tokens;
} Space;

typedef struct {
    const Model *model;
    const Cache *cache;
    const Batch *batch;
    Space *space;
} Walk;

static int max_int(int a, int b) { return a > b ? a : b; }

// Memory for passes of `count` tokens; kept for later passes. 0: there is none.
static int make_space(Space *space, const Model *model, int count) {
    if (count <= space->capacity) return 1;
    int heads = (model->num_heads + 2 * model->num_kv) * model->dim;
    int per_token = model->num_active > 0 ? model->num_active : 1;
    int widest = max_int(model->hidden, max_int(model->num_heads * model->dim, model->inner));
    int groups = model->conv_taps ? 2 * model->conv_taps * (model->hidden / model->conv_group) : 0;
    size_t floats[] = {
        model->hidden, model->hidden, heads, max_int(model->num_heads * model->dim, model->hidden * per_token),
        (size_t)model->inner * per_token, groups, per_token,
    };
    float **targets[] = {&space->x, &space->normed, &space->qkv, &space->mixed, &space->inner, &space->deltas, &space->shares};
    int rounded = num_tiles(count) * TILE;
    space->capacity = 0;
    for (int i = 0; i < 7; i++) {
        free(*targets[i]);
        *targets[i] = aligned_alloc(64, (floats[i] * rounded * 4 + 127) / 64 * 64);
        if (!*targets[i]) return 0;
    }
    free(space->experts);
    free(space->tokens);
    space->experts = aligned_alloc(64, ((size_t)per_token * rounded * 4 + 63) / 64 * 64);
    space->tokens = aligned_alloc(64, tokens_bytes(rounded, (widest + BLOCK - 1) / BLOCK * BLOCK) + 64);
    if (!space->experts || !space->tokens) return 0;
    space->capacity = rounded;
    return 1;
}

static void free_space(Space *space) {
    void *all[] = {space->x, space->normed, space->qkv, space->mixed, space->inner, space->deltas, space->shares,
                   space->experts, space->tokens};
    for (int i = 0; i < 9; i++) free(all[i]);
    memset(space, 0, sizeof *space);
}

static void norm_row(const float *x, const float *weight, int size, float eps, float *out) {
    vec sums = {};
    for (int i = 0; i < size; i += LANES) {
        vec v = load16(x + i);
        sums = fma16(v, v, sums);
    }
    float scale = 1.0f / sqrtf(sum16(sums) / (float)size + eps);
    for (int i = 0; i < size; i += LANES) store16(out + i, load16(x + i) * scale * load16(weight + i));
}

// Both halves of a head turned by the angles of a position: pairs are (i, i + dim / 2).
static void rotate_row(float *x, const float *cosines, const float *sines, int dim) {
    int half = dim / 2;
    for (int i = 0; i < half; i++) {
        float left = x[i], right = x[i + half];
        x[i] = left * cosines[i] - right * sines[i];
        x[i + half] = right * cosines[i] + left * sines[i];
    }
}

// One side of a convolution along the block; `deltas` are the token's corrections of that side [conv_taps, groups].
static void convolve_row(
    const Model *model, const float *x, int offset, const float *base, const float *deltas, float *out
) {
    int hidden = model->hidden, group = model->conv_group, groups = hidden / group;
    for (int tap = 0; tap < model->conv_taps && tap <= offset; tap++) {
        const float *from = x - (size_t)tap * hidden, *weights = base + (size_t)tap * hidden;
        for (int g = 0; g < groups; g++) {
            float delta = deltas[tap * groups + g];
            for (int i = g * group; i < (g + 1) * group; i++) {
                float term = (weights[i] + delta) * from[i];
                out[i] = tap ? out[i] + term : term;
            }
        }
    }
}

// What a product reads of a token: a row as it is, normed, or convolved.
typedef struct {
    enum { PLAIN, NORMED, CONVOLVED } kind;
    const float *x;
    int size;
    const float *norm;  // of NORMED
    float *keep;  // where the normed row stays, if anybody reads it
    const float *base;  // of CONVOLVED: side 0; side 1 is added to the residual before a norm, if `added` is given
    const float *added;
} Source;

static void prepare_token(const Walk *walk, const Source *source, int token, Tokens *to, float *row) {
    const Model *model = walk->model;
    const float *x = source->x + (size_t)token * source->size;
    int side = 2 * model->conv_taps * (model->conv_taps ? model->hidden / model->conv_group : 0);
    const float *deltas = walk->space->deltas + (size_t)token * side;
    if (source->kind == NORMED) {
        if (source->added) {  // the residual gets what the sublayer before gave
            float *total = (float *)x;
            convolve_row(model, source->added + (size_t)token * model->hidden, walk->batch->offsets[token],
                         source->base, deltas + side / 2, row);
            for (int i = 0; i < model->hidden; i++) total[i] += row[i];
        }
        float *normed = source->keep ? source->keep + (size_t)token * source->size : row;
        norm_row(x, source->norm, source->size, model->eps, normed);
        x = normed;
    } else if (source->kind == CONVOLVED) {
        convolve_row(model, x, walk->batch->offsets[token], source->base, deltas, row);
        x = row;
    }
    if (to) round_row(to, token, x, source->size);
}

#define ALONE 4  // tokens that every thread prepares for itself: that is faster than waiting for each other

// The tokens of a product, rounded. Few of them every thread prepares in memory of its own.
static const Tokens *prepare(const Walk *walk, const Source *source, int count, Thread *thread, int is_shared) {
    size_t own_bytes = tokens_bytes(ALONE, source->size);
    Tokens *own = own_buffer(thread, own_bytes + 4 * (size_t)source->size);
    float *row = (float *)((char *)own + own_bytes);
    if (count <= ALONE && !is_shared) {
        for (int token = 0; token < count; token++) prepare_token(walk, source, token, own, row);
        return own;
    }
    FOR_UNITS(thread, quad, num_quads(count), 1)
        for (int token = quad * QUAD; token < count && token < (quad + 1) * QUAD; token++)
            prepare_token(walk, source, token, walk->space->tokens, row);
    end_stage(thread, num_quads(count));
    return walk->space->tokens;
}

enum { STORE, ADD, GATE };

typedef struct {
    int kind;
    float *out;  // [tokens, stride]
    int stride;
    float *copy;  // of ADD: where sums go besides; NULL: nowhere
    int copy_stride;
} Target;

INLINE void finish_sums(const Target *target, float *sums, const float *ups, int group, int rows, int first, int count) {
    int row = group * GROUP, wide = row + GROUP <= rows;
    for (int t = 0; t < count; t++, sums += GROUP) {
        float *out = target->out + (size_t)(first + t) * target->stride + row;
        vec values = load16(sums);
        if (target->kind == ADD) values += load16(out);
        if (target->kind == GATE) values = values / (1.0f + exp16(-values)) * load16(ups + GROUP * t);
        if (wide) store16(out, values);
        else memcpy(out, &values, 4 * (size_t)(rows - row));
        if (target->copy) store16(target->copy + (size_t)(first + t) * target->copy_stride + row, values);
    }
}

// A stage: the rows of all parts times all tokens. A gated one has two parts, the gate and the up projection.
static void multiply_parts(
    const Weight *parts, int num_parts, const Tokens *x, int count, const Target *target, Thread *thread
) {
    int is_gated = target->kind == GATE, total = 0, rows = 0, first;
    for (int part = 0; part < (is_gated ? 1 : num_parts); part++) {
        total += num_groups(parts + part);
        rows += parts[part].rows;
    }
    int chunk = chunk_of(thread, total);
    while ((first = claim(thread, chunk)) < total) {
        int last = first + chunk < total ? first + chunk : total;
        for (int tile = 0; tile < num_tiles(count); tile++)
            for (int group = first; group < last; group++) {
                int tokens = count - tile * TILE < TILE ? count - tile * TILE : TILE;
                float sums[TILE * GROUP], ups[TILE * GROUP];
                const Weight *w = parts;
                int own = group;
                for (; own >= num_groups(w); w++) own -= num_groups(w);
                multiply(w, own, x, tile, count, sums);
                if (is_gated) multiply(parts + 1, group, x, tile, count, ups);
                finish_sums(target, sums, ups, group, rows, tile * TILE, tokens);
            }
        note_done(thread, last - first);
    }
    end_stage(thread, total);
}

static void multiply_all(const Weight *w, const Tokens *x, int count, const Target *target, Thread *thread) {
    multiply_parts(w, 1, x, count, target, thread);
}

static void multiply_source(
    const Walk *walk, const Weight *parts, int num_parts, const Source *source, const Target *target, Thread *thread
) {
    int count = walk->batch->count;
    multiply_parts(parts, num_parts, prepare(walk, source, count, thread, source->keep != NULL), count, target, thread);
}

static void add_row(float *x, const float *added, int size) {
    for (int i = 0; i < size; i += LANES) store16(x + i, load16(x + i) + load16(added + i));
}

// Queries of the heads that share keys, and their new key and value: biased, normed, rotated, stored.
static void store_rows(const Walk *walk, const Layer *layer, int index, int token, int head) {
    const Model *model = walk->model;
    const Batch *batch = walk->batch;
    int dim = model->dim, group = model->num_heads / model->num_kv;
    float *heads = walk->space->qkv + (size_t)token * (model->num_heads + 2 * model->num_kv) * dim;
    const float *cosines = model->cosines + (size_t)batch->positions[token] * (dim / 2);
    const float *sines = model->sines + (size_t)batch->positions[token] * (dim / 2);
    const float *bias = layer->qkv_bias;
    int value = (model->num_heads + model->num_kv + head) * dim;
    if (bias) add_row(heads + value, bias + value, dim);
    for (int i = 0; i <= group; i++) {
        int place = (i < group ? head * group + i : model->num_heads + head) * dim;
        float *row = heads + place;
        const float *norm = i < group ? layer->q_norm : layer->k_norm;
        if (bias) add_row(row, bias + place, dim);
        if (norm) norm_row(row, norm, dim, model->eps, row);
        rotate_row(row, cosines, sines, dim);
    }
    int slot = batch->slots[token], row = batch->stored[token];
    store_key(walk->cache, index, slot, head, row, heads + (model->num_heads + head) * dim, dim);
    store_value(walk->cache, index, slot, head, row, heads + value, dim);
}

// Tokens of one slot, and heads that share keys.
typedef struct {
    int token, count, head, num_heads;
} Queries;

static Seen seen_by(const Walk *walk, int index, int token, int head) {
    const Batch *batch = walk->batch;
    int slot = batch->slots[token];
    return (Seen){
        plane_of(walk->cache, index, 0, slot, head), plane_of(walk->cache, index, 1, slot, head),
        batch->num_placed[token], batch->num_keys[token], batch->lists + batch->list_starts[token],
    };
}

static void attend(const Walk *walk, int index, const Queries *asked, int stride, char *memory) {
    const Model *model = walk->model;
    int dim = model->dim, group = model->num_heads / model->num_kv, heads = asked->num_heads, count = asked->count * heads;
    float *queries = (float *)memory, *mixed = queries + count * dim, *scores = mixed + count * dim;
    float scale = 1.0f / sqrtf((float)dim), masses[ASKED];
    int num_rows = 0, shared = INT32_MAX;  // rows that any token sees, and those that all see in their places
    for (int t = 0; t < asked->count; t++) {
        size_t row = ((size_t)(asked->token + t) * (model->num_heads + 2 * model->num_kv) + asked->head) * dim;
        for (int i = 0; i < heads * dim; i++) queries[t * heads * dim + i] = walk->space->qkv[row + i] * scale;
        Seen seen = seen_by(walk, index, asked->token + t, asked->head / group);
        num_rows = max_int(num_rows, seen_row(&seen, seen.num_keys - 1) + 1);
        shared = seen.num_placed < shared ? seen.num_placed : shared;
    }
    memset(mixed, 0, 4 * (size_t)count * dim);
    Seen first = seen_by(walk, index, asked->token, asked->head / group);
    score_all(first.keys, (num_rows + LANES - 1) / LANES, queries, count, dim, scores, stride);
    for (int t = 0; t < asked->count; t++) {
        Seen seen = seen_by(walk, index, asked->token + t, asked->head / group);
        for (int h = t * heads; h < (t + 1) * heads; h++) {
            order_scores(&seen, scores + (size_t)h * stride);
            masses[h] = weigh(scores + (size_t)h * stride, seen.num_keys);
        }
    }
    mix_all(first.values, NULL, 0, shared, scores, stride, mixed, count, dim);
    for (int t = 0; t < asked->count; t++) {
        Seen seen = seen_by(walk, index, asked->token + t, asked->head / group);
        mix_all(seen.values, &seen, shared, seen.num_keys, scores + (size_t)t * heads * stride, stride,
                mixed + t * heads * dim, heads, dim);
        float *out = walk->space->mixed + ((size_t)(asked->token + t) * model->num_heads + asked->head) * dim;
        for (int h = 0; h < heads; h++) {
            float inverse = 1.0f / masses[t * heads + h];
            for (int i = 0; i < dim; i++) out[h * dim + i] = mixed[(t * heads + h) * dim + i] * inverse;
        }
    }
}

static void attend_layer(const Walk *walk, const Layer *layer, int index, Thread *thread) {
    const Model *model = walk->model;
    const Batch *batch = walk->batch;
    int dim = model->dim, count = batch->count, total = count * model->num_kv;
    FOR_UNITS(thread, unit, total, 1) store_rows(walk, layer, index, unit % count, unit / count);
    end_stage(thread, total);
    // few queries are shared out by head
    int group = model->num_heads / model->num_kv, stride = (batch->num_rows + LANES - 1) / LANES * LANES;
    int heads = batch->num_runs * model->num_kv < 4 * thread->pool->num_threads || group > ASKED ? 1 : group;
    size_t queries = batch->run_size * (size_t)heads;
    char *memory = own_buffer(thread, 4 * queries * (2 * (size_t)dim + stride));
    total = batch->num_runs * (model->num_heads / heads);
    FOR_UNITS(thread, unit, total, 1) {  // runs of one head follow each other: its keys stay close
        int run = unit % batch->num_runs;
        Queries asked = {batch->runs[run], batch->runs[run + 1] - batch->runs[run], unit / batch->num_runs * heads, heads};
        attend(walk, index, &asked, stride, memory);
    }
    end_stage(thread, total);
}

// Routed experts: every token's best by its own row alone, each as a product of its own, added by rank.
static void route_token(const Walk *walk, const Layer *layer, int token, float *probabilities) {
    const Model *model = walk->model;
    const float *x = walk->space->normed + (size_t)token * model->hidden;
    int32_t *experts = walk->space->experts + (size_t)token * model->num_active;
    float *shares = walk->space->shares + (size_t)token * model->num_active;
    float top = -INFINITY, mass = 0.0f, kept = 0.0f;
    for (int expert = 0; expert < model->num_experts; expert++) {
        const float *row = layer->router + (size_t)expert * model->hidden;
        vec sums = {};
        for (int i = 0; i < model->hidden; i += LANES) sums = fma16(load16(x + i), load16(row + i), sums);
        probabilities[expert] = sum16(sums);
        top = probabilities[expert] > top ? probabilities[expert] : top;
    }
    for (int expert = 0; expert < model->num_experts; expert++) {
        probabilities[expert] = exp16(all16(probabilities[expert] - top))[0];
        mass += probabilities[expert];
    }
    for (int rank = 0; rank < model->num_active; rank++) {
        int best = 0;
        for (int expert = 1; expert < model->num_experts; expert++)
            if (probabilities[expert] > probabilities[best]) best = expert;
        experts[rank] = best;
        shares[rank] = probabilities[best] / mass;
        kept += shares[rank];
        probabilities[best] = -1.0f;
    }
    for (int rank = 0; model->is_normalized && rank < model->num_active; rank++) shares[rank] /= kept;
}

static void run_expert(const Walk *walk, const Layer *layer, int token, int rank, Thread *thread) {
    const Model *model = walk->model;
    int active = model->num_active, expert = walk->space->experts[(size_t)token * active + rank];
    const Weight *gate_up = layer->expert_gate_up + 2 * expert, *down = layer->expert_down + expert;
    int inner = down->size;
    char *memory = own_buffer(thread, tokens_bytes(1, model->hidden) + tokens_bytes(1, inner) + 4 * (size_t)inner + 192);
    Tokens *x = (Tokens *)memory, *gated = x + model->hidden / BLOCK;
    float *row = (float *)(gated + inner / BLOCK), sums[GROUP], ups[GROUP];
    round_row(x, 0, walk->space->normed + (size_t)token * model->hidden, model->hidden);
    Target keep = {GATE, row, inner, NULL, 0};
    for (int group = 0; group < inner / GROUP; group++) {
        multiply(gate_up, group, x, 0, 1, sums);
        multiply(gate_up + 1, group, x, 0, 1, ups);
        finish_sums(&keep, sums, ups, group, inner, 0, 1);
    }
    round_row(gated, 0, row, inner);
    Target out = {STORE, walk->space->mixed + ((size_t)token * active + rank) * model->hidden, model->hidden, NULL, 0};
    for (int group = 0; group < num_groups(down); group++) {
        multiply(down, group, gated, 0, 1, sums);
        finish_sums(&out, sums, ups, group, model->hidden, 0, 1);
    }
}

static void run_experts(const Walk *walk, const Layer *layer, float *taps, Thread *thread) {
    const Model *model = walk->model;
    int count = walk->batch->count, active = model->num_active, hidden = model->hidden;
    Source source = {NORMED, walk->space->x, hidden, layer->post_norm, walk->space->normed, NULL, NULL};
    FOR_UNITS(thread, token, count, 1) {
        prepare_token(walk, &source, token, NULL, NULL);
        route_token(walk, layer, token, own_buffer(thread, 4 * (size_t)model->num_experts));
    }
    end_stage(thread, count);
    FOR_UNITS(thread, unit, count * active, 1) run_expert(walk, layer, unit / active, unit % active, thread);
    end_stage(thread, count * active);
    FOR_UNITS(thread, token, count, 1) {
        float *x = walk->space->x + (size_t)token * hidden;
        for (int i = 0; i < hidden; i += LANES) {
            vec sum = {};
            for (int rank = 0; rank < active; rank++)
                sum = fma16(all16(walk->space->shares[token * active + rank]),
                            load16(walk->space->mixed + ((size_t)token * active + rank) * hidden + i), sum);
            sum += load16(x + i);
            store16(x + i, sum);
            if (taps) store16(taps + (size_t)token * walk->batch->num_taps * hidden + i, sum);
        }
    }
    end_stage(thread, count);
}

// A sublayer between its convolutions: corrections from the normed row, then what is convolved with them.
static Source convolve_before(const Walk *walk, const Weight *kernel, const float *base, const Source *normed, Thread *thread) {
    const Model *model = walk->model;
    Target deltas = {STORE, walk->space->deltas, 2 * model->conv_taps * (model->hidden / model->conv_group), NULL, 0};
    multiply_source(walk, kernel, 1, normed, &deltas, thread);
    return (Source){CONVOLVED, walk->space->normed, model->hidden, NULL, NULL, base, NULL};
}

static void walk_layer(const Walk *walk, int index, Thread *thread) {
    const Model *model = walk->model;
    const Batch *batch = walk->batch;
    const Layer *layer = &model->layers[index];
    Space *space = walk->space;
    int hidden = model->hidden, mixed = model->num_heads * model->dim, has_conv = layer->attention_base != NULL;
    size_t side = (size_t)model->conv_taps * hidden;
    const Layer *before = index ? layer - 1 : NULL;
    // with convolutions a sublayer's result lies in `mixed` until the next norm adds it
    Source source = {NORMED, space->x, hidden, layer->input_norm, has_conv ? space->normed : NULL,
                     has_conv && before ? before->mlp_base + side : NULL, has_conv && before ? space->mixed : NULL};
    if (has_conv) source = convolve_before(walk, &layer->attention_kernel, layer->attention_base, &source, thread);
    Target qkv = {STORE, space->qkv, (model->num_heads + 2 * model->num_kv) * model->dim, NULL, 0};
    multiply_source(walk, layer->qkv, layer->num_qkv, &source, &qkv, thread);
    attend_layer(walk, layer, index, thread);
    source = (Source){PLAIN, space->mixed, mixed, NULL, NULL, NULL, NULL};
    if (has_conv) {
        const Tokens *tokens = prepare(walk, &source, batch->count, thread, 1);
        Target attended = {STORE, space->mixed, hidden, NULL, 0};  // it is rounded already
        multiply_all(&layer->o, tokens, batch->count, &attended, thread);
        source = (Source){NORMED, space->x, hidden, layer->post_norm, space->normed, layer->attention_base + side, space->mixed};
        source = convolve_before(walk, &layer->mlp_kernel, layer->mlp_base, &source, thread);
    } else {
        Target sum = {ADD, space->x, hidden, NULL, 0};
        multiply_source(walk, &layer->o, 1, &source, &sum, thread);
        source = (Source){NORMED, space->x, hidden, layer->post_norm, NULL, NULL, NULL};
    }
    int place = batch->taps ? batch->tap_places[index] : -1;
    float *taps = place < 0 ? NULL : batch->taps + (size_t)place * hidden;
    if (layer->router) {
        run_experts(walk, layer, taps, thread);
        return;
    }
    Target gated = {GATE, space->inner, layer->down.size, NULL, 0};
    multiply_source(walk, layer->gate_up, 2, &source, &gated, thread);
    source = (Source){PLAIN, space->inner, layer->down.size, NULL, NULL, NULL, NULL};
    Target sum = {has_conv ? STORE : ADD, has_conv ? space->mixed : space->x, hidden, taps, batch->num_taps * hidden};
    multiply_source(walk, &layer->down, 1, &source, &sum, thread);
}

static void walk_layers(const Walk *walk, Thread *thread) {
    const Batch *batch = walk->batch;
    int hidden = walk->model->hidden;
    FOR_UNITS(thread, token, batch->count, 4)
        memcpy(walk->space->x + (size_t)token * hidden, batch->embedding + (size_t)batch->token_ids[token] * hidden,
               4 * (size_t)hidden);
    end_stage(thread, batch->count);
    for (int index = 0; index < walk->model->num_layers; index++) walk_layer(walk, index, thread);
}
