// Products of every kind of weight against plain loops, without Python: for machines that can only be emulated.
//
//     python -m ziglang cc -O3 -std=c11 -ffp-contract=off -target aarch64-linux-musl -mcpu=generic+dotprod -static \
//         tests/native/check_products.c -o check_products && qemu-aarch64 ./check_products
//
// Sums of codes are integers, so the reference adds the same float32 terms in the same order and must give equal bits.
#include <stdio.h>

#include "../../src/blockpilot/native/kernels/kernels.c"

enum { ROWS = 40, SIZE = 512, BLOCKS = SIZE / BLOCK, COUNT = 11 };

static uint32_t state = 1;
static uint32_t draw(void) { return state = state * 1664525u + 1013904223u; }
static float draw_float(void) { return (float)(draw() >> 8) / (1 << 23) - 1.0f; }

static int8_t codes[ROWS * SIZE], whole_scales[ROWS * BLOCKS * 2], whole_offsets[ROWS * BLOCKS];
static float steps[2 * ROWS * SIZE / SUPER], scales[ROWS * BLOCKS * 2], offsets[ROWS * BLOCKS], x[COUNT * SIZE], out[COUNT * ROWS];

static float plain_fma(float a, float b, float c) {
#if HAS_FMA
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

static int lift_of(int kind) { return kind == CENTRED ? 8 : kind == FINE_SIXES ? 32 : 0; }
static int has_halves(int kind) { return kind == HALVES || kind == FINE_SIXES; }
static int has_offsets(int kind) { return kind == NIBBLES || kind == OFFSET_BYTES || kind == FINE_NIBBLES; }

static float expected(int kind, const Tokens *tokens, int row, int token) {
    float total = 0.0f;
    for (int b = 0; b < BLOCKS; b++) {
        const Quad *quad = &tile_of((Tokens *)tokens, token, SIZE)[b].quads[token % TILE / QUAD];
        for (int half = 0; half < (has_halves(kind) ? 2 : 1); half++) {
            int32_t sum = 0;
            int first = has_halves(kind) ? 16 * half : 0, last = has_halves(kind) ? first + 16 : 32;
            for (int i = first; i < last; i++)
                sum += (codes[row * SIZE + b * BLOCK + i] - lift_of(kind)) * quad->codes[i / 4][token % QUAD][i % 4];
            float scale = scales[has_halves(kind) ? (row * BLOCKS + b) * 2 + half : row * BLOCKS + b];
            total = plain_fma((float)sum, scale * quad->scales[token % QUAD], total);
        }
        if (has_offsets(kind))
            total = plain_fma(offsets[row * BLOCKS + b], quad->sums[token % QUAD], total);
    }
    return total;
}

// Scales, and offsets, that are whole numbers of 8 bits times steps.
static void draw_steps(int kind) {
    int supers = SIZE / SUPER, per_super = has_halves(kind) ? 16 : 8;
    for (int i = 0; i < 2 * ROWS * supers; i++) steps[i] = (float)(_Float16)draw_float();
    for (int i = 0; i < ROWS * supers * per_super; i++) {
        whole_scales[i] = (int8_t)(draw() >> 24);
        scales[i] = (float)whole_scales[i] * steps[i / per_super];
    }
    for (int i = 0; i < ROWS * BLOCKS; i++) {
        whole_offsets[i] = (int8_t)(draw() >> 24);
        offsets[i] = (float)whole_offsets[i] * steps[ROWS * supers + i / 8];
    }
}

int main(void) {
    static const char *NAMES[] = {"nibbles", "centred", "bytes", "offset bytes", "halves", "fine nibbles", "fine sixes"};
    static uint8_t data[3 * BLOCKS * 1024] __attribute__((aligned(64)));
    int failures = 0;
    Pool *pool = bp_open_pool(2, 100);
    Tokens *tokens = aligned_alloc(64, tokens_bytes(COUNT, SIZE));
    printf("instructions: %s\n", bp_instructions());
    for (int kind = 0; kind < NUM_KINDS; kind++)
        for (int is_half = 0; is_half < 2; is_half++) {
            int is_fine = kind >= FINE_NIBBLES, bits = kind <= CENTRED || kind == FINE_NIBBLES ? 4 : kind == FINE_SIXES ? 6 : 8;
            for (int i = 0; i < ROWS * SIZE; i++) codes[i] = (int8_t)(draw() >> (32 - bits));
            for (int i = 0; i < ROWS * BLOCKS * 2; i++) scales[i] = (float)(_Float16)draw_float();
            for (int i = 0; i < ROWS * BLOCKS; i++) offsets[i] = (float)(_Float16)draw_float();
            for (int i = 0; i < COUNT * SIZE; i++) x[i] = i % 7 ? draw_float() : 1.0f;
            if (is_fine) draw_steps(kind);
            int numbers = kind == CENTRED || kind == BYTES ? 1 : 2;
            int stride = (kind <= CENTRED ? 256 : 512) + numbers * GROUP * (is_half ? 2 : 4);
            Weight w = {ROWS, SIZE, kind, is_half, is_fine ? 8 * (FINE_CODES(kind) + 32) + 64 : stride, data};
            memset(data, 0, sizeof data);
            const void *given = is_fine ? (void *)whole_offsets : (void *)offsets;
            bp_pack(pool, &w, codes, is_fine ? (void *)whole_scales : (void *)scales, has_offsets(kind) ? given : NULL,
                    is_fine ? steps : NULL, data);
            for (int t = 0; t < COUNT; t++) round_row(tokens, t, x + t * SIZE, SIZE);
            bp_multiply(pool, &w, x, out, COUNT);
            int wrong = 0;
            for (int t = 0; t < COUNT; t++)
                for (int row = 0; row < ROWS; row++) wrong += out[t * ROWS + row] != expected(kind, tokens, row, t);
            printf("%-13s %s scales: %s\n", NAMES[kind], is_half ? "half  " : "float ", wrong ? "WRONG" : "equal");
            failures += wrong > 0;
        }
    bp_close_pool(pool);
    free(tokens);
    return failures > 0;
}
