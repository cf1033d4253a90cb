// Ones at listed places, added up for all columns of a slice. What a kind of lists has to say:
//
//     Bits                a slice, or what a register holds of several
//     kPlaces             places of a register: one, or two side by side
//     Four                the next places of four registers, read at once; at(base, k) loads register k
//     kUnrolled           whether there are instructions and registers enough to do without loops
#pragma once

#include <cstring>

#include "numbers.h"

namespace xncaps::XNCAPS_ISA {

// A run of registers is added up at once; lists are filled up to whole ones.
template <class Kind>
constexpr int kRunDigits = Kind::kUnrolled ? 3 : 4;
template <class Kind>
constexpr int64_t kPlacesOfRun = int64_t{Kind::kPlaces} << kRunDigits<Kind>;
constexpr int kMostRuns = 24;  // without a loop

template <class Kind>
inline int64_t runs_for(int64_t places) {
  return (places + kPlacesOfRun<Kind> - 1) / kPlacesOfRun<Kind>;
}

// Adds 2^Level registers to the digits below; returns what is carried, which is worth 2^Level. The digits before the
// first registers are zeros, and not written.
template <class Kind, int Level, bool First>
__attribute__((always_inline)) inline typename Kind::Bits add_places(const typename Kind::Base* base,
                                                                     const uint16_t* places,
                                                                     typename Kind::Bits* digit) {
  using Bits = typename Kind::Bits;
  if constexpr (Level == 2) {
    const typename Kind::Four four(places);
    Bits sum = four.at(base, 0);
    const Bits a = add(sum, four.at(base, 1), four.at(base, 2));
    if constexpr (First) {
      const Bits b = half_add(sum, four.at(base, 3));
      digit[0] = sum;
      digit[1] = a;
      return half_add(digit[1], b);
    } else {
      const Bits b = add(digit[0], sum, four.at(base, 3));
      return add(digit[1], a, b);
    }
  } else {
    constexpr int kHalf = Kind::kPlaces << (Level - 1);
    Bits a = add_places<Kind, Level - 1, First>(base, places, digit);
    const Bits b = add_places<Kind, Level - 1, false>(base, places + kHalf, digit);
    if constexpr (First) {
      const Bits carry = half_add(a, b);
      digit[Level - 1] = a;
      return carry;
    } else {
      return add(digit[Level - 1], a, b);
    }
  }
}

// Carries of runs are counted as a binary number counts: at each level one waits for the next. What is there before run
// so-and-so is known when this is compiled.
template <class Kind, int Run, int Level>
__attribute__((always_inline)) inline void count_carry(typename Kind::Bits carry, typename Kind::Bits* high,
                                                       typename Kind::Bits* waiting) {
  if constexpr ((Run >> Level & 1) == 0) {
    waiting[Level] = carry;
  } else if constexpr (Run >> (Level + 1) == 0) {
    high[Level] = waiting[Level];
    const auto next = half_add(high[Level], carry);
    count_carry<Kind, Run, Level + 1>(next, high, waiting);
  } else {
    const auto next = add(high[Level], waiting[Level], carry);
    count_carry<Kind, Run, Level + 1>(next, high, waiting);
  }
}

template <class Kind, int Run, int Runs>
__attribute__((always_inline)) inline void add_runs_from(const typename Kind::Base* base, const uint16_t* places,
                                                         typename Kind::Bits* low, typename Kind::Bits* high,
                                                         typename Kind::Bits* waiting) {
  if constexpr (Run < Runs) {
    const uint16_t* const from = places + Run * kPlacesOfRun<Kind>;
    count_carry<Kind, Run, 0>(add_places<Kind, kRunDigits<Kind>, Run == 0>(base, from, low), high, waiting);
    add_runs_from<Kind, Run + 1, Runs>(base, places, low, high, waiting);
  }
}

// The digits of what waits and what was added up, from a level on, with a carry from below or none.
template <class Kind, int Runs, int Level, bool Carried>
__attribute__((always_inline)) inline void finish(typename Kind::Bits carry, typename Kind::Bits* high,
                                                  typename Kind::Bits* waiting, typename Kind::Bits* to) {
  if constexpr (Runs >> Level != 0) {
    constexpr bool kWaits = Runs >> Level & 1, kAdded = Runs >> (Level + 1) != 0;
    auto& digit = kAdded ? high[Level] : waiting[Level];
    constexpr bool kCarries = kAdded ? kWaits || Carried : Carried;
    if constexpr (kAdded && kWaits && Carried) {
      carry = add(digit, waiting[Level], carry);
    } else if constexpr (kAdded && kWaits) {
      carry = half_add(digit, waiting[Level]);
    } else if constexpr (kCarries) {
      carry = half_add(digit, carry);
    }
    to[Level] = digit;
    finish<Kind, Runs, Level + 1, kCarries>(carry, high, waiting, to);
  } else if constexpr (Carried) {
    to[Level] = carry;
  }
}

// One function for each number of runs: nothing is looked up but the places, and digits stay in registers.
template <class Kind, int Runs>
__attribute__((noinline)) inline void add_runs(const typename Kind::Base* base, const uint16_t* places,
                                               typename Kind::Bits* digit) {
  using Bits = typename Kind::Bits;
  constexpr int kLow = kRunDigits<Kind>;
  Bits low[kLow], high[5], waiting[5];
  static_assert(kMostRuns < 1 << 5);
  add_runs_from<Kind, 0, Runs>(base, places, low, high, waiting);
  for (int k = 0; k < kLow; ++k) digit[k] = low[k];
  finish<Kind, Runs, 0, false>(Bits{}, high, waiting, digit + kLow);
}

template <class Kind>
struct AddRuns {
  using Function = void (*)(const typename Kind::Base*, const uint16_t*, typename Kind::Bits*);
  static constexpr Function of[kMostRuns] = {
      add_runs<Kind, 1>,  add_runs<Kind, 2>,  add_runs<Kind, 3>,  add_runs<Kind, 4>,  add_runs<Kind, 5>,
      add_runs<Kind, 6>,  add_runs<Kind, 7>,  add_runs<Kind, 8>,  add_runs<Kind, 9>,  add_runs<Kind, 10>,
      add_runs<Kind, 11>, add_runs<Kind, 12>, add_runs<Kind, 13>, add_runs<Kind, 14>, add_runs<Kind, 15>,
      add_runs<Kind, 16>, add_runs<Kind, 17>, add_runs<Kind, 18>, add_runs<Kind, 19>, add_runs<Kind, 20>,
      add_runs<Kind, 21>, add_runs<Kind, 22>, add_runs<Kind, 23>, add_runs<Kind, 24>};
};

template <class Kind>
__attribute__((noinline)) inline void add_in_loop(const typename Kind::Base* base, const uint16_t* places, int64_t runs,
                                                  typename Kind::Bits* digit) {
  using Bits = typename Kind::Bits;
  constexpr int kLow = kRunDigits<Kind>;
  Bits low[kLow] = {}, waiting[kPlaceDigits - kLow];
  Bits* const high = digit + kLow;
  for (int64_t run = 1; run <= runs; ++run, places += kPlacesOfRun<Kind>) {
    Bits carry = add_places<Kind, kLow, false>(base, places, low);
    int level = 0;
    for (; (run >> level & 1) == 0; ++level) carry = add(high[level], waiting[level], carry);
    if (run == int64_t{1} << level) high[level] = Bits{};
    waiting[level] = carry;
  }
  for (int k = 0; k < kLow; ++k) digit[k] = low[k];
  Bits carry{};
  int level = 0;
  for (; runs >> level != 0; ++level) {
    carry = add(high[level], runs >> level & 1 ? waiting[level] : Bits{}, carry);
  }
  if (kLow + level < kPlaceDigits) high[level] = carry;
}

// The ones at so many places, of which lists are filled up to whole runs with a place where there are none.
template <class Kind>
inline void count_places(const typename Kind::Base* base, const uint16_t* places, int64_t count,
                         Numbers<Kind>& to) {
  int64_t runs = runs_for<Kind>(count);
  if constexpr (!Kind::kUnrolled) {
    to.most = count;
    add_in_loop<Kind>(base, places, runs, to.digit);
  } else {
    const int64_t first = runs < kMostRuns ? runs : kMostRuns;
    to.most = first << kRunDigits<Kind>;
    if (first > 0) AddRuns<Kind>::of[first - 1](base, places, to.digit);
    for (runs -= first; runs > 0; runs -= kMostRuns) {
      Numbers<Kind> more;
      places += kMostRuns * kPlacesOfRun<Kind>;
      const int64_t some = runs < kMostRuns ? runs : kMostRuns;
      AddRuns<Kind>::of[some - 1](base, places, more.digit);
      more.most = some << kRunDigits<Kind>;
      add_numbers(to, to, more);
    }
  }
}

}  // namespace xncaps::XNCAPS_ISA
