// Numbers of columns whose digits lie in different slices (slices.h): a full adder adds up those of all columns at once.
#pragma once

#include "slices.h"

namespace xncaps::XNCAPS_ISA {

constexpr int kPlaceDigits = 16;

inline int digits_of(int64_t most) {
  return most == 0 ? 0 : 64 - __builtin_clzll(static_cast<unsigned long long>(most));
}

// A number for each column of a slice (Kind::Bits), none of them larger than `most`. It has as many digits as that takes;
// the others are not written.
template <class Kind>
struct Numbers {
  typename Kind::Bits digit[kPlaceDigits];
  int64_t most;

  int digits() const { return digits_of(most); }
};

// to = a + b; it may be one of them.
template <class Kind>
inline void add_numbers(Numbers<Kind>& to, const Numbers<Kind>& a, const Numbers<Kind>& b) {
  const Numbers<Kind>&longer = a.most < b.most ? b : a, &shorter = a.most < b.most ? a : b;
  using Bits = typename Kind::Bits;
  const int digits = longer.digits(), both = shorter.digits();
  to.most = a.most + b.most;
  Bits carry{};
  int k = 0;
  for (; k < both; ++k) {
    Bits sum = longer.digit[k];
    carry = add(sum, shorter.digit[k], carry);
    to.digit[k] = sum;
  }
  for (; k < digits; ++k) {
    Bits sum = longer.digit[k];
    carry = half_add(sum, carry);
    to.digit[k] = sum;
  }
  if (to.digits() > digits) to.digit[digits] = carry;
}

// Adds numbers up, digit by digit from the lowest on; carries stay for the next one.
template <class Kind>
struct AddTwo {
  typename Kind::Bits carry{};

  typename Kind::Bits operator()(typename Kind::Bits a, typename Kind::Bits b) {
    carry = add(a, b, carry);
    return a;
  }
};
template <class Kind>
struct AddFour {
  typename Kind::Bits one{}, two{}, three{};

  typename Kind::Bits operator()(typename Kind::Bits a, typename Kind::Bits b, typename Kind::Bits c,
                                 typename Kind::Bits d) {
    const auto first = add(a, b, c), second = add(a, d, one);
    three = add(a, two, three);
    one = first;
    two = second;
    return a;
  }
};

// Of four rows, whose places are sorted into 16 classes, from the numbers of all classes but the first: those of the
// rows, with zeros for the digits that they do not need. (In class k are the places of row r where bit r of k is 1.)
constexpr int kQuad = 4, kClasses = 1 << kQuad;
template <class Kind>
inline void add_classes(Numbers<Kind>* of, Numbers<Kind>* rows) {
  using Bits = typename Kind::Bits;
  int64_t most = 0;
  for (int k = 1; k < kClasses; ++k) most = of[k].most > most ? of[k].most : most;
  constexpr int64_t kMost = (1 << kPlaceDigits) - 1;  // as many digits as there are hold all that is counted
  for (int r = 0; r < kQuad; ++r) rows[r].most = most < kMost / (kClasses / 2) ? kClasses / 2 * most : kMost;
  const int digits = digits_of(most), all = rows[0].digits();
  for (int k = 1; k < kClasses; ++k) {
    for (int d = of[k].digits(); d < digits; ++d) {
      of[k].digit[d] = Bits{};
      asm volatile("" ::: "memory");  // a call of memset takes longer
    }
  }
  // Those of the first row, of the second, and of both; then of the other two.
  AddFour<Kind> lower, first, second, upper, third, fourth;
  AddTwo<Kind> sums[kQuad];
  const auto add_digits = [&](int d, const auto& digit) __attribute__((always_inline)) {
    const Bits a = lower(digit(3), digit(7), digit(11), digit(15));
    rows[0].digit[d] = sums[0](first(digit(1), digit(5), digit(9), digit(13)), a);
    rows[1].digit[d] = sums[1](second(digit(2), digit(6), digit(10), digit(14)), a);
    const Bits b = upper(digit(12), digit(13), digit(14), digit(15));
    rows[2].digit[d] = sums[2](third(digit(4), digit(5), digit(6), digit(7)), b);
    rows[3].digit[d] = sums[3](fourth(digit(8), digit(9), digit(10), digit(11)), b);
  };
  int d = 0;
  for (; d < digits; ++d) add_digits(d, [&](int k) { return of[k].digit[d]; });
  for (; d < all; ++d) add_digits(d, [](int) { return Bits{}; });
  for (; d < kPlaceDigits; ++d) {
    for (int r = 0; r < kQuad; ++r) rows[r].digit[d] = Bits{};
    asm volatile("" ::: "memory");  // a call of memset takes longer
  }
}

// The bits of a byte, four places apart: with those of four rows, each one place higher than the row before, there are
// the classes of 8 places.
struct Spread {
  uint32_t of[256];
  constexpr Spread() : of() {
    for (int byte = 0; byte < 256; ++byte) {
      for (int k = 0; k < 8; ++k) of[byte] |= static_cast<uint32_t>(byte >> k & 1) << kQuad * k;
    }
  }
};
constexpr Spread kSpread;

// The numbers as bytes of their lower digits, and of the upper ones: byte n of register m has that of the column whose
// bit in slices is bit m of byte n.
template <class Kind>
struct Written {
  using Bits = typename Kind::Bits;
  Bits low[8], high[8];

  explicit Written(const Numbers<Kind>& numbers) {
    const int digits = numbers.digits();
    for (int k = 0; k < 8; ++k) {
      low[k] = k < digits ? numbers.digit[k] : Bits{};
      high[k] = k + 8 < digits ? numbers.digit[k + 8] : Bits{};
    }
    turn_bits(low);
    turn_bits(high);
  }
  // Slices that turn_bits has made have column k in byte k of the registers.
  int32_t at(int64_t column) const {
    return reinterpret_cast<const uint8_t*>(low)[column] | reinterpret_cast<const uint8_t*>(high)[column] << 8;
  }
};

}  // namespace xncaps::XNCAPS_ISA
