/* The dense operators on the CPU, one pass over memory each. Compiled at first use by `native.py` with the
   machine's own instructions; plain loops that a compiler vectorises, and intrinsics only for sign masks.
   Magnitudes are compared as integers: they order as the floats do, and nan comes out above inf. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define SPAN 256 /* values between two looks at the counter's high half; divides 2**32 */

static inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

static inline uint32_t hash(uint32_t x, uint32_t k1) {
    x = (x ^ (x >> 17)) * 0xED5AD4BBu;
    x = (x ^ (x >> 11)) * 0xAC4C1B51u + k1;
    x = (x ^ (x >> 15)) * 0x31848BABu;
    return x ^ (x >> 14);
}
static inline uint32_t high_key(int64_t i, uint32_t k1) { return k1 + (uint32_t)(i >> 32) * 0x9E3779B9u; }
static inline float unit(uint32_t h) { return (float)(int32_t)(h >> 8) * 5.9604644775390625e-08f; }

/* sums[0], sums[1]: of the values >= 0 and of the others; returns how many are >= 0. */
int64_t sl_sign_encode(const float *x, int64_t n, uint8_t *packed, double *sums) {
    int64_t count = 0, i = 0;
    double pos = 0, neg = 0;
    for (; i + 16 <= n;) {
        int64_t end = i + 4096 < n ? i + 4096 : n; /* float sums stay short, then go to double */
        float p[16] = {0}, q[16] = {0};
#if defined(__AVX512F__)
        __m512 pa = _mm512_setzero_ps(), qa = _mm512_setzero_ps(), zero = _mm512_setzero_ps();
        for (; i + 16 <= end; i += 16) {
            __m512 v = _mm512_loadu_ps(x + i);
            __mmask16 m = _mm512_cmp_ps_mask(v, zero, _CMP_GE_OQ);
            pa = _mm512_mask_add_ps(pa, m, pa, v);
            qa = _mm512_mask_add_ps(qa, (__mmask16)~m, qa, v);
            uint16_t w = (uint16_t)m;
            memcpy(packed + i / 8, &w, 2);
            count += __builtin_popcount(w);
        }
        _mm512_storeu_ps(p, pa);
        _mm512_storeu_ps(q, qa);
#elif defined(__AVX2__)
        __m256 zero = _mm256_setzero_ps(), pa = zero, qa = zero, pb = zero, qb = zero;
        for (; i + 16 <= end; i += 16) {
            __m256 v = _mm256_loadu_ps(x + i), w = _mm256_loadu_ps(x + i + 8);
            __m256 m = _mm256_cmp_ps(v, zero, _CMP_GE_OQ), o = _mm256_cmp_ps(w, zero, _CMP_GE_OQ);
            pa = _mm256_add_ps(pa, _mm256_and_ps(m, v));
            qa = _mm256_add_ps(qa, _mm256_andnot_ps(m, v));
            pb = _mm256_add_ps(pb, _mm256_and_ps(o, w));
            qb = _mm256_add_ps(qb, _mm256_andnot_ps(o, w));
            packed[i / 8] = (uint8_t)_mm256_movemask_ps(m);
            packed[i / 8 + 1] = (uint8_t)_mm256_movemask_ps(o);
            count += __builtin_popcount((packed[i / 8] << 8) | packed[i / 8 + 1]);
        }
        _mm256_storeu_ps(p, pa);
        _mm256_storeu_ps(p + 8, pb);
        _mm256_storeu_ps(q, qa);
        _mm256_storeu_ps(q + 8, qb);
#else
        for (; i + 16 <= end; i += 16) {
            uint32_t w = 0;
            for (int j = 0; j < 16; j++) {
                float v = x[i + j];
                int is = v >= 0;
                p[j] += is ? v : 0;
                q[j] += is ? 0 : v;
                w |= (uint32_t)is << j;
            }
            packed[i / 8] = (uint8_t)w;
            packed[i / 8 + 1] = (uint8_t)(w >> 8);
            count += __builtin_popcount(w);
        }
#endif
        for (int j = 0; j < 16; j++) { pos += p[j]; neg += q[j]; }
    }
    for (; i < n; i++) {
        int is = x[i] >= 0;
        if (i % 8 == 0) packed[i / 8] = 0;
        packed[i / 8] |= (uint8_t)(is << (i % 8));
        if (is) pos += x[i]; else neg += x[i];
        count += is;
    }
    sums[0] = pos;
    sums[1] = neg;
    return count;
}

void sl_sign_decode(const uint8_t *packed, int64_t n, float pos, float neg, float *out) {
    float table[256][8];
    for (int b = 0; b < 256; b++)
        for (int j = 0; j < 8; j++) table[b][j] = (b >> j) & 1 ? pos : neg;
    for (int64_t i = 0; i < n / 8; i++) memcpy(out + 8 * i, table[packed[i]], 32);
    if (n % 8) memcpy(out + n / 8 * 8, table[packed[n / 8]], 4 * (size_t)(n % 8));
}

/* A block's codes as bytes, and its scale. */
static void steps(const float *x, int64_t n, int64_t at, float top, int chance, int l2, uint32_t k0, uint32_t k1,
                  uint8_t *code, float *scale) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t key = (int32_t)(bits_of(x[i]) & 0x7FFFFFFFu);
        most = key > most ? key : most;
    }
    if (most >= 0x7F800000) {
        *scale = NAN;
        memset(code, 0, (size_t)n);
        return;
    }
    float size = float_of((uint32_t)most);
    if (l2 && size > 1e-35f) {
        float inv = 1.0f / size, acc[16] = {0}, sum = 0;
        int64_t i = 0;
        for (; i + 16 <= n; i += 16)
            for (int j = 0; j < 16; j++) acc[j] += (x[i + j] * inv) * (x[i + j] * inv);
        for (; i < n; i++) sum += (x[i] * inv) * (x[i] * inv);
        for (int j = 0; j < 16; j++) sum += acc[j];
        size = size * sqrtf(sum);
        size = size < 3e38f ? size : 3e38f;
    }
    float factor = size > 1e-35f ? top / size : 0.0f;
    *scale = size / top;
    if (!chance) { /* adding 1.5 * 2**23 leaves the rounded integer in the low bits */
        for (int64_t i = 0; i < n; i++) code[i] = (uint8_t)bits_of(x[i] * factor + 12582912.0f);
        return;
    }
    for (int64_t i = 0; i < n;) {
        int64_t end = i + SPAN - (at + i) % SPAN;
        end = end < n ? end : n;
        uint32_t base = (uint32_t)(at) + k0, high = high_key(at + i, k1);
        for (; i < end; i++) {
            float v = floorf(x[i] * factor + unit(hash(base + (uint32_t)i, high)));
            v = v < -top ? -top : v;
            v = v > top ? top : v;
            code[i] = (uint8_t)(int32_t)v;
        }
    }
}

static void pack4(const uint8_t *code, int64_t n, uint8_t *out) {
    for (int64_t j = 0; j < n; j++) out[j] = (uint8_t)((code[2 * j] & 15) | (code[2 * j + 1] << 4));
}

/* Blocks of up to 4096 values; four-bit blocks of an even size. */
void sl_quantize(const float *x, int64_t n, int bits, int64_t block, int chance, int l2, uint32_t k0, uint32_t k1,
                 uint8_t *packed, float *scales) {
    float top = (float)((1 << (bits - 1)) - 1);
    uint8_t code[4096 + 1];
    for (int64_t i = 0, b = 0; i < n; i += block, b++) {
        int64_t m = n - i < block ? n - i : block;
        uint8_t *to = bits == 8 ? packed + i : code;
        steps(x + i, m, i, top, chance, l2, k0, k1, to, scales + b);
        if (bits == 8) continue;
        code[m] = 0;
        pack4(code, (m + 1) / 2, packed + i / 2);
    }
}

/* The same of x + residual, and what the codes lose of that sum. A null residual is zeros. */
void sl_quantize_residual(const float *x, const float *residual, int64_t n, int bits, int64_t block, int chance, int l2,
                          uint32_t k0, uint32_t k1, uint8_t *packed, float *scales, float *rest) {
    float top = (float)((1 << (bits - 1)) - 1), sum[4096];
    uint8_t code[4096 + 1];
    for (int64_t i = 0, b = 0; i < n; i += block, b++) {
        int64_t m = n - i < block ? n - i : block;
        const float *whole = x + i;
        if (residual) {
            for (int64_t j = 0; j < m; j++) sum[j] = x[i + j] + residual[i + j];
            whole = sum;
        }
        steps(whole, m, i, top, chance, l2, k0, k1, code, scales + b);
        for (int64_t j = 0; j < m; j++) rest[i + j] = whole[j] - (float)(int8_t)code[j] * scales[b];
        code[m] = 0;
        if (bits == 8) memcpy(packed + i, code, (size_t)m);
        else pack4(code, (m + 1) / 2, packed + i / 2);
    }
}

static inline float low4(uint8_t byte) { return (float)(((byte & 15) ^ 8) - 8); }
static inline float high4(uint8_t byte) { return (float)(((byte >> 4) ^ 8) - 8); }

/* total = (total + decoded values) / divisor */
void sl_dequantize_onto(const uint8_t *packed, const float *scales, int64_t n, int bits, int64_t block, float divisor,
                        float *total) {
    for (int64_t i = 0, b = 0; i < n; i += block, b++) {
        int64_t m = n - i < block ? n - i : block;
        float scale = scales[b], *out = total + i;
        if (bits == 8) {
            const int8_t *code = (const int8_t *)packed + i;
            for (int64_t j = 0; j < m; j++) out[j] += (float)code[j] * scale;
        } else {
            const uint8_t *byte = packed + i / 2;
            for (int64_t j = 0; j < m / 2; j++) {
                out[2 * j] += low4(byte[j]) * scale;
                out[2 * j + 1] += high4(byte[j]) * scale;
            }
            if (m % 2) out[m - 1] += low4(byte[m / 2]) * scale;
        }
        if (divisor == 1.0f) continue;
        for (int64_t j = 0; j < m; j++) out[j] /= divisor;
    }
}

void sl_dequantize(const uint8_t *packed, const float *scales, int64_t n, int bits, int64_t block, float *out) {
    for (int64_t i = 0, b = 0; i < n; i += block, b++) {
        int64_t m = n - i < block ? n - i : block;
        float scale = scales[b];
        if (bits == 8) {
            const int8_t *code = (const int8_t *)packed + i;
            for (int64_t j = 0; j < m; j++) out[i + j] = (float)code[j] * scale;
            continue;
        }
        const uint8_t *byte = packed + i / 2;
        for (int64_t j = 0; j < m / 2; j++) {
            out[i + 2 * j] = low4(byte[j]) * scale;
            out[i + 2 * j + 1] = high4(byte[j]) * scale;
        }
        if (m % 2) out[i + m - 1] = low4(byte[m / 2]) * scale;
    }
}

void sl_ternary_encode(const float *x, int64_t n, float scale, int chance, uint32_t k0, uint32_t k1,
                       uint8_t *packed) {
    uint8_t code[SPAN];
    for (int64_t i = 0; i < n; i += SPAN) {
        int m = n - i < SPAN ? (int)(n - i) : SPAN;
        uint32_t base = (uint32_t)i + k0, high = high_key(i, k1);
        if (m < SPAN) memset(code, 0, SPAN);
        for (int j = 0; j < m; j++) {
            float v = x[i + j];
            float limit = chance ? unit(hash(base + (uint32_t)j, high)) * scale : scale;
            int32_t c = v > limit ? 1 : (v < -limit ? 3 : 0);
            code[j] = (uint8_t)((bits_of(v) & 0x7FFFFFFFu) >= 0x7F800000u ? 2 : c);
        }
        for (int j = 0; j < (m + 3) / 4; j++)
            packed[i / 4 + j] = (uint8_t)(code[4 * j] | code[4 * j + 1] << 2 | code[4 * j + 2] << 4 | code[4 * j + 3] << 6);
    }
}

void sl_ternary_decode(const uint8_t *packed, int64_t n, float scale, float *out) {
    float table[256][4], value[4] = {0.0f * scale, scale, NAN, -scale};
    for (int b = 0; b < 256; b++)
        for (int j = 0; j < 4; j++) table[b][j] = value[(b >> (2 * j)) & 3];
    for (int64_t i = 0; i < n / 4; i++) memcpy(out + 4 * i, table[packed[i]], 16);
    if (n % 4) memcpy(out + n / 4 * 4, table[packed[n / 4]], 4 * (size_t)(n % 4));
}

void sl_natural_encode(const float *x, int64_t n, int low, uint32_t k0, uint32_t k1, uint8_t *out) {
    for (int64_t i = 0; i < n; i += SPAN) {
        int m = n - i < SPAN ? (int)(n - i) : SPAN;
        uint32_t base = (uint32_t)i + k0, high = high_key(i, k1);
        for (int j = 0; j < m; j++) {
            uint32_t whole = bits_of(x[i + j]), key = whole & 0x7FFFFFFFu;
            int32_t code = (int32_t)((key + (hash(base + (uint32_t)j, high) & 0x7FFFFFu)) >> 23) - 127 - low + 1;
            code = code < 0 ? 0 : code;
            code = code > 126 ? 126 : code;
            code = key >= 0x7F800000u ? 127 : code;
            out[i + j] = (uint8_t)(code | (int32_t)((whole >> 24) & 128u));
        }
    }
}

/* Keys above the limit, the first `capacity` of them; returns how many were written. */
int64_t sl_compact(const float *x, int64_t n, int32_t limit, int64_t capacity, float *values, int32_t *indices) {
    int64_t at = 0;
    for (int64_t i = 0; i < n && at < capacity; i += SPAN) {
        int m = n - i < SPAN ? (int)(n - i) : SPAN;
        int32_t found = 0;
        for (int j = 0; j < m; j++) found += (int32_t)(bits_of(x[i + j]) & 0x7FFFFFFFu) > limit;
        if (!found) continue;
        for (int j = 0; j < m && at < capacity; j++)
            if ((int32_t)(bits_of(x[i + j]) & 0x7FFFFFFFu) > limit) {
                values[at] = x[i + j];
                indices[at++] = (int32_t)(i + j);
            }
    }
    return at;
}

void sl_natural_decode(const uint8_t *codes, int64_t n, int low, float *out) {
    float table[256];
    for (int b = 0; b < 256; b++) {
        uint32_t e = (uint32_t)(b & 127), sign = (uint32_t)(b & 128) << 24;
        uint32_t whole = e == 0 ? 0u : e == 127 ? 0x7FC00000u : (uint32_t)((int)e - 1 + low + 127) << 23;
        table[b] = float_of(whole | sign);
    }
    for (int64_t i = 0; i < n; i++) out[i] = table[codes[i]];
}

/* The digit of the k-th largest among keys whose bits above `shift + width` are `prefix`; *k becomes its rank there. */
static uint32_t digit(const float *x, int64_t n, uint32_t prefix, int shift, int width, int64_t *k) {
    int64_t bins[4][2048] = {{0}}; /* four, because increments of one place in a row wait for each other */
    uint32_t mask = (1u << width) - 1;
    for (int64_t i = 0; i < n; i++) {
        uint32_t key = bits_of(x[i]) & 0x7FFFFFFFu;
        if (key >> (shift + width) == prefix) bins[i & 3][(key >> shift) & mask]++;
    }
    uint32_t d = mask;
    for (;; d--) {
        int64_t here = bins[0][d] + bins[1][d] + bins[2][d] + bins[3][d];
        if (*k <= here || d == 0) return d;
        *k -= here;
    }
}

/* The k largest magnitudes in the order of position; of equal ones the first. */
void sl_topk(const float *x, int64_t n, int64_t k, float *values, int32_t *indices) {
    int64_t ties = k, at = 0;
    uint32_t limit = digit(x, n, 0, 20, 11, &ties);
    limit = limit << 10 | digit(x, n, limit, 10, 10, &ties);
    limit = limit << 10 | digit(x, n, limit, 0, 10, &ties);
    for (int64_t i = 0; i < n && at < k; i += SPAN) {
        int m = n - i < SPAN ? (int)(n - i) : SPAN;
        int32_t found = 0;
        for (int j = 0; j < m; j++) found += (bits_of(x[i + j]) & 0x7FFFFFFFu) >= limit;
        if (!found) continue;
        for (int j = 0; j < m && at < k; j++) {
            uint32_t key = bits_of(x[i + j]) & 0x7FFFFFFFu;
            if (key < limit || (key == limit && ties-- <= 0)) continue;
            values[at] = x[i + j];
            indices[at++] = (int32_t)(i + j);
        }
    }
}
