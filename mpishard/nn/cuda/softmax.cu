// Causal softmax over the keys of each query; scores lie as (heads of a group, keys, queries).

#define QUERIES 16   // of a block
#define THREADS 512  // of a block
#define WARPS (THREADS / WARP)
#define HELD ((int)(128 / sizeof(REAL)))  // scores that a thread holds in registers; of more keys the rest is read again

// Over the threads of each query, which have N queries each: the sum, or with LARGEST the largest; all get the result.
template <bool LARGEST, int N>
__device__ __forceinline__ void over_lanes(REAL* x) {
    __shared__ REAL shown[WARPS][QUERIES];
    const int warp = (int)threadIdx.x / WARP, query = (int)threadIdx.x % (QUERIES / N) * N;
#pragma unroll
    for (int distance = WARP / 2; distance >= QUERIES / N; distance /= 2)
#pragma unroll
        for (int v = 0; v < N; v++) {
            const REAL other = __shfl_xor_sync(EVERY_LANE, x[v], distance);
            x[v] = LARGEST ? (other > x[v] ? other : x[v]) : x[v] + other;
        }
    __syncthreads();  // what was shown before has been read
    if ((int)threadIdx.x % WARP < QUERIES / N)
#pragma unroll
        for (int v = 0; v < N; v++) shown[warp][query + v] = x[v];
    __syncthreads();
#pragma unroll
    for (int v = 0; v < N; v++) x[v] = shown[0][query + v];
#pragma unroll 5
    for (int w = 1; w < WARPS; w++)
#pragma unroll
        for (int v = 0; v < N; v++) {
            const REAL next = shown[w][query + v];
            x[v] = LARGEST ? (next > x[v] ? next : x[v]) : x[v] + next;
        }
}

// A thread has N queries, and takes their keys in turns with the others of these queries.  WHOLE says that all memory
// is aligned.  `shares` may be `scores`.
template <int N, bool WHOLE, typename T>
__device__ __forceinline__ void softmax_of_queries(
    const REAL* scores, T* shares, REAL* logsum, int keys, int queries, int length, int offset, REAL scale) {
    constexpr int LANES = THREADS * N / QUERIES, COUNT = HELD / N;
    const int tiles = (queries + QUERIES - 1) / QUERIES, group = (int)(blockIdx.x / tiles);
    const int query = (int)(blockIdx.x % tiles) * QUERIES + (int)threadIdx.x % (QUERIES / N) * N;
    const int lane = (int)threadIdx.x / (QUERIES / N);
    // Of keys from that of this thread on: those that are written, that its first query sees, and that any query sees.
    const int written = (query < queries ? keys : 0) - lane, seen = query + offset + 1 - lane;
    const int read = seen + N - 1 < written ? seen + N - 1 : written;
    scores += ((long long)group * keys + lane) * queries + query;
    shares += ((long long)group * keys + lane) * queries + query;
    const long long step = (long long)queries * LANES;
    const REAL* p = scores;
    REAL held[HELD], part[N], own[N], top[N], total[N];
#pragma unroll
    for (int k = 0; k < COUNT; k++, p += step)
        if (k * LANES < read) load_pack<N>(p, WHOLE, held + k * N);
#pragma unroll
    for (int v = 0; v < N; v++) {
        own[v] = NEGATIVE_INFINITY;
        total[v] = 0;
    }
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        if (k * LANES < read)
#pragma unroll
            for (int v = 0; v < N; v++) {
                held[k * N + v] = k * LANES < seen + v ? held[k * N + v] * scale : NEGATIVE_INFINITY;
                own[v] = held[k * N + v] > own[v] ? held[k * N + v] : own[v];
            }
    for (int key = COUNT * LANES; key < read; key += LANES, p += step) {
        load_pack<N>(p, WHOLE, part);
#pragma unroll
        for (int v = 0; v < N; v++)
            if (key < seen + v) take(part[v] * scale, own + v, total + v);
    }
#pragma unroll
    for (int v = 0; v < N; v++) top[v] = own[v];
    over_lanes<true, N>(top);
#pragma unroll
    for (int v = 0; v < N; v++)
        if (total[v] != 0) total[v] *= exponential(own[v] - top[v]);
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        if (k * LANES < read)
#pragma unroll
            for (int v = 0; v < N; v++) {
                held[k * N + v] = exponential(held[k * N + v] - top[v]);
                total[v] += held[k * N + v];
            }
    over_lanes<false, N>(total);
    if (lane == 0 && query < queries)
#pragma unroll
        for (int v = 0; v < N; v++) logsum[(long long)group * length + offset + query + v] = top[v] + log(total[v]);
#pragma unroll
    for (int v = 0; v < N; v++) total[v] = 1 / total[v];
#pragma unroll
    for (int k = 0; k < COUNT; k++, shares += step) {
        if (k * LANES >= written) continue;
#pragma unroll
        for (int v = 0; v < N; v++) part[v] = k * LANES < seen + v ? held[k * N + v] * total[v] : (REAL)0;
        store_pack<N>(shares, WHOLE, part);
    }
    scores += COUNT * step;
    for (int key = COUNT * LANES; key < written; key += LANES, scores += step, shares += step) {
        if (key < read) load_pack<N>(scores, WHOLE, part);
#pragma unroll
        for (int v = 0; v < N; v++)
            part[v] = key < seen + v ? exponential(part[v] * scale - top[v]) * total[v] : (REAL)0;
        store_pack<N>(shares, WHOLE, part);
    }
}

template <typename T>
__device__ __forceinline__ void softmax(
    const REAL* scores, T* shares, REAL* logsum, int keys, int queries, int length, int offset, REAL scale) {
    if (queries % PACK)
        softmax_of_queries<1, false>(scores, shares, logsum, keys, queries, length, offset, scale);
    else if (aligned<PACK>(scores) && aligned<PACK>(shares))
        softmax_of_queries<PACK, true>(scores, shares, logsum, keys, queries, length, offset, scale);
    else
        softmax_of_queries<PACK, false>(scores, shares, logsum, keys, queries, length, offset, scale);
}

extern "C" __global__ void __launch_bounds__(512, 2) causal_softmax(
    REAL* scores, REAL* logsum, int keys, int queries, int length, int offset, REAL scale) {
    softmax(scores, scores, logsum, keys, queries, length, offset, scale);
}

extern "C" __global__ void __launch_bounds__(512, 2) causal_softmax_rounded(
    const REAL* __restrict__ scores, STORED* __restrict__ shares, REAL* __restrict__ logsum, int keys, int queries,
    int length, int offset, REAL scale) {
    softmax(scores, shares, logsum, keys, queries, length, offset, scale);
}

// Rows are the keys of all groups.  `gradients` has `length` queries and `all_keys` keys a group: those of `scores` are
// the last queries, and as many keys from the position of the first of these on.  The results lie as what they are
// computed from, and may be in its place.
template <int N, bool WHOLE, typename T>
__device__ __forceinline__ void softmax_backward_tile(
    const REAL* scores, const REAL* gradients, const REAL* logsum, const REAL* inner, T* to_weights, T* to_gradients,
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
            load_pack<N>(inner + at, WHOLE, in);
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
    const REAL* scores, const REAL* gradients, const REAL* logsum, const REAL* inner, T* to_weights, T* to_gradients,
    long long rows, int keys, int queries, int all_keys, int length, REAL scale, long long each) {
    const bool whole = aligned<PACK>(scores) && aligned<PACK>(gradients) && aligned<PACK>(logsum) &&
                       aligned<PACK>(inner) && aligned<PACK>(to_weights) && aligned<PACK>(to_gradients);
    if (queries % PACK || length % PACK)
        softmax_backward_tile<1, false>(
            scores, gradients, logsum, inner, to_weights, to_gradients, rows, keys, queries, all_keys, length, scale,
            each);
    else if (whole)
        softmax_backward_tile<PACK, true>(
            scores, gradients, logsum, inner, to_weights, to_gradients, rows, keys, queries, all_keys, length, scale,
            each);
    else
        softmax_backward_tile<PACK, false>(
            scores, gradients, logsum, inner, to_weights, to_gradients, rows, keys, queries, all_keys, length, scale,
            each);
}

extern "C" __global__ void causal_softmax_backward(
    REAL* __restrict__ scores, REAL* __restrict__ gradients, const REAL* __restrict__ logsum,
    const REAL* __restrict__ inner, long long rows, int keys, int queries, int all_keys, int length,
    REAL scale, long long each) {
    softmax_backward(
        scores, gradients, logsum, inner, scores, gradients, rows, keys, queries, all_keys, length, scale, each);
}

extern "C" __global__ void causal_softmax_backward_rounded(
    const REAL* __restrict__ scores, const REAL* __restrict__ gradients, const REAL* __restrict__ logsum,
    const REAL* __restrict__ inner, STORED* __restrict__ to_weights, STORED* __restrict__ to_gradients, long long rows,
    int keys, int queries, int all_keys, int length, REAL scale, long long each) {
    softmax_backward(
        scores, gradients, logsum, inner, to_weights, to_gradients, rows, keys, queries, all_keys, length, scale,
        each);
}
