#include "common/native.h"
#include "codec/native.h"

#define CLOSED -2

/* Keys or values that one token joins. */
typedef struct {
    const Codec *codec;       /* 0: vectors as they are */
    char *data;               /* codes or vectors */
    int64_t row, head, slot;  /* strides in bytes; in a flat store the last alone counts */
    Half *steps;
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

/* Head i of all B H writes slot[i], counted from start[i] in a flat store. Else heads have so many slots of keys, of
   values and of what follows the slots: where those lie on the host, there are fewer of the first two. */
void kvsketch_write_token(const Part *keys, const Part *values, int64_t all_heads, int64_t heads, int64_t key_slots,
                          int64_t value_slots, int64_t slots, const int64_t *slot, const int64_t *start, int64_t *clock,
                          int32_t *tokens, float *log_den, float *log_num, float *score) {
    for (int64_t i = 0; i < all_heads; i++) {
        const int64_t at = slot[i] + (start ? start[i] : i * slots);
        write_vector(keys, i, heads, start ? at : slot[i] + i * key_slots, slot[i], start != 0);
        write_vector(values, i, heads, start ? at : slot[i] + i * value_slots, slot[i], start != 0);
        tokens[at] = (int32_t)*clock;
        log_den[at] = 0.0f;
        if (log_num) log_num[at] = 0.0f;
        if (score) score[at] = 0.0f;
    }
    *clock += 1;
}

/* The order of slots, as rank and sort_keys of reference.py compute it. */
static int64_t sort_key(int32_t token, int64_t padding, int64_t seen, const float *score, int64_t sinks, int64_t recent) {
    const int64_t position = token - padding;
    float ranked = (float)position;
    if (score) ranked = *score < -0x1p80f ? -0x1p80f : *score > 0x1p80f ? 0x1p80f : *score;
    if (position >= seen - padding - recent) ranked = (0x1p23f + (float)position) * 0x1p60f;
    if (position < sinks) ranked = 0x1p120f - (float)position * 0x1p100f;
    if (position < 0 || token < 0) ranked = -INFINITY;
    int32_t bits;
    ranked += 0.0f;
    memcpy(&bits, &ranked, 4);
    const int64_t ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF);
    return ordered * ((int64_t)1 << 32) + (ranked > -INFINITY ? token : 0);
}

void kvsketch_free_lowest(int64_t all_heads, int64_t heads, int64_t slots, const float *scores, const int64_t *padding,
                          const int64_t *seen, int64_t sinks, int64_t recent, int32_t *tokens, float *log_den,
                          float *log_num, int64_t *next_slot) {
    for (int64_t i = 0; i < all_heads; i++) {
        const int32_t *own = tokens + i * slots;
        int64_t lowest = INT64_MAX, victim = 0;
        for (int64_t slot = 0; slot < slots; slot++) {
            if (own[slot] == CLOSED) continue;
            const float *score = scores ? scores + i * slots + slot : 0;
            const int64_t key = sort_key(own[slot], padding ? padding[i / heads] : 0, *seen, score, sinks, recent);
            if (key < lowest) {
                lowest = key;
                victim = slot;
            }
        }
        next_slot[i] = victim;
        tokens[i * slots + victim] = -1;
        log_den[i * slots + victim] = -INFINITY;
        if (log_num) log_num[i * slots + victim] = -INFINITY;
    }
}
