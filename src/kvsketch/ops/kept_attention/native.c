#include "common/native.h"

#define LOG2_E 1.44269504f

/* x = exp(by x - origin), and their sum. */
static float exponentials(float *x, int64_t count, float by, float origin) {
    Lanes sums[PARTS] = {0};
    int64_t i = 0;
    const Lanes factor = all(by * LOG2_E), from = all(origin * LOG2_E);
    for (; i + BLOCK <= count; i += BLOCK)
        for (int part = 0; part < PARTS; part++) {
            const Lanes term = power_of_2(load(x + i + part * LANES) * factor - from);
            store(x + i + part * LANES, term);
            sums[part] += term;
        }
    for (int part = 1; part < PARTS; part++) sums[0] += sums[part];
    float total = sum_of(sums[0]), rest[BLOCK];
    if (i == count) return total;
    for (int part = 0; part < PARTS; part++) store(rest + part * LANES, all(-INFINITY));
    memcpy(rest, x + i, (count - i) * sizeof *x);
    for (int part = 0; part < PARTS; part++) {
        float *at = rest + part * LANES;
        store(at, power_of_2(load(at) * factor - from));
    }
    memcpy(x + i, rest, (count - i) * sizeof *x);
    for (int64_t j = 0; j < count - i; j++) total += rest[j];
    return total;
}

static float largest_of(const float *x, int64_t count) {
    Lanes tops[PARTS];
    for (int part = 0; part < PARTS; part++) tops[part] = all(-INFINITY);
    int64_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK)
        for (int part = 0; part < PARTS; part++) tops[part] = largest(load(x + i + part * LANES), tops[part]);
    for (int part = 1; part < PARTS; part++) tops[0] = largest(tops[part], tops[0]);
    float top = tops[0][0];
    for (int lane = 1; lane < LANES; lane++) top = fmaxf(top, tops[0][lane]);
    for (; i < count; i++) top = fmaxf(top, x[i]);
    return top;
}

/* Rows of x [rows, count] become exp(scale x - top), top the largest of the row; inverse: 1 / their sums;
   mass: logarithms of the sums of exp(scale x). */
void kvsketch_masses(int64_t rows, int64_t count, float scale, float *x, float *inverse, float *mass) {
    for (int64_t row = 0; row < rows; row++) {
        const float top = scale * largest_of(x + row * count, count);
        const float total = exponentials(x + row * count, count, scale, top);
        inverse[row] = 1.0f / total;
        mass[row] = top + logf(total);
    }
}

/* Rows of x [rows, count] become exp(scale x - origin). */
void kvsketch_exponentials(int64_t rows, int64_t count, float scale, float *x, const float *origin) {
    for (int64_t row = 0; row < rows; row++) exponentials(x + row * count, count, scale, origin[row]);
}
