// From one element type to another, in one pass: what is contiguous, and what has strides.

template <typename T>
struct __align__(4 * sizeof(T)) Four {
    T at[4];
};

extern "C" __global__ void convert_flat(const FROM* __restrict__ x, TO* __restrict__ y, long long count) {
    long long i = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    bool aligned = (unsigned long long)x % sizeof(Four<FROM>) == 0 && (unsigned long long)y % sizeof(Four<TO>) == 0;
    if (aligned && i + 4 <= count) {
        Four<FROM> from = *(const Four<FROM>*)(x + i);
        Four<TO> to;
        for (int j = 0; j < 4; j++) store(to.at + j, load(from.at + j));
        *(Four<TO>*)(y + i) = to;
    } else {
        for (int j = 0; j < 4; j++)
            if (i + j < count) store(y + i + j, load(x + i + j));
    }
}

// A warp takes a row.  Rows have four indices, of extents n0 (the rest), n1, n2 and n3; strides count elements.
extern "C" __global__ void convert_rows(
    const FROM* __restrict__ x, TO* __restrict__ y, long long rows, long long columns,
    long long n1, long long n2, long long n3,
    long long x0, long long x1, long long x2, long long x3, long long x4,
    long long y0, long long y1, long long y2, long long y3, long long y4
) {
    long long row = (long long)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    long long i3 = row % n3, rest = row / n3;
    long long i2 = rest % n2;
    rest /= n2;
    long long i1 = rest % n1, i0 = rest / n1;
    x += i0 * x0 + i1 * x1 + i2 * x2 + i3 * x3;
    y += i0 * y0 + i1 * y1 + i2 * y2 + i3 * y3;
#pragma unroll 4
    for (long long c = threadIdx.x % WARP; c < columns; c += WARP) store(y + c * y4, load(x + c * x4));
}

// As convert_rows, of rows of whole packs that are aligned: a thread takes a pack, so that short rows, such as channels
// of a head, cost few instructions.  Indices are of 32 bits, whose divisions are much faster.
extern "C" __global__ void convert_packs(
    const FROM* __restrict__ x, TO* __restrict__ y, unsigned int count, unsigned int packs,
    unsigned int n1, unsigned int n2, unsigned int n3,
    long long x0, long long x1, long long x2, long long x3,
    long long y0, long long y1, long long y2, long long y3
) {
    const unsigned int number = blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= count) return;
    const unsigned int row = number / packs, column = 4 * (number - row * packs);
    const unsigned int row2 = row / n3, i3 = row - row2 * n3, row1 = row2 / n2, i2 = row2 - row1 * n2;
    const unsigned int i0 = row1 / n1, i1 = row1 - i0 * n1;
    const Four<FROM> from = *(const Four<FROM>*)(x + i0 * x0 + i1 * x1 + i2 * x2 + i3 * x3 + column);
    Four<TO> to;
    for (int j = 0; j < 4; j++) store(to.at + j, load(from.at + j));
    *(Four<TO>*)(y + i0 * y0 + i1 * y1 + i2 * y2 + i3 * y3 + column) = to;
}
