// What the convolution's kernels share: where the rows of a batch lie, what comes out of them, and the activations.

constexpr int NONE = 0, RELU = 1, TANH = 2, GELU = 3;           // ACTIVATION and AFTER
constexpr int NO_GATE = 0, GLU = 1, GATED_TANH = 2;             // GATE
#define LEAST __int_as_float(0xff800000)                       // minus infinity
constexpr int BANKS = 8;                // filters of so many widths may go over the same steps in one launch

// A batch of rows, and what a convolution makes of it. Where only the last steps are wanted of each row (THINNED), a row gives one of every
// `every_out` of its steps, the last one among them, at most `most_out` of them, and these begin at a multiple of `most_out`; the same
// holds of what comes in if `most` is not 0. Otherwise rows lie end to end.
struct Rows {
    const void* offsets;                // (rows + 1,) of the whole rows; int32, or int64 when `wide`
    const void* places;                 // (rows + 1,) where each row's windows begin, as wide, `gap` more for each row before it
    long long wide, rows, most, every;          // most, every: of the steps that come in
    long long gap, most_out, every_out;
    long long left, right, stride;

    __device__ static int at(const void* offsets, long long wide, int row) { return ((const int*)offsets)[wide ? 2 * row : row]; }
    __device__ int offset(int row) const { return at(offsets, wide, row); }
    // Where the row's windows begin; of the row after the last, the end.
    __device__ int first_place(int row) const { return THINNED ? row * (int)most_out : at(places, wide, row) + row * (int)gap; }
};

// One row. Window n sees the steps from origin + n * stride on.
struct Row {
    int begin, steps, origin, last;     // last: how many windows there are, where that does not depend on how far they reach

    __device__ Row(const Rows& rows, int row) {
        const int whole_begin = rows.offset(row), whole = rows.offset(row + 1) - whole_begin;
        begin = whole_begin, steps = whole, origin = -(int)rows.left, last = 0;
        if (THINNED) {
            const int every = (int)rows.every, every_out = (int)rows.every_out;
            if (rows.most) begin = row * (int)rows.most, steps = min((int)rows.most, (whole + every - 1) / every);
            last = min((int)rows.most_out, (whole + every_out - 1) / every_out);
            origin += steps - 1 - (last - 1) * (int)rows.stride;
        }
    }
    __device__ int windows(const Rows& rows, int reach) const {
        const int room = steps + (int)rows.left + (int)rows.right - reach, stride = (int)rows.stride;
        return THINNED ? last : room < 0 ? 0 : stride == 1 ? room + 1 : room / stride + 1;
    }
};

template <int KIND> __device__ __forceinline__ float activated(float value) {
    if (KIND == RELU) return larger(value, 0.0f);
    if (KIND == TANH) return tanh_of(value);
    if (KIND == GELU) return 0.5f * value * (1.0f + erff(value * 0.70710678f));
    return value;
}
__device__ __forceinline__ float gated(float value, float gate) { return (GATE == GATED_TANH ? tanh_of(value) : value) * sigmoid_of(gate); }
