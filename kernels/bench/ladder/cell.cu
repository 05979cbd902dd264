// The pointwise operations of an LSTM's step, after its two products:
//
//   i, f, o = sigmoid(x + h + bias)        g = tanh(x + h + bias)        cell = f cell + i g        hidden = o tanh(cell)
//
// x, h: (rows, 4 x units), the products with the inputs and with the hidden vectors; bias: (4 x units); cell: (rows, units) float32, in place;
// hidden: (rows, units). One thread owns one unit of one row.

#include "../stored.cuh"

struct Arguments {
    const Stored *x, *h, *bias;
    float* cell;
    Stored* hidden;
    long long rows, units;
};

__device__ float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

extern "C" __global__ void __launch_bounds__(THREADS) ladder(const Arguments a) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (at >= a.rows * a.units) return;
    const long long row = at / a.units, unit = at % a.units;
    float gate[4];
    for (int block = 0; block < 4; ++block) {
        const long long column = block * a.units + unit, place = 4 * row * a.units + column;
        gate[block] = wide(a.x[place]) + wide(a.h[place]) + wide(a.bias[column]);
    }
    const float cell = sigmoid(gate[1]) * a.cell[at] + sigmoid(gate[0]) * tanhf(gate[2]);
    a.cell[at] = cell;
    a.hidden[at] = narrow(sigmoid(gate[3]) * tanhf(cell));
}
