// Largest absolute values, pre-rounded sums of squares, and the words of dot products, see exact_norms.py and exact.py.
// Nothing here depends on an order: maxima never do, and the additions are exact.  A block of the first two has one
// chunk of one range; the table of ranges is that of ranges.py.

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

// The elements that count, by their masks.
#define EVERY 0
#define FREE 1
#define HELD 2
#define CHANGED 3  // those that are free now, less those that were before
#define CARRY 34   // binary places from the first word to the second

struct Words {
    double first, second;  // see magic_numbers
    unsigned long long high, low;
    __device__ void take(double product) {
        const double coarse = product + first, fine = (product - (coarse - first)) + second;
        high += __double_as_longlong(coarse) - __double_as_longlong(first);
        low += __double_as_longlong(fine) - __double_as_longlong(second);
    }
    // With a second word below 2^34, of which very many can be added.
    __device__ void add_to(unsigned long long* target) {
        if (high || low) {
            atomicAdd(target, high + (unsigned long long)((long long)low >> CARRY));
            atomicAdd(target + 1, low & ((1ull << CARRY) - 1));
        }
        high = low = 0;
    }
    __device__ void add_warp_to(unsigned long long* target) {
        high = warp_sum(high);
        low = warp_sum(low);
        if (threadIdx.x % WARP) high = low = 0;
        add_to(target);
    }
};

// Of products of a row with a row, or with the vector where its number is negative.  A block has a chunk of one pair,
// so that blocks that read the same elements follow each other.  The table has the numbers of each pair, then the magic
// numbers.
extern "C" __global__ void words_of_pairs(
    const REAL* rows, const REAL* vector, const unsigned char* before, const unsigned char* after,
    const long long* table, unsigned long long* words, long long stride, long long begin, long long end, int pairs,
    int which, int chunk) {
    const int pair = blockIdx.x % pairs;
    const long long start = begin + (long long)(blockIdx.x / pairs) * chunk;
    const long long stop = start + chunk < end ? start + chunk : end;
    const long long *numbers = table + 2 * pair, *magic = table + 2 * (pairs + pair);
    const REAL *left = rows + numbers[0] * stride, *right = numbers[1] < 0 ? vector : rows + numbers[1] * stride;
    Words found = {__longlong_as_double(magic[0]), __longlong_as_double(magic[1]), 0, 0};
    for (long long i = start + threadIdx.x; i < stop; i += blockDim.x) {
        int times = 1;
        if (which == FREE) times = after[i];
        else if (which == HELD) times = !after[i];
        else if (which == CHANGED) times = after[i] - before[i];
        if (times) found.take(times * widened(left[i]) * widened(right[i]));
    }
    found.add_warp_to(words + 2 * pair);
}

// Of products of the elements `index` of each row with their factors, over each of several groups.  The table has where
// each group begins and the last one ends, the numbers of the rows, and the magic numbers.
extern "C" __global__ void words_of_groups(
    const REAL* rows, const long long* index, const double* factors, const long long* table, unsigned long long* words,
    long long stride, int count, int groups, int chunk) {
    const int k = blockIdx.x % count, lane = threadIdx.x % WARP;
    const long long *numbers = table + groups + 1, *magic = numbers + count + 2 * k;
    const long long end = table[groups], begin = table[0] + (long long)(blockIdx.x / count) * chunk;
    const long long stop = begin + chunk < end ? begin + chunk : end;
    const REAL* row = rows + numbers[k] * stride;
    const Words none = {__longlong_as_double(magic[0]), __longlong_as_double(magic[1]), 0, 0};
    Words found = none;
    int group = -1;  // whose elements `found` has, the same in all lanes
    for (long long i = begin + threadIdx.x; i - lane < stop; i += blockDim.x) {
        const long long of_first = i - lane, of_last = of_first + WARP < stop ? of_first + WARP - 1 : stop - 1;
        const int first = range_of(table, groups, of_first), last = range_of(table, groups, of_last);
        if (group >= 0 && (first != group || last != group)) found.add_warp_to(words + 2 * (group * count + k));
        group = first == last ? first : -1;
        if (i < stop) {
            const double product = widened(row[index[i]]) * factors[i];
            if (group >= 0) found.take(product);
            else {
                Words own = none;
                own.take(product);
                own.add_to(words + 2 * (range_of(table, groups, i) * count + k));
            }
        }
    }
    if (group >= 0) found.add_warp_to(words + 2 * (group * count + k));
}
