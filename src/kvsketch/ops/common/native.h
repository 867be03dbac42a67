/* What the CPU programs share: floats, a vector register at a time, quantised vectors as floats, exponentials.
   Vector types are those of gcc and clang. One that is longer than a register of the processor is kept in memory. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#define BLOCK 16 /* channels of a vector are a multiple of it */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define PARTS (BLOCK / LANES) /* sums that do not wait for each other */
#define AT_ONCE 4 /* vectors that one pass over another takes */
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

typedef float Four __attribute__((vector_size(16)));

/* The second half is added to the first, and so on: the same sum whatever the processor. No loop, so that it stays in
   registers. */
static inline float sum_of(Lanes x) {
    Four quarters[LANES / 4];
    memcpy(quarters, &x, sizeof x);
    Four sum = quarters[0];
#if LANES == 8
    sum += quarters[1];
#elif LANES == 16
    sum = (sum + quarters[2]) + (quarters[1] + quarters[3]);
#endif
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* a > b ? a : b, and a < b ? a : b: one instruction where the compiler does not find it. */
#if defined(__AVX512F__)
static inline Lanes largest(Lanes a, Lanes b) { return (Lanes)_mm512_max_ps((__m512)a, (__m512)b); }
static inline Lanes smallest(Lanes a, Lanes b) { return (Lanes)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX__)
static inline Lanes largest(Lanes a, Lanes b) { return (Lanes)_mm256_max_ps((__m256)a, (__m256)b); }
static inline Lanes smallest(Lanes a, Lanes b) { return (Lanes)_mm256_min_ps((__m256)a, (__m256)b); }
#else
static inline Lanes largest(Lanes a, Lanes b) {
    const Integers more = a > b;
    return (Lanes)(((Integers)a & more) | ((Integers)b & ~more));
}

static inline Lanes smallest(Lanes a, Lanes b) {
    const Integers less = a < b;
    return (Lanes)(((Integers)a & less) | ((Integers)b & ~less));
}
#endif

static inline float larger(float a, float b) { return a > b ? a : b; }

static inline float largest_of_parts(const Lanes *parts) {
    Four quarters[BLOCK / 4];
    memcpy(quarters, parts, sizeof quarters);
    float tops[4];
    for (int i = 0; i < 4; i++)
        tops[i] = larger(larger(quarters[0][i], quarters[1][i]), larger(quarters[2][i], quarters[3][i]));
    return larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
}

/* As in sum_of. */
static inline float sum_of_parts(const Lanes *parts) {
#if PARTS == 4
    return sum_of((parts[0] + parts[2]) + (parts[1] + parts[3]));
#elif PARTS == 2
    return sum_of(parts[0] + parts[1]);
#else
    return sum_of(parts[0]);
#endif
}

static inline float dot(const float *a, const float *b, int64_t size) {
    Lanes sums[PARTS] = {0};
    for (int64_t d = 0; d < size; d += BLOCK)
        for (int i = 0; i < PARTS; i++) sums[i] += load(a + d + i * LANES) * load(b + d + i * LANES);
    return sum_of_parts(sums);
}

/* to[j] = dot(a, b[j]) */
static inline void dots(float *to, const float *a, const float *const b[AT_ONCE], int64_t size) {
    Lanes sums[AT_ONCE][PARTS] = {0};
    for (int64_t d = 0; d < size; d += BLOCK)
        for (int i = 0; i < PARTS; i++)
            for (int j = 0; j < AT_ONCE; j++) sums[j][i] += load(a + d + i * LANES) * load(b[j] + d + i * LANES);
    for (int j = 0; j < AT_ONCE; j++) to[j] = sum_of_parts(sums[j]);
}

static inline void add_scaled(float *to, const float *x, float by, int64_t size) {
    for (int64_t d = 0; d < size; d += LANES) store(to + d, load(to + d) + load(x + d) * all(by));
}

static inline void add_all_scaled(float *to, const float *const x[AT_ONCE], const float by[AT_ONCE], int64_t size) {
    for (int64_t d = 0; d < size; d += LANES) {
        Lanes sum = load(to + d);
        for (int j = 0; j < AT_ONCE; j++) sum += load(x[j] + d) * all(by[j]);
        store(to + d, sum);
    }
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

/* 2^x, no less than 2^-126, and of 127 or more something large; what is not a number stays so. */
#if defined(__AVX512DQ__)
static inline Lanes power_of_2(Lanes x) {
    const __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-126.0f), (__m512)x);
    const Lanes f = (Lanes)_mm512_reduce_ps(clamped, _MM_FROUND_TO_NEG_INF); /* the fraction, in [0, 1) */
    Lanes e = f * 0.00187757669f + 0.00898933969f;
    e = e * f + 0.0558263175f;
    e = e * f + 0.240153611f;
    e = e * f + 0.693153083f;
    e = e * f + 0.99999994f;
    return (Lanes)_mm512_scalef_ps((__m512)e, clamped);
}
#else
static inline Lanes power_of_2(Lanes x) {
    const Lanes magic = all(12582912.0f);
    x = largest(all(-126.0f), smallest(all(126.0f), x));
    const Lanes whole = x + magic;
    const Lanes f = x - (whole - magic), ff = f * f;
    const Lanes low = f * 0.693146944f + 1.0f, middle = f * 0.0555071309f + 0.240221202f;
    const Lanes high = f * 0.00132764713f + 0.00967554096f;
    return (Lanes)((Integers)(low + ff * (middle + ff * high)) + ((Integers)whole << 23));
}
#endif

/* Levels of a code minus half of their range, as `levels_of` of ops/codec unpacks them. */
static inline void unpack(float *restrict z, const uint8_t *restrict codes, int64_t size, int bits) {
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
