// Shared by both convolution kernels: the rows of a batch, their windows, and the activations.

constexpr int NONE = 0, RELU = 1, TANH = 2, GELU = 3;           // ACTIVATION and AFTER
constexpr int NO_GATE = 0, GLU = 1, GATED_TANH = 2;             // GATE
#define LEAST __int_as_float(0xff800000)                       // minus infinity
constexpr int BANKS = 8;                // convolutions of different widths over the same steps in one launch

// The rows of a batch and the windows over them; kernels/conv/geometry.py fills this structure. When only the last step of a stack is wanted
// (THINNED), a row has up to `count_out` output steps, `spacing_out` apart, ending with its last step, and they begin at a multiple of
// `count_out`. The same holds for the input steps if `count` is not 0. Otherwise rows are packed end to end.
struct Rows {
    const void* offsets;                // (rows + 1,) of the whole rows; int32, or int64 if `wide`
    const void* places;                 // (rows + 1,) where the windows of each row begin, without the `gap` places before each row
    long long wide, rows, count, spacing;       // count, spacing: of the input steps
    long long gap, count_out, spacing_out;
    long long left, right, stride;

    __device__ static int at(const void* offsets, long long wide, int row) { return ((const int*)offsets)[wide ? 2 * row : row]; }
    __device__ int offset(int row) const { return at(offsets, wide, row); }
    // The place at which the windows of a row begin; for row = rows, the end.
    __device__ int first_place(int row) const { return THINNED ? row * (int)count_out : at(places, wide, row) + row * (int)gap; }
};

// One row. Window n covers the steps from origin + n * stride on.
struct Row {
    int begin, steps, origin, needed;   // needed: the number of windows if THINNED, which does not depend on their reach

    __device__ Row(const Rows& rows, int row) {
        const int whole_begin = rows.offset(row), whole = rows.offset(row + 1) - whole_begin;
        begin = whole_begin, steps = whole, origin = -(int)rows.left, needed = 0;
        if (THINNED) {
            const int spacing = (int)rows.spacing, spacing_out = (int)rows.spacing_out;
            if (rows.count) begin = row * (int)rows.count, steps = min((int)rows.count, (whole + spacing - 1) / spacing);
            needed = min((int)rows.count_out, (whole + spacing_out - 1) / spacing_out);
            origin += steps - 1 - (needed - 1) * (int)rows.stride;
        }
    }
    __device__ int windows(const Rows& rows, int reach) const {
        const int room = steps + (int)rows.left + (int)rows.right - reach, stride = (int)rows.stride;
        return THINNED ? needed : room < 0 ? 0 : stride == 1 ? room + 1 : room / stride + 1;
    }
};

template <int KIND> __device__ __forceinline__ float activated(float value) {
    if (KIND == RELU) return larger(value, 0.0f);
    if (KIND == TANH) return tanh_of(value);
    if (KIND == GELU) return 0.5f * value * (1.0f + erff(value * 0.70710678f));
    return value;
}
__device__ __forceinline__ float gated(float value, float gate) { return (GATE == GATED_TANH ? tanh_of(value) : value) * sigmoid_of(gate); }
