/* What the CPU programs share: floats, a vector register at a time, codes of few bits as floats, exponentials.
   Vector types are those of gcc and clang. One that is longer than a register of the processor is kept in memory. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 16 /* channels of a vector are a multiple of it */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define PARTS (BLOCK / LANES) /* sums that do not wait for each other */
#define MOST 512 /* channels of a vector */
#define BFLOAT16 16 /* numbers that are stored as they are have 16 or 32 bits */
#define FLOAT32 32

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

static inline Lanes load(const float *x) {
    Lanes lanes;
    memcpy(&lanes, x, sizeof lanes);
    return lanes;
}

static inline void store(float *x, Lanes lanes) { memcpy(x, &lanes, sizeof lanes); }

static inline Lanes all(float x) { return x - (Lanes){0}; }

static inline float sum_of(Lanes x) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}

static inline Lanes largest(Lanes a, Lanes b) {
    const Integers more = a > b;
    return (Lanes)(((Integers)a & more) | ((Integers)b & ~more));
}

static inline float dot(const float *a, const float *b, int64_t size) {
    Lanes sums[PARTS] = {0};
    for (int64_t d = 0; d < size; d += BLOCK)
        for (int i = 0; i < PARTS; i++) sums[i] += load(a + d + i * LANES) * load(b + d + i * LANES);
    /* Halves, as in sum_of: the same sums whatever the processor. */
    for (int width = PARTS / 2; width; width /= 2)
        for (int i = 0; i < width; i++) sums[i] += sums[i + width];
    return sum_of(sums[0]);
}

static inline void add_scaled(float *to, const float *x, float by, int64_t size) {
    for (int64_t d = 0; d < size; d += LANES) store(to + d, load(to + d) + load(x + d) * all(by));
}

/* exp(x) for x <= 88; 0 below the normal numbers. */
static inline Lanes exponential(Lanes x) {
    const Lanes magic = all(12582912.0f); /* 1.5 * 2^23: what is added to it is rounded to an integer */
    Integers in_range = x > -87.3f;
    x = (Lanes)((Integers)x & in_range);
    Lanes power = x * 1.44269504f + magic;
    Integers exponent = (Integers)power - (Integers)magic;
    power -= magic;
    Lanes r = x - power * 0.693145752f - power * 1.42860677e-6f;
    Lanes e = r * 1.9875691500e-4f + 1.3981999507e-3f;
    e = e * r + 8.3334519073e-3f;
    e = e * r + 4.1665795894e-2f;
    e = e * r + 1.6666665459e-1f;
    e = e * r + 5.0000001201e-1f;
    e = e * r * r + r + 1.0f;
    Integers scaled = (Integers)e + (exponent << 23);
    return (Lanes)(scaled & in_range);
}

/* 2^x for x < 127, no less than 2^-126; what is not a number stays so. */
static inline Lanes power_of_2(Lanes x) {
    const Lanes magic = all(12582912.0f), least = all(-126.0f);
    const Integers below = x < least;
    x = (Lanes)(((Integers)x & ~below) | ((Integers)least & below));
    const Lanes whole = x + magic;
    const Lanes f = x - (whole - magic), ff = f * f;
    const Lanes low = f * 0.693146944f + 1.0f, middle = f * 0.0555071309f + 0.240221202f;
    const Lanes high = f * 0.00132764713f + 0.00967554096f;
    return (Lanes)((Integers)(low + ff * (middle + ff * high)) + ((Integers)whole << 23));
}

/* Levels of a code minus half of their range, as `levels_of` of ops/codec unpacks them. */
static inline void unpack(float *z, const uint8_t *codes, int64_t size, int bits) {
    const float half = ((1 << bits) - 1) * 0.5f;
    if (bits == 8)
        for (int64_t d = 0; d < size; d++) z[d] = codes[d] - half;
    else if (bits == 4)
        for (int64_t d = 0, n = size / 2; d < n; d++) {
            z[d] = (codes[d] & 15) - half;
            z[d + n] = (codes[d] >> 4) - half;
        }
    else
        for (int64_t d = 0, n = size / 4; d < n; d++)
            for (int part = 0; part < 4; part++) z[d + part * n] = (codes[d] >> (2 * part) & 3) - half;
    if (bits == 3)
        for (int64_t d = 0, n = size / 8; d < n; d++)
            for (int part = 0; part < 8; part++) z[d + part * n] += 4 * (codes[size / 4 + d] >> part & 1);
}
