// Largest absolute values and pre-rounded sums of squares, see exact.py.  A block has one chunk of one range; the
// table of ranges is that of ranges.py.  Nothing here depends on an order: maxima never do, and the additions are exact.

#define MOST_WARPS 32

struct Maximum {
    unsigned long long top;
    __device__ void take(REAL x) {
        unsigned long long bits = magnitude(x);
        top = bits > top ? bits : top;
    }
};

struct Squares {
    double scale, coarse, fine, sum, rest;
    __device__ void take(REAL value) {
        double x = widened(value) * scale, square = x * x;
        double rounded = (square + coarse) - coarse;
        sum += rounded;
        rest += ((square - rounded) + fine) - fine;
    }
};

// Every element of a chunk, by one thread of the block.
template <typename Taker>
__device__ __forceinline__ void take_all(Taker& taker, const REAL* x, int size) {
    const int width = sizeof(Pack<REAL>) / sizeof(REAL), packed = is_aligned(x) ? size / width * width : 0;
    for (int i = threadIdx.x * width; i < packed; i += blockDim.x * width) {
        Pack<REAL> pack = *(const Pack<REAL>*)(x + i);
        for (int j = 0; j < width; j++) taker.take(pack.of[j]);
    }
    for (int i = packed + threadIdx.x; i < size; i += blockDim.x) taker.take(x[i]);
}

__device__ __forceinline__ void add_maximum(unsigned long long top, unsigned long long* target) {
    __shared__ unsigned long long of_warps[MOST_WARPS];
    top = warp_max(top);
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = top;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < (int)(blockDim.x / WARP); w++) top = of_warps[w] > top ? of_warps[w] : top;
        atomicMax(target, top);
    }
}

// The first thread writes the sums over the block.
__device__ __forceinline__ void write_sums(double sum, double rest, double* target) {
    __shared__ double of_warps[2 * MOST_WARPS];
    sum = warp_sum(sum);
    rest = warp_sum(rest);
    if (threadIdx.x % WARP == 0) {
        of_warps[2 * (threadIdx.x / WARP)] = sum;
        of_warps[2 * (threadIdx.x / WARP) + 1] = rest;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < (int)(blockDim.x / WARP); w++) {
            sum += of_warps[2 * w];
            rest += of_warps[2 * w + 1];
        }
        target[0] = sum;
        target[1] = rest;
    }
}

// tops[range] = max(tops[range], the largest of the range), as bits.
extern "C" __global__ void largest_of_ranges(const long long* table, unsigned long long* tops, int ranges, int chunk) {
    const long long *sizes = table + ranges + 1, *addresses = sizes + 2 * ranges;
    const int range = range_of(table, ranges, blockIdx.x);
    const long long begin = (blockIdx.x - table[range]) * chunk, left = sizes[range] - begin;
    Maximum found = {0};
    take_all(found, (const REAL*)addresses[range] + begin, left < chunk ? (int)left : chunk);
    add_maximum(found.top, tops + range);
}

// The same of one array.
extern "C" __global__ void largest_of_array(const REAL* x, unsigned long long* top, long long count, int chunk) {
    const long long begin = (long long)blockIdx.x * chunk, left = count - begin;
    Maximum found = {0};
    take_all(found, x + begin, left < chunk ? (int)left : chunk);
    add_maximum(found.top, top);
}

// Two partial sums for each chunk.  The scalars of a choice are the scale, the coarse and the fine shift.
extern "C" __global__ void squares_of_ranges(
    const long long* table, const double* scalars, double* partials, int ranges, int chunk) {
    const long long *sizes = table + ranges + 1, *choices = sizes + ranges, *addresses = choices + ranges;
    const int range = range_of(table, ranges, blockIdx.x);
    const long long begin = (blockIdx.x - table[range]) * chunk, left = sizes[range] - begin;
    const double* own = scalars + 3 * choices[range];
    Squares found = {own[0], own[1], own[2], 0.0, 0.0};
    take_all(found, (const REAL*)addresses[range] + begin, left < chunk ? (int)left : chunk);
    write_sums(found.sum, found.rest, partials + 2 * (long long)blockIdx.x);
}

// The sums of the range that is the number of the block, over its chunks.
extern "C" __global__ void sums_of_chunks(const long long* table, const double* partials, double* sums) {
    double sum = 0.0, rest = 0.0;
    for (long long c = table[blockIdx.x] + threadIdx.x; c < table[blockIdx.x + 1]; c += blockDim.x) {
        sum += partials[2 * c];
        rest += partials[2 * c + 1];
    }
    write_sums(sum, rest, sums + 2 * blockIdx.x);
}
