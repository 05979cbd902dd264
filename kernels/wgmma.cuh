// Tensor-core products of a warp group (wgmma, m64nNk16), where N is the macro PRODUCT_COLUMNS. Operands: left (64, 16) and right (N, 16).
// Both are in shared memory in rows of 128 bytes, eight rows to 1 KiB. The 16-byte pieces of a row are swizzled: piece p of row r is at
// position p ^ r % 8.

// Operands of the instruction for each number of columns: the sums, the matrices, and whether to add to the sums.
#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define FIRST_TEN "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,"
#define FIRST_HUNDRED FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9)
#define EIGHT(i) \
    "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define SIXTEEN(i) EIGHT(i), EIGHT(i + 8)
#define THIRTY_TWO(i) SIXTEEN(i), SIXTEEN(i + 16)
#define FORTY_EIGHT(i) THIRTY_TWO(i), SIXTEEN(i + 32)
#if PRODUCT_COLUMNS == 32
#define SHAPE "m64n32k16"
#define SUMS FIRST_TEN "%10,%11,%12,%13,%14,%15"
#define LEFT "%16"
#define RIGHT "%17"
#define ADDS "%18"
#define OUTPUTS SIXTEEN(0)
#elif PRODUCT_COLUMNS == 64
#define SHAPE "m64n64k16"
#define SUMS FIRST_TEN TEN(1) TEN(2) "%30,%31"
#define LEFT "%32"
#define RIGHT "%33"
#define ADDS "%34"
#define OUTPUTS THIRTY_TWO(0)
#elif PRODUCT_COLUMNS == 96
#define SHAPE "m64n96k16"
#define SUMS FIRST_TEN TEN(1) TEN(2) TEN(3) "%40,%41,%42,%43,%44,%45,%46,%47"
#define LEFT "%48"
#define RIGHT "%49"
#define ADDS "%50"
#define OUTPUTS FORTY_EIGHT(0)
#elif PRODUCT_COLUMNS == 128
#define SHAPE "m64n128k16"
#define SUMS FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63"
#define LEFT "%64"
#define RIGHT "%65"
#define ADDS "%66"
#define OUTPUTS FORTY_EIGHT(0), SIXTEEN(48)
#elif PRODUCT_COLUMNS == 192
#define SHAPE "m64n192k16"
#define SUMS FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) "%90,%91,%92,%93,%94,%95"
#define LEFT "%96"
#define RIGHT "%97"
#define ADDS "%98"
#define OUTPUTS FORTY_EIGHT(0), FORTY_EIGHT(48)
#elif PRODUCT_COLUMNS == 256
#define SHAPE "m64n256k16"
#define SUMS FIRST_HUNDRED TEN(10) TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127"
#define LEFT "%128"
#define RIGHT "%129"
#define ADDS "%130"
#define OUTPUTS FORTY_EIGHT(0), FORTY_EIGHT(48), THIRTY_TWO(96)
#endif
#if BFLOAT16
#define TYPES ".f32.bf16.bf16 "
#else
#define TYPES ".f32.f16.f16 "
#endif

// sums = left @ right^T, or sums += left @ right^T if `add`, 16 columns deep. left, right: addresses in the form of `piece_at`.
__device__ __forceinline__ void multiply(float (&sums)[PRODUCT_COLUMNS / 2], unsigned left, unsigned right, int add) {
    asm volatile("{.reg .pred p; .reg .b64 x, w; setp.ne.b32 p, " ADDS ", 0; mov.b64 x, {" LEFT ", 0x40000040}; mov.b64 w, {" RIGHT ", 0x40000040};"
                 "wgmma.mma_async.sync.aligned." SHAPE TYPES "{" SUMS "}, x, w, p, 1, 1, 0, 0;}"
                 : OUTPUTS : "r"(left), "r"(right), "r"(add));
}
__device__ __forceinline__ unsigned piece_at(unsigned address) { return address >> 4 | 1 << 16; }
