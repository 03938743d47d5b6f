/* The adam rule, fused: one pass over p and g, in float32, whatever the storage. Called from cpu.py.

       m <- beta1 m + (1 - beta1) fold(g)
       v <- beta2 v + (1 - beta2) fold(g^2)                                (or fold(g)^2)
       M  = unfold(m) / c1 + rho r,   V = unfold(v) / c2 + kappa rho^2 r^2,   r = g - unfold(fold(g)),   ci = 1 - betai^t
       p <- (1 - lr wd) p - lr alpha M / (sqrt(V) + eps)

   M and V are taken c1 and c2 times as large and the constants moved out, so that what is left per weight is one root and
   one quotient, and m and v are spread as they are kept:

       p <- decay p - (a m + a_r rho r) / (sqrt(v + k rho^2 r^2) + e),   a = lr alpha sqrt(c2) / c1,   e = eps sqrt(c2)

   with a_r = a c1 and k = kappa c2, or a and kappa if the bias correction covers the residual too. The residual is taken
   sqrt(k) rho times as large, so that its square is what V gets.

   Layout. A vector holds N floats. N blocks of B are taken at once: their B N weights are summed by a tree of pairwise
   adds whose result is one vector of N block sums in order, so m and v are read, changed and written N at a time, and
   spread back over the weights while g is still in the first-level cache. Blocks that do not come in such runs
   (ragged ends, odd lengths, left-overs) are packed into the same shape first. Blocks above SHORT are taken one by one;
   those of HUGE or more are cut into segments that threads share.

   Every lane's arithmetic depends on its own block only, and every sum has one order, so the result does not depend on
   the number of threads. Letters: see fold.py. */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_rule.h"

enum { ITEM = 1 << 16, SEGMENT = 1 << 18, HUGE_BLOCK = 1 << 19 };

/* ------------------------------------------------------------------ one function for each storage and block length */

INLINE void blocks_in(const int kind, int B, Stretch s, float *m, float *v, long count, vf inv, const Rule *k, const Ahead *a) {
    switch (B) {
    case 1: singles(kind, s, m, v, count, k, a); break;
#define CASE(B) case B: blocks(kind, B, s, m, v, count, inv, k, a); break;
        CASE(2) CASE(4) CASE(8) CASE(16) CASE(32) CASE(64) CASE(128) CASE(256)
#undef CASE
    }
}
static void blocks_of(int kind, int B, Stretch s, float *m, float *v, long count, vf inv, const Rule *k, const Ahead *a) {
    if (kind == PLAIN) blocks_in(PLAIN, B, s, m, v, count, inv, k, a);
    else if (kind == PAIRS) blocks_in(PAIRS, B, s, m, v, count, inv, k, a);
    else blocks_in(NEAREST, B, s, m, v, count, inv, k, a);
}

/* sum of n numbers and of their squares, added to sum[0] and sum[1]; n is a multiple of 2N.
   Meanwhile the weights are fetched, which are needed next. */
INLINE void add_sums(const int kind, const char *g, long n, double *sum, const char *p, long p_size) {
    Sums s[2] = {0};
    long i = 0;
    Two x[2] = {0}, y[2] = {0};
    for (; i + 4 * N <= n; i += 4 * N)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            Two z = open_two(kind, g, i + 2 * j * N);
            x[j].a += z.a, x[j].b += z.b, y[j].a += z.a * z.a, y[j].b += z.b * z.b;
            fetch_far(p, (i + 2 * j * N) * p_size, 2 * N * p_size);
        }
    for (; i < n; i += 2 * N) {
        Two z = open_two(kind, g, i);
        x[0].a += z.a, x[0].b += z.b, y[0].a += z.a * z.a, y[0].b += z.b * z.b;
    }
    for (int j = 0; j < 2; j++) {
        x[j] = apart(kind, x[j]), y[j] = apart(kind, y[j]);
        s[j] = (Sums){x[j].a + x[j].b, y[j].a + y[j].b};
    }
    vf a = s[0].s + s[1].s, b = s[0].q + s[1].q;
    /* both across their lanes at once: in the end lane 0 is the sum of a, lane 1 that of b */
    a = even(a, b) + odd(a, b);
    for (int w = N / 2; w > 1; w /= 2) a = even(a, a) + odd(a, a);
    sum[0] += a[0], sum[1] += a[1];
}
static void sums(int kind, const char *g, long n, double *sum, const char *p, long p_size) {
    if (kind == PLAIN) add_sums(PLAIN, g, n, sum, p, p_size);
    else add_sums(PAIRS, g, n, sum, p, p_size);
}

/* n weights of one block, a multiple of 2N; x: what they share */
INLINE void block_weights(const int kind, Stretch s, long n, const float *x, const Rule *rule) {
    const Rule k = *rule;
    const vf fr = all(x[0]), am = all(x[1]), v = all(x[2]);
    for (long i = 0; i < n; i += 2 * N) weights(kind, &s, i, (Two){fr, fr}, (Two){am, am}, (Two){v, v}, &k);
}
static void weights_of(int kind, Stretch s, long n, const float *x, const Rule *k) {
    if (kind == PLAIN) block_weights(PLAIN, s, n, x, k);
    else if (kind == PAIRS) block_weights(PAIRS, s, n, x, k);
    else block_weights(NEAREST, s, n, x, k);
}

/* ------------------------------------------------------------------ tensors, and how they are cut */

typedef struct {
    void *p, *g, *m, *v;
    const int32_t *step;
    int64_t rows, columns, block; /* block <= columns */
    int64_t dtypes;               /* of p, g and the moments: 4 bits each, from below */
    void *m_exponents, *v_exponents; /* of 8-bit codes */
    int64_t number;               /* seeds the rounding noise, ... */
    int64_t first, first_moment;  /* ... which is by the number of each element: those of p[0] and m[0] in the parameter */
} Task;

typedef struct {
    double lr, beta1, beta2, eps, weight_decay, scale, rho, kappa;
    int64_t mean_square, whole, maximize, stochastic, seed;
} Hyper;

/* kind: how p and g are computed with; if PLAIN and not float32, by way of buffers */
typedef struct { Array p, g, m, v; long C, B, W, count; int kind; Rule k; } Tensor;

static void tensor_of(const Task *t, const Hyper *h, Tensor *out) {
    double step = *t->step, c1 = 1 - pow(h->beta1, step), c2 = 1 - pow(h->beta2, step);
    double sign = h->maximize ? -1 : 1, a = h->lr * h->scale * sqrt(c2) / c1;
    double root = MAX(sqrt(h->whole ? h->kappa : h->kappa * c2), 0x1p-50); /* sqrt(k), but never 0: it divides a_r */
    out->C = t->columns, out->B = t->block, out->W = (t->columns + t->block - 1) / t->block;
    out->count = t->rows * out->W;
    out->k = (Rule){
        .w1 = 1 - h->beta1, .beta1 = h->beta1, .w2 = 1 - h->beta2, .beta2 = h->beta2, .keep = 1 - h->beta1 < 0.5,
        .sign = sign, .rho = h->rho * root, .rho_sign = h->rho * root * sign, .mean_square = h->mean_square,
        .a = a, .a_r = (h->whole ? a : a * c1) / root, .e = h->eps * sqrt(c2), .decay = 1 - h->lr * h->weight_decay,
        .exact = h->eps < 1e-16 || h->eps > 1e15, /* the root of a denormal counts; the quotient's estimate would be one */
    };
    const int p = t->dtypes & 15, g = t->dtypes >> 4 & 15;
    out->kind = p != BFLOAT16 || g != BFLOAT16 ? PLAIN : h->stochastic ? PAIRS : NEAREST;
    uint32_t key = mix1(mix1(h->seed) ^ (uint32_t)*t->step);
    void *data[] = {t->p, t->m, t->v, t->g};
    Array *arrays[] = {&out->p, &out->m, &out->v, &out->g};
    for (int i = 0; i < 4; i++) {
        int shift = i == 0 ? 0 : i == 3 ? 4 : 8;
        *arrays[i] = (Array){
            .data = data[i], .exponents = i == 1 ? t->m_exponents : i == 2 ? t->v_exponents : NULL,
            .dtype = t->dtypes >> shift & 15, .stochastic = h->stochastic, .key = mix1(key ^ (uint32_t)(4 * t->number + i)),
            .number = i ? t->first_moment : t->first,
        };
    }
}

/* n weights and gradients, opened into the buffers if they must be, and p closed again */
static Stretch open_stretch(const Tensor *t, const Array *g, long p_at, long g_at, long n, float *p_buffer, float *g_buffer) {
    Stretch s = {place(&t->p, p_at), place(g, g_at), t->p.key, t->p.number + p_at};
    if (t->kind == PLAIN) s.p = (char *)view(&t->p, p_at, n, p_buffer), s.g = (char *)view(g, g_at, n, g_buffer);
    return s;
}
static void close_stretch(const Tensor *t, Stretch s, long at, long n) {
    if (t->kind == PLAIN) unview(&t->p, at, n, (float *)s.p);
}

static long begin_of(const Tensor *t, long b) { return b / t->W * t->C + b % t->W * t->B; }
static long length_of(const Tensor *t, long b) { return MIN(t->B, t->C - b % t->W * t->B); }

/* Up to N blocks, from anywhere, brought into the shape that blocks() takes */
static void packed(const Tensor *t, int P, const long *which, int n) {
    _Alignas(64) float p[N * SHORT], g[N * SHORT], m[2 * N] = {0}, v[2 * N] = {0}, inv[N] = {0};
    memset(p, 0, 4 * N * MAX(P, 2)), memset(g, 0, 4 * N * MAX(P, 2));
    for (int i = 0; i < n; i++) {
        long at = begin_of(t, which[i]), len = length_of(t, which[i]);
        copy_in(&t->p, at, len, p + i * P), copy_in(&t->g, at, len, g + i * P);
        copy_in(&t->m, which[i], 1, m + i), copy_in(&t->v, which[i], 1, v + i);
        inv[i] = 1.0f / len;
    }
    blocks_of(PLAIN, P, (Stretch){(char *)p, (char *)g, 0, 0}, m, v, P == 1 ? 2 : 1, load(inv), &t->k, &(Ahead){0});
    for (int i = 0; i < n; i++) {
        copy_out(&t->p, begin_of(t, which[i]), length_of(t, which[i]), p + i * P);
        copy_out(&t->m, which[i], 1, m + i), copy_out(&t->v, which[i], 1, v + i);
    }
}

/* Blocks b to end, none longer than SHORT */
static void short_blocks(const Tensor *t, long b, long end) {
    int P = 1, waiting = 0;
    while (P < t->B) P *= 2;
    const long whole = P != t->B ? 0 : t->C / t->B, unit = P == 1 ? 2 * N : N, step = N * P < TILE ? TILE / P : N;
    _Alignas(64) float p[BUFFER], g[BUFFER], m[TILE], v[TILE];
    long which[N];
    while (b < end) {
        /* how many whole blocks follow each other in memory */
        long run = whole == t->W ? end - b : MIN(whole - b % t->W, end - b), n = MIN(run / unit * unit, step);
        if (n > 0) {
            long at = begin_of(t, b), next = at + n * P;
            Stretch s = open_stretch(t, &t->g, at, at, n * P, p, g);
            float *m_ = view(&t->m, b, n, m), *v_ = view(&t->v, b, n, v);
            Ahead ahead = {place(&t->p, next), place(&t->g, next), place(&t->m, b + n), place(&t->v, b + n), size_of(&t->m)};
            blocks_of(t->kind, P, s, m_, v_, n / N, all(1.0f / P), &t->k, &ahead);
            close_stretch(t, s, at, n * P), unview(&t->m, b, n, m_), unview(&t->v, b, n, v_);
            b += n;
        } else {
            which[waiting++] = b++;
            if (waiting == N) packed(t, P, which, waiting), waiting = 0;
        }
    }
    if (waiting) packed(t, P, which, waiting);
}

/* `from` begins at the gradient's element `at` */
static void add_up(const Tensor *t, const Array *from, long at, long n, double *sum) {
    _Alignas(64) float g[TILE];
    for (long i = 0; i < n; i += TILE) {
        long len = MIN(TILE, n - i), rest = len % (2 * N);
        const char *next = place(&t->p, at + i), *x = t->kind == PLAIN ? (char *)view(from, i, len - rest, g) : place(from, i);
        sums(t->kind, x, len - rest, sum, next, size_of(&t->p));
        if (!rest) continue;
        memset(g, 0, 8 * N), copy_in(from, i + len - rest, rest, g);
        sums(PLAIN, (char *)g, 2 * N, sum, next, 0);
    }
}

/* What a long block's weights share, once its sums are known: out = rho sqrt(k) f, a m, v */
static void long_moments(const Tensor *t, long b, const double *sum, float *out) {
    const Rule *k = &t->k;
    float m[N] = {0}, v[N] = {0};
    double len = length_of(t, b);
    copy_in(&t->m, b, 1, m), copy_in(&t->v, b, 1, v);
    vf f = all((float)(sum[0] / len)) * k->sign, s = k->mean_square ? all((float)(sum[1] / len)) : f * f;
    store(m, first(load(m), f, k)), store(v, second(load(v), s, k));
    out[0] = f[0] * k->rho, out[1] = m[0] * k->a, out[2] = v[0];
    copy_out(&t->m, b, 1, m), copy_out(&t->v, b, 1, v);
}

static void long_weights(const Tensor *t, const Array *from, long at, long n, const float *x) {
    _Alignas(64) float p[TILE], g[TILE];
    for (long i = 0; i < n; i += TILE) {
        long len = MIN(TILE, n - i), rest = len % (2 * N), whole = len - rest;
        Stretch s = open_stretch(t, from, at + i, i, whole, p, g);
        weights_of(t->kind, s, whole, x, &t->k);
        close_stretch(t, s, at + i, whole);
        if (!rest) continue;
        memset(p, 0, 8 * N), memset(g, 0, 8 * N);
        copy_in(&t->p, at + i + whole, rest, p), copy_in(from, i + whole, rest, g);
        weights_of(PLAIN, (Stretch){(char *)p, (char *)g, 0, 0}, 2 * N, x, &t->k);
        copy_out(&t->p, at + i + whole, rest, p);
    }
}

static Array part(const Array *a, long at) { return (Array){.data = place(a, at), .dtype = a->dtype}; }

/* A block that one thread takes alone; a gradient in narrow storage is widened once if it fits the buffer */
static void long_block(const Tensor *t, long b) {
    _Alignas(64) float wide[BUFFER], x[3];
    long at = begin_of(t, b), n = length_of(t, b);
    double sum[2] = {0};
    Array g = part(&t->g, at);
    if (t->kind == PLAIN && n <= BUFFER) g = (Array){.data = view(&t->g, at, n, wide)};
    add_up(t, &g, at, n, sum);
    long_moments(t, b, sum, x);
    long_weights(t, &g, at, n, x);
}

static void any_blocks(const Tensor *t, long b, long end) {
    if (t->B <= SHORT) short_blocks(t, b, end);
    else while (b < end) long_block(t, b++);
}

/* Whole rows of blocks whose moments are 8-bit codes. They are opened into floats in stretches of whole groups: several
   rows, or a piece of one, so that what computes sees float32. */
static void coded_rows(const Tensor *t, long b, long end) {
    _Alignas(64) float m[TILE], v[TILE];
    Tensor open = *t;
    for (long n; b < end; b += n) {
        n = t->W > TILE ? MIN(TILE, t->W - b % t->W) : MIN(TILE / t->W * t->W, end - b);
        open.m = (Array){.data = m, .first = b}, open.v = (Array){.data = v, .first = b};
        open_codes(&t->m, t->W, b, n, 1, m), open_codes(&t->v, t->W, b, n, 0, v);
        any_blocks(&open, b, b + n);
        close_codes(&t->m, t->W, b, n, 1, m), close_codes(&t->v, t->W, b, n, 0, v);
    }
}

/* ------------------------------------------------------------------ threads */

typedef struct { double sum[2]; float x[3]; } Partial;

/* Item i of a pass is a stretch of blocks, or a segment of a huge one. Passes: 0 adds up huge blocks, 1 changes everything */
typedef struct { const Task *tasks; long count; const Hyper *h; Partial *partials; int pass; atomic_long next; } Job;

static int coded(const Task *t) { return (t->dtypes >> 8 & 15) == CODES; }
static int huge(const Task *t) { return t->block >= HUGE_BLOCK && !coded(t); }
static long segments(const Task *t) { return (t->block + SEGMENT - 1) / SEGMENT; }
static long width(const Task *t) { return (t->columns + t->block - 1) / t->block; }
static long all_blocks(const Task *t) { return t->rows * width(t); }
/* how many blocks an item has; a group of codes is not cut, for it lies in one row */
static long stretch(const Task *t) {
    if (coded(t)) return MAX(ITEM / t->columns, 1) * width(t);
    return MAX(ITEM / t->block / N * N, 1);
}
static long items(const Task *t, int pass) {
    if (huge(t)) return all_blocks(t) * segments(t);
    return pass == 0 ? 0 : (all_blocks(t) + stretch(t) - 1) / stretch(t);
}

static void item(const Task *task, const Tensor *t, long i, int pass, Partial *partials) {
    if (huge(task)) {
        long b = i / segments(task), from = i % segments(task) * SEGMENT, n = MIN(SEGMENT, length_of(t, b) - from);
        long at = begin_of(t, b) + from;
        Array g = part(&t->g, at);
        if (n > 0 && pass == 0) add_up(t, &g, at, n, partials[i].sum);
        if (n > 0 && pass == 1) long_weights(t, &g, at, n, partials[b * segments(task)].x);
        return;
    }
    long b = i * stretch(task), end = MIN(b + stretch(task), t->count);
    (coded(task) ? coded_rows : any_blocks)(t, b, end);
}

static void work(void *data) {
    Job *job = data;
    long at = -1, first = 0, past = 0, huge_before = 0; /* task `at` has items first to past - 1 */
    Tensor t;
    for (long i; (i = atomic_fetch_add(&job->next, 1)) >= 0;) {
        while (i >= past) {
            if (at >= 0 && huge(&job->tasks[at])) huge_before += items(&job->tasks[at], 0);
            if (++at >= job->count) return;
            first = past, past += items(&job->tasks[at], job->pass);
            if (i < past) tensor_of(&job->tasks[at], job->h, &t);
        }
        item(&job->tasks[at], &t, i - first, job->pass, job->partials + huge_before);
    }
}

/* Between the passes: the segments' sums, added in order, move m and v */
static void join_segments(Job *job) {
    Partial *partial = job->partials;
    for (long i = 0; i < job->count; i++) {
        Tensor t;
        if (!huge(&job->tasks[i])) continue;
        tensor_of(&job->tasks[i], job->h, &t);
        for (long b = 0; b < t.count; b++, partial += segments(&job->tasks[i])) {
            for (long j = 1; j < segments(&job->tasks[i]); j++)
                partial->sum[0] += partial[j].sum[0], partial->sum[1] += partial[j].sum[1];
            long_moments(&t, b, partial->sum, partial->x);
        }
    }
}

typedef struct { void (*function)(void *); void *data; } Call;
static void *call(void *c) { ((Call *)c)->function(((Call *)c)->data); return NULL; }

/* Stands in where torch brings no OpenMP runtime: the same signature as its GOMP_parallel */
static void threads_parallel(void (*function)(void *), void *data, unsigned n, unsigned flags) {
    pthread_t ids[64];
    unsigned started = 0;
    Call c = {function, data};
    (void)flags;
    while (started + 1 < MIN(n, 65) && pthread_create(&ids[started], NULL, call, &c) == 0) started++;
    function(data);
    while (started) pthread_join(ids[--started], NULL);
}

/* One step for `count` tensors. `parallel` is GOMP_parallel, or NULL. Returns 0, or 1 if memory ran out. */
int foam_adam(const Task *tasks, long count, const Hyper *h, int threads,
              void (*parallel)(void (*)(void *), void *, unsigned, unsigned)) {
    Job job = {.tasks = tasks, .count = count, .h = h};
    long total = 0, partials = 0;
    for (long i = 0; i < count; i++) partials += items(&tasks[i], 0), total += items(&tasks[i], 1);
    if (partials && !(job.partials = calloc(partials, sizeof *job.partials))) return 1;
    for (job.pass = partials ? 0 : 1; job.pass < 2; job.pass++) {
        unsigned n = MIN(threads, job.pass ? total : partials);
        job.next = 0;
        if (n > 1) (parallel ? parallel : threads_parallel)(work, &job, n, 0);
        else work(&job);
        if (job.pass == 0) join_segments(&job);
    }
    free(job.partials);
    return 0;
}
