/* How numbers are kept narrower than they are computed: bfloat16, float16, and 8-bit codes. The bits are those of quant.py,
   noise included. Included by cpu.c.

   Two bfloat16 numbers lie in one word of 32 bits, and so do the random bits of two neighbours: numbers are opened, and
   rounded, as those of even and those of odd place in two vectors, without moving any of them between lanes. */

#include "cpu_vectors.h"

enum { FLOAT32, BFLOAT16, FLOAT16, CODES };

/* `first` is the place of data[0] in the tensor; exponents: those of 8-bit codes; `number`: what noise counts the tensor's
   element 0 as */
typedef struct { void *data; uint8_t *exponents; long first; int dtype, stochastic; uint32_t key; long number; } Array;

static long size_of(const Array *a) { return a->dtype == FLOAT32 ? 4 : a->dtype == CODES ? 1 : 2; }
static char *place(const Array *a, long at) { return (char *)a->data + (at - a->first) * size_of(a); }

/* ------------------------------------------------------------------ noise */

/* lowbias32, as in quant.py */
INLINE vu mix(vu x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}
static uint32_t mix1(uint32_t x) { return mix((vu){0} + x)[0]; }

/* Random bits, 16 or 19, for each of 2N elements: those of even and those of odd place from `number` on. A word's low ones are
   for the element of even number, its high ones for the odd one after it. */
typedef struct { vu a, b; } Draws;
INLINE Draws draws(uint32_t key, uint64_t number, const int bits) {
    const uint32_t mask = (1u << bits) - 1;
    vu word = mix((iota() + (uint32_t)(number >> 1)) ^ key);
    if (number & 1) return (Draws){word >> (32 - bits), mix((iota() + (uint32_t)(number >> 1) + 1) ^ key) & mask};
    return (Draws){word & mask, word >> (32 - bits)};
}

/* ------------------------------------------------------------------ bfloat16 and float16 */

INLINE Two quiet_two(Two x) { return (Two){quiet(x.a), quiet(x.b)}; }
INLINE Two split(Two x) { return (Two){even(x.a, x.b), odd(x.a, x.b)}; }

/* 2N numbers, even and odd places apart */
INLINE Two open_pairs(const void *x) {
    vu word;
    memcpy(&word, x, sizeof word);
    return (Two){(vf)(word << 16), (vf)(word & 0xffff0000u)};
}
/* Bits + noise, then the low half falls away: up with probability proportional to the distance. To nearest: half a unit in
   place of the noise, ties to even. Infinity has no low half to carry from; NaN must be quiet(). */
INLINE void close_pairs(void *out, Two x, const int stochastic, uint32_t key, uint64_t number) {
    vu a = (vu)x.a, b = (vu)x.b;
    Draws r = stochastic ? draws(key, number, 16) : (Draws){((a >> 16) & 1) + 0x7fff, ((b >> 16) & 1) + 0x7fff};
    vu word = (a + r.a) >> 16 | ((b + r.b) & 0xffff0000u);
    memcpy(out, &word, sizeof word);
}

INLINE Two open_half(const void *x) {
    vh y[2];
    memcpy(y, x, sizeof y);
    return (Two){from_half(y[0]), from_half(y[1])};
}
INLINE void close_half(void *out, Two x) { memcpy(out, (vh[]){to_half(x.a), to_half(x.b)}, 4 * N); }

INLINE void widen(float *out, const uint16_t *x, long n, const int half) {
    long i = 0;
    for (; i + 2 * N <= n; i += 2 * N) store_two(out + i, half ? open_half(x + i) : interleave(open_pairs(x + i)));
    if (i == n) return;
    uint16_t rest[2 * N] = {0};
    float y[2 * N];
    memcpy(rest, x + i, 2 * (n - i));
    store_two(y, half ? open_half(rest) : interleave(open_pairs(rest)));
    memcpy(out + i, y, 4 * (n - i));
}

INLINE void narrow(uint16_t *out, const float *x, long n, const int half, const int stochastic, uint32_t key, long at) {
    long i = 0;
    for (; i + 2 * N <= n; i += 2 * N) {
        if (half) close_half(out + i, load_two(x + i));
        else close_pairs(out + i, quiet_two(split(load_two(x + i))), stochastic, key, at + i);
    }
    if (i == n) return;
    float rest[2 * N] = {0};
    uint16_t y[2 * N];
    memcpy(rest, x + i, 4 * (n - i));
    if (half) close_half(y, load_two(rest));
    else close_pairs(y, quiet_two(split(load_two(rest))), stochastic, key, at + i);
    memcpy(out + i, y, 2 * (n - i));
}

static void narrow_all(const Array *a, long at, long n, const float *x) {
    uint16_t *out = (uint16_t *)place(a, at);
    if (a->dtype == FLOAT16) narrow(out, x, n, 1, 0, 0, at);
    else if (a->stochastic) narrow(out, x, n, 0, 1, a->key, a->number + at);
    else narrow(out, x, n, 0, 0, 0, at);
}

/* n numbers of `a` from `at` on, as floats in `buffer` */
static void copy_in(const Array *a, long at, long n, float *buffer) {
    if (a->dtype == FLOAT32) memcpy(buffer, place(a, at), 4 * n);
    else if (a->dtype == FLOAT16) widen(buffer, (uint16_t *)place(a, at), n, 1);
    else widen(buffer, (uint16_t *)place(a, at), n, 0);
}
static void copy_out(const Array *a, long at, long n, const float *buffer) {
    if (a->dtype == FLOAT32) memcpy(place(a, at), buffer, 4 * n);
    else narrow_all(a, at, n, buffer);
}
/* the same without copying where the storage is float32 already */
static float *view(const Array *a, long at, long n, float *buffer) {
    if (a->dtype == FLOAT32) return (float *)place(a, at);
    copy_in(a, at, n, buffer);
    return buffer;
}
static void unview(const Array *a, long at, long n, const float *x) {
    if (a->dtype != FLOAT32) narrow_all(a, at, n, x);
}

/* ------------------------------------------------------------------ 8-bit codes, in quant.py's words */

enum { GROUP = 32, PARTS = GROUP / (2 * N), RUN = 32 };

/* The numbers of `count` groups, from their codes and exponent bytes. An index is a float's upper half, shifted by 3. */
INLINE void decode(float *out, const uint8_t *codes, const uint8_t *exponents, long count, const int is_signed) {
    for (long i = 0; i < count * PARTS; i++) {
        vb bytes;
        memcpy(&bytes, codes + 2 * N * i, sizeof bytes);
        vs code = from_bytes(bytes), small = is_signed ? code & 0x7f : code;
        int16_t base = 16 * exponents[i / PARTS] - (is_signed ? 112 : 240);
        vs upper = (larger(small + base, (vs){0}) & (small != 0)) << 3;
        if (is_signed) upper |= (code & 0x80) << 8;
        store_two(out + 2 * N * i, interleave(open_pairs(&upper)));
    }
}

/* what is added before 19 bits fall away */
INLINE Draws uniform(const int stochastic, uint32_t key, uint64_t number) {
    return stochastic ? draws(key, number, 19) : (Draws){(vu){0} + (1 << 18), (vu){0} + (1 << 18)};
}

/* Any group's codes, one number at a time; returns its exponent byte */
static uint8_t encode_each(uint8_t *out, const float *x, int is_signed, int stochastic, uint32_t key, long number) {
    uint32_t random[GROUP], bits[GROUP], any = 0;
    int index[GROUP], top = 0;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < GROUP; i++) any |= bits[i];
    if (!any) { memset(out, 0, GROUP); return 0; } /* never touched: the most common of these */
    for (int i = 0; i < PARTS; i++) {
        Draws r = uniform(stochastic, key, number + 2 * N * i);
        for (int j = 0; j < N; j++) random[2 * (N * i + j)] = r.a[j], random[2 * (N * i + j) + 1] = r.b[j];
    }
    for (int i = 0; i < GROUP; i++) {
        uint32_t magnitude = bits[i] & 0x7fffffff;
        index[i] = magnitude > 0x7f800000 ? 4095 : magnitude == 0x7f800000 ? 4080 : MIN((magnitude + random[i]) >> 19, 4079);
        top = MAX(top, index[i]);
    }
    const int base = top & ~15;
    uint32_t least = (uint32_t)MAX(base - 111, 0) << 19;
    float smallest;
    memcpy(&smallest, &least, 4);
    for (int i = 0; i < GROUP; i++) {
        int code = index[i] - base + (is_signed ? 112 : 240);
        if (code < 1) code = is_signed ? fabsf(x[i]) > smallest * (random[i] * 0x1p-19f) : 1;
        if (is_signed ? (bits[i] & 0x7fffffff) == 0 : index[i] == 0) code = 0;
        out[i] = code | (is_signed ? bits[i] >> 24 & 0x80 : 0);
    }
    return top >> 4;
}

/* Codes and exponent bytes of `count` groups, RUN at most. The ordinary group has no infinity or NaN, and its largest number
   is above 2^-100 (a second moment's: 2^-112), so that code 1 and its fractions are no denormals. The others come last: a call
   among the ordinary ones would have all constants loaded anew for each. */
INLINE void encode(uint8_t *out, uint8_t *exponents, const float *x, long count, const int is_signed, const int stochastic,
                   uint32_t key, long number) {
    uint8_t others[RUN];
    int waiting = 0;
    for (long n = 0; n < count; n++) {
        vs index[PARTS], least[PARTS], signs[PARTS], most = {0};
        Two size[PARTS];
        Draws random[PARTS];
        for (int i = 0; i < PARTS; i++) {
            long at = n * GROUP + 2 * N * i;
            Two y = split(load_two(x + at));
            vu a = (vu)y.a, b = (vu)y.b;
            random[i] = uniform(stochastic, key, number + at);
            if (is_signed) signs[i] = (vs)(a >> 16 | (b & 0xffff0000u)) >> 8;
            a &= 0x7fffffff, b &= 0x7fffffff, size[i] = (Two){(vf)a, (vf)b};
            index[i] = (vs)((a + random[i].a) >> 19 | ((b + random[i].b) >> 3 & 0xffff0000u));
            if (!is_signed) least[i] = smaller(index[i], (vs){0} + 1);
            most = larger(most, index[i]);
        }
        const int top = largest(most), base = top & ~15;
        exponents[n] = top >> 4;
        if (__builtin_expect(top < (is_signed ? 432 : 240) || top >= 4080, 0)) others[waiting++] = n;
        /* code 1 of a first moment: what lies below becomes it with the odds that keep the mean, or zero */
        const vf unit = (vf)((vi){0} + (int32_t)((uint32_t)(base - 111) << 19)) * 0x1p-19f;
        for (int i = 0; i < PARTS; i++) {
            if (is_signed) {
                vi a = size[i].a > unit * __builtin_convertvector((vi)random[i].a, vf);
                vi b = size[i].b > unit * __builtin_convertvector((vi)random[i].b, vf);
                least[i] = (vs)((a & 1) | (b & 0x10000));
            }
            vs code = larger(index[i] - (int16_t)(base - (is_signed ? 112 : 240)), least[i]);
            vb bytes = to_bytes(is_signed ? code | (signs[i] & 0x80) : code);
            memcpy(out + n * GROUP + 2 * N * i, &bytes, sizeof bytes);
        }
    }
    while (waiting) {
        long n = others[--waiting];
        exponents[n] = encode_each(out + n * GROUP, x + n * GROUP, is_signed, stochastic, key, number + n * GROUP);
    }
}

/* The n moments from `at` on, whole groups of rows of W, between codes and the floats x */
INLINE void groups(const Array *a, long W, long at, long n, float *x, const int is_signed, const int closing, const int stochastic) {
    uint8_t *codes = (uint8_t *)a->data + at, *exponent = a->exponents + at / W * ((W + GROUP - 1) / GROUP) + at % W / GROUP;
    for (long left = W % GROUP ? W - at % W : n; n > 0;) {
        long len = left < GROUP ? left : MIN(left, MIN(n, RUN * GROUP)) / GROUP * GROUP, count = MAX(len / GROUP, 1);
        uint8_t c[GROUP] = {0}, *from = len < GROUP ? c : codes;
        float y[GROUP] = {0}, *to = len < GROUP ? y : x;
        if (len < GROUP) memcpy(y, x, 4 * len), memcpy(c, codes, len); /* a row's last group, filled up with zeros */
        if (closing) encode(from, exponent, to, count, is_signed, stochastic, a->key, a->number + at);
        else decode(to, from, exponent, count, is_signed);
        if (len < GROUP) memcpy(x, y, 4 * len), memcpy(codes, c, len);
        left = left == len ? W : left - len;
        n -= len, codes += len, x += len, at += len, exponent += count;
    }
}

static void open_codes(const Array *a, long W, long at, long n, const int is_signed, float *x) {
    if (is_signed) groups(a, W, at, n, x, 1, 0, 0);
    else groups(a, W, at, n, x, 0, 0, 0);
}
static void close_codes(const Array *a, long W, long at, long n, const int is_signed, float *x) {
    if (is_signed && a->stochastic) groups(a, W, at, n, x, 1, 1, 1);
    else if (is_signed) groups(a, W, at, n, x, 1, 1, 0);
    else if (a->stochastic) groups(a, W, at, n, x, 0, 1, 1);
    else groups(a, W, at, n, x, 0, 1, 0);
}
