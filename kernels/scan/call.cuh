// Shared by the kernels of the SRU, the QRNN and the minGRU: the cells, the arguments of a launch, and streams of rows.
//
//   SRU     f = sigmoid(u1 + v_f c' + b_f)   c = f c' + (1 - f) u0   r = sigmoid(u2 + v_r c' + b_r)   h = r g(c) + (1 - r) skip
//   QRNN    z = tanh(u0 + b_z)   f, o, i = sigmoid(u + b)            c = f c' + (1 - f) z, or + i z   h = o c
//   (Lei et al. 2018, without v in the first version; Bradbury et al. 2017)
//
// Without v a step is c = p c' + q, and p and q do not depend on any cell. Such a row is divided into parts of PART steps, from its first
// step in the launch. A part computes the map of the cell before it: for each step a factor, the product of the p so far, and a summand, the
// cell if the part started from zero. The cell is factor * (cell before the part) + summand. So the parts of a row can be computed at the
// same time. Every kernel divides rows this way, wherever it computes them, and therefore rounds the same: a row has the same bits in every
// batch. The first part starts from the row's first cell, and its factor is zero.

#include "../device.cuh"

constexpr int TILE = 64, PART = 128;                                        // steps
constexpr int CANDIDATE = 0, FORGET = 1, OUTPUT = 2, LAST_BLOCK = 3;        // LAST_BLOCK: an SRU's skip, a QRNN's input gate
constexpr bool IS_SRU = SRU, LINEAR = !OWN_CELL;
constexpr int NO_SKIP = 0, SKIP_BLOCK = 1, SKIP_COLUMNS = 2;

#if GATES_FLOAT32
typedef float Gate;
#else
typedef Half Gate;
#endif
#if SKIP_FLOAT32
typedef float Skip;
#else
typedef Half Skip;
#endif

// The arguments of a launch. The second array of a pair belongs to the backward direction. Outputs that are not requested are null. Every
// member has eight bytes: the launcher passes integers.
struct Call {
    const void* data[2];                // (tokens, inputs), if the kernel multiplies them
    const void* source[2];              // the packed weights; gate inputs (tokens, blocks x hidden); or tables
    const float* bias[2];               // (blocks x hidden)
    const float* own_cell[2];           // (2 x hidden) an SRU's v
    const void* left[2];                // (rows, window - 1, inputs), or for ids (rows, window - 1) int64; null for zeros
    void* left_after[2];                // the same for the next chunk
    const float* before[2];             // (slots, hidden) cells, null for zeros
    float* after[2];                    // (slots, hidden)
    const int* slots_before[2];         // (rows,) the slot that a row starts from; null: its row number
    const int* slots_after[2];          // (rows,) the slot of its new state; null: its row number
    long long skip_from[2];
    double scale[2];                    // factor of the skip
    const void* offsets;                // (rows + 1,) int32, or int64 when `wide`
    const void* ids;                    // (tokens,) int32, or int64 when `wide_ids`
    const Skip* skip;                   // (tokens, skip_stride); a unit's skip is in column skip_from + unit
    float* steps;                       // (tokens, width)
    float* last;                        // (rows, width)
    float* mean;
    float* max;
    float2* maps[2];                    // (parts, hidden) if the parts of a row are computed apart: the map of each, see fold.cu
    float2* rests[2];                   // (rows, hidden) the output gate and the skip block of the last steps
    long long wide, wide_ids, rows, hidden, width, inputs, height, skip_stride;     // height: rows of a table
    long long streams, slices, parts;   // parts: for which there are maps

    __device__ long long offset(long long row) const {
        return wide ? ((const long long*)offsets)[row] : (long long)((const int*)offsets)[row];
    }
    // Loads only the low word of a wide id: a conversion would wait for the load.
    __device__ int id(long long token) const { return ((const int*)ids)[wide_ids ? 2 * token : token]; }
    __device__ long long slot_before(int direction, int row) const { return slots_before[direction] ? slots_before[direction][row] : row; }
    __device__ long long slot_after(int direction, int row) const { return slots_after[direction] ? slots_after[direction][row] : row; }
    __device__ bool all_steps() const { return steps || mean || max; }
};

// The whole rows that a team computes. A place is the position of a step in the order of the computation.
struct Stream {
    long long begin;                    // the first token
    int places;                         // the number of tokens
    int first, until;                   // the first row, and the row after the last
    int direction;

    __device__ int tiles() const { return (places + TILE - 1) / TILE; }
    __device__ int places_of(int tile) const { return min(TILE, places - tile * TILE); }
    __device__ long long token(int place) const { return begin + (direction ? places - 1 - place : place); }
    __device__ int row(int ordinal) const { return direction ? until - 1 - ordinal : first + ordinal; }
    // The place of a row's first step; for the row after the last, the end.
    __device__ int start_of(const Call& call, int ordinal) const {
        if (ordinal > until - first) return 0x7fffffff;
        return direction ? (int)(begin - call.offset(until - ordinal)) + places : (int)(call.offset(first + ordinal) - begin);
    }
    __device__ int ordinal_of(const Call& call, int place) const {
        int low = 0, high = until - first - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (start_of(call, middle) <= place) low = middle;
            else high = middle - 1;
        }
        return low;
    }
};

// The parameters of a thread's hidden unit.
struct Unit {
    int index;                          // number of the hidden unit
    float bias[4], v_forget, v_output;
};

// Returns the activation of a QRNN's candidate, by its number among CANDIDATES of forms.py.
__device__ __forceinline__ float activated(float candidate) {
    if (ACTIVATION == 1) return candidate;
    if (ACTIVATION == 2) return candidate >= 0.0f ? candidate + 0.5f : sigmoid_of(candidate);
    return tanh_of(candidate);
}

// Computes p and q: the factor and the summand of a linear cell; otherwise the forget gate without its cell term, and the candidate.
__device__ __forceinline__ void prepare(const float (&gates)[4], const Unit& unit, float& p, float& q) {
    const float candidate = IS_SRU ? gates[CANDIDATE] : activated(gates[CANDIDATE] + unit.bias[CANDIDATE]);
    const float forget = gates[FORGET] + unit.bias[FORGET];
    if (!LINEAR) {
        p = EXACT ? forget : 0.5f * forget;
        q = candidate;
        return;
    }
    p = sigmoid_of(forget);
    q = !IS_SRU && BLOCKS == 4 ? sigmoid_of(gates[LAST_BLOCK] + unit.bias[LAST_BLOCK]) * candidate : fmaf(-p, candidate, candidate);
}

// Returns the hidden value of a step. cell_before: for an SRU whose gates depend on the previous cell.
__device__ __forceinline__ float hidden_of(float output, float skip, float cell, float cell_before, const Unit& unit) {
    if (!IS_SRU) return BLOCKS == 2 ? cell : sigmoid_of(output + unit.bias[OUTPUT]) * cell;
    const float gate = output + unit.bias[OUTPUT];
    const float r = sigmoid_of(LINEAR ? gate : fmaf(unit.v_output, cell_before, gate));
    return fmaf(r, (TANH ? tanh_of(cell) : cell) - skip, skip);
}
