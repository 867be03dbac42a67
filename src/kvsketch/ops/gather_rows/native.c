#include "common/native.h"

/* out [problems, count, bytes]: the rows first + apart * index of the matrices `which`, whose rows lie `stride` bytes from
   one to the next; index [problems, count] lies by strides index_n and index_m. */
void kvsketch_gather_rows(int64_t problems, int64_t count, int64_t bytes, int64_t stride, int64_t apart,
                        const int64_t *sources, const int64_t *which, const int64_t *first, const int64_t *index,
                        int64_t index_n, int64_t index_m, char *out) {
    for (int64_t n = 0; n < problems; n++) {
        const char *rows = (const char *)(intptr_t)sources[which[n]] + first[n] * stride;
        for (int64_t i = 0; i < count; i++, out += bytes)
            memcpy(out, rows + apart * index[n * index_n + i * index_m] * stride, bytes);
    }
}
