// Layer norm and root mean square norm: layer_norm, rms_norm and their backward passes, as nn/kernels.py has them.

// Elements of a row that a thread holds in registers: forward as many as fit into 64, and the rest of a longer row is
// read again.
#define HELD (6 * PACK)
#define HELD_BACKWARD (4 * PACK)
#define HELD_BACKWARD_ALONE (2 * PACK)  // where rows are no multiple of a pack: indices take registers, too

// WHOLE says that all memory is aligned: loads that do not ask for it are on their way together.
template <int N, bool CENTERED, bool WHOLE>
__device__ __forceinline__ void norm(
    const REAL* x, const REAL* weight, const REAL* bias, STORED* y, REAL* mean, REAL* scale, REAL epsilon,
    long long rows, int columns, int size) {
    Team team(size);
    if (team.row >= rows) return;
    x += team.row * columns;
    y += team.row * columns;
    const int stride = size * N, rest = HELD / N * stride + team.lane * N;
    REAL held[HELD], part[N], w[N], b[N];
    REAL total = 0, center = 0;
#pragma unroll
    for (int k = 0; k < HELD / N; k++) {
        int c = k * stride + team.lane * N;
        if (c < columns) load_pack<N>(x + c, WHOLE, held + k * N);
    }
    if (CENTERED) {
#pragma unroll
        for (int k = 0; k < HELD / N; k++)
            if (k * stride + team.lane * N < columns)
#pragma unroll
                for (int v = 0; v < N; v++) total += held[k * N + v];
        for (int c = rest; c < columns; c += stride) {
            load_pack<N>(x + c, WHOLE, part);
            for (int v = 0; v < N; v++) total += part[v];
        }
        center = team.sum(total) / (REAL)columns;
        total = 0;
    }
#pragma unroll
    for (int k = 0; k < HELD / N; k++)
        if (k * stride + team.lane * N < columns)
#pragma unroll
            for (int v = 0; v < N; v++) total += (held[k * N + v] - center) * (held[k * N + v] - center);
    for (int c = rest; c < columns; c += stride) {
        load_pack<N>(x + c, WHOLE, part);
        for (int v = 0; v < N; v++) total += (part[v] - center) * (part[v] - center);
    }
    const REAL factor = 1 / root(team.sum(total) / (REAL)columns + epsilon);
#pragma unroll
    for (int k = 0; k < HELD / N; k++) {
        int c = k * stride + team.lane * N;
        if (c >= columns) continue;
        load_pack<N>(weight + c, WHOLE, w);
        if (CENTERED) load_pack<N>(bias + c, WHOLE, b);
#pragma unroll
        for (int v = 0; v < N; v++)
            part[v] = (held[k * N + v] - center) * factor * w[v] + (CENTERED ? b[v] : (REAL)0);
        store_pack<N>(y + c, WHOLE, part);
    }
    for (int c = rest; c < columns; c += stride) {
        load_pack<N>(x + c, WHOLE, part);
        load_pack<N>(weight + c, WHOLE, w);
        if (CENTERED) load_pack<N>(bias + c, WHOLE, b);
        for (int v = 0; v < N; v++) part[v] = (part[v] - center) * factor * w[v] + (CENTERED ? b[v] : (REAL)0);
        store_pack<N>(y + c, WHOLE, part);
    }
    if (team.lane == 0) {
        if (CENTERED) mean[team.row] = center;
        scale[team.row] = factor;
    }
}

template <bool CENTERED>
__device__ __forceinline__ void norm_of_rows(
    const REAL* x, const REAL* weight, const REAL* bias, STORED* y, REAL* mean, REAL* scale, REAL epsilon,
    long long rows, int columns, int size) {
    const bool whole = aligned<PACK>(x) && aligned<PACK>(weight) && aligned<PACK>(bias) && aligned<PACK>(y);
    if (columns % PACK) norm<1, CENTERED, false>(x, weight, bias, y, mean, scale, epsilon, rows, columns, size);
    else if (whole) norm<PACK, CENTERED, true>(x, weight, bias, y, mean, scale, epsilon, rows, columns, size);
    else norm<PACK, CENTERED, false>(x, weight, bias, y, mean, scale, epsilon, rows, columns, size);
}

extern "C" __global__ void __launch_bounds__(512, 2) layer_norm(
    const REAL* x, const REAL* weight, const REAL* bias, STORED* y, REAL* mean, REAL* scale, REAL epsilon,
    long long rows, int columns, int size) {
    norm_of_rows<true>(x, weight, bias, y, mean, scale, epsilon, rows, columns, size);
}

extern "C" __global__ void __launch_bounds__(512, 2) rms_norm(
    const REAL* x, const REAL* weight, STORED* y, REAL* scale, REAL epsilon, long long rows, int columns, int size) {
    norm_of_rows<false>(x, weight, x, y, scale, scale, epsilon, rows, columns, size);
}

// A block takes every so many rows, all columns of each, and holds its part of the column sums in registers.  A row of
// `partial` has the sums for the weight, then with CENTERED those for the bias.
template <int N, bool CENTERED, bool WHOLE>
__device__ __forceinline__ void norm_backward(
    const REAL* dy, const REAL* x, const REAL* mean, const REAL* scale, const REAL* weight, REAL* dx, REAL* partial,
    long long rows, int columns) {
    constexpr int COUNT = N == 1 ? HELD_BACKWARD_ALONE : HELD_BACKWARD;
    const Team team((int)blockDim.x);
    const int stride = (int)blockDim.x * N, first = team.lane * N;
    // From the first element of this thread on.
    const int left = columns - first;
    weight += first;
    REAL normed[COUNT], given[COUNT], result[COUNT], w[N];
    REAL dweight[COUNT] = {}, dbias[COUNT] = {};
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const long long at = row * columns + first;
        const REAL center = CENTERED ? mean[row] : (REAL)0, factor = scale[row];
        REAL plain = 0, along = 0;
#pragma unroll
        for (int k = 0; k < COUNT / N; k++) {
            const int c = k * stride;
            if (c >= left) continue;
            load_pack<N>(dy + at + c, WHOLE, given + k * N);
            load_pack<N>(x + at + c, WHOLE, normed + k * N);
            load_pack<N>(dx + at + c, WHOLE, result + k * N);
        }
#pragma unroll
        for (int k = 0; k < COUNT / N; k++) {
            const int c = k * stride;
            if (c >= left) continue;
            load_pack<N>(weight + c, WHOLE, w);
#pragma unroll
            for (int v = 0; v < N; v++) {
                const int i = k * N + v;
                normed[i] = (normed[i] - center) * factor;
                dweight[i] += given[i] * normed[i];
                if (CENTERED) dbias[i] += given[i];
                given[i] *= w[v];
                if (CENTERED) plain += given[i];
                along += given[i] * normed[i];
            }
        }
        if (CENTERED) plain = team.sum(plain) / (REAL)columns;
        along = team.sum(along) / (REAL)columns;
#pragma unroll
        for (int k = 0; k < COUNT / N; k++) {
            const int c = k * stride;
            if (c >= left) continue;
#pragma unroll
            for (int v = 0; v < N; v++) {
                const int i = k * N + v;
                result[i] += factor * (given[i] - plain - normed[i] * along);
            }
            store_pack<N>(dx + at + c, WHOLE, result + k * N);
        }
    }
    partial += (long long)blockIdx.x * columns * (CENTERED ? 2 : 1) + first;
#pragma unroll
    for (int k = 0; k < COUNT / N; k++) {
        const int c = k * stride;
        if (c >= left) continue;
        store_pack<N>(partial + c, WHOLE, dweight + k * N);
        if (CENTERED) store_pack<N>(partial + columns + c, WHOLE, dbias + k * N);
    }
}

template <bool CENTERED>
__device__ __forceinline__ void norm_backward_of_rows(
    const REAL* dy, const REAL* x, const REAL* mean, const REAL* scale, const REAL* weight, REAL* dx, REAL* partial,
    long long rows, int columns) {
    const bool whole = aligned<PACK>(dy) && aligned<PACK>(x) && aligned<PACK>(weight) && aligned<PACK>(dx) &&
                       aligned<PACK>(partial);
    if (columns % PACK) norm_backward<1, CENTERED, false>(dy, x, mean, scale, weight, dx, partial, rows, columns);
    else if (whole) norm_backward<PACK, CENTERED, true>(dy, x, mean, scale, weight, dx, partial, rows, columns);
    else norm_backward<PACK, CENTERED, false>(dy, x, mean, scale, weight, dx, partial, rows, columns);
}

extern "C" __global__ void __launch_bounds__(512) layer_norm_backward(
    const REAL* dy, const REAL* x, const REAL* mean, const REAL* scale, const REAL* weight, REAL* dx, REAL* partial,
    long long rows, int columns) {
    norm_backward_of_rows<true>(dy, x, mean, scale, weight, dx, partial, rows, columns);
}

extern "C" __global__ void __launch_bounds__(512) rms_norm_backward(
    const REAL* dy, const REAL* x, const REAL* scale, const REAL* weight, REAL* dx, REAL* partial, long long rows,
    int columns) {
    norm_backward_of_rows<false>(dy, x, scale, scale, weight, dx, partial, rows, columns);
}

// For rows that no block can hold: first the two means of each row, then all else by tiles of columns.  No means
// (`centered` is 0): those of the root mean square norm.
extern "C" __global__ void __launch_bounds__(512) norm_means(
    const REAL* dy, const REAL* x, const REAL* mean, const REAL* scale, const REAL* weight, REAL* plain, REAL* along,
    long long rows, int columns, int centered) {
    const Team team((int)blockDim.x);
    dy += team.row * columns;
    x += team.row * columns;
    const REAL center = centered ? mean[team.row] : (REAL)0, factor = scale[team.row];
    REAL sum = 0, product = 0;
#pragma unroll 4
    for (int c = team.lane; c < columns; c += (int)blockDim.x) {
        const REAL g = dy[c] * weight[c];
        sum += g;
        product += g * ((x[c] - center) * factor);
    }
    sum = team.sum(sum);
    product = team.sum(product);
    if (team.lane == 0) {
        plain[team.row] = centered ? sum / (REAL)columns : (REAL)0;
        along[team.row] = product / (REAL)columns;
    }
}

extern "C" __global__ void norm_backward_of_tiles(
    const REAL* dy, const REAL* x, const REAL* mean, const REAL* scale, const REAL* weight, const REAL* plain,
    const REAL* along, REAL* dx, REAL* partial, long long rows, int columns, int centered, long long each) {
    const Tile tile = Tile::of<1>(rows, columns, each);
    if (tile.column >= columns) return;
    const REAL w = weight[tile.column];
    REAL dweight = 0, dbias = 0;
#pragma unroll 4
    for (long long row = tile.first; row < tile.last; row++) {
        const long long at = row * columns + tile.column;
        const REAL factor = scale[row], normed = (x[at] - (centered ? mean[row] : (REAL)0)) * factor, g = dy[at];
        dweight += g * normed;
        dbias += g;
        dx[at] += factor * (g * w - plain[row] - normed * along[row]);
    }
    partial += tile.part * columns * (centered ? 2 : 1) + tile.column;
    partial[0] = dweight;
    if (centered) partial[columns] = dbias;
}
