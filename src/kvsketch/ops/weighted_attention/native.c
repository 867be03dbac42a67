#include "common/native.h"
#include "codec/native.h"

/* Keys or values of slots: as they are, or quantised around a center (ops/codec). */
typedef struct {
    int64_t size, bits;               /* bits: of a code; FLOAT32 or BFLOAT16: none */
    const char *data;                 /* vectors or codes */
    int64_t row, head, slot;          /* strides in bytes; in a flat store the last alone counts */
    const Half *steps;                /* [B, H, S] or [N] */
    const float *center;              /* [B, H, D] */
    const float *exact;               /* [B, H, E, D] */
    const int32_t *exact_at;          /* [B, H, E] */
    int64_t exact_count;
    const Codec *codec;
    const float *turn;                /* [H, D, D], M of learned directions (codec/basis.py); 0: those of `codec` */
    const int32_t *fields;            /* [8, D], where their levels lie */
} Part;

typedef struct {
    int64_t heads, rows, slots, value_slots; /* rows: queries of one KV head, G N */
    Part k, v;
    const float *q;                        /* [B, H, rows, D] */
    const float *log_num, *log_den;        /* [B, H, S] or [N]; 0: no weights */
    int64_t tied;
    const float *sinks;                    /* [H, rows], a logit of each; 0: none */
    const int64_t *start, *length;         /* [B, H] */
    float scale, clip;                     /* clip < 0: none */
    float *out, *log_sum_num, *log_sum_den; /* [B, H, rows, Dv], [B, H, rows] */
    float *logits;                         /* [B, H, rows, S] */
    float *terms;                          /* as large */
} Call;

typedef struct { float origin, total; } Sum;

static float log_of(Sum sum) { return sum.origin + logf(sum.total); }

static Sum with_term(Sum sum, float x) {
    const float origin = sum.origin > x ? sum.origin : x, finite = origin == -INFINITY ? 0.0f : origin;
    return (Sum){origin, sum.total * expf(sum.origin - finite) + expf(x - finite)};
}

/* terms = exp(logits + weights - origin), and their sum. Terms behind the last are 0 up to whole lanes. */
static Sum exponentiate(float *terms, const float *logits, const float *weights, int64_t count) {
    float origin = -INFINITY;
    const int64_t whole = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = 0; i < count; i++) terms[i] = weights ? logits[i] + weights[i] : logits[i];
    for (int64_t i = count; i < whole; i++) terms[i] = -INFINITY;
    Lanes top = all(-INFINITY), sum = {0};
    Integers wrong = {0};
    for (int64_t i = 0; i < whole; i += LANES) {
        const Lanes x = load(terms + i);
        wrong |= (x != x) | (x == INFINITY);
        top = largest(x, top);
    }
    for (int i = 0; i < LANES; i++) origin = wrong[i] ? NAN : top[i] > origin ? top[i] : origin;
    if (isnan(origin)) return (Sum){NAN, NAN};
    const Lanes from = all(origin == -INFINITY ? 0.0f : origin);
    for (int64_t i = 0; i < whole; i += LANES) {
        const Lanes term = exponential(load(terms + i) - from);
        store(terms + i, term);
        sum += term;
    }
    return (Sum){origin, sum_of(sum)};
}

/* Numbers of codes in learned directions. */
static inline void unpack_fields(float *restrict z, const uint8_t *restrict codes, const int32_t *restrict fields, int64_t size) {
    const int32_t *shift = fields + size, *mask = shift + size, *byte_2 = mask + size, *shift_2 = byte_2 + size;
    const int32_t *mask_2 = shift_2 + size, *up = mask_2 + size, *lowest = up + size;
    for (int64_t d = 0; d < size; d++) {
        const int32_t low = (codes[fields[d]] >> shift[d]) & mask[d];
        const int32_t high = (codes[byte_2[d]] >> shift_2[d]) & mask_2[d];
        z[d] = (float)(low + (high << up[d])) + 0.5f * (float)lowest[d];
    }
}

/* The vector of one slot, without step and center where it is coded. */
static inline const float *vector_of(const Part *part, const char *at, float *room) {
    if (part->bits == FLOAT32) return (const float *)at;
    if (part->fields) {
        unpack_fields(room, (const uint8_t *)at, part->fields, part->size);
        return room;
    }
    if (part->bits != BFLOAT16) {
        unpack(room, (const uint8_t *)at, part->size, part->bits);
        return room;
    }
    for (int64_t d = 0; d < part->size; d++) {
        uint16_t half;
        memcpy(&half, at + 2 * d, 2);
        const uint32_t bits = (uint32_t)half << 16;
        memcpy(room + d, &bits, 4);
    }
    return room;
}

static const char *slots_of(const Part *part, const Call *call, int64_t head, int64_t first) {
    if (call->start) return part->data + first * part->slot;
    return part->data + head / call->heads * part->row + head % call->heads * part->head;
}

static int is_coded(const Part *part) { return part->bits < BFLOAT16; }

/* Vectors from slot i on, and what they are to be multiplied by; behind the last slot it comes again, times 0. */
typedef struct {
    const float *vectors[AT_ONCE];
    float steps[AT_ONCE];
    int64_t count;
} Several;

static inline Several several(const Part *part, const char *slots, int64_t first, int64_t i, int64_t count, float *room) {
    Several result = {.count = count - i < AT_ONCE ? count - i : AT_ONCE};
    for (int64_t j = 0; j < AT_ONCE; j++) {
        const int64_t at = i + (j < result.count ? j : result.count - 1);
        result.vectors[j] = vector_of(part, slots + at * part->slot, room + j * MOST);
        result.steps[j] = j >= result.count ? 0.0f : is_coded(part) ? float_of_half(part->steps[first + at]) : 1.0f;
    }
    return result;
}

static void read_keys(const Call *call, int64_t head, int64_t first, int64_t count) {
    const Part *part = &call->k;
    const int64_t size = part->size;
    float room[AT_ONCE * MOST], asked[call->rows * size], around[call->rows];
    const float *q = call->q + head * call->rows * size;
    for (int64_t r = 0; r < call->rows; r++) {
        const float *query = q + r * size;
        float *own = asked + r * size;
        around[r] = is_coded(part) ? call->scale * dot(query, part->center + head * size, size) : 0.0f;
        for (int64_t d = 0; d < size; d++) own[d] = call->scale * query[d];
        if (part->turn) {
            const float *turn = part->turn + head % call->heads * size * size;
            for (int64_t d = 0; d < size; d++) own[d] = call->scale * dot(query, turn + d * size, size);
        } else if (is_coded(part)) {
            for (int64_t d = 0; d < size; d++) own[d] *= part->codec->norm * 0.5f * part->codec->signs[d];
            rotate(own, size);
        }
    }
    const char *slots = slots_of(part, call, head, first);
    float *logits = call->logits + head * call->rows * call->slots;
    for (int64_t i = 0; i < count; i += AT_ONCE) {
        const Several keys = several(part, slots, first, i, count, room);
        for (int64_t r = 0; r < call->rows; r++) {
            float products[AT_ONCE];
            dots(products, asked + r * size, keys.vectors, size);
            for (int64_t j = 0; j < keys.count; j++)
                logits[r * call->slots + i + j] = around[r] + keys.steps[j] * products[j];
        }
    }
    for (int64_t e = 0; e < part->exact_count; e++) {
        const int64_t at = part->exact_at[head * part->exact_count + e];
        const float *key = part->exact + (head * part->exact_count + e) * size;
        for (int64_t r = 0; r < call->rows && at >= 0 && at < count; r++)
            logits[r * call->slots + at] = around[r] + dot(asked + r * size, key, size);
    }
    for (int64_t r = 0; r < call->rows; r++)
        for (int64_t i = count; i < call->slots; i++) logits[r * call->slots + i] = -INFINITY;
}

/* out = sum of terms times values, for every row; `totals` are the sums of terms. */
static void read_values(const Call *call, int64_t head, int64_t first, int64_t count, const Sum *totals) {
    const Part *part = &call->v;
    const int64_t size = part->size, wide = call->slots + LANES;
    float room[AT_ONCE * MOST], sums[call->rows * size];
    float *terms = call->terms + head * call->rows * wide;
    memset(sums, 0, sizeof sums);
    for (int64_t e = 0; e < part->exact_count; e++) {
        const int64_t at = part->exact_at[head * part->exact_count + e];
        const float *value = part->exact + (head * part->exact_count + e) * size;
        for (int64_t r = 0; r < call->rows && at >= 0 && at < count; r++) {
            add_scaled(sums + r * size, value, terms[r * wide + at], size);
            terms[r * wide + at] = 0.0f;
        }
    }
    const char *slots = slots_of(part, call, head, first);
    for (int64_t i = 0; i < count; i += AT_ONCE) {
        const Several values = several(part, slots, first, i, count, room);
        for (int64_t r = 0; r < call->rows; r++) {
            float by[AT_ONCE];
            for (int64_t j = 0; j < AT_ONCE; j++) by[j] = j < values.count ? values.steps[j] * terms[r * wide + i + j] : 0;
            add_all_scaled(sums + r * size, values.vectors, by, size);
        }
    }
    float *out = call->out + head * call->rows * size;
    for (int64_t r = 0; r < call->rows; r++) {
        float *row = out + r * size;
        if (part->turn) {
            const float *turn = part->turn + head % call->heads * size * size;
            for (int64_t d = 0; d < size; d++) row[d] = totals[r].total * part->center[head * size + d];
            for (int64_t d = 0; d < size; d++) add_scaled(row, turn + d * size, sums[r * size + d], size);
            continue;
        }
        memcpy(row, sums + r * size, size * sizeof *row);
        if (!is_coded(part)) continue;
        rotate(row, size);
        for (int64_t d = 0; d < size; d++)
            row[d] = row[d] * (part->codec->norm * 0.5f * part->codec->signs[d]) +
                     totals[r].total * part->center[head * size + d];
    }
}

static void attend_head(const Call *call, int64_t head) {
    const int64_t first = call->start ? call->start[head] : head * call->slots, wide = call->slots + LANES;
    const int64_t value_first = call->start ? first : head * call->value_slots;
    const int64_t count = call->length && call->length[head] < call->slots ? call->length[head] : call->slots;
    const int64_t values = count < call->value_slots ? count : call->value_slots;
    Sum nums[call->rows], dens[call->rows];
    read_keys(call, head, first, count);
    for (int64_t r = 0; r < call->rows; r++) {
        const float *logits = call->logits + (head * call->rows + r) * call->slots;
        float *terms = call->terms + (head * call->rows + r) * wide;
        if (!call->tied)
            dens[r] = exponentiate(terms, logits, call->log_den ? call->log_den + first : 0, count);
        nums[r] = exponentiate(terms, logits, call->log_num ? call->log_num + first : 0, values);
        if (call->tied) dens[r] = nums[r];
    }
    read_values(call, head, value_first, values, nums);
    for (int64_t r = 0; r < call->rows; r++) {
        const int64_t row = head * call->rows + r;
        Sum num = nums[r], den = dens[r], divisor = den;
        if (call->clip >= 0) {
            const float low = log_of(num) - call->clip, high = log_of(num) + call->clip, own = log_of(den);
            divisor = (Sum){fminf(fmaxf(own, low), high), den.total > 0 ? 1.0f : 0.0f};
        }
        if (call->sinks) {
            const float sink = call->sinks[head % call->heads * call->rows + r];
            den = with_term(den, sink);
            divisor = with_term(divisor, sink);
        }
        float by = 0.0f;
        if (num.total != 0 && divisor.total != 0)
            by = expf(num.origin - divisor.origin + logf(num.total) - logf(divisor.total)) / num.total;
        for (int64_t d = 0; d < call->v.size; d++) call->out[row * call->v.size + d] *= by;
        call->log_sum_num[row] = log_of(num);
        call->log_sum_den[row] = log_of(den);
    }
}

/* Heads begin .. end of all B H. */
void kvsketch_attend(const Call *call, int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; head++) attend_head(call, head);
}
