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
                   (Half *)(steps + place * step_stride));
    }
}
