#include "common/native.h"

enum { SUM, MEAN, MAX };

/* into = fade * into + the sum, mean or largest of exp(logits - row_lse) over the query heads of each KV head. Slots of
   tokens below `padding` or 0 receive nothing. */
void kvsketch_mass_from_logits(int64_t all_heads, int64_t heads, int64_t group, int64_t slots, const float *logits,
                               const float *row_lse, const int32_t *tokens, const int64_t *padding, int64_t reduce,
                               float fade, float *into) {
    for (int64_t i = 0; i < all_heads; i++) {
        const int64_t least = padding && padding[i / heads] > 0 ? padding[i / heads] : 0;
        for (int64_t first = 0; first < slots; first += LANES) {
            const int64_t count = slots - first < LANES ? slots - first : LANES;
            Lanes total = {0};
            for (int64_t member = 0; member < group; member++) {
                const int64_t row = i * group + member;
                Lanes x = all(-INFINITY);
                memcpy(&x, logits + row * slots + first, count * sizeof(float));
                x = exponential(x - row_lse[row]);
                total = reduce == MAX ? largest(x, total) : total + x;
            }
            if (reduce == MEAN) total /= (float)group;
            for (int64_t slot = 0; slot < count; slot++) {
                float *sum = into + i * slots + first + slot;
                *sum = fade * *sum + (tokens[i * slots + first + slot] < least ? 0.0f : total[slot]);
            }
        }
    }
}
