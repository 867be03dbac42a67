/* Products of matrices, a tile of sums in registers at a time, and exponentials of them before they are stored. */

/* Sums [ROWS, COLUMNS] are computed in registers, and of GROUP rows with each panel. */
#if LANES == 8
#define ROWS 4
#define ACROSS 3
#else
#define ROWS 8
#define ACROSS 2
#endif
#define GROUP 16
#define COLUMNS (ACROSS * LANES)
#define LOG2_E 1.44269504f
#define LIMIT 0x1p60f /* of a sum with a guessed origin; beyond it the origin is the largest logit */

/* Numbers of a row that has room for whole panels, and for a block behind its last number. */
static inline int64_t padded(int64_t count) { return (count + COLUMNS + 2 * BLOCK - 1) / BLOCK * BLOCK; }

/* Rows [count, size] times `by`, as columns of panels [size, COLUMNS]; 0 behind the last. */
static void pack_rows(float *panels, const float *rows, int64_t count, int64_t size, float by) {
    for (int64_t first = 0; first < count; first += COLUMNS, rows += COLUMNS * size)
        for (int64_t d = 0; d < size; d++, panels += COLUMNS)
            if (first + COLUMNS <= count)
                for (int64_t i = 0; i < COLUMNS; i++) panels[i] = by * rows[i * size + d];
            else
                for (int64_t i = 0; i < COLUMNS; i++) panels[i] = first + i < count ? by * rows[i * size + d] : 0.0f;
}

/* Columns of a matrix [size, count] as columns of panels [size, COLUMNS]; 0 behind the last. */
static void pack_columns(float *panels, const float *x, int64_t size, int64_t count) {
    for (int64_t first = 0; first < count; first += COLUMNS)
        for (int64_t d = 0; d < size; d++, panels += COLUMNS) {
            const int64_t there = count - first < COLUMNS ? count - first : COLUMNS;
            memset(panels, 0, COLUMNS * sizeof *panels);
            memcpy(panels, x + d * count + first, there * sizeof *panels);
        }
}

/* Rows of a matrix, `apart` numbers from one to the next, whose own numbers lie `step` apart. */
typedef struct {
    const float *first;
    int64_t count, apart, step;
} Matrix;

/* Sums over `size` numbers of the ROWS rows from `row` on and one panel; the last row stands for missing ones. */
static inline void multiply_tile(Lanes sums[ROWS][ACROSS], Matrix matrix, int64_t row, const float *panel,
                                 int64_t size) {
    const float *at[ROWS];
    for (int r = 0; r < ROWS; r++)
        at[r] = matrix.first + (row + r < matrix.count ? row + r : matrix.count - 1) * matrix.apart;
    for (int64_t d = 0; d < size; d++) {
        Lanes columns[ACROSS];
        for (int i = 0; i < ACROSS; i++) columns[i] = load(panel + d * COLUMNS + i * LANES);
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < ACROSS; i++) sums[r][i] += all(at[r][d * matrix.step]) * columns[i];
    }
}

/* to [.., stride] = rows of the matrix times panels with `columns` columns; whole tiles are written. */
static void multiply_panels(float *to, int64_t stride, Matrix matrix, const float *panels, int64_t columns,
                            int64_t size) {
    for (int64_t first = 0; first < columns; first += COLUMNS, panels += size * COLUMNS)
        for (int64_t row = 0; row < matrix.count; row += ROWS) {
            Lanes sums[ROWS][ACROSS] = {{{0}}};
            multiply_tile(sums, matrix, row, panels, size);
            for (int r = 0; r < ROWS; r++)
                for (int i = 0; i < ACROSS; i++) store(to + (row + r) * stride + first + i * LANES, sums[r][i]);
        }
}

/* to = 2^(rows of the matrix times one panel - origin), whole tiles of it; totals: what they add to sums of rows. */
static void powers_of_panel(float *to, int64_t stride, Matrix matrix, const float *panel, int64_t size,
                            const float *origin, Lanes *totals) {
    for (int64_t row = 0; row < matrix.count; row += ROWS) {
        Lanes sums[ROWS][ACROSS] = {{{0}}};
        multiply_tile(sums, matrix, row, panel, size);
/* Unrolled, the sums stay in registers. */
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int i = 0; i < ACROSS; i++) {
                const Lanes term = power_of_2(sums[r][i] - all(origin[row + r]));
                store(to + (row + r) * stride + i * LANES, term);
                totals[row + r] += term;
            }
    }
}

/* Of the first `count` logits; -inf is written behind them, a block of it. */
static float largest_of(float *logits, int64_t count) {
    Lanes tops[PARTS];
    for (int i = 0; i < PARTS; i++) {
        tops[i] = all(-INFINITY);
        store(logits + count + i * LANES, tops[i]);
    }
    for (int64_t i = 0; i < count; i += BLOCK)
        for (int part = 0; part < PARTS; part++) tops[part] = largest(load(logits + i + part * LANES), tops[part]);
    return largest_of_parts(tops);
}

/* logits = 2^(logits - origin), in whole blocks, and their sum. */
static float sum_of_powers(float *logits, int64_t count, float origin) {
    Lanes sums[PARTS] = {0};
    for (int64_t i = 0; i < count; i += BLOCK)
        for (int part = 0; part < PARTS; part++) {
            const Lanes term = power_of_2(load(logits + i + part * LANES) - all(origin));
            store(logits + i + part * LANES, term);
            sums[part] += term;
        }
    for (int i = 1; i < PARTS; i++) sums[0] += sums[i];
    return sum_of(sums[0]);
}

/* Keys that up to GROUP queries look at, times log2(e) and the scale, in panels. */
typedef struct {
    const float *panels;
    Matrix queries;
    float *logits;                 /* [GROUP, stride], in whole tiles */
    int64_t stride, columns, more; /* columns of the first query; each further one has `more` */
    int64_t whole;                 /* columns in whole panels, whose powers are taken in registers */
} Part;

/* Sums of powers of 2, of up to GROUP rows. */
typedef struct {
    float origin[GROUP], total[GROUP]; /* the sum is total 2^origin */
} Sums;

/* As `take_powers`, relative to the largest of the logits behind the `whole` columns. Returns whether that is near the
   largest of all. */
static int take_powers_from(Sums *sums, const Part *parts, int count, const float *known, int64_t rows, int64_t size) {
    Lanes totals[GROUP] = {{0}};
    memcpy(sums->origin, known, sizeof sums->origin);
    for (const Part *part = parts; part < parts + count; part++) {
        const int64_t behind = part->columns + (rows - 1) * part->more - part->whole;
        if (behind <= 0) continue;
        float *logits = part->logits + part->whole;
        multiply_panels(logits, part->stride, part->queries, part->panels + part->whole * size, behind, size);
        for (int64_t r = 0; r < rows; r++, logits += part->stride)
            sums->origin[r] =
                larger(sums->origin[r], largest_of(logits, part->columns + r * part->more - part->whole));
    }
    for (const Part *part = parts; part < parts + count; part++)
        for (int64_t first = 0; first < part->whole; first += COLUMNS)
            powers_of_panel(part->logits + first, part->stride, part->queries, part->panels + first * size, size,
                            sums->origin, totals);
    int near = 1;
    for (int64_t r = 0; r < rows; r++) {
        float total = sum_of(totals[r]) + exp2f(known[r] - sums->origin[r]);
        for (const Part *part = parts; part < parts + count; part++) {
            const int64_t behind = part->columns + r * part->more - part->whole;
            float *logits = part->logits + r * part->stride + part->whole;
            if (behind > 0) total += sum_of_powers(logits, behind, sums->origin[r]);
        }
        near &= total < LIMIT;
        sums->total[r] = total;
    }
    return near;
}

/* logits = 2^(logits - origin) of `rows` queries, and the sums over all parts and 2^known [GROUP]. */
static void take_powers(Sums *sums, Part *parts, int count, const float *known, int64_t rows, int64_t size) {
    if (take_powers_from(sums, parts, count, known, rows, size)) return;
    for (int i = 0; i < count; i++) parts[i].whole = 0;
    take_powers_from(sums, parts, count, known, rows, size);
}
