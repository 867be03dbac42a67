#include "common/native.h"

/* Rotated queries out [batch, heads, count, size] of q, which lies by strides q_b, q_h and q_n; the angles of a chunk are
   cos, sin [batch, chunks, half]. */
void kvsketch_rotate_queries(int64_t batch, int64_t heads, int64_t count, int64_t size, int64_t chunks, int64_t half,
                             int64_t q_b, int64_t q_h, int64_t q_n, const float *q, const float *cos, const float *sin,
                             float *restrict out) {
    for (int64_t row = 0; row < batch * heads; row++)
        for (int64_t token = 0; token < count; token++, out += size) {
            const float *x = q + row / heads * q_b + row % heads * q_h + token * q_n, *y = x + half;
            const int64_t angles = (row / heads * chunks + token / (count / chunks)) * half;
            for (int64_t c = 0; c < half; c++) {
                out[c] = x[c] * cos[angles + c] - y[c] * sin[angles + c];
                out[c + half] = y[c] * cos[angles + c] + x[c] * sin[angles + c];
            }
            memcpy(out + 2 * half, x + 2 * half, (size - 2 * half) * sizeof *out);
        }
}
