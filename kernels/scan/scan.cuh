// What the SRU's and the QRNN's kernels share: the cells, how a team of threads goes through gates, and what leaves the device.
//
//   SRU     f = sigmoid(u1 + v_f c' + b_f)   c = f c' + (1 - f) u0   r = sigmoid(u2 + v_r c' + b_r)   h = r g(c) + (1 - r) skip
//   QRNN    z = tanh(u0 + b_z)   f, o, i = sigmoid(u + b)            c = f c' + (1 - f) z, or + i z   h = o c
//   (Lei et al. 2018, without v its first version; Bradbury et al. 2017)
//
// Whole rows laid end to end are a stream, which is gone through 64 steps at a time: a tile. The gates of a tile are in shared memory,
// 64 steps of UNITS hidden units. A team has GROUPS threads for each unit, and a thread takes runs of RUN steps. Everything that does not
// wait for the cell is computed by all of them together; then one group after the other goes through its runs, a multiplication and an
// addition a step, and hands its cells to the next. So a cell sees the same operations one after the other whatever the batch and
// however a row is cut into chunks.
//
// Where one row is to fill the device (RING), tiles that follow each other lie with different teams of a cluster. Each tile makes a c + b
// of the cell c before it; the teams tell each other a and b, so that each can guess the cell before its own tile, but for rounding. To
// be exact to the bit all the same, the guess is taken a little too low and a little too high. A step f c + q with f >= 0, rounded
// once, never falls where c rises: where both have met at the end of the tile, every cell between them has, and what leaves the tile
// is sent to the next team at once. Then the tile is gone through from the cell that the team before sent. A team whose guess was so
// wrong that it had sent another cell tells all others, and the whole is computed once more without guesses.

#include "../device.cuh"

#if GATES_FLOAT32
typedef float Gate;
#else
typedef Half Gate;
#endif
#if TAPS > 1
typedef float Kept;                     // what tiles hold: sums of several gates are not rounded once more
#else
typedef Gate Kept;
#endif
#if SKIP_FLOAT32
typedef float Skip;
#else
typedef Half Skip;
#endif

constexpr int TILE = 64, RUNS = TILE / RUN;
constexpr int TEAM = GROUPS * UNITS;                                        // threads
constexpr int TEAMS = 2 * CTAS;                                             // of a ring
constexpr int CANDIDATE = 0, FORGET = 1, OUTPUT = 2, LAST_BLOCK = 3;        // LAST_BLOCK: an SRU's skip, a QRNN's input gate
constexpr bool IS_SRU = SRU, LINEAR = !OWN_CELL;
constexpr float WIDTH = 1.0f / (1 << 21);                                   // by how much a guess may be off
constexpr int NO_SKIP = 0, SKIP_BLOCK = 1, SKIP_COLUMNS = 2;

// Which blocks a tile has: all, or those that the cell needs.
__host__ __device__ constexpr bool in_tile(int block) {
    return block < BLOCKS && (ALL_BLOCKS || block == CANDIDATE || block == FORGET || (!IS_SRU && block == LAST_BLOCK));
}
__host__ __device__ constexpr int slot_of(int block) { return block > OUTPUT && !ALL_BLOCKS ? OUTPUT : block; }
__host__ __device__ constexpr int block_of(int slot) { return slot == OUTPUT && !ALL_BLOCKS ? LAST_BLOCK : slot; }
constexpr int SLOTS = in_tile(0) + in_tile(1) + in_tile(2) + in_tile(3);
constexpr int COLUMNS = SLOTS * UNITS;                                      // of a tile, block by block
constexpr int STRIDE = COLUMNS + 16 / (int)sizeof(Kept);                    // of a step, clear of bank conflicts

// What a launch is given; of arrays in pairs, the second is the backward direction's. Arrays that nobody wants are null. Eight bytes
// each, so that the launcher is a list of integers.
struct Call {
    const void* data[2];                // (tokens, inputs), of the product
    const void* source[2];              // the packed weights; (tokens, blocks x hidden) gates; or the tables of the ids
    const float* bias[2];               // (blocks x hidden)
    const float* own_cell[2];           // (2 x hidden) an SRU's v
    const void* left[2];                // (rows, window - 1, inputs), or of ids (rows, window - 1) int64; null for zeros
    void* left_after[2];                // the same for the next chunk
    const float* before[2];             // (lines, hidden) cells, null for zeros
    float* after[2];                    // (lines, hidden)
    const int* slots_before[2];         // (rows,) the line of the state that a row goes on from; null: its own
    const int* slots_after[2];          // (rows,) the line of its new state
    long long skip_from[2];
    double scale[2];                    // of the skip
    const void* offsets;                // (rows + 1,) int32, or int64 when `wide`
    const void* ids;                    // (tokens,) int32, or int64 when `wide_ids`
    const Skip* skip;                   // (tokens, skip_stride), the skip of a unit `skip_from` columns after it
    float* steps;                       // (tokens, width)
    float* last;                        // (rows, width)
    float* mean;
    float* max;
    long long wide, wide_ids, rows, hidden, width, inputs, height, skip_stride;     // height: lines of a table
    long long streams, slices;

    __device__ long long offset(long long row) const {
        return wide ? ((const long long*)offsets)[row] : (long long)((const int*)offsets)[row];
    }
    // Of the wide ones the low word, so that nothing waits for it before it is needed.
    __device__ int id(long long token) const { return ((const int*)ids)[wide_ids ? 2 * token : token]; }
    __device__ long long line_before(int direction, int row) const { return slots_before[direction] ? slots_before[direction][row] : row; }
    __device__ long long line_after(int direction, int row) const { return slots_after[direction] ? slots_after[direction][row] : row; }
    __device__ bool watched() const { return steps || mean || max; }
};

// The whole rows that a team goes through, whose places are counted in the order in which it does.
struct Stream {
    long long begin;                    // its first token
    int places;                         // as many as it has tokens
    int first, until;                   // its rows
    int start, stride;                  // the first tile of this team, and how far apart its tiles are
    int direction;

    __device__ int all_tiles() const { return (places + TILE - 1) / TILE; }
    __device__ int tiles() const { return (all_tiles() - start + stride - 1) / stride; }
    __device__ int tile(int n) const { return start + n * stride; }
    __device__ int places_of(int tile) const { return min(TILE, places - tile * TILE); }
    __device__ long long token(int place) const { return begin + (direction ? places - 1 - place : place); }
    __device__ int row(int ordinal) const { return direction ? until - 1 - ordinal : first + ordinal; }
    // The place of the row's first step; of the row after the last, the end.
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

// What one thread knows of its unit.
struct Unit {
    int index;                          // among the hidden units
    float bias[4], v_forget, v_output;
};

// One step of a cell; what p and q are, `prepare` says.
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

// Of a linear cell, what it is multiplied by and what is added; else what the forget gate is but for the cell, and the candidate.
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

// The hidden value of a step; cell_before: an SRU's gates may look at it.
__device__ __forceinline__ float hidden_of(float output, float skip, float cell, float cell_before, const Unit& unit) {
    if (!IS_SRU) return BLOCKS == 2 ? cell : sigmoid_of(output + unit.bias[OUTPUT]) * cell;
    const float gate = output + unit.bias[OUTPUT];
    const float r = sigmoid_of(LINEAR ? gate : fmaf(unit.v_output, cell_before, gate));
    return fmaf(r, (TANH ? tanh_of(cell) : cell) - skip, skip);
}

// Of one team, in shared memory.
struct Share {
    float carry[UNITS];                 // cells between two runs
    unsigned long long handed[GROUPS];  // barriers: that a group has handed its cells over
    float sum[UNITS], largest[UNITS];   // of the row so far
    unsigned long long pooled[GROUPS];  // barriers: that a group has added its run to them
#if RING
    float low[UNITS], high[UNITS];      // between two runs
    unsigned long long bounded[GROUPS]; // barriers: that a group has handed these over
    float inbox[2][UNITS];              // cells from the team before, by turns
    float2 runs[2][GROUPS][UNITS];      // what each run of the tile makes of a cell, by turns
    float2 maps[2][TEAMS][UNITS];       // what each team's tile does, by turns
    unsigned long long arrived[2], credits[2], mapped[2];   // barriers: of the inbox, that the next team has read its own, of the maps
    int broken;                         // a prediction was wrong
#endif
};

// The gates of tiles in shared memory, BUFFERS of them by turns; addresses of their barriers, eight bytes apart.
struct Tiles {
    Kept* gates;
    unsigned full, empty;
};

// The rows of a run.
struct Rows {
    unsigned firsts, lasts;             // which of its steps begin and end one
    int place, start, next;             // where the run begins, where the row there does, and where the next one does
    int ordinal, starts;                // of the row there; in each lane, of the rows after it

    // The row of a step; by whole warps.
    __device__ int of(const Call& call, const Stream& stream, int step) const {
        const unsigned before = __ballot_sync(~0u, starts <= place + step);
        // More than the lanes know of: many rows without steps.
        if (before == ~0u) return stream.row(stream.ordinal_of(call, place + step));
        return stream.row(ordinal + __popc(before));
    }
};

// A gate of a block that is not in the tiles.
__device__ Gate gate_elsewhere(const Call& call, int direction, long long token, int block, int unit);

struct Encoder {
    const Call& call;
    const Stream& stream;
    Share& own;
    const Tiles& tiles;
    int thread, barrier;                // of the team; at which all of it meets
    Unit unit;
    bool real;                          // there is such a unit

    __device__ int group() const { return thread / UNITS; }
    __device__ int column() const { return thread % UNITS; }
    __device__ bool is_last_group() const { return group() == GROUPS - 1; }
    __device__ bool pools() const { return call.mean || call.max; }
    __device__ float begins_with(int row) const {
        const float* before = call.before[stream.direction];
        return before && real ? before[call.line_before(stream.direction, row) * call.hidden + unit.index] : 0.0f;
    }

    // The rows of a run; nothing is looked up while it is inside the row that was looked up last.
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
            // What starts where the stream ends is no row of it.
            rows.firsts |= __reduce_or_sync(~0u, after < min(RUN, stream.places - place) ? 1u << after : 0u);
            rows.lasts |= __reduce_or_sync(~0u, after <= RUN ? 1u << (after - 1) : 0u);
            if (__shfl_sync(~0u, starts, 31) > place + RUN) break;
            ordinal += 32, starts = stream.start_of(call, ordinal + 1 + lane);
        }
    }

    // Rows without steps have no token in any tile.
    __device__ void end_empty_rows() const {
#pragma unroll 1
        for (int base = stream.first; base < stream.until; base += 32) {
            const int row = base + threadIdx.x % 32;
            unsigned empty = __ballot_sync(~0u, row < stream.until && call.offset(row) == call.offset(row + 1));
            for (; empty; empty &= empty - 1) {
                const int found = base + __ffs(empty) - 1;
                if (group() > 0 || !real) continue;
                end(found, 0.0f, begins_with(found));
                pooled(found, 0.0f, 0.0f);
            }
        }
    }

    __device__ long long line_out(long long line) const { return line * call.width + stream.direction * call.hidden + unit.index; }
    __device__ void end(int row, float hidden, float cell) const {
        call.after[stream.direction][call.line_after(stream.direction, row) * call.hidden + unit.index] = cell;
        if (call.last) call.last[line_out(row)] = hidden;
    }
    __device__ void pooled(int row, float mean, float largest) const {
        if (call.mean) call.mean[line_out(row)] = mean;
        if (call.max) call.max[line_out(row)] = largest;
    }

    __device__ float gate(const Kept* at, int block) const { return value_of(at[slot_of(block) * UNITS]); }
    __device__ __forceinline__ void read(const Kept* at, float& p, float& q) const {
        float values[4];
#pragma unroll
        for (int block = 0; block < 4; ++block)
            if (in_tile(block)) values[block] = gate(at, block);
        prepare(values, unit, p, q);
    }
    // Where the gates of a step were that only the cell needs, its value is kept; every thread has such a place of its own.
    __device__ static void keep(Kept* at, float value) {
        if (sizeof(Kept) == 4) *(float*)at = value;
        else at[0] = __float_as_uint(value) & 0xffff, at[UNITS] = __float_as_uint(value) >> 16;
    }
    __device__ static float keeps(const Kept* at) {
        return sizeof(Kept) == 4 ? *(const float*)at : __uint_as_float((unsigned)at[0] | (unsigned)at[UNITS] << 16);
    }

    // The gates of a run as `advance` wants them. For a row's first step, q is the cell after it.
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
            const float begun = advance(begins_with(rows.of(call, stream, i)), p_first, q_first, unit);
            if (real) keep(at + i * STRIDE, begun);
        }
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            if (rows.firsts >> i & 1) q[i] = keeps(at + i * STRIDE);
    }

    // From the cell before the run to the one after it; q becomes the cells.
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

    // What of a step's gates and skip is only needed for its hidden value and is not in the tile; as it is in memory, so that nothing
    // waits for it before it is needed.
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
    // Asked for long before it is needed: of the first step that ends a row, and of all steps where they are watched.
    __device__ __forceinline__ void ask_for(const Rows& rows, bool watched, Rest& rest, Rest (&rests)[RUN]) const {
        if (rows.lasts) rest = rest_of(stream.token(rows.place + __ffs(rows.lasts) - 1));
#pragma unroll
        for (int i = 0; i < RUN; ++i)
            if (watched && rows.place + i < stream.places) rests[i] = rest_of(stream.token(rows.place + i));
    }
    __device__ __forceinline__ float hidden_at(const Kept* at, const Rest& rest, float cell, float cell_before) const {
        const float output = BLOCKS <= OUTPUT ? 0.0f : in_tile(OUTPUT) ? gate(at, OUTPUT) : value_of(rest.output);
        float skip = 0.0f;
        if (SKIP == SKIP_BLOCK) skip = in_tile(LAST_BLOCK) ? gate(at, LAST_BLOCK) : value_of(rest.block);
        if (SKIP == SKIP_COLUMNS) skip = (float)call.scale[stream.direction] * value_of(rest.columns);
        return hidden_of(output, skip, cell, cell_before, unit);
    }

    // Ends the rows that end in a run, whose states may be where they began. rest: of the first of these steps.
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
            if (!LINEAR && rows.firsts >> step & 1) before = begins_with(row);
            if (real) end(row, hidden_at(at + step * STRIDE, rest, cell, before), cell);
        }
    }

    // What every step of a run gives. rests: of its steps. Hidden values that are pooled are kept.
    __device__ __forceinline__ void emit(Kept* at, const Rows& rows, const Rest (&rests)[RUN], float cell_before, const float (&cells)[RUN]) const {
        const int there = min(RUN, stream.places - rows.place);
        const long long stride = stream.direction ? -call.width : call.width;
        float* to = call.steps ? call.steps + line_out(stream.token(rows.place)) : nullptr;
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            float before = i ? cells[i ? i - 1 : 0] : cell_before;
            if (!LINEAR && rows.firsts >> i & 1) before = begins_with(rows.of(call, stream, i));
            const float hidden = hidden_at(at + i * STRIDE, rests[i], cells[i], before);
            if (i >= there || !real) continue;
            if (to) to[i * stride] = hidden;
            if (pools()) keep(at + i * STRIDE, hidden);
        }
    }

    // Adds a run to the pools, in the order of the steps.
    __device__ void pool(const Kept* at, const Rows& rows) const {
        const int there = min(RUN, stream.places - rows.place);
        float sum = own.sum[column()], largest = own.largest[column()];
#pragma unroll 1
        for (int i = 0; i < there; ++i) {
            const bool first = rows.firsts >> i & 1;
            const float hidden = keeps(at + i * STRIDE);
            sum = first ? hidden : sum + hidden;
            largest = first ? hidden : larger(largest, hidden);
            if (rows.lasts >> i & 1) {
                const int row = rows.of(call, stream, i);
                if (real) pooled(row, sum / (float)(call.offset(row + 1) - call.offset(row)), largest);
            }
        }
        own.sum[column()] = sum, own.largest[column()] = largest;
    }

    // Each group takes every GROUPS-th run, prepares it while those before are gone through, and hands its cells to the next group.
    __device__ __forceinline__ void run() const {
        end_empty_rows();
        const bool watched = ALL_BLOCKS && call.watched(), pooling = ALL_BLOCKS && pools();
        const int before = (group() + GROUPS - 1) % GROUPS;
        Rows rows{0, 0, 0, 0, 0, -1, 0};
        float cell = 0.0f;
        unsigned parity = 0;            // of this group's runs
#pragma unroll 1
        for (int n = group(), place; (place = n * RUN) < stream.places; n += GROUPS) {
            const int tile = n / RUNS, buffer = tile % BUFFERS;
            Kept* const at = tiles.gates + (buffer * TILE + n % RUNS * RUN) * STRIDE + column();
            look_up(place, rows);
            Rest rest{}, rests[RUN];
            ask_for(rows, watched, rest, rests);
            await(tiles.full + buffer * 8, tile / BUFFERS & 1);
            float p[RUN], q[RUN];
            read_run(at, rows, p, q);
            if (GROUPS > 1 && n > 0) {
                await(shared_address(&own.handed[before]), group() ? parity : parity ^ 1);
                cell = own.carry[column()];
            }
            const float cell_before = cell;
            cell = follow(cell, rows.firsts, p, q);
            if (GROUPS > 1) {
                own.carry[column()] = cell;
                arrive(shared_address(&own.handed[group()]));
            }
            if (watched) emit(at, rows, rests, cell_before, q);
            if (rows.lasts) end_rows(at, rows, rest, cell_before, q);
            if (pooling) {
                if (GROUPS > 1 && n > 0) await(shared_address(&own.pooled[before]), group() ? parity : parity ^ 1);
                pool(at, rows);
                if (GROUPS > 1) arrive(shared_address(&own.pooled[group()]));
            }
            parity ^= 1;
            arrive(tiles.empty + buffer * 8);
        }
    }

#if RING
    static_assert(GROUPS == RUNS, "launch shape");

    // Where another team has what this one has at `mine`.
    __device__ unsigned theirs(const void* mine, int team) const {
        const unsigned first = shared_address(&own) - team_index() % 2 * (unsigned)sizeof(Share);
        return in_block(first + team % 2 * (unsigned)sizeof(Share) + shared_address(mine) - shared_address(&own), team / 2);
    }
    __device__ int team_index() const { return stream.start; }
    __device__ void meet_team() const { meet(barrier, TEAM); }

    // To the next team, which has room for two messages.
    __device__ void send(int turn, float cell) const {
        const int place = turn & 1, next = (team_index() + 1) % TEAMS;
        if (turn > 1) await(shared_address(&own.credits[place]), (turn >> 1) - 1 & 1);
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                     ::"r"(theirs(&own.inbox[place][column()], next)), "r"(__float_as_uint(cell)), "r"(theirs(&own.arrived[place], next)) : "memory");
    }
    // From the team before, for the first group; the room for it is given back.
    __device__ float receive(int turn) const {
        const int place = turn & 1, before = (team_index() + TEAMS - 1) % TEAMS;
        await(shared_address(&own.arrived[place]), turn >> 1 & 1);
        const float cell = own.inbox[place][column()];
        __syncwarp();
        if (thread == 0)
            asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(theirs(&own.credits[place], before)) : "memory");
        return cell;
    }
    __device__ void tell_all() const {
        for (int team = 0; team < TEAMS; ++team)
            asm volatile("st.relaxed.cluster.shared::cluster.b32 [%0], %1;" ::"r"(theirs(&own.broken, team)), "r"(1) : "memory");
    }

    // What a run makes of a cell: a cell + b. scale: how large cells are on the way.
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
    // The guess for the first cell of this team's tile, and after all tiles of this turn, which all teams tell each other.
    __device__ __forceinline__ float guess(int turn, int active, const float2& mine, float& after) const {
        const int place = turn & 1;
        own.runs[place][group()][column()] = mine;
        if (thread == 0) expect(shared_address(&own.mapped[place]), active * UNITS * 8);
        meet_team();
        float2 map{1.0f, 0.0f};
#pragma unroll
        for (int run = 0; run < GROUPS; ++run) {
            const float2 next = own.runs[place][run][column()];
            map = float2{next.x * map.x, fmaf(next.x, map.y, next.y)};
        }
        for (int team = group(); team < TEAMS; team += GROUPS)
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
                         ::"r"(theirs(&own.maps[place][team_index()][column()], team)), "r"(__float_as_uint(map.x)), "r"(__float_as_uint(map.y)),
                           "r"(theirs(&own.mapped[place], team)) : "memory");
        await(shared_address(&own.mapped[place]), turn >> 1 & 1);
        float found = after;
#pragma unroll
        for (int team = 0; team < TEAMS; ++team) {
            const float2 next = own.maps[place][team][column()];
            if (team == team_index()) found = after;
            if (team < active) after = fmaf(next.x, after, next.y);
        }
        return found;
    }

    // A ring: each team has every TEAMS-th tile, and each group one run of it. turn, received, sent: so far, over all runs of the whole.
    __device__ __forceinline__ void run_ring(int& turn, int& received, int& sent, bool trusted) const {
        if (team_index() == 0) end_empty_rows();
        const bool watched = ALL_BLOCKS && call.watched();
        const int all = stream.all_tiles();
        Rows rows{0, 0, 0, 0, 0, -1, 0};
        float expected = 0.0f;
#pragma unroll 1
        for (int n = 0; n < stream.tiles(); ++n, ++turn) {
            const int tile = stream.tile(n), place = tile * TILE + group() * RUN, buffer = turn % BUFFERS;
            const bool hands_on = tile + 1 < all;
            Kept* const at = tiles.gates + buffer * TILE * STRIDE + group() * RUN * STRIDE + column();
            if (thread == 0 && tile > 0) expect(shared_address(&own.arrived[received & 1]), UNITS * 4);
            look_up(place, rows);
            Rest rest{}, rests[RUN];
            ask_for(rows, watched, rest, rests);
            await(tiles.full + buffer * 8, turn / BUFFERS & 1);
            float p[RUN], q[RUN], scale = 0.0f;
            read_run(at, rows, p, q);
            // Both bounds of what is guessed go through the tile; where they meet, the cell after it is known.
            float low = 0.0f, high = 1.0f;
            if (trusted) {
                const float2 mine = map_of(rows.firsts, p, q, scale);
                const float found = guess(turn, min(TEAMS, all - n * TEAMS), mine, expected), width = (fabsf(found) + scale) * WIDTH;
                low = found - width, high = found + width;
                if (group() > 0) {
                    await(shared_address(&own.bounded[group() - 1]), turn & 1);
                    low = own.low[column()], high = own.high[column()];
                }
#pragma unroll
                for (int i = 0; i < RUN; ++i) {
                    const bool first = rows.firsts >> i & 1;
                    low = first ? q[i] : fmaf(p[i], low, q[i]);
                    high = first ? low : fmaf(p[i], high, q[i]);
                }
                if (!is_last_group()) {
                    own.low[column()] = low, own.high[column()] = high;
                    arrive(shared_address(&own.bounded[group()]));
                }
            }
            const bool known = is_last_group() && low == high;
            if (known && hands_on) send(sent, low);

            // Then the cells themselves.
            float cell = 0.0f;
            if (group() > 0) {
                await(shared_address(&own.handed[group() - 1]), turn & 1);
                cell = own.carry[column()];
            } else if (tile > 0) cell = receive(received);
            received += tile > 0;
            const float cell_before = cell;
            cell = follow(cell, rows.firsts, p, q);
            if (!is_last_group()) {
                own.carry[column()] = cell;
                arrive(shared_address(&own.handed[group()]));
            } else if (hands_on && !known) send(sent, cell);
            if (known && hands_on && real && cell != low) tell_all();
            sent += hands_on;
            if (watched) emit(at, rows, rests, cell_before, q);
            if (rows.lasts) end_rows(at, rows, rest, cell_before, q);
            arrive(tiles.empty + buffer * 8);
            if (!trusted) meet_team();          // which guesses would have made it do
        }
    }
#endif
};

// What a block is there for.
struct Place {
    int slice, group, direction;        // which hidden units; which rows; which way
    unsigned rank;                      // in its cluster
};
__device__ __forceinline__ Place place_of() {
    return Place{(int)blockIdx.y, (int)blockIdx.x / CTAS, (int)blockIdx.z, CTAS > 1 ? cluster_rank() : 0};
}

// Where streams meet: the first row that begins there or later, and its first token.
struct Edge {
    int row;
    unsigned token;
};
// The two streams of a block, or the one of a ring. A row belongs to the stream into whose equal share of all tokens its first one falls.
// Each warp finds out for itself, looking at 32 rows at once: then at those between the two of them between which a stream begins.
struct Streams {
    Edge edges[3];

    __device__ __forceinline__ explicit Streams(const Call& call, const Place& place) {
        const int lane = threadIdx.x % 32, first = RING ? place.group : 2 * place.group;
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
                // Not those at the edge that is known already.
                const bool earlier = (unsigned long long)token * streams < (unsigned long long)tokens * (first + n);
                const int before = __popc(__ballot_sync(~0u, row < edges[n].row && earlier));
                const unsigned found = __shfl_sync(~0u, token, before % 32);
                const int next = low[n] + before * stride;
                low[n] = before ? next - stride + 1 : low[n];
                if (before < 32 && next < edges[n].row) edges[n] = Edge{next, found};
            }
        }
    }
    // The first or second one.
    __device__ __forceinline__ Stream stream(const Place& place, int s) const {
        const Edge from = s && !RING ? edges[1] : edges[0], until = s && !RING ? edges[2] : edges[1];
        Stream stream;
        stream.direction = place.direction;
        stream.first = from.row, stream.until = until.row;
        stream.begin = from.token, stream.places = (int)(until.token - from.token);
        stream.start = RING ? 2 * place.rank + s : 0, stream.stride = RING ? TEAMS : 1;
        return stream;
    }
};

// At the end of the whole, by every thread of a ring: whether it is to be computed once more, without predictions.
__device__ __forceinline__ bool again(const Share& team, int& round) {
#if RING
    __syncwarp();
    meet_cluster();
    return round++ == 0 && *(volatile const int*)&team.broken;
#else
    return false;
#endif
}

// The barriers of a team, by one thread.
__device__ __forceinline__ void make_ready(Share& team) {
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

// The work of a team.
__device__ __forceinline__ void encode(const Call& call, const Place& place, const Stream& stream, Share& own, const Tiles& tiles, int s, int thread) {
    Unit unit;
    unit.index = place.slice * UNITS + thread % UNITS;
    const bool real = unit.index < call.hidden;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) unit.bias[block] = real ? call.bias[stream.direction][block * call.hidden + unit.index] : 0.0f;
    if (OWN_CELL) {
        const float* v = call.own_cell[stream.direction];
        unit.v_forget = real ? (EXACT ? 1.0f : 0.5f) * v[unit.index] : 0.0f;
        unit.v_output = real ? v[call.hidden + unit.index] : 0.0f;
    }
    const Encoder encoder{call, stream, own, tiles, thread, 1 + s, unit, real};
#if RING
    int turn = 0, received = 0, sent = 0, round = 0;
    do encoder.run_ring(turn, received, sent, round == 0);
    while (again(own, round));
#else
    encoder.run();
#endif
}
