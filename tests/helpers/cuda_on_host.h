// CUDA's words for a compiler of the host: the threads of a block are fibers that take turns.
//
// Blocks run one after another.  A fiber runs until it comes to a barrier; when all fibers of a warp, or of the block,
// that have not ended wait at one, they go on.  Fibers that wait for each other at different barriers end the process
// with a message.  MPISHARD_CUDA_BACKWARDS lets the last thread of each round run first: a missing barrier then gives
// other numbers.  With MPISHARD_CHECKED all that cuda_checks.cpp knows of is checked.
//
// C's headers only (compile with -nostdinc++): those of C++ take most of the time of a compilation.
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define MPISHARD_ON_HOST
#define __global__
#define __device__
#define __host__
#ifdef MPISHARD_CHECKED
#define __forceinline__ inline __attribute__((always_inline))  // so that each barrier has a place of its own
#else
#define __forceinline__ inline
#endif
#define __restrict__
#define __launch_bounds__(...)
#ifdef MPISHARD_CHECKED
#define __shared__ static __attribute__((aligned(1 << 16)))  // with gaps, so that nobody reaches the next one unseen
#else
#define __shared__ static  // blocks run one after another
#endif
#define __align__(n) alignas(n)

// As in CUDA, functions of a float are floats.  C's own would take it for a double, and nobody would see it.
#define OF_FLOAT(name) \
    static inline float name(float x) { return name##f(x); }
#define OF_FLOATS(name) \
    static inline float name(float x, float y) { return name##f(x, y); }
OF_FLOAT(acos) OF_FLOAT(acosh) OF_FLOAT(asin) OF_FLOAT(asinh) OF_FLOAT(atan) OF_FLOAT(atanh) OF_FLOAT(cbrt)
OF_FLOAT(ceil) OF_FLOAT(cos) OF_FLOAT(cosh) OF_FLOAT(erf) OF_FLOAT(erfc) OF_FLOAT(exp) OF_FLOAT(exp2) OF_FLOAT(expm1)
OF_FLOAT(fabs) OF_FLOAT(floor) OF_FLOAT(lgamma) OF_FLOAT(log) OF_FLOAT(log10) OF_FLOAT(log1p) OF_FLOAT(log2)
OF_FLOAT(logb) OF_FLOAT(nearbyint) OF_FLOAT(rint) OF_FLOAT(round) OF_FLOAT(sin) OF_FLOAT(sinh) OF_FLOAT(sqrt)
OF_FLOAT(tan) OF_FLOAT(tanh) OF_FLOAT(tgamma) OF_FLOAT(trunc)
OF_FLOATS(atan2) OF_FLOATS(copysign) OF_FLOATS(fdim) OF_FLOATS(fmax) OF_FLOATS(fmin) OF_FLOATS(fmod) OF_FLOATS(hypot)
OF_FLOATS(nextafter) OF_FLOATS(pow) OF_FLOATS(remainder)
static inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
static inline float ldexp(float x, int exponent) { return ldexpf(x, exponent); }
static inline float abs(float x) { return fabsf(x); }
// What GPUs approximate.
#define __expf expf
static inline float __fdividef(float x, float y) { return x / y; }
static inline double abs(double x) { return fabs(x); }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline double __dmul_rn(double x, double y) { return x * y; }

struct Dimensions {
    unsigned int x, y, z;
};
static Dimensions threadIdx, blockIdx, blockDim, gridDim;

// Of cuda_checks.cpp.
namespace checks {
#ifdef MPISHARD_CHECKED
extern bool watching;  // whether a CUDA function runs, and not what plays the GPU for it
bool report(const char* what, const void* place);  // true: it will be told
void atomic(const void* p, size_t bytes, const void* place);
void allow(const void* first, size_t bytes);
void share(void* variable, size_t bytes, size_t size);
template <typename T>
struct ElementOf {
    typedef T Type;
};
template <typename T, size_t N>
struct ElementOf<T[N]> : ElementOf<T> {};
void use_stacks(const void* first, size_t bytes);
void resume(unsigned int block, unsigned int thread, unsigned int barriers, unsigned int warp_barriers);
#else
static bool watching;
static bool report(const char*, const void*) { return false; }
static void atomic(const void*, size_t, const void*) {}
static void share(void*, size_t, size_t) {}
static void allow(const void*, size_t) {}
static void use_stacks(const void*, size_t) {}
static void resume(unsigned int, unsigned int, unsigned int, unsigned int) {}
#endif
// Functions that play the GPU: what they do themselves is not watched, and they know where they were called.
#define OF_GPU __attribute__((noinline, no_sanitize("thread")))
#define CALLER __builtin_return_address(0)
struct Pause {
    OF_GPU Pause() { watching = false; }
    OF_GPU ~Pause() { watching = true; }
};
template <typename Function, typename... Given>
OF_GPU static void call(Function function, Given... given) {
    watching = true;
    function(given...);
    watching = false;
}
}  // namespace checks

namespace host {
enum State { RUNNABLE, AT_WARP, AT_BLOCK, ENDED };
// A thread of one block after another: to start a fiber costs two system calls, to let one go on costs none.
struct Fiber {
    jmp_buf jump;
    State state;
    bool begun;
    unsigned int exchanges;  // in this block
    // Of the barrier at which it waits.
    const void* place;
    unsigned int mask;
    bool orders_memory;
};
static const size_t STACK = 1 << 16;
static const unsigned int MOST = 1024;  // threads of a block, as in CUDA
static Fiber fibers[MOST];
static char* stacks;
// What lanes show each other, in every other exchange: who writes for the next one has still to let others read.
static unsigned long long slots[2][MOST];
static void (*function)(void**);
static void** arguments;
static jmp_buf scheduler;
static unsigned int current;
static unsigned int barriers, warp_barriers[32];  // that the threads of the block, or of a warp, have passed
static unsigned int shared_bytes;                   // of the extern __shared__ array of this launch
// Copies that the threads have begun.
struct Copy {
    void* to;
    const void* from;
};
static Copy copies[MOST][64];
static unsigned int begun[MOST];

static void wait(State state, const void* place, unsigned int mask = 0, bool orders_memory = true) {
    Fiber& own = fibers[current];
    own.state = state, own.place = place, own.mask = mask, own.orders_memory = orders_memory;
    if (!_setjmp(own.jump)) _longjmp(scheduler, 1);
}
static void begin() {
    for (;;) {
        function(arguments);
        wait(ENDED, nullptr);
    }
}
static void resume(unsigned int thread) {
    current = thread;
    threadIdx = {thread % blockDim.x, 0, 0};
    checks::resume(blockIdx.x, thread, barriers, warp_barriers[thread / 32]);
    Fiber& fiber = fibers[thread];
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.jump, 1);
    fiber.begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks + STACK * thread;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, begin, 0);
    setcontext(&context);
}
// Whether all threads wait at one barrier: those of a block, or those of a warp that the masks name.
static void check(unsigned int first, unsigned int last, State state) {
    const Fiber& any = fibers[first];
    bool same = state == AT_BLOCK || (any.mask == 0xffffffffu && last == first + 32);
    for (unsigned int i = first; i < last && same; i++)
        same = fibers[i].state == state && fibers[i].place == any.place && fibers[i].mask == any.mask;
    if (same) return;
    for (unsigned int i = first; i < last; i++) {
        const Fiber& one = fibers[i];
        if (one.state != state) continue;
        checks::resume(blockIdx.x, i, barriers, 0);
        if (state == AT_WARP && !(one.mask >> (i - first) & 1))
            checks::report("a mask without the lane itself", one.place);
        for (unsigned int j = first; j < (state == AT_WARP ? first + 32 : last); j++) {
            if (state == AT_WARP && !(one.mask >> (j - first) & 1)) continue;
            if (j >= last || fibers[j].state == ENDED)
                checks::report("a barrier or shuffle of threads that are not there", one.place);
            else if (fibers[j].place != one.place || fibers[j].mask != one.mask)
                checks::report("threads wait at different barriers or shuffles", one.place);
        }
    }
}
// Lets those of [first, last) that have not ended go on if all of them wait at `state`.
static bool release(unsigned int first, unsigned int last, State state) {
    bool any = false;
    for (unsigned int i = first; i < last; i++) {
        if (fibers[i].state != state && fibers[i].state != ENDED) return false;
        any |= fibers[i].state == state;
    }
    if (!any) return false;
    check(first, last, state);
    bool orders_memory = false;
    for (unsigned int i = first; i < last; i++) {
        if (fibers[i].state != state) continue;
        fibers[i].state = RUNNABLE;
        orders_memory |= fibers[i].orders_memory;
    }
    (state == AT_WARP ? warp_barriers[first / 32] : barriers) += orders_memory;
    return true;
}
static void run_block(unsigned int threads, bool backwards) {
    for (unsigned int i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        if (fiber.state != ENDED) fiber.begun = false;  // those of a block that could not end are started anew
        fiber.state = RUNNABLE, fiber.exchanges = 0;
        begun[i] = 0;
    }
    barriers = 0;
    for (unsigned int& count : warp_barriers) count = 0;
    for (;;) {
        for (unsigned int i = 0; i < threads; i++) {
            unsigned int thread = backwards ? threads - 1 - i : i;
            if (fibers[thread].state == RUNNABLE) resume(thread);
        }
        bool released = false, ended = true;
        for (unsigned int first = 0; first < threads; first += 32)
            released |= release(first, first + 32 < threads ? first + 32 : threads, AT_WARP);
        released |= release(0, threads, AT_BLOCK);
        for (unsigned int i = 0; i < threads; i++) ended &= fibers[i].state == ENDED;
        if (ended) return;
        if (!released) {
            const char* const what = "threads of a block wait for each other at different barriers";
            const void* place = nullptr;
            for (unsigned int i = 0; i < threads; i++)
                if (fibers[i].state == AT_BLOCK) place = fibers[i].place;
            if (checks::report(what, place)) return;
            fprintf(stderr, "%s\n", what);
            abort();
        }
    }
}
static void run(
    unsigned int blocks, unsigned int threads, unsigned int first, unsigned int bytes, void (*called)(void**),
    void** given) {
    shared_bytes = bytes;
    bool backwards = getenv("MPISHARD_CUDA_BACKWARDS") != nullptr;
    if (!stacks) stacks = (char*)malloc(STACK * MOST);
    function = called;
    arguments = given;
    checks::use_stacks(stacks, STACK * MOST);
    Dimensions* const places[] = {&threadIdx, &blockIdx, &blockDim, &gridDim};
    for (Dimensions* each : places) checks::allow(each, sizeof(Dimensions));
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    for (unsigned int block = first; block < blocks; block++) {
        blockIdx = {backwards ? blocks - 1 - (block - first) : block, 0, 0};
        run_block(threads, backwards);
    }
}
template <typename T>
static T exchange(T x, unsigned int lane, unsigned int mask, const void* place) {
    static_assert(sizeof(T) <= sizeof(unsigned long long), "shuffles move up to 8 bytes");
    unsigned int own = current, first = own / 32 * 32;
    unsigned long long* shown = slots[fibers[own].exchanges++ % 2];
    memcpy(&shown[own], &x, sizeof(T));
    if (lane < 32 && !(mask >> lane & 1)) checks::report("a shuffle from a lane that its mask does not name", place);
    wait(AT_WARP, place, mask, false);
    unsigned int other = first + lane;
    T result = x;
    if (lane < 32 && other < blockDim.x) memcpy(&result, &shown[other], sizeof(T));
    return result;
}
}  // namespace host

// The extern __shared__ array of a launch, of elements of this size.
namespace host {
OF_GPU static void* shared_memory(size_t size) {
    alignas(16) static char memory[1 << 18];
    if (shared_bytes) checks::share(memory, shared_bytes, size);
    return memory;
}
OF_GPU static bool next_copy(Copy* copy) {
    checks::Pause pause;
    if (begun[current] == 0) return false;
    *copy = copies[current][--begun[current]];
    return true;
}
}  // namespace host
struct alignas(16) SixteenBytes {
    unsigned int of[4];
};
// As late as can be, and the last one first.
OF_GPU static void begin_copy(void* to, const void* from) {
    checks::Pause pause;
    if (host::begun[host::current] == 64) abort();
    host::copies[host::current][host::begun[host::current]++] = {to, from};
}
static inline void end_copies() {
    host::Copy copy;
    while (host::next_copy(&copy)) *(SixteenBytes*)copy.to = *(const SixteenBytes*)copy.from;
}
template <typename P>
static void store_last(P* p, const P& x) {
    *p = x;
}

OF_GPU static void __syncthreads() {
    checks::Pause pause;
    host::wait(host::AT_BLOCK, CALLER);
}
OF_GPU static void __syncwarp(unsigned int mask = 0xffffffffu) {
    checks::Pause pause;
    host::wait(host::AT_WARP, CALLER, mask);
}
template <typename T>
OF_GPU static T __shfl_sync(unsigned int mask, T x, int lane) {
    checks::Pause pause;
    return host::exchange(x, (unsigned int)lane % 32, mask, CALLER);
}
template <typename T>
OF_GPU static T __shfl_xor_sync(unsigned int mask, T x, int bits) {
    checks::Pause pause;
    return host::exchange(x, (host::current % 32) ^ (unsigned int)bits, mask, CALLER);
}
template <typename T>
OF_GPU static T __shfl_down_sync(unsigned int mask, T x, unsigned int distance) {
    checks::Pause pause;
    return host::exchange(x, host::current % 32 + distance, mask, CALLER);
}
template <typename T, typename U>
OF_GPU static T atomicAdd(T* p, U x) {
    checks::atomic(p, sizeof(T), CALLER);
    checks::Pause pause;
    T old = *p;
    *p = old + (T)x;
    return old;
}
template <typename T, typename U>
OF_GPU static T atomicMax(T* p, U x) {
    checks::atomic(p, sizeof(T), CALLER);
    checks::Pause pause;
    T old = *p;
    if ((T)x > old) *p = (T)x;
    return old;
}
template <typename To, typename From>
static To same_bits(From x) {
    To result;
    memcpy(&result, &x, sizeof(To));
    return result;
}
static inline unsigned int __float_as_uint(float x) { return same_bits<unsigned int>(x); }
static inline float __uint_as_float(unsigned int x) { return same_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return same_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return same_bits<double>(x); }
static inline void __threadfence() {}
template <typename T>
static T __ldg(const T* p) {
    return *p;
}

// Conversions of IEEE 754 half precision: to nearest, ties to even.
static inline float half_value(unsigned short bits) {
    unsigned int sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 0x1fu, fraction = bits & 0x3ffu;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    float magnitude = exponent ? ldexpf((float)(fraction | 0x400u), (int)exponent - 25) : ldexpf((float)fraction, -24);
    return sign ? -magnitude : magnitude;
}
static inline unsigned short half_bits(float x) {
    unsigned int bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u;
    float magnitude = fabsf(x);
    if (magnitude != magnitude) return (unsigned short)(sign | 0x7fffu);
    if (magnitude >= 65520.0f) return (unsigned short)(sign | 0x7c00u);
    if (magnitude < 6.103515625e-05f)  // below the smallest normal number: multiples of 2^-24
        return (unsigned short)(sign | (unsigned int)rintf(ldexpf(magnitude, 24)));
    unsigned int rounded = (bits & 0x7fffffffu) + 0xfffu + (bits >> 13 & 1u);
    return (unsigned short)(sign | ((rounded - 0x38000000u) >> 13));
}
