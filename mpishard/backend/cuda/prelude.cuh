// What every CUDA source of mpishard may use: half precision without CUDA's headers, and sums over threads.
//
// No header is included, so that the compiler at run time (NVRTC) needs none, and so that a compiler for the host can
// read the same text where the tests give it CUDA's words.

#define WARP 32
#define EVERY_LANE 0xffffffffu

// Numbers of 16 bits, by their bits.  The sources compute in float and convert where they load and store.
struct float16 {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};

#ifndef MPISHARD_ON_HOST  // else the tests define them
__device__ __forceinline__ unsigned short half_bits(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ __forceinline__ float half_value(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
#endif

// Round to nearest, ties to even; NaN stays NaN.
__device__ __forceinline__ unsigned short bfloat16_bits(float x) {
    unsigned int bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (unsigned short)((bits >> 16) | 0x40u);
    return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

__device__ __forceinline__ float load(const float* p) { return *p; }
__device__ __forceinline__ double load(const double* p) { return *p; }
__device__ __forceinline__ float load(const float16* p) { return half_value(p->bits); }
__device__ __forceinline__ float load(const bfloat16* p) { return __uint_as_float((unsigned int)p->bits << 16); }
__device__ __forceinline__ void store(float* p, float x) { *p = x; }
__device__ __forceinline__ void store(double* p, double x) { *p = x; }
__device__ __forceinline__ void store(float16* p, float x) { p->bits = half_bits(x); }
__device__ __forceinline__ void store(bfloat16* p, float x) { p->bits = bfloat16_bits(x); }

// Two numbers that lie together, at an address that is a multiple of their size.  Processors from 8.0 on round both in
// one instruction: with the same bits but for NaN, which becomes 0x7fff whatever it was.
template <typename T, typename X>
__device__ __forceinline__ void store_two(T* p, X x, X y) {
    store(p, x);
    store(p + 1, y);
}
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void store_two(float16* p, float x, float y) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(*(unsigned int*)p) : "f"(y), "f"(x));
}
__device__ __forceinline__ void store_two(bfloat16* p, float x, float y) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(*(unsigned int*)p) : "f"(y), "f"(x));
}
#endif

#ifndef MPISHARD_ON_HOST  // else the tests define them
// 16 bytes from global to shared memory, which the thread itself may read after `end_copies`, and others after a
// barrier behind that.  From processor 8.0 on they are on their way meanwhile, and pass no registers.
__device__ __forceinline__ void begin_copy(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    const unsigned int place = (unsigned int)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(place), "l"(from) : "memory");
#else
    *(uint4*)to = *(const uint4*)from;
#endif
}
__device__ __forceinline__ void end_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
// A store of what nobody reads soon: it leaves the cache first.
template <typename P>
__device__ __forceinline__ void store_last(P* p, const P& x) {
    if (sizeof(P) == 16) __stcs((uint4*)p, *(const uint4*)&x);
    else if (sizeof(P) == 8) __stcs((uint2*)p, *(const uint2*)&x);
    else *p = x;
}
#endif

// CuPy compiles with -ftz=true: arithmetic in float takes numbers below 2^-126 for zero.  These functions do not, for
// results that must have the bits of the host; comparisons of such numbers are exact of `widened` ones.
template <typename T>
__device__ __forceinline__ double widened(T x) { return (double)x; }
__device__ __forceinline__ void narrow(double x, double* p) { *p = x; }
template <typename T>
__device__ __forceinline__ T plus(T x, T y) { return x + y; }
template <typename T>
__device__ __forceinline__ T minus(T x, T y) { return x - y; }
template <typename T>
__device__ __forceinline__ T times(T x, T y) { return x * y; }
template <typename T>
__device__ __forceinline__ T over(T x, T y) { return x / y; }
#ifdef MPISHARD_ON_HOST  // which flushes nothing
__device__ __forceinline__ void narrow(double x, float* p) { *p = (float)x; }
#else
template <>
__device__ __forceinline__ double widened(float x) {
    double y;
    asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ void narrow(double x, float* p) { asm("cvt.rn.f32.f64 %0, %1;" : "=f"(*p) : "d"(x)); }
template <>
__device__ __forceinline__ float plus(float x, float y) {
    float z;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
template <>
__device__ __forceinline__ float minus(float x, float y) {
    float z;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
template <>
__device__ __forceinline__ float times(float x, float y) {
    float z;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
template <>
__device__ __forceinline__ float over(float x, float y) {
    float z;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
#endif

// Over the lanes of a warp; every lane gets the result.
template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
    for (int distance = WARP / 2; distance; distance /= 2) x += __shfl_xor_sync(EVERY_LANE, x, distance);
    return x;
}
template <typename T>
__device__ __forceinline__ T warp_max(T x) {
    for (int distance = WARP / 2; distance; distance /= 2) {
        T other = __shfl_xor_sync(EVERY_LANE, x, distance);
        x = other > x ? other : x;
    }
    return x;
}

// As many elements as one load or store moves.
template <typename T>
struct __align__(16) Pack {
    T of[16 / sizeof(T)];
};
template <typename T>
__device__ __forceinline__ bool is_aligned(const T* p) {
    return ((unsigned long long)p & 15) == 0;
}

// Of ranges cut into chunks, given by the number of their first chunks, in ascending order: the one that has a chunk.
// Ranges without elements have no chunk; the next one has the same first chunk.
__device__ __forceinline__ int range_of(const long long* first, int ranges, long long chunk) {
    int low = 0, high = ranges;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (first[middle] <= chunk) low = middle;
        else high = middle;
    }
    return low;
}

// Without their sign, numbers order like the integers of the same bits, infinity and NaN on top.
__device__ __forceinline__ unsigned long long magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ unsigned long long magnitude(double x) {
    return (unsigned long long)__double_as_longlong(x) & 0x7fffffffffffffffull;
}
__device__ __forceinline__ void from_magnitude(unsigned long long bits, float* x) {
    *x = __uint_as_float((unsigned int)bits);
}
__device__ __forceinline__ void from_magnitude(unsigned long long bits, double* x) {
    *x = __longlong_as_double((long long)bits);
}
