// Shared by the kernels of the SRU and the QRNN: the cells, the computation of a stream of rows by a team of threads, and the outputs.
//
//   SRU     f = sigmoid(u1 + v_f c' + b_f)   c = f c' + (1 - f) u0   r = sigmoid(u2 + v_r c' + b_r)   h = r g(c) + (1 - r) skip
//   QRNN    z = tanh(u0 + b_z)   f, o, i = sigmoid(u + b)            c = f c' + (1 - f) z, or + i z   h = o c
//   (Lei et al. 2018, without v in the first version; Bradbury et al. 2017)
//
// A stream is whole rows packed end to end. It is computed in tiles of 64 steps. The gates of a tile are in shared memory: 64 steps of
// UNITS hidden units. A team has GROUPS threads for each unit, and a thread computes runs of RUN steps. First, all threads compute
// everything that does not depend on the cell. Then the groups take turns: a group computes the cells of its run, with one multiplication
// and one addition for each step, and hands its cells to the next group. So a cell goes through the same operations in the same order in
// every batch, and for every division of a row into chunks.
//
// When one row has to fill the device (RING), consecutive tiles belong to different teams of a cluster. Each tile maps the cell c before it
// to a c + b. The teams exchange a and b, so that each can predict the cell before its own tile, except for rounding. To be bit-exact
// nevertheless, a team computes two bounds: one from slightly below the prediction and one from slightly above. A step f c + q with
// f >= 0, rounded once, is monotonic in c. So where both bounds meet at the end of the tile, every cell between them ends there too, and
// the team sends that cell to the next team at once. Then it computes the tile from the cell that the previous team sent. If a
// prediction was so wrong that the team has sent a different cell, it notifies all teams, and everything is computed again without
// predictions.

#include "../device.cuh"

#if GATES_FLOAT32
typedef float Gate;
#else
typedef Half Gate;
#endif
#if TAPS > 1
typedef float Kept;                     // what tiles hold: sums of several gates are not rounded again
#else
typedef Gate Kept;
#endif
#if SKIP_FLOAT32
typedef float Skip;
#else
typedef Half Skip;
#endif

constexpr int TILE = 64, RUNS = TILE / RUN;
constexpr int TEAM = GROUPS * UNITS;                                        // threads of a team
constexpr int TEAMS = 2 * CTAS;                                             // teams of a ring
constexpr int CANDIDATE = 0, FORGET = 1, OUTPUT = 2, LAST_BLOCK = 3;        // LAST_BLOCK: an SRU's skip, a QRNN's input gate
constexpr bool IS_SRU = SRU, LINEAR = !OWN_CELL;
constexpr float WIDTH = 1.0f / (1 << 21);                                   // relative distance of a bound from the prediction
constexpr int NO_SKIP = 0, SKIP_BLOCK = 1, SKIP_COLUMNS = 2;

// Whether a tile has a block: it has all blocks, or the blocks that the cell needs.
__host__ __device__ constexpr bool in_tile(int block) {
    return block < BLOCKS && (ALL_BLOCKS || block == CANDIDATE || block == FORGET || (!IS_SRU && block == LAST_BLOCK));
}
__host__ __device__ constexpr int slot_of(int block) { return block > OUTPUT && !ALL_BLOCKS ? OUTPUT : block; }
__host__ __device__ constexpr int block_of(int slot) { return slot == OUTPUT && !ALL_BLOCKS ? LAST_BLOCK : slot; }
constexpr int SLOTS = in_tile(0) + in_tile(1) + in_tile(2) + in_tile(3);
constexpr int COLUMNS = SLOTS * UNITS;                                      // columns of a tile, block by block
constexpr int STRIDE = COLUMNS + 16 / (int)sizeof(Kept);                    // stride of a step, without bank conflicts

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
    long long wide, wide_ids, rows, hidden, width, inputs, height, skip_stride;     // height: rows of a table
    long long streams, slices;

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
    int start, stride;                  // the first tile of this team, and the distance between its tiles
    int direction;

    __device__ int all_tiles() const { return (places + TILE - 1) / TILE; }
    __device__ int tiles() const { return (all_tiles() - start + stride - 1) / stride; }
    __device__ int tile(int n) const { return start + n * stride; }
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

// Advances a cell by one step. `prepare` computes p and q.
__device__ __forceinline__ float advance(float cell, float p, float q, const Unit& unit) {
    if (LINEAR) return fmaf(p, cell, q);
#if EXACT
    return fmaf(sigmoid_of(fmaf(unit.v_forget, cell, p)), cell - q, q);
#else
    // f = (1 + t) / 2, so that f (c' - q) + q = t (c' - q) / 2 + (c' + q) / 2: only the last operation waits for t.
    const float t = tanh_of(fmaf(unit.v_forget, cell, p));
    const float half = 0.5f * (cell - q);
    return fmaf(t, half, half + q);
#endif
}

// Computes p and q: the factor and the summand of a linear cell; otherwise the forget gate without its cell term, and the candidate.
__device__ __forceinline__ void prepare(const float (&gates)[4], const Unit& unit, float& p, float& q) {
    const float candidate = IS_SRU ? gates[CANDIDATE] : tanh_of(gates[CANDIDATE] + unit.bias[CANDIDATE]);
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

// The shared memory of one team.
struct Share {
    float carry[UNITS];                 // cells between two runs
    unsigned long long handed[GROUPS];  // barriers: a group has handed its cells over
    float sum[UNITS], largest[UNITS];   // sum and maximum of the row so far
    unsigned long long pooled[GROUPS];  // barriers: a group has added its run to the pools
#if RING
    float low[UNITS], high[UNITS];      // bounds between two runs
    unsigned long long bounded[GROUPS]; // barriers: a group has handed the bounds over
    float inbox[2][UNITS];              // cells from the previous team, alternating
    float2 runs[2][GROUPS][UNITS];      // the map of each run of the tile, alternating
    float2 maps[2][TEAMS][UNITS];       // the map of each team's tile, alternating
    unsigned long long arrived[2], credits[2], mapped[2];   // barriers: inbox full, next team's inbox free, maps full
    int broken;                         // a prediction was wrong
#endif
};

// The gates of BUFFERS tiles in shared memory, used in rotation, and the addresses of their barriers, eight bytes apart.
struct Tiles {
    Kept* gates;
    unsigned full, empty;
};

// The rows of a run.
struct Rows {
    unsigned firsts, lasts;             // bit masks: the steps that begin a row, and the steps that end a row
    int place, start, next;             // first place of the run, of the row there, and of the row after it
    int ordinal, starts;                // ordinal of the row there; in each lane, the first place of a row after it

    // Returns the row of a step. Whole warps must call it.
    __device__ int of(const Call& call, const Stream& stream, int step) const {
        const unsigned before = __ballot_sync(~0u, starts <= place + step);
        // More rows begin here than a warp has lanes, because many of them have no steps.
        if (before == ~0u) return stream.row(stream.ordinal_of(call, place + step));
        return stream.row(ordinal + __popc(before));
    }
};

// Reads a gate of a block that is not in the tiles.
__device__ Gate gate_elsewhere(const Call& call, int direction, long long token, int block, int unit);

struct Encoder {
    const Call& call;
    const Stream& stream;
    Share& share;
    const Tiles& tiles;
    int thread, barrier;                // thread of the team; the barrier where the team meets
    Unit unit;
    bool real;                          // the layer has this unit

    __device__ int group() const { return thread / UNITS; }
    __device__ int column() const { return thread % UNITS; }
    __device__ bool is_last_group() const { return group() == GROUPS - 1; }
    __device__ bool pools() const { return call.mean || call.max; }
    __device__ float first_cell(int row) const {
        const float* before = call.before[stream.direction];
        return before && real ? before[call.slot_before(stream.direction, row) * call.hidden + unit.index] : 0.0f;
    }

    // Finds the rows of a run. Loads nothing if the run is inside the row of the previous lookup.
    __device__ __forceinline__ void look_up(int place, Rows& rows) const {
        rows.place = place, rows.firsts = rows.lasts = 0;
        if (place > rows.start && place + RUN < rows.next) return;
        const int lane = threadIdx.x % 32;
        for (;;) {
            rows.starts = stream.start_of(call, rows.ordinal + 1 + lane);
            const int passed = __popc(__ballot_sync(~0u, rows.starts <= place));
            if (passed == 0) break;
            rows.start = __shfl_sync(~0u, rows.starts, passed - 1), rows.ordinal += passed;
        }
        rows.next = __shfl_sync(~0u, rows.starts, 0);
        rows.firsts = rows.start == place;
        for (int starts = rows.starts, ordinal = rows.ordinal;;) {
            const int after = starts - place;
            // A row that starts at the end of the stream is not in it.
            rows.firsts |= __reduce_or_sync(~0u, after < min(RUN, stream.places - place) ? 1u << after : 0u);
            rows.lasts |= __reduce_or_sync(~0u, after <= RUN ? 1u << (after - 1) : 0u);
            if (__shfl_sync(~0u, starts, 31) > place + RUN) break;
            ordinal += 32, starts = stream.start_of(call, ordinal + 1 + lane);
        }
    }

    // Writes the outputs of rows without steps, which are in no tile.
    __device__ void end_empty_rows() const {
#pragma unroll 1
        for (int base = stream.first; base < stream.until; base += 32) {
            const int row = base + threadIdx.x % 32;
            unsigned empty = __ballot_sync(~0u, row < stream.until && call.offset(row) == call.offset(row + 1));
            for (; empty; empty &= empty - 1) {
                const int row = base + __ffs(empty) - 1;
                if (group() > 0 || !real) continue;
                end(row, 0.0f, first_cell(row));
                pooled(row, 0.0f, 0.0f);
            }
        }
    }

    __device__ long long output_index(long long row) const { return row * call.width + stream.direction * call.hidden + unit.index; }
    __device__ void end(int row, float hidden, float cell) const {
        call.after[stream.direction][call.slot_after(stream.direction, row) * call.hidden + unit.index] = cell;
        if (call.last) call.last[output_index(row)] = hidden;
    }
    __device__ void pooled(int row, float mean, float largest) const {
        if (call.mean) call.mean[output_index(row)] = mean;
        if (call.max) call.max[output_index(row)] = largest;
    }

    __device__ float gate(const Kept* at, int block) const { return value_of(at[slot_of(block) * UNITS]); }
    __device__ __forceinline__ void read(const Kept* at, float& p, float& q) const {
        float values[4];
#pragma unroll
        for (int block = 0; block < 4; ++block)
            if (in_tile(block)) values[block] = gate(at, block);
        prepare(values, unit, p, q);
    }
    // Stores a hidden value in place of gates that are no longer needed. Every thread has its own.
    __device__ static void store_value(Kept* at, float value) {
        if (sizeof(Kept) == 4) *(float*)at = value;
        else at[0] = __float_as_uint(value) & 0xffff, at[UNITS] = __float_as_uint(value) >> 16;
    }
    __device__ static float stored_value(const Kept* at) {
        return sizeof(Kept) == 4 ? *(const float*)at : __uint_as_float((unsigned)at[0] | (unsigned)at[UNITS] << 16);
    }

    // Reads the gates of a run as `advance` takes them. For a row's first step, q is the cell after it.
    __device__ __forceinline__ void read_run(Kept* at, const Rows& rows, float (&p)[RUN], float (&q)[RUN]) const {
#pragma unroll
        for (int i = 0; i < RUN; ++i) read(at + i * STRIDE, p[i], q[i]);
        if (!rows.firsts) return;
        if (LINEAR && !call.before[stream.direction]) {
#pragma unroll
            for (int i = 0; i < RUN; ++i)
                if (rows.firsts >> i & 1) q[i] = advance(0.0f, p[i], q[i], unit);
            return;
        }
#pragma unroll 1
        for (unsigned firsts = rows.firsts; firsts; firsts &= firsts - 1) {
            const int i = __ffs(firsts) - 1;
            float p_first, q_first;
            read(at + i * STRIDE, p_first, q_first);
            const float begun = advance(first_cell(rows.of(call, stream, i)), p_first, q_first, unit);
            if (real) store_value(at + i * STRIDE, begun);
        }
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            if (rows.firsts >> i & 1) q[i] = stored_value(at + i * STRIDE);
    }

    // Computes the cells of a run in q, from the cell before the run. Returns the last.
    __device__ __forceinline__ float follow(float cell, unsigned firsts, const float (&p)[RUN], float (&q)[RUN]) const {
        if (!firsts) {
#pragma unroll
            for (int i = 0; i < RUN; ++i) q[i] = cell = advance(cell, p[i], q[i], unit);
        } else {
#pragma unroll
            for (int i = 0; i < RUN; ++i) q[i] = cell = firsts >> i & 1 ? q[i] : advance(cell, p[i], q[i], unit);
        }
        return cell;
    }

    // Gates and skip of a step that only its hidden value needs and that are not in the tile. They stay in the format of memory: a
    // conversion would wait for the load.
    struct Rest {
        Gate output, block;
        Skip columns;
    };
    __device__ __forceinline__ Rest rest_of(long long token) const {
        Rest rest{};
        if (!real) return rest;
        if constexpr (BLOCKS > OUTPUT && !in_tile(OUTPUT)) rest.output = gate_elsewhere(call, stream.direction, token, OUTPUT, unit.index);
        if constexpr (SKIP == SKIP_BLOCK && !in_tile(LAST_BLOCK)) rest.block = gate_elsewhere(call, stream.direction, token, LAST_BLOCK, unit.index);
        if constexpr (SKIP == SKIP_COLUMNS) rest.columns = call.skip[token * call.skip_stride + call.skip_from[stream.direction] + unit.index];
        return rest;
    }
    // Loads the rest of the first step that ends a row, and of all steps if every step has outputs, long before they are needed.
    __device__ __forceinline__ void load_rest(const Rows& rows, bool all_steps, Rest& rest, Rest (&rests)[RUN]) const {
        if (rows.lasts) rest = rest_of(stream.token(rows.place + __ffs(rows.lasts) - 1));
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            if (all_steps && rows.place + i < stream.places) rests[i] = rest_of(stream.token(rows.place + i));
    }
    __device__ __forceinline__ float hidden_at(const Kept* at, const Rest& rest, float cell, float cell_before) const {
        const float output = BLOCKS <= OUTPUT ? 0.0f : in_tile(OUTPUT) ? gate(at, OUTPUT) : value_of(rest.output);
        float skip = 0.0f;
        if (SKIP == SKIP_BLOCK) skip = in_tile(LAST_BLOCK) ? gate(at, LAST_BLOCK) : value_of(rest.block);
        if (SKIP == SKIP_COLUMNS) skip = (float)call.scale[stream.direction] * value_of(rest.columns);
        return hidden_of(output, skip, cell, cell_before, unit);
    }

    // Writes the outputs of the rows that end in a run. Their new states may overwrite the old states. rest: of the first step that ends a row.
    __device__ __forceinline__ void end_rows(const Kept* at, const Rows& rows, Rest rest, float cell_before, const float (&cells)[RUN]) const {
#pragma unroll 1
        for (unsigned lasts = rows.lasts; lasts; lasts &= lasts - 1) {
            const int step = __ffs(lasts) - 1, row = rows.of(call, stream, step);
            if (lasts != rows.lasts) rest = rest_of(stream.token(rows.place + step));
            float cell = cells[0], before = cell_before;
#pragma unroll
            for (int i = 1; i < RUN; ++i) {
                if (i > step) continue;
                before = cell, cell = cells[i];
            }
            if (!LINEAR && rows.firsts >> step & 1) before = first_cell(row);
            if (real) end(row, hidden_at(at + step * STRIDE, rest, cell, before), cell);
        }
    }

    // Writes the outputs of every step of a run, and stores the hidden values for the pools.
    __device__ __forceinline__ void emit(Kept* at, const Rows& rows, const Rest (&rests)[RUN], float cell_before, const float (&cells)[RUN]) const {
        const int steps = min(RUN, stream.places - rows.place);
        const long long stride = stream.direction ? -call.width : call.width;
        float* to = call.steps ? call.steps + output_index(stream.token(rows.place)) : nullptr;
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            float before = i ? cells[i ? i - 1 : 0] : cell_before;
            if (!LINEAR && rows.firsts >> i & 1) before = first_cell(rows.of(call, stream, i));
            const float hidden = hidden_at(at + i * STRIDE, rests[i], cells[i], before);
            if (i >= steps || !real) continue;
            if (to) to[i * stride] = hidden;
            if (pools()) store_value(at + i * STRIDE, hidden);
        }
    }

    // Adds the hidden values of a run to the pools, in the order of the steps.
    __device__ void pool(const Kept* at, const Rows& rows) const {
        const int steps = min(RUN, stream.places - rows.place);
        float sum = share.sum[column()], largest = share.largest[column()];
#pragma unroll 1
        for (int i = 0; i < steps; ++i) {
            const bool first = rows.firsts >> i & 1;
            const float hidden = stored_value(at + i * STRIDE);
            sum = first ? hidden : sum + hidden;
            largest = first ? hidden : larger(largest, hidden);
            if (rows.lasts >> i & 1) {
                const int row = rows.of(call, stream, i);
                if (real) pooled(row, sum / (float)(call.offset(row + 1) - call.offset(row)), largest);
            }
        }
        share.sum[column()] = sum, share.largest[column()] = largest;
    }

    // Computes the stream. Each group takes every GROUPS-th run, prepares it while earlier runs are computed, and hands its cells on.
    __device__ __forceinline__ void run() const {
        end_empty_rows();
        const bool all_steps = ALL_BLOCKS && call.all_steps(), pooling = ALL_BLOCKS && pools();
        const int before = (group() + GROUPS - 1) % GROUPS;
        Rows rows{0, 0, 0, 0, 0, -1, 0};
        float cell = 0.0f;
        unsigned parity = 0;            // parity of the number of this group's runs
#pragma unroll 1
        for (int n = group(), place; (place = n * RUN) < stream.places; n += GROUPS) {
            const int tile = n / RUNS, buffer = tile % BUFFERS;
            Kept* const at = tiles.gates + (buffer * TILE + n % RUNS * RUN) * STRIDE + column();
            look_up(place, rows);
            Rest rest{}, rests[RUN];
            load_rest(rows, all_steps, rest, rests);
            await(tiles.full + buffer * 8, tile / BUFFERS & 1);
            float p[RUN], q[RUN];
            read_run(at, rows, p, q);
            if (GROUPS > 1 && n > 0) {
                await(shared_address(&share.handed[before]), group() ? parity : parity ^ 1);
                cell = share.carry[column()];
            }
            const float cell_before = cell;
            cell = follow(cell, rows.firsts, p, q);
            if (GROUPS > 1) {
                share.carry[column()] = cell;
                arrive(shared_address(&share.handed[group()]));
            }
            if (all_steps) emit(at, rows, rests, cell_before, q);
            if (rows.lasts) end_rows(at, rows, rest, cell_before, q);
            if (pooling) {
                if (GROUPS > 1 && n > 0) await(shared_address(&share.pooled[before]), group() ? parity : parity ^ 1);
                pool(at, rows);
                if (GROUPS > 1) arrive(shared_address(&share.pooled[group()]));
            }
            parity ^= 1;
            arrive(tiles.empty + buffer * 8);
        }
    }

#if RING
    static_assert(GROUPS == RUNS, "launch shape");

    // Returns the address at which another team has what this team has at `local`.
    __device__ unsigned remote(const void* local, int team) const {
        const unsigned first = shared_address(&share) - team_index() % 2 * (unsigned)sizeof(Share);
        return in_block(first + team % 2 * (unsigned)sizeof(Share) + shared_address(local) - shared_address(&share), team / 2);
    }
    __device__ int team_index() const { return stream.start; }
    __device__ void meet_team() const { meet(barrier, TEAM); }

    // Sends a cell to the next team, which has room for two.
    __device__ void send(int turn, float cell) const {
        const int place = turn & 1, next = (team_index() + 1) % TEAMS;
        if (turn > 1) await(shared_address(&share.credits[place]), (turn >> 1) - 1 & 1);
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                     ::"r"(remote(&share.inbox[place][column()], next)), "r"(__float_as_uint(cell)), "r"(remote(&share.arrived[place], next)) : "memory");
    }
    // Receives a cell from the previous team, for the first group, and returns the credit for its room.
    __device__ float receive(int turn) const {
        const int place = turn & 1, before = (team_index() + TEAMS - 1) % TEAMS;
        await(shared_address(&share.arrived[place]), turn >> 1 & 1);
        const float cell = share.inbox[place][column()];
        __syncwarp();
        if (thread == 0)
            asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote(&share.credits[place], before)) : "memory");
        return cell;
    }
    __device__ void report_wrong_prediction() const {
        for (int team = 0; team < TEAMS; ++team)
            asm volatile("st.relaxed.cluster.shared::cluster.b32 [%0], %1;" ::"r"(remote(&share.broken, team)), "r"(1) : "memory");
    }

    // Returns the map of a run, cell -> x cell + y. scale: grows to the largest magnitude of a cell on the way.
    __device__ __forceinline__ float2 map_of(unsigned firsts, const float (&p)[RUN], const float (&q)[RUN], float& scale) const {
        float2 map{1.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            const bool first = firsts >> i & 1;
            map = float2{first ? 0.0f : p[i] * map.x, first ? q[i] : fmaf(p[i], map.y, q[i])};
            scale = fmaxf(scale, fabsf(map.y));
        }
        return map;
    }
    // Exchanges the maps of this turn with all teams. Returns the predicted cell before this team's tile; `after` becomes the cell after all
    // tiles of the turn.
    __device__ __forceinline__ float predict(int turn, int active, const float2& run_map, float& after) const {
        const int place = turn & 1;
        share.runs[place][group()][column()] = run_map;
        if (thread == 0) expect(shared_address(&share.mapped[place]), active * UNITS * 8);
        meet_team();
        float2 map{1.0f, 0.0f};
#pragma unroll
        for (int run = 0; run < GROUPS; ++run) {
            const float2 next = share.runs[place][run][column()];
            map = float2{next.x * map.x, fmaf(next.x, map.y, next.y)};
        }
        for (int team = group(); team < TEAMS; team += GROUPS)
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
                         ::"r"(remote(&share.maps[place][team_index()][column()], team)), "r"(__float_as_uint(map.x)), "r"(__float_as_uint(map.y)),
                           "r"(remote(&share.mapped[place], team)) : "memory");
        await(shared_address(&share.mapped[place]), turn >> 1 & 1);
        float predicted = after;
#pragma unroll
        for (int team = 0; team < TEAMS; ++team) {
            const float2 next = share.maps[place][team][column()];
            if (team == team_index()) predicted = after;
            if (team < active) after = fmaf(next.x, after, next.y);
        }
        return predicted;
    }

    // Computes a ring: each team has every TEAMS-th tile, and each group one run of it. turn, received, sent: counts over both rounds.
    __device__ __forceinline__ void run_ring(int& turn, int& received, int& sent, bool trusted) const {
        if (team_index() == 0) end_empty_rows();
        const bool all_steps = ALL_BLOCKS && call.all_steps();
        const int all = stream.all_tiles();
        Rows rows{0, 0, 0, 0, 0, -1, 0};
        float expected = 0.0f;
#pragma unroll 1
        for (int n = 0; n < stream.tiles(); ++n, ++turn) {
            const int tile = stream.tile(n), place = tile * TILE + group() * RUN, buffer = turn % BUFFERS;
            const bool hands_on = tile + 1 < all;
            Kept* const at = tiles.gates + buffer * TILE * STRIDE + group() * RUN * STRIDE + column();
            if (thread == 0 && tile > 0) expect(shared_address(&share.arrived[received & 1]), UNITS * 4);
            look_up(place, rows);
            Rest rest{}, rests[RUN];
            load_rest(rows, all_steps, rest, rests);
            await(tiles.full + buffer * 8, turn / BUFFERS & 1);
            float p[RUN], q[RUN], scale = 0.0f;
            read_run(at, rows, p, q);
            // Both bounds of the prediction go through the tile. Where they meet, the cell after the tile is known.
            float low = 0.0f, high = 1.0f;
            if (trusted) {
                const float2 map = map_of(rows.firsts, p, q, scale);
                const float predicted = predict(turn, min(TEAMS, all - n * TEAMS), map, expected);
                const float width = (fabsf(predicted) + scale) * WIDTH;
                low = predicted - width, high = predicted + width;
                if (group() > 0) {
                    await(shared_address(&share.bounded[group() - 1]), turn & 1);
                    low = share.low[column()], high = share.high[column()];
                }
#pragma unroll
                for (int i = 0; i < RUN; ++i) {
                    const bool first = rows.firsts >> i & 1;
                    low = first ? q[i] : fmaf(p[i], low, q[i]);
                    high = first ? low : fmaf(p[i], high, q[i]);
                }
                if (!is_last_group()) {
                    share.low[column()] = low, share.high[column()] = high;
                    arrive(shared_address(&share.bounded[group()]));
                }
            }
            const bool known = is_last_group() && low == high;
            if (known && hands_on) send(sent, low);

            // Then the exact cells.
            float cell = 0.0f;
            if (group() > 0) {
                await(shared_address(&share.handed[group() - 1]), turn & 1);
                cell = share.carry[column()];
            } else if (tile > 0) cell = receive(received);
            received += tile > 0;
            const float cell_before = cell;
            cell = follow(cell, rows.firsts, p, q);
            if (!is_last_group()) {
                share.carry[column()] = cell;
                arrive(shared_address(&share.handed[group()]));
            } else if (hands_on && !known) send(sent, cell);
            if (known && hands_on && real && cell != low) report_wrong_prediction();
            sent += hands_on;
            if (all_steps) emit(at, rows, rests, cell_before, q);
            if (rows.lasts) end_rows(at, rows, rest, cell_before, q);
            arrive(tiles.empty + buffer * 8);
            if (!trusted) meet_team();          // predictions meet the team too
        }
    }
#endif
};

// The part of the problem that a block computes.
struct BlockPart {
    int slice, group, direction;        // its hidden units, its rows, its direction
    unsigned rank;                      // its number in the cluster
};
__device__ __forceinline__ BlockPart block_part() {
    return BlockPart{(int)blockIdx.y, (int)blockIdx.x / CTAS, (int)blockIdx.z, CTAS > 1 ? cluster_rank() : 0};
}

// A border between streams: the first row at or after it, and that row's first token.
struct Edge {
    int row;
    unsigned token;
};
// The two streams of a block, or the single stream of a ring. Every stream has an equal share of the tokens. A row belongs to the stream
// that has its first token. Each warp searches independently: it looks at 32 rows at once, then at the rows between the two rows that
// enclose the border.
struct Streams {
    Edge edges[3];

    __device__ __forceinline__ explicit Streams(const Call& call, const BlockPart& part) {
        const int lane = threadIdx.x % 32, first = RING ? part.group : 2 * part.group;
        const unsigned tokens = (unsigned)call.offset(call.rows), streams = (unsigned)call.streams;
        int low[3];
#pragma unroll
        for (int n = 0; n < 3; ++n) {
            edges[n] = first + n == 0 ? Edge{0, 0} : Edge{(int)call.rows, tokens};
            low[n] = first + n < call.streams ? 0 : edges[n].row;
        }
#pragma unroll 1
        while (low[0] < edges[0].row || low[1] < edges[1].row || low[2] < edges[2].row) {
#pragma unroll
            for (int n = 0; n < 3; ++n) {
                const int stride = (edges[n].row - low[n] + 31) / 32, row = min(low[n] + lane * stride, edges[n].row);
                const unsigned token = (unsigned)call.offset(row);
                // Rows at the known border do not count.
                const bool earlier = (unsigned long long)token * streams < (unsigned long long)tokens * (first + n);
                const int before = __popc(__ballot_sync(~0u, row < edges[n].row && earlier));
                const unsigned first_token = __shfl_sync(~0u, token, before % 32);
                const int next = low[n] + before * stride;
                low[n] = before ? next - stride + 1 : low[n];
                if (before < 32 && next < edges[n].row) edges[n] = Edge{next, first_token};
            }
        }
    }
    // Returns the block's first or second stream.
    __device__ __forceinline__ Stream stream(const BlockPart& part, int s) const {
        const Edge from = s && !RING ? edges[1] : edges[0], until = s && !RING ? edges[2] : edges[1];
        Stream stream;
        stream.direction = part.direction;
        stream.first = from.row, stream.until = until.row;
        stream.begin = from.token, stream.places = (int)(until.token - from.token);
        stream.start = RING ? 2 * part.rank + s : 0, stream.stride = RING ? TEAMS : 1;
        return stream;
    }
};

// Returns whether everything must be computed again without predictions. Every thread of a ring calls it at the end of a round.
__device__ __forceinline__ bool again(const Share& team, int& round) {
#if RING
    __syncwarp();
    meet_cluster();
    return round++ == 0 && *(volatile const int*)&team.broken;
#else
    return false;
#endif
}

// Initialises the barriers of a team. One thread calls it.
__device__ __forceinline__ void init_team(Share& team) {
    for (int group = 0; group < GROUPS; ++group) {
        make_barrier(shared_address(&team.handed[group]), UNITS);
        make_barrier(shared_address(&team.pooled[group]), UNITS);
    }
#if RING
    for (int group = 0; group < GROUPS; ++group) make_barrier(shared_address(&team.bounded[group]), UNITS);
    for (int place = 0; place < 2; ++place) {
        make_barrier(shared_address(&team.arrived[place]), 1);
        make_barrier(shared_address(&team.credits[place]), 1);
        make_barrier(shared_address(&team.mapped[place]), 1);
    }
    team.broken = 0;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Computes a stream: the work of a team.
__device__ __forceinline__ void encode(const Call& call, const BlockPart& part, const Stream& stream, Share& share, const Tiles& tiles, int s, int thread) {
    Unit unit;
    unit.index = part.slice * UNITS + thread % UNITS;
    const bool real = unit.index < call.hidden;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) unit.bias[block] = real ? call.bias[stream.direction][block * call.hidden + unit.index] : 0.0f;
    if (OWN_CELL) {
        const float* v = call.own_cell[stream.direction];
        unit.v_forget = real ? (EXACT ? 1.0f : 0.5f) * v[unit.index] : 0.0f;
        unit.v_output = real ? v[call.hidden + unit.index] : 0.0f;
    }
    const Encoder encoder{call, stream, share, tiles, thread, 1 + s, unit, real};
#if RING
    int turn = 0, received = 0, sent = 0, round = 0;
    do encoder.run_ring(turn, received, sent, round == 0);
    while (again(share, round));
#else
    encoder.run();
#endif
}
