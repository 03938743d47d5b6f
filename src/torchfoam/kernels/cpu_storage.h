/* Vectors of N floats, and how numbers are kept narrower than they are computed: bfloat16, float16, and 8-bit codes.
   The bits are those of quant.py, noise included. Included by cpu.c. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* ------------------------------------------------------------------ vectors of N floats */

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#include <immintrin.h>
enum { N = 16 };
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
enum { N = 8 };
#else
enum { N = 4 };
#endif
typedef float vf __attribute__((vector_size(4 * N)));
typedef int32_t vi __attribute__((vector_size(4 * N)));
typedef uint32_t vu __attribute__((vector_size(4 * N)));
typedef uint16_t vh __attribute__((vector_size(2 * N)));
typedef uint8_t vb __attribute__((vector_size(N)));

INLINE vf load(const float *x) { vf y; memcpy(&y, x, sizeof y); return y; }
INLINE void store(float *x, vf y) { memcpy(x, &y, sizeof y); }
INLINE vf all(float x) { return x - (vf){0}; }
INLINE vu iota(void) { vu x; for (int i = 0; i < N; i++) x[i] = i; return x; }
INLINE vi choose(vi mask, vi a, vi b) { return (a & mask) | (b & ~mask); }

#if defined(__AVX512F__) && defined(__AVX512DQ__)

INLINE vf even(vf a, vf b) { return _mm512_permutex2var_ps(a, (__m512i)(iota() * 2), b); }
INLINE vf odd(vf a, vf b) { return _mm512_permutex2var_ps(a, (__m512i)(iota() * 2 + 1), b); }
INLINE vf permute(vf x, vu lanes) { return _mm512_permutexvar_ps((__m512i)lanes, x); }
INLINE vi larger(vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE vi smaller(vi a, vi b) { return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b); }
INLINE vi from_bytes(vb x) { return (vi)_mm512_cvtepu8_epi32((__m128i)x); }
INLINE vb to_bytes(vi x) { return (vb)_mm512_cvtepi32_epi8((__m512i)x); }
INLINE vf from_half(vh x) { return _mm512_cvtph_ps((__m256i)x); }
INLINE vh to_half(vf x) { return (vh)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

/* M / (2 sqrt(V) + e2). The root and the quotient start from 14-bit estimates and take one Newton step each (relative error
   2^-28 before rounding): three times faster than the exact instructions, which serve the lanes where V is 0, denormal,
   infinite or NaN, for those must end as in plain arithmetic. */
INLINE vf quotient(vf M, vf V, float e2, int exact) {
    vf y = _mm512_rsqrt14_ps(V), s = V * y;
    vf d = _mm512_fmadd_ps(y, _mm512_fnmadd_ps(s, s, V), _mm512_fmadd_ps(s, all(2), all(e2)));
    vf x = _mm512_rcp14_ps(d), u = M * x;
    u = _mm512_fmadd_ps(u, _mm512_fnmadd_ps(d, x, all(1)), u);
    __mmask16 special = _mm512_fpclass_ps_mask(V, 0xff);
    if (__builtin_expect(special | exact, 0))
        u = _mm512_mask_div_ps(u, exact ? 0xffff : special, M, _mm512_sqrt_ps(V) * 2 + e2);
    return u;
}

#else

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

INLINE vf in_order(vf x) { return (vf)_mm256_permute4x64_pd((__m256d)x, 0xd8); }
INLINE vf even(vf a, vf b) { return in_order(_mm256_shuffle_ps(a, b, 0x88)); }
INLINE vf odd(vf a, vf b) { return in_order(_mm256_shuffle_ps(a, b, 0xdd)); }
INLINE vf permute(vf x, vu lanes) { return _mm256_permutevar8x32_ps(x, (__m256i)lanes); }
INLINE vi larger(vi a, vi b) { return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE vi smaller(vi a, vi b) { return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b); }
INLINE vi from_bytes(vb x) { int64_t y; memcpy(&y, &x, 8); return (vi)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(y)); }
INLINE vb to_bytes(vi x) {
    __m256i low = _mm256_shuffle_epi8((__m256i)x, _mm256_set1_epi32(0x0c080400)); /* a half's low bytes, four times */
    vb y;
    memcpy(&y, (int32_t[]){_mm256_extract_epi32(low, 0), _mm256_extract_epi32(low, 4)}, 8);
    return y;
}
INLINE vf from_half(vh x) { return _mm256_cvtph_ps((__m128i)x); }
INLINE vh to_half(vf x) { return (vh)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
INLINE vf root(vf x) { return _mm256_sqrt_ps(x); }

#else

INLINE vf even(vf a, vf b) { return (vf){a[0], a[2], b[0], b[2]}; }
INLINE vf odd(vf a, vf b) { return (vf){a[1], a[3], b[1], b[3]}; }
INLINE vf permute(vf x, vu lanes) { return (vf){x[lanes[0]], x[lanes[1]], x[lanes[2]], x[lanes[3]]}; }
INLINE vi larger(vi a, vi b) { return choose(a > b, a, b); }
INLINE vi smaller(vi a, vi b) { return choose(a < b, a, b); }
INLINE vi from_bytes(vb x) { return __builtin_convertvector(x, vi); }
INLINE vb to_bytes(vi x) { return __builtin_convertvector(x, vb); }
INLINE vf root(vf x) { for (int i = 0; i < N; i++) x[i] = sqrtf(x[i]); return x; }
INLINE vf from_half(vh x) { vf y; for (int i = 0; i < N; i++) { _Float16 h; memcpy(&h, (uint16_t *)&x + i, 2); y[i] = h; } return y; }
INLINE vh to_half(vf x) { vh y; for (int i = 0; i < N; i++) { _Float16 h = x[i]; memcpy((uint16_t *)&y + i, &h, 2); } return y; }

#endif

/* M / (2 sqrt(V) + e2) */
INLINE vf quotient(vf M, vf V, float e2, int exact) { (void)exact; return M / (root(V) * 2 + e2); }

#endif

/* ------------------------------------------------------------------ storage */

enum { FLOAT32, BFLOAT16, FLOAT16, CODES };

/* `first` is the place of data[0] in the tensor; exponents: those of 8-bit codes; `number`: what noise counts the tensor's
   element 0 as */
typedef struct { void *data; uint8_t *exponents; long first; int dtype, stochastic; uint32_t key; long number; } Array;

static long size_of(const Array *a) { return a->dtype == FLOAT32 ? 4 : 2; }
static char *place(const Array *a, long at) { return (char *)a->data + (at - a->first) * size_of(a); }

/* lowbias32, as in quant.py */
INLINE vu mix(vu x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}
static uint32_t mix1(uint32_t x) { return mix((vu){0} + x)[0]; }

/* To bfloat16: bits + noise, then the low half falls away: up with probability proportional to the distance. To nearest:
   half a unit in place of the noise, ties to even. Infinity has no low half to carry from; NaN becomes one that has none. */
INLINE vh to_bfloat16(vf x, const int stochastic, uint32_t key, uint64_t element) {
    vu nan = (vu)(x != x), bits = ((vu)x & ~nan) | (nan & 0x7fc00000u);
    if (stochastic) bits += mix((iota() + (uint32_t)element) ^ key) & 0xffffu;
    else bits += ((bits >> 16) & 1) + 0x7fffu;
    return __builtin_convertvector(bits >> 16, vh);
}
INLINE vf from_bfloat16(vh x) { return (vf)(__builtin_convertvector(x, vu) << 16); }

INLINE void widen(float *out, const uint16_t *x, long n, const int half) {
    long i = 0;
    vh y;
    for (; i + N <= n; i += N) memcpy(&y, x + i, sizeof y), store(out + i, half ? from_half(y) : from_bfloat16(y));
    if (i == n) return;
    uint16_t rest[N] = {0};
    float z[N];
    memcpy(rest, x + i, 2 * (n - i)), memcpy(&y, rest, sizeof y);
    store(z, half ? from_half(y) : from_bfloat16(y));
    memcpy(out + i, z, 4 * (n - i));
}

INLINE void narrow(uint16_t *out, const float *x, long n, const int half, const int stochastic, uint32_t key, long at) {
    long i = 0;
    for (; i + N <= n; i += N) {
        vh y = half ? to_half(load(x + i)) : to_bfloat16(load(x + i), stochastic, key, at + i);
        memcpy(out + i, &y, sizeof y);
    }
    if (i == n) return;
    float rest[N] = {0};
    memcpy(rest, x + i, 4 * (n - i));
    vh y = half ? to_half(load(rest)) : to_bfloat16(load(rest), stochastic, key, at + i);
    memcpy(out + i, &y, 2 * (n - i));
}

static void widen_all(float *out, const uint16_t *x, long n, int dtype) {
    if (dtype == FLOAT16) widen(out, x, n, 1);
    else widen(out, x, n, 0);
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
    else widen_all(buffer, (uint16_t *)place(a, at), n, a->dtype);
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

enum { GROUP = 32 };

/* A group's numbers, from its codes and its exponent byte */
INLINE void decode(float *out, const uint8_t *codes, uint8_t exponent, const int is_signed) {
    for (int i = 0; i < GROUP; i += N) {
        vb bytes;
        memcpy(&bytes, codes + i, sizeof bytes);
        vi code = from_bytes(bytes), small = is_signed ? code & 0x7f : code;
        vi bits = larger(small + (16 * exponent - (is_signed ? 112 : 240)), (vi){0}) << 19 & (small != 0);
        store(out + i, (vf)(is_signed ? bits | (code & 0x80) << 24 : bits));
    }
}

/* A group's codes; returns its exponent byte */
INLINE uint8_t encode(uint8_t *out, const float *x, const int is_signed, const int stochastic, uint32_t key, long at) {
    vi index[GROUP / N], top = {0};
    vu uniform[GROUP / N];
    for (int i = 0; i < GROUP / N; i++) {
        vi magnitude = (vi)load(x + i * N) & 0x7fffffff;
        uniform[i] = stochastic ? mix((iota() + (uint32_t)(at + i * N)) ^ key) & 0x7ffff : (vu){0} + 0x40000;
        /* what is finite stays below infinity's 4080 */
        vi finite = smaller((vi)(((vu)magnitude + uniform[i]) >> 19), (vi){0} + 4079);
        index[i] = choose(magnitude >= 0x7f800000, 4080 | ((magnitude > 0x7f800000) & 15), finite);
        top = larger(top, index[i] >> 4);
    }
    for (int w = N / 2; w > 0; w /= 2) top = larger(top, (vi)permute((vf)top, iota() ^ w));
    /* code 1 of a first moment: what lies below becomes it with the odds that keep the mean, or zero */
    vf smallest = (vf)(larger(16 * top - 111, (vi){0}) << 19);
    for (int i = 0; i < GROUP / N; i++) {
        vi bits = (vi)load(x + i * N), magnitude = bits & 0x7fffffff, code = index[i] - 16 * top + (is_signed ? 112 : 240);
        if (is_signed) {
            vi rises = (vf)magnitude > smallest * (__builtin_convertvector((vi)uniform[i], vf) * 0x1p-19f);
            code = choose(code >= 1, code, rises & 1) | (bits >> 24 & 0x80);
        } else code = larger(code, (vi){0} + 1);
        vb bytes = to_bytes(code & (magnitude != 0));
        memcpy(out + i * N, &bytes, sizeof bytes);
    }
    return top[0];
}

/* The n moments from `at` on, whole groups of rows of W, between codes and the floats x */
INLINE void groups(const Array *a, long W, long at, long n, float *x, const int is_signed, const int closing, const int stochastic) {
    uint8_t *codes = (uint8_t *)a->data + at, *exponent = a->exponents + at / W * ((W + GROUP - 1) / GROUP) + at % W / GROUP;
    for (long left = W - at % W; n > 0; exponent++) {
        long len = left < GROUP ? left : GROUP;
        if (len == GROUP) {
            if (closing) *exponent = encode(codes, x, is_signed, stochastic, a->key, a->number + at);
            else decode(x, codes, *exponent, is_signed);
        } else { /* a row's last group, filled up with zeros */
            uint8_t c[GROUP] = {0};
            float y[GROUP] = {0};
            if (closing) memcpy(y, x, 4 * len), *exponent = encode(c, y, is_signed, stochastic, a->key, a->number + at), memcpy(codes, c, len);
            else memcpy(c, codes, len), decode(y, c, *exponent, is_signed), memcpy(x, y, 4 * len);
        }
        left = left == len ? W : left - len;
        n -= len, codes += len, x += len, at += len;
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
