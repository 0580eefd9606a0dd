// Cross-entropy of whole rows, and in steps of rows that several ranks or slices share.

// Logits of a row that a thread holds in registers: all of them, or the row is a long one.
#define HELD (8 * PACK)
#define LONG_TEAM 1024  // threads of a long row
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

// The target of a row, or -1 if it is no column: then the loss and the gradient of the row are NaN.
__device__ __forceinline__ int target_of(const long long* targets, long long row, int columns) {
    const long long target = targets[row];
    return target >= 0 && target < columns ? (int)target : -1;
}

// The gradient may lie where the logits are.  Rows are `stride` elements apart, where the gradient has zeros behind the
// last column.
template <int N>
__device__ __forceinline__ void cross_entropy_of_row(
    REAL* logits, const long long* targets, STORED* gradient, double* losses, long long rows, int columns, int stride,
    REAL scale, int size) {
    const Team team(size);
    if (team.row >= rows) return;
    REAL* const row = logits + team.row * stride;
    const int step = size * N, first = team.lane * N;
    const int column = target_of(targets, team.row, columns);
    const REAL picked = column < 0 ? NOT_A_NUMBER : row[column];  // before anybody writes
    // From the first logit of this thread on: logits of the row, with and without a gap behind them, and the place of
    // the target.
    REAL* const x = row + first;
    STORED* const y = gradient + team.row * stride + first;
    const int left = columns - first, until = stride - first, target = column - first;
    const bool whole = aligned<N>(x), whole_y = aligned<N>(y);
    REAL held[HELD], part[N];
    REAL top = NEGATIVE_INFINITY, total = 0;
#pragma unroll
    for (int k = 0; k < HELD / N; k++) {
        if (k * step < until) load_logits<N>(x + k * step, whole, left - k * step, held + k * N);
        else
#pragma unroll
            for (int v = 0; v < N; v++) held[k * N + v] = NEGATIVE_INFINITY;
    }
#pragma unroll
    for (int i = 0; i < HELD; i++) top = held[i] > top ? held[i] : top;
    top = team.largest(top);
#pragma unroll
    for (int k = 0; k < HELD / N; k++)
        if (k * step < until)
#pragma unroll
            for (int v = 0; v < N; v++) {
                held[k * N + v] = exponential(held[k * N + v] - top);
                total += held[k * N + v];
            }
    total = team.sum(total);
    const REAL share = column < 0 ? NOT_A_NUMBER : scale / total;
    __syncwarp();  // `picked` has been read: the sums of a warp are shuffles, which order no memory
#pragma unroll
    for (int k = 0; k < HELD / N; k++)
        if (k * step < until) {
#pragma unroll
            for (int v = 0; v < N; v++) part[v] = held[k * N + v] * share - (k * step + v == target ? scale : (REAL)0);
            store_pack<N>(y + k * step, whole_y, part);
        }
    if (team.lane == 0) losses[team.row] = log((double)total) - (double)(picked - top);
}

extern "C" __global__ void __launch_bounds__(512) cross_entropy(
    REAL* logits, const long long* targets, STORED* gradient, double* losses, long long rows, int columns, int stride,
    REAL scale, int size) {
    if (stride % PACK == 0)
        cross_entropy_of_row<PACK>(logits, targets, gradient, losses, rows, columns, stride, scale, size);
    else cross_entropy_of_row<1>(logits, targets, gradient, losses, rows, columns, stride, scale, size);
}

// A long row: aligned packs, which its threads take in turns, and where the stride is no multiple of a pack single
// logits in front of the packs and behind them, which have a thread each.
struct LongRow {
    long long first;  // the logit where the packs begin
    int columns, front, packs;  // front: single logits in front of the packs

    __device__ __forceinline__ LongRow(long long row, int columns, int stride) : columns(columns) {
        first = (row * stride + PACK - 1) / PACK * PACK;
        front = (int)(first - row * stride);
        packs = (columns - front) / PACK;
    }
    // The column of the single logit of a thread, or -1.
    __device__ __forceinline__ int single(int lane) const {
        return lane >= columns - packs * PACK ? -1 : lane < front ? lane : packs * PACK + lane;
    }
    // The thread that takes a column.
    __device__ __forceinline__ int owner(int column) const {
        const int in_packs = column - front;
        if (in_packs < 0) return column;
        return in_packs < packs * PACK ? in_packs / PACK % LONG_TEAM : column - packs * PACK;
    }
};

// Blocks take rows in turns.  With SHARED, where all memory is aligned, each pack of a row has a place in shared memory
// that only its thread uses, so that no barrier is needed: when the pack is stored, the next row's is fetched there.
// Otherwise logits are read three times.  Results have the same bits.
template <bool SHARED>
__device__ __forceinline__ void cross_entropy_in_turns(
    REAL* logits, const long long* targets, STORED* gradient, double* losses, long long rows, int columns, int stride,
    REAL scale) {
    extern __shared__ PackOf<REAL, PACK> places[];
    const Team team(LONG_TEAM);
    const int lane = team.lane;
    const bool whole = SHARED || (aligned<PACK>(logits) && aligned<PACK>(gradient));
    if (SHARED && blockIdx.x < rows) {
        const LongRow begun(blockIdx.x, columns, stride);
        for (int p = lane; p < begun.packs; p += LONG_TEAM) begin_copy(places + p, logits + begun.first + p * PACK);
    }
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const LongRow own(row, columns, stride), next(row + gridDim.x, columns, stride);
        const REAL* const x = logits + row * stride;
        STORED* const y = gradient + row * stride;
        const REAL* const packs = SHARED ? places[0].of : logits + own.first;
        const int next_packs = row + gridDim.x < rows ? next.packs : 0;
        const int single = own.single(lane), target = target_of(targets, row, columns);
        REAL of_single = single < 0 ? NEGATIVE_INFINITY : x[single], top = of_single, part[PACK];
        if (SHARED) end_copies();
#pragma unroll 4
        for (int p = lane; p < own.packs; p += LONG_TEAM) {
            load_pack<PACK>(packs + p * PACK, whole, part);
#pragma unroll
            for (int v = 0; v < PACK; v++) top = larger(top, part[v]);
        }
        top = team.largest(top);
        REAL total = of_single = exponential(of_single - top);
#pragma unroll 4
        for (int p = lane; p < own.packs; p += LONG_TEAM) {
            load_pack<PACK>(packs + p * PACK, whole, part);
#pragma unroll
            for (int v = 0; v < PACK; v++) {
                part[v] = exponential(part[v] - top);
                total += part[v];
            }
            if (SHARED) store_pack<PACK>(places[p].of, true, part);
        }
        total = team.sum(total);
        const REAL share = target < 0 ? NOT_A_NUMBER : scale / total;
        const bool has_target = target >= 0 && lane == own.owner(target);
        const REAL picked = has_target ? x[target] - top : (REAL)0;  // before this thread stores there
#pragma unroll 4
        for (int p = lane; p < columns / PACK; p += LONG_TEAM) {
            if (p < own.packs) {
                load_pack<PACK>(packs + p * PACK, whole, part);
#pragma unroll
                for (int v = 0; v < PACK; v++) part[v] = (SHARED ? part[v] : exponential(part[v] - top)) * share;
                store_pack<PACK, true>(gradient + own.first + p * PACK, whole, part);
            }
            if (SHARED && p < next_packs) begin_copy(places + p, logits + next.first + p * PACK);
        }
        if (single >= 0) store(y + single, of_single * share);
        for (int c = columns + lane; c < stride; c += LONG_TEAM) store(y + c, (REAL)0);
        if (has_target) {
            store(y + target, exponential(picked) * share - scale);
            losses[row] = log((double)total) - (double)picked;
        }
        if (target < 0 && lane == 0) losses[row] = NOT_A_NUMBER;
    }
}

// `shared` says that the launch has as much shared memory as the packs of a row take.  With one block a multiprocessor
// the compiler uses more registers, and has more exponentials under way.
extern "C" __global__ void __launch_bounds__(1024, 1) cross_entropy_of_long_rows(
    REAL* logits, const long long* targets, STORED* gradient, double* losses, long long rows, int columns, int stride,
    REAL scale, int shared) {
    if (shared && aligned<PACK>(logits) && aligned<PACK>(gradient))
        cross_entropy_in_turns<true>(logits, targets, gradient, losses, rows, columns, stride, scale);
    else cross_entropy_in_turns<false>(logits, targets, gradient, losses, rows, columns, stride, scale);
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
    long long count, long long rows, int columns, int size) {
    const Team team(size);
    if (team.row >= rows) return;
    REAL* const x = logits + team.row * columns;
    const bool whole = aligned<N>(x);
    const long long number = targets[team.row], target = number - first;
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
    if (team.lane == 0) totals[team.row] = number >= 0 && number < count ? total : NOT_A_NUMBER;
}

extern "C" __global__ void __launch_bounds__(1024) exponentials(
    REAL* logits, const long long* targets, const REAL* tops, REAL* totals, REAL* picked, long long first,
    long long count, long long rows, int columns, int size) {
    if (columns % PACK == 0)
        exponentials_of_row<PACK>(logits, targets, tops, totals, picked, first, count, rows, columns, size);
    else exponentials_of_row<1>(logits, targets, tops, totals, picked, first, count, rows, columns, size);
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
