/* What the CPU programs share: 16 floats at a time, codes of few bits as floats, exponentials.
   Vector types are those of gcc and clang; the compiler maps them to what the processor has. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
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

static inline float dot(const float *a, const float *b, int64_t size) {
    Lanes sum = {0};
    for (int64_t d = 0; d < size; d += LANES) sum += load(a + d) * load(b + d);
    return sum_of(sum);
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
