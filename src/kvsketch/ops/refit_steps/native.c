#include "common/native.h"

#define TINY 1e-30f

/* slope = G x, G [count, count] symmetric, or A'A x of A [rows, count] with fewer rows; count: whole blocks.
   A is read once: a few rows at a time stay in the processor's cache. */
static void multiply(float *slope, const float *matrix, const float *x, int64_t rows, int64_t count) {
    memset(slope, 0, count * sizeof *slope);
    for (int64_t row = 0; row < rows; row += AT_ONCE) {
        const float *at[AT_ONCE];
        float sums[AT_ONCE];
        for (int i = 0; i < AT_ONCE; i++) at[i] = matrix + (row + i < rows ? row + i : row) * count;
        dots(sums, x, at, count);
        for (int i = rows - row; i < AT_ONCE; i++) sums[i] = 0;
        if (rows < count) add_all_scaled(slope, at, sums, count);
        else memcpy(slope + row, sums, sizeof sums);
    }
}

/* Steps of `problems` gradients, whose matrices lie `apart` numbers from one to the next. */
void kvsketch_weight_steps(int64_t problems, int64_t rows, int64_t count, const float *matrix, int64_t apart,
                           const float *wanted, const float *rate, const float *ridge, float *w, float *ahead,
                           float *slope, int64_t steps, const float *speeds) {
    for (int64_t problem = 0; problem < problems; problem++) {
        for (int64_t step = 0; step < steps; step++) {
            multiply(slope, matrix + problem * apart, ahead, rows, count);
            for (int64_t i = 0; i < count; i++) {
                const float new = ahead[i] + rate[i] * (wanted[i] - slope[i] - ridge[problem] * ahead[i]);
                const float next = new < 0 ? 0 : new;
                ahead[i] = next + speeds[step] * (next - w[i]);
                w[i] = next;
            }
        }
        wanted += count, rate += count, w += count, ahead += count;
    }
}

/* One step of `problems` conjugate gradients, all [rows, count]; before [count]; sums: room for 4 count numbers. */
void kvsketch_dual_step(int64_t problems, int64_t rows, int64_t count, const float *restrict product,
                        float *restrict residual, float *restrict direction, float *restrict image,
                        float *restrict moved, float *restrict before, const float *ridge, float *restrict sums) {
    float *restrict after = sums, *restrict turn = sums + count;
    float *restrict square = sums + 2 * count, *restrict mixed = sums + 3 * count;
    for (int64_t problem = 0; problem < problems; problem++, before += count) {
        const float r = ridge[problem];
        memset(sums, 0, 4 * count * sizeof *sums);
        for (int64_t row = 0, at = 0; row < rows; row++, at += count)
            for (int64_t i = 0; i < count; i++) after[i] += residual[at + i] * product[at + i];
        for (int64_t i = 0; i < count; i++) turn[i] = after[i] / (before[i] < TINY ? TINY : before[i]);
        for (int64_t row = 0, at = 0; row < rows; row++, at += count)
            for (int64_t i = 0; i < count; i++) {
                const float d = direction[at + i] * turn[i] + residual[at + i];
                const float g = image[at + i] * turn[i] + product[at + i];
                direction[at + i] = d, image[at + i] = g;
                square[i] += g * g, mixed[i] += d * g;
            }
        for (int64_t i = 0; i < count; i++) {
            const float curved = square[i] + r * mixed[i];
            square[i] = after[i] / (curved < TINY ? TINY : curved);
            before[i] = after[i];
        }
        for (int64_t row = 0, at = 0; row < rows; row++, at += count)
            for (int64_t i = 0; i < count; i++) {
                moved[at + i] += square[i] * direction[at + i];
                residual[at + i] -= square[i] * (image[at + i] + r * direction[at + i]);
            }
        product += rows * count, residual += rows * count, direction += rows * count;
        image += rows * count, moved += rows * count;
    }
}
