// What the sources of the layers share: how threads take the elements of rows.
//
// Threads take elements in packs, of 16 bytes of REAL where rows are a multiple of that, else of one element.  Which
// thread takes which element depends on the shape alone: where memory is not aligned, a pack is loaded and stored
// element by element, and sums have the same bits.

#define PACK ((int)(16 / sizeof(REAL)))
#define NEGATIVE_INFINITY (-(REAL)__uint_as_float(0x7f800000u))
#define NOT_A_NUMBER ((REAL)__uint_as_float(0x7fc00000u))

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
// A product that the compiler does not join with an addition, which would save its rounding in some forms of a function
// and not in others.
__device__ __forceinline__ float product(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double product(double x, double y) { return __dmul_rn(x, y); }
__device__ __forceinline__ float larger(float x, float y) { return fmaxf(x, y); }  // the number where the other is NaN
__device__ __forceinline__ double larger(double x, double y) { return fmax(x, y); }
__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }

template <typename T, int N>
struct alignas(N * sizeof(T)) PackOf {
    T of[N];
};

template <int N, typename T>
__device__ __forceinline__ bool aligned(const T* p) {
    return (unsigned long long)p % (N * sizeof(T)) == 0;
}

// N elements to or from x; `whole` says that p is aligned.
template <int N, typename T>
__device__ __forceinline__ void load_pack(const T* p, bool whole, REAL* x) {
    if (N > 1 && whole) {
        PackOf<T, N> pack = *(const PackOf<T, N>*)p;
#pragma unroll
        for (int v = 0; v < N; v++) x[v] = (REAL)load(pack.of + v);
    } else {
#pragma unroll
        for (int v = 0; v < N; v++) x[v] = (REAL)load(p + v);
    }
}
template <int N, bool LAST = false, typename T>  // LAST: nobody reads them soon
__device__ __forceinline__ void store_pack(T* p, bool whole, const REAL* x) {
    if (N > 1 && whole) {
        PackOf<T, N> pack;
#pragma unroll
        for (int v = 0; v + 1 < N; v += 2) store_two(pack.of + v, x[v], x[v + 1]);
        if (LAST) store_last((PackOf<T, N>*)p, pack);
        else *(PackOf<T, N>*)p = pack;
    } else {
#pragma unroll
        for (int v = 0; v < N; v++) store(p + v, x[v]);
    }
}

// A row has a team of threads: one warp of several in a block, or the whole block.
struct Team {
    int size, lane;
    long long row;

    __device__ __forceinline__ explicit Team(int size)
        : size(size),
          lane(size == WARP ? (int)threadIdx.x % WARP : (int)threadIdx.x),
          row(size == WARP ? (long long)blockIdx.x * ((int)blockDim.x / WARP) + (int)threadIdx.x / WARP : blockIdx.x) {}

    // Over the team; every thread gets the result.
    __device__ __forceinline__ REAL sum(REAL x) const {
        x = warp_sum(x);
        return size == WARP ? x : warp_sum(of_warps(x, (REAL)0));
    }
    __device__ __forceinline__ REAL largest(REAL x) const {
        x = warp_max(x);
        return size == WARP ? x : warp_max(of_warps(x, NEGATIVE_INFINITY));
    }

   private:
    // The value of warp number i of the block in lane i; the others get `none`.
    __device__ __forceinline__ REAL of_warps(REAL x, REAL none) const {
        __shared__ REAL shown[WARP];
        int warp = (int)threadIdx.x / WARP, in_warp = (int)threadIdx.x % WARP;
        __syncthreads();  // what was shown before has been read
        if (in_warp == 0) shown[warp] = x;
        __syncthreads();
        return in_warp < size / WARP ? shown[in_warp] : none;
    }
};

// A tile of a matrix: each thread has a pack of columns, and walks over `each` rows.
struct Tile {
    int column;
    long long first, last, part;

    template <int N>
    __device__ __forceinline__ static Tile of(long long rows, int columns, long long each) {
        int packs = (columns + N - 1) / N, across = (packs + (int)blockDim.x - 1) / (int)blockDim.x;
        Tile tile;
        tile.part = blockIdx.x / across;
        tile.column = (int)(blockIdx.x % across * blockDim.x + threadIdx.x) * N;
        tile.first = tile.part * each;
        tile.last = tile.first + each < rows ? tile.first + each : rows;
        return tile;
    }
};
