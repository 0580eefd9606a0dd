// Sums over rows, and of all elements, in an order that depends on the shape alone.

// Each run of `each` rows of a matrix becomes one row.  The first `cut` columns go to `first`, the others to `second`;
// `add` keeps what is there.
extern "C" __global__ void sum_rows(
    const REAL* source, REAL* first, REAL* second, long long rows, int columns, long long each, int cut, int add) {
    const Tile tile = Tile::of<1>(rows, columns, each);
    if (tile.column >= columns) return;
    REAL sum = 0;
#pragma unroll 8
    for (long long row = tile.first; row < tile.last; row++) sum += source[row * columns + tile.column];
    REAL* target = tile.column < cut ? first + tile.part * cut + tile.column
                                     : second + tile.part * (columns - cut) + (tile.column - cut);
    *target = add ? *target + sum : sum;
}

// By one block: the sum of `count` elements.
extern "C" __global__ void __launch_bounds__(1024) sum_all(const REAL* x, REAL* sum, long long count) {
    const Team team((int)blockDim.x);
    REAL total = 0;
#pragma unroll 4
    for (long long i = team.lane; i < count; i += blockDim.x) total += x[i];
    total = team.sum(total);
    if (team.lane == 0) *sum = total;
}
