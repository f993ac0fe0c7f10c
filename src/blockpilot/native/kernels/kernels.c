// What Python calls. Compiled once for each set of instructions (hatch_build.py); cpu/library.py loads the one that
// this machine runs best.
#include "ranking.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT const char *bp_instructions(void) { return DOTS_NAME; }

#if defined(__x86_64__)
#include <cpuid.h>

// What this machine and its system can run, as bits: 1 AVX2, 2 AVX-VNNI, 4 AVX-512 with VNNI.
EXPORT int bp_find_features(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return 0;  // the system saves no vectors
    int has_fma = (c >> 12 & 1) && (c >> 29 & 1);  // and half precision
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 6) != 6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    int found = has_fma && (b >> 5 & 1) && (b >> 3 & 1) && (b >> 8 & 1) ? 1 : 0;
    unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;  // F, DQ, CD, BW, VL
    if (found && (low & 0xE6) == 0xE6 && (b & avx512) == avx512 && (c >> 11 & 1)) found |= 4;
    if (found && a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1)) found |= 2;
    return found;
}
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

EXPORT int bp_find_features(void) { return getauxval(AT_HWCAP) >> 20 & 1; }  // ASIMDDP
#else
EXPORT int bp_find_features(void) { return 1; }  // every Mac with an ARM processor has dot products
#endif

EXPORT Pool *bp_open_pool(int num_threads, int spins) {
    Pool *pool = aligned_alloc(64, (sizeof(Pool) + 63) / 64 * 64);
    if (!pool) return NULL;
    memset(pool, 0, sizeof *pool);
    pool->num_threads = num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads;
    pool->spins = spins;
    pool->num_used = MAX_STAGES;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    for (int index = 0; index < pool->num_threads; index++) {
        pool->threads[index].pool = pool;
        pool->threads[index].index = index;
        if (index && pthread_create(&pool->threads[index].handle, NULL, serve, &pool->threads[index])) {
            pool->num_threads = index;  // the system gives no more threads: go on with those
            break;
        }
    }
    return pool;
}

EXPORT void bp_close_pool(Pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->is_ending, 1);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (int index = 0; index < pool->num_threads; index++) {
        if (index) pthread_join(pool->threads[index].handle, NULL);
        free(pool->threads[index].buffer);
    }
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->wake);
    free(pool);
}

EXPORT Space *bp_open_space(void) { return calloc(1, sizeof(Space)); }

EXPORT void bp_close_space(Space *space) {
    free_space(space);
    free(space);
}

typedef struct {
    const Weight *weight;
    const int8_t *codes;
    const void *scales, *offsets;
    const float *steps;  // of FINE kinds
    uint8_t *to;
} Packing;

static void run_packing(void *given, Thread *thread) {
    const Packing *packing = given;
    const Weight *w = packing->weight;
    FOR_UNITS(thread, group, num_groups(w), 4) {
        uint8_t *to = packing->to + group * group_bytes(w);
        if (w->kind < FINE_NIBBLES) pack_group(w, packing->codes, packing->scales, packing->offsets, group, to);
        else pack_fine_group(w, packing->codes, packing->scales, packing->offsets, packing->steps, group, to);
    }
    end_stage(thread, num_groups(w));
}

EXPORT void bp_pack(
    Pool *pool, const Weight *weight, const int8_t *codes, const void *scales, const void *offsets, const float *steps, uint8_t *to
) {
    Packing packing = {weight, codes, scales, offsets, steps, to};
    run_pool(pool, run_packing, &packing);
}

// A pass over the layers, and what is wanted of it.
typedef struct {
    Walk walk;
    const Wanted *wanted;
    const Ranking *ranking;  // NULL: of a target
    Best *found;
} Pass;

static void run_pass(void *given, Thread *thread) {
    const Pass *pass = given;
    const Wanted *wanted = pass->wanted;
    const Ranking *ranking = pass->ranking;
    walk_layers(&pass->walk, thread);
    if (!wanted->count) return;
    const Tokens *tokens = prepare_wanted(&pass->walk, wanted, ranking ? ranking->normed : NULL, thread);
    finish_rows(wanted, tokens, pass->found, thread);
    if (!ranking) return;
    FOR_UNITS(thread, row, wanted->count, 1) rank_row(wanted, ranking, row);
    end_stage(thread, wanted->count);
    if (!ranking->rank) return;
    Target gates = {STORE, ranking->gates, ranking->rank, NULL, 0};
    multiply_all(ranking->projection, tokens, wanted->count, &gates, thread);
    FOR_UNITS(thread, row, wanted->count, 1) pair_row(wanted, ranking, row);
    end_stage(thread, wanted->count);
}

// 0: done. 1: not enough memory.
EXPORT int bp_forward(
    Pool *pool, Space *space, const Model *model, const Cache *cache, const Batch *batch, const Wanted *wanted,
    const Ranking *ranking
) {
    if (!make_space(space, model, batch->count > wanted->count ? batch->count : wanted->count)) return 1;
    size_t num_found = (size_t)pool->num_threads * wanted->count;
    Best *found = wanted->best ? aligned_alloc(64, num_found * sizeof(Best) + 64) : NULL;
    if (wanted->best && !found) return 1;
    if (found) clear_best(found, (int)num_found);
    Pass pass = {{model, cache, batch, space}, wanted, ranking, found};
    run_pool(pool, run_pass, &pass);
    for (int row = 0; found && row < wanted->count; row++)
        wanted->best[row] = best_of(found, pool->num_threads, wanted->count, row);
    free(found);
    return 0;
}

typedef struct {
    const Weight *weight;
    const float *x;
    float *out;
    int count;
    Tokens *tokens;
} Product;

static void run_product(void *given, Thread *thread) {
    const Product *product = given;
    int size = product->weight->size;
    FOR_UNITS(thread, token, product->count, QUAD) round_row(product->tokens, token, product->x + (size_t)token * size, size);
    end_stage(thread, product->count);
    Target target = {STORE, product->out, product->weight->rows, NULL, 0};
    multiply_all(product->weight, product->tokens, product->count, &target, thread);
}

// out [count, rows] = x [count, size] times a weight.
EXPORT int bp_multiply(Pool *pool, const Weight *weight, const float *x, float *out, int count) {
    Tokens *tokens = aligned_alloc(64, (tokens_bytes(count, weight->size) + 63) / 64 * 64);
    if (!tokens) return 1;
    Product product = {weight, x, out, count, tokens};
    run_pool(pool, run_product, &product);
    free(tokens);
    return 0;
}

// Committed tokens' taps into a block drafter's cache.
typedef struct {
    int32_t count, size;  // tokens; numbers of each in `taps`
    const float *taps;
    const Weight *features;  // [hidden, size]
    const float *norm;
    const Weight *projection;  // [layers * 2 * kv heads * dim, hidden]
    const int32_t *rows, *positions, *slots, *stored;  // `rows`: of each token in `taps`
} Shown;

typedef struct {
    const Model *model;
    const Cache *cache;
    const Shown *shown;
    Tokens *tokens, *normed_tokens;
    float *features, *projected;
} Showing;

static void run_showing(void *given, Thread *thread) {
    const Showing *showing = given;
    const Model *model = showing->model;
    const Shown *shown = showing->shown;
    int hidden = model->hidden, dim = model->dim, count = shown->count, rows = shown->projection->rows;
    FOR_UNITS(thread, token, count, QUAD)
        round_row(showing->tokens, token, shown->taps + (size_t)shown->rows[token] * shown->size, shown->size);
    end_stage(thread, count);
    Target features = {STORE, showing->features, hidden, NULL, 0};
    multiply_all(shown->features, showing->tokens, count, &features, thread);
    float *row = own_buffer(thread, 4 * (size_t)hidden);
    FOR_UNITS(thread, token, count, QUAD) {
        norm_row(showing->features + (size_t)token * hidden, shown->norm, hidden, model->eps, row);
        round_row(showing->normed_tokens, token, row, hidden);
    }
    end_stage(thread, count);
    Target projected = {STORE, showing->projected, rows, NULL, 0};
    multiply_all(shown->projection, showing->normed_tokens, count, &projected, thread);
    int total = count * model->num_layers;
    FOR_UNITS(thread, unit, total, 1) {
        int token = unit / model->num_layers, layer = unit % model->num_layers;
        float *heads = showing->projected + (size_t)token * rows + (size_t)layer * 2 * model->num_kv * dim;
        size_t at = (size_t)shown->positions[token] * (dim / 2);
        int slot = shown->slots[token], row = shown->stored[token];
        for (int head = 0; head < model->num_kv; head++) {
            float *key = heads + head * dim, *value = key + model->num_kv * dim;
            if (model->layers[layer].k_norm) norm_row(key, model->layers[layer].k_norm, dim, model->eps, key);
            rotate_row(key, model->cosines + at, model->sines + at, dim);
            store_key(showing->cache, layer, slot, head, row, key, dim);
            store_value(showing->cache, layer, slot, head, row, value, dim);
        }
    }
    end_stage(thread, total);
}

EXPORT int bp_show(Pool *pool, const Model *model, const Cache *cache, const Shown *shown) {
    int count = num_tiles(shown->count) * TILE, rows = shown->projection->rows;
    size_t first = (tokens_bytes(count, shown->size) + 63) / 64 * 64, second = (tokens_bytes(count, model->hidden) + 63) / 64 * 64;
    size_t third = (4 * (size_t)count * model->hidden + 63) / 64 * 64, fourth = (4 * (size_t)count * rows + 63) / 64 * 64;
    char *memory = aligned_alloc(64, first + second + third + fourth);
    if (!memory) return 1;
    Showing showing = {
        model, cache, shown, (Tokens *)memory, (Tokens *)(memory + first), (float *)(memory + first + second),
        (float *)(memory + first + second + third),
    };
    run_pool(pool, run_showing, &showing);
    free(memory);
    return 0;
}

typedef struct {
    const Model *model;
    const Cache *cache;
    int slot, start, count;
    const int32_t *path;
} Moving;

static void run_moving(void *given, Thread *thread) {
    const Moving *moving = given;
    int heads = moving->model->num_kv, total = moving->model->num_layers * heads;
    FOR_UNITS(thread, unit, total, 4)
        for (int i = 0; i < moving->count; i++)  // a path ascends: nothing unread is overwritten
            if (moving->path[i] != i)
                move_row(moving->cache, unit / heads, moving->slot, unit % heads, moving->start + moving->path[i],
                         moving->start + i, moving->model->dim);
    end_stage(thread, total);
}

// Rows of a path behind `start` to where they belong.
EXPORT int bp_move(Pool *pool, const Model *model, const Cache *cache, int slot, int start, int count, const int32_t *path) {
    Moving moving = {model, cache, slot, start, count, path};
    run_pool(pool, run_moving, &moving);
    return 0;
}
