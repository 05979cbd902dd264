// Tensor-core products of a warp group (wgmma, m64nNk16): `multiply` for each N, the number of columns. Operands: left (64, 16)
// and right (N, 16). Both are in shared memory in rows of 128 bytes, eight rows to 1 KiB. The 16-byte pieces of a row are
// swizzled: piece p of row r is at position p ^ r % 8.

#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define FIRST_TEN "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,"
#define FIRST_HUNDRED FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9)
#define FOUR(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define SIXTEEN(i) EIGHT(i), EIGHT(i + 8)
#define THIRTY_TWO(i) SIXTEEN(i), SIXTEEN(i + 16)
#define FORTY_EIGHT(i) THIRTY_TWO(i), SIXTEEN(i + 32)
#if BFLOAT16
#define TYPES ".f32.bf16.bf16 "
#else
#define TYPES ".f32.f16.f16 "
#endif

// Defines multiply(sums, left, right, add): sums = left @ right^T, or sums += left @ right^T if `add`, 16 columns deep. left,
// right: addresses in the form of `piece_at`. The first operands of the instruction are the sums; after them come the matrices,
// and whether to add.
#define MULTIPLY(columns, all_sums, left_at, right_at, adds, ...)                                                              \
    __device__ __forceinline__ void multiply(float (&sums)[columns / 2], unsigned left, unsigned right, int add) {             \
        asm volatile("{.reg .pred p; .reg .b64 x, w; setp.ne.b32 p, " adds ", 0; mov.b64 x, {" left_at ", 0x40000040}; "       \
                     "mov.b64 w, {" right_at ", 0x40000040};"                                                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k16" TYPES "{" all_sums                                     \
                     "}, x, w, p, 1, 1, 0, 0;}" : __VA_ARGS__ : "r"(left), "r"(right), "r"(add));                              \
    }
MULTIPLY(16, "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9", "%10", EIGHT(0))
MULTIPLY(24, FIRST_TEN "%10,%11", "%12", "%13", "%14", EIGHT(0), FOUR(8))
MULTIPLY(32, FIRST_TEN "%10,%11,%12,%13,%14,%15", "%16", "%17", "%18", SIXTEEN(0))
MULTIPLY(48, FIRST_TEN TEN(1) "%20,%21,%22,%23", "%24", "%25", "%26", SIXTEEN(0), EIGHT(16))
MULTIPLY(64, FIRST_TEN TEN(1) TEN(2) "%30,%31", "%32", "%33", "%34", THIRTY_TWO(0))
MULTIPLY(96, FIRST_TEN TEN(1) TEN(2) TEN(3) "%40,%41,%42,%43,%44,%45,%46,%47", "%48", "%49", "%50", FORTY_EIGHT(0))
MULTIPLY(128, FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63", "%64", "%65", "%66", FORTY_EIGHT(0), SIXTEEN(48))
MULTIPLY(192, FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) "%90,%91,%92,%93,%94,%95", "%96", "%97", "%98",
         FORTY_EIGHT(0), FORTY_EIGHT(48))
MULTIPLY(256, FIRST_HUNDRED TEN(10) TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127", "%128", "%129", "%130", FORTY_EIGHT(0),
         FORTY_EIGHT(48), THIRTY_TWO(96))
__device__ __forceinline__ unsigned piece_at(unsigned address) { return address >> 4 | 1 << 16; }
