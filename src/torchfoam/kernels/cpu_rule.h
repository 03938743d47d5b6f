/* The adam rule over stretches of memory: N blocks at once, or one long block. Included by cpu.c, which says what is computed
   and how it is laid out.

   Weights and gradients are taken two vectors at a time, as their storage gives them: float32 in order, bfloat16 with even
   and odd places apart (cpu_storage.h). Each lane computes alike in both, and sums are of even and odd places first, so the
   result does not depend on the storage, but for its rounding. */

#include "cpu_storage.h"

/* What is computed at once: TILE weights, or N of the longest short blocks. BUFFER: what narrow storage is opened into */
enum { SHORT = 256, TILE = 512, BUFFER = 16 * SHORT };

/* How p and g are stored: both float32, or both bfloat16, p rounded stochastically or to nearest */
enum { PLAIN, PAIRS, NEAREST };

typedef struct {
    float w1, beta1, w2, beta2; /* 1 - beta, beta */
    float sign, rho, rho_sign;  /* rho sqrt(k); sign: -1 to maximize */
    float a, a_r;               /* a_r over sqrt(k) */
    float e, decay;             /* decay: 1 - lr wd */
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

/* ------------------------------------------------------------------ two vectors of weights */

/* p and g of one stretch; `key` and `number`, what p[0] counts as, are for the noise */
typedef struct { char *p; const char *g; uint32_t key; long number; } Stretch;

INLINE long bytes_of(const int kind) { return kind == PLAIN ? 4 : 2; }
INLINE Two open_two(const int kind, const char *x, long i) {
    return kind == PLAIN ? load_two((const float *)x + i) : open_pairs(x + 2 * i);
}
INLINE void close_two(const int kind, const Stretch *s, long i, Two y) {
    if (kind == PLAIN) store_two((float *)s->p + i, y);
    else close_pairs(s->p + 2 * i, QUIET ? y : quiet_two(y), kind == PAIRS, s->key, s->number + i);
}
/* even and odd places apart */
INLINE Two apart(const int kind, Two x) { return kind == PLAIN ? split(x) : x; }

/* x[b], one of N blocks of B <= N, for the weights of vectors 2j and 2j + 1 */
INLINE Two spread(const int kind, const int B, vf x, int j) {
    if (kind != PLAIN) {
        vf y = B == 2 ? x : permute(x, (iota() + j * N) / MAX(B / 2, 1));
        return (Two){y, y};
    }
    return (Two){permute(x, (iota() + 2 * j * N) / B), permute(x, (iota() + (2 * j + 1) * N) / B)};
}
/* p <- decay p - M / (sqrt(V) + e), from what is spread over a block: fr = rho sqrt(k) fold(g), am = a m, and v */
INLINE void weights(const int kind, const Stretch *s, long i, Two fr, Two am, Two v, const Rule *k) {
    Two p = open_two(kind, s->p, i), g = open_two(kind, s->g, i), r, M, V;
    r.a = g.a * k->rho_sign - fr.a, r.b = g.b * k->rho_sign - fr.b; /* rho sqrt(k) r */
    M.a = r.a * k->a_r + am.a, M.b = r.b * k->a_r + am.b;
    V.a = r.a * r.a + v.a, V.b = r.b * r.b + v.b;
    close_two(kind, s, i, stepped(p, k->decay, M, V, k->e, k->exact));
}

/* What blocks() fetches meanwhile: where it will go on later. Without this memory idles while a tile is computed, for the
   processor does not look that far ahead (measured: up to a quarter of the time). */
typedef struct { const char *p, *g, *m, *v; long m_size; } Ahead;

INLINE void fetch(const char *x, long offset, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)((uintptr_t)x + offset + i), 0, 3);
}
INLINE void fetch_far(const char *x, long offset, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)((uintptr_t)x + offset + i), 0, 2);
}
INLINE void fetch_both(const int kind, const Ahead *a, long i) {
    const long size = bytes_of(kind);
    fetch(a->p, i * size, 2 * N * size), fetch(a->g, i * size, 2 * N * size);
}

/* ------------------------------------------------------------------ N blocks of B at once */

typedef struct { vf s, q; } Sums;

/* block sums of g and g^2: the next vector of the tree */
INLINE Sums joined(Sums x, Sums y) { return (Sums){even(x.s, y.s) + odd(x.s, y.s), even(x.q, y.q) + odd(x.q, y.q)}; }

INLINE Sums pair_sums(const int kind, const char *g, long i) {
    Two x = apart(kind, open_two(kind, g, i));
    return (Sums){x.a + x.b, x.a * x.a + x.b * x.b};
}
/* of one block of B >= 2N: along its vectors, then even and odd places */
INLINE Sums block_sums(const int kind, const int B, const char *g, long i) {
    Two x = open_two(kind, g, i), s = x, q = {x.a * x.a, x.b * x.b};
    for (int j = 2 * N; j < B; j += 2 * N) {
        x = open_two(kind, g, i + j);
        s.a += x.a, s.b += x.b, q.a += x.a * x.a, q.b += x.b * x.b;
    }
    s = apart(kind, s), q = apart(kind, q);
    return (Sums){s.a + s.b, q.a + q.b};
}
INLINE Sums sums_of(const int kind, const int B, const char *g) {
    Sums s[MAX(N / 2, 1)];
#pragma GCC unroll 8
    for (int j = 0; j < MIN(B, N) / 2; j++)
        s[j] = B <= N ? pair_sums(kind, g, 2 * j * N)
                      : joined(block_sums(kind, B, g, 2 * j * B), block_sums(kind, B, g, (2 * j + 1) * B));
#pragma GCC unroll 4
    for (int w = MIN(B, N) / 4; w > 0; w /= 2)
#pragma GCC unroll 8
        for (int j = 0; j < w; j++) s[j] = joined(s[2 * j], s[2 * j + 1]);
    return s[0];
}

/* The moments of N blocks, moved on; fr = rho sqrt(k) f and am = a m are for their weights */
INLINE void moments(Sums sum, float *m, float *v, vf inv, const Rule *k, float *fr, float *am) {
    vf f = sum.s * inv * k->sign, s = k->mean_square ? sum.q * inv : f * f;
    vf m_ = first(load(m), f, k), v_ = second(load(v), s, k);
    store(m, m_), store(v, v_), store(fr, f * k->rho), store(am, m_ * k->a);
}

/* 2N weights that are not folded */
INLINE void unfolded(const int kind, const Stretch *s, float *m, float *v, long i, const Rule *k) {
    Two p = open_two(kind, s->p, i), g = open_two(kind, s->g, i), M = load_two(m + i), V = load_two(v + i);
    if (kind != PLAIN) M = split(M), V = split(V);
    g.a *= k->sign, g.b *= k->sign;
    M = (Two){first(M.a, g.a, k), first(M.b, g.b, k)}, V = (Two){second(V.a, g.a * g.a, k), second(V.b, g.b * g.b, k)};
    store_two(m + i, kind == PLAIN ? M : interleave(M)), store_two(v + i, kind == PLAIN ? V : interleave(V));
    close_two(kind, s, i, stepped(p, k->decay, (Two){M.a * k->a, M.b * k->a}, V, k->e, k->exact));
}

/* `count` times N blocks of B, TILE weights or one time N; lane i of `inv` is one over the true length of block i. All moments
   first, then all weights: one chain from sum to weight would be longer than the processor looks ahead. The rule is copied,
   so that the compiler keeps it in registers: nothing that is stored can change it. */
INLINE void blocks(const int kind, const int B, Stretch s, float *m, float *v, long count, vf inv, const Rule *rule, const Ahead *a) {
    _Alignas(64) float fr[TILE / 2], am[TILE / 2];
    const Rule local = *rule, *k = &local;
    const Ahead ahead = *a;
    for (long i = 0; i < count * N; i += N) moments(sums_of(kind, B, s.g + i * B * bytes_of(kind)), m + i, v + i, inv, k, fr + i, am + i);
    if (B <= N) {
        for (long i = 0; i < count * N; i += N)
#pragma GCC unroll 8
            for (int j = 0; j < B / 2; j++) {
                long at = i * B + 2 * j * N;
                fetch_both(kind, &ahead, at);
                weights(kind, &s, at, spread(kind, B, load(fr + i), j), spread(kind, B, load(am + i), j), spread(kind, B, load(v + i), j), k);
            }
    } else {
        for (long i = 0; i < count * N; i++) {
            vf f = all(fr[i]), m_ = all(am[i]), v_ = all(v[i]);
            for (long j = i * B; j < i * B + B; j += 2 * N) {
                if (N * B > TILE) fetch_both(kind, &ahead, j); /* shorter ones the processor foresees */
                weights(kind, &s, j, (Two){f, f}, (Two){m_, m_}, (Two){v_, v_}, k);
            }
        }
    }
}
/* blocks of one: `count` times N of them, an even number */
INLINE void singles(const int kind, Stretch s, float *m, float *v, long count, const Rule *rule, const Ahead *a) {
    const Rule local = *rule;
    const Ahead ahead = *a;
    for (long i = 0; i < count * N; i += 2 * N) {
        fetch_both(kind, &ahead, i), fetch(ahead.m, i * ahead.m_size, 2 * N * ahead.m_size), fetch(ahead.v, i * ahead.m_size, 2 * N * ahead.m_size);
        unfolded(kind, &s, m, v, i, &local);
    }
}
