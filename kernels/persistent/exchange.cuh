// How the vectors of two_products.cu reach every block of a tile.
//
// CLUSTER: a block copies its pieces into the shared memory of every block of the cluster, whole lines at a time (st.async). A barrier of
// each vector and octet counts the bytes that arrive.
//
// Otherwise vectors pass through the L2 cache. A word of eight bytes has four bytes of a piece and the number of the step, so that a
// word which has arrived says so. A reader polls its words until all of them have its step, and waits for nothing else. The words are
// zero before the launch. All blocks must be resident, so the launch is cooperative.
//
// The values of m at step t have the number t + 1, and so has h after step t.
typedef unsigned long long Word;

__device__ __forceinline__ void fetch(Word (&words)[4], const Word* at) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
        asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(words[2 * half]), "=l"(words[2 * half + 1]) : "l"(at + 2 * half) : "memory");
}
__device__ __forceinline__ Word word_of(unsigned data, int number) { return (Word)number << 32 | data; }
__device__ __forceinline__ void store(Word* at, const Quad& piece, int number) {
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(at), "l"(word_of(piece.x, number)), "l"(word_of(piece.y, number)) : "memory");
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(at + 2), "l"(word_of(piece.z, number)), "l"(word_of(piece.w, number)) : "memory");
}
__device__ __forceinline__ bool has_arrived(const Word (&words)[4], int number) {
    return (int)(words[0] >> 32) == number && (int)(words[1] >> 32) == number && (int)(words[2] >> 32) == number && (int)(words[3] >> 32) == number;
}

// The words of a lane's first pieces, which it requested before it needs them.
constexpr int AT_ONCE = 4;
template <int N> struct Arriving {
    static constexpr int CHUNKS = Product<N>::CHUNKS < AT_ONCE ? Product<N>::CHUNKS : AT_ONCE;
    Word words[CLUSTER ? 1 : CHUNKS][4];
};

struct Exchange {
    Memory& shared;
    const int width, rank;
    Word* const team;                   // the words of this tile: of h, and behind them of m

    // Begins with a barrier of the cluster.
    __device__ __forceinline__ Exchange(Memory& shared, const Call& call, int tile, int rank)
        : shared(shared), width((int)call.width), rank(rank),
          team((Word*)call.exchange + (long long)tile * OCTETS * (Product<0>::PIECES + Product<1>::PIECES) * 4) {
#if CLUSTER
        if (threadIdx.x == 0) {
            for (int n = 0; n < 2 * OCTETS; ++n) make_barrier(shared_address(&shared.barriers[0][n]), 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            for (int octet = 0; octet < OCTETS; ++octet) expect_next<0>(octet), expect_next<1>(octet);
        }
        __syncthreads();
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
    template <int N> __device__ __forceinline__ Word* words_of(int octet) const {
        return team + ((N ? OCTETS * Product<0>::PIECES : 0) + octet * Product<N>::PIECES) * 4;
    }

    // Requests the first words of this lane's pieces, before it waits for them.
    template <int N> __device__ __forceinline__ void request(Arriving<N>& arriving, int octet) const {
#if !CLUSTER
        fetch_chunks<N, 0>(arriving, octet);
#endif
    }

    // Waits for the values with this number, and reads this lane's pieces. A column without a row reads the values of the first row.
    template <int N> __device__ __forceinline__ void receive(Quad (&pieces)[Product<N>::CHUNKS], Arriving<N>& arriving, int octet, int number) const {
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

    // Sends this block's gathered values of a vector, which the other product computed, to all blocks. Octets whose rows have at most
    // `before` steps need none.
    template <int N> __device__ __forceinline__ void send(int before, int number) const {
        constexpr int GROUPS = Product<1 - N>::OWNED, OF_OCTET = 8 * GROUPS * (CLUSTER ? MEMBERS : 1);
#pragma unroll
        for (int begin = 0; begin < OCTETS * OF_OCTET; begin += THREADS) {
            const int index = begin + threadIdx.x, octet = index / OF_OCTET, peer = index % OF_OCTET / (8 * GROUPS);
            const int row = index / GROUPS % 8, own = index % GROUPS, group = rank * GROUPS + own;
            if (octet >= OCTETS || row >= width || group >= Product<N>::GROUPS || shared.rows[octet * 8].steps <= before) continue;
            const Quad piece = *(const Quad*)&shared.outgoing[octet][row][own * 8];
#if CLUSTER
            ::send(in_block(shared_address(pieces_of<N>(octet) + piece_index(group, row)), peer),
                   in_block(shared_address(&shared.barriers[N][octet]), peer), piece);
#else
            store(words_of<N>(octet) + piece_index(group, row) * 4, piece, number);
#endif
        }
    }

private:
    // This lane's group of a chunk.
    __device__ __forceinline__ int group_of(int chunk) const { return (chunk * PARTS + threadIdx.x / 32) * 4 + threadIdx.x % 4; }
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
            if (exists<N>(BEGIN + n)) fetch(arriving.words[n], words_of<N>(octet) + place_of(BEGIN + n) * 4);
    }
    template <int N, int BEGIN> __device__ __forceinline__ void receive_chunks(Quad (&pieces)[Product<N>::CHUNKS], Arriving<N>& arriving, int octet, int number) const {
        auto is_missing = [&](int n) { return exists<N>(BEGIN + n) && !has_arrived(arriving.words[n], number); };
        while (true) {
            bool missing = false;
#pragma unroll
            for (int n = 0; n < Arriving<N>::CHUNKS; ++n) missing |= is_missing(n);
            if (!__any_sync(~0u, missing)) break;
            fetch_chunks<N, BEGIN>(arriving, octet);
        }
#pragma unroll
        for (int n = 0; n < Arriving<N>::CHUNKS; ++n) {
            const Word(&words)[4] = arriving.words[n];
            if (BEGIN + n < Product<N>::CHUNKS)
                pieces[BEGIN + n] = exists<N>(BEGIN + n) ? Quad{(unsigned)words[0], (unsigned)words[1], (unsigned)words[2], (unsigned)words[3]} : Quad{};
        }
    }
};
