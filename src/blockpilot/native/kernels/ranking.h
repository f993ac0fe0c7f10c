// The end of a pass: logits, the target's token of every row, a drafter's best tokens and scores of their pairs.
#pragma once

#include "layers.h"
#include "noise.h"

// Rows whose logits are wanted.
typedef struct {
    int32_t count;
    const int32_t *rows;  // NULL: all of the batch
    const Weight *head;
    const float *temperatures;  // per row, 0: greedy; NULL: all greedy
    const uint64_t *seeds;
    const int32_t *places;  // of the tokens that follow, in their sequences
    float *hidden;  // before the norm [count, hidden]; NULL: not wanted
    float *logits;  // [count, vocabulary]; NULL: not wanted
    int32_t *best;  // the token of each row; NULL: not wanted
} Wanted;

typedef struct {
    float scores[LANES];
    int32_t ids[LANES];
} Best;

// Keeps the higher score of every lane; of equals the one that came first, which has the lower id.
INLINE void note_best(Best *best, vec scores, ivec ids) {
    vec old = load16(best->scores);
    ivec is_higher = scores > old;
    ivec old_ids;
    memcpy(&old_ids, best->ids, sizeof old_ids);
    ivec new_ids = (ids & is_higher) | (old_ids & ~is_higher);
    store16(best->scores, choose16(is_higher, scores, old));
    memcpy(best->ids, &new_ids, sizeof new_ids);
}

INLINE vec perturb(const Wanted *wanted, int row, vec logits, ivec ids) {
    if (!wanted->temperatures || wanted->temperatures[row] == 0.0f) return logits;
    uint64_t key = position_key(wanted->seeds[row], (uint64_t)wanted->places[row]);
    return logits / wanted->temperatures[row] + noise16(key, (uvec)ids);
}

static const ivec COUNTED = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// `found` [threads][count]: the best of the groups that each thread has multiplied.
static void finish_rows(const Wanted *wanted, const Tokens *x, Best *found, Thread *thread) {
    const Weight *head = wanted->head;
    int total = num_groups(head), chunk = chunk_of(thread, total), first, count = wanted->count;
    Best *own = found + (size_t)thread->index * count;
    while ((first = claim(thread, chunk)) < total) {
        int last = first + chunk < total ? first + chunk : total;
        for (int tile = 0; tile < num_tiles(count); tile++)
            for (int group = first; group < last; group++) {
                float sums[TILE * GROUP];
                multiply(head, group, x, tile, count, sums);
                int row = group * GROUP, left = head->rows - row;
                for (int t = 0; t < TILE && tile * TILE + t < count; t++) {
                    int token = tile * TILE + t;
                    vec values = load16(sums + GROUP * t);
                    if (wanted->logits) memcpy(wanted->logits + (size_t)token * head->rows + row, &values, 4 * (size_t)(left < GROUP ? left : GROUP));
                    if (!wanted->best) continue;
                    ivec ids = COUNTED + row;
                    values = perturb(wanted, token, values, ids);
                    if (left < GROUP) values = choose16(COUNTED < left, values, all16(-INFINITY));
                    note_best(own + token, values, ids);
                }
            }
        note_done(thread, last - first);
    }
    end_stage(thread, total);
}

static void clear_best(Best *found, int count) {
    for (int i = 0; i < count; i++) {
        store16(found[i].scores, all16(-INFINITY));
        memset(found[i].ids, 0, sizeof found[i].ids);
    }
}

#define NO_TOKEN (-1)  // no score is a finite number

static int32_t best_of(const Best *found, int num_threads, int count, int row) {
    float score = -INFINITY;
    int32_t id = NO_TOKEN;
    for (int thread = 0; thread < num_threads; thread++) {
        const Best *one = found + (size_t)thread * count + row;
        for (int lane = 0; lane < LANES; lane++)
            if (one->scores[lane] > score || (one->scores[lane] == score && one->ids[lane] < id)) {
                score = one->scores[lane];
                id = one->ids[lane];
            }
    }
    return score < INFINITY ? id : NO_TOKEN;
}

// The final norm of wanted rows, rounded for the head; with convolutions the last sublayer is added before.
static const Tokens *prepare_wanted(const Walk *walk, const Wanted *wanted, float *normed, Thread *thread) {
    const Model *model = walk->model;
    const Layer *last = &model->layers[model->num_layers - 1];
    int has_conv = last->mlp_base != NULL, hidden = model->hidden, all = walk->batch->count;
    Source source = {NORMED, walk->space->x, hidden, model->norm, walk->space->normed,
                     has_conv ? last->mlp_base + (size_t)model->conv_taps * hidden : NULL, has_conv ? walk->space->mixed : NULL};
    float *row = own_buffer(thread, 4 * (size_t)hidden);
    if (has_conv) {  // rows follow each other: all are finished before any is taken
        FOR_UNITS(thread, token, all, 1) prepare_token(walk, &source, token, NULL, row);
        end_stage(thread, all);
    }
    FOR_UNITS(thread, index, wanted->count, QUAD) {
        int token = wanted->rows ? wanted->rows[index] : index;
        const float *x = walk->space->x + (size_t)token * hidden;
        if (wanted->hidden) memcpy(wanted->hidden + (size_t)index * hidden, x, 4 * (size_t)hidden);
        float *out = normed ? normed + (size_t)index * hidden : row;
        norm_row(x, model->norm, hidden, model->eps, out);
        round_row(walk->space->tokens, index, out, hidden);
    }
    end_stage(thread, wanted->count);
    return walk->space->tokens;
}

#define MAX_RANKED 64

// A drafter's positions: the best tokens of each and, with a selector, scores of parents and children.
typedef struct {
    int32_t num_best;
    const int32_t *token_ids;  // of the head's rows; NULL: their numbers
    const int32_t *depths;  // of each position in its block, from 0
    const int32_t *anchor_ids;  // of each position's block
    int32_t rank;  // of the selector; 0: none
    const float *parents, *children;  // [vocabulary, rank]
    const Weight *projection;  // [rank, hidden]
    int64_t *best_ids;  // [count, best]
    float *log_probs;  // [count, best]
    float *pairs;  // [count, best, best]: log-probabilities of children after each parent; after an anchor row 0 alone
    float *normed, *scores, *values, *gates;  // [count, hidden]; [count, rows of the head]; [count, best]; [count, rank]
} Ranking;

static void rank_row(const Wanted *wanted, const Ranking *ranking, int row) {
    int size = wanted->head->rows, kept = 0, num_best = ranking->num_best;
    float *scores = ranking->scores + (size_t)row * size, best[MAX_RANKED], floor = -INFINITY;
    int32_t places[MAX_RANKED];
    for (int first = 0; first < size; first += LANES) {
        int left = size - first;
        vec found = all16(-INFINITY);
        ivec ids = COUNTED + first;
        memcpy(&found, scores + first, 4 * (size_t)(left < LANES ? left : LANES));
        if (wanted->temperatures && wanted->temperatures[row] != 0.0f) {
            if (ranking->token_ids) memcpy(&ids, ranking->token_ids + first, 4 * (size_t)(left < LANES ? left : LANES));
            found = perturb(wanted, row, found, ids);
            if (left < LANES) found = choose16(COUNTED < left, found, all16(-INFINITY));
            memcpy(scores + first, &found, 4 * (size_t)(left < LANES ? left : LANES));
        }
        if (kept == num_best && !(top16(found) > floor)) continue;
        for (int lane = 0; lane < LANES && lane < left; lane++) {
            if (kept == num_best && !(found[lane] > floor)) continue;
            int place = kept < num_best ? kept++ : num_best - 1;
            for (; place > 0 && found[lane] > best[place - 1]; place--) {
                best[place] = best[place - 1];
                places[place] = places[place - 1];
            }
            best[place] = found[lane];
            places[place] = first + lane;
            if (kept == num_best) floor = best[num_best - 1];
        }
    }
    vec mass = {};
    int first = 0;
    for (; first + LANES <= size; first += LANES) mass += exp16(load16(scores + first) - best[0]);
    if (first < size) {
        vec rest = all16(-INFINITY);
        memcpy(&rest, scores + first, 4 * (size_t)(size - first));
        mass += exp16(rest - best[0]);
    }
    float log_mass = log16(all16(sum16(mass)))[0];
    for (int i = 0; i < num_best; i++) {
        size_t at = (size_t)row * num_best + i;
        ranking->values[at] = best[i];
        ranking->best_ids[at] = ranking->token_ids ? ranking->token_ids[places[i]] : places[i];
        ranking->log_probs[at] = best[i] - best[0] - log_mass;
    }
}

static void log_softmax(float *scores, int count) {
    float top = scores[0], mass = 0.0f;
    for (int i = 1; i < count; i++) top = scores[i] > top ? scores[i] : top;
    for (int first = 0; first < count; first += LANES) {
        vec found = all16(-INFINITY);
        memcpy(&found, scores + first, 4 * (size_t)(count - first < LANES ? count - first : LANES));
        mass += sum16(exp16(found - top));
    }
    float shift = top + log16(all16(mass))[0];
    for (int i = 0; i < count; i++) scores[i] -= shift;
}

static void pair_row(const Wanted *wanted, const Ranking *ranking, int row) {
    int num_best = ranking->num_best, rank = ranking->rank, is_first = ranking->depths[row] == 0;
    float temperature = wanted->temperatures ? wanted->temperatures[row] : 0.0f;
    float scale = temperature == 0.0f ? 1.0f : 1.0f / temperature;
    const int64_t *ids = ranking->best_ids + (size_t)row * num_best, *before = ids - num_best;
    const float *gates = ranking->gates + (size_t)row * rank, *values = ranking->values + (size_t)row * num_best;
    float *pairs = ranking->pairs + (size_t)row * num_best * num_best;
    for (int parent = 0; parent < (is_first ? 1 : num_best); parent++) {
        const float *from = ranking->parents + (size_t)(is_first ? ranking->anchor_ids[row] : before[parent]) * rank;
        float *scores = pairs + (size_t)parent * num_best;
        for (int child = 0; child < num_best; child++) {
            const float *to = ranking->children + (size_t)ids[child] * rank;
            float lanes[LANES] = {0}, sum = 0.0f;
            for (int i = 0; i < rank; i++) lanes[i % LANES] += from[i] * gates[i] * to[i];
            for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
            scores[child] = values[child] + scale * sum;
        }
        log_softmax(scores, num_best);
    }
}
