// The warp group of step.cu that loads: it finds the rows of each tile, and fetches rows and weights chunk by chunk.

// Writes the places of a tile in a step: of all rows in their order, or of the rows that have the step. Returns whether this
// block or the other block of the cluster has a row.
__device__ __forceinline__ bool find_places(const Step& step, Place* places, int tile, int t, bool all) {
    const Call& call = step.call();
    const Place none{0, 0, 0, -1, 0};
    auto steps_of = [&](long long row) { return (int)(call.offset(row + 1) - call.offset(row)); };
    auto place_of = [&](long long row) {
        const int steps = steps_of(row);
        const long long token = steps > t ? call.token(call.first_token(row), t) : 0;
        return Place{token, call.start_before((int)row), call.start_after((int)row), (int)row, steps};
    };
    if (all) {
        const long long row = call.first + (long long)tile * ROWS + threadIdx.x;
        if (threadIdx.x < ROWS) places[threadIdx.x] = row < call.until ? place_of(row) : none;
        meet(1, GROUP);
        return true;
    }
    constexpr int EACH = SORTED / GROUP, TILES = SORTED / ROWS;
    int(&counts)[GROUP / 32] = memory().counts[0];
    const long long begin = call.first + (long long)(tile / TILES) * SORTED + threadIdx.x * EACH;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = tile % TILES * ROWS;
    unsigned runs = 0;
#pragma unroll
    for (int n = 0; n < EACH; ++n) runs |= (begin + n < call.until && steps_of(begin + n) > t) << n;
    int up_to = __popc(runs);
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int other = __shfl_up_sync(~0u, up_to, apart);
        if (lane >= apart) up_to += other;
    }
    if (lane == 31) counts[warp] = up_to;
    if (threadIdx.x < ROWS) places[threadIdx.x] = none;
    meet(1, GROUP);
    int at = up_to - __popc(runs) - first, total = 0;
    for (int other = 0; other < GROUP / 32; ++other) {
        if (other < warp) at += counts[other];
        total += counts[other];
    }
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
        if (!(runs >> n & 1)) continue;
        if (at >= 0 && at < ROWS) places[at] = place_of(begin + n);
        ++at;
    }
    meet(1, GROUP);
    return total > first - rank() * ROWS;
}

// The loading warp group. A thread loads the same piece of eight values in every STRIDE-th row.
struct Loader {
    static constexpr int PIECES = DEPTH / 8, STRIDE = GROUP / PIECES, LOADS = ROWS / STRIDE;
    const Step& step;
    Memory& shared = memory();
    int phase = 0, chunks = 0, turns = 0, meetings = DIRECT ? 0 : 1, met = 0;

    static __device__ __forceinline__ int piece() { return threadIdx.x % PIECES; }
    static __device__ __forceinline__ int row_of(int load) { return load * STRIDE + threadIdx.x / PIECES; }
    __device__ __forceinline__ int stage() const { return chunks % STAGES; }
    __device__ __forceinline__ unsigned full() const { return shared_address(&shared.full[stage()]); }
    __device__ __forceinline__ unsigned to(int load) const {
        // The rows of all loads have the same remainder of 8.
        return shared_address(shared.left[stage()]) + row_of(load) * 128 + (piece() ^ row_of(0) % 8) * 16;
    }

    // Opens the stage of the next chunk and fetches its weights. Warps take turns.
    __device__ __forceinline__ void open(int chunk, int unit) const {
        await(shared_address(&shared.empty[stage()]), (chunks / STAGES & 1) ^ 1);
        if (threadIdx.x != chunks % (GROUP / 32) * 32) return;
        const int second = RESET_BEFORE && phase % PHASES, gates = second ? 1 : MOST_GATES, bytes = gates * UNITS * DEPTH * 2;
        const int begin = rank() * (bytes / PAIR), padded = (step.hidden() + DEPTH - 1) / DEPTH * DEPTH;
        const long long before = second ? (long long)(step.chunks_of_x() + step.all_chunks_of_h()) * padded * MOST_GATES : 0;
        const long long at = (before + ((long long)chunk * padded + unit) * gates) * (DEPTH * 2) + begin;
        const unsigned char* const from = (const unsigned char*)step.call().packed + at;
        const unsigned to = shared_address(shared.right[stage()]) + begin;
        expect(full(), bytes);
        if (PAIR > 1) fetch_for_both(to, from, bytes / PAIR, full());
        else copy_in_bulk(to, from, bytes, full());
    }
    // Loads a chunk of 16-bit values. `columns` are left from its beginning on, and zeros follow.
    __device__ __forceinline__ void load(const Half* const (&from)[LOADS], int begin, int columns) {
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
            const bool real = from[n] && piece() * 8 < columns;
            const void* const at = real ? (const void*)(from[n] + begin) : step.call().packed;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to(n)), "l"(at), "r"(real ? 16 : 0));
        }
        // This thread arrives when its copies have.
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full()) : "memory");
        ++chunks;
    }
    // Loads and converts a chunk of float32 values.
    template <typename Two>
    __device__ __forceinline__ void load(const float* const (&from)[LOADS], int begin, int columns, Two two) {
        float4 values[LOADS][2];
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
            const bool real = from[n] && piece() * 8 < columns;
            values[n][0] = real ? __ldg((const float4*)(from[n] + begin)) : float4{};
            values[n][1] = real ? __ldg((const float4*)(from[n] + begin) + 1) : float4{};
        }
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
            const Quad piece = piece_of(values[n], two);
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                         ::"r"(to(n)), "r"(piece.x), "r"(piece.y), "r"(piece.z), "r"(piece.w));
        }
        arrive(full());
        ++chunks;
    }
    // Finds the addresses of this thread's pieces, null in a place without a row.
    template <typename T, typename At>
    static __device__ __forceinline__ void find(const T* (&from)[LOADS], const Place* places, At at) {
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
            const Place& place = places[row_of(n)];
            from[n] = place.row < 0 ? nullptr : at(place) + piece() * 8;
        }
    }

    __device__ __forceinline__ void load_x(const Place* places, int unit) {
        const Value* from[LOADS];
        find(from, places, [&](const Place& place) { return step.x + place.token * step.x_apart; });
        for (int chunk = 0; chunk < step.chunks_of_x(); ++chunk) {
            open(chunk, unit);
#if X_FLOAT32
            load(from, chunk * DEPTH, (int)step.inputs - chunk * DEPTH, of_x);
#else
            load(from, chunk * DEPTH, (int)step.inputs - chunk * DEPTH);
#endif
        }
    }
    __device__ __forceinline__ void load_states(const Place* places, int unit) {
        const float* from[LOADS];
        find(from, places, [&](const Place& place) { return step.call().hidden_before + place.before; });
        for (int chunk = 0; chunk < step.chunks_of_h(0); ++chunk) {
            const int begin = chunk / PASSES_OF_H * DEPTH, term = FLOAT32 && chunk % PASSES_OF_H == 0;
            open(step.chunks_of_x() + chunk, unit);
            load(from, begin, step.hidden() - begin, [&](float a, float b) { return of_hidden(a, b, term); });
        }
    }
    __device__ __forceinline__ void load_hidden(const Place* places, int unit, int t) {
        const Half* from[LOADS];
        const Half* const of_all = phase % PHASES ? step.passed(0) : step.hidden(t, 0);
        find(from, places, [&](const Place& place) { return of_all + step.between(place.row); });
        const long long small = step.hidden(t, TERMS - 1) - step.hidden(t, 0);
        for (int chunk = 0; chunk < step.chunks_of_h(t); ++chunk) {
            const int begin = chunk / PASSES_OF_H * DEPTH;
            open(step.chunks_of_x() + chunk, unit);
            if (FLOAT32 && chunk % PASSES_OF_H == 0) {
                const Half* of_small[LOADS];
#pragma unroll
                for (int n = 0; n < LOADS; ++n) of_small[n] = from[n] ? from[n] + small : nullptr;
                load(of_small, begin, step.hidden() - begin);
            } else load(from, begin, step.hidden() - begin);
        }
    }

    // Waits for the places of the next turn.
    __device__ __forceinline__ Place* await_places() const {
        await(shared_address(&shared.taken[turns % 2]), (turns / 2 & 1) ^ 1);
        return shared.places[turns % 2];
    }
    __device__ __forceinline__ void announce(const Turn& turn) {
        if (threadIdx.x == 0) {
            shared.turns[turns % 2] = turn;
            arrive(shared_address(&shared.announced[turns % 2]));
        }
        ++turns;
    }
    __device__ __forceinline__ void announce_without_places(const Turn& turn) {
        await_places();
        meet(1, GROUP); // a thread that still waits must not miss the phase
        announce(turn);
    }
    __device__ __forceinline__ void load_phase(bool all) {
        const int clusters = gridDim.x / PAIR, units = step.tiles_of_units(), t = phase / PHASES;
        for (int tile = blockIdx.x / PAIR; tile < step.tiles(); tile += clusters) {
            const int unit = tile % units * UNITS;
            Place* const places = await_places();
            if (!find_places(step, places, tile / units * PAIR + rank(), t, all)) continue;
            if (phase % PHASES) meet_blocks(); // the update gates are read, whether there are hidden values or not
            announce(Turn{TILE, phase, unit, phase > 0 && all && step.tiles() <= clusters});
            load_x(places, unit);
            meet_blocks();
            if (DIRECT && phase == 0) load_states(places, unit);
            else load_hidden(places, unit, t);
        }
        // Every block attends every meeting after the one before it, whether it had a turn or not.
        meet_blocks();
        meet(1, GROUP); // all threads have read the places
    }
    __device__ __forceinline__ void meet_blocks() {
        if (met < meetings) await_blocks(step, met = meetings);
    }
    // Finds the fewest and the most steps of all rows.
    __device__ __forceinline__ void find_lengths(int& shortest, int& longest) const {
        const Call& call = step.call();
        int least = 0x7fffffff, most = 0;
        for (long long row = call.first + threadIdx.x; row < call.until; row += GROUP) {
            const int steps = (int)(call.offset(row + 1) - call.offset(row));
            least = min(least, steps), most = max(most, steps);
        }
        least = __reduce_min_sync(~0u, least), most = __reduce_max_sync(~0u, most);
        if (threadIdx.x % 32 == 0) shared.counts[0][threadIdx.x / 32] = least, shared.counts[1][threadIdx.x / 32] = most;
        meet(1, GROUP);
        shortest = shared.counts[0][0], longest = shared.counts[1][0];
        for (int warp = 1; warp < GROUP / 32; ++warp)
            shortest = min(shortest, shared.counts[0][warp]), longest = max(longest, shared.counts[1][warp]);
        meet(1, GROUP);
    }
    __device__ __forceinline__ void run() {
        load_phase(true);
        int shortest, longest;
        find_lengths(shortest, longest);
        while (++phase < PHASES * longest) {
            announce_without_places(Turn{PHASE_ENDS});
            ++meetings;
            load_phase(phase / PHASES < shortest);
        }
        announce_without_places(Turn{END});
        if (meetings == 0 || threadIdx.x > 0) return;
        // The last block to leave resets the words for the next launch.
        unsigned left;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(left) : "l"(step.meeting + 1) : "memory");
        if (left + 1 == gridDim.x) step.meeting[0] = step.meeting[1] = 0;
    }
};
