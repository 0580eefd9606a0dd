// Causal softmax over the keys of each query; scores lie as (heads of a group, keys, queries).

#define QUERIES 16  // of a block, one a thread
#define LANES 32    // threads of a query, which take its keys in turns
#define WARPS (QUERIES * LANES / WARP)
#define HELD ((int)(128 / sizeof(REAL)))  // scores that a thread holds in registers; of more keys the rest is read again

// Over the threads of a query: the sum, or with LARGEST the largest; every thread gets the result.
template <bool LARGEST>
__device__ __forceinline__ REAL over_lanes(REAL x) {
    __shared__ REAL shown[WARPS][QUERIES];
    const int warp = (int)threadIdx.x / WARP, query = (int)threadIdx.x % QUERIES;
    const REAL other = __shfl_xor_sync(EVERY_LANE, x, QUERIES);
    x = LARGEST ? (other > x ? other : x) : x + other;
    __syncthreads();  // what was shown before has been read
    if ((int)threadIdx.x % WARP < QUERIES) shown[warp][query] = x;
    __syncthreads();
    x = shown[0][query];
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
        const REAL next = shown[w][query];
        x = LARGEST ? (next > x ? next : x) : x + next;
    }
    return x;
}

// `shares` may be `scores`.
template <typename T>
__device__ __forceinline__ void softmax_of_queries(
    const REAL* scores, T* shares, REAL* logsum, int keys, int queries, int length, int offset, REAL scale) {
    const int tiles = (queries + QUERIES - 1) / QUERIES, group = (int)(blockIdx.x / tiles);
    const int query = (int)(blockIdx.x % tiles) * QUERIES + (int)threadIdx.x % QUERIES;
    const int lane = (int)threadIdx.x / QUERIES;
    const bool inside = query < queries;
    // Of keys from that of this thread on: those that are written, and those that the query sees.
    const int written = (inside ? keys : 0) - lane, seen = inside && query + offset < keys ? query + offset + 1 - lane : written;
    const long long step = (long long)LANES * queries, begin = ((long long)group * keys + lane) * queries + query;
    const REAL* p = scores + begin;
    REAL held[HELD];
    REAL top = NEGATIVE_INFINITY, of_rest = NEGATIVE_INFINITY, total = 0;
#pragma unroll
    for (int k = 0; k < HELD; k++, p += step) held[k] = k * LANES < seen ? *p * scale : NEGATIVE_INFINITY;
#pragma unroll
    for (int k = 0; k < HELD; k++) top = held[k] > top ? held[k] : top;
#pragma unroll 2
    for (int key = HELD * LANES; key < seen; key += LANES, p += step) take(*p * scale, &of_rest, &total);
    top = over_lanes<true>(of_rest > top ? of_rest : top);
    if (total != 0) total *= exponential(of_rest - top);
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        if (k * LANES >= seen) continue;
        held[k] = exponential(held[k] - top);
        total += held[k];
    }
    total = over_lanes<false>(total);
    const REAL share = 1 / total;
    T* to = shares + begin;
#pragma unroll
    for (int k = 0; k < HELD; k++, to += step)
        if (k * LANES < written) store(to, k * LANES < seen ? held[k] * share : (REAL)0);
    p = scores + begin + HELD * step;
#pragma unroll 2
    for (int key = HELD * LANES; key < written; key += LANES, p += step, to += step)
        store(to, key < seen ? exponential(*p * scale - top) * share : (REAL)0);
    if (lane == 0 && inside) logsum[(long long)group * length + offset + query] = top + log(total);
}

extern "C" __global__ void __launch_bounds__(512, 2) causal_softmax(
    REAL* scores, REAL* logsum, int keys, int queries, int length, int offset, REAL scale) {
    softmax_of_queries(scores, scores, logsum, keys, queries, length, offset, scale);
}

extern "C" __global__ void __launch_bounds__(512, 2) causal_softmax_rounded(
    const REAL* __restrict__ scores, STORED* __restrict__ shares, REAL* __restrict__ logsum, int keys, int queries,
    int length, int offset, REAL scale) {
    softmax_of_queries(scores, shares, logsum, keys, queries, length, offset, scale);
}

// Rows are the keys of all groups.  `gradients` has `length` queries and `all_keys` keys a group: those of `scores` are
// the last queries, and as many keys from the position of the first of these on.  The results lie as what they are
// computed from, and may be in its place.
template <int N, typename T>
__device__ __forceinline__ void softmax_backward_tile(
    const REAL* scores, const REAL* gradients, const REAL* logsum, const REAL* inner, T* to_weights, T* to_gradients,
    long long rows, int keys, int queries, int all_keys, int length, REAL scale, long long each) {
    const Tile tile = Tile::of<N>(rows, queries, each);
    if (tile.column >= queries) return;
    const int start = length - queries;
    const bool whole_s = aligned<N>(scores), whole_g = aligned<N>(gradients);
    const bool whole_l = aligned<N>(logsum) && aligned<N>(inner);
    const bool whole_w = aligned<N>(to_weights), whole_t = aligned<N>(to_gradients);
    REAL weight[N], gradient[N], l[N], in[N];
#pragma unroll 2
    for (long long row = tile.first; row < tile.last; row++) {
        const long long group = row / keys;
        const int key = (int)(row % keys);
        const long long of_scores = row * queries + tile.column;
        const long long of_gradients = (group * all_keys + start + key) * length + start + tile.column;
        const long long at = group * length + start + tile.column;
#pragma unroll
        for (int v = 0; v < N; v++) weight[v] = gradient[v] = 0;
        if (tile.column + N > key) {
            load_pack<N>(scores + of_scores, whole_s, weight);
            load_pack<N>(gradients + of_gradients, whole_g, gradient);
            load_pack<N>(logsum + at, whole_l, l);
            load_pack<N>(inner + at, whole_l, in);
#pragma unroll
            for (int v = 0; v < N; v++) {
                const bool seen = tile.column + v >= key;
                weight[v] = seen ? exponential(weight[v] * scale - l[v]) : (REAL)0;
                gradient[v] = seen ? weight[v] * (gradient[v] - in[v]) * scale : (REAL)0;
            }
        }
        store_pack<N>(to_weights + of_scores, whole_w, weight);
        store_pack<N>(to_gradients + of_gradients, whole_t, gradient);
    }
}

template <typename T>
__device__ __forceinline__ void softmax_backward(
    const REAL* scores, const REAL* gradients, const REAL* logsum, const REAL* inner, T* to_weights, T* to_gradients,
    long long rows, int keys, int queries, int all_keys, int length, REAL scale, long long each) {
    if (queries % PACK == 0 && length % PACK == 0)
        softmax_backward_tile<PACK>(
            scores, gradients, logsum, inner, to_weights, to_gradients, rows, keys, queries, all_keys, length, scale,
            each);
    else
        softmax_backward_tile<1>(
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
