// Between rows, whose columns are ordered by head, kind and channel, and heads of each kind; and rotary positions.

// Where the channels of a column begin in an array of heads, by kind, sequence, head, position and channel, less what
// depends on the row; `of_row` gives that.
struct HeadPlace {
    long long of_column;
    int batch, heads, length, width;

    __device__ __forceinline__ HeadPlace(int column, int kinds, int batch, int heads, int length, int width)
        : batch(batch), heads(heads), length(length), width(width) {
        const int unit = column / width, head = unit / kinds, kind = unit % kinds;
        of_column = ((long long)kind * batch * heads + head) * length * width + column % width;
    }
    __device__ __forceinline__ long long of_row(long long row) const {
        const int sequence = (int)(row / length), position = (int)(row % length);
        return of_column + ((long long)sequence * heads * length + position) * width;
    }
};

template <int N>
__device__ __forceinline__ void split_tile(
    const REAL* __restrict__ x, const REAL* __restrict__ bias, STORED* __restrict__ to, int kinds, int batch,
    int heads, int length, int width, long long each) {
    const int columns = heads * kinds * width;
    const Tile tile = Tile::of<N>((long long)batch * length, columns, each);
    if (tile.column >= columns) return;
    const HeadPlace place(tile.column, kinds, batch, heads, length, width);
    const bool whole_x = aligned<N>(x), whole_t = aligned<N>(to);
    REAL part[N], b[N];
    load_pack<N>(bias + tile.column, aligned<N>(bias), b);
#pragma unroll 4
    for (long long row = tile.first; row < tile.last; row++) {
        load_pack<N>(x + row * columns + tile.column, whole_x, part);
#pragma unroll
        for (int v = 0; v < N; v++) part[v] += b[v];
        store_pack<N>(to + place.of_row(row), whole_t, part);
    }
}

extern "C" __global__ void split_heads(
    const REAL* __restrict__ x, const REAL* __restrict__ bias, STORED* __restrict__ to, int kinds, int batch,
    int heads, int length, int width, long long each) {
    if (width % PACK == 0) split_tile<PACK>(x, bias, to, kinds, batch, heads, length, width, each);
    else split_tile<1>(x, bias, to, kinds, batch, heads, length, width, each);
}

template <int N>
__device__ __forceinline__ void merge_tile(
    STORED* __restrict__ x, const REAL* __restrict__ from, int kinds, int batch, int heads, int length, int width,
    long long each) {
    const int columns = heads * kinds * width;
    const Tile tile = Tile::of<N>((long long)batch * length, columns, each);
    if (tile.column >= columns) return;
    const HeadPlace place(tile.column, kinds, batch, heads, length, width);
    const bool whole_x = aligned<N>(x), whole_f = aligned<N>(from);
    REAL part[N];
#pragma unroll 4
    for (long long row = tile.first; row < tile.last; row++) {
        load_pack<N>(from + place.of_row(row), whole_f, part);
        store_pack<N>(x + row * columns + tile.column, whole_x, part);
    }
}

extern "C" __global__ void merge_heads(
    STORED* __restrict__ x, const REAL* __restrict__ from, int kinds, int batch, int heads, int length, int width,
    long long each) {
    if (width % PACK == 0) merge_tile<PACK>(x, from, kinds, batch, heads, length, width, each);
    else merge_tile<1>(x, from, kinds, batch, heads, length, width, each);
}

// A warp has one head of one kind of one row.
template <int N>
__device__ __forceinline__ void split_with_products_of_warp(
    const REAL* __restrict__ dy, const REAL* __restrict__ y, STORED* __restrict__ to, REAL* __restrict__ delta,
    int kinds, int batch, int heads, int length, int width) {
    const Team team(WARP);
    const int units = heads * kinds;
    const long long row = team.row / units;
    const int unit = (int)(team.row % units);
    if (row >= (long long)batch * length) return;
    const long long at = team.row * width;
    const HeadPlace place(unit * width, kinds, batch, heads, length, width);
    const long long target = place.of_row(row);
    const bool whole = aligned<N>(dy) && aligned<N>(y), whole_t = aligned<N>(to);
    REAL d[N], part[N], sum = 0;
    for (int c = team.lane * N; c < width; c += WARP * N) {
        load_pack<N>(dy + at + c, whole, d);
        load_pack<N>(y + at + c, whole, part);
        store_pack<N>(to + target + c, whole_t, d);
#pragma unroll
        for (int v = 0; v < N; v++) sum += d[v] * part[v];
    }
    sum = team.sum(sum);
    if (team.lane == 0) delta[target / width] = sum;
}

extern "C" __global__ void split_with_products(
    const REAL* __restrict__ dy, const REAL* __restrict__ y, STORED* __restrict__ to, REAL* __restrict__ delta,
    int kinds, int batch, int heads, int length, int width) {
    if (width % PACK == 0)
        split_with_products_of_warp<PACK>(dy, y, to, delta, kinds, batch, heads, length, width);
    else split_with_products_of_warp<1>(dy, y, to, delta, kinds, batch, heads, length, width);
}

// A thread has N pairs of channels, half a head apart, or (then N is 1) neighbours.
template <int N, bool APART>
__device__ __forceinline__ void rotate_tile(
    REAL* __restrict__ x, const REAL* __restrict__ cos, const REAL* __restrict__ sin, REAL sign, long long rows,
    int length, int pairs, long long each) {
    const Tile tile = Tile::of<N>(rows, pairs, each);
    if (tile.column >= pairs) return;
    const bool whole_x = APART ? aligned<N>(x) : aligned<2>(x), whole_t = aligned<N>(cos) && aligned<N>(sin);
    REAL first[N], second[N], c[N], s[N], both[2];
#pragma unroll 2
    for (long long row = tile.first; row < tile.last; row++) {
        REAL* const p = x + row * 2 * pairs + (APART ? tile.column : 2 * tile.column);
        const long long angle = row % length * pairs + tile.column;
        load_pack<N>(cos + angle, whole_t, c);
        load_pack<N>(sin + angle, whole_t, s);
        if (APART) {
            load_pack<N>(p, whole_x, first);
            load_pack<N>(p + pairs, whole_x, second);
        } else {
            load_pack<2>(p, whole_x, both);
            first[0] = both[0];
            second[0] = both[1];
        }
#pragma unroll
        for (int v = 0; v < N; v++) {
            const REAL turned = first[v] * c[v] - second[v] * (sign * s[v]);
            second[v] = second[v] * c[v] + first[v] * (sign * s[v]);
            first[v] = turned;
        }
        if (APART) {
            store_pack<N>(p, whole_x, first);
            store_pack<N>(p + pairs, whole_x, second);
        } else {
            both[0] = first[0];
            both[1] = second[0];
            store_pack<2>(p, whole_x, both);
        }
    }
}

extern "C" __global__ void rotate(
    REAL* __restrict__ x, const REAL* __restrict__ cos, const REAL* __restrict__ sin, REAL sign, long long rows,
    int length, int pairs, int apart, long long each) {
    if (!apart) rotate_tile<1, false>(x, cos, sin, sign, rows, length, pairs, each);
    else if (pairs % PACK == 0) rotate_tile<PACK, true>(x, cos, sin, sign, rows, length, pairs, each);
    else rotate_tile<1, true>(x, cos, sin, sign, rows, length, pairs, each);
}
