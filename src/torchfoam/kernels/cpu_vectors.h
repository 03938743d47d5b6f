/* Vectors of N floats: loads, shuffles, and the last line of the rule. What differs between instruction sets is here and
   nowhere else: AVX-512 (N = 16), AVX2 (N = 8), anything else (N = 4). Included by cpu_storage.h. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__)
#include <immintrin.h>
enum { N = 16, QUIET = 1 }; /* QUIET: whether what stepped() gives is */
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
enum { N = 8, QUIET = 0 };
#else
enum { N = 4, QUIET = 0 };
#endif
typedef float vf __attribute__((vector_size(4 * N)));
typedef int32_t vi __attribute__((vector_size(4 * N)));
typedef uint32_t vu __attribute__((vector_size(4 * N)));
typedef int16_t vs __attribute__((vector_size(4 * N))); /* 2N short numbers, in the same register */
typedef uint16_t vh __attribute__((vector_size(2 * N)));
typedef uint8_t vb __attribute__((vector_size(2 * N)));  /* 2N bytes */

/* 2N numbers: the first N and the next N, or those of even and those of odd place */
typedef struct { vf a, b; } Two;

INLINE vf load(const float *x) { vf y; memcpy(&y, x, sizeof y); return y; }
INLINE void store(float *x, vf y) { memcpy(x, &y, sizeof y); }
INLINE vf all(float x) { return x - (vf){0}; }
INLINE vu iota(void) { vu x; for (int i = 0; i < N; i++) x[i] = i; return x; }
INLINE vi choose(vi mask, vi a, vi b) { return (a & mask) | (b & ~mask); }
/* NaN as bfloat16 has it, so that noise may be added below */
INLINE vf quiet(vf x) { return (vf)choose(x == x, (vi)x, (vi){0} + 0x7fc00000); }
INLINE Two load_two(const float *x) { return (Two){load(x), load(x + N)}; }
INLINE void store_two(float *x, Two y) { store(x, y.a), store(x + N, y.b); }

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__)

INLINE vf even(vf a, vf b) { return _mm512_permutex2var_ps(a, (__m512i)(iota() * 2), b); }
INLINE vf odd(vf a, vf b) { return _mm512_permutex2var_ps(a, (__m512i)(iota() * 2 + 1), b); }
INLINE Two interleave(Two x) {
    const vu k = iota(), lanes = k / 2 + k % 2 * N;
    return (Two){_mm512_permutex2var_ps(x.a, (__m512i)lanes, x.b), _mm512_permutex2var_ps(x.a, (__m512i)(lanes + N / 2), x.b)};
}
INLINE vf permute(vf x, vu lanes) { return _mm512_permutexvar_ps((__m512i)lanes, x); }
INLINE vs from_bytes(vb x) { return (vs)_mm512_cvtepu8_epi16((__m256i)x); }
INLINE vb to_bytes(vs x) { return (vb)_mm512_cvtepi16_epi8((__m512i)x); }
INLINE vs larger(vs a, vs b) { return (vs)_mm512_max_epi16((__m512i)a, (__m512i)b); }
INLINE vs smaller(vs a, vs b) { return (vs)_mm512_min_epi16((__m512i)a, (__m512i)b); }
INLINE vf from_half(vh x) { return _mm512_cvtph_ps((__m256i)x); }
INLINE vh to_half(vf x) { return (vh)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
INLINE __m256i half_of(vs x) { return _mm256_max_epu16(_mm512_castsi512_si256((__m512i)x), _mm512_extracti64x4_epi64((__m512i)x, 1)); }

/* decay p - M / (sqrt(V) + e). The root and the quotient start from 14-bit estimates and take one Newton step each (relative
   error 2^-26 before rounding). Where V is 0, infinite or NaN this gives NaN; those lanes, and all if `exact`, are computed
   again in plain arithmetic. */
INLINE vf estimated(vf p, float decay, vf M, vf V, float e) {
    vf y = _mm512_rsqrt14_ps(V), s = V * y, near = s + all(e), x = _mm512_rcp14_ps(near), u = M * x;
    vf half = (vf)((vi)y - (1 << 23)), d = _mm512_fmadd_ps(half, _mm512_fnmadd_ps(s, s, V), near);
    return _mm512_fmsub_ps(p, all(decay), _mm512_fmadd_ps(u, _mm512_fnmadd_ps(d, x, all(1)), u));
}
INLINE vf again(vf z, int exact, vf p, float decay, vf M, vf V, float e) {
    __mmask16 which = exact ? 0xffff : _mm512_cmp_ps_mask(z, z, _CMP_UNORD_Q);
    return quiet(_mm512_mask_sub_ps(z, which, p * decay, M / (_mm512_sqrt_ps(V) + e)));
}
INLINE Two stepped(Two p, float decay, Two M, Two V, float e, int exact) {
    Two z = {estimated(p.a, decay, M.a, V.a, e), estimated(p.b, decay, M.b, V.b, e)};
    vf sum = z.a + z.b; /* NaN if either is */
    if (__builtin_expect(_mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q) | exact, 0))
        z = (Two){again(z.a, exact, p.a, decay, M.a, V.a, e), again(z.b, exact, p.b, decay, M.b, V.b, e)};
    return z;
}

#else

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

INLINE vf in_order(vf x) { return (vf)_mm256_permute4x64_pd((__m256d)x, 0xd8); }
INLINE vf even(vf a, vf b) { return in_order(_mm256_shuffle_ps(a, b, 0x88)); }
INLINE vf odd(vf a, vf b) { return in_order(_mm256_shuffle_ps(a, b, 0xdd)); }
INLINE Two interleave(Two x) {
    vf low = _mm256_unpacklo_ps(x.a, x.b), high = _mm256_unpackhi_ps(x.a, x.b);
    return (Two){_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
INLINE vf permute(vf x, vu lanes) { return _mm256_permutevar8x32_ps(x, (__m256i)lanes); }
INLINE vs from_bytes(vb x) { return (vs)_mm256_cvtepu8_epi16((__m128i)x); }
INLINE vb to_bytes(vs x) { return (vb)_mm_packus_epi16(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1)); }
INLINE vs larger(vs a, vs b) { return (vs)_mm256_max_epi16((__m256i)a, (__m256i)b); }
INLINE vs smaller(vs a, vs b) { return (vs)_mm256_min_epi16((__m256i)a, (__m256i)b); }
INLINE vf from_half(vh x) { return _mm256_cvtph_ps((__m128i)x); }
INLINE vh to_half(vf x) { return (vh)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
INLINE vf root(vf x) { return _mm256_sqrt_ps(x); }
INLINE __m256i half_of(vs x) { return (__m256i)x; }

#else

INLINE vf even(vf a, vf b) { return (vf){a[0], a[2], b[0], b[2]}; }
INLINE vf odd(vf a, vf b) { return (vf){a[1], a[3], b[1], b[3]}; }
INLINE Two interleave(Two x) {
    return (Two){{x.a[0], x.b[0], x.a[1], x.b[1]}, {x.a[2], x.b[2], x.a[3], x.b[3]}};
}
INLINE vf permute(vf x, vu lanes) { return (vf){x[lanes[0]], x[lanes[1]], x[lanes[2]], x[lanes[3]]}; }
INLINE vs from_bytes(vb x) { return __builtin_convertvector(x, vs); }
INLINE vb to_bytes(vs x) { return __builtin_convertvector(x, vb); }
INLINE vs larger(vs a, vs b) { vs more = a > b; return (a & more) | (b & ~more); }
INLINE vs smaller(vs a, vs b) { vs less = a < b; return (a & less) | (b & ~less); }
INLINE vf root(vf x) { for (int i = 0; i < N; i++) x[i] = sqrtf(x[i]); return x; }
INLINE vf from_half(vh x) { vf y; for (int i = 0; i < N; i++) { _Float16 h; memcpy(&h, (uint16_t *)&x + i, 2); y[i] = h; } return y; }
INLINE vh to_half(vf x) { vh y; for (int i = 0; i < N; i++) { _Float16 h = x[i]; memcpy((uint16_t *)&y + i, &h, 2); } return y; }
INLINE int largest(vs x) { int y = 0; for (int i = 0; i < 2 * N; i++) y = MAX(y, x[i]); return y; }

#endif

/* decay p - M / (sqrt(V) + e) */
INLINE Two stepped(Two p, float decay, Two M, Two V, float e, int exact) {
    (void)exact;
    return (Two){p.a * decay - M.a / (root(V.a) + e), p.b * decay - M.b / (root(V.b) + e)};
}

#endif

#if defined(__AVX2__)
/* the largest of 2N short numbers from 0 to 0x7fff: there is an instruction for the smallest of eight */
INLINE int largest(vs x) {
    __m256i y = half_of(x);
    __m128i z = _mm_max_epu16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    return 0xffff ^ _mm_extract_epi16(_mm_minpos_epu16(~z), 0);
}
#endif
