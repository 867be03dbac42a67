#include "common/native.h"

static Lanes largest(Lanes a, Lanes b) {
    const Integers more = a > b;
    return (Lanes)(((Integers)a & more) | ((Integers)b & ~more));
}

/* Lanes of x from i on; -inf behind the last. */
static Lanes some(const float *x, int64_t i, int64_t count) {
    if (i + LANES <= count) return load(x + i);
    Lanes lanes = all(-INFINITY);
    memcpy(&lanes, x + i, (count - i) * sizeof(float));
    return lanes;
}

static void put(float *x, int64_t i, int64_t count, Lanes lanes) {
    memcpy(x + i, &lanes, (count - i < LANES ? count - i : LANES) * sizeof(float));
}

static Lanes top_of(Lanes top, const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) top = largest(some(x, i, count), top);
    return top;
}

static Lanes sum_exponentials(Lanes sum, const float *x, int64_t count, Lanes top) {
    for (int64_t i = 0; i < count; i += LANES) sum += exponential(some(x, i, count) - top);
    return sum;
}

/* best = max(best, softmax over (a, b, c), the part of a), over rows (g, i) of G queries for each of `rows` tokens.
   a [G rows, keys]; b [G rows, copies], of which token i has read first + i + 1; c [G rows, sinks].
   a is overwritten. */
void kvsketch_best_shares(int64_t group, int64_t rows, float *a, int64_t keys, const float *b, int64_t copies,
                          int64_t first, const float *c, int64_t sinks, float *best) {
    for (int64_t row = 0; row < group * rows; row++) {
        const int64_t read = first + row % rows + 1;
        float *own = a + row * keys;
        const float *copy = b + row * copies, *sink = c + row * sinks;
        Lanes top = top_of(top_of(top_of(all(-INFINITY), own, keys), copy, read), sink, sinks);
        float most = top[0];
        for (int i = 1; i < LANES; i++) most = top[i] > most ? top[i] : most;
        top = all(most);
        Lanes sum = sum_exponentials(sum_exponentials((Lanes){0}, copy, read, top), sink, sinks, top);
        for (int64_t i = 0; i < keys; i += LANES) {
            const Lanes term = exponential(some(own, i, keys) - top);
            sum += term;
            put(own, i, keys, term);
        }
        const Lanes share = all(1.0f / sum_of(sum));
        for (int64_t i = 0; i < keys; i += LANES)
            put(best, i, keys, largest(some(own, i, keys) * share, some(best, i, keys)));
    }
}
