"""CUDA functions for tests of what compiles and launches them."""

from __future__ import annotations

SOURCE = """
// Sums of blocks of elements, in two rounds: lanes of a warp, then warps.
extern "C" __global__ void block_sums(const STORED* x, REAL* sums, long long count) {
    __shared__ REAL of_warps[8];
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    REAL sum = warp_sum(i < count ? (REAL)load(x + i) : (REAL)0);
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0;
        for (int w = 0; w < (int)(blockDim.x / WARP); w++) sum += of_warps[w];
        sums[blockIdx.x] = sum;
    }
}

extern "C" __global__ void largest_of_warp(const REAL* __restrict__ x, REAL* top) {
    REAL largest = warp_max(x[threadIdx.x]);
    top[threadIdx.x] = largest;
}

extern "C" __global__ void convert(const float* x, STORED* y, float* back, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    store(y + i, x[i]);
    back[i] = load(y + i);
}

extern "C" __global__ void without_barrier(int* x) {
    __shared__ int shown[64];
    shown[threadIdx.x] = (int)threadIdx.x;
    x[threadIdx.x] = shown[63 - threadIdx.x];
    shown[threadIdx.x] = -1;
}

extern "C" __global__ void two_barriers(int* x) {
    if (threadIdx.x == 0) __syncthreads();
    else __syncwarp();
    x[threadIdx.x] = 1;
}

extern "C" __global__ void scalars(double* x, int a, long long b, float c, double d, bool e, unsigned int f) {
    x[0] = a; x[1] = (double)b; x[2] = c; x[3] = d; x[4] = e ? 1 : 0; x[5] = f;
}
"""
