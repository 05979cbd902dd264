// y[window][output] = bias[output] + sum over the window's taps and inputs of x * filter
//
// x: (windows + a tail, inputs), rows packed end to end. A window is `depth` = width x inputs values from its first step.
// filters: (depth, outputs); y: (windows, outputs). One thread owns one output of one window; adjacent threads read adjacent filters.

#include "../../stored.cuh"

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
