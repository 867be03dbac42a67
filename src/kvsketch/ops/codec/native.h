/* One quantised vector, as reference.py computes it: codes and steps are equal bit for bit.

   All sums are of integers that their type holds, exact in any order: the compiler takes many channels at a time. */

typedef uint16_t Half; /* a float16, of which not every compiler knows the type */

static inline float float_of_half(Half half) {
    const uint32_t exponent = half >> 10 & 31, fraction = half & 0x3FF;
    const uint32_t bits = (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | fraction << 13;
    float x;
    memcpy(&x, &bits, 4);
    if (exponent == 0) x = fraction * 0x1p-24f;
    return half >> 15 ? -x : x;
}

/* The nearest float16, of two the even one; |x| is at most 65504, or x is not a number. */
static inline Half half_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const Half sign = bits >> 16 & 0x8000;
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) return sign | 0x7E00;
    if (bits >= (127 - 14) << 23) return sign | (bits - (112 << 23) + 0xFFF + (bits >> 13 & 1)) >> 13;
    float with_half = fabsf(x) + 0.5f; /* the last bit of its fraction is 2^-24 */
    memcpy(&bits, &with_half, 4);
    return sign | (bits - (126u << 23));
}

typedef struct {
    int64_t size;
    int64_t bits;
    const float *signs; /* [D] */
    float unit, norm;
} Codec;

static inline void pack(uint8_t *restrict codes, const uint8_t *restrict levels, int64_t size, int bits) {
    if (bits == 8) {
        memcpy(codes, levels, size);
        return;
    }
    const int width = bits == 3 ? 2 : bits, parts = 8 / width, mask = (1 << width) - 1;
    memset(codes, 0, size * bits / 8);
    for (int64_t part = 0, n = size / parts; part < parts; part++)
        for (int64_t d = 0; d < n; d++) codes[d] |= (levels[d + part * n] & mask) << (part * width);
    if (bits == 3)
        for (int64_t part = 0, n = size / 8; part < 8; part++)
            for (int64_t d = 0; d < n; d++) codes[size / 4 + d] |= (levels[d + part * n] >> 2) << part;
}

static inline float power_of_two(int32_t exponent) {
    const int32_t bits = exponent << 23;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* T x but for the signs, in place: a Hadamard matrix for each block of p channels, then m I - 2 11' for the m blocks.
   It is symmetric: T' x is the same, and the signs come last. Of integers it is exact, for no sum is larger than T x
   may be, but for 2 11', which is even. */
static inline void rotate(float *x, int64_t size) {
    const int64_t block = size & -size, blocks = size / block;
    for (int64_t d = 0; d < size; d += 4) {
        const float a = x[d] + x[d + 1], b = x[d] - x[d + 1], c = x[d + 2] + x[d + 3], e = x[d + 2] - x[d + 3];
        x[d] = a + c, x[d + 1] = b + e, x[d + 2] = a - c, x[d + 3] = b - e;
    }
    for (int64_t width = 4; width < block; width *= 2)
        for (int64_t from = 0; from < size; from += 2 * width)
            for (int64_t d = from; d < from + width; d += 4) {
                Four a, b;
                memcpy(&a, x + d, sizeof a);
                memcpy(&b, x + d + width, sizeof b);
                const Four sum = a + b, difference = a - b;
                memcpy(x + d, &sum, sizeof sum);
                memcpy(x + d + width, &difference, sizeof difference);
            }
    for (int64_t d = 0; d < block && blocks > 1; d++) {
        float sum = 0;
        for (int64_t from = d; from < size; from += block) sum += x[from];
        for (int64_t from = d; from < size; from += block) x[from] = blocks * x[from] - 2 * sum;
    }
}

static inline void encode_one(const Codec *codec, const float *x, const float *center, uint8_t *codes, Half *step) {
    const int64_t size = codec->size;
    const int32_t top = (1 << codec->bits) - 1, half = 1 << (codec->bits - 1);
    float n[MOST], y[MOST];
    uint8_t levels[MOST];
    int32_t largest = 0;
    for (int64_t d = 0; d < size; d++) {
        int32_t bits;
        n[d] = center ? x[d] - center[d] : x[d];
        memcpy(&bits, n + d, 4);
        bits &= 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
    }
    int32_t exponent = largest >> 23 > 127 - 45 ? largest >> 23 : 127 - 45;
    const int finite = exponent < 255;
    int64_t squares = 0, along = 0, long_squares = 0;
    const float up = finite ? power_of_two(268 - exponent) : 0.0f;
    for (int64_t d = 0; d < size; d++) {
        n[d] = finite ? rintf(n[d] * up) : 0.0f;
        squares += (int32_t)n[d] * (int32_t)n[d];
        y[d] = n[d] * codec->signs[d];
    }
    rotate(y, size);
    float first = codec->unit * sqrtf((float)squares);
    first = 1.0f / (first > 0 ? first : 1.0f);
    for (int64_t d = 0; d < size; d++) {
        const float exact = y[d] * first;
        const int32_t whole = (int32_t)exact, level = whole - (whole > exact) + half, above = level < 0 ? 0 : level;
        levels[d] = above > top ? top : above;
    }
    for (int64_t d = 0; d < size; d++) {
        const int32_t z = 2 * levels[d] - top;
        along += (int64_t)(int32_t)y[d] * z;
        long_squares += z * z;
    }
    float size_of_step = (float)along / (float)long_squares;
    size_of_step *= codec->norm * power_of_two(exponent - 14);
    *step = half_of_float(finite ? (size_of_step > 65504.0f ? 65504.0f : size_of_step) : NAN);
    pack(codes, levels, size, codec->bits);
}
