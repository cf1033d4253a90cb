// How arrays lie in memory where many capsules (or outputs) are worked on at once.
//
// A laned array has `rows` rows of `count` lanes. It is cut into blocks of 32 lanes; each block holds
// all rows, one after the other. The last block is as narrow as what is left, so nothing is padded:
//
//     block 0: row 0 lanes 0..31 | row 1 lanes 0..31 | ...
//     block 1: row 0 lanes 32..63 | ...
//     last:    row 0 lanes 64..count-1 | ...
#pragma once

#include <cstdint>

namespace xncaps {

constexpr int64_t kBlock = 32;

namespace {  // compiled anew for every instruction set

inline int64_t bytes_for(int64_t bits) { return (bits + 7) / 8; }
inline int64_t blocks_for(int64_t count) { return (count + kBlock - 1) / kBlock; }
inline int64_t padded(int64_t count) { return blocks_for(count) * kBlock; }

// How many lanes the block has that starts at `first`.
inline int64_t width_at(int64_t first, int64_t count) {
  return count - first < kBlock ? count - first : kBlock;
}

// In a byte, the lower halves of groups of 2 * shift bits.
constexpr uint8_t lower_halves(int shift) { return shift == 4 ? 0x0f : shift == 2 ? 0x33 : 0x55; }

// Where (row, lane) is in a laned array.
inline int64_t laned(int64_t row, int64_t lane, int64_t rows, int64_t count) {
  const int64_t first = lane / kBlock * kBlock;
  return first * rows + row * width_at(first, count) + (lane - first);
}

}  // namespace
}  // namespace xncaps
