#include "common/native.h"
#include "codec/native.h"

/* Keys or values that one token joins. */
typedef struct {
    const Codec *codec;       /* 0: vectors as they are */
    char *data;               /* codes or vectors */
    int64_t row, head, slot;  /* strides in bytes; in a flat store the last alone counts */
    _Float16 *steps;
    const float *center;      /* [B, H, D] */
    int32_t *exact_at;        /* [B, H, E] */
    int64_t exact_count;
    const char *vector;       /* [B, H, 1, D], of the token */
    int64_t vector_bytes;
} Part;

static void write_vector(const Part *part, int64_t head, int64_t heads, int64_t place, int64_t slot, int is_flat) {
    const char *vector = part->vector + head * part->vector_bytes;
    char *at = part->data + place * part->slot;
    if (!is_flat) at = part->data + head / heads * part->row + head % heads * part->head + slot * part->slot;
    if (!part->codec) {
        memcpy(at, vector, part->vector_bytes);
        return;
    }
    const float *center = part->center + head * part->codec->size;
    encode_one(part->codec, (const float *)vector, center, (uint8_t *)at, part->steps + place);
    for (int64_t e = 0; e < part->exact_count; e++) {
        int32_t *exact = part->exact_at + head * part->exact_count + e;
        *exact = *exact == slot ? -1 : *exact;
    }
}

/* Head i of all B H writes slot[i], counted from start[i] in a flat store or from i * slots. */
void kvsketch_write_token(const Part *keys, const Part *values, int64_t all_heads, int64_t heads, int64_t slots,
                          int64_t value_slots, const int64_t *slot, const int64_t *start, int64_t *clock,
                          int32_t *tokens, float *log_den, float *log_num, float *score) {
    for (int64_t i = 0; i < all_heads; i++) {
        const int64_t at = slot[i] + (start ? start[i] : i * slots);
        const int64_t value_at = start ? at : slot[i] + i * value_slots;
        write_vector(keys, i, heads, at, slot[i], start != 0);
        write_vector(values, i, heads, value_at, slot[i], start != 0);
        tokens[at] = (int32_t)*clock;
        log_den[at] = 0.0f;
        if (log_num) log_num[at] = 0.0f;
        if (score) score[at] = 0.0f;
    }
    *clock += 1;
}
