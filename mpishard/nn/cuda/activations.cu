// Element by element: GELU, SwiGLU, biases and dropout.

#define GELU_SLOPE ((REAL)1.5957691216057308)  // 2 sqrt(2 / pi)
#define GELU_CUBIC ((REAL)0.044715)
#define STORED_PACK ((int)(16 / sizeof(STORED)))

// Of float in few instructions, with errors of some 1e-6 that rounding to half precision hides.
__device__ __forceinline__ float quick_exponential(float x) { return __expf(x); }
__device__ __forceinline__ double quick_exponential(double x) { return exp(x); }
__device__ __forceinline__ float quick_inverse(float x) { return __fdividef(1.0f, x); }
__device__ __forceinline__ double quick_inverse(double x) { return 1 / x; }

// The sigmoid of u, given -u, and 1 minus it without the cancellation where it is close to 1.
template <bool QUICK = false>
__device__ __forceinline__ void sigmoid(REAL exponent, bool positive, REAL* s, REAL* rest) {
    const REAL e = QUICK ? quick_exponential(exponent) : exponential(exponent);
    *s = QUICK ? quick_inverse(1 + e) : 1 / (1 + e);
    *rest = positive ? e * *s : 1 - *s;
}

// GELU of z, and its derivative.
template <bool QUICK = false>
__device__ __forceinline__ void gelu_of(REAL z, REAL* value, REAL* slope) {
    const REAL square = z * z;
    REAL s, rest;
    sigmoid<QUICK>(-GELU_SLOPE * z * (1 + GELU_CUBIC * square), z > 0, &s, &rest);
    *value = z * s;
    *slope = s + *value * rest * GELU_SLOPE * (1 + 3 * GELU_CUBIC * square);
}

template <int N>
__device__ __forceinline__ void gelu_tile(
    REAL* __restrict__ x, const REAL* __restrict__ bias, STORED* __restrict__ y, long long rows, int columns,
    long long each) {
    const Tile tile = Tile::of<N>(rows, columns, each);
    if (tile.column >= columns) return;
    const bool whole_x = aligned<N>(x), whole_y = aligned<N>(y);
    REAL b[N], h[N], out[N];
    load_pack<N>(bias + tile.column, aligned<N>(bias), b);
#pragma unroll 4
    for (long long row = tile.first; row < tile.last; row++) {
        const long long at = row * columns + tile.column;
        load_pack<N>(x + at, whole_x, h);
#pragma unroll
        for (int v = 0; v < N; v++) gelu_of(h[v] + b[v], out + v, h + v);
        store_pack<N>(y + at, whole_y, out);
        store_pack<N>(x + at, whole_x, h);
    }
}

extern "C" __global__ void gelu(
    REAL* __restrict__ x, const REAL* __restrict__ bias, STORED* __restrict__ y, long long rows, int columns,
    long long each) {
    if (columns % PACK == 0) gelu_tile<PACK>(x, bias, y, rows, columns, each);
    else gelu_tile<1>(x, bias, y, rows, columns, each);
}

// A row of `partial` has the column sums of the rows of a tile.
template <int N>
__device__ __forceinline__ void gelu_backward_tile(
    REAL* __restrict__ dx, const REAL* __restrict__ slope, REAL* __restrict__ partial, long long rows, int columns,
    long long each) {
    const Tile tile = Tile::of<N>(rows, columns, each);
    if (tile.column >= columns) return;
    const bool whole_x = aligned<N>(dx), whole_s = aligned<N>(slope);
    REAL sum[N] = {}, d[N], s[N];
#pragma unroll 4
    for (long long row = tile.first; row < tile.last; row++) {
        const long long at = row * columns + tile.column;
        load_pack<N>(dx + at, whole_x, d);
        load_pack<N>(slope + at, whole_s, s);
#pragma unroll
        for (int v = 0; v < N; v++) {
            d[v] *= s[v];
            sum[v] += d[v];
        }
        store_pack<N>(dx + at, whole_x, d);
    }
    store_pack<N>(partial + tile.part * columns + tile.column, aligned<N>(partial), sum);
}

extern "C" __global__ void gelu_backward(
    REAL* __restrict__ dx, const REAL* __restrict__ slope, REAL* __restrict__ partial, long long rows, int columns,
    long long each) {
    if (columns % PACK == 0) gelu_backward_tile<PACK>(dx, slope, partial, rows, columns, each);
    else gelu_backward_tile<1>(dx, slope, partial, rows, columns, each);
}

// Of what is stored in half precision: `before` is what GELU was applied to.
template <int N>
__device__ __forceinline__ void gelu_backward_of_rounded_tile(
    STORED* __restrict__ dx, const STORED* __restrict__ before, REAL* __restrict__ partial, long long rows, int columns,
    long long each) {
    const Tile tile = Tile::of<N>(rows, columns, each);
    if (tile.column >= columns) return;
    const bool whole_x = aligned<N>(dx), whole_b = aligned<N>(before);
    REAL sum[N] = {}, d[N], z[N];
#pragma unroll 2
    for (long long row = tile.first; row < tile.last; row++) {
        const long long at = row * columns + tile.column;
        load_pack<N>(dx + at, whole_x, d);
        load_pack<N>(before + at, whole_b, z);
#pragma unroll
        for (int v = 0; v < N; v++) {
            REAL value, slope;
            gelu_of<true>(z[v], &value, &slope);
            d[v] *= slope;
            sum[v] += d[v];
        }
        store_pack<N>(dx + at, whole_x, d);
    }
    store_pack<N>(partial + tile.part * columns + tile.column, aligned<N>(partial), sum);
}

extern "C" __global__ void gelu_backward_of_rounded(
    STORED* __restrict__ dx, const STORED* __restrict__ before, REAL* __restrict__ partial, long long rows, int columns,
    long long each) {
    if (columns % STORED_PACK == 0) {
        gelu_backward_of_rounded_tile<STORED_PACK>(dx, before, partial, rows, columns, each);
    } else {
        gelu_backward_of_rounded_tile<1>(dx, before, partial, rows, columns, each);
    }
}

template <int N>
__device__ __forceinline__ void add_bias_tile(
    REAL* __restrict__ y, const REAL* __restrict__ bias, const REAL* __restrict__ residual, long long rows,
    int columns, long long each) {
    const Tile tile = Tile::of<N>(rows, columns, each);
    if (tile.column >= columns) return;
    const bool whole_y = aligned<N>(y), whole_r = aligned<N>(residual);
    REAL b[N], out[N], r[N];
    load_pack<N>(bias + tile.column, aligned<N>(bias), b);
#pragma unroll 4
    for (long long row = tile.first; row < tile.last; row++) {
        const long long at = row * columns + tile.column;
        load_pack<N>(y + at, whole_y, out);
        load_pack<N>(residual + at, whole_r, r);
#pragma unroll
        for (int v = 0; v < N; v++) out[v] += b[v] + r[v];
        store_pack<N>(y + at, whole_y, out);
    }
}

extern "C" __global__ void add_bias(
    REAL* __restrict__ y, const REAL* __restrict__ bias, const REAL* __restrict__ residual, long long rows,
    int columns, long long each) {
    if (columns % PACK == 0) add_bias_tile<PACK>(y, bias, residual, rows, columns, each);
    else add_bias_tile<1>(y, bias, residual, rows, columns, each);
}

// A thread has one pack of a flat array; those of the end have less.
extern "C" __global__ void swiglu(
    REAL* __restrict__ gate, REAL* __restrict__ up, STORED* __restrict__ y, long long count) {
    const long long first = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * PACK;
    const bool all = first + PACK <= count;
    const bool whole_g = all && aligned<PACK>(gate), whole_u = all && aligned<PACK>(up);
    const int number = all ? PACK : (int)(count - first);
    REAL g[PACK], u[PACK], out[PACK];
    if (first >= count) return;
    if (all) {
        load_pack<PACK>(gate + first, whole_g, g);
        load_pack<PACK>(up + first, whole_u, u);
    } else {
        for (int v = 0; v < PACK; v++) {
            g[v] = v < number ? gate[first + v] : (REAL)0;
            u[v] = v < number ? up[first + v] : (REAL)0;
        }
    }
#pragma unroll
    for (int v = 0; v < PACK; v++) {
        const REAL h = g[v];
        REAL s, rest;
        sigmoid(-h, h > 0, &s, &rest);
        const REAL silu = h * s;
        out[v] = silu * u[v];
        g[v] = u[v] * (s + silu * rest);
        u[v] = silu;
    }
    if (all) {
        store_pack<PACK>(y + first, aligned<PACK>(y), out);
        store_pack<PACK>(gate + first, whole_g, g);
        store_pack<PACK>(up + first, whole_u, u);
        return;
    }
    for (int v = 0; v < PACK; v++) {
        if (v >= number) break;
        store(y + first + v, out[v]);
        gate[first + v] = g[v];
        up[first + v] = u[v];
    }
}

extern "C" __global__ void swiglu_backward(
    REAL* __restrict__ dgate, REAL* __restrict__ dup, const REAL* __restrict__ dy, long long count) {
    const long long first = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * PACK;
    const bool whole = aligned<PACK>(dgate) && aligned<PACK>(dup) && aligned<PACK>(dy);
    REAL g[PACK], u[PACK], d[PACK];
    if (first + PACK <= count) {
        load_pack<PACK>(dy + first, whole, d);
        load_pack<PACK>(dgate + first, whole, g);
        load_pack<PACK>(dup + first, whole, u);
#pragma unroll
        for (int v = 0; v < PACK; v++) {
            g[v] *= d[v];
            u[v] *= d[v];
        }
        store_pack<PACK>(dgate + first, whole, g);
        store_pack<PACK>(dup + first, whole, u);
        return;
    }
    for (long long i = first; i < count; i++) {
        dgate[i] *= dy[i];
        dup[i] *= dy[i];
    }
}

// Whether the number of splitmix64 for this count is below the rate.
__device__ __forceinline__ bool dropped(unsigned long long count, double rate) {
    unsigned long long z = (count ^ (count >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z = (z ^ (z >> 31)) >> 11;
    return (double)z * (1.0 / 9007199254740992.0) < rate;  // 2^-53
}

template <int N>
__device__ __forceinline__ void drop_tile(
    REAL* __restrict__ x, const long long* __restrict__ keys, const long long* __restrict__ positions, double rate,
    REAL scale, long long rows, int columns, long long each) {
    const Tile tile = Tile::of<N>(rows, columns, each);
    if (tile.column >= columns) return;
    const bool whole = aligned<N>(x);
    REAL part[N];
#pragma unroll 2
    for (long long row = tile.first; row < tile.last; row++) {
        REAL* const p = x + row * columns + tile.column;
        load_pack<N>(p, whole, part);
        unsigned long long count = (unsigned long long)(positions[row] * columns + tile.column);
        count = (unsigned long long)keys[row] + count * 0x9E3779B97F4A7C15ull;
#pragma unroll
        for (int v = 0; v < N; v++) {
            count += 0x9E3779B97F4A7C15ull;
            // A product, so that a number that is not finite shows.
            part[v] *= dropped(count, rate) ? (REAL)0 : scale;
        }
        store_pack<N>(p, whole, part);
    }
}

extern "C" __global__ void drop(
    REAL* __restrict__ x, const long long* __restrict__ keys, const long long* __restrict__ positions, double rate,
    REAL scale, long long rows, int columns, long long each) {
    if (columns % PACK == 0) drop_tile<PACK>(x, keys, positions, rate, scale, rows, columns, each);
    else drop_tile<1>(x, keys, positions, rate, scale, rows, columns, each);
}
