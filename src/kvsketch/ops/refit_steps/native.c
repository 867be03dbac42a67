#include "common/native.h"
#include "common/tiles.h"

#define TINY 1e-30f

/* slope = G x, G [count, count] symmetric, or A'A x of A [rows, count] with fewer rows; count: whole blocks.
   A is read once: a few rows at a time stay in the processor's cache. */
static void multiply(float *slope, const float *matrix, const float *x, int64_t rows, int64_t count) {
    memset(slope, 0, count * sizeof *slope);
    for (int64_t row = 0; row < rows; row += AT_ONCE) {
        const float *at[AT_ONCE];
        float sums[AT_ONCE];
        for (int i = 0; i < AT_ONCE; i++) at[i] = matrix + (row + i < rows ? row + i : row) * count;
        dots(sums, x, at, count);
        for (int i = rows - row; i < AT_ONCE; i++) sums[i] = 0;
        if (rows < count) add_all_scaled(slope, at, sums, count);
        else memcpy(slope + row, sums, sizeof sums);
    }
}

/* As descent_of of ops/refit_steps, for `problems` problems: matrix [rows, count], a [a_rows, count] and share [a_rows]
   lie `apart`, `a_apart` and `share_apart` numbers from one problem to the next; wanted, rate [N, count], ridge [N];
   room: count numbers. */
void kvsketch_descent(int64_t problems, int64_t rows, int64_t count, const float *matrix, int64_t apart, int64_t a_rows,
                      const float *a, int64_t a_apart, const float *share, int64_t share_apart, float by, float *wanted,
                      float *rate, float *ridge, float *room) {
    for (int64_t n = 0; n < problems; n++, matrix += apart, a += a_apart, share += share_apart) {
        memset(wanted, 0, count * sizeof *wanted);
        memset(rate, 0, count * sizeof *rate);
        for (int64_t row = 0; row < a_rows; row++)
            for (int64_t i = 0; i < count; i += LANES) {
                const Lanes x = load(a + row * count + i);
                store(wanted + i, load(wanted + i) + x * all(share[row]));
                if (rows < count) store(rate + i, load(rate + i) + x * x);
            }
        double sum = 0, there = 0;
        for (int64_t i = 0; i < count; i++) {
            if (rows >= count) rate[i] = matrix[i * count + i];
            sum += rate[i], there += rate[i] > 0;
        }
        const float mean = by * sum / (there > 1 ? there : 1), r = mean < 1e-12f ? 1e-12f : mean;
        float bound = -INFINITY;
        for (int64_t i = 0; i < count; i++) rate[i] = 1.0f / sqrtf(rate[i] + r), wanted[i] += r;
        multiply(room, matrix, rate, rows, count);
        for (int64_t i = 0; i < count; i++) {
            const float row_sum = (room[i] + r * rate[i]) * rate[i];
            bound = row_sum < bound ? bound : row_sum;
        }
        for (int64_t i = 0; i < count; i++) rate[i] = rate[i] * rate[i] / bound;
        *ridge++ = r, wanted += count, rate += count;
    }
}

/* Steps of `problems` gradients, whose matrices lie `apart` numbers from one to the next. */
void kvsketch_weight_steps(int64_t problems, int64_t rows, int64_t count, const float *matrix, int64_t apart,
                           const float *wanted, const float *rate, const float *ridge, float *w, float *ahead,
                           float *slope, int64_t steps, const float *speeds) {
    for (int64_t problem = 0; problem < problems; problem++) {
        for (int64_t step = 0; step < steps; step++) {
            multiply(slope, matrix + problem * apart, ahead, rows, count);
            for (int64_t i = 0; i < count; i++) {
                const float new = ahead[i] + rate[i] * (wanted[i] - slope[i] - ridge[problem] * ahead[i]);
                const float next = new < 0 ? 0 : new;
                ahead[i] = next + speeds[step] * (next - w[i]);
                w[i] = next;
            }
        }
        wanted += count, rate += count, w += count, ahead += count;
    }
}

/* Conjugate gradients of one panel of columns, all [rows, COLUMNS], as dual_values of ops/refit_steps. */
static void dual_steps(const float *matrix, int64_t rows, int64_t stride, float ridge, int64_t steps, float *residual,
                       float *moved, float *direction, float *image, float *product) {
    const Matrix all_rows = {matrix, rows, stride, 1};
    Lanes before[ACROSS];
    for (int i = 0; i < ACROSS; i++) before[i] = all(INFINITY);
    const size_t bytes = rows * COLUMNS * sizeof *moved;
    memset(direction, 0, bytes), memset(image, 0, bytes), memset(moved, 0, bytes);
    for (int64_t step = 0; step < steps; step++) {
        multiply_panels(product, COLUMNS, all_rows, residual, COLUMNS, rows);
        for (int i = 0; i < ACROSS; i++) {
            Lanes after = {0}, square = {0}, mixed = {0};
            for (int64_t at = i * LANES; at < rows * COLUMNS; at += COLUMNS) after += load(residual + at) * load(product + at);
            const Lanes turn = after / largest(before[i], all(TINY));
            for (int64_t at = i * LANES; at < rows * COLUMNS; at += COLUMNS) {
                const Lanes d = load(direction + at) * turn + load(residual + at);
                const Lanes g = load(image + at) * turn + load(product + at);
                store(direction + at, d), store(image + at, g);
                square += g * g, mixed += d * g;
            }
            const Lanes length = after / largest(square + all(ridge) * mixed, all(TINY));
            for (int64_t at = i * LANES; at < rows * COLUMNS; at += COLUMNS) {
                const Lanes d = load(direction + at);
                store(moved + at, load(moved + at) + length * d);
                store(residual + at, load(residual + at) - length * (load(image + at) + all(ridge) * d));
            }
            before[i] = after;
        }
    }
}

/* Numbers that kvsketch_dual_values needs beside its arguments. */
int64_t kvsketch_dual_room(int64_t rows, int64_t count) {
    const int64_t whole = (rows + COLUMNS - 1) / COLUMNS * COLUMNS, tiles = COLUMNS * ROWS;
    return (rows + whole + 2 * COLUMNS) * count + whole * (whole + ROWS) + rows + 6 * (whole * COLUMNS + tiles) + tiles;
}

/* As dual_values of ops/refit_steps, for `problems` problems: a [rows, count] and target [rows, columns] lie `apart` and
   `target_apart` numbers from one problem to the next; plain, values, weighed [N, count, columns]; w [N, count]; ridge
   [N]; room: as many numbers as kvsketch_dual_room says. */
void kvsketch_dual_values(int64_t problems, int64_t rows, int64_t count, int64_t columns, const float *a, int64_t apart,
                          const float *w, const float *ridge, const float *plain, const float *target,
                          int64_t target_apart, int64_t steps, float *room, float *values, float *weighed) {
    const int64_t whole = (rows + COLUMNS - 1) / COLUMNS * COLUMNS, tiles = COLUMNS * ROWS, part = whole * COLUMNS + tiles;
    float *x = room, *panels = x + rows * count, *held = panels + whole * count, *matrix = held + COLUMNS * count;
    float *sums = matrix + whole * (whole + ROWS), *residual = sums + rows, *moved = residual + part;
    float *others = moved + part, *found = others + 4 * part;
    for (int64_t n = 0; n < problems; n++, a += apart, target += target_apart, w += count, plain += count * columns,
                 values += count * columns, weighed += count * columns) {
        for (int64_t row = 0; row < rows; row++) {
            Lanes sum = {0};
            for (int64_t i = 0; i < count; i += LANES) {
                const Lanes each = load(a + row * count + i) * load(w + i);
                store(x + row * count + i, each);
                sum += each;
            }
            sums[row] = sum_of(sum);
        }
        pack_rows(panels, x, rows, count, 1.0f);
        for (int64_t first = 0; first < whole; first += COLUMNS) {
            /* Rows up to those of the panel; the others are copied. */
            const Matrix upper = {x, first + COLUMNS < rows ? first + COLUMNS : rows, count, 1};
            multiply_panels(matrix + first, whole, upper, panels + first * count, COLUMNS, count);
            for (int64_t row = 0; row < upper.count; row++)
                for (int64_t i = first; i < first + COLUMNS; i++) matrix[i * whole + row] = matrix[row * whole + i];
        }
        for (int64_t first = 0; first < columns; first += COLUMNS) {
            const int64_t there = columns - first < COLUMNS ? columns - first : COLUMNS;
            for (int64_t i = 0; i < count; i++) {
                memset(held + i * COLUMNS, 0, COLUMNS * sizeof *held);
                memcpy(held + i * COLUMNS, plain + i * columns + first, there * sizeof *held);
            }
            multiply_panels(residual, COLUMNS, (Matrix){x, rows, count, 1}, held, COLUMNS, count);
            for (int64_t row = 0; row < rows; row++)
                for (int64_t i = 0; i < COLUMNS; i++) {
                    const float wanted = i < there ? sums[row] * target[row * columns + first + i] : 0.0f;
                    residual[row * COLUMNS + i] = wanted - residual[row * COLUMNS + i];
                }
            dual_steps(matrix, rows, whole, ridge[n], steps, residual, moved, others, others + part, others + 2 * part);
            for (int64_t from = 0; from < count; from += ROWS) {
                Lanes added[ROWS][ACROSS] = {{{0}}};
                for (int64_t row = 0; row < rows; row += COLUMNS)
                    multiply_tile(added, (Matrix){panels + row * count, count, COLUMNS, 1}, from, moved + row * COLUMNS,
                                  rows - row < COLUMNS ? rows - row : COLUMNS);
                memcpy(found, added, sizeof added);
                for (int64_t r = 0; r < ROWS && from + r < count; r++)
                    for (int64_t i = 0; i < there; i++) {
                        const int64_t at = (from + r) * columns + first + i;
                        values[at] = plain[at] + found[r * COLUMNS + i];
                        weighed[at] = values[at] * w[from + r];
                    }
            }
        }
    }
}

/* Float64: sums [TALL, BLOCK] are computed in registers, from panels [.., BLOCK]. */
#define HALF (LANES / 2)
#define BESIDE (BLOCK / HALF)
#define TALL (HALF == 8 ? 8 : 2)
typedef double Doubles __attribute__((vector_size(8 * HALF)));

static inline Doubles load_doubles(const double *x) {
    Doubles lanes;
    memcpy(&lanes, x, sizeof lanes);
    return lanes;
}

static inline void store_doubles(double *x, Doubles lanes) { memcpy(x, &lanes, sizeof lanes); }

static inline Doubles all_doubles(double x) { return x - (Doubles){0}; }

/* to [TALL, BLOCK], `stride` apart, plus sign times the sum over i < size of at[i step + r down] panel[i apart ..]. */
static inline void add_products(double *to, int64_t stride, double sign, const double *at, int64_t step, int64_t down,
                                const double *panel, int64_t apart, int64_t size) {
    Doubles sums[TALL][BESIDE] = {{{0}}};
    for (int64_t i = 0; i < size; i++) {
        Doubles columns[BESIDE];
        for (int j = 0; j < BESIDE; j++) columns[j] = load_doubles(panel + i * apart + j * HALF);
        for (int r = 0; r < TALL; r++)
            for (int j = 0; j < BESIDE; j++) sums[r][j] += all_doubles(at[i * step + r * down]) * columns[j];
    }
    for (int r = 0; r < TALL; r++)
        for (int j = 0; j < BESIDE; j++) {
            double *x = to + r * stride + j * HALF;
            store_doubles(x, load_doubles(x) + all_doubles(sign) * sums[r][j]);
        }
}

/* Columns of x [rows, count] in panels [rows, BLOCK] of float64; 0 behind the last. Rows are read one after the other. */
static void pack_doubles(double *panels, const float *x, int64_t rows, int64_t count) {
    for (int64_t row = 0; row < rows; row++, x += count) {
        double *to = panels + row * BLOCK;
        for (int64_t first = 0; first < count; first += BLOCK, to += rows * BLOCK)
            if (first + BLOCK <= count)
                for (int64_t i = 0; i < BLOCK; i++) to[i] = x[first + i];
            else
                for (int64_t i = 0; i < BLOCK; i++) to[i] = first + i < count ? x[first + i] : 0.0;
    }
}

/* gram = A'A in float64 of `problems` matrices a [rows, count], `apart` numbers from one to the next; count: whole
   blocks; room: rows * count numbers. */
void kvsketch_squared(int64_t problems, int64_t rows, int64_t count, const float *a, int64_t apart, double *room,
                      double *gram) {
    for (int64_t n = 0; n < problems; n++, a += apart, gram += count * count) {
        pack_doubles(room, a, rows, count);
        memset(gram, 0, count * count * sizeof *gram);
        for (int64_t first = 0; first < count; first += BLOCK)
            for (int64_t i = 0; i < first + BLOCK; i += TALL) {
                const double *at = room + i / BLOCK * BLOCK * rows + i % BLOCK;
                add_products(gram + i * count + first, count, 1.0, at, BLOCK, 1, room + first * rows, BLOCK, rows);
            }
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < i; j++) gram[i * count + j] = gram[j * count + i];
    }
}

/* Solves U'U X = Y of m = [S | Y], rows `stride` apart: X stands where Y did. S [count, count] is symmetric, what lies
   below its diagonal is not read; Y has whole blocks. */
static void solve(double *m, int64_t count, int64_t stride) {
    for (int64_t first = 0; first < count; first += BLOCK) {
        for (int64_t i = first; i < first + BLOCK; i++) {
            const double by = 1.0 / sqrt(m[i * stride + i]);
            for (int64_t j = first; j < stride; j++) m[i * stride + j] *= by;
            for (int64_t row = i + 1; row < first + BLOCK; row++) {
                const double factor = m[i * stride + row];
                for (int64_t j = first; j < stride; j++) m[row * stride + j] -= factor * m[i * stride + j];
            }
        }
        const double *own = m + first * stride;
        for (int64_t i = first + BLOCK; i < count; i += TALL)
            for (int64_t j = i / BLOCK * BLOCK; j < stride; j += BLOCK)
                add_products(m + i * stride + j, stride, -1.0, own + i, stride, 1, own + j, stride, BLOCK);
    }
    for (int64_t first = count - BLOCK; first >= 0; first -= BLOCK) {
        const int64_t behind = first + BLOCK;
        for (int64_t i = first; i < behind; i += TALL)
            for (int64_t j = count; j < stride; j += BLOCK)
                add_products(m + i * stride + j, stride, -1.0, m + i * stride + behind, 1, stride,
                             m + behind * stride + j, stride, count - behind);
        for (int64_t i = behind - 1; i >= first; i--) {
            for (int64_t row = i + 1; row < behind; row++) {
                const double factor = m[i * stride + row];
                for (int64_t j = count; j < stride; j++) m[i * stride + j] -= factor * m[row * stride + j];
            }
            const double by = 1.0 / m[i * stride + i];
            for (int64_t j = count; j < stride; j++) m[i * stride + j] *= by;
        }
    }
}

/* Numbers that kvsketch_solved_values needs beside its arguments. */
int64_t kvsketch_solved_room(int64_t rows, int64_t count, int64_t columns) {
    const int64_t whole = (columns + BLOCK - 1) / BLOCK * BLOCK;
    return rows * (count + whole) + count * (count + 2 * whole);
}

/* As solved_values of ops/refit_steps, for `problems` problems: gram [N, count, count]; a [rows, count] and target
   [rows, columns] lie `apart` and `target_apart` numbers from one problem to the next; w [N, count]; ridge [N]; plain,
   values, weighed [N, count, columns]; room: as many numbers as kvsketch_solved_room says. */
void kvsketch_solved_values(int64_t problems, int64_t rows, int64_t count, int64_t columns, const double *gram,
                            const float *a, int64_t apart, const float *w, const double *ridge, const float *plain,
                            const float *target, int64_t target_apart, double *room, float *values, float *weighed) {
    const int64_t whole = (columns + BLOCK - 1) / BLOCK * BLOCK, stride = count + whole;
    double *packed = room, *wanted = packed + rows * count, *held = wanted + rows * whole, *m = held + count * whole;
    for (int64_t n = 0; n < problems; n++, gram += count * count, a += apart, target += target_apart, w += count,
                 plain += count * columns, values += count * columns, weighed += count * columns) {
        pack_doubles(packed, a, rows, count);
        pack_doubles(wanted, target, rows, columns);
        pack_doubles(held, plain, count, columns);
        for (int64_t row = 0; row < rows; row++) {
            double parts[BLOCK] = {0}, mass = 0;
            for (int64_t i = 0; i < count; i += BLOCK)
                for (int64_t j = 0; j < BLOCK; j++) parts[j] += (double)a[row * count + i + j] * w[i + j];
            for (int j = 0; j < BLOCK; j++) mass += parts[j];
            for (int64_t j = 0; j < whole; j += BLOCK)
                for (int64_t i = 0; i < BLOCK; i++) wanted[(j * rows) + row * BLOCK + i] *= mass;
        }
        for (int64_t i = 0; i < count; i++) {
            for (int64_t j = 0; j < count; j++) m[i * stride + j] = gram[i * count + j] * w[i] * w[j];
            m[i * stride + i] += ridge[n];
            for (int64_t j = 0; j < whole; j++) m[i * stride + count + j] = 0;
            for (int64_t j = 0; j < whole; j += BLOCK)
                for (int64_t c = 0; c < BLOCK; c++) held[j * count + i * BLOCK + c] *= w[i];
        }
        for (int64_t i = 0; i < count; i += TALL)
            for (int64_t j = 0; j < whole; j += BLOCK) {
                double *to = m + i * stride + count + j;
                const double *at = packed + i / BLOCK * BLOCK * rows + i % BLOCK;
                add_products(to, stride, 1.0, at, BLOCK, 1, wanted + j * rows, BLOCK, rows);
                add_products(to, stride, -1.0, gram + i, count, 1, held + j * count, BLOCK, count);
            }
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = count; j < stride; j++) m[i * stride + j] *= w[i];
        solve(m, count, stride);
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < columns; j++) {
                const double value = plain[i * columns + j] + m[i * stride + count + j];
                values[i * columns + j] = value;
                weighed[i * columns + j] = value * w[i];
            }
    }
}

/* Squared error of outputs [rows, stride] and masses, as errors of ops/refit_steps. */
static float error_of(const float *outputs, int64_t stride, const float *mass, const float *target, const float *share,
                      int64_t rows, int64_t columns) {
    double away = 0, spread = 0, lacking = 0;
    for (int64_t row = 0; row < rows; row++) {
        const float by = 1.0f / (mass[row] < TINY ? TINY : mass[row]), apart = mass[row] - share[row];
        float parts[BLOCK] = {0}, wanted[BLOCK] = {0};
        for (int64_t i = 0; i < columns; i++) {
            const float goal = target[row * columns + i] * share[row];
            const float missing = outputs[row * stride + i] * by * share[row] - goal;
            parts[i % BLOCK] += missing * missing, wanted[i % BLOCK] += goal * goal;
        }
        for (int i = 0; i < BLOCK; i++) away += parts[i], spread += wanted[i];
        lacking += apart * apart;
    }
    const double entries = rows * columns, least = spread / entries;
    return lacking / rows + away / entries / (least < TINY ? TINY : least);
}

/* Numbers that kvsketch_both_errors needs beside its arguments. */
int64_t kvsketch_errors_room(int64_t rows, int64_t count, int64_t columns) {
    return padded(columns) * (count + rows + ROWS) + 2 * rows + count;
}

/* As both_errors of ops/refit_steps, for `problems` problems: a [rows, count], target [rows, columns] and share [rows] lie
   `apart`, `target_apart` and `share_apart` numbers from one problem to the next; plain, parts [N, count, columns];
   w [N, count]; before, after [N]; room: as many numbers as kvsketch_errors_room says. */
void kvsketch_both_errors(int64_t problems, int64_t rows, int64_t count, int64_t columns, const float *a, int64_t apart,
                          const float *plain, const float *parts, const float *w, const float *target,
                          int64_t target_apart, const float *share, int64_t share_apart, float *room, float *before,
                          float *after) {
    const int64_t stride = padded(columns);
    float *panels = room, *outputs = panels + stride * count, *mass = outputs + stride * (rows + ROWS), *ones = mass + rows;
    for (int64_t i = 0; i < count; i++) ones[i] = 1.0f;
    for (int64_t n = 0; n < problems; n++, a += apart, target += target_apart, share += share_apart)
        for (int fitted = 0; fitted < 2; fitted++) {
            pack_columns(panels, (fitted ? parts : plain) + n * count * columns, count, columns);
            multiply_panels(outputs, stride, (Matrix){a, rows, count, 1}, panels, columns, count);
            for (int64_t row = 0; row < rows; row++) mass[row] = dot(a + row * count, fitted ? w + n * count : ones, count);
            (fitted ? after : before)[n] = error_of(outputs, stride, mass, target, share, rows, columns);
        }
}
