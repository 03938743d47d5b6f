/* The adam rule, fused: one pass over p and g, in float32, whatever the storage. Called from cpu.py.

       m <- beta1 m + (1 - beta1) fold(g)
       v <- beta2 v + (1 - beta2) fold(g^2)                                (or fold(g)^2)
       M  = unfold(m) / c1 + rho r,   V = unfold(v) / c2 + kappa rho^2 r^2,   r = g - unfold(fold(g)),   ci = 1 - betai^t
       p <- (1 - lr wd) p - lr alpha M / (sqrt(V) + eps)

   M and V are taken c1 and c2 times as large and the constants moved out, so that what is left per weight is one root and
   one quotient, and m and v are spread as they are kept:

       p <- decay p - 2 (a m + a_r rho r) / (2 sqrt(v + k rho^2 r^2) + 2e),   a = lr alpha sqrt(c2) / c1,   e = eps sqrt(c2)

   with a_r = a c1 and k = kappa c2, or a and kappa if the bias correction covers the residual too.

   Layout. A vector holds N floats. N blocks of B are taken at once: their B N weights are summed by a tree of pairwise
   adds whose result is one vector of N block sums in order, so m and v are read, changed and written N at a time,
   and spread back over the weights while g is still in the first-level cache. Blocks that do not come in such runs
   (ragged ends, odd lengths, left-overs) are packed into the same shape first. Blocks above SHORT are taken one by one;
   those of HUGE or more are cut into segments that threads share.

   Every lane's arithmetic depends on its own block only, and every sum has one order, so the result does not depend on
   the number of threads. Letters: see fold.py.

   Longer than the 400 lines of the house: the compiler inlines the rule into every block length. */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_storage.h"

/* BUFFER: what one stretch of narrow storage is opened into, TILE floats or N of the longest short blocks */
enum { SHORT = 256, TILE = 1024, BUFFER = 16 * SHORT, ITEM = 1 << 16, SEGMENT = 1 << 18, HUGE_BLOCK = 1 << 19 };

/* ------------------------------------------------------------------ the rule */

typedef struct {
    float w1, beta1, w2, beta2; /* 1 - beta, beta */
    float sign, rho, rho_sign;  /* sign: -1 to maximize */
    float a2, r2, kappa;        /* 2a, 2a_r, k */
    float e2, decay;            /* 2e, 1 - lr wd */
    int mean_square, keep, exact;
} Rule;

/* m <- beta1 m + (1 - beta1) f, in the form that torch's lerp takes on either side of one half */
INLINE vf first(vf m, vf f, const Rule *k) {
    return k->keep ? m + (f - m) * k->w1 : f - (f - m) * k->beta1;
}
/* v <- beta2 v + (1 - beta2) s, with s at most rules.LARGEST; NaN passes */
INLINE vf second(vf v, vf s, const Rule *k) {
    vf most = all(0x1p127f);
    return v * k->beta2 + (vf)choose(s > most, (vi)most, (vi)s) * k->w2;
}

/* p <- decay p - M2 / (2 sqrt(V) + 2e) */
INLINE vf moved(vf p, vf M2, vf V, const Rule *k) { return p * k->decay - quotient(M2, V, k->e2, k->exact); }

/* The same from what is spread over a block: fr = rho fold(g), m2 = 2a m, and v */
INLINE vf weight(vf p, vf g, vf fr, vf m2, vf v, const Rule *k) {
    vf r = g * k->rho_sign - fr; /* rho r */
    return moved(p, r * k->r2 + m2, r * k->kappa * r + v, k);
}

/* What blocks() fetches meanwhile: where it will go on later. Without this memory idles while a tile is computed, for the
   processor does not look that far ahead (measured: up to a quarter of the time). */
typedef struct { const char *p, *g, *m, *v; long p_size, g_size, m_size; } Ahead;

INLINE void fetch(const char *x, long bytes) { __builtin_prefetch((const char *)((uintptr_t)x + bytes), 0, 3); }
INLINE void fetch_far(const char *x, long bytes) { __builtin_prefetch((const char *)((uintptr_t)x + bytes), 0, 2); }
INLINE void fetch_both(const Ahead *a, long i) { fetch(a->p, i * a->p_size), fetch(a->g, i * a->g_size); }

/* `count` times N blocks of B; lane i of `inv` is one over the true length of block i */
INLINE void blocks(const int B, float *p, const float *g, float *m, float *v, long count, vf inv, const Rule *k, const Ahead *a) {
    const int P = B < N ? B : N; /* vectors left to add up when no block spans more than one */
    for (long done = 0; count--; p += N * B, g += N * B, m += N, v += N, done += N * B) {
        vf s[N], q[N];
        /* sums of g and of g^2: first along the vectors of a block, then pairwise across */
        if (B < N) {
#pragma GCC unroll 16
            for (int j = 0; j < P / 2; j++) {
                vf b = load(g + 2 * j * N), c = load(g + (2 * j + 1) * N), x = even(b, c), y = odd(b, c);
                s[j] = x + y, q[j] = x * x + y * y;
            }
        } else {
#pragma GCC unroll 16
            for (int j = 0; j < P; j++) {
                s[j] = load(g + j * B), q[j] = s[j] * s[j];
                for (int i = N; i < B; i += N) { vf x = load(g + j * B + i); s[j] += x, q[j] += x * x; }
            }
        }
#pragma GCC unroll 4
        for (int w = B < N ? P / 4 : P / 2; w > 0; w /= 2)
#pragma GCC unroll 16
            for (int j = 0; j < w; j++) {
                s[j] = even(s[2 * j], s[2 * j + 1]) + odd(s[2 * j], s[2 * j + 1]);
                q[j] = even(q[2 * j], q[2 * j + 1]) + odd(q[2 * j], q[2 * j + 1]);
            }
        vf f = B == 1 ? load(g) * k->sign : s[0] * inv * k->sign;
        vf sq = B == 1 || !k->mean_square ? f * f : q[0] * inv;
        vf m_ = first(load(m), f, k), v_ = second(load(v), sq, k);
        store(m, m_), store(v, v_);
        if (B == 1) {
            fetch_both(a, done), fetch(a->m, done * a->m_size), fetch(a->v, done * a->m_size);
            store(p, moved(load(p), m_ * k->a2, v_, k));
            continue;
        }
        vf fr = f * k->rho, m2 = m_ * k->a2;
        if (B < N) {
#pragma GCC unroll 16
            for (int j = 0; j < P; j++) {
                vu lanes = (iota() + j * N) / B;
                float *pj = p + j * N;
                fetch_both(a, done + j * N);
                store(pj, weight(load(pj), load(g + j * N), permute(fr, lanes), permute(m2, lanes), permute(v_, lanes), k));
            }
        } else {
            _Alignas(64) float x[3][N];
            store(x[0], fr), store(x[1], m2), store(x[2], v_);
            for (int j = 0; j < N; j++) {
                vf fj = all(x[0][j]), mj = all(x[1][j]), vj = all(x[2][j]);
                for (int i = j * B; i < j * B + B; i += N) {
                    fetch_both(a, done + i);
                    store(p + i, weight(load(p + i), load(g + i), fj, mj, vj, k));
                }
            }
        }
    }
}

static void blocks_of(int B, float *p, const float *g, float *m, float *v, long count, vf inv, const Rule *k, const Ahead *a) {
    switch (B) {
#define CASE(B) case B: blocks(B, p, g, m, v, count, inv, k, a); break;
        CASE(1) CASE(2) CASE(4) CASE(8) CASE(16) CASE(32) CASE(64) CASE(128) CASE(256)
#undef CASE
    }
}

/* sum of n numbers and of their squares, added to sum[0] and sum[1]; g is padded with zeros to a multiple of N.
   Meanwhile the weights are fetched, which are needed next. */
static void sums(const float *g, long n, double *sum, const char *p, long p_size) {
    vf s[4] = {{0}}, q[4] = {{0}};
    long i = 0;
    for (; i + 4 * N <= n; i += 4 * N)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            vf x = load(g + i + j * N);
            s[j] += x, q[j] += x * x;
            fetch_far(p, (i + j * N) * p_size);
        }
    for (; i < n; i += N) { vf x = load(g + i); s[0] += x, q[0] += x * x; }
    vf x = (s[0] + s[1]) + (s[2] + s[3]), y = (q[0] + q[1]) + (q[2] + q[3]);
    /* both across their lanes at once: in the end lane 0 is the sum of x, lane 1 that of y */
    x = even(x, y) + odd(x, y);
    for (int w = N / 2; w > 1; w /= 2) x = even(x, x) + odd(x, x);
    sum[0] += x[0], sum[1] += x[1];
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

typedef struct { Array p, g, m, v; long C, B, W, count; Rule k; } Tensor;

static void tensor_of(const Task *t, const Hyper *h, Tensor *out) {
    double step = *t->step, c1 = 1 - pow(h->beta1, step), c2 = 1 - pow(h->beta2, step);
    double sign = h->maximize ? -1 : 1, a2 = 2 * h->lr * h->scale * sqrt(c2) / c1;
    out->C = t->columns, out->B = t->block, out->W = (t->columns + t->block - 1) / t->block;
    out->count = t->rows * out->W;
    out->k = (Rule){
        .w1 = 1 - h->beta1, .beta1 = h->beta1, .w2 = 1 - h->beta2, .beta2 = h->beta2, .keep = 1 - h->beta1 < 0.5,
        .sign = sign, .rho = h->rho, .rho_sign = h->rho * sign, .mean_square = h->mean_square,
        .a2 = a2, .r2 = h->whole ? a2 : a2 * c1, .kappa = h->whole ? h->kappa : h->kappa * c2,
        .e2 = 2 * h->eps * sqrt(c2), .decay = 1 - h->lr * h->weight_decay,
        .exact = h->eps > 1e15, /* the quotient's estimate would be denormal */
    };
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

static long begin_of(const Tensor *t, long b) { return b / t->W * t->C + b % t->W * t->B; }
static long length_of(const Tensor *t, long b) { return MIN(t->B, t->C - b % t->W * t->B); }

/* Up to N blocks, from anywhere, brought into the shape that blocks() takes */
static void packed(const Tensor *t, int P, const long *which, int n) {
    _Alignas(64) float p[N * SHORT], g[N * SHORT], m[N] = {0}, v[N] = {0}, inv[N] = {0};
    memset(p, 0, 4 * N * P), memset(g, 0, 4 * N * P);
    for (int i = 0; i < n; i++) {
        long at = begin_of(t, which[i]), len = length_of(t, which[i]);
        copy_in(&t->p, at, len, p + i * P), copy_in(&t->g, at, len, g + i * P);
        copy_in(&t->m, which[i], 1, m + i), copy_in(&t->v, which[i], 1, v + i);
        inv[i] = 1.0f / len;
    }
    blocks_of(P, p, g, m, v, 1, load(inv), &t->k, &(Ahead){0});
    for (int i = 0; i < n; i++) {
        copy_out(&t->p, begin_of(t, which[i]), length_of(t, which[i]), p + i * P);
        copy_out(&t->m, which[i], 1, m + i), copy_out(&t->v, which[i], 1, v + i);
    }
}

/* Blocks b to end, none longer than SHORT */
static void short_blocks(const Tensor *t, long b, long end) {
    int P = 1, waiting = 0;
    while (P < t->B) P *= 2;
    const long whole = P != t->B ? 0 : t->C / t->B, step = N * P < TILE ? TILE / P : N;
    _Alignas(64) float p[BUFFER], g[BUFFER], m[TILE], v[TILE];
    long which[N];
    while (b < end) {
        /* how many whole blocks follow each other in memory */
        long run = whole == t->W ? end - b : MIN(whole - b % t->W, end - b), n = MIN(run / N * N, step);
        if (n > 0) {
            long at = begin_of(t, b);
            float *x = view(&t->p, at, n * P, p), *y = view(&t->g, at, n * P, g);
            float *m_ = view(&t->m, b, n, m), *v_ = view(&t->v, b, n, v);
            Ahead next = {
                place(&t->p, at + n * P), place(&t->g, at + n * P), place(&t->m, b + n), place(&t->v, b + n),
                size_of(&t->p), size_of(&t->g), size_of(&t->m),
            };
            blocks_of(P, x, y, m_, v_, n / N, all(1.0f / P), &t->k, &next);
            unview(&t->p, at, n * P, x), unview(&t->m, b, n, m_), unview(&t->v, b, n, v_);
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
        long len = MIN(TILE, n - i);
        if (len % N) copy_in(from, i, len, g), memset(g + len, 0, 4 * (N - len % N));
        sums(len % N ? g : view(from, i, len, g), len, sum, place(&t->p, at + i), size_of(&t->p));
    }
}

/* What a long block's weights share, once its sums are known: out = rho f, 2a m, v */
static void long_moments(const Tensor *t, long b, const double *sum, float *out) {
    const Rule *k = &t->k;
    float m[N] = {0}, v[N] = {0};
    double len = length_of(t, b);
    copy_in(&t->m, b, 1, m), copy_in(&t->v, b, 1, v);
    vf f = all((float)(sum[0] / len)) * k->sign, s = k->mean_square ? all((float)(sum[1] / len)) : f * f;
    store(m, first(load(m), f, k)), store(v, second(load(v), s, k));
    out[0] = f[0] * k->rho, out[1] = m[0] * k->a2, out[2] = v[0];
    copy_out(&t->m, b, 1, m), copy_out(&t->v, b, 1, v);
}

static void long_weights(const Tensor *t, const Array *from, long at, long n, const float *x) {
    _Alignas(64) float p[TILE], g[TILE];
    for (long i = 0; i < n; i += TILE) {
        long len = MIN(TILE, n - i), whole = len / N * N;
        float *y = view(&t->p, at + i, whole, p), *z = view(from, i, whole, g);
        const char *next = place(&t->g, at + n + i);
        for (long j = 0; j < whole; j += N) {
            fetch_far(next, j * size_of(&t->g));
            store(y + j, weight(load(y + j), load(z + j), all(x[0]), all(x[1]), all(x[2]), &t->k));
        }
        unview(&t->p, at + i, whole, y);
        if (whole < len) {
            float a[N] = {0}, c[N] = {0};
            copy_in(&t->p, at + i + whole, len - whole, a), copy_in(from, i + whole, len - whole, c);
            store(a, weight(load(a), load(c), all(x[0]), all(x[1]), all(x[2]), &t->k));
            copy_out(&t->p, at + i + whole, len - whole, a);
        }
    }
}

static Array part(const Array *a, long at) { return (Array){.data = place(a, at), .dtype = a->dtype}; }

/* A block that one thread takes alone; a gradient in narrow storage is widened once if it fits the buffer */
static void long_block(const Tensor *t, long b) {
    _Alignas(64) float wide[BUFFER], x[3];
    long at = begin_of(t, b), n = length_of(t, b);
    double sum[2] = {0};
    Array g = part(&t->g, at);
    if (n <= BUFFER) g = (Array){.data = view(&t->g, at, n, wide)};
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
static long blocks_in(const Task *t) { return t->rows * width(t); }
/* how many blocks an item has; a group of codes is not cut, for it lies in one row */
static long stretch(const Task *t) {
    if (coded(t)) return MAX(ITEM / t->columns, 1) * width(t);
    return MAX(ITEM / t->block / N * N, 1);
}
static long items(const Task *t, int pass) {
    if (huge(t)) return blocks_in(t) * segments(t);
    return pass == 0 ? 0 : (blocks_in(t) + stretch(t) - 1) / stretch(t);
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
