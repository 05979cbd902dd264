// How the vectors of two_products.cu reach every block of a tile.
//
// CLUSTER: a block copies its pieces into the shared memory of every block of the cluster, whole lines at a time (st.async). A
// barrier of each vector and octet counts the bytes that arrive.
//
// Otherwise vectors pass through the L2 cache in words of eight bytes. Each word says to which step it belongs, so a reader
// polls its words until all of them have its step, and waits for nothing else. The words are zero before the launch. All blocks
// must be resident, so the launch is cooperative.
//
// Values below two leave the top bit of their exponent free. A word has four of them: the free bits of the first two are the
// tag of the step, and those of the last two say that a value is NaN. The hidden state of an LSTM with a projection has no
// bound: its words have two values and the number of the step.
//
// The values that the products of step t read have the number t + 1.
typedef unsigned long long Word;
constexpr unsigned FREE = 0x40004000u; // the free bits of two values

// The tag of a number. It differs from the zeros before the launch and from the tag of the number before it, which is all that
// a word can have.
__device__ __forceinline__ unsigned tag_of(int number) {
    return number % 3 == 0 ? 0x00004000u : number % 3 == 1 ? 0x40000000u : FREE;
}
__device__ __forceinline__ Word joined(unsigned low, unsigned high) { return (Word)high << 32 | low; }
__device__ __forceinline__ Word bounded_word(unsigned first, unsigned last, unsigned tag) {
    return joined(first & ~FREE | tag, last & ~FREE | ((first | last) & FREE ? FREE : 0));
}

// The words of a piece of vector N.
template <int N> struct Words {
    static constexpr bool BOUNDED = GRU || N == 1;
    static constexpr int COUNT = BOUNDED ? 2 : 4;
    Word words[COUNT];

    __device__ __forceinline__ void fetch(const Word* at) {
#pragma unroll
        for (int n = 0; n < COUNT; n += 2)
            asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                         : "=l"(words[n]), "=l"(words[n + 1]) : "l"(at + n) : "memory");
    }
    static __device__ __forceinline__ void store(Word* at, const Quad& piece, int number) {
        const unsigned tag = tag_of(number);
        const Word words[4] = {BOUNDED ? bounded_word(piece.x, piece.y, tag) : joined(piece.x, number),
                               BOUNDED ? bounded_word(piece.z, piece.w, tag) : joined(piece.y, number), joined(piece.z, number),
                               joined(piece.w, number)};
#pragma unroll
        for (int n = 0; n < COUNT; n += 2)
            asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};"
                         ::"l"(at + n), "l"(words[n]), "l"(words[n + 1]) : "memory");
    }
    __device__ __forceinline__ bool have(int number) const {
        unsigned differing = 0;
#pragma unroll
        for (int n = 0; n < COUNT; ++n)
            differing |= BOUNDED ? ((unsigned)words[n] ^ tag_of(number)) & FREE : (unsigned)(words[n] >> 32) ^ (unsigned)number;
        return !differing;
    }
    // Returns two values of the piece.
    __device__ __forceinline__ unsigned two(int index) const {
        if (!BOUNDED) return (unsigned)words[index % COUNT];
        const Word word = words[index / 2];
        const unsigned last = (unsigned)(word >> 32), values = index % 2 ? last : (unsigned)word;
        return last & FREE ? ~0u : values & ~FREE;
    }
    __device__ __forceinline__ Quad piece() const { return Quad{two(0), two(1), two(2), two(3)}; }
};

// The words of a lane's first pieces, which it requested before it needs them.
constexpr int AT_ONCE = 4;
template <int N> struct Arriving {
    static constexpr int CHUNKS = Product<N>::CHUNKS < AT_ONCE ? Product<N>::CHUNKS : AT_ONCE;
    Words<N> pieces[CLUSTER ? 1 : CHUNKS];
};

struct Exchange {
    Memory& shared;
    const int width, rank;
    Word* const team;                   // the words of this tile: of h, and behind them of m

    // Ends with a barrier of the block or the cluster.
    __device__ __forceinline__ Exchange(Memory& shared, const Call& call, int tile, int rank)
        : shared(shared), width((int)call.width), rank(rank),
          team((Word*)call.exchange + (long long)tile * OCTETS * (words_of_octet<0>() + words_of_octet<1>())) {
#if CLUSTER
        if (threadIdx.x == 0) {
            for (int n = 0; n < 2 * OCTETS; ++n) make_barrier(shared_address(&shared.barriers[0][n]), 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
#endif
        __syncthreads();
#if CLUSTER
        if (threadIdx.x == 0)
            for (int octet = 0; octet < OCTETS; ++octet) expect_next<0>(octet), expect_next<1>(octet);
        meet_cluster();
#endif
    }

    template <int N> __device__ __forceinline__ void expect_next(int octet) const {
        expect(shared_address(&shared.barriers[N][octet]), width * Product<N>::GROUPS * 16);
    }

    // Returns a vector's room for an octet, in the shared memory of this block.
    template <int N> __device__ __forceinline__ Quad* pieces_of(int octet) const {
#if CLUSTER
        return N ? shared.between[octet] : shared.hidden[octet];
#else
        return nullptr;
#endif
    }
    template <int N> static __device__ constexpr int words_of_octet() { return Product<N>::PIECES * Words<N>::COUNT; }
    template <int N> __device__ __forceinline__ Word* words_at(int octet, int piece) const {
        return team + (N ? OCTETS * words_of_octet<0>() : 0) + octet * words_of_octet<N>() + piece * Words<N>::COUNT;
    }

    // Requests the first words of this lane's pieces, before it waits for them.
    template <int N> __device__ __forceinline__ void request(Arriving<N>& arriving, int octet) const {
#if !CLUSTER
        fetch_chunks<N, 0>(arriving, octet);
#endif
    }

    // Waits for the values with this number, and reads this lane's pieces. A column without a row reads the values of the first
    // row.
    template <int N>
    __device__ __forceinline__ void receive(Quad (&pieces)[Product<N>::CHUNKS], Arriving<N>& arriving, int octet,
                                            int number) const {
#if CLUSTER
        await(shared_address(&shared.barriers[N][octet]), (number - 1) & 1);
        if (threadIdx.x == 0) expect_next<N>(octet);
#pragma unroll
        for (int chunk = 0; chunk < Product<N>::CHUNKS; ++chunk)
            pieces[chunk] = exists<N>(chunk) ? pieces_of<N>(octet)[place_of(chunk)] : Quad{};
#else
        receive_chunks<N, 0>(pieces, arriving, octet, number);
        if constexpr (Product<N>::CHUNKS > AT_ONCE) {
            fetch_chunks<N, AT_ONCE>(arriving, octet);
            receive_chunks<N, AT_ONCE>(pieces, arriving, octet, number);
        }
#endif
    }

    // Sends this block's gathered values of a vector, which the other product computed, to all blocks. Octets whose rows have
    // at most `before` steps need none.
    template <int N> __device__ __forceinline__ void send(int before, int number) const {
        constexpr int GROUPS = Product<1 - N>::OWNED, OF_OCTET = 8 * GROUPS * (CLUSTER ? MEMBERS : 1);
#pragma unroll
        for (int begin = 0; begin < OCTETS * OF_OCTET; begin += THREADS) {
            const int index = begin + threadIdx.x, octet = index / OF_OCTET;
            const int row = index / GROUPS % 8, own = index % GROUPS, group = rank * GROUPS + own;
            if (octet >= OCTETS || row >= width || group >= Product<N>::GROUPS) continue;
            if (OCTETS > 1 && shared.rows[octet * 8].steps <= before) continue;
            const Quad piece = *(const Quad*)&shared.outgoing[octet][row][own * 8];
#if CLUSTER
            const int peer = index % OF_OCTET / (8 * GROUPS);
            ::send(in_block(shared_address(pieces_of<N>(octet) + piece_index(group, row)), peer),
                   in_block(shared_address(&shared.barriers[N][octet]), peer), piece);
#else
            Words<N>::store(words_at<N>(octet, piece_index(group, row)), piece, number);
#endif
        }
    }

private:
    // This lane's group of a chunk.
    __device__ __forceinline__ int group_of(int chunk) const {
        return (chunk * PARTS + threadIdx.x / 32) * 4 + threadIdx.x % 4;
    }
    template <int N> __device__ __forceinline__ bool exists(int chunk) const {
        return chunk < Product<N>::CHUNKS && group_of(chunk) < Product<N>::GROUPS;
    }
    __device__ __forceinline__ int place_of(int chunk) const {
        const int row = threadIdx.x % 32 / 4;
        return piece_index(group_of(chunk), row < width ? row : 0);
    }

    template <int N, int BEGIN> __device__ __forceinline__ void fetch_chunks(Arriving<N>& arriving, int octet) const {
#pragma unroll
        for (int n = 0; n < Arriving<N>::CHUNKS; ++n)
            if (exists<N>(BEGIN + n)) arriving.pieces[n].fetch(words_at<N>(octet, place_of(BEGIN + n)));
    }
    template <int N, int BEGIN>
    __device__ __forceinline__ void receive_chunks(Quad (&pieces)[Product<N>::CHUNKS], Arriving<N>& arriving, int octet,
                                                   int number) const {
        while (true) {
            bool missing = false;
#pragma unroll
            for (int n = 0; n < Arriving<N>::CHUNKS; ++n) missing |= exists<N>(BEGIN + n) && !arriving.pieces[n].have(number);
            if (!__any_sync(~0u, missing)) break;
            fetch_chunks<N, BEGIN>(arriving, octet);
        }
#pragma unroll
        for (int n = 0; n < Arriving<N>::CHUNKS; ++n)
            if (BEGIN + n < Product<N>::CHUNKS) pieces[BEGIN + n] = exists<N>(BEGIN + n) ? arriving.pieces[n].piece() : Quad{};
    }
};
