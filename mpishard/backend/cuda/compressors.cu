// What compressed gradients look like on the wire: see mpishard/compression/kernels.py, whose loops give the same bytes.
//
// Numbers below 2^-126 count here as on the host, so that what could meet one is written by the functions of the
// prelude for that.
//
// Those that compress also write to `rest`, if `keeps_rest` is not 0, the values minus the decompressed values.  Those
// that decompress add to the values if `adds` is not 0, and else overwrite them.

#define MOST_WARPS 32

__device__ __forceinline__ bool is_finite(double x) { return x - x == 0.0; }
__device__ __forceinline__ REAL as_real(float x) {
    REAL result;
    narrow(widened(x), &result);
    return result;
}
__device__ __forceinline__ void put(REAL* value, REAL term, int adds) { *value = adds ? plus(*value, term) : term; }

// NaN has the bits that the host sends; what arithmetic makes of it has others.
__device__ __forceinline__ float sent(float scale) { return scale == scale ? scale : __uint_as_float(0x7fc00000u); }
__device__ __forceinline__ void send(float16* half, float x) {
    if (x == x) store(half, x);
    else half->bits = (unsigned short)((__float_as_uint(x) >> 16 & 0x8000u) | 0x7e00u);
}
__device__ __forceinline__ void send(bfloat16* half, float x) { store(half, x); }

// `largest`: what a larger finite value is sent as.
extern "C" __global__ void to_halves(
    const REAL* values, STORED* halves, REAL* rest, long long count, double largest, int keeps_rest) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const REAL x = values[i];
    REAL top;
    narrow(largest, &top);
    REAL y = x > top ? top : x;
    y = y < -top ? -top : y;
    float single;
    narrow(widened(is_finite(widened(x)) ? y : x), &single);
    send(halves + i, single);
    if (keeps_rest) rest[i] = minus(x, as_real(load(halves + i)));
}

extern "C" __global__ void from_halves(const STORED* halves, REAL* values, long long count, int adds) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) put(values + i, as_real(load(halves + i)), adds);
}

// A block of threads has a run of `run` elements, which share a scale.
extern "C" __global__ void to_int8(
    const REAL* values, float* scales, unsigned char* codes, REAL* rest, long long count, int run, int keeps_rest) {
    __shared__ unsigned long long of_warps[MOST_WARPS];
    const long long begin = (long long)blockIdx.x * run, left = count - begin;
    const int size = left < run ? (int)left : run, warps = blockDim.x / WARP;
    unsigned long long top = 0;
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        const unsigned long long bits = magnitude(values[begin + i]);
        top = bits > top ? bits : top;
    }
    top = warp_max(top);
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = top;
    __syncthreads();
    for (int w = 0; w < warps; w++) top = of_warps[w] > top ? of_warps[w] : top;
    REAL largest;
    from_magnitude(top, &largest);
    float own;
    narrow(widened(over(largest, (REAL)127)), &own);
    const bool usable = is_finite(widened(own)), is_zero = widened(own) == 0.0;
    const REAL scale = as_real(own);
    if (threadIdx.x == 0) scales[blockIdx.x] = sent(own);
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        const REAL x = values[begin + i];
        REAL level = 1;
        if (usable) {
            level = is_zero ? (REAL)0 : (REAL)rint(over(x, scale));
            level = level > (REAL)127 ? (REAL)127 : level;
            level = level < (REAL)-127 ? (REAL)-127 : level;
        }
        codes[begin + i] = (unsigned char)(int)level;
        if (keeps_rest) rest[begin + i] = minus(x, times((REAL)(int)level, scale));  // a level of -0 is sent as 0
    }
}

extern "C" __global__ void from_int8(
    const float* scales, const unsigned char* codes, REAL* values, long long count, int run, int adds) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const REAL scale = as_real(scales[i / run]);
    put(values + i, times((REAL)(signed char)codes[i], scale), adds);
}

// The scales alone: the mean magnitudes, and what one bit for each element leaves.
extern "C" __global__ void to_sign_scales(
    const REAL* values, float* scales, REAL* rest, long long count, int run, int keeps_rest) {
    __shared__ double of_warps[MOST_WARPS];
    const long long begin = (long long)blockIdx.x * run, left = count - begin;
    const int size = left < run ? (int)left : run, warps = blockDim.x / WARP;
    double total = 0.0;
    for (int i = threadIdx.x; i < size; i += blockDim.x) total += fabs(widened(values[begin + i]));
    total = warp_sum(total);
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = total;
    __syncthreads();
    total = 0.0;
    for (int w = 0; w < warps; w++) total += of_warps[w];
    float own;
    narrow(total / size, &own);
    const REAL scale = as_real(own);
    if (threadIdx.x == 0) scales[blockIdx.x] = sent(own);
    for (int i = threadIdx.x; keeps_rest && i < size; i += blockDim.x) {
        const REAL x = values[begin + i];
        rest[begin + i] = widened(x) >= 0.0 ? minus(x, scale) : plus(x, scale);
    }
}

// A thread has a byte: eight signs, the first in the highest bit, 1 for what is not negative.
extern "C" __global__ void to_signs(const REAL* values, unsigned char* signs, long long count) {
    const long long k = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (8 * k >= count) return;
    int byte = 0;
    for (int j = 0; j < 8; j++) byte = 2 * byte + (8 * k + j < count && widened(values[8 * k + j]) >= 0.0 ? 1 : 0);
    signs[k] = (unsigned char)byte;
}

extern "C" __global__ void from_signs(
    const float* scales, const unsigned char* signs, REAL* values, long long count, int run, int adds) {
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const REAL scale = as_real(scales[i / run]);
    put(values + i, times(signs[i / 8] & (128 >> (int)(i % 8)) ? (REAL)1 : (REAL)-1, scale), adds);
}
