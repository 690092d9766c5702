// Prefill: products of a warpgroup (wgmma), and what else is an instruction of its own there. Emulated threads have others of the same names.
#pragma once

// True for one thread of a warp, and the compiler knows it: such a thread starts copies without a loop over the warp.
__device__ __forceinline__ bool warp_elect() {
  uint32_t one;
  asm volatile("{ .reg .pred q; elect.sync _|q, 0xffffffff; selp.u32 %0, 1, 0, q; }" : "=r"(one));
  return one != 0;
}

// wgmma descriptor of an operand in shared memory: rows of 128, 64 or 32 bytes, 8 rows after 8 rows, whose 16-byte chunks are permuted by the
// row's number as the hardware has it (its swizzle of as many bytes).
template <uint32_t ROW> __device__ __forceinline__ uint64_t operand(uint32_t at) {
  constexpr uint64_t SWIZZLE = ROW == 128 ? 1 : ROW == 64 ? 2 : 3;
  return (uint64_t)(at >> 4) | 1ull << 16 | (uint64_t)(8 * ROW >> 4) << 32 | SWIZZLE << 62;
}

__device__ __forceinline__ void group_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <uint32_t LEFT> __device__ __forceinline__ void group_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

// c += a . b for a 64x16 a, and a b with 8 columns per tile of c. Rows of b in shared memory are its columns, or, if TRANSPOSED, its rows. A warp
// has 16 rows; a thread of it has columns lane % 4 * 2 and the next of each tile, of row lane / 4 and then of row lane / 4 + 8.
#define AMK_C2(J) "+f"(c[J][0]), "+f"(c[J][1]), "+f"(c[J][2]), "+f"(c[J][3]), "+f"(c[J + 1][0]), "+f"(c[J + 1][1]), "+f"(c[J + 1][2]), "+f"(c[J + 1][3])
#define AMK_C4(J) AMK_C2(J), AMK_C2(J + 2)
#define AMK_C8(J) AMK_C4(J), AMK_C4(J + 4)
#define AMK_REGISTERS_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define AMK_REGISTERS_16 AMK_REGISTERS_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define AMK_REGISTERS_32 AMK_REGISTERS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define AMK_REGISTERS_64 AMK_REGISTERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define AMK_REGISTERS_128 AMK_REGISTERS_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"\
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define AMK_GROUP_MULTIPLY(TILES, COLUMNS, REGISTERS, A, B, T, ...)                                                                                                     \
  template <bool TRANSPOSED = false> __device__ __forceinline__ void group_multiply(float (&c)[TILES][4], uint32_t const (&a)[4], uint64_t b) {                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32.f16.f16 {" REGISTERS "}, {" A "}, " B ", 1, 1, 1, " T ";"                                        \
                 : __VA_ARGS__                                                                                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((uint32_t)TRANSPOSED));                                                                      \
  }
AMK_GROUP_MULTIPLY(2, "16", AMK_REGISTERS_8, "%8,%9,%10,%11", "%12", "%13", AMK_C2(0))
AMK_GROUP_MULTIPLY(4, "32", AMK_REGISTERS_16, "%16,%17,%18,%19", "%20", "%21", AMK_C4(0))
AMK_GROUP_MULTIPLY(8, "64", AMK_REGISTERS_32, "%32,%33,%34,%35", "%36", "%37", AMK_C8(0))
AMK_GROUP_MULTIPLY(16, "128", AMK_REGISTERS_64, "%64,%65,%66,%67", "%68", "%69", AMK_C8(0), AMK_C8(8))
AMK_GROUP_MULTIPLY(32, "256", AMK_REGISTERS_128, "%128,%129,%130,%131", "%132", "%133", AMK_C8(0), AMK_C8(8), AMK_C8(16), AMK_C8(24))
#undef AMK_GROUP_MULTIPLY

// Registers that a thread of a warpgroup has from here on: fewer, or those that others gave.
template <uint32_t COUNT> __device__ __forceinline__ void registers_give() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <uint32_t COUNT> __device__ __forceinline__ void registers_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
