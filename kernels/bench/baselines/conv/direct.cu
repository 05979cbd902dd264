// y[window][output] = bias[output] + sum over the window's taps and inputs of x * filter
//
// x: (windows + a tail, inputs), rows packed end to end. A window is `depth` = width x inputs values from its first step.
// filters: (depth, outputs); y: (windows, outputs). One thread owns one output of one window; adjacent threads read adjacent filters.

#if HALVES
typedef unsigned short Stored;

__device__ float wide(Stored bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ Stored narrow(float value) {
    Stored bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#else
typedef float Stored;

__device__ float wide(Stored value) { return value; }
__device__ Stored narrow(float value) { return value; }
#endif

struct Arguments {
    const Stored *x, *filters, *bias;
    Stored* y;
    long long windows, depth, inputs, outputs;
};

extern "C" __global__ void __launch_bounds__(THREADS) conv(const Arguments a) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (at >= a.windows * a.outputs) return;
    const long long window = at / a.outputs, output = at % a.outputs;
    const Stored* seen = a.x + window * a.inputs;
    float sum = wide(a.bias[output]);
    for (long long term = 0; term < a.depth; ++term) sum = fmaf(wide(seen[term]), wide(a.filters[term * a.outputs + output]), sum);
    a.y[at] = narrow(sum);
}
