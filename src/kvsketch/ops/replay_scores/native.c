#include "common/native.h"

/* Logits [ROWS, COLUMNS] are computed in registers. */
#if LANES == 8
#define ROWS 4
#define ACROSS 3
#else
#define ROWS 8
#define ACROSS 2
#endif
#define COLUMNS (ACROSS * LANES)
#define LOG2_E 1.44269504f

/* Numbers of a row that has room for whole panels and whole blocks. */
static int64_t padded(int64_t count) { return (count + COLUMNS + BLOCK) / BLOCK * BLOCK; }

/* Keys [count, size] times `by`, in panels [size, COLUMNS]; 0 behind the last. */
static void pack_keys(float *panels, const float *keys, int64_t count, int64_t size, float by) {
    for (int64_t first = 0; first < count; first += COLUMNS, panels += size * COLUMNS)
        for (int64_t i = 0; i < COLUMNS; i++)
            for (int64_t d = 0; d < size; d++)
                panels[d * COLUMNS + i] = first + i < count ? by * keys[(first + i) * size + d] : 0.0f;
}

/* Logits [ROWS, `count`] of queries, in whole panels, `stride` apart; the last of `rows` stands for missing queries. */
static void compute_logits(float *logits, int64_t stride, const float *queries, int64_t rows, const float *panel,
                           int64_t count, int64_t size) {
    const float *at[ROWS];
    for (int r = 0; r < ROWS; r++) at[r] = queries + (r < rows ? r : rows - 1) * size;
    for (int64_t first = 0; first < count; first += COLUMNS, panel += size * COLUMNS) {
        Lanes sums[ROWS][ACROSS] = {{{0}}};
        for (int64_t d = 0; d < size; d++) {
            Lanes keys[ACROSS];
            for (int i = 0; i < ACROSS; i++) keys[i] = load(panel + d * COLUMNS + i * LANES);
            for (int r = 0; r < ROWS; r++)
                for (int i = 0; i < ACROSS; i++) sums[r][i] += all(at[r][d]) * keys[i];
        }
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < ACROSS; i++) store(logits + r * stride + first + i * LANES, sums[r][i]);
    }
}

/* Of the first `count` logits; -inf is written behind them, a block of it. */
static float largest_of(float *logits, int64_t count) {
    Lanes tops[PARTS];
    for (int i = 0; i < PARTS; i++) {
        tops[i] = all(-INFINITY);
        store(logits + count + i * LANES, tops[i]);
    }
    for (int64_t i = 0; i < count; i += BLOCK)
        for (int part = 0; part < PARTS; part++) tops[part] = largest(load(logits + i + part * LANES), tops[part]);
    return largest_of_parts(tops);
}

/* logits = 2^(logits - origin), in whole blocks, and their sum. */
static float sum_of_powers(float *logits, int64_t count, float origin) {
    Lanes sums[PARTS] = {0};
    for (int64_t i = 0; i < count; i += BLOCK)
        for (int part = 0; part < PARTS; part++) {
            const Lanes term = power_of_2(load(logits + i + part * LANES) - all(origin));
            store(logits + i + part * LANES, term);
            sums[part] += term;
        }
    for (int i = 1; i < PARTS; i++) sums[0] += sums[i];
    return sum_of(sums[0]);
}

/* best = max(best, softmax over (text, copy up to the token, sinks), the part of the text), over `group` query heads,
   `apart` numbers from one to the next, and `count` tokens.
   again, q [group, count, size]; keys, copies [count, size]; sinks [sink_count, size]; best [count] in whole lanes;
   known [group, count]: the logarithms of the sums over the copy, which is then not read; 0: it is.
   room: as many numbers as kvsketch_replay_room says. */
void kvsketch_replay(int64_t group, int64_t count, int64_t size, float scale, const float *again, const float *q,
                     int64_t apart, const float *keys, const float *copies, const float *sinks, int64_t sink_count,
                     const float *known, float *room, float *best) {
    const int64_t stride = padded(count), sink_stride = padded(sink_count);
    float *text = room, *copy = text + stride * size, *first_keys = copy + stride * size;
    float *seen = first_keys + sink_stride * size, *read = seen + ROWS * stride, *others = read + ROWS * stride;
    pack_keys(text, keys, count, size, scale * LOG2_E);
    if (copies == keys) copy = text;
    else pack_keys(copy, copies, count, size, scale * LOG2_E);
    pack_keys(first_keys, sinks, sink_count, size, scale * LOG2_E);
    for (int64_t member = 0; member < group; member++)
        for (int64_t first = 0; first < count; first += ROWS) {
            const int64_t rows = count - first < ROWS ? count - first : ROWS, at = member * apart + first * size;
            float shares[ROWS] = {0};
            compute_logits(seen, stride, again + at, rows, text, count, size);
            compute_logits(others, sink_stride, again + at, rows, first_keys, sink_count, size);
            if (!known) compute_logits(read, stride, q + at, rows, copy, first + rows, size);
            for (int64_t r = 0; r < rows; r++) {
                float *parts[] = {seen + r * stride, read + r * stride, others + r * sink_stride}, total = 0;
                const int64_t counts[] = {count, known ? 0 : first + r + 1, sink_count};
                const float sum = known ? LOG2_E * known[member * count + first + r] : -INFINITY;
                float origin = sum;
                for (int i = 0; i < 3; i++)
                    if (counts[i]) origin = larger(origin, largest_of(parts[i], counts[i]));
                for (int i = 0; i < 3; i++) total += sum_of_powers(parts[i], counts[i], origin);
                shares[r] = 1.0f / (total + exp2f(sum - origin));
            }
            for (int64_t i = 0; i < count; i += LANES) {
                Lanes most = load(best + i);
                for (int64_t r = 0; r < ROWS; r++) most = largest(load(seen + r * stride + i) * all(shares[r]), most);
                store(best + i, most);
            }
        }
}

/* Numbers that kvsketch_replay needs beside its arguments. */
int64_t kvsketch_replay_room(int64_t count, int64_t size, int64_t sink_count) {
    const int64_t stride = padded(count), sink_stride = padded(sink_count);
    return (2 * stride + sink_stride) * size + ROWS * (2 * stride + sink_stride);
}
