// The computation of a stream of rows by a team of threads, and the outputs. Shared by product.cu and gate_inputs.cu.
//
// A stream is whole rows packed end to end. It is computed in tiles of 64 steps. The gates of a tile are in shared memory: 64 steps of
// UNITS hidden units. A team has GROUPS threads for each unit, and a thread computes runs of RUN steps. First, all threads compute
// everything that does not depend on the cell. Then the groups take turns: a group computes the cells of its run, with a few operations
// for each step, and hands its cells to the next group.

#include "call.cuh"

#if TAPS > 1
typedef float Kept;                     // what tiles hold: sums of several gates are not rounded again
#else
typedef Gate Kept;
#endif

constexpr int RUNS = TILE / RUN;
constexpr int TEAM = GROUPS * UNITS;                                        // threads of a team
static_assert(GROUPS <= RUNS * BUFFERS, "a group would take the previous tile of a buffer for its own");

// Whether a tile has a block: it has all blocks, or the blocks that the cell needs.
__host__ __device__ constexpr bool in_tile(int block) {
    return block < BLOCKS && (ALL_BLOCKS || block == CANDIDATE || block == FORGET || (!IS_SRU && block == LAST_BLOCK));
}
__host__ __device__ constexpr int slot_of(int block) { return block > OUTPUT && !ALL_BLOCKS ? OUTPUT : block; }
__host__ __device__ constexpr int block_of(int slot) { return slot == OUTPUT && !ALL_BLOCKS ? LAST_BLOCK : slot; }
constexpr int SLOTS = in_tile(0) + in_tile(1) + in_tile(2) + in_tile(3);
constexpr int COLUMNS = SLOTS * UNITS;                                      // columns of a tile, block by block
constexpr int STRIDE = COLUMNS + 16 / (int)sizeof(Kept);                    // stride of a step, without bank conflicts

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

// A cell as a map of the cell before its part of the row: see call.cuh. In a row's first part, factor and base are zero.
struct Cell {
    float added, factor, base;

    __device__ float value() const { return fmaf(factor, base, added); }
};

// The shared memory of one team.
struct Share {
    float carry[UNITS];                 // cells between two runs, or what a part has added to them
    float factor[UNITS], base[UNITS];   // between two runs that are not in a row's first part: see Cell
    unsigned long long handed[GROUPS];  // barriers: a group has handed its cells over
    float sum[UNITS], largest[UNITS];   // sum and maximum of the row so far
    unsigned long long pooled[GROUPS];  // barriers: a group has added its run to the pools
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
        if (SPLIT) {
            // After the last step, they keep the cell.
#pragma unroll
            for (int i = 0; i < RUN; ++i)
                if (rows.place + i >= stream.places) p[i] = 1.0f, q[i] = 0.0f;
        }
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

    // Returns a bit mask of the step of a run that begins a part after the first of its row, or 0. offset: steps of the row before the run.
    __device__ static unsigned part_begin(int offset, unsigned firsts) {
        const int step = (PART - offset % PART) % PART;
        return step < RUN && !(firsts << (31 - step)) ? 1u << step : 0;
    }
    // Computes the cells of a run in q. cell: the state before the run, and after it. divided: the run reaches beyond the row's first part.
    __device__ __forceinline__ void follow(Cell& cell, bool divided, int offset, unsigned firsts, const float (&p)[RUN], float (&q)[RUN]) const {
        const unsigned parts = LINEAR && divided ? part_begin(offset, firsts) : 0;
        if (LINEAR && divided && !firsts && !(parts & ~1u)) {
            if (parts) cell = Cell{0.0f, 1.0f, cell.value()};
#pragma unroll
            for (int i = 0; i < RUN; ++i) cell.added = fmaf(p[i], cell.added, q[i]), cell.factor *= p[i], q[i] = cell.value();
        } else if (LINEAR && divided) {
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                if (firsts >> i & 1) cell = Cell{q[i], 0.0f, 0.0f};
                else if (parts >> i & 1) cell = Cell{q[i], p[i], cell.value()};
                else cell.added = fmaf(p[i], cell.added, q[i]), cell.factor *= p[i];
                q[i] = cell.value();
            }
        } else if (!firsts) {
#pragma unroll
            for (int i = 0; i < RUN; ++i) q[i] = cell.added = advance(cell.added, p[i], q[i], unit);
        } else {
#pragma unroll
            for (int i = 0; i < RUN; ++i) q[i] = cell.added = firsts >> i & 1 ? q[i] : advance(cell.added, p[i], q[i], unit);
        }
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

    // Returns what fold.cu needs of a step.
    __device__ __forceinline__ float2 rests_of(const Kept* at) const {
        return make_float2(in_tile(OUTPUT) ? gate(at, OUTPUT) : 0.0f, SKIP == SKIP_BLOCK && in_tile(LAST_BLOCK) ? gate(at, LAST_BLOCK) : 0.0f);
    }
    // Stores the map of a part for fold.cu. last: the part's last step in the row.
    __device__ __forceinline__ void store_map(const Cell& cell, int last) const {
        if (real) call.maps[stream.direction][(long long)(last / PART) * call.hidden + unit.index] = make_float2(cell.factor, cell.added);
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
            if (real && SPLIT) call.rests[stream.direction][row * call.hidden + unit.index] = rests_of(at + step * STRIDE);
            else if (real) end(row, hidden_at(at + step * STRIDE, rest, cell, before), cell);
        }
    }

    // Writes the outputs of every step of a run, and stores the hidden values for the pools. begun: the cell from which the last row that
    // begins in the run starts.
    __device__ __forceinline__ void emit(
        Kept* at, const Rows& rows, const Rest (&rests)[RUN], float cell_before, float begun, const float (&cells)[RUN]
    ) const {
        const int steps = min(RUN, stream.places - rows.place);
        const long long stride = stream.direction ? -call.width : call.width;
        float* to = call.steps ? call.steps + output_index(stream.token(rows.place)) : nullptr;
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            float before = i ? cells[i ? i - 1 : 0] : cell_before;
            if (!LINEAR && rows.firsts >> i & 1) before = rows.firsts >> i == 1 ? begun : first_cell(rows.of(call, stream, i));
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
        if (!SPLIT) end_empty_rows();
        const bool all_steps = ALL_BLOCKS && call.all_steps(), pooling = ALL_BLOCKS && pools();
        const int before = (group() + GROUPS - 1) % GROUPS;
        Rows rows{0, 0, 0, 0, 0, -1, 0};
        Cell cell{0.0f, 0.0f, 0.0f};
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
            const int offset = place - rows.start;
            const bool divided = LINEAR && offset + RUN > PART, in_later_part = LINEAR && offset > PART;
            if (GROUPS > 1 && n > 0) {
                await(shared_address(&share.handed[before]), group() ? parity : parity ^ 1);
                cell.added = share.carry[column()];
                if (in_later_part) cell.factor = share.factor[column()], cell.base = share.base[column()];
            }
            if (!in_later_part || (SPLIT && n == 0)) cell.factor = cell.base = 0.0f;
            const float cell_before = cell.added;       // of a cell that is not linear
            follow(cell, divided, offset, rows.firsts, p, q);
            // Another group may end the last row that begins here, and overwrite its state, as soon as it has the cells.
            const float begun = !LINEAR && all_steps && rows.firsts ? first_cell(rows.of(call, stream, 31 - __clz(rows.firsts))) : 0.0f;
            if (GROUPS > 1) {
                share.carry[column()] = cell.added;
                if (divided) share.factor[column()] = cell.factor, share.base[column()] = cell.base;
                arrive(shared_address(&share.handed[group()]));
            }
            if (SPLIT && (rows.lasts || (offset + RUN) % PART == 0)) store_map(cell, offset + min(RUN, stream.places - place) - 1);
            if (all_steps) emit(at, rows, rests, cell_before, begun, q);
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

};

// The part of the problem that a block computes.
struct BlockPart {
    int slice, group, direction;        // its hidden units, its rows, its direction
};
__device__ __forceinline__ BlockPart block_part() {
    return BlockPart{(int)blockIdx.y, (int)blockIdx.x, (int)blockIdx.z};
}

// A border between streams: the first row at or after it, and that row's first token.
struct Edge {
    int row;
    unsigned token;
};
// The two streams of a block. Every stream has an equal share of the tokens, or if SPLIT of the parts of a single row. A row belongs to the stream
// that has its first token. Each warp searches independently: it looks at 32 rows at once, then at the rows between the two rows that
// enclose the border.
struct Streams {
    Edge edges[3];

    __device__ __forceinline__ explicit Streams(const Call& call, const BlockPart& part) {
#if SPLIT
        // The single row is divided between parts.
        const int tokens = (int)call.offset(1), parts = (tokens + PART - 1) / PART;
#pragma unroll
        for (int n = 0; n < 3; ++n) {
            const int stream = min(2 * part.group + n, (int)call.streams), before = stream * parts / (int)call.streams;
            const int after = (int)(call.streams - stream) * parts / (int)call.streams;
            edges[n] = Edge{0, (unsigned)(part.direction ? max(tokens - after * PART, 0) : min(before * PART, tokens))};
        }
#else
        const int lane = threadIdx.x % 32, first = 2 * part.group;
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
#endif
    }
    // Returns the block's first or second stream.
    __device__ __forceinline__ Stream stream(const BlockPart& part, int s) const {
        const Edge from = s ? edges[1] : edges[0], until = s ? edges[2] : edges[1];
        Stream stream;
        stream.direction = part.direction;
        stream.first = SPLIT ? 0 : from.row, stream.until = SPLIT ? 1 : until.row;
        stream.begin = from.token, stream.places = (int)(until.token - from.token);
        return stream;
    }
};

// Initialises the barriers of a team. One thread calls it.
__device__ __forceinline__ void init_team(Share& team) {
    for (int group = 0; group < GROUPS; ++group) {
        make_barrier(shared_address(&team.handed[group]), UNITS);
        make_barrier(shared_address(&team.pooled[group]), UNITS);
    }
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
    encoder.run();
}
