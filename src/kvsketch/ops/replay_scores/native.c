#include "common/native.h"
#include "common/tiles.h"

enum { TEXT, COPY, SINKS, KINDS };

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
    float *seen = first_keys + sink_stride * size, *read = seen + GROUP * stride, *others = read + GROUP * stride;
    pack_rows(text, keys, count, size, scale * LOG2_E);
    if (copies == keys) copy = text;
    else pack_rows(copy, copies, count, size, scale * LOG2_E);
    pack_rows(first_keys, sinks, sink_count, size, scale * LOG2_E);
    for (int64_t member = 0; member < group; member++)
        for (int64_t first = 0; first < count; first += GROUP) {
            const int64_t rows = count - first < GROUP ? count - first : GROUP, at = member * apart + first * size;
            const Matrix rotated = {again + at, rows, size, 1}, own = {q + at, rows, size, 1};
            Part parts[KINDS] = {
                {text, rotated, seen, stride, count, 0, (count - 1) / COLUMNS * COLUMNS},
                {copy, own, read, stride, first + 1, 1, first / COLUMNS * COLUMNS},
                {first_keys, rotated, others, sink_stride, sink_count, 0, 0},
            };
            if (known) parts[COPY].columns = parts[COPY].more = parts[COPY].whole = 0;
            Sums sums;
            float sum_read[GROUP], shares[GROUP];
            for (int64_t r = 0; r < GROUP; r++)
                sum_read[r] = known && r < rows ? LOG2_E * known[member * count + first + r] : -INFINITY;
            take_powers(&sums, parts, KINDS, sum_read, rows, size);
            for (int64_t r = 0; r < rows; r++) shares[r] = 1.0f / sums.total[r];
            for (int64_t i = 0; i < count; i += LANES) {
                Lanes most = load(best + i);
                for (int64_t r = 0; r < rows; r++) most = largest(load(seen + r * stride + i) * all(shares[r]), most);
                store(best + i, most);
            }
        }
}

/* Numbers that kvsketch_replay needs beside its arguments. */
int64_t kvsketch_replay_room(int64_t count, int64_t size, int64_t sink_count) {
    const int64_t stride = padded(count), sink_stride = padded(sink_count);
    return (2 * stride + sink_stride) * size + GROUP * (2 * stride + sink_stride);
}
