// Rows of a table, and its gradient.

template <int N>
__device__ __forceinline__ void lookup_tile(
    const REAL* __restrict__ weight, const long long* __restrict__ indices, REAL* __restrict__ y, long long first,
    long long table_rows, long long count, long long rows, int columns, long long each) {
    const Tile tile = Tile::of<N>(rows, columns, each);
    if (tile.column >= columns) return;
    const bool whole_w = aligned<N>(weight), whole_y = aligned<N>(y);
    REAL part[N];
#pragma unroll 4
    for (long long row = tile.first; row < tile.last; row++) {
        const long long index = indices[row], from = index - first;
        if (from >= 0 && from < table_rows) {
            load_pack<N>(weight + from * columns + tile.column, whole_w, part);
        } else {
            const REAL nothing = index >= 0 && index < count ? (REAL)0 : NOT_A_NUMBER;
#pragma unroll
            for (int v = 0; v < N; v++) part[v] = nothing;
        }
        store_pack<N>(y + row * columns + tile.column, whole_y, part);
    }
}

extern "C" __global__ void lookup(
    const REAL* __restrict__ weight, const long long* __restrict__ indices, REAL* __restrict__ y, long long first,
    long long table_rows, long long count, long long rows, int columns, long long each) {
    if (columns % PACK == 0) lookup_tile<PACK>(weight, indices, y, first, table_rows, count, rows, columns, each);
    else lookup_tile<1>(weight, indices, y, first, table_rows, count, rows, columns, each);
}

// What is sorted: the row of the table in the upper half, that of dy in the lower one.  So equal tokens stand together,
// in the order of dy, and no two keys are equal.  Tokens of other ranks come last.
#define ELSEWHERE 0x7fffffffll
extern "C" __global__ void make_keys(
    const long long* indices, long long* keys, long long first, long long table_rows, long long rows) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const long long to = indices[row] - first;
    keys[row] = (to >= 0 && to < table_rows ? to : ELSEWHERE) << 32 | row;
}

// Few keys are sorted by counting, for each, those that are smaller: this needs no other memory, and no wait.
extern "C" __global__ void sort_keys(const long long* __restrict__ keys, long long* __restrict__ sorted, int rows) {
    const int row = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (row >= rows) return;
    const long long own = keys[row];
    int smaller = 0;
#pragma unroll 16
    for (int i = 0; i < rows; i++) smaller += keys[i] < own;
    sorted[smaller] = own;
}

// A block has a place among the sorted keys, and a tile of WARP packs of columns; it works if a run of equal tokens
// begins there.  The warps take the rows of the run in turns.
template <int N>
__device__ __forceinline__ void add_run(
    const REAL* __restrict__ dy, const long long* __restrict__ keys, REAL* __restrict__ dweight, long long rows,
    int columns) {
    __shared__ REAL sums[8][WARP * PACK];
    const int tiles = (columns + WARP * N - 1) / (WARP * N), warps = (int)blockDim.x / WARP;
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP * N;
    const long long begin = blockIdx.x / tiles, to = keys[begin] >> 32;
    const int column = (int)(blockIdx.x % tiles) * WARP * N + lane;
    if (to == ELSEWHERE || (begin > 0 && keys[begin - 1] >> 32 == to)) return;
    const bool inside = column < columns, whole = aligned<N>(dy), whole_w = aligned<N>(dweight);
    REAL sum[N] = {}, part[N];
#pragma unroll 4
    for (long long place = begin + warp; inside && place < rows && keys[place] >> 32 == to; place += warps) {
        load_pack<N>(dy + (keys[place] & 0xffffffffll) * columns + column, whole, part);
#pragma unroll
        for (int v = 0; v < N; v++) sum[v] += part[v];
    }
#pragma unroll
    for (int v = 0; v < N; v++) sums[warp][lane + v] = sum[v];
    __syncthreads();
    if (warp > 0 || !inside) return;
    REAL* const target = dweight + to * columns + column;
    load_pack<N>(target, whole_w, part);
#pragma unroll
    for (int v = 0; v < N; v++) {
        for (int w = 1; w < warps; w++) sum[v] += sums[w][lane + v];
        part[v] += sum[v];
    }
    store_pack<N>(target, whole_w, part);
}

extern "C" __global__ void __launch_bounds__(256) add_runs(
    const REAL* __restrict__ dy, const long long* __restrict__ keys, REAL* __restrict__ dweight, long long rows,
    int columns) {
    if (columns % PACK == 0) add_run<PACK>(dy, keys, dweight, rows, columns);
    else add_run<1>(dy, keys, dweight, rows, columns);
}
