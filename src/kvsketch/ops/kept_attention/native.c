#include "common/native.h"
#include "common/tiles.h"

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* As ops/kept_attention says, for the queries `begin` to `end` of all problems, `asked` each: q [N, asked, size],
   k [N, slots, size], v [N, slots, value_size], held [N, kept, size], elsewhere [N, asked] or 0;
   counts [N]: slots that are there, the first ones; taken [N, kept]: 1, or 0 for slots that are not there;
   a [N, asked, kept], outputs [N, asked, value_size], share [N, asked];
   room: as many numbers as kvsketch_kept_room says. */
void kvsketch_kept(int64_t begin, int64_t end, int64_t asked, int64_t slots, int64_t size, int64_t value_size,
                   int64_t kept, float scale, const float *q, const float *k, const float *v, const float *held,
                   const float *elsewhere, const int64_t *counts, const float *taken, float *room, float *a,
                   float *outputs, float *share) {
    const int64_t stride = padded(slots), kept_stride = padded(kept), value_stride = padded(value_size);
    float *text = room, *values = text + stride * size, *own = values + value_stride * slots;
    float *seen = own + kept_stride * size, *attention = seen + GROUP * stride, *there = attention + GROUP * COLUMNS;
    float *summed = there + kept_stride, none[GROUP];
    for (int r = 0; r < GROUP; r++) none[r] = -INFINITY;
    for (int64_t first = begin, rows; first < end; first += rows) {
        const int64_t n = first / asked, count = counts[n];
        if (first == begin || first % asked == 0) {
            pack_rows(text, k + n * slots * size, count, size, scale * LOG2_E);
            pack_columns(values, v + n * slots * value_size, count, value_size);
            pack_rows(own, held + n * kept * size, kept, size, scale * LOG2_E);
            memset(there, 0, kept_stride * sizeof *there);
            memcpy(there, taken + n * kept, kept * sizeof *there);
        }
        rows = least(GROUP, least(end, (n + 1) * asked) - first);
        const Matrix queries = {q + first * size, rows, size, 1}, powers = {seen, rows, stride, 1};
        Part all_slots = {text, queries, seen, stride, count, 0, count ? (count - 1) / COLUMNS * COLUMNS : 0};
        Sums sums;
        take_powers(&sums, &all_slots, 1, none, rows, size);
        multiply_panels(summed, value_stride, powers, values, value_size, count);
        for (int64_t r = 0; r < rows; r++) {
            const float inverse = 1.0f / sums.total[r], mass = sums.origin[r] + log2f(sums.total[r]);
            const float beside = elsewhere ? LOG2_E * elsewhere[first + r] : -INFINITY, top = larger(mass, beside);
            for (int64_t i = 0; i < value_size; i++)
                outputs[(first + r) * value_size + i] = inverse * summed[r * value_stride + i];
            sums.origin[r] = top + log2f(exp2f(mass - top) + exp2f(beside - top));
            share[first + r] = exp2f(mass - sums.origin[r]);
        }
        for (int64_t from = 0; from < kept; from += COLUMNS) {
            const int direct = from + COLUMNS <= kept && rows % ROWS == 0; /* whole tiles */
            float *to = direct ? a + first * kept + from : attention;
            const int64_t apart = direct ? kept : COLUMNS;
            Lanes unused[GROUP] = {{0}}, present = {0};
            powers_of_panel(to, apart, queries, own + from * size, size, sums.origin, unused);
            for (int64_t i = 0; i < COLUMNS; i += LANES) present += load(there + from + i);
            for (int64_t r = 0; r < rows && sum_of(present) < COLUMNS; r++)
                for (int64_t i = 0; i < COLUMNS; i += LANES)
                    store(to + r * apart + i, load(to + r * apart + i) * load(there + from + i));
            for (int64_t r = 0; r < rows && !direct; r++)
                memcpy(a + (first + r) * kept + from, to + r * apart, least(COLUMNS, kept - from) * sizeof *a);
        }
    }
}

/* Numbers that kvsketch_kept needs beside its arguments. */
int64_t kvsketch_kept_room(int64_t slots, int64_t size, int64_t value_size, int64_t kept) {
    const int64_t stride = padded(slots), kept_stride = padded(kept), value_stride = padded(value_size);
    return (stride + kept_stride) * size + value_stride * (slots + GROUP) + GROUP * (stride + COLUMNS) + kept_stride;
}
