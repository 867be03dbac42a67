#include "common/native.h"
#include "codec/native.h"

/* Encodes the rows `source` of x [.., D], or its first ones, each around the center of its head. Row i goes to place
   at[i], or i; strides are in bytes. */
void kvsketch_encode(const Codec *codec, const float *x, const int64_t *source, const float *center, int64_t rows,
                     int64_t rows_of_head, uint8_t *codes, int64_t code_stride, char *steps, int64_t step_stride,
                     const int64_t *at) {
    for (int64_t i = 0; i < rows; i++) {
        const int64_t place = at ? at[i] : i, row = source ? source[i] : i;
        const float *around = center ? center + i / rows_of_head * codec->size : 0;
        encode_one(codec, x + row * codec->size, around, codes + place * code_stride,
                   (_Float16 *)(steps + place * step_stride));
    }
}

/* out [rows, D]: vectors whose codes, steps and centers are given, `rows_of_head` for each center; those at the slots
   exact_at [heads, exact_count] of a head, negative or beyond for none, are exact [heads, exact_count, D], which is
   rotated as codes are. */
void kvsketch_decode(const Codec *codec, const uint8_t *codes, const _Float16 *steps, const float *center, int64_t rows,
                     int64_t rows_of_head, const float *exact, const int32_t *exact_at, int64_t exact_count, float *out) {
    const int64_t size = codec->size;
    float factor[MOST];
    for (int64_t d = 0; d < size; d++) factor[d] = codec->norm * 0.5f * codec->signs[d];
    for (int64_t i = 0; i < rows; i++) {
        const int64_t head = i / rows_of_head;
        float y[MOST];
        unpack(y, codes + i * size * codec->bits / 8, size, codec->bits);
        for (int64_t d = 0; d < size; d++) y[d] *= (float)steps[i];
        for (int64_t e = head * exact_count; e < (head + 1) * exact_count; e++)
            if (exact_at[e] == i % rows_of_head) memcpy(y, exact + e * size, size * sizeof *y);
        rotate(y, size);
        for (int64_t d = 0; d < size; d++) out[i * size + d] = y[d] * factor[d] + center[head * size + d];
    }
}
