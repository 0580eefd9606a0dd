// Cross-entropy of whole rows, and in steps of rows that several ranks or slices share.

// Logits of a row that a thread holds in registers, which of long rows are nearly all that there are for a block of this
// size; of still longer rows the rest is read again.
#define HELD (8 * PACK)
#define HELD_LONG (sizeof(REAL) == 4 ? 22 * PACK : 16 * PACK)
#define LONG_TEAM 512
#define AT_ONCE 4  // packs that a thread loads before it stores the first of them, in loops that do both

// N logits of the row; those behind its last column, `left` columns on, count for nothing.
template <int N>
__device__ __forceinline__ void load_logits(const REAL* p, bool whole, int left, REAL* x) {
    load_pack<N>(p, whole, x);
    if (left < N)
#pragma unroll
        for (int v = 0; v < N; v++)
            if (v >= left) x[v] = NEGATIVE_INFINITY;
}

// The gradient may lie where the logits are.  Rows are `stride` elements apart, where the gradient has zeros behind the
// last column.
template <int N, int COUNT>
__device__ __forceinline__ void cross_entropy_of_row(
    REAL* logits, const long long* targets, STORED* gradient, double* losses, long long rows, int columns, int stride,
    REAL scale, int size) {
    const Team team(size);
    if (team.row >= rows) return;
    REAL* const row = logits + team.row * stride;
    const int step = size * N, first = team.lane * N;
    const REAL picked = row[targets[team.row]];  // before anybody writes
    // From the first logit of this thread on: logits of the row, with and without a gap behind them, and the place of the
    // target.  Places of other logits are multiples of `step`, which is known to the compiler for long rows and then
    // takes no registers.
    REAL* const x = row + first;
    STORED* const y = gradient + team.row * stride + first;
    const int left = columns - first, until = stride - first, target = (int)targets[team.row] - first;
    const bool whole = aligned<N>(x), whole_y = aligned<N>(y);
    REAL held[COUNT], part[N];
    REAL top = NEGATIVE_INFINITY, of_rest = NEGATIVE_INFINITY, total = 0;
#pragma unroll
    for (int k = 0; k < COUNT / N; k++) {
        if (k * step < until) load_logits<N>(x + k * step, whole, left - k * step, held + k * N);
        else
#pragma unroll
            for (int v = 0; v < N; v++) held[k * N + v] = NEGATIVE_INFINITY;
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) top = held[i] > top ? held[i] : top;
#pragma unroll 4
    for (int c = COUNT / N * step; c < left; c += step) {
        load_logits<N>(x + c, whole, left - c, part);
#pragma unroll
        for (int v = 0; v < N; v++) take(part[v], &of_rest, &total);
    }
    top = team.largest(of_rest > top ? of_rest : top);
    if (total != 0) total *= exponential(of_rest - top);
#pragma unroll
    for (int k = 0; k < COUNT / N; k++)
        if (k * step < until)
#pragma unroll
            for (int v = 0; v < N; v++) {
                held[k * N + v] = exponential(held[k * N + v] - top);
                total += held[k * N + v];
            }
    total = team.sum(total);
    const REAL share = scale / total;
    __syncwarp();  // `picked` has been read: the sums of a warp are shuffles, which order no memory
#pragma unroll
    for (int k = 0; k < COUNT / N; k++)
        if (k * step < until) {
#pragma unroll
            for (int v = 0; v < N; v++) part[v] = held[k * N + v] * share - (k * step + v == target ? scale : (REAL)0);
            store_pack<N>(y + k * step, whole_y, part);
        }
    // The registers of `held` are free now: some packs are loaded before the first is stored.
    for (int c = COUNT / N * step; c < until; c += AT_ONCE * step) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (c + k * step < until)
                load_logits<N>(x + c + k * step, whole, left - c - k * step, held + k * N);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            if (c + k * step >= until) continue;
#pragma unroll
            for (int v = 0; v < N; v++)
                part[v] = exponential(held[k * N + v] - top) * share - (c + k * step + v == target ? scale : (REAL)0);
            store_pack<N>(y + c + k * step, whole_y, part);
        }
    }
    if (team.lane == 0) losses[team.row] = log((double)total) - (double)(picked - top);
}

extern "C" __global__ void __launch_bounds__(512) cross_entropy(
    REAL* logits, const long long* targets, STORED* gradient, double* losses, long long rows, int columns, int stride,
    REAL scale, int size) {
    if (stride % PACK == 0)
        cross_entropy_of_row<PACK, HELD>(logits, targets, gradient, losses, rows, columns, stride, scale, size);
    else cross_entropy_of_row<1, HELD>(logits, targets, gradient, losses, rows, columns, stride, scale, size);
}

extern "C" __global__ void __launch_bounds__(512) cross_entropy_of_long_rows(
    REAL* logits, const long long* targets, STORED* gradient, double* losses, long long rows, int columns, int stride,
    REAL scale) {
    if (stride % PACK == 0)
        cross_entropy_of_row<PACK, HELD_LONG>(
            logits, targets, gradient, losses, rows, columns, stride, scale, LONG_TEAM);
    else
        cross_entropy_of_row<1, HELD_LONG>(logits, targets, gradient, losses, rows, columns, stride, scale, LONG_TEAM);
}

template <int N>
__device__ __forceinline__ void row_maximum_of_row(
    const REAL* logits, REAL* tops, long long rows, int columns, int size) {
    const Team team(size);
    if (team.row >= rows) return;
    const REAL* const x = logits + team.row * columns;
    const bool whole = aligned<N>(x);
    REAL top = NEGATIVE_INFINITY, part[N];
#pragma unroll 4
    for (int c = team.lane * N; c < columns; c += size * N) {
        load_pack<N>(x + c, whole, part);
#pragma unroll
        for (int v = 0; v < N; v++) top = part[v] > top ? part[v] : top;
    }
    top = team.largest(top);
    if (team.lane == 0) tops[team.row] = top;
}

extern "C" __global__ void __launch_bounds__(1024) row_maximum(
    const REAL* logits, REAL* tops, long long rows, int columns, int size) {
    if (columns % PACK == 0) row_maximum_of_row<PACK>(logits, tops, rows, columns, size);
    else row_maximum_of_row<1>(logits, tops, rows, columns, size);
}

template <int N>
__device__ __forceinline__ void exponentials_of_row(
    REAL* logits, const long long* targets, const REAL* tops, REAL* totals, REAL* picked, long long first,
    long long rows, int columns, int size) {
    const Team team(size);
    if (team.row >= rows) return;
    REAL* const x = logits + team.row * columns;
    const bool whole = aligned<N>(x);
    const long long target = targets[team.row] - first;
    const REAL top = tops[team.row];
    REAL total = 0, part[AT_ONCE * N];
    if (team.lane == 0 && (target < 0 || target >= columns)) picked[team.row] = 0;
    const int stride = size * N;
    for (int c = team.lane * N; c < columns; c += AT_ONCE * stride) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            if (c + k * stride < columns) load_pack<N>(x + c + k * stride, whole, part + k * N);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            if (c + k * stride >= columns) continue;
#pragma unroll
            for (int v = 0; v < N; v++) {
                REAL* const one = part + k * N + v;
                *one -= top;
                if (c + k * stride + v == target) picked[team.row] = *one;
                *one = exponential(*one);
                total += *one;
            }
            store_pack<N>(x + c + k * stride, whole, part + k * N);
        }
    }
    total = team.sum(total);
    if (team.lane == 0) totals[team.row] = total;
}

extern "C" __global__ void __launch_bounds__(1024) exponentials(
    REAL* logits, const long long* targets, const REAL* tops, REAL* totals, REAL* picked, long long first,
    long long rows, int columns, int size) {
    if (columns % PACK == 0)
        exponentials_of_row<PACK>(logits, targets, tops, totals, picked, first, rows, columns, size);
    else exponentials_of_row<1>(logits, targets, tops, totals, picked, first, rows, columns, size);
}

extern "C" __global__ void losses_of_sums(const REAL* total, const REAL* picked, double* losses, long long rows) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows) losses[row] = log((double)total[row]) - (double)picked[row];
}

template <int N>
__device__ __forceinline__ void gradient_tile(
    REAL* __restrict__ weights, const long long* __restrict__ targets, const REAL* __restrict__ total,
    long long first, long long rows, int columns, long long each) {
    const Tile tile = Tile::of<N>(rows, columns, each);
    if (tile.column >= columns) return;
    const bool whole = aligned<N>(weights);
    REAL part[N];
#pragma unroll 4
    for (long long row = tile.first; row < tile.last; row++) {
        REAL* const p = weights + row * columns + tile.column;
        const REAL share = 1 / total[row];
        const long long target = targets[row] - first;
        load_pack<N>(p, whole, part);
#pragma unroll
        for (int v = 0; v < N; v++) part[v] = part[v] * share - (REAL)(tile.column + v == target);
        store_pack<N>(p, whole, part);
    }
}

extern "C" __global__ void gradient_of_sums(
    REAL* __restrict__ weights, const long long* __restrict__ targets, const REAL* __restrict__ total,
    long long first, long long rows, int columns, long long each) {
    if (columns % PACK == 0) gradient_tile<PACK>(weights, targets, total, first, rows, columns, each);
    else gradient_tile<1>(weights, targets, total, first, rows, columns, each);
}
