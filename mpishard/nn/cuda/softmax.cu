// Causal softmax over the keys of each query; scores lie as (heads of a group, keys, queries).

#define QUERIES 32   // of a block
#define THREADS 512  // of a block
#define WARPS (THREADS / WARP)
#define HELD ((int)(128 / sizeof(REAL)))  // scores that a thread holds in registers

// Over the threads of each query, which have N queries each: the sum, or the largest; all get the result.
template <int N>
__device__ __forceinline__ void over_lanes(REAL* x, bool largest) {
    __shared__ PackOf<REAL, N> shown[WARPS][QUERIES / N];
    const int warp = (int)threadIdx.x / WARP, query = (int)threadIdx.x % (QUERIES / N);
#pragma unroll
    for (int distance = WARP / 2; distance >= QUERIES / N; distance /= 2)
#pragma unroll
        for (int v = 0; v < N; v++) {
            const REAL other = __shfl_xor_sync(EVERY_LANE, x[v], distance);
            x[v] = largest ? larger(other, x[v]) : x[v] + other;
        }
    __syncthreads();  // what was shown before has been read
    if ((int)threadIdx.x % WARP < QUERIES / N) store_pack<N>(shown[warp][query].of, true, x);
    __syncthreads();
    load_pack<N>(shown[0][query].of, true, x);
#pragma unroll 5
    for (int w = 1; w < WARPS; w++) {
        REAL next[N];
        load_pack<N>(shown[w][query].of, true, next);
#pragma unroll
        for (int v = 0; v < N; v++) x[v] = largest ? larger(next[v], x[v]) : x[v] + next[v];
    }
}

// A thread has N queries, and takes their keys in turns with the others of these queries.  With SHARED, where memory is
// aligned, it holds the first in registers, and the others in places of shared memory that no other thread uses.
// Otherwise scores are read three times.  Results have the same bits.  `shares` may be `scores`.
template <int N, bool SHARED, typename T>
__device__ __forceinline__ void softmax_of_queries(
    const REAL* scores, T* shares, REAL* logsum, int keys, int queries, int length, int offset, REAL scale) {
    constexpr int LANES = THREADS * N / QUERIES, COUNT = SHARED ? HELD / N : 0;
    // Results in half precision are powers of 2, which take a third of the instructions of exp(x).  Their relative
    // error is 2^-22, and 2^-23 for each unit of the scaled score (2^-24 with exp(x)): little beside the 2^-9 or 2^-12
    // of rounding the result.
    constexpr bool HALF = sizeof(T) == 2;
    const REAL factor = HALF ? scale * (REAL)1.4426950408889634 : scale;  // log2(e)
    const auto power = [](REAL x) { return HALF ? exp2(x) : exponential(x); };
    extern __shared__ PackOf<REAL, PACK> places[];
    PackOf<REAL, PACK>* const place = places + threadIdx.x;
    const bool whole = SHARED || (aligned<N>(scores) && aligned<N>(shares));
    const int tiles = (queries + QUERIES - 1) / QUERIES, group = (int)(blockIdx.x / tiles);
    // The last queries, which see most keys, come first: short blocks are left for the end.
    const int tile = tiles - 1 - (int)(blockIdx.x % tiles);
    const int query = tile * QUERIES + (int)threadIdx.x % (QUERIES / N) * N;
    const int lane = (int)threadIdx.x / (QUERIES / N);
    // Of keys from that of this thread on: those that are written, that its first query sees, and that any query sees.
    const int written = (query < queries ? keys : 0) - lane, seen = query + offset + 1 - lane;
    const int read = seen + N - 1 < written ? seen + N - 1 : written;
    const long long step = (long long)queries * LANES;
    scores += ((long long)group * keys + lane) * queries + query;
    shares += ((long long)group * keys + lane) * queries + query;
    // The scores of a key, scaled where queries see it.
    const auto masked = [&](int key, REAL* x) {
#pragma unroll
        for (int v = 0; v < N; v++) x[v] = product(x[v], factor);
        if (key >= seen)
#pragma unroll
            for (int v = 0; v < N; v++)
                if (key >= seen + v) x[v] = NEGATIVE_INFINITY;
    };
    const auto load_further = [&](int k, REAL* x) {
        load_pack<N>(SHARED ? place[(k - COUNT) * THREADS].of : scores + k * step, whole, x);
        masked(k * LANES, x);
    };
    REAL held[HELD], part[N], top[N], total[N];
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        if (k * LANES < read) load_pack<N>(scores + k * step, whole, held + k * N);
    if (SHARED)
        for (int k = COUNT; k * LANES < read; k++) begin_copy(place + (k - COUNT) * THREADS, scores + k * step);
#pragma unroll
    for (int v = 0; v < N; v++) total[v] = 0, top[v] = NEGATIVE_INFINITY;
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        if (k * LANES < read) {
            masked(k * LANES, held + k * N);
#pragma unroll
            for (int v = 0; v < N; v++) top[v] = larger(held[k * N + v], top[v]);
        }
    if (SHARED) end_copies();
#pragma unroll 4
    for (int k = COUNT; k * LANES < read; k++) {
        load_further(k, part);
#pragma unroll
        for (int v = 0; v < N; v++) top[v] = larger(part[v], top[v]);
    }
    over_lanes<N>(top, true);
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        if (k * LANES < read)
#pragma unroll
            for (int v = 0; v < N; v++) {
                held[k * N + v] = power(held[k * N + v] - top[v]);
                total[v] += held[k * N + v];
            }
#pragma unroll 4
    for (int k = COUNT; k * LANES < read; k++) {
        load_further(k, part);
#pragma unroll
        for (int v = 0; v < N; v++) {
            part[v] = power(part[v] - top[v]);
            total[v] += part[v];
        }
        if (SHARED) store_pack<N>(place[(k - COUNT) * THREADS].of, true, part);
    }
    over_lanes<N>(total, false);
    if (lane == 0 && query < queries)
#pragma unroll
        for (int v = 0; v < N; v++)
            logsum[(long long)group * length + offset + query + v] =
                (HALF ? top[v] * (REAL)0.6931471805599453 : top[v]) + log(total[v]);  // log(2)
#pragma unroll
    for (int v = 0; v < N; v++) total[v] = 1 / total[v];
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        if (k * LANES < read) {
#pragma unroll
            for (int v = 0; v < N; v++) part[v] = held[k * N + v] * total[v];
            store_pack<N>(shares + k * step, whole, part);
        }
#pragma unroll 4
    for (int k = COUNT; k * LANES < read; k++) {
        if (SHARED) load_pack<N>(place[(k - COUNT) * THREADS].of, true, part);
        else load_further(k, part);
#pragma unroll
        for (int v = 0; v < N; v++) part[v] = (SHARED ? part[v] : power(part[v] - top[v])) * total[v];
        store_pack<N>(shares + k * step, whole, part);
    }
    // Zeros last: nothing waits for them, and they leave the way to the scores free.
#pragma unroll
    for (int v = 0; v < N; v++) part[v] = 0;
    for (int k = read > 0 ? (read + LANES - 1) / LANES : 0; k * LANES < written; k++)
        store_pack<N>(shares + k * step, whole, part);
}

// `shared` says that the launch has as much shared memory as these keys need.
template <typename T>
__device__ __forceinline__ void softmax(
    const REAL* scores, T* shares, REAL* logsum, int keys, int queries, int length, int offset, REAL scale,
    int shared) {
    if (queries % PACK)
        softmax_of_queries<1, false>(scores, shares, logsum, keys, queries, length, offset, scale);
    else if (shared && aligned<PACK>(scores) && aligned<PACK>(shares))
        softmax_of_queries<PACK, true>(scores, shares, logsum, keys, queries, length, offset, scale);
    else
        softmax_of_queries<PACK, false>(scores, shares, logsum, keys, queries, length, offset, scale);
}

extern "C" __global__ void __launch_bounds__(512, 2) causal_softmax(
    REAL* scores, REAL* logsum, int keys, int queries, int length, int offset, REAL scale, int shared) {
    softmax(scores, scores, logsum, keys, queries, length, offset, scale, shared);
}

extern "C" __global__ void __launch_bounds__(512, 2) causal_softmax_rounded(
    const REAL* __restrict__ scores, STORED* __restrict__ shares, REAL* __restrict__ logsum, int keys, int queries,
    int length, int offset, REAL scale, int shared) {
    softmax(scores, shares, logsum, keys, queries, length, offset, scale, shared);
}

// Rows are the keys of all groups.  `gradients` has `length` queries and `all_keys` keys a group: those of `scores` are
// the last queries, and as many keys from the position of the first of these on.  The results lie as what they are
// computed from, and may be in its place.
template <int N, bool WHOLE, typename T>
__device__ __forceinline__ void softmax_backward_tile(
    const REAL* scores, const REAL* gradients, const REAL* logsum, const REAL* delta, T* to_weights, T* to_gradients,
    long long rows, int keys, int queries, int all_keys, int length, REAL scale, long long each) {
    const Tile tile = Tile::of<N>(rows, queries, each);
    if (tile.column >= queries) return;
    const int start = length - queries;
    long long group = tile.first / keys;
    int key = (int)(tile.first % keys);
    REAL weight[N], gradient[N], l[N], in[N];
#pragma unroll 2
    for (long long row = tile.first; row < tile.last; row++, key++) {
        if (key == keys) {
            key = 0;
            group++;
        }
        const long long of_scores = row * queries + tile.column;
        const long long of_gradients = (group * all_keys + start + key) * length + start + tile.column;
        const long long at = group * length + start + tile.column;
#pragma unroll
        for (int v = 0; v < N; v++) weight[v] = gradient[v] = 0;
        if (tile.column + N > key) {
            load_pack<N>(scores + of_scores, WHOLE, weight);
            load_pack<N>(gradients + of_gradients, WHOLE, gradient);
            load_pack<N>(logsum + at, WHOLE, l);
            load_pack<N>(delta + at, WHOLE, in);
#pragma unroll
            for (int v = 0; v < N; v++) {
                const bool seen = tile.column + v >= key;
                weight[v] = seen ? exponential(weight[v] * scale - l[v]) : (REAL)0;
                gradient[v] = seen ? weight[v] * (gradient[v] - in[v]) * scale : (REAL)0;
            }
        }
        store_pack<N>(to_weights + of_scores, WHOLE, weight);
        store_pack<N>(to_gradients + of_gradients, WHOLE, gradient);
    }
}

template <typename T>
__device__ __forceinline__ void softmax_backward(
    const REAL* scores, const REAL* gradients, const REAL* logsum, const REAL* delta, T* to_weights, T* to_gradients,
    long long rows, int keys, int queries, int all_keys, int length, REAL scale, long long each) {
    const bool whole = aligned<PACK>(scores) && aligned<PACK>(gradients) && aligned<PACK>(logsum) &&
                       aligned<PACK>(delta) && aligned<PACK>(to_weights) && aligned<PACK>(to_gradients);
    if (queries % PACK || length % PACK)
        softmax_backward_tile<1, false>(
            scores, gradients, logsum, delta, to_weights, to_gradients, rows, keys, queries, all_keys, length, scale,
            each);
    else if (whole)
        softmax_backward_tile<PACK, true>(
            scores, gradients, logsum, delta, to_weights, to_gradients, rows, keys, queries, all_keys, length, scale,
            each);
    else
        softmax_backward_tile<PACK, false>(
            scores, gradients, logsum, delta, to_weights, to_gradients, rows, keys, queries, all_keys, length, scale,
            each);
}

extern "C" __global__ void causal_softmax_backward(
    REAL* __restrict__ scores, REAL* __restrict__ gradients, const REAL* __restrict__ logsum,
    const REAL* __restrict__ delta, long long rows, int keys, int queries, int all_keys, int length,
    REAL scale, long long each) {
    softmax_backward(
        scores, gradients, logsum, delta, scores, gradients, rows, keys, queries, all_keys, length, scale, each);
}

extern "C" __global__ void causal_softmax_backward_rounded(
    const REAL* __restrict__ scores, const REAL* __restrict__ gradients, const REAL* __restrict__ logsum,
    const REAL* __restrict__ delta, STORED* __restrict__ to_weights, STORED* __restrict__ to_gradients, long long rows,
    int keys, int queries, int all_keys, int length, REAL scale, long long each) {
    softmax_backward(
        scores, gradients, logsum, delta, to_weights, to_gradients, rows, keys, queries, all_keys, length, scale,
        each);
}
