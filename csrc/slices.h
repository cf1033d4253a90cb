// Slices: registers full of bits, each of which belongs to another column. Numbers have their digits in different
// slices, so that a full adder of a few instructions adds up as many columns as a register has bits.
#pragma once

#include "blocks.h"

namespace xncaps::XNCAPS_ISA {

constexpr int64_t kSliceColumns = 8 * sizeof(Slice);
constexpr int kSliceBlocks = kSliceColumns / kBlock;

// Of eight registers of bytes: bit k of byte n of register m becomes bit m of byte n of register k. Makes slices of
// the bytes of columns, and numbers of the slices of their digits.
template <class V>
inline void turn_bits(V* a) {
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) exchange<4>(a[k], a[k + 4]);
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) exchange<2>(a[k + k / 2 * 2], a[k + k / 2 * 2 + 2]);
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) exchange<1>(a[2 * k], a[2 * k + 1]);
}

}  // namespace xncaps::XNCAPS_ISA
