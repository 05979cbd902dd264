// Shared by the warp groups of step.cu: places of rows, arguments, meetings of blocks, and the 16-bit values of a product.

constexpr int DEPTH = 64, GROUP = 128;                                  // columns of a chunk; threads of a warp group
constexpr int GROUPS = ROWS / 64, MULTIPLY = GROUPS * GROUP;            // warp groups that multiply, and their threads
constexpr int PASSES_OF_H = FLOAT32 ? 3 : 1;                            // products of a chunk of h
constexpr int PHASES = RESET_BEFORE ? 2 : 1, MOST_GATES = RESET_BEFORE ? 2 : BLOCKS; // of a step; of a phase
constexpr int COLUMNS = MOST_GATES * UNITS, PARTS = UNITS / 16;         // columns of a product; parts of 16 units
constexpr int LEFT_BYTES = ROWS * DEPTH * 2, RIGHT_BYTES = COLUMNS * DEPTH * 2;
static_assert(!RESET_BEFORE || GRU, "a reset gate");
static_assert(THREADS == GROUP + MULTIPLY && UNITS % 16 == 0 && SORTED % (PAIR * ROWS) == 0, "launch shape");

// Where a row of a tile reads and writes.
struct alignas(16) Place {
    long long token, before, after;     // of this step; the beginnings of its states
    int row, steps;                     // row of the batch, or -1 for none; its number of steps
};
enum Kind { TILE, PHASE_ENDS, END };
// What the warp groups that multiply do next. kept: they advanced the same rows and units last, whose cells they still hold.
struct alignas(16) Turn {
    Kind kind;
    int phase, unit, kept;              // phase: counted from the first step on; unit: the first of the tile
};
struct Memory {
    alignas(1024) unsigned char left[STAGES][LEFT_BYTES];
    alignas(1024) unsigned char right[STAGES][RIGHT_BYTES];
    Place places[2][ROWS];
    Turn turns[2];
    int counts[2][GROUP / 32];
    unsigned long long full[STAGES], empty[STAGES], announced[2], taken[2];
};
static_assert(sizeof(Memory) <= SHARED, "SHARED is less than sizeof(Memory): see step.py");
extern __shared__ __align__(1024) unsigned char dynamic[];
__device__ __forceinline__ Memory& memory() { return *(Memory*)dynamic; }

#if X_FLOAT32
typedef float Value;
#else
typedef Half Value;
#endif

// The arguments of a launch.
struct Step {
    Calls calls;
    const Value* x;                     // (tokens, inputs), `x_apart` from token to token
    const void* ids;                    // (tokens,) the rows of the gates, int64 when `ids_wide`; or null: the tokens
    unsigned* meeting;
    long long ids_wide, x_apart, inputs;

    __device__ __forceinline__ const Call& call() const { return calls.sides[0]; }
    __device__ __forceinline__ int hidden() const { return (int)call().hidden; }
    __device__ __forceinline__ int rows() const { return (int)(call().until - call().first); }
    __device__ __forceinline__ int tiles_of_units() const { return (hidden() + UNITS - 1) / UNITS; }
    __device__ __forceinline__ int tiles() const { return (rows() + PAIR * ROWS - 1) / (PAIR * ROWS) * tiles_of_units(); }
    __device__ __forceinline__ int chunks_of_x() const { return ((int)inputs + DEPTH - 1) / DEPTH; }
    __device__ __forceinline__ int all_chunks_of_h() const { return PASSES_OF_H * ((hidden() + DEPTH - 1) / DEPTH); }
    __device__ __forceinline__ int chunks_of_h(int t) const { return t == 0 && !call().hidden_before ? 0 : all_chunks_of_h(); }
    __device__ __forceinline__ long long gate_row(long long token) const {
        return !ids ? token : ids_wide ? ((const long long*)ids)[token] : (long long)((const int*)ids)[token];
    }
    // Between steps, states are by row of the launch: the hidden values that enter step `t`, (TERMS, rows, hidden), and the
    // cells.
    __device__ __forceinline__ long long between(int row) const { return (row - call().first) * call().hidden; }
    __device__ __forceinline__ Half* hidden(int t, int term) const {
        return (Half*)call().exchange + (t % 2 * TERMS + term) * size();
    }
    __device__ __forceinline__ float* cells() const { return (float*)hidden(0, 0) + TERMS * size(); }
    // Between the phases of a step: the update gates, and the hidden values that the reset gates let pass.
    __device__ __forceinline__ float* updates() const { return cells() + size(); }
    __device__ __forceinline__ Half* passed(int term) const { return (Half*)(updates() + size()) + term * size(); }
    __device__ __forceinline__ long long size() const { return (long long)rows() * call().hidden; }
};

__device__ __forceinline__ int rank() { return PAIR > 1 ? cluster_rank() : 0; }
// Announces at the meeting what this thread and the threads that it has met in its block have written.
__device__ __forceinline__ void attend(const Step& step) { announce_to_device(step.meeting); }
// Waits until all blocks have met `times` times. The loading warp group calls it.
__device__ __forceinline__ void await_blocks(const Step& step, int times) {
    if (threadIdx.x == 0) {
        unsigned count;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(step.meeting) : "memory");
        while (count < times * gridDim.x);
    }
    meet(1, GROUP);
}

// Returns two values of a product's left operand. A GRU's hidden value in 16 bits is at most 32, as in the other kernels.
__device__ __forceinline__ unsigned of_x(float a, float b) { return narrow(a, b); }
__device__ __forceinline__ float bounded(float hidden) {
#if GRU && !FLOAT32
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(hidden) : "f"(-16.0f * LARGEST));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(hidden) : "f"(16.0f * LARGEST));
#endif
    return hidden;
}
__device__ __forceinline__ unsigned of_hidden(float a, float b, int term) {
    const unsigned first = narrow(bounded(a), bounded(b));
    return term ? narrow(a - low_of(first), b - high_of(first)) : first;
}
template <typename Two> __device__ __forceinline__ Quad piece_of(const float4 (&values)[2], Two two) {
    const float4 a = values[0], b = values[1];
    return Quad{two(a.x, a.y), two(a.z, a.w), two(b.x, b.y), two(b.z, b.w)};
}
