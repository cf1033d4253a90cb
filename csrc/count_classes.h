// The core of products of signs for many rows and columns: four rows at a time.
//
// The bits in which a row and a column differ are the ones of the row and those of the column, less twice the ones
// that they share. Of four rows the bits at one place are one of 16 patterns: places of the same pattern are a class. For all
// columns of a slice (slices.h) the ones at the places of each class are added up by full adders, once for four rows:
//
//     place         0 1 2 3 4 5 6 7 ...       class 2 (row 1 only):   places 1, 5, ...
//     row 0         1 0 1 0 0 0 1 1           class 5 (rows 0 and 2): places 0, 2, 7, ...
//     row 1         0 1 0 0 1 1 0 0           class 0 (none of them): not counted
//     row 2         1 0 1 0 1 0 0 1
//     row 3         0 0 0 0 0 0 1 0           ones in row 0 and a column = its ones in classes 1, 3, 5, 7, ...
//
// So a place costs one adder for four rows, and nothing where all of them have zeros. What is left is done once for a
// group of rows (the lists of places, for all columns), once for a group and a slice (the slices of its columns), or
// once for four rows and a slice (sums of classes, and numbers made of their digits).
#pragma once

#include <cstring>

#include "places.h"

namespace xncaps::XNCAPS_ISA {

struct InClasses {};

constexpr int64_t kClassGroup = 256;  // rows for which slices are made once
// Numbers have digits enough, and so have places, of which one more is where all columns have zeros.
static_assert(kClassMostBytes * 8 < 1 << kPlaceDigits && kPlaceDigits <= 16);

// Whether this core is the fastest for so many rows, and so many blocks of columns of so many bytes.
inline bool by_classes(int64_t rows, int64_t blocks, int64_t bytes) {
  return rows >= kClassRows && blocks >= kClassBlocks && bytes >= kClassBytes && bytes <= kClassMostBytes;
}

// Lists of places, of which each has a slice.
struct Listed {
  using Bits = Slice;
  using Base = Slice;
  static constexpr int kPlaces = 1;
  static constexpr bool kUnrolled = false;
  struct Four {
    uint64_t places;  // in whichever order
    explicit Four(const uint16_t* from) { std::memcpy(&places, from, sizeof places); }
    Bits at(const Base* slices, int k) const { return load_slice(slices + (places >> 16 * k & 0xffff)); }
  };
};
constexpr int64_t kListRun = kPlacesOfRun<Listed>;

// What is counted with for a group of rows.
struct ClassWork {
  int64_t quads, list_size;
  uint16_t* places;      // lists of all quads, one after the other; those of a quad are its classes'
  int32_t* sizes;        // of the lists
  uint16_t* all;         // every place
  uint16_t* unsorted;    // a list for each class with room for every place
  Slice* slices;         // of all places, and one of zeros
  int32_t* totals;       // ones of every column

  ClassWork(int64_t rows, int64_t bytes, Parts& parts)
      : quads((rows + kQuad - 1) / kQuad),
        list_size(bytes * 8 + kClasses * kListRun),
        places(parts.take<uint16_t>(quads * list_size)),
        sizes(parts.take<int32_t>(quads * kClasses)),
        all(parts.take<uint16_t>(list_size)),
        unsorted(parts.take<uint16_t>(kClasses * list_size)),
        slices(parts.take<Slice>(bytes * 8 + 1)),
        totals(parts.take<int32_t>(kSliceColumns)) {}

  // Copies the first so many places, filled up to whole runs with the place where columns have zeros.
  static uint16_t* copy_list(const uint16_t* from, int64_t count, uint16_t zero, uint16_t* to) {
    std::memcpy(to, from, count * sizeof *to);
    for (to += count; count % kListRun != 0; ++count) *to++ = zero;
    return to;
  }

  // Sorts the places of four rows by class.
  void sort(int64_t quad, const uint8_t* const* rows, int64_t bytes) {
    uint16_t* to[kClasses];
    for (int k = 0; k < kClasses; ++k) to[k] = unsorted + k * list_size;
    for (int64_t n = 0; n < bytes; ++n) {
      uint32_t classes = 0;
      for (int r = 0; r < kQuad; ++r) classes |= kSpread.of[rows[r][n]] << r;
      for (int k = 0; k < 8; ++k, classes >>= kQuad) {
        *to[classes % kClasses]++ = static_cast<uint16_t>(8 * n + k);
      }
    }
    uint16_t* list = places + quad * list_size;
    for (int k = 1; k < kClasses; ++k) {
      const uint16_t* from = unsorted + k * list_size;
      const int64_t count = to[k] - from;
      sizes[quad * kClasses + k] = static_cast<int32_t>(count);
      list = copy_list(from, count, static_cast<uint16_t>(bytes * 8), list);
    }
  }

  // Makes the slices of some blocks of columns; lanes that are not there have zeros.
  void slice(const uint8_t* columns, int64_t blocks, int64_t bytes) {
    alignas(64) static constexpr uint8_t kZeros[kBlock] = {};
    constexpr int kJoined = sizeof(Slice) / kBlock;
    for (int64_t n = 0; n < bytes; ++n) {
      const auto at = [&](int64_t block) {
        return block < blocks ? columns + (block * bytes + n) * kBlock : kZeros;
      };
      Slice eight[8];
#pragma GCC unroll 8
      for (int m = 0; m < 8; ++m) eight[m] = join_bytes(at(kJoined * m), at(kJoined * m + 1));
      turn_bits(eight);
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) store_slice(slices + 8 * n + k, eight[k]);
    }
    store_slice(slices + 8 * bytes, Slice{});
  }
};

inline int64_t code_room(InClasses, int64_t bytes, int64_t) { return bytes; }
inline int64_t bytes_of_work(InClasses, int64_t rows, int64_t bytes) {
  Parts parts(nullptr);
  ClassWork(rows, bytes, parts);
  return parts.used();
}
inline int64_t blocks_of_tile(InClasses, int64_t) { return kSliceBlocks; }
inline int64_t rows_of_tile(InClasses) { return kQuad; }
inline int64_t rows_of_group(InClasses) { return kClassGroup; }
inline int64_t most_blocks(InClasses) { return kSliceBlocks; }
inline int64_t blocks_copied(InClasses, int64_t blocks) { return (blocks - 1) % kSliceBlocks + 1; }  // one tile

// Sorts the places of all rows of a group.
inline void prepare(InClasses, int64_t count, int64_t, uint8_t* codes, int64_t stride, int64_t bytes, char* memory) {
  Parts parts(memory);
  ClassWork work(count, bytes, parts);
  for (int64_t k = 0; k < work.list_size; ++k) {
    work.all[k] = static_cast<uint16_t>(k < bytes * 8 ? k : bytes * 8);
  }
  for (int64_t quad = 0; quad < work.quads; ++quad) {
    const uint8_t* rows[kQuad];
    for (int64_t r = 0; r < kQuad; ++r) {
      const int64_t row = kQuad * quad + r < count ? kQuad * quad + r : count - 1;
      rows[r] = codes + row * stride;
    }
    work.sort(quad, rows, bytes);
  }
}

// counts[row][block][lane] as in count_bytes.h.
inline void count_any(InClasses, int64_t count, int64_t blocks, const uint8_t*, int64_t, int64_t bytes,
                      const uint8_t* columns, int32_t* counts, char* memory) {
  Parts parts(memory);
  ClassWork work(count, bytes, parts);
  work.slice(columns, blocks, bytes);
  const int64_t width = blocks * kBlock;
  Numbers<Listed> classes[kClasses], rows[kQuad];
  count_places<Listed>(work.slices, work.all, bytes * 8, classes[0]);
  const Written<Listed> totals(classes[0]);
  for (int64_t k = 0; k < width; ++k) work.totals[k] = totals.at(k);
  for (int64_t quad = 0; quad < work.quads; ++quad) {
    const uint16_t* list = work.places + quad * work.list_size;
    int32_t ones[kQuad] = {};
    for (int k = 1; k < kClasses; ++k) {
      const int32_t size = work.sizes[quad * kClasses + k];
      for (int r = 0; r < kQuad; ++r) ones[r] += k >> r & 1 ? size : 0;
      count_places<Listed>(work.slices, list, size, classes[k]);
      list += runs_for<Listed>(size) * kListRun;
    }
    add_classes(classes, rows);
    for (int64_t r = 0; r < kQuad && kQuad * quad + r < count; ++r, counts += width) {
      const Written<Listed> shared(rows[r]);
      for (int64_t k = 0; k < width; ++k) counts[k] = ones[r] + work.totals[k] - 2 * shared.at(k);
    }
  }
}

}  // namespace xncaps::XNCAPS_ISA
