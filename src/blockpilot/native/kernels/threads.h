// A pool of threads that share the stages of a pass.
//
// A stage is a number of units. Threads claim units; nobody waits for a thread that has claimed none, so a worker that
// wakes up late, or that the system has put aside, costs its own share and no more. Which thread has done a unit
// changes no bit of it. Workers spin for a moment between passes and then sleep.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "vectors.h"

#define MAX_THREADS 64
#define MAX_STAGES 4096

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

typedef struct {
    _Alignas(64) atomic_int next;  // first unit that nobody has claimed
    atomic_int done;
} Stage;

typedef struct Pool Pool;

typedef struct {
    Pool *pool;
    int index;
    int at;  // the stage it is in
    void *buffer;  // its own, kept from pass to pass
    size_t size;
    pthread_t handle;
} Thread;

typedef void (*Work)(void *given, Thread *thread);

struct Pool {
    int num_threads, spins;
    Thread threads[MAX_THREADS];
    Stage stages[MAX_STAGES];
    int num_used;  // stages of the last pass
    Work work;
    void *given;
    _Alignas(64) atomic_int generation;  // of passes
    atomic_int open;  // generation that may be entered, 0: none
    _Alignas(64) atomic_int inside;  // workers in the pass
    atomic_int sleeping;
    atomic_int is_ending;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
};

INLINE void rest(int *spins) {
    if (++*spins < 4096) RELAX();
    else sched_yield();
}

static void *serve(void *given) {
    Thread *thread = given;
    Pool *pool = thread->pool;
    int seen = 0;
    for (;;) {
        int spins = 0;
        while (atomic_load(&pool->generation) == seen && !atomic_load(&pool->is_ending)) {
            if (++spins < pool->spins) {
                RELAX();
                continue;
            }
            pthread_mutex_lock(&pool->mutex);
            atomic_fetch_add(&pool->sleeping, 1);
            while (atomic_load(&pool->generation) == seen && !atomic_load(&pool->is_ending))
                pthread_cond_wait(&pool->wake, &pool->mutex);
            atomic_fetch_sub(&pool->sleeping, 1);
            pthread_mutex_unlock(&pool->mutex);
        }
        if (atomic_load(&pool->is_ending)) return NULL;
        seen = atomic_load(&pool->generation);
        atomic_fetch_add(&pool->inside, 1);
        if (atomic_load(&pool->open) == seen) pool->work(pool->given, thread);
        atomic_fetch_sub(&pool->inside, 1);
    }
}

// All threads take part in `work`; the caller is one of them.
static void run_pool(Pool *pool, Work work, void *given) {
    for (int index = 0; index < pool->num_used; index++) {
        atomic_store_explicit(&pool->stages[index].next, 0, memory_order_relaxed);
        atomic_store_explicit(&pool->stages[index].done, 0, memory_order_relaxed);
    }
    pool->work = work;
    pool->given = given;
    for (int index = 0; index < pool->num_threads; index++) pool->threads[index].at = 0;
    if (pool->num_threads > 1) {
        int generation = atomic_load(&pool->generation) + 1;
        if (generation <= 0) generation = 1;
        atomic_store(&pool->open, generation);
        atomic_store(&pool->generation, generation);
        if (atomic_load(&pool->sleeping)) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_broadcast(&pool->wake);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
    work(given, &pool->threads[0]);
    pool->num_used = pool->threads[0].at;
    atomic_store(&pool->open, 0);
    int spins = 0;
    while (atomic_load(&pool->inside)) rest(&spins);
}

INLINE Stage *stage_of(Thread *thread) { return &thread->pool->stages[thread->at]; }

INLINE int claim(Thread *thread, int count) {
    return atomic_fetch_add_explicit(&stage_of(thread)->next, count, memory_order_acq_rel);
}

INLINE int has_units(Thread *thread, int total) {
    return atomic_load_explicit(&stage_of(thread)->next, memory_order_acquire) < total;
}

INLINE void note_done(Thread *thread, int count) {
    atomic_fetch_add_explicit(&stage_of(thread)->done, count, memory_order_acq_rel);
}

// Wait until all units are done, and go on to the next stage.
INLINE void end_stage(Thread *thread, int total) {
    Stage *stage = stage_of(thread);
    int spins = 0;
    while (atomic_load_explicit(&stage->done, memory_order_acquire) < total) rest(&spins);
    thread->at++;
}

// for (unit) over all units of a stage, claimed `CHUNK` at a time.
#define FOR_UNITS(thread, unit, total, chunk)                                                            \
    for (int first_ = claim(thread, chunk), last_; first_ < (total) &&                                   \
         (last_ = first_ + (chunk) < (total) ? first_ + (chunk) : (total), 1);                           \
         note_done(thread, last_ - first_), first_ = claim(thread, chunk))                               \
        for (int unit = first_; unit < last_; unit++)

// A buffer of the thread's own with room for `size` bytes.
INLINE void *own_buffer(Thread *thread, size_t size) {
    if (thread->size < size) {
        free(thread->buffer);
        thread->size = (size + 63) / 64 * 64;
        thread->buffer = aligned_alloc(64, thread->size);
    }
    return thread->buffer;
}
